"""Two differentiable operations on slots, from which every slot method is composed: scores of the slots, and values of the slots.

Tokens of all sequences lie one after the other: q [tokens, HQ, D], k [tokens, H, D], v [tokens, H, V], g [tokens, H, M]; states
[N, H, M, D] in float32. Gradients recompute what they need: nothing of size tokens x M x D is kept.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .attend import attend, weights
from .pairs import chunk_pairs
from .plan import Work
from .residual import residual, residual_weights
from .states import More, chunk_states


def across(state: Tensor) -> Tensor:
    """A state [N, H, M, D] as the kernels hold it, [N, H, D, M]."""
    return state.mT.contiguous()


class SlotScores(torch.autograd.Function):
    """s_t[c] = scale q_t.K_t[c], float32 [tokens, HQ, M], and the slot keys K after the last token of every sequence."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, g: Tensor, K0: Tensor, ahead: Work, back: Work, scale: float) -> tuple[Tensor, Tensor]:
        q, k, g, K0 = (x.contiguous() for x in (q, k, g, K0))
        [(entry, end)], steep = chunk_states([k], g, [across(K0)], ahead)
        s = q.new_empty(*q.shape[:2], g.shape[-1], dtype=torch.float32)
        chunk_pairs(None, q, k, g, entry, steep, ahead, scale=scale, s=s)
        ctx.save_for_backward(q, k, g, K0)
        ctx.call = back, scale
        return s, end.mT

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, ds: Tensor, dK: Tensor) -> tuple[Tensor | None, ...]:
        q, k, g, K0 = ctx.saved_tensors
        back, scale = ctx.call
        ds = ds.contiguous()
        [(entry, _)], steep = chunk_states([k], g, [across(K0)], back)
        [(leaving, dK0)], _ = chunk_states([q], g, [across(dK)], back, weights=[ds], scale=scale)
        dq, dk, dg = torch.empty_like(q), torch.empty_like(k), torch.empty_like(g)
        chunk_pairs(ds, q, k, g, entry, steep, back, scale=scale, o=dq, leaving=leaving, dx=dk, dg=dg)
        return dq, dk, dg, dK0.mT, None, None, None


class SlotValues(torch.autograd.Function):
    """o_t = sum_c p_t[c] V_t[c] (excl: V_{t-1}), float32 [tokens, HQ, V], and the slot values V after the last token."""

    @staticmethod
    def forward(ctx: Any, p: Tensor, v: Tensor, g: Tensor, V0: Tensor, ahead: Work, back: Work, excl: bool) -> tuple[Tensor, Tensor]:
        p, v, g, V0 = (x.contiguous() for x in (p, v, g, V0))
        [(entry, end)], steep = chunk_states([v], g, [across(V0)], ahead)
        o = v.new_empty(*p.shape[:2], v.shape[-1], dtype=torch.float32)
        chunk_pairs(p, None, v, g, entry, steep, ahead, excl=excl, o=o)
        ctx.save_for_backward(p, v, g, V0)
        ctx.call = back, excl
        return o, end.mT

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, dV: Tensor) -> tuple[Tensor | None, ...]:
        p, v, g, V0 = ctx.saved_tensors
        back, excl = ctx.call
        do = do.contiguous()
        [(entry, _)], steep = chunk_states([v], g, [across(V0)], back)
        [(leaving, dV0)], _ = chunk_states([do], g, [across(dV)], back, weights=[p], excl=excl)
        dp, dv, dg = torch.empty_like(p), torch.empty_like(v), torch.empty_like(g)
        chunk_pairs(p, do, v, g, entry, steep, back, excl=excl, s=dp, leaving=leaving, dx=dv, dg=dg)
        return dp, dv, dg, dV0.mT, None, None, None


