"""Linear attention with the feature map elu + 1."""

from torch import Tensor
from torch.nn.functional import elu

from ...frame import form
from ...types import FeatureState, Output
from .kernel import kernel_matrix, kernel_steps, products


def elu_features(x: Tensor) -> Tensor:
    """A positive feature map.

    Equation:  phi(x) = elu(x) + 1
    Shapes:    x [..., D] -> [..., D]
    Numerics:  positive until exp(x) underflows.
    Source:    2006.16236.

    >>> import torch; elu_features(torch.tensor([0.0, 2.0])).tolist()
    [1.0, 3.0]
    """
    return elu(x) + 1


@form
def linear(
    q: Tensor, k: Tensor, v: Tensor, *, initial_state: FeatureState | None = None, output_final_state: bool = False,
    key_mask: Tensor | None = None,
) -> Output:
    """Linear attention: a kernel of positive features in place of the exponential.

    Equation:  o_t = sum_{i <= t} phi(q_t).phi(k_i) v_i / sum_{i <= t} phi(q_t).phi(k_i),   phi(x) = elu(x) + 1
    Shapes:    q [B, T, HQ, D], k [B, T, H, D], v [B, T, H, V] -> o [B, T, HQ, V]
    Numerics:  at least float32, float64 stays; no eps: the sum is positive; a row that sees nothing is 0; takes no scale.
    Source:    2006.16236.

    Equal keys average the past:

    >>> import torch; q, v = torch.randn(2, 1, 5, 2, 4).unbind(0)
    >>> torch.allclose(linear(q, torch.zeros(1, 5, 2, 4), v).o, v.cumsum(1) / torch.arange(1, 6).view(5, 1, 1), atol=1e-6)
    True
    """
    phi_q, phi_k = elu_features(q), elu_features(k)
    o, state = kernel_matrix(products(phi_q, phi_k), v, phi_q, phi_k, key_mask, initial_state)
    return Output(o, state if output_final_state else None)


@form
def recurrent(
    q: Tensor, k: Tensor, v: Tensor, *, initial_state: FeatureState | None = None, output_final_state: bool = False,
    key_mask: Tensor | None = None,
) -> Output:
    """`linear` one token at a time.

    Equation:  S_t = S_{t-1} + phi(k_t) (x) v_t,   z_t = z_{t-1} + phi(k_t),   o_t = phi(q_t) S_t / phi(q_t).z_t
    Shapes:    as `linear`; state S [B, H, D, V], z [B, H, D]
    Numerics:  as `linear`.
    Source:    2006.16236.

    >>> import torch; q, k, v = torch.randn(3, 1, 5, 2, 4).unbind(0)
    >>> torch.allclose(recurrent(q, k, v).o, linear(q, k, v).o, atol=1e-5)
    True
    """
    o, state = kernel_steps(elu_features(q), elu_features(k), v, key_mask, initial_state)
    return Output(o, state if output_final_state else None)
