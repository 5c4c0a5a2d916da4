"""Gated DeltaNet: the delta rule with one decay a head and token."""

from torch import Tensor
from torch.nn.functional import softplus

from ...frame import form
from ...types import MatrixState, Output
from .delta import delta_matrix, delta_steps


def gated_delta_gates(x: Tensor, A_log: Tensor, bias: Tensor) -> Tensor:
    """The gates of Gated DeltaNet.

    Equation:  g = -exp(A_log) softplus(x + bias)
    Shapes:    x [B, T, H], A_log and bias [H] -> [B, T, H]
    Numerics:  in (-inf, 0].
    Source:    2412.06464.

    >>> import torch; gated_delta_gates(torch.zeros(1, 1, 1), torch.zeros(1), torch.zeros(1)).exp().item()
    0.5
    """
    return -A_log.exp() * softplus(x + bias)


@form
def gated_delta(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, *, scale: float | None = None, initial_state: MatrixState | None = None,
    output_final_state: bool = False, key_mask: Tensor | None = None,
) -> Output:
    """Gated DeltaNet: forget, then write only what the state does not hold yet for this key.

    Equation:  S'_t = e^{g_t} S_{t-1},   S_t = S'_t + beta_t k_t (x) (v_t - k_t S'_t),   o_t = scale q_t S_t
    Shapes:    q [B, T, HQ, D], k [B, T, H, D], v [B, T, H, V], beta in [0, 2] and g [B, T, H] -> o [B, T, HQ, V]
    Numerics:  at least float32, float64 stays; keys are used as they come; gates of 0 and -inf are exact; signed weights, no lse.
    Source:    2412.06464.

    Gates of 0 are DeltaNet:

    >>> import torch; from mva_ref.naive.baselines.delta import delta
    >>> q, k, v = torch.randn(3, 1, 5, 2, 4).unbind(0); beta = torch.rand(1, 5, 2) / 4
    >>> torch.equal(gated_delta(q, k, v, beta, torch.zeros(1, 5, 2)).o, delta(q, k, v, beta).o)
    True
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    o, state = delta_matrix(q, k, v, beta, g, scale, key_mask, initial_state)
    return Output(o, state if output_final_state else None)


@form
def recurrent(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, *, scale: float | None = None, initial_state: MatrixState | None = None,
    output_final_state: bool = False, key_mask: Tensor | None = None,
) -> Output:
    """`gated_delta` one token at a time.

    Equation:  as `delta_steps`
    Shapes:    as `gated_delta`; state S [B, H, D, V]
    Numerics:  as `gated_delta`.
    Source:    2412.06464.

    >>> import torch; q, k, v = torch.randn(3, 1, 5, 2, 4).unbind(0); beta, g = torch.rand(1, 5, 2) / 4, -torch.rand(1, 5, 2)
    >>> torch.allclose(recurrent(q, k, v, beta, g).o, gated_delta(q, k, v, beta, g).o, atol=1e-4)
    True
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    o, state = delta_steps(q, k, v, beta, g, scale, key_mask, initial_state)
    return Output(o, state if output_final_state else None)
