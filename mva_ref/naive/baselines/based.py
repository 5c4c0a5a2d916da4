"""Based: linear attention whose kernel is the exponential cut after the second order."""

import torch
from torch import Tensor, einsum

from ...frame import form
from ...types import FeatureState, Output
from ..orders import features
from ..softmax_attention import group
from .kernel import kernel_matrix, kernel_steps


def based_features(x: Tensor) -> Tensor:
    """The feature map of Based, in its symmetric form.

    Equation:  phi(x) = (1, x, x_d^2 / sqrt(2), x_d x_e for d < e);   phi(x).phi(y) = 1 + x.y + (x.y)^2 / 2
    Shapes:    x [..., D] -> [..., C(D + 2, 2)]
    Numerics:  in the dtype of x; signed.
    Source:    Based (2402.18668); there the scale is shared out between q and k.

    >>> based_features(torch.tensor([1.0, 2.0])).shape, (based_features(torch.ones(1)) @ based_features(torch.tensor([2.0]))).item()
    (torch.Size([6]), 5.0)
    """
    return torch.cat([features(x, n) for n in range(3)], -1)


@form
def based(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, initial_state: FeatureState | None = None,
    output_final_state: bool = False, key_mask: Tensor | None = None,
) -> Output:
    """Attention by the second Taylor polynomial of exp: `taylor` of order 2.

    Equation:  o_t = sum_{i <= t} a_ti v_i / sum_{i <= t} a_ti,   a_ti = 1 + x_ti + x_ti^2 / 2,   x_ti = scale q_t.k_i
    Shapes:    q [B, T, HQ, D], k [B, T, H, D], v [B, T, H, V] -> o [B, T, HQ, V]
    Numerics:  at least float32, float64 stays; a_ti = ((1 + x_ti)^2 + 1) / 2 >= 1/2 whatever the rounding, so no eps;
               a row that sees nothing is 0.
    Source:    Based (2402.18668). Its sliding windows are layers of their own and not part of this.

    >>> from ..taylor_attention import taylor
    >>> q, k, v = torch.randn(3, 1, 5, 2, 4).unbind(0)
    >>> torch.allclose(based(q, k, v).o, taylor(q, k, v, 2).o, atol=1e-6)
    True
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    x = scale * einsum("bthrd,bihd->bthri", group(q, k.shape[2]), k)
    o, state = kernel_matrix(((1 + x) ** 2 + 1) / 2, v, based_features(scale * q), based_features(k), key_mask, initial_state)
    return Output(o, state if output_final_state else None)


@form
def recurrent(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, initial_state: FeatureState | None = None,
    output_final_state: bool = False, key_mask: Tensor | None = None,
) -> Output:
    """`based` one token at a time.

    Equation:  S_t = S_{t-1} + phi(k_t) (x) v_t,   z_t = z_{t-1} + phi(k_t),   o_t = phi(scale q_t) S_t / phi(scale q_t).z_t
    Shapes:    as `based`; state S [B, H, F, V], z [B, H, F],   F = C(D + 2, 2), free of the scale
    Numerics:  as `based`, but features are signed: the sum is 1/2 or more only up to the rounding of its terms.
    Source:    Based (2402.18668).

    >>> q, k, v = torch.randn(3, 1, 5, 2, 4).unbind(0)
    >>> torch.allclose(recurrent(q, k, v).o, based(q, k, v).o, atol=1e-5)
    True
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    o, state = kernel_steps(based_features(scale * q), based_features(k), v, key_mask, initial_state)
    return Output(o, state if output_final_state else None)
