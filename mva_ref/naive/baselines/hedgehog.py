"""Hedgehog: linear attention whose features are themselves a softmax, spiky as the weights that they stand for."""

import torch
from torch import Tensor

from ...frame import form
from ...types import FeatureState, Output
from .kernel import kernel_matrix, kernel_steps, products, projected


def hedgehog_features(x: Tensor, W: Tensor | None = None, b: Tensor | None = None, halves: bool = False) -> Tensor:
    """The feature map of Hedgehog, and the one of LoLCATs.

    Equation:  y = x W + b,   phi(x) = softmax([2y, -2y]);   with halves  phi(x) = [softmax(y), softmax(-y)]
    Shapes:    x [B, T, H, D], W [H, D, E] or None for the identity, b [H, E] or None for 0 -> [B, T, H, 2 E]
    Numerics:  positive until the exponential underflows; they sum to 1, with halves to 2.
    Source:    Hedgehog (2402.04347), whose map is [exp(y), exp(-y)] up to the scaling; halves: LoLCATs (2410.10254).

    >>> hedgehog_features(torch.zeros(1, 1, 1, 2)).flatten().tolist(), hedgehog_features(torch.zeros(1, 1, 1, 2), halves=True).sum().item()
    ([0.25, 0.25, 0.25, 0.25], 2.0)
    """
    y = projected(x, W, b)
    if halves:
        return torch.cat([y.softmax(-1), (-y).softmax(-1)], -1)
    return torch.cat([2 * y, -2 * y], -1).softmax(-1)


@form
def hedgehog(
    q: Tensor, k: Tensor, v: Tensor, *, W_q: Tensor | None = None, W_k: Tensor | None = None, b_q: Tensor | None = None,
    b_k: Tensor | None = None, halves: bool = False, initial_state: FeatureState | None = None, output_final_state: bool = False,
    key_mask: Tensor | None = None,
) -> Output:
    """Linear attention with learned softmax features.

    Equation:  o_t = sum_{i <= t} phi_q(q_t).phi_k(k_i) v_i / sum_{i <= t} phi_q(q_t).phi_k(k_i),   phi as in `hedgehog_features`
    Shapes:    q [B, T, HQ, D], k [B, T, H, D], v [B, T, H, V], W_q [HQ, D, E], W_k [H, D, E], b_q [HQ, E], b_k [H, E]
               -> o [B, T, HQ, V]
    Numerics:  at least float32, float64 stays; no eps: the sum is positive until all its products underflow, then the row is 0;
               takes no scale.
    Source:    Hedgehog (2402.04347); `halves` is the map of LoLCATs (2410.10254). W = None is the identity and needs E = D.

    Equal keys average the past:

    >>> q, v = torch.randn(2, 1, 5, 2, 4).unbind(0)
    >>> torch.allclose(hedgehog(q, torch.ones(1, 5, 2, 4), v).o, v.cumsum(1) / torch.arange(1, 6).view(5, 1, 1), atol=1e-6)
    True
    """
    phi_q, phi_k = hedgehog_features(q, W_q, b_q, halves), hedgehog_features(k, W_k, b_k, halves)
    o, state = kernel_matrix(products(phi_q, phi_k), v, phi_q, phi_k, key_mask, initial_state)
    return Output(o, state if output_final_state else None)


@form
def recurrent(
    q: Tensor, k: Tensor, v: Tensor, *, W_q: Tensor | None = None, W_k: Tensor | None = None, b_q: Tensor | None = None,
    b_k: Tensor | None = None, halves: bool = False, initial_state: FeatureState | None = None, output_final_state: bool = False,
    key_mask: Tensor | None = None,
) -> Output:
    """`hedgehog` one token at a time.

    Equation:  S_t = S_{t-1} + phi_k(k_t) (x) v_t,   z_t = z_{t-1} + phi_k(k_t),   o_t = phi_q(q_t) S_t / phi_q(q_t).z_t
    Shapes:    as `hedgehog`; state S [B, H, 2 E, V], z [B, H, 2 E]
    Numerics:  as `hedgehog`.
    Source:    Hedgehog (2402.04347).

    >>> q, k, v = torch.randn(3, 1, 5, 2, 4).unbind(0)
    >>> torch.allclose(recurrent(q, k, v).o, hedgehog(q, k, v).o, atol=1e-5)
    True
    """
    phi_q, phi_k = hedgehog_features(q, W_q, b_q, halves), hedgehog_features(k, W_k, b_k, halves)
    o, state = kernel_steps(phi_q, phi_k, v, key_mask, initial_state)
    return Output(o, state if output_final_state else None)
