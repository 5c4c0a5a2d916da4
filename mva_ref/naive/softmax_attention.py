"""True softmax attention: the function that everything else approximates. Theory: docs/theory/orders.md and window.md (P21, P22)."""

import torch
from torch import Tensor, einsum

from ..frame import form
from ..types import Output


def group(q: Tensor, kv_heads: int) -> Tensor:
    """Split the query heads by the KV head they read.

    Equation:  query head h reads KV head h // R,   R = HQ / H
    Shapes:    q [B, T, HQ, ...] -> [B, T, H, R, ...]
    Numerics:  a view; K and V are never repeated.
    Source:    grouped-query attention (2305.13245).

    >>> group(torch.zeros(1, 5, 6, 4), 2).shape
    torch.Size([1, 5, 2, 3, 4])
    """
    grouped: Tensor = q.unflatten(2, (kv_heads, q.shape[2] // kv_heads))
    return grouped


def normalise(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over the last axis that knows what an empty row is.

    Equation:  p_i = exp(x_i) / Z,   lse = log Z,   Z = sum_j exp(x_j)
    Shapes:    scores [..., n] -> p [..., n], lse [...]
    Numerics:  -inf means absent. All absent (or n = 0): p = 0, lse = -inf, every derivative 0. The shift is a constant to autograd.
    Source:    P21; online softmax (1805.02867) for the shift.

    >>> p, lse = normalise(torch.full((2,), -torch.inf)); p.tolist(), lse.item()
    ([0.0, 0.0], -inf)
    """
    shift = scores.detach().logsumexp(-1, keepdim=True)
    shift = torch.where(shift.isneginf(), 0, shift)
    e = (scores - shift).exp()
    Z = e.sum(-1, keepdim=True)
    some = torch.where(Z > 0, Z, 1)
    return e / some, torch.where(Z > 0, some.log() + shift, -torch.inf).squeeze(-1)


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Output:
    """Softmax attention over whatever each query is allowed to see.

    Equation:  x_ti = scale q_t.k_i,   o_t = sum_i exp(x_ti) v_i / Z_t,   Z_t = sum_i exp(x_ti),   both sums over the visible i
    Shapes:    q [B, T, HQ, D], k [B, I, H, D], v [B, I, H, V], visible bool [B, T, I] -> o [B, T, HQ, V], lse [B, T, HQ]
    Numerics:  in the dtype of its inputs; an empty row gives o = 0, lse = -inf.
    Source:    softmax attention (1706.03762), P21.

    >>> q, k, v = torch.randn(3, 1, 5, 2, 4).unbind(0)
    >>> only_self = torch.eye(5, dtype=torch.bool)[None]
    >>> torch.allclose(attend(q, k, v, only_self, 1.0).o, v)
    True
    """
    x = scale * einsum("bthrd,bihd->bthri", group(q, k.shape[2]), k)
    a, lse = normalise(torch.where(visible[:, :, None, None], x, -torch.inf))
    return Output(einsum("bthri,bihv->bthrv", a, v).flatten(2, 3), None, lse.flatten(2, 3))


@form
def softmax(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, window: int | None = None, sinks: int = 0,
    key_mask: Tensor | None = None,
) -> Output:
    """Causal softmax attention, whole or through a sliding window with attention sinks.

    Equation:  o_t = sum_i a_ti v_i,   a_ti = exp(scale q_t.k_i) / Z_t   over   {i <= t : i > t - window or i < sinks}
    Shapes:    q [B, T, HQ, D], k [B, T, H, D], v [B, T, H, V], key_mask bool [B, T] -> o [B, T, HQ, V], lse = log Z [B, T, HQ]
    Numerics:  at least float32, float64 stays; a row whose keys are all masked gives o = 0, lse = -inf.
    Source:    softmax attention (1706.03762); the window counts the query's own key, as Mistral does (2310.06825); sinks (2309.17453).

    A window of one key reads the token itself:

    >>> q, k, v = torch.randn(3, 1, 5, 2, 4).unbind(0)
    >>> torch.allclose(softmax(q, k, v, window=1).o, v)
    True
    """
    t, i = torch.arange(k.shape[1], device=k.device)[:, None], torch.arange(k.shape[1], device=k.device)
    visible = (i <= t)[None]
    if window is not None:
        visible = visible & ((i > t - window) | (i < sinks))
    if key_mask is not None:
        visible = visible & key_mask[:, None]
    return attend(q, k, v, visible.expand(k.shape[0], -1, -1), q.shape[-1] ** -0.5 if scale is None else scale)
