"""ReBased: linear attention with the square of q.k as kernel, after a learned normalisation of q and k."""

from torch import Tensor
from torch.nn.functional import layer_norm

from ...frame import form
from ...types import FeatureState, Output
from .powers import power_cancellation, power_matrix, power_steps


def rebased_inputs(x: Tensor, gain: Tensor | None = None, offset: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """What ReBased does to q and k before the square: LayerNorm.

    Equation:  y = gain (x - mean x) / sqrt(var x + eps) + offset
    Shapes:    x [..., D], gain [D] or None for 1, offset [D] or None for 0 -> [..., D]
    Numerics:  in the dtype of x; a constant x gives the offset. eps is part of the system.
    Source:    ReBased (2402.10644); q and k share gain and offset.

    >>> import torch; rebased_inputs(torch.tensor([1.0, 3.0]), offset=torch.tensor([0.0, 1.0]), eps=0.0).tolist()
    [-1.0, 2.0]
    """
    return layer_norm(x, x.shape[-1:], gain, offset, eps)


@form
def rebased(
    q: Tensor, k: Tensor, v: Tensor, *, gain: Tensor | None = None, offset: Tensor | None = None, eps: float = 1e-5,
    scale: float | None = None, initial_state: FeatureState | None = None, output_final_state: bool = False,
    key_mask: Tensor | None = None,
) -> Output:
    """Attention by the square of q.k after LayerNorm: `power` 2 of normalised queries and keys.

    Equation:  o_t = sum_{i <= t} a_ti v_i / sum_{i <= t} a_ti,   a_ti = (scale q'_t.k'_i)^2,   x' by `rebased_inputs`
    Shapes:    q [B, T, HQ, D], k [B, T, H, D], v [B, T, H, V], gain and offset [D] -> o [B, T, HQ, V]
    Numerics:  at least float32, float64 stays; a sum of exactly 0, as for D = 1 without an offset, gives row 0. Implementations add
               1e-5, 1e-6 or 1e-10 to the sum, each another function where it is small; here it is as it is, and the scale drops out.
    Source:    ReBased (2402.10644).

    Opposite keys weigh the same:

    >>> import torch; q, k, v = torch.randn(3, 1, 5, 2, 4).unbind(0)
    >>> torch.equal(rebased(q, -k, v).o, rebased(q, k, v).o)
    True
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k = rebased_inputs(q, gain, offset, eps), rebased_inputs(k, gain, offset, eps)
    o, state = power_matrix(q, k, v, 2, scale, key_mask, initial_state)
    return Output(o, state if output_final_state else None)


@form
def recurrent(
    q: Tensor, k: Tensor, v: Tensor, *, gain: Tensor | None = None, offset: Tensor | None = None, eps: float = 1e-5,
    scale: float | None = None, initial_state: FeatureState | None = None, output_final_state: bool = False,
    key_mask: Tensor | None = None,
) -> Output:
    """`rebased` one token at a time.

    Equation:  S_t = S_{t-1} + phi(k'_t) (x) v_t,   z_t = z_{t-1} + phi(k'_t),   o_t = phi(scale q'_t) S_t / phi(scale q'_t).z_t
    Shapes:    as `rebased`; state S [B, H, F, V], z [B, H, F],   F = D (D + 1) / 2
    Numerics:  loses the digits that `cancellation` counts.
    Source:    ReBased (2402.10644).

    >>> import torch; q, k, v = torch.randn(3, 1, 5, 2, 4).double().unbind(0)
    >>> torch.allclose(recurrent(q, k, v).o, rebased(q, k, v).o)
    True
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k = rebased_inputs(q, gain, offset, eps), rebased_inputs(k, gain, offset, eps)
    o, state = power_steps(q, k, v, 2, scale, key_mask, initial_state)
    return Output(o, state if output_final_state else None)


def cancellation(
    q: Tensor, k: Tensor, *, gain: Tensor | None = None, offset: Tensor | None = None, eps: float = 1e-5, key_mask: Tensor | None = None
) -> Tensor:
    """By how much the products of features that a row adds up exceed the row's sum.

    Equation:  sum_{i <= t} (sum_d |q'_td k'_id|)^2 / sum_{i <= t} (q'_t.k'_i)^2
    Shapes:    q [B, T, HQ, D], k [B, T, H, D] -> [B, T, HQ], at least 1
    Numerics:  as `power_cancellation`.
    Source:    the condition number of a sum.

    >>> import torch; cancellation(torch.tensor([[[[1.0, -1.0]]]]), torch.tensor([[[[1.0, -1.0]]]])).item()
    1.0
    """
    return power_cancellation(rebased_inputs(q, gain, offset, eps), rebased_inputs(k, gain, offset, eps), 2, key_mask=key_mask)
