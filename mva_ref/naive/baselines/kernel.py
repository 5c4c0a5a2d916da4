"""Kernel attention: the exponential of softmax replaced by a product of features, so that the past fits into two sums."""

import torch
from torch import Tensor, einsum

from ...types import FeatureState
from ..orders import ratio
from ..softmax_attention import group
from ..writes import span_sum


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


def projected(x: Tensor, W: Tensor | None, b: Tensor | None) -> Tensor:
    """A learned linear map of each head.

    Equation:  y = x W + b
    Shapes:    x [B, T, H, D], W [H, D, E] or None for the identity, b [H, E] or None for 0 -> [B, T, H, E]
    Numerics:  in the dtype of x.
    Source:    T2R (2103.13076), Hedgehog (2402.04347).

    >>> projected(torch.ones(1, 1, 1, 2), torch.ones(1, 2, 3), torch.ones(1, 3)).flatten().tolist()
    [3.0, 3.0, 3.0]
    """
    y = x if W is None else einsum("bthd,hde->bthe", x, W)
    return y if b is None else y + b


def kernel_matrix(
    a: Tensor, v: Tensor, phi_q: Tensor, phi_k: Tensor, key_mask: Tensor | None, s0: FeatureState | None, eps: float = 0.0,
    g: Tensor | None = None,
) -> tuple[Tensor, FeatureState]:
    """Kernel attention as a T x T matrix.

    Equation:  o_t = (sum_{i <= t} a_ti v_i + phi(q_t) S_0) / (sum_{i <= t} a_ti + phi(q_t).z_0 + eps);
               with a decay g, a_ti is times exp(sum_{i < j <= t} g_j), and the state times exp(sum_{j <= t} g_j)
    Shapes:    a [B, T, H, R, T] kernel values, v [B, T, H, V], phi_q [B, T, HQ, F], phi_k [B, T, H, F], g [B, T, H]
               -> o [B, T, HQ, V], state
    Numerics:  a denominator of exactly 0 gives o = 0; features are used for the states alone; exponents are <= 0.
    Source:    2006.16236.

    >>> x = torch.ones(1, 3, 1, 2); kernel_matrix(torch.ones(1, 3, 1, 1, 3), x, x, x, None, None)[1].z.tolist()
    [[[3.0, 3.0]]]
    """
    T, keep = v.shape[1], seen(v, key_mask)
    visible = torch.ones(T, T, dtype=torch.bool, device=v.device).tril() & (keep > 0)[:, None]
    a, phi_k = torch.where(visible[:, :, None, None], a, 0), phi_k * keep[..., None, None]
    kept = v.new_ones(v.shape[:3])
    if g is not None:
        g = torch.where(keep[..., None] > 0, g, 0)
        left, kept = span_sum(g[..., None])[..., 0].exp(), g.cumsum(1).exp()                       # b h t i, b t h
        a = a * left.transpose(1, 2)[:, :, :, None]
        phi_k = phi_k * left[:, :, -1].transpose(1, 2)[..., None] if T else phi_k
    numerator, Z = einsum("bthri,bihv->bthrv", a, v), a.sum(-1)
    S, z = einsum("bihf,bihv->bhfv", phi_k, v), phi_k.sum(1)
    if s0 is not None:
        queries = group(phi_q, v.shape[2]) * kept[..., None, None]
        numerator = numerator + einsum("bthrf,bhfv->bthrv", queries, s0.S)
        Z = Z + einsum("bthrf,bhf->bthr", queries, s0.z)
        end = kept[:, -1] if T else v.new_ones(z.shape[:2])
        S, z = S + end[..., None, None] * s0.S, z + end[..., None] * s0.z
    return ratio(numerator, Z + eps).flatten(2, 3), FeatureState(S, z)


def kernel_steps(
    phi_q: Tensor, phi_k: Tensor, v: Tensor, key_mask: Tensor | None, s0: FeatureState | None, eps: float = 0.0,
    g: Tensor | None = None,
) -> tuple[Tensor, FeatureState]:
    """Kernel attention one token at a time.

    Equation:  S_t = e^{g_t} S_{t-1} + phi(k_t) (x) v_t,   z_t = e^{g_t} z_{t-1} + phi(k_t),   o_t = phi(q_t) S_t / (phi(q_t).z_t + eps)
    Shapes:    phi_q [B, T, HQ, F], phi_k [B, T, H, F], v [B, T, H, V], g [B, T, H] or None for 0
               -> o [B, T, HQ, V], state S [B, H, F, V], z [B, H, F]
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
        if g is not None:
            decay = torch.where(keep[:, t, None] > 0, g[:, t], 0).exp()
            S, z = decay[..., None, None] * S, decay[..., None] * z
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
