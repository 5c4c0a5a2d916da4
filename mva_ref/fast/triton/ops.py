"""Scores of the slots, and values of the slots: two differentiable operations from which, with attention.py, every slot method is composed.

Tokens of all sequences lie one after the other, each sequence ending at one of `ends` (0 first): q [tokens, HQ, D], k [tokens, H, D],
v [tokens, H, V], g [tokens, H, M]; states [N, H, M, D] in float32. `ahead` and `back` are the tokens of a chunk forward and backward,
`kind` the dtype that sets the precision of products. Gradients recompute what they need: nothing of size tokens x M x D is kept.

These are operators of torch.library: torch.compile does not look into them. They have first derivatives only.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from .pairs import chunk_pairs
from .plan import Tiles, Work, plan
from .states import chunk_states


def across(state: Tensor) -> Tensor:
    """A state [N, H, M, D] as the kernels hold it, [N, H, D, M]."""
    return state.mT.contiguous()


def work(g: Tensor, ends: Sequence[int], chunk: int, kind: torch.dtype) -> Work:
    """One pass over the tokens."""
    return Work(plan(tuple(ends), g.shape[1], chunk, g.device), Tiles(chunk, kind))


@custom_op("mva_ref::slot_scores", mutates_args=())
def slot_scores(
    q: Tensor, k: Tensor, g: Tensor, K0: Tensor, ends: Sequence[int], ahead: int, back: int, kind: torch.dtype, scale: float
) -> tuple[Tensor, Tensor]:
    """s_t[c] = scale q_t.K_t[c], float32 [tokens, HQ, M], and the slot keys K after the last token of every sequence."""
    q, k, g, K0 = (x.contiguous() for x in (q, k, g, K0))
    at = work(g, ends, ahead, kind)
    [(entry, end)], steep = chunk_states([k], g, [across(K0)], at)
    s = q.new_empty(*q.shape[:2], g.shape[-1], dtype=torch.float32)
    chunk_pairs(None, q, k, g, entry, steep, at, scale=scale, s=s)
    return s, end.mT.contiguous()


@slot_scores.register_fake
def _(q: Tensor, k: Tensor, g: Tensor, K0: Tensor, *call: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:2], g.shape[-1], dtype=torch.float32), torch.empty_like(K0, memory_format=torch.contiguous_format)


@custom_op("mva_ref::slot_scores_backward", mutates_args=())
def slot_scores_backward(
    ds: Tensor, dK: Tensor, q: Tensor, k: Tensor, g: Tensor, K0: Tensor, ends: Sequence[int], back: int, kind: torch.dtype, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, g and K0."""
    ds, q, k, g, K0 = (x.contiguous() for x in (ds, q, k, g, K0))
    at = work(g, ends, back, kind)
    [(entry, _)], steep = chunk_states([k], g, [across(K0)], at)
    [(leaving, dK0)], _ = chunk_states([q], g, [across(dK)], at, weights=[ds], scale=scale)
    dq, dk, dg = torch.empty_like(q), torch.empty_like(k), torch.empty_like(g)
    chunk_pairs(ds, q, k, g, entry, steep, at, scale=scale, o=dq, leaving=leaving, dx=dk, dg=dg)
    return dq, dk, dg, dK0.mT.contiguous()


@custom_op("mva_ref::slot_values", mutates_args=())
def slot_values(
    p: Tensor, v: Tensor, g: Tensor, V0: Tensor, ends: Sequence[int], ahead: int, back: int, kind: torch.dtype, excl: bool
) -> tuple[Tensor, Tensor]:
    """o_t = sum_c p_t[c] V_t[c] (excl: V_{t-1}), float32 [tokens, HQ, V], and the slot values V after the last token."""
    p, v, g, V0 = (x.contiguous() for x in (p, v, g, V0))
    at = work(g, ends, ahead, kind)
    [(entry, end)], steep = chunk_states([v], g, [across(V0)], at)
    o = v.new_empty(*p.shape[:2], v.shape[-1], dtype=torch.float32)
    chunk_pairs(p, None, v, g, entry, steep, at, excl=excl, o=o)
    return o, end.mT.contiguous()


@slot_values.register_fake
def _(p: Tensor, v: Tensor, g: Tensor, V0: Tensor, *call: Any) -> tuple[Tensor, Tensor]:
    return v.new_empty(*p.shape[:2], v.shape[-1], dtype=torch.float32), torch.empty_like(V0, memory_format=torch.contiguous_format)


@custom_op("mva_ref::slot_values_backward", mutates_args=())
def slot_values_backward(
    do: Tensor, dV: Tensor, p: Tensor, v: Tensor, g: Tensor, V0: Tensor, ends: Sequence[int], back: int, kind: torch.dtype, excl: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of p, v, g and V0."""
    do, p, v, g, V0 = (x.contiguous() for x in (do, p, v, g, V0))
    at = work(g, ends, back, kind)
    [(entry, _)], steep = chunk_states([v], g, [across(V0)], at)
    [(leaving, dV0)], _ = chunk_states([do], g, [across(dV)], at, weights=[p], excl=excl)
    dp, dv, dg = torch.empty_like(p), torch.empty_like(v), torch.empty_like(g)
    chunk_pairs(p, do, v, g, entry, steep, at, excl=excl, s=dp, leaving=leaving, dx=dv, dg=dg)
    return dp, dv, dg, dV0.mT.contiguous()


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:4])
    ends, _, back, kind, last = inputs[4:]
    ctx.call = ends, back, kind, last


def _like_inputs(dx: Tensor, dy: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in rest[:4])


for _forward, _backward in ((slot_scores, slot_scores_backward), (slot_values, slot_values_backward)):
    _backward.register_fake(_like_inputs)
    _forward.register_autograd(
        lambda ctx, *grads, _backward=_backward: (*_backward(*grads, *ctx.saved_tensors, *ctx.call), None, None, None, None, None),
        setup_context=_save)
