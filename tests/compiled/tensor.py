"""Instructions on small matrices that a warp, or a group of four warps, works on together."""

import re

import numpy as np

from tests.compiled.memory import Shared
from tests.compiled.ptx import Fault, from_bfloat16

LANE = np.arange(32)
ROW, PAIR = LANE // 4, LANE % 4


def move_matrices(op: list[str], get, put, registers: list[str], address: np.ndarray, shared: Shared) -> None:
    """ldmatrix and stmatrix: 8 x 8 matrices of 16 bits, whose rows the first lanes of the warp point at."""
    count, turned = len(registers), "trans" in op
    rows = address.reshape(-1, 32)[:, : 8 * count].reshape(-1, count, 8)
    at = shared.places(rows, 16)                                                               # [warps, count, 8, 16]
    warp = np.arange(len(rows))[:, None, None, None]
    if op[0] == "ldmatrix":
        m = np.ascontiguousarray(shared.load(at, warp)).view(np.uint16)
        m = m.swapaxes(-1, -2) if turned else m
        for i, name in enumerate(registers):
            low, high = (m[:, i, ROW, 2 * PAIR + j].astype(np.uint32) for j in (0, 1))
            put(name, (low | high << np.uint32(16)).reshape(-1))
        return
    m = np.empty((len(rows), count, 8, 8), np.uint16)
    for i, name in enumerate(registers):
        x = get(name, "b32").reshape(-1, 32)
        for j in (0, 1):
            m[:, i, ROW, 2 * PAIR + j] = x >> np.uint32(16 * j) & np.uint32(0xFFFF)
    m = np.ascontiguousarray(m.swapaxes(-1, -2) if turned else m)
    shared.store(at, warp, m.view(np.uint8))


def numbers(raw: np.ndarray, kind: str) -> np.ndarray:
    """Words of 16 or 32 bits as what the tensor core sees of them."""
    if kind == "tf32":
        return (raw & np.uint32(0xFFFFE000)).view(np.float32)
    return from_bfloat16(raw) if kind == "bf16" else raw.view(np.float16).astype(np.float32)


def fragment(get, registers: list[str], kind: str, rows: int, columns: int) -> np.ndarray:
    """[warps, rows, columns] of an operand held in registers; for the second operand, its transpose."""
    words = np.stack([get(x, "b32").reshape(-1, 32) for x in registers], 1)
    out = np.empty((len(words), rows, columns), np.float32)
    for i in range(len(registers)):
        down, right = (i % 2, i // 2) if rows == 16 else (0, i)
        if kind == "tf32":
            out[:, ROW + 8 * down, PAIR + 4 * right] = numbers(words[:, i], kind)
        else:
            for j in (0, 1):
                half = (words[:, i] >> np.uint32(16 * j) & np.uint32(0xFFFF)).astype(np.uint16)
                out[:, ROW + 8 * down, 2 * PAIR + j + 8 * right] = numbers(half, kind)
    return out


def place(i: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column, in a 16 x 8 block of a result, of register i of each lane."""
    return ROW + 8 * (i // 2), 2 * PAIR + i % 2


def mma(op: list[str], get, put, operands: list[list[str]]) -> None:
    """One 16 x 8 product for each warp."""
    kind, K = op[-2], int(re.fullmatch(r"m16n8k(\d+)", op[3])[1])
    out, a, b, c = operands
    y = fragment(get, a, kind, 16, K).astype(np.float64) @ fragment(get, b, kind, 8, K).swapaxes(1, 2)
    values = [(y[:, *place(i)].reshape(-1) + get(c[i], "f32")).astype(np.float32) for i in range(4)]
    for name, x in zip(out, values, strict=True):
        put(name, x)


def described(descriptor: int, rows: int, columns: int, size: int, rows_first: bool) -> np.ndarray:
    """Addresses [rows, columns] of a swizzled matrix; rows_first: a row's numbers lie side by side."""
    start, lead, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    width = {1: 128, 2: 64, 3: 32}.get(descriptor >> 62 & 3)
    if width is None or descriptor >> 49 & 7 or (start & -width) % (8 * width):
        raise Fault(f"descriptor {descriptor:#x}: no swizzle, a base offset, or a start that is not aligned")
    i, j = np.arange(rows)[:, None], np.arange(columns)
    if rows_first:
        at = start + i // 8 * stride + i % 8 * width + j * size
    else:
        at = start + i * size // width * lead + j // 8 * stride + j % 8 * width + i * size % width
    return at ^ (at >> 7 & (width // 16 - 1)) << 4


def wgmma(op: list[str], get, put, operands: list[str], shared: Shared) -> None:
    """64 x N products by groups of four warps, the second operand and maybe the first in shared memory; taken as done at once."""
    N, K = (int(x) for x in re.fullmatch(r"m64n(\d+)k(\d+)", next(x for x in op if x.startswith("m64"))).groups())
    kind, size = op[-1], 4 if op[-1] == "tf32" else 2
    out, a, b, add, *signs = operands
    names = out[1:-1].replace(" ", "").split(",")
    turned_a, turned_b = (False, False) if kind == "tf32" else (signs[-2:-1] == ["1"] and not a.startswith("{"), signs[-1] == "1")

    def stored(descriptors: np.ndarray, group: int, rows: int, turned: bool, each: bool) -> np.ndarray:
        of_group = descriptors[128 * group : 128 * group + 128]
        if (of_group != of_group[0]).any():
            raise Fault("the warps of a group hold different descriptors")
        at = shared.places(described(int(of_group[0]), rows, K, size, not turned), size)       # [rows, K, size]
        for warp in [np.arange(rows)[:, None, None] // 16] if each else range(4):
            raw = shared.load(at, 4 * group + warp)
        return numbers(np.ascontiguousarray(raw).view(f"u{size}")[..., 0], kind)

    groups = get(b, "u64").size // 128
    if a.startswith("{"):
        left = fragment(get, a[1:-1].replace(" ", "").split(","), kind, 16, K).reshape(groups, 64, K)
    else:
        left = np.stack([stored(get(a, "u64"), n, 64, turned_a, True) for n in range(groups)])
    right = np.stack([stored(get(b, "u64"), n, N, turned_b, False) for n in range(groups)])
    y = (left.astype(np.float64) @ right.swapaxes(1, 2)).astype(np.float32).reshape(-1, 16, N)
    keep = get(add, "pred").all() if add.startswith("%") else add != "0"
    for n, name in enumerate(names):
        row, column = place(n % 4)
        x = y[:, row, column + 8 * (n // 4)].reshape(-1)
        put(name, x + get(name, "f32") if keep else x)
