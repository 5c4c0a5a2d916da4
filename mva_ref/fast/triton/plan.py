"""How tokens are cut into chunks and segments, and which tiles a kernel works on."""

import functools
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

PROGRAMS = 1056  # eight for each multiprocessor of a large Hopper part: what walks over segments should fill


class Plan(NamedTuple):
    """Chunks lie in segments, segments in sequences; nothing crosses a sequence. All tables int32 on the device.

    start, length [chunks]     first token and number of tokens of a chunk
    segment [segments + 1]     first chunk of a segment
    sequence [sequences + 1]   first segment of a sequence; an empty sequence has none
    """

    start: Tensor
    length: Tensor
    segment: Tensor
    sequence: Tensor

    @property
    def chunks(self) -> int:
        return self.start.shape[0]

    @property
    def segments(self) -> int:
        return self.segment.shape[0] - 1

    @property
    def sequences(self) -> int:
        return self.sequence.shape[0] - 1


@functools.lru_cache(maxsize=64)
def plan(ends: tuple[int, ...], heads: int, chunk: int, device: torch.device) -> Plan:
    """The plan for sequences that end at the given tokens (ends[0] = 0); kept, since the same lengths come again and again."""
    chunks = [-(-(b - a) // chunk) for a, b in pairwise(ends)]
    per_segment = max(16, -(-sum(chunks) * heads // PROGRAMS))
    start: list[int] = []
    length: list[int] = []
    segment, sequence = [0], [0]
    for (a, b), n in zip(pairwise(ends), chunks, strict=True):
        base = len(start)
        start += range(a, b, chunk)
        length += [min(chunk, b - t) for t in range(a, b, chunk)]
        segment += [*range(base + per_segment, base + n, per_segment), *([base + n] if n else [])]
        sequence.append(len(segment) - 1)
    return Plan(*(torch.tensor(x, dtype=torch.int32, device=device) for x in (start, length, segment, sequence)))


class Tiles(NamedTuple):
    """Tile sizes and precision of one call. bf16 inputs are multiplied as bf16; others as tf32, in three steps where they are float32."""

    BC: int
    dtype: torch.dtype
    state: int = 64

    def BM(self, M: int) -> int:
        return max(16, 1 << (M - 1).bit_length())

    def BD(self, D: int) -> int:
        return max(16, 1 << (D - 1).bit_length())

    @property
    def state_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.dtype == torch.bfloat16 else torch.float32

    def warps(self, M: int, *D: int) -> int:
        """Warps of a program that holds states [D, M]."""
        return 4 if self.BM(M) * max(self.BD(d) for d in D) <= 64 * 128 else 8

    @property
    def stages(self) -> int:
        """How far ahead a walk over chunks loads: one chunk, but float32 has no room for it in shared memory."""
        return 1 if self.dtype == torch.float32 else 2

    @property
    def paths(self) -> tuple[int, ...]:
        """Launches of a chunk kernel: see ALL, GENTLE and STEEP in maps.py. One reference costs float32 some digits, so it takes levels."""
        return (0,) if self.dtype == torch.float32 else (1, 2)

    @property
    def precision(self) -> dict[str, Any]:
        if self.dtype == torch.bfloat16:
            return {"DT": tl.bfloat16, "PREC": "tf32", "EXACT": False}
        return {"DT": tl.float32, "PREC": "tf32x3" if self.dtype == torch.float32 else "tf32", "EXACT": True}


class Work(NamedTuple):
    """One pass over the tokens: forward and backward differ in the chunk that fits into registers."""

    plan: Plan
    tiles: Tiles
