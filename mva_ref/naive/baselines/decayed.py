"""Linear recurrences with decay: what GLA, RetNet, SUPRA and Mamba-2 share."""

import torch
from torch import Tensor, einsum

from ...types import MatrixState
from ..softmax_attention import group
from ..writes import span_sum
from .kernel import seen


def decayed_matrix(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float, key_mask: Tensor | None, s0: MatrixState | None
) -> tuple[Tensor, MatrixState]:
    """A decayed linear recurrence as a T x T matrix.

    Equation:  o_t = sum_{i <= t} A_ti v_i + scale (q_t * e^{G_t}) S_0,   A_ti = scale sum_d q_td k_id exp(sum_{i < j <= t} g_jd)
    Shapes:    q [B, T, HQ, D], k [B, T, H, D], v [B, T, H, V], g [B, T, H, D] or [B, T, H, 1] -> o [B, T, HQ, V], state S [B, H, D, V]
    Numerics:  every exponent is <= 0; spans are summed one by one, so gates of -inf are exact.
    Source:    GLA (2312.06635), parallel form.

    >>> x = torch.ones(1, 3, 1, 1); decayed_matrix(x, x, x, torch.full((1, 3, 1, 1), -torch.inf), 1.0, None, None)[0].flatten().tolist()
    [1.0, 1.0, 1.0]
    """
    T, keep = v.shape[1], seen(v, key_mask)
    g = torch.where(keep[..., None, None] > 0, g, 0).expand(*k.shape[:3], -1)
    k = k * keep[..., None, None]
    causal = torch.ones(T, T, dtype=torch.bool, device=v.device).tril()
    left = torch.where(causal[..., None], span_sum(g).exp(), 0).expand(-1, -1, -1, -1, k.shape[-1])     # b h t i d
    queries = scale * group(q, v.shape[2])
    o = einsum("bthri,bihv->bthrv", einsum("bthrd,bihd,bhtid->bthri", queries, k, left), v)
    S = einsum("bihd,bhid,bihv->bhdv", k, left[:, :, -1], v) if T else v.new_zeros(v.shape[0], v.shape[2], k.shape[-1], v.shape[-1])
    if s0 is not None:
        kept = g.cumsum(1).exp().expand(k.shape)
        o = o + einsum("bthrd,bthd,bhdv->bthrv", queries, kept, s0.S)
        S = S + (kept[:, -1, ..., None] if T else 1) * s0.S
    return o.flatten(2, 3), MatrixState(S)


def decayed_steps(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float, key_mask: Tensor | None, s0: MatrixState | None
) -> tuple[Tensor, MatrixState]:
    """A decayed linear recurrence one token at a time.

    Equation:  S_t = diag(e^{g_t}) S_{t-1} + k_t (x) v_t,   o_t = scale q_t S_t
    Shapes:    as `decayed_matrix`
    Numerics:  one decay a step.
    Source:    GLA (2312.06635).

    >>> x = torch.ones(1, 3, 1, 1); decayed_steps(x, x, x, torch.zeros(1, 3, 1, 1), 1.0, None, None)[0].flatten().tolist()
    [1.0, 2.0, 3.0]
    """
    (B, T, H, V), D, keep = v.shape, k.shape[-1], seen(v, key_mask)
    S = s0.S if s0 is not None else v.new_zeros(B, H, D, V)
    queries, o = group(q, H), []
    for t in range(T):
        here = keep[:, t, None, None, None] > 0
        S = torch.where(here, g[:, t].exp()[..., None] * S + k[:, t, ..., None] * v[:, t, :, None], S)
        o.append(scale * einsum("bhrd,bhdv->bhrv", queries[:, t], S))
    return torch.stack(o, 1).flatten(2, 3) if o else v.new_zeros(B, 0, q.shape[2], V), MatrixState(S)
