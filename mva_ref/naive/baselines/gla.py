"""Gated linear attention: a decay for every key channel."""

from torch import Tensor, einsum
from torch.nn.functional import logsigmoid

from ...frame import form
from ...types import MatrixState, Output
from .decayed import decayed_matrix, decayed_steps


def gla_gates(x: Tensor, W: Tensor, b: Tensor | None = None, normaliser: float = 16.0) -> Tensor:
    """The gates of GLA.

    Equation:  g = logsigmoid(x W + b) / normaliser
    Shapes:    x [B, T, H, D], W [H, D, D], b [H, D] -> [B, T, H, D]
    Numerics:  in [-inf, 0] by logsigmoid; in the dtype of x.
    Source:    GLA (2312.06635), section 4; there W has rank 16.

    >>> import torch; gla_gates(torch.zeros(1, 1, 1, 2), torch.zeros(1, 2, 2), normaliser=1.0).exp().flatten().tolist()
    [0.5, 0.5]
    """
    y = einsum("bthd,hde->bthe", x, W)
    return logsigmoid(y if b is None else y + b) / normaliser


@form
def gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, *, scale: float | None = None, initial_state: MatrixState | None = None,
    output_final_state: bool = False, key_mask: Tensor | None = None,
) -> Output:
    """Gated linear attention: order 1, un-normalised, with a decay for every key channel.

    Equation:  o_t = sum_{i <= t} A_ti v_i,   A_ti = scale sum_d q_td k_id exp(sum_{i < j <= t} g_jd)
    Shapes:    q [B, T, HQ, D], k [B, T, H, D], v [B, T, H, V], g [B, T, H, D] natural-log decay -> o [B, T, HQ, V]
    Numerics:  at least float32, float64 stays; signed weights, no lse; gates of 0 and -inf are exact.
    Source:    GLA (2312.06635).

    Gates of -inf forget all but the token itself:

    >>> import torch; q, k, v = torch.randn(3, 1, 5, 2, 4).unbind(0); g = torch.full((1, 5, 2, 4), -torch.inf)
    >>> torch.allclose(gla(q, k, v, g, scale=1.0).o, (q * k).sum(-1, keepdim=True) * v, atol=1e-6)
    True
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    o, state = decayed_matrix(q, k, v, g, scale, key_mask, initial_state)
    return Output(o, state if output_final_state else None)


@form
def recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, *, scale: float | None = None, initial_state: MatrixState | None = None,
    output_final_state: bool = False, key_mask: Tensor | None = None,
) -> Output:
    """`gla` one token at a time.

    Equation:  S_t = diag(e^{g_t}) S_{t-1} + k_t (x) v_t,   o_t = scale q_t S_t
    Shapes:    as `gla`; state S [B, H, D, V]
    Numerics:  as `gla`.
    Source:    GLA (2312.06635).

    >>> import torch; q, k, v = torch.randn(3, 1, 5, 2, 4).unbind(0); g = -torch.rand(1, 5, 2, 4)
    >>> torch.allclose(recurrent(q, k, v, g).o, gla(q, k, v, g).o, atol=1e-5)
    True
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    o, state = decayed_steps(q, k, v, g, scale, key_mask, initial_state)
    return Output(o, state if output_final_state else None)
