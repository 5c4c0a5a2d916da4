"""The vocabulary recurrence by chunks: a T x T x M map inside each chunk, a state from chunk to chunk (P27). Every exponent is <= 0 (P28).

Letters: b batch, n chunk, t and i tokens of a chunk, h KV head, r query head of a group, c slot, d key or value coordinate.
"""

from typing import NamedTuple

import torch
from torch import Tensor, einsum
from torch.nn.functional import pad

CHUNK = 16  # the intra-chunk map costs CHUNK x M a token, the chain of states T / CHUNK steps


class Chunks(NamedTuple):
    """What the gates of one level say, chunk by chunk.

    omega [B, N, H, C, C, M]  how much of token i is in slot c at token t of the same chunk
    kept  [B, N, C, H, M]     how much of the chunk's entry state is left at token t
    tail  [B, N, C, H, M]     how much of token i is left at the chunk's end
    total [B, N, H, M]        how much of the entry state is left at the chunk's end
    """

    omega: Tensor
    kept: Tensor
    tail: Tensor
    total: Tensor


def split(x: Tensor) -> Tensor:
    """[B, T, ...] -> [B, N, C, ...], zeros (gates that write nothing) behind the last token."""
    short = -x.shape[1] % CHUNK
    padded: Tensor = pad(x, [0, 0] * (x.ndim - 2) + [0, short])
    return padded.view(x.shape[0], -1, CHUNK, *x.shape[2:])


def join(x: Tensor, T: int) -> Tensor:
    """[B, N, C, ...] -> [B, T, ...]."""
    return x.flatten(1, 2)[:, :T]


def chunk_maps(g: Tensor, w: Tensor | None = None) -> Chunks:
    """Maps of the gates g [B, N, C, H, M]: a token is written with 1 - exp(g), or with w. Spans are summed one by one: -inf is exact."""
    C, w = g.shape[2], -torch.expm1(g) if w is None else w
    gates = g.movedim(2, 3)                                                                        # b n h t c
    later = torch.ones(C, C, dtype=torch.bool, device=g.device).tril(-1)                            # token t comes after token i
    spans = torch.where(later[..., None], gates[..., :, None, :], 0).cumsum(3)                      # sum over i < j <= t
    seen = later | torch.eye(C, dtype=torch.bool, device=g.device)
    left = torch.where(seen[..., None], spans.exp(), 0)
    weight = w.movedim(2, 3)
    tail = left[..., -1, :, :] * weight
    return Chunks(left * weight[..., None, :, :], g.cumsum(2).exp(), tail.movedim(2, 3), g.sum(2).exp())


def entry_states(maps: Chunks, x: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
    """The state [B, H, M, D] at the entry of every chunk, [B, N, H, M, D], and after the last; x [B, N, C, H, D]."""
    added, state, entries = einsum("bnihc,bnihd->bnhcd", maps.tail, x), initial, []
    for n in range(x.shape[1]):
        entries.append(state)
        state = maps.total[:, n, ..., None] * state + added[:, n]
    return torch.stack(entries, 1) if entries else added, state


def scores(q: Tensor, k: Tensor, maps: Chunks, K: Tensor) -> Tensor:
    """q_t.K_t[c]: q [B, N, C, H, R, D], k [B, N, C, H, D], entries K [B, N, H, M, D] -> [B, N, C, H, R, M]."""
    inside = einsum("bnhrti,bnhtic->bnthrc", einsum("bnthrd,bnihd->bnhrti", q, k), maps.omega)
    return inside + einsum("bnthrd,bnhcd->bnthrc", q, K) * maps.kept[..., None, :]


def values(p: Tensor, v: Tensor, maps: Chunks, V: Tensor) -> Tensor:
    """p_t V_t: p [B, N, C, H, R, M], v [B, N, C, H, V], entries V [B, N, H, M, V] -> [B, N, C, H, R, V]."""
    inside = einsum("bnhrti,bnihd->bnthrd", einsum("bnthrc,bnhtic->bnhrti", p, maps.omega), v)
    return inside + einsum("bnthrc,bnhcd->bnthrd", p * maps.kept[..., None, :], V)


class ChunkedLevel:
    """The slots of one level; see mva_ref.fast.compose.Level. w [B, T, H, M]: what a token is written with, if not 1 - exp(g)."""

    def __init__(self, g: Tensor, w: Tensor | None = None) -> None:
        self.g, self.maps = g, chunk_maps(split(g), None if w is None else split(w))
        self.written: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = {}

    def write(self, x: Tensor, X0: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x by chunks, the entry states, and the last state; once for each x."""
        if id(x) not in self.written:
            chunks = split(x)
            self.written[id(x)] = x, chunks, *entry_states(self.maps, chunks, X0)    # with x itself, so that its id stays its own
        return self.written[id(x)][1:]

    def scores(self, q: Tensor, k: Tensor, K0: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        chunks, entries, end = self.write(k, K0)
        return scale * join(scores(split(q), chunks, self.maps, entries), q.shape[1]), end

    def values(self, p: Tensor, v: Tensor, V0: Tensor, before: bool = False) -> tuple[Tensor, Tensor]:
        chunks, entries, end = self.write(v, V0)
        maps = self.maps
        if before:
            omega, kept = pad(maps.omega, (0, 0, 0, 0, 1, 0))[..., :-1, :, :], pad(maps.kept, (0, 0, 0, 0, 1, 0), value=1.0)[:, :, :-1]
            maps = maps._replace(omega=omega, kept=kept)
        return join(values(split(p), chunks, maps, entries), p.shape[1]), end

    def attend(self, *inputs: object) -> None:
        return None

    def running(self, initial: Tensor) -> Tensor:
        return self.g.cumsum(1) + initial[:, None]

    def total(self, initial: Tensor) -> Tensor:
        return self.g.sum(1) + initial
