"""SUPRA: a pretrained softmax attention, its exponential replaced by rotated ReLU features, with a fixed decay for every head."""

import torch
from torch import Tensor, einsum

from ...frame import form
from ...types import MatrixState, Output
from .decayed import decayed_matrix, decayed_steps, per_token


def supra_decay(heads: int) -> Tensor:
    """The decay of each head: ALiBi's slopes.

    Equation:  -2^(-8 (h + 1) / H) for H a power of two; else those of the power P below, then every second one of 2P
    Shapes:    -> [H]
    Numerics:  float64.
    Source:    SUPRA (2405.06640), its code; the slopes are ALiBi's (2108.12409).

    >>> supra_decay(4).tolist(), supra_decay(3).tolist()
    ([-0.25, -0.0625, -0.015625, -0.00390625], [-0.0625, -0.00390625, -0.25])
    """
    power = 1 << heads.bit_length() - 1
    first, odd = torch.arange(1, power + 1), torch.arange(1, 2 * power, 2)
    exponents = torch.cat([8 * first / power, 4 * odd / power])[:heads]
    return -torch.exp2(-exponents.double())


def supra_features(x: Tensor, W: Tensor, b: Tensor | None = None, *, start: int = 0, base: float = 1e4) -> Tensor:
    """The features of SUPRA, for q and k alike.

    Equation:  phi(x_t) = R_t relu(x_t W + b);   R_t turns channels (d, d + D/2) by the angle t base^(-2 d / D)
    Shapes:    x [B, T, H, D], D even, W [H D, H D], b [H D]: one map over all heads -> [B, T, H, D]
    Numerics:  in the dtype of x; signed after the rotation. `start` is the position of the first token.
    Source:    SUPRA (2405.06640), its code: rotated after the ReLU.

    >>> supra_features(torch.tensor([[[[1.0, -1.0]]]]), torch.eye(2)).tolist()
    [[[[1.0, 0.0]]]]
    """
    y = einsum("btc,ce->bte", x.flatten(2), W)
    y = (y if b is None else y + b).relu().view(x.shape)
    half = x.shape[-1] // 2
    frequency = base ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
    angle = (torch.arange(start, start + x.shape[1], device=x.device)[:, None] * frequency)[:, None]        # t 1 d
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    left, right = y[..., :half], y[..., half:]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


@form
def supra(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, head_decay: Tensor | None = None,
    initial_state: MatrixState | None = None, output_final_state: bool = False, key_mask: Tensor | None = None,
) -> Output:
    """SUPRA on features: order 1 in them, un-normalised, with a fixed decay for every KV head.

    Equation:  o_t = sum_{i <= t} A_ti v_i,   A_ti = scale q_t.k_i exp((t - i) g_h)
    Shapes:    q [B, T, HQ, D], k [B, T, H, D] from `supra_features`, v [B, T, H, V], head_decay g [H], None for `supra_decay(H)`
               -> o [B, T, HQ, V]
    Numerics:  at least float32, float64 stays; signed weights, no lse and no eps: there is no denominator.
    Source:    SUPRA (2405.06640). `retnet` with other decays. A masked token is skipped: t - i counts the others.

    >>> q = torch.ones(1, 3, 1, 1); o = supra(q, q, q, head_decay=torch.tensor([0.5]).log()).o
    >>> torch.allclose(o.flatten(), torch.tensor([1.0, 1.5, 1.75]))
    True
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    g = per_token(supra_decay(k.shape[2]) if head_decay is None else head_decay, v)
    o, state = decayed_matrix(q, k, v, g, scale, key_mask, initial_state)
    return Output(o, state if output_final_state else None)


@form
def recurrent(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, head_decay: Tensor | None = None,
    initial_state: MatrixState | None = None, output_final_state: bool = False, key_mask: Tensor | None = None,
) -> Output:
    """`supra` one token at a time.

    Equation:  S_t = e^{g_h} S_{t-1} + k_t (x) v_t,   o_t = scale q_t S_t
    Shapes:    as `supra`; state S [B, H, D, V]
    Numerics:  as `supra`.
    Source:    SUPRA (2405.06640).

    >>> q, k, v = torch.randn(3, 1, 5, 2, 4).unbind(0)
    >>> torch.allclose(recurrent(q, k, v).o, supra(q, k, v).o, atol=1e-5)
    True
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    g = per_token(supra_decay(k.shape[2]) if head_decay is None else head_decay, v)
    o, state = decayed_steps(q, k, v, g, scale, key_mask, initial_state)
    return Output(o, state if output_final_state else None)
