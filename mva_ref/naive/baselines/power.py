"""Power attention: an even power of q.k in place of the exponential, with features of the smallest number."""

from torch import Tensor

from ...frame import form
from ...types import FeatureState, Output
from .powers import power_matrix, power_steps


@form
def power(
    q: Tensor, k: Tensor, v: Tensor, power: int, *, scale: float | None = None, g: Tensor | None = None,
    initial_state: FeatureState | None = None, output_final_state: bool = False, key_mask: Tensor | None = None,
) -> Output:
    """Attention by an even power of q.k, with an optional decay of each head.

    Equation:  o_t = sum_{i <= t} a_ti v_i / sum_{i <= t} a_ti,   a_ti = (scale q_t.k_i)^p exp(sum_{i < j <= t} g_j),   p even
    Shapes:    q [B, T, HQ, D], k [B, T, H, D], v [B, T, H, V], g [B, T, H] natural-log decay, None for 0 -> o [B, T, HQ, V]
    Numerics:  at least float32, float64 stays; terms are >= 0, and a sum of exactly 0, as for q_t = 0, gives row 0: no eps. The scale
               drops out but for the range of the numbers. Gates of 0 and -inf are exact.
    Source:    power attention (2507.04239).

    A large power reads the key of the largest |q.k| alone:

    >>> import torch; q, k, v = torch.ones(1, 3, 1, 1), torch.tensor([1.0, -2.0, 1.5]).view(1, 3, 1, 1), torch.eye(3).view(1, 3, 1, 3)
    >>> [round(x, 3) for x in power(q, k, v, 40).o[0, 2, 0].tolist()]
    [0.0, 1.0, 0.0]
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    o, state = power_matrix(q, k, v, power, scale, key_mask, initial_state, g)
    return Output(o, state if output_final_state else None)


@form
def recurrent(
    q: Tensor, k: Tensor, v: Tensor, power: int, *, scale: float | None = None, g: Tensor | None = None,
    initial_state: FeatureState | None = None, output_final_state: bool = False, key_mask: Tensor | None = None,
) -> Output:
    """`power` one token at a time.

    Equation:  S_t = e^{g_t} S_{t-1} + phi(k_t) (x) v_t,   z_t = e^{g_t} z_{t-1} + phi(k_t),   o_t = phi(scale q_t) S_t / phi(scale q_t).z_t
    Shapes:    as `power`; state S [B, H, F, V], z [B, H, F],   F = C(D + p - 1, p), free of the scale
    Numerics:  loses the digits that `power_cancellation` counts.
    Source:    power attention (2507.04239).

    >>> import torch; q, k, v = torch.rand(3, 1, 5, 2, 4).unbind(0)
    >>> torch.allclose(recurrent(q, k, v, 4).o, power(q, k, v, 4).o, atol=1e-4)
    True
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    o, state = power_steps(q, k, v, power, scale, key_mask, initial_state, g)
    return Output(o, state if output_final_state else None)
