"""Even powers of q.k as kernels: what power attention and ReBased share."""

import math

import torch
from torch import Tensor, einsum

from ...types import FeatureState
from ..orders import features
from ..softmax_attention import group
from ..writes import span_sum
from .kernel import kernel_matrix, kernel_steps, seen


def power_features(x: Tensor, power: int) -> Tensor:
    """The symmetric features of one power.

    Equation:  phi(x)[I] = sqrt(p! / prod_d mult_d(I)!) prod_{d in I} x_d,   I a multiset of p coordinates;   phi(x).phi(y) = (x.y)^p
    Shapes:    x [..., D] -> [..., C(D + p - 1, p)]
    Numerics:  in the dtype of x; signed: their products cancel where x.y is small beside |x| |y| (`power_cancellation`).
    Source:    power attention (2507.04239).

    >>> x, y = torch.tensor([1.0, 2.0]), torch.tensor([3.0, -1.0])
    >>> power_features(x, 2).shape[-1], round((power_features(x, 2) @ power_features(y, 2)).item(), 5), (x @ y).item() ** 2
    (3, 1.0, 1.0)
    """
    return math.sqrt(math.factorial(power)) * features(x, power)


def power_matrix(
    q: Tensor, k: Tensor, v: Tensor, power: int, scale: float, key_mask: Tensor | None, s0: FeatureState | None, g: Tensor | None = None
) -> tuple[Tensor, FeatureState]:
    """Attention by an even power as a T x T matrix.

    Equation:  o_t = sum_{i <= t} a_ti v_i / sum_{i <= t} a_ti,   a_ti = (scale q_t.k_i)^p exp(sum_{i < j <= t} g_j)
    Shapes:    q [B, T, HQ, D], k [B, T, H, D], v [B, T, H, V], g [B, T, H] or None -> o [B, T, HQ, V], state
    Numerics:  terms are >= 0; a sum of exactly 0 gives o = 0; features for the states alone.
    Source:    power attention (2507.04239).

    >>> x = torch.ones(1, 3, 1, 1); power_matrix(x, x, x, 2, 1.0, None, None)[1].z.round().item()
    3.0
    """
    a = (scale * einsum("bthrd,bihd->bthri", group(q, k.shape[2]), k)) ** power
    return kernel_matrix(a, v, power_features(scale * q, power), power_features(k, power), key_mask, s0, g=g)


def power_steps(
    q: Tensor, k: Tensor, v: Tensor, power: int, scale: float, key_mask: Tensor | None, s0: FeatureState | None, g: Tensor | None = None
) -> tuple[Tensor, FeatureState]:
    """Attention by an even power one token at a time.

    Equation:  S_t = e^{g_t} S_{t-1} + phi(k_t) (x) v_t,   z_t = e^{g_t} z_{t-1} + phi(k_t),   o_t = phi(scale q_t) S_t / phi(scale q_t).z_t
    Shapes:    as `power_matrix`; state S [B, H, F, V], z [B, H, F],   F = C(D + p - 1, p)
    Numerics:  loses the digits that `power_cancellation` counts.
    Source:    power attention (2507.04239).

    >>> x = torch.ones(1, 3, 1, 1); power_steps(x, x, x, 2, 1.0, None, None)[1].z.round().item()
    3.0
    """
    return kernel_steps(power_features(scale * q, power), power_features(k, power), v, key_mask, s0, g=g)


def power_cancellation(q: Tensor, k: Tensor, power: int, *, key_mask: Tensor | None = None, g: Tensor | None = None) -> Tensor:
    """By how much the products of features that a row adds up exceed the row's sum: what a recurrence loses to rounding.

    Equation:  sum_{i <= t} (sum_d |q_td k_id|)^p e^{G_ti} / sum_{i <= t} (q_t.k_i)^p e^{G_ti},   G_ti = sum_{i < j <= t} g_j
    Shapes:    q [B, T, HQ, D], k [B, T, H, D], g [B, T, H] -> [B, T, HQ], at least 1
    Numerics:  unbounded: q.k can be small beside its terms, and no term of a lower order fills in; 1 for an empty row.
    Source:    the condition number of a sum; the scale drops out.

    >>> power_cancellation(torch.tensor([[[[1.0, 1.0]]]]), torch.tensor([[[[3.0, -1.0]]]]), 2).item()
    4.0
    """
    keep, T = seen(k, key_mask), k.shape[1]
    visible = torch.ones(T, T, dtype=torch.bool, device=k.device).tril() & (keep > 0)[:, None]
    g = k.new_zeros(k.shape[:3]) if g is None else torch.where(keep[..., None] > 0, g, 0)
    left = span_sum(g[..., None])[..., 0].exp().transpose(1, 2) * visible[:, :, None]                # b t h i

    def total(q: Tensor, k: Tensor) -> Tensor:
        a = einsum("bthrd,bihd->bthri", group(q, k.shape[2]), k) ** power
        return einsum("bthri,bthi->bthr", a, left).flatten(2)

    some = total(q, k)
    return torch.where(some > 0, total(q.abs(), k.abs()) / torch.where(some > 0, some, 1), 1)
