"""How the past is written into M slots, as a T x T x M map. Theory: docs/theory/slots.md (P9 to P12)."""

from typing import NamedTuple

import torch
from torch import Tensor, einsum

from .softmax_attention import group


class Written(NamedTuple):
    """omega [B, H, T, T, M]: how much of token i is in slot c at time t; kept [B, T, H, M]: how much of the initial state is."""

    omega: Tensor
    kept: Tensor


def span_sum(g: Tensor) -> Tensor:
    """Sum of g over the open-closed span (i, t], for every pair i <= t.

    Equation:  sum_{i < j <= t} g_j[c]
    Shapes:    g [B, T, H, M] -> [B, H, T, T, M] (t first, then i); 0 on the diagonal and above it.
    Numerics:  each span is summed on its own. The shorter G_t - G_i loses digits and is NaN once a gate is -inf.
    Source:    P9, P28.

    >>> span_sum(torch.tensor([0.0, -1.0, -2.0]).view(1, 3, 1, 1))[0, 0, :, :, 0].tolist()
    [[0.0, 0.0, 0.0], [-1.0, 0.0, 0.0], [-3.0, -2.0, 0.0]]
    """
    T = g.shape[1]
    j_after_i = torch.ones(T, T, dtype=torch.bool, device=g.device).tril(-1)
    spans = torch.where(j_after_i[..., None], g.movedim(1, 2)[:, :, :, None], 0)
    return spans.cumsum(2)


def write_map(g: Tensor) -> Written:
    """How much of token i is left in slot c at time t.

    Equation:  Omega[t, i, c] = w_i[c] exp(sum_{i < j <= t} g_j[c]) for i <= t,   w = 1 - exp(g),   kept_t = exp(sum_{j <= t} g_j)
    Shapes:    g [B, T, H, M], natural-log decay in [-inf, 0] -> omega [B, H, T, T, M], kept [B, T, H, M]
    Numerics:  every exponent is <= 0; w = -expm1(g) keeps weak writes; future tokens are exactly 0.
    Source:    P9; the recurrence of ABC (2110.02488), GSA (2409.07146) and MetaLA (2411.10741).

    A gate of -inf replaces what was there:

    >>> write_map(torch.tensor([-1.0, -torch.inf]).view(1, 2, 1, 1)).omega[0, 0, 1, :, 0].tolist()
    [0.0, 1.0]
    """
    T = g.shape[1]
    seen = torch.ones(T, T, dtype=torch.bool, device=g.device).tril()
    left = torch.where(seen[..., None], span_sum(g).exp(), 0)
    return Written(left * -torch.expm1(g).movedim(1, 2)[:, :, None], g.cumsum(1).exp())


def end_state(g: Tensor, x: Tensor, initial: Tensor | None) -> Tensor:
    """The slots after the last token.

    Equation:  X_T = sum_i w_i exp(sum_{j > i} g_j) (x) x_i + exp(sum_j g_j) X_0
    Shapes:    g [B, T, H, M], x [B, T, H, D], X_0 [B, H, M, D] -> [B, H, M, D]
    Numerics:  spans summed one by one, as in `span_sum`; T = 0 returns X_0, or zeros.
    Source:    P9, P27.

    >>> end_state(torch.tensor([-1.0, -torch.inf]).view(1, 2, 1, 1), torch.tensor([5.0, 7.0]).view(1, 2, 1, 1), None).item()
    7.0
    """
    T = g.shape[1]
    later = torch.ones(T, T, dtype=torch.bool, device=g.device).triu(1)
    left = torch.where(later[..., None, None], g[:, None], 0).sum(2).exp()
    new = einsum("bihc,bihd->bhcd", left * -torch.expm1(g), x)
    return new if initial is None else new + g.sum(1).exp()[..., None] * initial


def slot_scores(q: Tensor, k: Tensor, written: Written, K0: Tensor | None, scale: float) -> Tensor:
    """The compressed keys meet the query.

    Equation:  s_t[c] = scale q_t.K_t[c] = scale sum_i Omega[t, i, c] q_t.k_i + scale kept_t[c] q_t.K_0[c]
    Shapes:    q [B, T, HQ, D], k [B, T, H, D], K0 [B, H, M, D] -> s [B, T, H, R, M] with R = HQ / H
    Numerics:  in the dtype of its inputs.
    Source:    P9.

    >>> q, k = torch.randn(2, 1, 5, 2, 4).unbind(0)
    >>> slot_scores(q, k, write_map(-torch.rand(1, 5, 2, 3)), None, 0.5).shape
    torch.Size([1, 5, 2, 1, 3])
    """
    queries = group(q, k.shape[2])
    s = einsum("bthri,bhtic->bthrc", einsum("bthrd,bihd->bthri", queries, k), written.omega)
    if K0 is not None:
        s = s + einsum("bthrc,bthc->bthrc", einsum("bthrd,bhcd->bthrc", queries, K0), written.kept)
    return scale * s


def slot_values(p: Tensor, v: Tensor, written: Written, V0: Tensor | None) -> Tensor:
    """The read weights meet the compressed values.

    Equation:  o_t = p_t V_t = sum_i A_ti v_i + (p_t * kept_t) V_0,   A_ti = sum_c p_t[c] Omega[t, i, c]
    Shapes:    p [B, T, H, R, M], v [B, T, H, V], V0 [B, H, M, V] -> o [B, T, H, R, V]
    Numerics:  in the dtype of its inputs.
    Source:    P9, P10.

    >>> v = torch.randn(1, 5, 2, 4); p = torch.ones(1, 5, 2, 1, 1)
    >>> torch.equal(slot_values(p, v, write_map(torch.full((1, 5, 2, 1), -torch.inf)), None)[:, :, :, 0], v)
    True
    """
    A = einsum("bthrc,bhtic->bthri", p, written.omega)
    o = einsum("bthri,bihv->bthrv", A, v)
    return o if V0 is None else o + einsum("bthrc,bhcv->bthrv", p * written.kept[:, :, :, None], V0)


def log_mass(g: Tensor, log_decay: Tensor | None) -> Tensor:
    """Log of what has been written to a slot in total.

    Equation:  mass_t = sum_i Omega[t, i] = 1 - exp(log_decay_0 + sum_{j <= t} g_j)
    Shapes:    g [B, T, H, M], log_decay [B, H, M] -> log mass [B, T, H, M]
    Numerics:  -inf, with derivative 0, for a slot that nothing was written to.
    Source:    P10, P12.

    >>> log_mass(torch.tensor([0.0, -torch.inf]).view(1, 2, 1, 1), None).flatten().tolist()
    [-inf, 0.0]
    """
    total = g.cumsum(1) if log_decay is None else g.cumsum(1) + log_decay[:, None]
    return torch.where(total < 0, (-torch.expm1(torch.where(total < 0, total, -1))).log(), -torch.inf)
