"""LoLCATs: softmax over a window, learned softmax features over everything before it, under one sum."""

import torch
from torch import Tensor

from ...frame import form
from ...types import Output, WindowState
from .feature_window import Hybrid, window_matrix, window_steps
from .hedgehog import hedgehog_features


def _how(
    q: Tensor, k: Tensor, window: int, W_q: Tensor | None, W_k: Tensor | None, window_weight: Tensor | None, own_maximum: bool,
    scale: float | None,
) -> Hybrid:
    weight = q.new_zeros(()) if window_weight is None else torch.where(window_weight > 0, window_weight, 0).log()

    def mass(lse: Tensor, top: Tensor) -> Tensor:
        return lse + weight - (torch.where(top.isneginf(), 0, top) if own_maximum else 0)

    return Hybrid(lambda x: hedgehog_features(x, W_q, None, True), lambda x: hedgehog_features(x, W_k, None, True), window, 0,
                  q.shape[-1] ** -0.5 if scale is None else scale, mass)


@form
def lolcats(
    q: Tensor, k: Tensor, v: Tensor, window: int, *, W_q: Tensor | None = None, W_k: Tensor | None = None,
    window_weight: Tensor | None = None, own_maximum: bool = True, scale: float | None = None, initial_state: WindowState | None = None,
    output_final_state: bool = False, key_mask: Tensor | None = None,
) -> Output:
    """LoLCATs' linear attention with a sliding window.

    Equation:  o_t = (y sum_W e^{x_ti - c_t} v_i + sum_H phi(q_t).phi(k_i) v_i) / (y sum_W e^{x_ti - c_t} + sum_H phi(q_t).phi(k_i)),
               x = scale q.k,   c_t = the largest x_ti of the window (own_maximum=False: 0),   phi(x) = (softmax(x W), softmax(-x W))
    Shapes:    q [B, T, HQ, D], k [B, T, H, D], v [B, T, H, V], W_q [HQ, D, E], W_k [H, D, E], y = window_weight [HQ] -> o [B, T, HQ, V]
    Numerics:  at least float32, float64 stays; c_t is part of the function and not of its stability: with it the window's mass does
               not depend on the level of its scores (P26). lse only for own_maximum=False.
    Source:    LoLCATs (2410.10254), the variant with a window of W keys.

    A window that holds everything is softmax attention:

    >>> from mva_ref.naive.softmax_attention import softmax
    >>> q, k, v = torch.randn(3, 1, 5, 2, 4).unbind(0)
    >>> torch.allclose(lolcats(q, k, v, 5).o, softmax(q, k, v).o, atol=1e-6)
    True
    """
    how = _how(q, k, window, W_q, W_k, window_weight, own_maximum, scale)
    out = window_matrix(q, k, v, None, how, initial_state, output_final_state, key_mask)
    return out._replace(lse=None if own_maximum else out.lse)


@form
def recurrent(
    q: Tensor, k: Tensor, v: Tensor, window: int, *, W_q: Tensor | None = None, W_k: Tensor | None = None,
    window_weight: Tensor | None = None, own_maximum: bool = True, scale: float | None = None, initial_state: WindowState | None = None,
    output_final_state: bool = False, key_mask: Tensor | None = None,
) -> Output:
    """`lolcats` one token at a time.

    Equation:  as `lolcats`
    Shapes:    as `lolcats`
    Numerics:  as `lolcats`.
    Source:    LoLCATs (2410.10254).

    >>> q, k, v = torch.randn(3, 1, 5, 2, 4).unbind(0)
    >>> torch.allclose(recurrent(q, k, v, 2).o, lolcats(q, k, v, 2).o, atol=1e-5)
    True
    """
    how = _how(q, k, window, W_q, W_k, window_weight, own_maximum, scale)
    out = window_steps(q, k, v, None, how, initial_state, output_final_state, key_mask)
    return out._replace(lse=None if own_maximum else out.lse)
