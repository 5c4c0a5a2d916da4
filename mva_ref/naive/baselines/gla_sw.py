"""GLA with a sliding window: the paper's integration, applied to gated linear attention with a positive feature map."""

from collections.abc import Callable

from torch import Tensor

from ...frame import form
from ...types import Output, WindowState
from .feature_window import Hybrid, window_matrix, window_steps


def _how(
    q: Tensor, window: int, feature_map: Callable[[Tensor], Tensor], integration: str, hard_weight: Tensor | None, sinks: int,
    scale: float | None,
) -> Hybrid:
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return Hybrid(feature_map, feature_map, window, sinks, scale, lambda lse, top: lse, hard_weight if integration == "hard" else None)


@form
def gla_sw(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, window: int, feature_map: Callable[[Tensor], Tensor], *, integration: str = "soft",
    hard_weight: Tensor | None = None, sinks: int = 0, scale: float | None = None, initial_state: WindowState | None = None,
    output_final_state: bool = False, key_mask: Tensor | None = None,
) -> Output:
    """GLA-SW: softmax over sinks and window, normalised GLA over what has left the window.

    Equation:  o = (Z^W o^W + Z^H o^H) / (Z^W + Z^H),   o^H = phi(q) S / phi(q).z,   Z^H = phi(q).z,
               S <- diag(e^g) S + phi(k) (x) v,   z <- e^g z + phi(k)   when a token leaves the window (hard: b o^W + (1 - b) o^H)
    Shapes:    q [B, T, HQ, D], k [B, T, H, D], v [B, T, H, V], g [B, T, H, D]; feature_map keeps the width -> o [B, T, HQ, V], lse for soft
    Numerics:  at least float32, float64 stays; feature_map must be positive, with the scale folded into it; scale is the window's.
    Source:    the paper applies its integration to GLA (ICML 2025); GLA (2312.06635); the normaliser is our reading.

    A window that holds everything is softmax attention:

    >>> import torch; from mva_ref.naive.softmax_attention import softmax
    >>> q, k, v = torch.randn(3, 1, 5, 2, 4).unbind(0)
    >>> torch.allclose(gla_sw(q, k, v, -torch.rand(1, 5, 2, 4), 5, torch.exp).o, softmax(q, k, v).o, atol=1e-6)
    True
    """
    how = _how(q, window, feature_map, integration, hard_weight, sinks, scale)
    return window_matrix(q, k, v, g, how, initial_state, output_final_state, key_mask)


@form
def recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, window: int, feature_map: Callable[[Tensor], Tensor], *, integration: str = "soft",
    hard_weight: Tensor | None = None, sinks: int = 0, scale: float | None = None, initial_state: WindowState | None = None,
    output_final_state: bool = False, key_mask: Tensor | None = None,
) -> Output:
    """`gla_sw` one token at a time.

    Equation:  as `gla_sw`
    Shapes:    as `gla_sw`
    Numerics:  as `gla_sw`.
    Source:    docs/theory/window.md.

    >>> import torch; q, k, v = torch.randn(3, 1, 5, 2, 4).unbind(0); g = -torch.rand(1, 5, 2, 4)
    >>> torch.allclose(recurrent(q, k, v, g, 2, torch.exp).o, gla_sw(q, k, v, g, 2, torch.exp).o, atol=1e-5)
    True
    """
    how = _how(q, window, feature_map, integration, hard_weight, sinks, scale)
    return window_steps(q, k, v, g, how, initial_state, output_final_state, key_mask)