class SlotAttention(torch.autograd.Function):
    """o_t = (softmax(scale q_t K_t + b_t) + r_t) V_t in the dtype of q, the logsumexp, and the slots K, V after the last token.

    lost ("post" or "pre"): also k_t - rho_t K_t and v_t - rho_t V_t, with the slots after or before the write; else two empty tensors.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, bias: Tensor | None, low: Tensor | None, K0: Tensor, V0: Tensor, ahead: Work,
        back: Work, scale: float, lost: str | None,
    ) -> tuple[Tensor, ...]:
        q, k, v, g, K0, V0 = (x.contiguous() for x in (q, k, v, g, K0, V0))
        bias, low = (None if x is None else x.contiguous() for x in (bias, low))
        [(K, K_end), (V, V_end)], steep = chunk_states([k, v], g, [across(K0), across(V0)], ahead)
        o, lse = q.new_empty(*q.shape[:2], v.shape[-1]), q.new_empty(*q.shape[:2], dtype=torch.float32)
        attend(q, k, v, g, bias, low, K, V, steep, ahead, scale, o, lse)
        lost_k, lost_v = (torch.empty_like(x) if lost else x.new_empty(0) for x in (k, v))
        if lost:
            residual(k, v, g, K, V, steep, ahead, lost == "pre", lost_k, lost_v)
        ctx.save_for_backward(q, k, v, g, bias, low, K0, V0)
        ctx.call = back, scale, lost
        return o, lse, K_end.mT, V_end.mT, lost_k, lost_v

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, do: Tensor, dlse: Tensor, dK: Tensor, dV: Tensor, dlost_k: Tensor, dlost_v: Tensor
    ) -> tuple[Tensor | None, ...]:
        q, k, v, g, bias, low, K0, V0 = ctx.saved_tensors
        back, scale, lost = ctx.call
        do, dlse, dlost_k, dlost_v = (x.contiguous() for x in (do, dlse, dlost_k, dlost_v))
        [(K, _), (V, _)], steep = chunk_states([k, v], g, [across(K0), across(V0)], back)
        narrow = q.dtype if bias is None else torch.float32      # ds is the gradient of the bias too
        a = q.new_empty(*q.shape[:2], g.shape[-1])
        ds, dlow = torch.empty_like(a, dtype=narrow), None if low is None else torch.empty_like(low)
        weights(q, k, v, g, bias, low, K, V, steep, back, scale, do, dlse, a, ds, dlow)
        dq, dk, dv, dg = (torch.empty_like(x) for x in (q, k, v, g))
        more = None
        if lost:
            more = More(q.new_empty(g.shape), dlost_k, dlost_v, lost == "pre")
            residual_weights(k, v, g, K, V, steep, back, more.excl, dlost_k, dlost_v, more.a, dg)
        [(leave_K, dK0), (leave_V, dV0)], _ = chunk_states(
            [q, do], g, [across(dK), across(dV)], back, weights=[ds, a], scale=scale, more=more)
        chunk_pairs(ds, q, k, g, K, steep, back, scale=scale, o=dq, leaving=leave_K, dx=dk, dg=dg, add=more is not None)
        chunk_pairs(a, do, v, g, V, steep, back, leaving=leave_V, dx=dv, dg=dg, add=True)
        if more:
            for dx, y, x, X in ((dk, dlost_k, k, K), (dv, dlost_v, v, V)):
                dx.add_(y)
                chunk_pairs(more.a, y, x, g, X, steep, back, excl=more.excl, dx=dx, dg=dg, add=True)
        return dq, dk, dv, dg, None if bias is None else ds, dlow, dK0.mT, dV0.mT, None, None, None, None


def slot_attention(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, bias: Tensor | None, low: Tensor | None, K0: Tensor, V0: Tensor, ahead: Work, back: Work,
    scale: float, lost: str | None,
) -> tuple[Tensor, ...]:
    """See SlotAttention. bias and low [tokens, HQ, M] in float32."""
    return SlotAttention.apply(q, k, v, g, bias, low, K0, V0, ahead, back, scale, lost)  # type: ignore[no-any-return]


def slot_scores(q: Tensor, k: Tensor, g: Tensor, K0: Tensor, ahead: Work, back: Work, scale: float) -> tuple[Tensor, Tensor]:
    """See SlotScores."""
    return SlotScores.apply(q, k, g, K0, ahead, back, scale)  # type: ignore[no-any-return]


def slot_values(p: Tensor, v: Tensor, g: Tensor, V0: Tensor, ahead: Work, back: Work, excl: bool = False) -> tuple[Tensor, Tensor]:
    """See SlotValues."""
    return SlotValues.apply(p, v, g, V0, ahead, back, excl)  # type: ignore[no-any-return]
