"""The sliding window and what has left it. Theory: docs/theory/window.md (P21 to P23)."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..types import Output, SlotState, WindowState
from .softmax_attention import attend


class Delayed(NamedTuple):
    """The tokens as they leave the window: row t has token t - W.

    k, v [B, T, H, ...]; counts [B, T], False for sinks, masked tokens and where there is none; history [B, T], how many have counted.
    """

    k: Tensor
    v: Tensor
    counts: Tensor
    history: Tensor


def fresh_slots(k: Tensor, v: Tensor, g_levels: Tensor, low_g: Tensor | None) -> SlotState:
    """Slots before the first write.

    Equation:  K = 0, V = 0, log_decay = 0
    Shapes:    k [B, T, H, D], v [B, T, H, V], g_levels [L, B, T, H, M] -> SlotState with axis L
    Numerics:  in the dtype of k.
    Source:    P9.

    >>> x = torch.zeros(1, 5, 2, 3); fresh_slots(x, x, x[None], None).K.shape
    torch.Size([1, 1, 2, 3, 3])
    """
    L, B, _, H, M = g_levels.shape
    K, V = k.new_zeros(B, L, H, M, k.shape[-1]), v.new_zeros(B, L, H, M, v.shape[-1])
    return SlotState(K, V, k.new_zeros(B, L, H, M), None if low_g is None else V[:, 0].clone())


def fresh_state(k: Tensor, v: Tensor, g: Tensor, low_g: Tensor | None, window: int, sinks: int, slots: SlotState) -> WindowState:
    """The state before the first token.

    Equation:  an empty ring, empty sinks, nothing seen, nothing written
    Shapes:    k [B, T, H, D], v [B, T, H, V], g [B, T, ..., M] -> see WindowState
    Numerics:  gates of 0: what is not there writes nothing.
    Source:    docs/theory/window.md.

    >>> x = torch.zeros(1, 5, 2, 3); fresh_state(x, x, x, None, 4, 1, SlotState(None, x, None)).k.shape
    torch.Size([1, 4, 2, 3])
    """
    B = k.shape[0]

    def zeros(x: Tensor, n: int) -> Tensor:
        return x.new_zeros(B, n, *x.shape[2:])

    ring, sink = (k.new_zeros(B, n, dtype=torch.bool) for n in (window, sinks))
    none = k.new_zeros(B, dtype=torch.long)
    return WindowState(slots, zeros(k, window), zeros(v, window), zeros(g, window), None if low_g is None else zeros(low_g, window),
                       ring, zeros(k, sinks), zeros(v, sinks), sink, none, none.clone())


def roll(ring: Tensor, seen: Tensor) -> Tensor:
    """From ring order to order of time, or back with -seen.

    Equation:  out[j] = ring[(seen + j) mod W]
    Shapes:    ring [B, W, ...], seen [B] -> [B, W, ...]
    Numerics:  exact.
    Source:    rolling buffer of Mistral (2310.06825).

    >>> roll(torch.tensor([[4, 5, 3]]), torch.tensor([5])).tolist()
    [[3, 4, 5]]
    """
    W = ring.shape[1]
    index = (seen[:, None] + torch.arange(W, device=ring.device)) % W
    return ring.gather(1, index.view(*index.shape, *[1] * (ring.ndim - 2)).expand(ring.shape)) if W else ring


def exact_branch(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor, state: WindowState, scale: float
) -> tuple[Output, WindowState, Delayed]:
    """Softmax over sinks and window, the next state (its gates and slots as before), and the tokens that leave the window.

    Equation:  Z^W_t = sum exp(x_ti) over {i <= t : i > t - W or i < n},   o^W_t = the softmax read of the same set
    Shapes:    q [B, T, HQ, D], k [B, T, H, D], v [B, T, H, V], key_mask [B, T] -> o [B, T, HQ, V], lse [B, T, HQ]
    Numerics:  every token is counted once: a stored sink is used from the moment it has left the ring.
    Source:    P22; docs/theory/window.md.

    >>> q, k, v = torch.randn(3, 1, 5, 2, 4).unbind(0); g = torch.zeros(1, 5, 2, 3)
    >>> state = fresh_state(k, v, g, None, 1, 0, SlotState(None, v, None))
    >>> torch.allclose(exact_branch(q, k, v, torch.ones(1, 5, dtype=torch.bool), state, 1.0)[0].o, v)
    True
    """
    (B, T), W, n = k.shape[:2], state.k.shape[1], state.sink_k.shape[1]
    t = state.seen[:, None] + torch.arange(T, device=k.device)                                       # where each row stands
    old = state.seen[:, None] + torch.arange(-W, 0, device=k.device)                                 # where each ring entry stands
    sink = torch.arange(n, device=k.device).expand(B, n)
    ring = [roll(x, state.seen) for x in (state.k, state.v, state.present)]
    all_k, all_v, there = (torch.cat(parts, 1) for parts in zip(ring, (k, v, key_mask), strict=True))
    here = torch.cat([old, t], 1)
    left = t[:, :, None] - W                                                                         # the last token out of the window
    recent = there[:, None] & (here[:, None] <= t[:, :, None]) & (
        (here[:, None] > left) | ((here[:, None] < n) & (here[:, None] >= state.seen[:, None, None]))
    )
    stored = state.sink_present[:, None] & (sink[:, None] <= left)
    out = attend(q, torch.cat([all_k, state.sink_k], 1), torch.cat([all_v, state.sink_v], 1), torch.cat([recent, stored], 2), scale)

    counts = (there & (here >= n))[:, :T]
    from_new = (sink - state.seen[:, None]).clamp(min=0, max=max(T - 1, 0))
    is_new = (sink >= state.seen[:, None]) & (sink < state.seen[:, None] + T)

    def sinks(old_sink: Tensor, new: Tensor) -> Tensor:
        if not T:
            return old_sink
        shape = (*from_new.shape, *[1] * (new.ndim - 2))
        return torch.where(is_new.view(shape), new.gather(1, from_new.view(shape).expand(B, n, *new.shape[2:])), old_sink)

    end = state.seen + T
    after = state._replace(
        k=roll(all_k[:, T:], -end), v=roll(all_v[:, T:], -end), present=roll(there[:, T:], -end),
        sink_k=sinks(state.sink_k, k), sink_v=sinks(state.sink_v, v), sink_present=sinks(state.sink_present, key_mask),
        seen=end, written=state.written + counts.sum(1),
    )
    return out, after, Delayed(all_k[:, :T], all_v[:, :T], counts, state.written[:, None] + counts.cumsum(1))


def delay_gates(g: Tensor, ring: Tensor, seen: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Gates of the delayed tokens, 0 for those that are not written, and the ring of gates afterwards.

    Equation:  row t has the gates of token t - W; 0 for sinks, masked tokens and before the first token
    Shapes:    g [B, T, ..., M], ring [B, W, ..., M], seen [B], counts [B, T] -> [B, T, ..., M], [B, W, ..., M]
    Numerics:  exact.
    Source:    docs/theory/window.md: a token is written with its own gates.

    >>> g = torch.tensor([-1.0, -2.0]).view(1, 2, 1, 1)
    >>> delay_gates(g, torch.zeros(1, 1, 1, 1), torch.tensor([0]), torch.tensor([[False, True]]))[0].flatten().tolist()
    [0.0, -1.0]
    """
    T = g.shape[1]
    both = torch.cat([roll(ring, seen), g], 1)
    return torch.where(counts.view(*counts.shape, *[1] * (g.ndim - 2)), both[:, :T], 0), roll(both[:, T:], -(seen + T))
