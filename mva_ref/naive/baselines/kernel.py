"""Kernel attention: the exponential of softmax replaced by a product of features, so that the past fits into two sums."""

import torch
from torch import Tensor, einsum

from ...types import FeatureState
from ..orders import ratio
from ..softmax_attention import group


def seen(like: Tensor, key_mask: Tensor | None) -> Tensor:
    """1 for a token that counts, 0 for a masked one.

    Equation:  m_t in {0, 1}
    Shapes:    like [B, T, ...], key_mask bool [B, T] -> [B, T]
    Numerics:  exact.
    Source:    a masked token is neither seen nor written.

    >>> seen(torch.zeros(1, 2, 1), torch.tensor([[True, False]])).tolist()
    [[1.0, 0.0]]
    """
    return like.new_ones(like.shape[:2]) if key_mask is None else key_mask.to(like.dtype)


def kernel_matrix(
    a: Tensor, v: Tensor, phi_q: Tensor, phi_k: Tensor, key_mask: Tensor | None, s0: FeatureState | None, eps: float = 0.0
) -> tuple[Tensor, FeatureState]:
    """Kernel attention as a T x T matrix.

    Equation:  o_t = (sum_{i <= t} a_ti v_i + phi(q_t) S_0) / (sum_{i <= t} a_ti + phi(q_t).z_0 + eps)
    Shapes:    a [B, T, H, R, T] kernel values, v [B, T, H, V], phi_q [B, T, HQ, F], phi_k [B, T, H, F] -> o [B, T, HQ, V], state
    Numerics:  a denominator of exactly 0 gives o = 0; features are used for the states alone.
    Source:    2006.16236.

    >>> x = torch.ones(1, 3, 1, 2); kernel_matrix(torch.ones(1, 3, 1, 1, 3), x, x, x, None, None)[1].z.tolist()
    [[[3.0, 3.0]]]
    """
    T, keep = v.shape[1], seen(v, key_mask)
    visible = torch.ones(T, T, dtype=torch.bool, device=v.device).tril() & (keep > 0)[:, None]
    a = torch.where(visible[:, :, None, None], a, 0)
    numerator, Z = einsum("bthri,bihv->bthrv", a, v), a.sum(-1)
    phi_k = phi_k * keep[..., None, None]
    S, z = einsum("bihf,bihv->bhfv", phi_k, v), phi_k.sum(1)
    if s0 is not None:
        queries = group(phi_q, v.shape[2])
        numerator = numerator + einsum("bthrf,bhfv->bthrv", queries, s0.S)
        Z = Z + einsum("bthrf,bhf->bthr", queries, s0.z)
        S, z = S + s0.S, z + s0.z
    return ratio(numerator, Z + eps).flatten(2, 3), FeatureState(S, z)


def kernel_steps(
    phi_q: Tensor, phi_k: Tensor, v: Tensor, key_mask: Tensor | None, s0: FeatureState | None, eps: float = 0.0
) -> tuple[Tensor, FeatureState]:
    """Kernel attention one token at a time.

    Equation:  S_t = S_{t-1} + phi(k_t) (x) v_t,   z_t = z_{t-1} + phi(k_t),   o_t = phi(q_t) S_t / (phi(q_t).z_t + eps)
    Shapes:    phi_q [B, T, HQ, F], phi_k [B, T, H, F], v [B, T, H, V] -> o [B, T, HQ, V], state S [B, H, F, V], z [B, H, F]
    Numerics:  a denominator of exactly 0 gives o = 0.
    Source:    2006.16236.

    >>> x = torch.ones(1, 3, 1, 2); kernel_steps(x, x, x, None, None)[0].flatten().tolist()
    [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    """
    (B, T, H, V), F, keep = v.shape, phi_k.shape[-1], seen(v, key_mask)
    queries = group(phi_q, H)
    S, z = s0 or (v.new_zeros(B, H, F, V), v.new_zeros(B, H, F))
    o = []
    for t in range(T):
        key = keep[:, t, None, None] * phi_k[:, t]
        S, z = S + key[..., None] * v[:, t, :, None], z + key
        Z = einsum("bhrf,bhf->bhr", queries[:, t], z) + eps
        o.append(einsum("bhrf,bhfv->bhrv", queries[:, t], S) / torch.where(Z == 0, torch.inf, Z)[..., None])
    out = torch.stack(o, 1).flatten(2, 3) if o else v.new_zeros(B, 0, phi_q.shape[2], V)
    return out, FeatureState(S, z)


def products(phi_q: Tensor, phi_k: Tensor) -> Tensor:
    """Kernel values from features.

    Equation:  a_ti = phi(q_t).phi(k_i)
    Shapes:    phi_q [B, T, HQ, F], phi_k [B, T, H, F] -> [B, T, H, R, T]
    Numerics:  in the dtype of its inputs.
    Source:    2006.16236.

    >>> x = torch.ones(1, 2, 1, 3); products(x, x).flatten().tolist()
    [3.0, 3.0, 3.0, 3.0]
    """
    return einsum("bthrf,bihf->bthri", group(phi_q, phi_k.shape[2]), phi_k)
