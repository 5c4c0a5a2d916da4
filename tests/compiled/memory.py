"""Global and shared memory that answer only where a program may look, and that notice when its warps do not wait for each other."""

from bisect import bisect_right
from collections.abc import Callable

import numpy as np

from tests.compiled.ptx import Fault

SHARED = 1024     # the address of shared memory: nothing lies at 0
Note = Callable[[str, str], None]


class Global:
    """The tensors of a launch, [(address, bytes, name)]: whatever lies between them is not there."""

    def __init__(self, tensors: list[tuple[int, np.ndarray, str]]):
        self.tensors = sorted(tensors, key=lambda x: x[0])
        self.starts = [x[0] for x in self.tensors]

    def _places(self, address: np.ndarray, size: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """(lanes, bytes of one tensor, offsets [lanes, size]) for each tensor that is touched."""
        if (address % size).any():
            raise Fault("misaligned access to global memory")
        which = np.array([bisect_right(self.starts, int(x)) - 1 for x in address])
        found = []
        for n in np.unique(which):
            lanes = np.nonzero(which == n)[0]
            start, data, name = self.tensors[n] if n >= 0 else (0, np.empty(0, np.uint8), "any tensor")
            offset = (address[lanes] - np.uint64(start)).astype(np.int64)
            if offset.max() + size > data.size:
                raise Fault(f"access to byte {offset.max()} of {name}, which has {data.size}")
            found.append((lanes, data, offset[:, None] + np.arange(size)))
        return found

    def load(self, address: np.ndarray, size: int) -> np.ndarray:
        out = np.empty((address.size, size), np.uint8)
        for lanes, data, at in self._places(address, size):
            out[lanes] = data[at]
        return out

    def store(self, address: np.ndarray, value: np.ndarray) -> None:
        for lanes, data, at in self._places(address, value.shape[1]):
            data[at] = value[lanes]


class Shared:
    """The shared memory of one program. Between two barriers no warp may read what another writes, or write what another touches."""

    def __init__(self, size: int, note: Note):
        self.data, self.note, self.epoch = np.full(size, 0xCD, np.uint8), note, 0
        self.written, self.writer = np.full(size, -1), np.zeros(size, int)       # the epoch of the last write, and its warp
        self.read, self.readers = np.full(size, -1), np.zeros(size, int)         # the epoch of the last read, and the set of its warps

    def barrier(self) -> None:
        self.epoch += 1

    def places(self, address: np.ndarray, size: int) -> np.ndarray:
        """Offsets [..., size] of accesses of `size` bytes."""
        offset = address.astype(np.int64) - SHARED
        if offset.size and (offset.min() < 0 or offset.max() + size > self.data.size):
            raise Fault(f"access to shared bytes {offset.min()} to {offset.max() + size} of {self.data.size}")
        if (offset % size).any():
            raise Fault("misaligned access to shared memory")
        return offset[..., None] + np.arange(size)

    def load(self, at: np.ndarray, warp: np.ndarray) -> np.ndarray:
        """Bytes at offsets `at`, read by the warps `warp` (broadcast)."""
        warp = np.broadcast_to(warp, at.shape)
        if ((self.written[at] == self.epoch) & (self.writer[at] != warp)).any():
            self.note("race", "a warp reads what another has written since the last barrier")
        if (self.written[at] < 0).any():
            self.note("uninitialised", "shared memory is read that nobody has written")
        self.readers[at[self.read[at] != self.epoch]] = 0
        np.bitwise_or.at(self.readers, at.ravel(), (1 << warp).ravel())
        self.read[at] = self.epoch
        return self.data[at]

    def store(self, at: np.ndarray, warp: np.ndarray, value: np.ndarray) -> None:
        warp = np.broadcast_to(warp, at.shape)
        if ((self.read[at] == self.epoch) & (self.readers[at] & ~(1 << warp) != 0)).any():
            self.note("race", "a warp writes over what another has read since the last barrier")
        if ((self.written[at] == self.epoch) & (self.writer[at] != warp) & (self.data[at] != value)).any():
            self.note("race", "two warps write different values since the last barrier")
        order = np.argsort(at, axis=None, kind="stable")
        place, byte = at.ravel()[order], value.ravel()[order]
        if ((place[1:] == place[:-1]) & (byte[1:] != byte[:-1])).any():
            self.note("race", "one instruction writes different values to one place")
        self.data[at], self.written[at], self.writer[at] = value, self.epoch, warp
