"""A level's softmax read in one operation, with what the next level gets. Shapes, and what kind of operators these are: ops.py."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from .attend import attend, weights
from .ops import across, work
from .pairs import chunk_pairs
from .residual import residual, residual_weights
from .states import More, chunk_states

Eight = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@custom_op("mva_ref::slot_attention", mutates_args=())
def slot_attention(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, bias: Tensor | None, low: Tensor | None, K0: Tensor, V0: Tensor, ends: Sequence[int],
    ahead: int, back: int, kind: torch.dtype, scale: float, lost: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """o_t = (softmax(scale q_t K_t + b_t) + r_t) V_t in the dtype of q, the logsumexp, and the slots K, V after the last token.

    lost ("post" or "pre"): also k_t - rho_t K_t and v_t - rho_t V_t, with the slots after or before the write; "": two empty tensors.
    bias and low [tokens, HQ, M] in float32.
    """
    q, k, v, g, K0, V0 = (x.contiguous() for x in (q, k, v, g, K0, V0))
    bias, low = (None if x is None else x.contiguous() for x in (bias, low))
    at = work(g, ends, ahead, kind)
    [(K, K_end), (V, V_end)], steep = chunk_states([k, v], g, [across(K0), across(V0)], at)
    o, lse = q.new_empty(*q.shape[:2], v.shape[-1]), q.new_empty(*q.shape[:2], dtype=torch.float32)
    attend(q, k, v, g, bias, low, K, V, steep, at, scale, o, lse)
    lost_k, lost_v = (torch.empty_like(x) if lost else x.new_empty(0) for x in (k, v))
    if lost:
        residual(k, v, g, K, V, steep, at, lost == "pre", lost_k, lost_v)
    return o, lse, K_end.mT.contiguous(), V_end.mT.contiguous(), lost_k, lost_v


@slot_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, g: Tensor, bias: Any, low: Any, K0: Tensor, V0: Tensor, *call: Any) -> tuple[Tensor, ...]:
    o, lse = q.new_empty(*q.shape[:2], v.shape[-1]), q.new_empty(*q.shape[:2], dtype=torch.float32)
    left = (k, v) if call[-1] else (k.new_empty(0), v.new_empty(0))
    return o, lse, *(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (K0, V0, *left))


@custom_op("mva_ref::slot_attention_backward", mutates_args=())
def slot_attention_backward(
    do: Tensor, dlse: Tensor, dK: Tensor, dV: Tensor, dlost_k: Tensor, dlost_v: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor,
    bias: Tensor | None, low: Tensor | None, K0: Tensor, V0: Tensor, ends: Sequence[int], back: int, kind: torch.dtype, scale: float,
    lost: str,
) -> Eight:
    """Gradients of q, k, v, g, bias, low, K0 and V0; empty for a bias or low that is not there."""
    q, k, v, g, K0, V0, do, dlse, dlost_k, dlost_v = (x.contiguous() for x in (q, k, v, g, K0, V0, do, dlse, dlost_k, dlost_v))
    bias, low = (None if x is None else x.contiguous() for x in (bias, low))
    at = work(g, ends, back, kind)
    [(K, _), (V, _)], steep = chunk_states([k, v], g, [across(K0), across(V0)], at)
    narrow = q.dtype if bias is None else torch.float32      # ds is the gradient of the bias too
    a = q.new_empty(*q.shape[:2], g.shape[-1])
    ds, dlow = torch.empty_like(a, dtype=narrow), None if low is None else torch.empty_like(low)
    weights(q, k, v, g, bias, low, K, V, steep, at, scale, do, dlse, a, ds, dlow)
    dq, dk, dv, dg = (torch.empty_like(x) for x in (q, k, v, g))
    more = None
    if lost:
        more = More(q.new_empty(g.shape), dlost_k, dlost_v, lost == "pre")
        residual_weights(k, v, g, K, V, steep, at, more.excl, dlost_k, dlost_v, more.a, dg)
    [(leave_K, dK0), (leave_V, dV0)], _ = chunk_states([q, do], g, [across(dK), across(dV)], at, weights=[ds, a], scale=scale, more=more)
    chunk_pairs(ds, q, k, g, K, steep, at, scale=scale, o=dq, leaving=leave_K, dx=dk, dg=dg, add=more is not None)
    chunk_pairs(a, do, v, g, V, steep, at, leaving=leave_V, dx=dv, dg=dg, add=True)
    if more:
        for dx, y, x, X in ((dk, dlost_k, k, K), (dv, dlost_v, v, V)):
            dx.add_(y)
            chunk_pairs(more.a, y, x, g, X, steep, at, excl=more.excl, dx=dx, dg=dg, add=True)
    none = q.new_empty(0)
    return (dq, dk, dv, dg, none if bias is None else ds, none.clone() if dlow is None else dlow, dK0.mT.contiguous(),
            dV0.mT.contiguous())


@slot_attention_backward.register_fake
def _(*given: Any) -> tuple[Tensor, ...]:
    inputs = given[6:14]
    return tuple(inputs[0].new_empty(0) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:8])
    ends, _, back, kind, scale, lost = inputs[8:]
    ctx.call = ends, back, kind, scale, lost


def _backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    inputs = ctx.saved_tensors
    found = slot_attention_backward(*grads, *inputs, *ctx.call)
    return *(None if x is None else dx for x, dx in zip(inputs, found, strict=True)), *[None] * 6


slot_attention.register_autograd(_backward, setup_context=_save)
