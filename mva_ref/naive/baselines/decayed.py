"""Linear recurrences with decay: what GLA, RetNet, SUPRA, RWKV-6 and Mamba share."""

import torch
from torch import Tensor, einsum

from ...types import MatrixState
from ..softmax_attention import group
from ..writes import span_sum
from .kernel import seen


def per_token(head_decay: Tensor, like: Tensor) -> Tensor:
    """One fixed log decay a head, as a decay of every token.

    Equation:  g_th = g_h
    Shapes:    head_decay [H], like [B, T, H, ...] -> [B, T, H, 1]
    Numerics:  in the dtype of `like`.
    Source:    RetNet (2307.08621).

    >>> per_token(torch.tensor([-1.0, -2.0]), torch.zeros(1, 1, 2, 4)).tolist()
    [[[[-1.0], [-2.0]]]]
    """
    return head_decay.to(like)[:, None].expand(*like.shape[:3], 1)


def time_decay(dt: Tensor, A: Tensor) -> Tensor:
    """The log decay over a step of time.

    Equation:  g = dt A
    Shapes:    dt and A that broadcast, A in [-inf, 0], dt in [0, inf)
    Numerics:  no time, no decay: 0 for dt = 0 even at A = -inf; gradients are finite there too.
    Source:    Mamba (2312.00752), Mamba-2 (2405.21060).

    >>> time_decay(torch.tensor([0.0, 2.0]), torch.tensor([[-1.0], [-torch.inf]])).tolist()
    [[-0.0, -2.0], [0.0, -inf]]
    """
    finite = A.isfinite()
    return torch.where(finite, dt * torch.where(finite, A, 0), torch.where(dt > 0, -torch.inf, 0))


def skipped(skip: Tensor, v: Tensor, q: Tensor, key_mask: Tensor | None) -> Tensor:
    """What a token adds to its own row past the state.

    Equation:  skip v_t
    Shapes:    skip [H, V] or [H, 1], v [B, T, H, V], q [B, T, HQ, D] -> [B, T, HQ, V]
    Numerics:  0 for a masked token, which nobody sees.
    Source:    Mamba (2312.00752), its D.

    >>> skipped(torch.tensor([[2.0]]), torch.ones(1, 1, 1, 1), torch.ones(1, 1, 2, 1), None).flatten().tolist()
    [2.0, 2.0]
    """
    own = skip * v * seen(v, key_mask)[..., None, None]
    return own.repeat_interleave(q.shape[2] // v.shape[2], 2)


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
