"""Run a compiled kernel on a CPU: the threads of one program in step, every access checked."""

import re

import numpy as np

from tests.compiled import scalar, tensor
from tests.compiled.memory import SHARED, Global, Shared
from tests.compiled.ptx import RAW, TYPES, Fault, Instruction, Program, listed, split

NOTHING = {"fence", "membar", "nop"}     # what orders memory is done at once here


class Machine:
    """One launch of a program: values of its parameters, global memory, bytes of shared memory.

    `notes` counts what a program may not rely on, as (kind, what, line of the kernel): races between warps, shared memory that nobody
    has written. Branches must be taken by all threads of a program alike.
    """

    def __init__(self, program: Program, parameters: list[int], memory: Global, shared: int):
        self.program, self.parameters, self.memory, self.size = program, parameters, memory, shared
        self.notes: dict[tuple[str, str, str], int] = {}
        self.lanes = np.arange(program.threads)

    def note(self, kind: str, what: str) -> None:
        key = (kind, what, self.line)
        self.notes[key] = self.notes.get(key, 0) + 1

    def run(self, block: tuple[int, int, int]) -> None:
        """One program of the grid."""
        self.line, self.registers = "", {"%tid.x": self.lanes.astype(np.uint32)}
        self.registers |= {f"%ctaid.{axis}": np.full(self.lanes.size, n, np.uint32) for axis, n in zip("xyz", block, strict=True)}
        self.shared, at, all_threads = Shared(self.size, self.note), 0, np.ones(self.lanes.size, bool)
        while at < len(self.program.code):
            step = self.program.code[at]
            self.line, active, at = step.line, all_threads, at + 1
            if step.predicate:
                active = self.get(step.predicate, "pred") != step.negated
            if step.op[0] in ("ret", "bra") and active.any():
                if not active.all():
                    raise Fault(f"threads part ways at {self.line}")
                if step.op[0] == "ret":
                    return
                at = self.program.labels[step.operands[0]]
            elif step.op[0] not in ("ret", "bra"):
                with np.errstate(all="ignore"):
                    self.step(step, active)

    def get(self, name: str, kind: str) -> np.ndarray:
        """An operand in every thread."""
        if kind == "pred" and not name.startswith("%"):
            return np.full(self.lanes.size, name != "0")
        dtype = np.dtype(bool) if kind == "pred" else TYPES[kind]
        if name.startswith("%"):
            x = self.registers.get(name)
            if x is None:               # the compiler does not care what it is: a NaN, which shows if somebody does
                x = np.full(self.lanes.size, 0x7FC17FC17FC17FC1 >> 64 - 8 * dtype.itemsize, RAW[dtype.itemsize])
            if kind == "pred":
                return x.astype(bool)
            return x if x.dtype == dtype else x.astype(RAW[dtype.itemsize]).view(dtype)
        if name == "global_smem":
            return np.full(self.lanes.size, SHARED, dtype)
        number = int(name[2:], 16) if name[:2] in ("0f", "0d") else int(name.rstrip("U"), 0)
        return np.full(self.lanes.size, number % (1 << 8 * dtype.itemsize), RAW[dtype.itemsize]).view(dtype)

    def put(self, name: str, x: np.ndarray, active: np.ndarray | None = None) -> None:
        if name == "_":
            return
        x = x if x.dtype == bool else np.ascontiguousarray(x).view(RAW[x.itemsize])
        if active is not None and not active.all() and name in self.registers:
            x = np.where(active, x, self.registers[name])
        self.registers[name] = x

    def address(self, operand: str) -> np.ndarray:
        base, _, offset = operand.strip("[] ").partition("+")
        return self.get(base.strip(), "u64" if base.startswith("%rd") else "u32").astype(np.uint64) + np.uint64(int(offset or "0", 0))

    def step(self, step: Instruction, active: np.ndarray) -> None:
        op, x, name = step.op, step.operands, step.op[0]
        if name == "bar":
            self.shared.barrier()
        elif name in NOTHING or (name == "wgmma" and "mma_async" not in op):
            pass
        elif name in ("ld", "st"):
            self.access(op, x, active)
        elif name == "cp":
            self.copy(op, x, active)
        elif name in ("ldmatrix", "stmatrix"):
            names, where = x if name == "ldmatrix" else x[::-1]
            tensor.move_matrices(op, self.get, self.put, listed(names), self.address(where), self.shared)
        elif name == "mma":
            tensor.mma(op, self.get, self.put, [listed(y) for y in x])
        elif name == "wgmma":
            tensor.wgmma(op, self.get, self.put, x, self.shared)
        elif name == "mov" and x[0].startswith("{"):
            names = split(x[0][1:-1])
            parts = np.ascontiguousarray(self.get(x[1], op[-1])).view(RAW[TYPES[op[-1]].itemsize // len(names)]).reshape(-1, len(names))
            for i, y in enumerate(names):
                self.put(y, parts[:, i], active)
        else:
            self.put(x[0].split("|")[0], self.result(op, x[1:]), active)

    def result(self, op: list[str], x: list[str]) -> np.ndarray:
        name, get = op[0], self.get
        if name == "selp":
            return np.where(get(x[2], "pred"), get(x[0], op[-1]), get(x[1], op[-1]))
        if (y := scalar.arithmetic(op, get, x)) is not None:
            return y
        if name not in scalar.OTHERS:
            raise Fault(f"unknown instruction {'.'.join(op)}")
        return scalar.OTHERS[name](op, get, x)

    def access(self, op: list[str], x: list[str], active: np.ndarray) -> None:
        """Loads and stores of one register or several."""
        size, (names, where) = TYPES[op[-1]].itemsize, x if op[0] == "ld" else x[::-1]
        if "param" in op:
            value = self.parameters[int(re.search(r"_param_(\d+)", where)[1])]
            self.put(names, np.full(self.lanes.size, value % (1 << 8 * size), RAW[size]))
            return
        registers, address, warp = listed(names), self.address(where)[active], self.lanes[active, None] // 32
        total, in_shared = size * len(registers), any(y.startswith("shared") for y in op)
        at = self.shared.places(address, total) if in_shared else None
        if op[0] == "st":
            value = np.ascontiguousarray(np.stack([self.get(y, f"b{8 * size}") for y in registers], 1)).view(np.uint8)[active]
            self.shared.store(at, warp, value) if in_shared else self.memory.store(address, value)
            return
        value = np.zeros((self.lanes.size, total), np.uint8)
        value[active] = self.shared.load(at, warp) if in_shared else self.memory.load(address, total)
        for i, y in enumerate(registers):
            word = value.view(RAW[size])[:, i]
            self.put(y, word.astype(np.uint16) if size == 1 else word, active)

    def copy(self, op: list[str], x: list[str], active: np.ndarray) -> None:
        """cp.async from global to shared memory, taken as done at once; what is not copied is zero."""
        if "commit_group" in op or "wait_group" in op or "wait_all" in op:
            return
        size = int(x[2], 0)
        live = active & (self.get(x[3], "u32") == size if len(x) > 3 else active)
        value = np.zeros((self.lanes.size, size), np.uint8)
        value[live] = self.memory.load(self.address(x[1])[live], size)
        self.shared.store(self.shared.places(self.address(x[0])[active], size), self.lanes[active, None] // 32, value[active])
