"""A window joined with features of what has left it, linear in T. Equations: mva_ref.naive.baselines.feature_window."""

from collections.abc import Callable

from torch import Tensor

from ...frame import form
from ...naive.baselines import gla_sw as gla_sw_rows
from ...naive.baselines import lolcats as lolcats_rows
from ...naive.baselines.feature_window import window_matrix
from ...types import Output, WindowState
from .decayed import decayed_chunks
from .local import local_attention


@form
def gla_sw(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, window: int, feature_map: Callable[[Tensor], Tensor], *, integration: str = "soft",
    hard_weight: Tensor | None = None, sinks: int = 0, scale: float | None = None, initial_state: WindowState | None = None,
    output_final_state: bool = False, key_mask: Tensor | None = None,
) -> Output:
    """GLA-SW: blocked local attention, and GLA by chunks over the delayed tokens; see mva_ref.naive.baselines.gla_sw."""
    how = gla_sw_rows.setting(q, window, feature_map, integration, hard_weight, sinks, scale)
    return window_matrix(q, k, v, g, how, initial_state, output_final_state, key_mask, local_attention, decayed_chunks)


@form
def lolcats(
    q: Tensor, k: Tensor, v: Tensor, window: int, *, W_q: Tensor | None = None, W_k: Tensor | None = None,
    window_weight: Tensor | None = None, own_maximum: bool = True, scale: float | None = None, initial_state: WindowState | None = None,
    output_final_state: bool = False, key_mask: Tensor | None = None,
) -> Output:
    """LoLCATs: blocked local attention, and features by chunks over the delayed tokens; see mva_ref.naive.baselines.lolcats."""
    how = lolcats_rows.setting(q, k, window, W_q, W_k, window_weight, own_maximum, scale)
    out = window_matrix(q, k, v, None, how, initial_state, output_final_state, key_mask, local_attention, decayed_chunks)
    return out._replace(lse=None if own_maximum else out.lse)
