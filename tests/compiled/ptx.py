"""The text of a compiled kernel: instructions, labels, parameters; and the number formats of its registers."""

import re
from typing import NamedTuple

import numpy as np

# The numpy type of each PTX type; registers themselves hold unsigned numbers.
TYPES = {f"{kind}{8 * size}": np.dtype(f"{letter}{size}") for size in (1, 2, 4, 8) for kind, letter in (("b", "u"), ("u", "u"), ("s", "i"))}
TYPES |= {"f16": np.dtype("f2"), "f32": np.dtype("f4"), "f64": np.dtype("f8")}
RAW = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


class Fault(Exception):
    """What a GPU would not do, or not do reliably."""


class Instruction(NamedTuple):
    """`@predicate op.parts operands`, and the line of the kernel it comes from."""

    op: list[str]
    operands: list[str]
    predicate: str | None
    negated: bool
    line: str


def split(operands: str) -> list[str]:
    """Operands between commas, but not those within braces and brackets."""
    found, depth, start = [], 0, 0
    for i, c in enumerate(operands + ","):
        depth += (c in "{[") - (c in "}]")
        if c == "," and depth == 0:
            found.append(operands[start:i].strip())
            start = i + 1
    return [x for x in found if x]


def listed(operand: str) -> list[str]:
    """The registers of `{a, b}`, or of `a`."""
    return split(operand[1:-1]) if operand.startswith("{") else [operand]


class Program:
    """One kernel as Triton's compiler writes it."""

    def __init__(self, text: str):
        self.threads = int(re.search(r"\.reqntid (\d+)", text)[1])
        self.code: list[Instruction] = []
        self.labels: dict[str, int] = {}
        line = ""
        for row in text.split(".reqntid", 1)[1].split("{", 1)[1].splitlines():
            if ".debug" in row:
                break
            if where := re.match(r"\s*\.loc\s.*//\s*(.*)", row):
                line = where[1]
            row = row.split("//")[0].strip()
            if row and not row.startswith("."):
                for statement in row.split(";"):
                    self._add(statement.strip(), line)

    def _add(self, statement: str, line: str) -> None:
        while label := re.match(r"(\$?[\w$]+):\s*", statement):
            self.labels[label[1]] = len(self.code)
            statement = statement[label.end() :]
        if statement.strip("{}"):
            negated, predicate, op, operands = re.match(r"(?:@(!?)(%\w+)\s+)?(\S+)\s*(.*)", statement, re.S).groups()
            self.code.append(Instruction(op.split("."), split(operands), predicate, negated == "!", line))


def from_bfloat16(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.uint32) << 16).view(np.float32)


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Round to nearest, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return np.where(np.isnan(x), 0x7FFF, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def to_tf32(x: np.ndarray) -> np.ndarray:
    """Round to 10 bits of mantissa, ties away from zero."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return np.where(np.isfinite(x), (bits.astype(np.uint64) + 0x1000) & 0xFFFFE000, bits).astype(np.uint32).view(np.float32)
