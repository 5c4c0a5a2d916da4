"""Bookkeeping of the sliding-window forms, shared by the quadratic and the chunked form: ring, sinks, and the tokens that leave the window.

The step-by-step loops keep their own books, so that the two can be compared. Theory: docs/theory/window.md. Imports torch only.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .types import SlotState, WindowState


class Advance(NamedTuple):
    """What one call does to the books, gates and slots aside.

    after                the next state, its gates and slots still those of before
    k, v [B, W + T, ..]  the ring in order of time, then the tokens of this call: row t is at W + t, and its window at t + 1 .. t + W
    there [B, W + T]     False where a place is empty or its token masked
    left [B, T]          position of the last token out of row t's window; a sink at or before it is read from the sinks
    counts [B, T]        does the token that leaves the window at row t (it is at t) go to the history?
    history [B, T]       how many have
    """

    after: WindowState
    k: Tensor
    v: Tensor
    there: Tensor
    left: Tensor
    counts: Tensor
    history: Tensor


def fresh_slots(k: Tensor, v: Tensor, g_levels: Tensor, low_g: Tensor | None) -> SlotState:
    """Slots before the first write: zeros, with axis L. k [B, T, H, D], v [B, T, H, V], g_levels [L, B, T, H, M]."""
    L, B, _, H, M = g_levels.shape
    K, V = k.new_zeros(B, L, H, M, k.shape[-1]), v.new_zeros(B, L, H, M, v.shape[-1])
    return SlotState(K, V, k.new_zeros(B, L, H, M), None if low_g is None else V[:, 0].clone())


def room(window: int, sinks: int, tokens: int) -> tuple[int, int]:
    """The window and sinks that `tokens` tokens can fill: what to hold where no state is carried."""
    return min(window, max(tokens, 1)), min(sinks, tokens)


def fresh_state(k: Tensor, v: Tensor, g_levels: Tensor, low_g: Tensor | None, window: int, sinks: int) -> WindowState:
    """The state before the first token: an empty ring with gates of 0, no sinks, nothing seen, nothing written."""
    return fresh_ring(k, v, g_levels.movedim(0, 2), fresh_slots(k, v, g_levels, low_g), low_g, window, sinks)


def fresh_ring(k: Tensor, v: Tensor, g: Tensor | None, slots: Any, low_g: Tensor | None, window: int, sinks: int) -> WindowState:
    """The state before the first token around any empty history `slots`; g [B, T, ...] or None: gates that wait with their tokens."""
    B = k.shape[0]

    def zeros(x: Tensor, n: int) -> Tensor:
        return x.new_zeros(B, n, *x.shape[2:])

    ring, sink = (k.new_zeros(B, n, dtype=torch.bool) for n in (window, sinks))
    none = k.new_zeros(B, dtype=torch.long)
    return WindowState(
        slots, zeros(k, window), zeros(v, window), None if g is None else zeros(g, window), None if low_g is None else zeros(low_g, window),
        ring, zeros(k, sinks), zeros(v, sinks), sink, none, none.clone(),
    )


def roll(ring: Tensor, seen: Tensor) -> Tensor:
    """From ring order to order of time, out[j] = ring[(seen + j) mod W], and back with -seen. ring [B, W, ...], seen [B]."""
    W = ring.shape[1]
    index = (seen[:, None] + torch.arange(W, device=ring.device)) % W
    return ring.gather(1, index.view(*index.shape, *[1] * (ring.ndim - 2)).expand(ring.shape))


def advance(k: Tensor, v: Tensor, key_mask: Tensor | None, state: WindowState) -> Advance:
    """Let T tokens enter the window. k [B, T, H, D], v [B, T, H, V], key_mask bool [B, T]."""
    (B, T), W, n = k.shape[:2], state.k.shape[1], state.sink_k.shape[1]
    keep = k.new_ones(B, T, dtype=torch.bool) if key_mask is None else key_mask
    t = state.seen[:, None] + torch.arange(T, device=k.device)
    here = state.seen[:, None] + torch.arange(-W, T, device=k.device)
    ring = [roll(x, state.seen) for x in (state.k, state.v, state.present)]
    all_k, all_v, there = (torch.cat(parts, 1) for parts in zip(ring, (k, v, keep), strict=True))
    counts = (there & (here >= n))[:, :T]

    places = torch.arange(n, device=k.device) - state.seen[:, None]      # where in this call a sink stands
    new = (places >= 0) & (places < T)

    def sinks(old: Tensor, x: Tensor) -> Tensor:
        if not T:
            return old
        shape = (*places.shape, *[1] * (x.ndim - 2))
        index = places.clamp(0, T - 1).view(shape).expand(B, n, *x.shape[2:])
        return torch.where(new.view(shape), x.gather(1, index), old)

    end = state.seen + T
    after = state._replace(
        k=roll(all_k[:, T:], -end), v=roll(all_v[:, T:], -end), present=roll(there[:, T:], -end),
        sink_k=sinks(state.sink_k, k), sink_v=sinks(state.sink_v, v), sink_present=sinks(state.sink_present, keep),
        seen=end, written=state.written + counts.sum(1),
    )
    return Advance(after, all_k, all_v, there, t - W, counts, state.written[:, None] + counts.cumsum(1))


def delay_gates(g: Tensor, ring: Tensor, seen: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Gates as their tokens leave the window, and the ring of gates afterwards.

    A token is written with its own gates: row t has those of token t - W, and 0 where nothing is written (sinks, masked tokens,
    before the first token). g [B, T, ..., M], ring [B, W, ..., M], seen [B], counts [B, T] -> [B, T, ..., M], [B, W, ..., M]
    """
    T = g.shape[1]
    both = torch.cat([roll(ring, seen), g], 1)
    return torch.where(counts.view(*counts.shape, *[1] * (g.ndim - 2)), both[:, :T], 0), roll(both[:, T:], -(seen + T))
