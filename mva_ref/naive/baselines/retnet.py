"""RetNet's retention: one fixed decay for every head."""

import torch
from torch import Tensor

from ...frame import form
from ...types import MatrixState, Output
from .decayed import decayed_matrix, decayed_steps, per_token


def retnet_decay(heads: int) -> Tensor:
    """The decay of each head.

    Equation:  log(1 - 2^(-5-h)), h = 0 .. H - 1
    Shapes:    -> [H]
    Numerics:  float64, by log1p.
    Source:    RetNet (2307.08621), section 3.1.

    >>> retnet_decay(2).exp().tolist()
    [0.96875, 0.984375]
    """
    return torch.log1p(-torch.exp2(-5 - torch.arange(heads, dtype=torch.float64)))


@form
def retnet(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, head_decay: Tensor | None = None,
    initial_state: MatrixState | None = None, output_final_state: bool = False, key_mask: Tensor | None = None,
) -> Output:
    """Retention: order 1, un-normalised, with a fixed decay for every KV head.

    Equation:  o_t = sum_{i <= t} A_ti v_i,   A_ti = scale q_t.k_i exp((t - i) g_h)
    Shapes:    q [B, T, HQ, D], k [B, T, H, D], v [B, T, H, V], head_decay g [H], None for `retnet_decay(H)` -> o [B, T, HQ, V]
    Numerics:  at least float32, float64 stays; signed weights, no lse; decays of 0 and -inf are exact. The paper's division by
               max(|row sum|, 1) is left out: the norm over a head that follows takes any factor out.
    Source:    RetNet (2307.08621); the caller rotates q and k. A masked token is skipped: t - i counts the others.

    A decay of 0 adds up the past:

    >>> q, v = torch.ones(1, 3, 1, 1), torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1, 1)
    >>> retnet(q, q, v, head_decay=torch.zeros(1)).o.flatten().tolist()
    [1.0, 3.0, 6.0]
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    g = per_token(retnet_decay(k.shape[2]) if head_decay is None else head_decay, v)
    o, state = decayed_matrix(q, k, v, g, scale, key_mask, initial_state)
    return Output(o, state if output_final_state else None)


@form
def recurrent(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, head_decay: Tensor | None = None,
    initial_state: MatrixState | None = None, output_final_state: bool = False, key_mask: Tensor | None = None,
) -> Output:
    """`retnet` one token at a time.

    Equation:  S_t = e^{g_h} S_{t-1} + k_t (x) v_t,   o_t = scale q_t S_t
    Shapes:    as `retnet`; state S [B, H, D, V]
    Numerics:  as `retnet`.
    Source:    RetNet (2307.08621).

    >>> q, k, v = torch.randn(3, 1, 5, 2, 4).unbind(0)
    >>> torch.allclose(recurrent(q, k, v).o, retnet(q, k, v).o, atol=1e-5)
    True
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    g = per_token(retnet_decay(k.shape[2]) if head_decay is None else head_decay, v)
    o, state = decayed_steps(q, k, v, g, scale, key_mask, initial_state)
    return Output(o, state if output_final_state else None)
