"""MVA, GSA-SW and MVA-SW one token at a time."""

from typing import Any

import torch
from torch import Tensor, einsum

from ...frame import form, tree_map
from ...ring import fresh_state, room
from ...types import Output, SlotState, WindowState, has_mass
from . import levels as at
from .levels import Options
from .tokenwise import blend, put, stacked


@form
def mva(
    q: Tensor, k: Tensor, v: Tensor, g_levels: Tensor, *, low_query: Tensor | None = None, branches: str = "shared",
    low_g: Tensor | None = None, branch_gate: Tensor | None = None, scale: float | None = None,
    read: str | int = "softmax", perceptron: tuple[Tensor | None, Tensor | None] | None = None, residual: str = "post",
    slot_bias: str | Tensor | None = None, initial_state: SlotState | None = None, output_final_state: bool = False,
    key_mask: Tensor | None = None,
) -> Output:
    """MVA as a recurrence over tokens, levels inside.

    Equation:  per token, level:  X^l_t = diag(alpha^l_t) X^l_{t-1} + w^l_t (x) x^l_t,   x^{l+1}_t = x^l_t - rho^l_t X^l_t   (or X^l_{t-1})
    Shapes:    as mva_ref.naive.mva
    Numerics:  as mva_ref.naive.mva.
    Source:    docs/theory/levels.md.

    >>> q, k, v = torch.randn(3, 1, 5, 2, 4).unbind(0)
    >>> torch.equal(mva(q, k, v, torch.full((2, 1, 5, 2, 1), -torch.inf)).o, v)
    True
    """
    B, T = k.shape[:2]
    levels = at.start(k, v, g_levels, low_g, initial_state)
    how = Options(q.shape[-1] ** -0.5 if scale is None else scale, read, perceptron, residual, slot_bias, low_query, branch_gate,
                  read != "sigmoid")
    o, lse = [], []
    for t in range(T):
        keep = k.new_ones(B, dtype=torch.bool) if key_mask is None else key_mask[:, t]
        gate, low_gate = put(keep, g_levels[:, :, t].movedim(0, 1)), None if low_g is None else put(keep, low_g[:, t])
        levels, out = at.token(levels, q, k[:, t], v[:, t], gate, low_gate, t, how)
        o.append(out.o)
        lse.append(out.log_Z)
    HQ = q.shape[2]
    return Output(stacked(o, q.new_zeros(B, 0, HQ, v.shape[-1])), levels.state() if output_final_state else None,
                  stacked(lse, q.new_zeros(B, 0, HQ)) if has_mass(read) else None)


