"""T2R: linear attention with features that a ReLU cuts off, the first way to turn a pretrained softmax attention into a recurrence."""

from torch import Tensor

from ...frame import form
from ...types import FeatureState, Output
from .kernel import kernel_matrix, kernel_steps, products, projected


def t2r_features(x: Tensor, W: Tensor | None = None, b: Tensor | None = None) -> Tensor:
    """The feature map of T2R.

    Equation:  phi(x) = relu(x W + b)
    Shapes:    x [B, T, H, D], W [H, D, E] or None for the identity, b [H, E] or None for 0 -> [B, T, H, E]
    Numerics:  in the dtype of x; exactly 0 for every channel that is cut off.
    Source:    T2R (2103.13076).

    >>> import torch; t2r_features(torch.tensor([[[[1.0, -2.0]]]]), b=torch.tensor([[1.0, 1.0]])).flatten().tolist()
    [2.0, 0.0]
    """
    return projected(x, W, b).relu()


@form
def t2r(
    q: Tensor, k: Tensor, v: Tensor, *, W_q: Tensor | None = None, W_k: Tensor | None = None, b_q: Tensor | None = None,
    b_k: Tensor | None = None, initial_state: FeatureState | None = None, output_final_state: bool = False,
    key_mask: Tensor | None = None,
) -> Output:
    """Linear attention with learned ReLU features.

    Equation:  o_t = sum_{i <= t} phi_q(q_t).phi_k(k_i) v_i / sum_{i <= t} phi_q(q_t).phi_k(k_i),   phi(x) = relu(x W + b)
    Shapes:    q [B, T, HQ, D], k [B, T, H, D], v [B, T, H, V], W_q [HQ, D, E], W_k [H, D, E], b_q [HQ, E], b_k [H, E]
               -> o [B, T, HQ, V]
    Numerics:  at least float32, float64 stays; a row none of whose features meets a key's has a sum of exactly 0 and is 0; takes no
               scale. Implementations add an eps to the sum or bound it below; here the sum is as it is.
    Source:    T2R (2103.13076). W = None is the identity and needs E = D.

    A query whose features are all cut off reads nothing:

    >>> import torch; q, k, v = torch.rand(3, 1, 5, 2, 4).unbind(0)
    >>> t2r(-q, k, v).o.abs().max().item()
    0.0
    """
    phi_q, phi_k = t2r_features(q, W_q, b_q), t2r_features(k, W_k, b_k)
    o, state = kernel_matrix(products(phi_q, phi_k), v, phi_q, phi_k, key_mask, initial_state)
    return Output(o, state if output_final_state else None)


@form
def recurrent(
    q: Tensor, k: Tensor, v: Tensor, *, W_q: Tensor | None = None, W_k: Tensor | None = None, b_q: Tensor | None = None,
    b_k: Tensor | None = None, initial_state: FeatureState | None = None, output_final_state: bool = False,
    key_mask: Tensor | None = None,
) -> Output:
    """`t2r` one token at a time.

    Equation:  S_t = S_{t-1} + phi_k(k_t) (x) v_t,   z_t = z_{t-1} + phi_k(k_t),   o_t = phi_q(q_t) S_t / phi_q(q_t).z_t
    Shapes:    as `t2r`; state S [B, H, E, V], z [B, H, E]
    Numerics:  as `t2r`.
    Source:    T2R (2103.13076).

    >>> import torch; q, k, v = torch.rand(3, 1, 5, 2, 4).unbind(0)
    >>> torch.allclose(recurrent(q, k, v).o, t2r(q, k, v).o, atol=1e-5)
    True
    """
    o, state = kernel_steps(t2r_features(q, W_q, b_q), t2r_features(k, W_k, b_k), v, key_mask, initial_state)
    return Output(o, state if output_final_state else None)
