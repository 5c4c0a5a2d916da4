"""Attention by Taylor order. Theory: docs/theory/orders.md (P1 to P8)."""

import torch
from torch import Tensor, einsum

from ..frame import form
from ..types import Output, TaylorState
from .orders import features, phi, query_features, ratio
from .softmax_attention import group


def running_mean(k: Tensor, seen: Tensor, key_sum: Tensor | float, count: Tensor | float) -> Tensor:
    """Mean of the keys so far, row by row.

    Equation:  c_t = (key_sum + sum_{i <= t} k_i) / (count + t), masked keys left out; 0 before the first key
    Shapes:    k [B, T, H, D], seen [B, T] of 0 and 1, key_sum [B, H, D], count [B] -> [B, T, H, D]
    Numerics:  one cumulative sum in the dtype of k.
    Source:    P5.

    >>> running_mean(torch.tensor([1.0, 3.0]).view(1, 2, 1, 1), torch.ones(1, 2), 0.0, 0.0).flatten().tolist()
    [1.0, 2.0]
    """
    total = (seen[..., None, None] * k).cumsum(1) + (key_sum[:, None] if isinstance(key_sum, Tensor) else key_sum)
    number = seen.cumsum(1) + (count[:, None] if isinstance(count, Tensor) else count)
    return total / number.clamp(min=1)[..., None, None]


@form
def taylor(
    q: Tensor, k: Tensor, v: Tensor, order: int, *, scale: float | None = None, centre: str | Tensor | None = None,
    initial_state: TaylorState | None = None, output_final_state: bool = False, key_mask: Tensor | None = None,
) -> Output:
    """Attention whose exponential is cut after the given order.

    Equation:  o_t = sum_i phi_N(x_ti - r_t) v_i / Z_t,   Z_t = sum_i phi_N(x_ti - r_t),   x_ti = scale q_t.k_i,   r_t = scale q_t.c_t
    Shapes:    q [B, T, HQ, D], k [B, T, H, D], v [B, T, H, V], centre c: None (0), "mean", "running" or [B, H, D] -> o [B, T, HQ, V],
               lse = r_t + log Z_t [B, T, HQ] for an even order, None for an odd one
    Numerics:  polynomials in float64; no eps; Z_t = 0 gives o = 0. An odd order can be signed and arbitrarily large (P3).
               phi_N(x) overflows only where exp(x) does.
    Source:    P1 to P6; order 2 is Based (2402.18668).

    Order 0 is the causal mean:

    >>> q, k, v = torch.randn(3, 1, 5, 2, 4).unbind(0)
    >>> torch.allclose(taylor(q, k, v, 0).o, v.cumsum(1) / torch.arange(1, 6).view(5, 1, 1))
    True
    """
    (B, T, H, D), s0 = k.shape, initial_state
    scale = D**-0.5 if scale is None else scale
    seen = k.new_ones(B, T) if key_mask is None else key_mask.to(k.dtype)
    queries = group(q, H)
    if isinstance(centre, Tensor):
        c = centre[:, None].expand(B, T, H, D)
    elif centre == "mean":
        c = running_mean(k, seen, 0.0, 0.0)[:, -1:].expand(B, T, H, D)
    elif centre == "running":
        c = running_mean(k, seen, s0.key_sum if s0 else 0.0, s0.tokens if s0 else 0.0)
    else:
        c = k.new_zeros(B, T, H, D)
    r = scale * einsum("bthrd,bthd->bthr", queries, c)
    x = scale * einsum("bthrd,bihd->bthri", queries, k)
    visible = torch.ones(T, T, dtype=torch.bool, device=k.device).tril() & (seen > 0)[:, None]
    a = torch.where(visible[:, :, None, None], phi(x - r[..., None], order), 0)
    numerator, Z = einsum("bthri,bihv->bthrv", a, v), a.sum(-1)
    state = None
    if s0 is not None:
        psi = query_features(queries, order, scale, r)
        numerator = numerator + einsum("bthrf,bhfv->bthrv", psi, s0.S)
        Z = Z + einsum("bthrf,bhf->bthr", psi, s0.z)
    if output_final_state:
        F = seen[..., None, None] * torch.cat([features(k, m) for m in range(order + 1)], -1)
        state = TaylorState(einsum("bihf,bihv->bhfv", F, v), F.sum(1), (seen[..., None, None] * k).sum(1), seen.sum(1))
        if s0 is not None:
            state = TaylorState(*(new + old for new, old in zip(state, s0, strict=True)))
    lse = None if order % 2 else torch.where(Z > 0, r + torch.where(Z > 0, Z, 1).log(), -torch.inf).flatten(2, 3)
    return Output(ratio(numerator, Z).flatten(2, 3), state, lse)
