"""Instructions that work on each thread by itself: arithmetic, comparison, conversion, exchange within a warp."""

import numpy as np

from tests.compiled.ptx import RAW, TYPES, Fault, from_bfloat16, to_bfloat16, to_tf32

BINARY = {
    "add": np.add, "sub": np.subtract, "max": np.fmax, "min": np.fmin, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
}
UNARY = {
    "neg": np.negative, "abs": np.abs, "not": np.invert, "ex2": np.exp2, "lg2": np.log2, "sqrt": np.sqrt, "tanh": np.tanh,
    "rcp": lambda x: 1 / x, "rsqrt": lambda x: 1 / np.sqrt(x),
}
COMPARE = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
ROUND = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def arithmetic(op: list[str], get, operands: list[str]) -> np.ndarray | None:
    """The result of an arithmetic instruction, or None for another one. get(operand, type) is an operand's value in every thread."""
    name, kind = op[0], op[-1]
    if kind == "pred":
        x = [get(y, "pred") for y in operands]
        return np.logical_not(x[0]) if name == "not" else {**BINARY, "mov": lambda x: x}[name](*x)
    if name in ("shl", "shr"):
        x, by = get(operands[0], kind), get(operands[1], "u32").astype(np.int64)
        bits = 8 * x.itemsize
        shifted = (np.left_shift if name == "shl" else np.right_shift)(x, np.minimum(by, bits - 1).astype(x.dtype))
        return np.where(by < bits, shifted, np.where((x < 0) & (name == "shr"), -1, 0)).astype(x.dtype)
    if name in ("mul", "mad") and "wide" in op:
        wide = {"s32": np.int64, "u32": np.uint64, "u16": np.uint32, "s16": np.int32}[kind]
        x = get(operands[0], kind).astype(wide) * get(operands[1], kind).astype(wide)
        return x + get(operands[2], kind[0] + str(8 * x.itemsize)) if name == "mad" else x
    if name not in BINARY and name not in UNARY and name not in ("mul", "mad", "fma", "div", "rem"):
        return None
    if kind not in TYPES:
        raise Fault(f"no arithmetic in {kind}")
    x = [get(y, kind) for y in operands]
    if name in UNARY:
        y = UNARY[name](*x)
    elif name in BINARY:
        y = (np.maximum if name == "max" else np.minimum)(*x) if "NaN" in op else BINARY[name](*x)
    elif name == "mul" and "hi" in op:
        y = (x[0].astype(np.int64) * x[1].astype(np.int64) >> 32).astype(x[0].dtype)
    elif name == "fma":                                # one rounding: float64 holds the product of two float32
        y = (x[0].astype(np.float64) * x[1] + x[2]).astype(x[0].dtype)
    elif name == "div" and kind[0] != "f":
        y = np.trunc(x[0] / x[1]).astype(x[0].dtype)
    else:
        y = {"mul": lambda: x[0] * x[1], "mad": lambda: x[0] * x[1] + x[2], "div": lambda: x[0] / x[1], "rem": lambda: np.fmod(*x)}[name]()
    return np.where(np.abs(y) < np.float32(2.0**-126), np.float32(0), y).astype(y.dtype) if "ftz" in op and kind == "f32" else y


def compare(op: list[str], get, operands: list[str]) -> np.ndarray:
    kind, how = op[-1], op[1]
    x, y = (from_bfloat16(get(z, "b16")) if kind == "bf16" else get(z, kind) for z in operands[:2])
    nan = np.isnan(x) | np.isnan(y) if x.dtype.kind == "f" else np.zeros(x.shape, bool)
    if how in ("num", "nan"):
        return nan == (how == "nan")
    if how in ("lo", "ls", "hi", "hs"):
        how = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}[how]
    unordered = len(how) == 3
    return COMPARE[how[:2]](x, y) & ~nan | (nan & unordered)


def convert(op: list[str], get, operands: list[str]) -> np.ndarray:
    to, given = op[-2], op[-1]
    if to in ("bf16x2", "f16x2"):                      # the first operand is the upper half
        half = to_bfloat16 if to == "bf16x2" else lambda x: x.astype(np.float16).view(np.uint16)
        high, low = (half(get(x, "f32")).astype(np.uint32) for x in operands)
        return high << np.uint32(16) | low
    x = from_bfloat16(get(operands[0], "b16")) if given == "bf16" else get(operands[0], given)
    if to == "bf16":
        return to_bfloat16(x)
    if to == "tf32":
        return to_tf32(x)
    if x.dtype.kind == "f" and (to[0] != "f" or any(r in op for r in ROUND)):
        x = ROUND[next((r for r in ROUND if r in op), "rzi")](x)
    return x.astype(TYPES[to])


def extract(op: list[str], get, operands: list[str]) -> np.ndarray:
    """A field of bits, signed or not."""
    first, count = int(operands[1]), int(operands[2])
    x = (get(operands[0], "u32") >> np.uint32(first)).astype(np.int64) & ((1 << count) - 1)
    sign = 1 << (count - 1) if op[-1] == "s32" and count else 0
    return ((x ^ sign) - sign).astype(np.uint32)


def permute(op: list[str], get, operands: list[str]) -> np.ndarray:
    """Four bytes out of eight, chosen by four digits."""
    pair = np.stack([get(x, "b32") for x in operands[:2]], 1).view(np.uint8)
    digits = get(operands[2], "b32")[:, None] >> np.arange(0, 16, 4, dtype=np.uint32)
    byte = np.take_along_axis(pair, (digits & 7).astype(np.int64), 1)
    sign = np.where(byte & 0x80, 0xFF, 0)
    return np.ascontiguousarray(np.where(digits & 8, sign, byte).astype(np.uint8)).view(np.uint32)[:, 0]


def shuffle(op: list[str], get, operands: list[str]) -> np.ndarray:
    """A register of another lane of the warp."""
    x, by = get(operands[0], "b32"), get(operands[1], "u32").astype(np.int64)
    lane = np.arange(x.size) % 32
    source = {"bfly": lane ^ by, "idx": by & 31}[op[2]]
    return x[np.arange(x.size) // 32 * 32 + source]


def move(op: list[str], get, operands: list[str]) -> np.ndarray:
    """A register, or one packed from several: `{low, high}`."""
    source, kind = operands[0], op[-1]
    if not source.startswith("{"):
        return get(source, kind)
    parts = [x.strip() for x in source[1:-1].split(",")]
    size = TYPES[kind].itemsize // len(parts)
    return np.ascontiguousarray(np.stack([get(x, f"b{8 * size}") for x in parts], 1)).view(RAW[size * len(parts)])[:, 0]


OTHERS = {"mov": move, "setp": compare, "cvt": convert, "bfe": extract, "prmt": permute, "shfl": shuffle}
