"""Mamba-2: state space duality, one decay for a head that depends on the token through its time step."""

from torch import Tensor
from torch.nn.functional import softplus

from ...frame import form
from ...types import MatrixState, Output
from .decayed import decayed_matrix, decayed_steps, skipped, time_decay


def time_step(x: Tensor, b: Tensor | None = None) -> Tensor:
    """The time step of Mamba and Mamba-2.

    Equation:  dt = softplus(x + b)
    Shapes:    x [B, T, H], b [H] (Mamba: [B, T, H, V] and [H, V]) -> as x
    Numerics:  in (0, inf) until it underflows to 0; in the dtype of x.
    Source:    Mamba (2312.00752), section 3.6; Mamba-2 (2405.21060).

    >>> import torch; time_step(torch.tensor([0.0]), torch.tensor([40.0])).tolist()
    [40.0]
    """
    return softplus(x if b is None else x + b)


def rates(A_log: Tensor) -> Tensor:
    """The rates of Mamba and Mamba-2.

    Equation:  A = -exp(A_log)
    Shapes:    A_log [H] (Mamba: [H, V, D]) -> the same
    Numerics:  below 0 until it underflows; in the dtype of A_log.
    Source:    Mamba (2312.00752), Mamba-2 (2405.21060).

    >>> import torch; rates(torch.zeros(2)).tolist()
    [-1.0, -1.0]
    """
    return -A_log.exp()


@form
def mamba2(
    q: Tensor, k: Tensor, v: Tensor, dt: Tensor, A: Tensor, *, skip: Tensor | None = None, initial_state: MatrixState | None = None,
    output_final_state: bool = False, key_mask: Tensor | None = None,
) -> Output:
    """Mamba-2: order 1, un-normalised, with a decay for every head and token, and writes as long as the time step.

    Equation:  o_t = sum_{i <= t} A_ti v_i,   A_ti = q_t.k_i exp(a sum_{i < j <= t} dt_j) dt_i + [i = t] skip_h
    Shapes:    q (its C) [B, T, HQ, D], k (its B) [B, T, H, D], v (its x) [B, T, H, V], dt [B, T, H] from `time_step`, rates A [H]
               from `rates` (a is that of the head), skip (its D) [H] -> o [B, T, HQ, V]
    Numerics:  at least float32, float64 stays; signed weights, no lse; takes no scale; a = -inf and dt = 0 are exact.
    Source:    Mamba-2 (2405.21060): the semiseparable matrix of SSD. A token's write is dt k, not the exact integral.

    >>> import torch; q = torch.ones(1, 3, 1, 1); dt = torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1)
    >>> mamba2(q, q, q, dt, torch.zeros(1)).o.flatten().tolist(), mamba2(q, q, q, dt, torch.full((1,), -torch.inf)).o.flatten().tolist()
    ([1.0, 3.0, 6.0], [1.0, 2.0, 3.0])
    """
    g = time_decay(dt, A)[..., None]
    o, state = decayed_matrix(q, dt[..., None] * k, v, g, 1.0, key_mask, initial_state)
    o = o if skip is None else o + skipped(skip[:, None], v, q, key_mask)
    return Output(o, state if output_final_state else None)


@form
def recurrent(
    q: Tensor, k: Tensor, v: Tensor, dt: Tensor, A: Tensor, *, skip: Tensor | None = None, initial_state: MatrixState | None = None,
    output_final_state: bool = False, key_mask: Tensor | None = None,
) -> Output:
    """`mamba2` one token at a time.

    Equation:  S_t = e^{a dt_t} S_{t-1} + k_t (x) dt_t v_t,   o_t = q_t S_t + skip_h v_t
    Shapes:    as `mamba2`; state S [B, H, D, V]
    Numerics:  as `mamba2`.
    Source:    Mamba-2 (2405.21060).

    >>> import torch; q, k, v = torch.randn(3, 1, 5, 2, 4).unbind(0); dt, A = torch.rand(1, 5, 2), -torch.rand(2)
    >>> torch.allclose(recurrent(q, k, v, dt, A).o, mamba2(q, k, v, dt, A).o, atol=1e-5)
    True
    """
    o, state = decayed_steps(q, k, dt[..., None] * v, time_decay(dt, A)[..., None], 1.0, key_mask, initial_state)
    o = o if skip is None else o + skipped(skip[:, None], v, q, key_mask)
    return Output(o, state if output_final_state else None)