@form
def mva_sw(
    q: Tensor, k: Tensor, v: Tensor, g_levels: Tensor, window: int, *, integration: str = "soft", hard_weight: Tensor | None = None,
    sinks: int = 0, low_query: Tensor | None = None, branches: str = "shared", low_g: Tensor | None = None,
    branch_gate: Tensor | None = None, scale: float | None = None, read: str | int = "softmax",
    perceptron: tuple[Tensor | None, Tensor | None] | None = None, residual: str = "post", slot_bias: str | Tensor | None = None,
    initial_state: WindowState | None = None, output_final_state: bool = False, key_mask: Tensor | None = None,
) -> Output:
    """MVA-SW as a recurrence: each token displaces one from the ring, which is then written to the slots with its own gates.

    Equation:  per token t:  write token t - W (unless a sink or masked), put token t in the ring, read ring and sinks by softmax, merge
    Shapes:    as mva_ref.naive.mva_sw
    Numerics:  as mva_ref.naive.mva_sw.
    Source:    docs/theory/window.md.

    >>> q, k, v = torch.randn(3, 1, 5, 2, 4).unbind(0)
    >>> torch.allclose(mva_sw(q, k, v, torch.zeros(1, 1, 5, 2, 3), window=1, slot_bias="mass").o, v)
    True
    """
    (B, T, H, D), HQ = k.shape, q.shape[2]
    W, n = (window, sinks) if initial_state or output_final_state else room(window, sinks, T)
    scale = D**-0.5 if scale is None else scale
    s0, g = initial_state or fresh_state(k, v, g_levels, low_g, W, n), g_levels.movedim(0, 2)
    levels = at.start(k, v, g_levels, low_g, s0.slots)
    how = Options(scale, read, perceptron, residual, slot_bias, low_query, branch_gate, True)
    ring_k, ring_v, ring_g, ring_low, present, sink_k, sink_v, sink_present, seen, written = s0[1:]
    o, lse = [], []
    for t in range(T):
        keep = k.new_ones(B, dtype=torch.bool) if key_mask is None else key_mask[:, t]
        here = torch.arange(W, device=k.device) == (seen % W)[:, None]
        is_sink = torch.arange(n, device=k.device) == seen[:, None]
        leaving = torch.arange(B, device=k.device), seen % W
        counts = present[leaving] & (seen - W >= n)
        written = written + counts
        low_gate = None if ring_low is None else put(counts, ring_low[leaving])
        levels, far = at.token(levels, q, ring_k[leaving], ring_v[leaving], put(counts, ring_g[leaving]), low_gate, t, how)
        ring_k, ring_v, ring_g = put(here, k[:, t, None], ring_k), put(here, v[:, t, None], ring_v), put(here, g[:, t, None], ring_g)
        ring_low = None if ring_low is None or low_g is None else put(here, low_g[:, t, None], ring_low)
        sink_k, sink_v = put(is_sink, k[:, t, None], sink_k), put(is_sink, v[:, t, None], sink_v)
        present, sink_present = put(here, keep[:, None], present), put(is_sink, keep[:, None], sink_present)
        stored = sink_present & (torch.arange(n, device=k.device) <= (seen - W)[:, None])
        seen = seen + 1
        visible = torch.cat([present, stored], 1)[:, None, None]
        x = scale * einsum("bhrd,bihd->bhri", q[:, t].unflatten(1, (H, -1)), torch.cat([ring_k, sink_k], 1))
        x = torch.where(visible, x, -torch.inf)
        some = visible.any(-1)
        near = torch.where(some, torch.where(some[..., None], x, 0).logsumexp(-1), -torch.inf)
        window_o = einsum("bhri,bihv->bhrv", (x - torch.where(some, near, 0)[..., None]).exp(), torch.cat([ring_v, sink_v], 1))
        b = None if hard_weight is None else hard_weight.expand(B, T, HQ)[:, t].unflatten(1, (H, -1))
        out, total = blend(window_o, near, far, (written == 0)[:, None, None], b if integration == "hard" else None)
        o.append(out)
        lse.append(total)
    state = WindowState(levels.state(), ring_k, ring_v, ring_g, ring_low, present, sink_k, sink_v, sink_present, seen, written)
    mass = stacked(lse, q.new_zeros(B, 0, HQ)) if has_mass(read) and integration == "soft" else None
    return Output(stacked(o, q.new_zeros(B, 0, HQ, v.shape[-1])), state if output_final_state else None, mass)


def gsa_sw(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, window: int, *, initial_state: WindowState | None = None, **options: Any
) -> Output:
    """GSA-SW as a recurrence: MVA-SW with one level, states without the axis L.

    Equation:  as mva_sw with L = 1
    Shapes:    as mva_ref.naive.gsa_sw
    Numerics:  as mva_ref.naive.mva_sw.
    Source:    docs/theory/window.md.

    >>> q, k, v = torch.randn(3, 1, 5, 2, 4).unbind(0)
    >>> torch.allclose(gsa_sw(q, k, v, torch.zeros(1, 5, 2, 3), window=1, slot_bias="mass").o, v)
    True
    """
    s0 = initial_state and initial_state._replace(slots=tree_map(lambda x: x[:, None], initial_state.slots), g=initial_state.g[:, :, None])
    out = mva_sw(q, k, v, g[None], window, initial_state=s0, **options)
    state = out.state and out.state._replace(slots=tree_map(lambda x: x[:, 0], out.state.slots), g=out.state.g[:, :, 0])
    return out._replace(state=state)
