"""Launch Triton kernels on tensors of a CPU as compiled for Hopper; and, as a command, run one call of a method that way.

    python -m tests.compiled.launch '{"method": "gsa", "dtype": "bfloat16", "sizes": {"T": 70}}'

A process of its own, because Triton decides on import whether it interprets.
"""

import importlib
import itertools
import json
import pkgutil
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.compiled.machine import Machine
from tests.compiled.memory import Global
from tests.compiled.ptx import Fault, Program

HOPPER = GPUTarget("cuda", 90, 32)
SHORT = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int32: "i32", torch.int64: "i64", torch.bool: "i1",
    torch.uint8: "u8", torch.int8: "i8",
}
OPTIONS = ("num_warps", "num_stages", "maxnreg")


class Compiled:
    """What stands in for a kernel: kernel[grid](...) runs what the compiler makes of it, program after program. Notes add up."""

    def __init__(self, kernel: triton.JITFunction, notes: dict[str, int]):
        self.kernel, self.notes = kernel, notes
        self.programs: dict[str, tuple[Program, int]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **kwargs: self.launch(tuple(grid), args, dict(kwargs))

    def launch(self, grid: tuple[int, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        options = {key: kwargs.pop(key) for key in OPTIONS if key in kwargs}
        given = dict(zip(self.kernel.arg_names, args, strict=False)) | kwargs
        constants, signature, aligned, values, memory = {}, {}, {}, [], {}
        for i, (name, parameter) in enumerate(zip(self.kernel.arg_names, self.kernel.params, strict=True)):
            x = given.get(name, parameter.default)
            if parameter.is_constexpr or x is None or (type(x) is int and x == 1):
                signature[name], constants[(i,)] = "constexpr", x
            elif isinstance(x, torch.Tensor):
                signature[name], start = "*" + SHORT[x.dtype], x.data_ptr()
                store = x.untyped_storage()
                if store.nbytes():
                    memory[store.data_ptr()] = (torch.tensor([], dtype=torch.uint8).set_(store).numpy(), name)
                values.append(start)
            else:
                signature[name] = "fp32" if isinstance(x, float) else "i1" if isinstance(x, bool) else "i32"
                values.append(int(np.float32(x).view(np.uint32)) if isinstance(x, float) else int(x))
            if signature[name] not in ("constexpr", "fp32", "i1") and values[-1] % 16 == 0:
                aligned[(i,)] = [["tt.divisibility", 16]]
        key = str((signature, constants, aligned, options))
        if key not in self.programs:
            source = ASTSource(fn=self.kernel, signature=signature, constexprs=constants, attrs=aligned)
            made = triton.compile(source, target=HOPPER, options=options)
            self.programs[key] = Program(made.asm["ptx"]), made.metadata.shared
        program, shared = self.programs[key]
        # Triton adds two scratch pointers of its own.
        machine = Machine(program, [*values, 0, 0], Global([(start, *x) for start, x in memory.items()]), shared)
        for block in itertools.product(*(range(n) for n in (*grid, 1, 1)[:3])):
            try:
                machine.run(block)
            except Fault as fault:
                raise Fault(f"{self.kernel.__name__}{block}: {fault} ({machine.line})") from None
        for (kind, what, line), count in machine.notes.items():
            note = f"{kind}: {what} in {self.kernel.__name__} at {line}"
            self.notes[note] = self.notes.get(note, 0) + count


def install() -> dict[str, int]:
    """Put every kernel of mva_ref.fast.triton in its compiled form; the notes of all launches to come."""
    import mva_ref.fast.triton as package

    notes: dict[str, int] = {}
    stand_ins: dict[int, Compiled] = {}
    for found in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{found.name}")
        for name, x in list(vars(module).items()):
            if isinstance(x, triton.JITFunction) and name.endswith("_kernel"):
                setattr(module, name, stand_ins.setdefault(id(x), Compiled(x, notes)))
    return notes


def errors(method: str, dtype: str, sizes: dict[str, int], gates: float = 1.0, options: dict[str, Any] | None = None) -> dict[str, float]:
    """Largest errors of outputs and gradients, relative to the largest number of each, against the float64 reference."""
    import mva_ref as mva
    from mva_ref.testing.examples import DECAYS, example

    p, kind = example(method, **{"B": 1, "H": 1, "HQ": 2, **sizes}), getattr(torch, dtype)
    inputs = {n: x * gates if n in DECAYS else x for n, x in p.inputs.items()}
    mine = {n: x.to(kind).requires_grad_() for n, x in inputs.items()}
    exact = {n: x.detach().double().requires_grad_() for n, x in mine.items()}
    found = {}
    a, b = (mva.attention(method, **{**x, **p.options, **(options or {})}, impl=impl) for x, impl in ((mine, "triton"), (exact, "naive")))
    upstream = torch.randn(b.o.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(kind)
    a.o.backward(upstream)
    b.o.backward(upstream.double())
    for n, x, y in [("o", a.o, b.o), *((f"gradient of {n}", mine[n].grad, exact[n].grad) for n in mine)]:
        found[n] = float((x.double() - y).detach().abs().max() / y.detach().abs().max())
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)     # fills what is allocated and never written with NaN
    NOTES = install()
    print(json.dumps({"errors": errors(**json.loads(sys.argv[1])), "notes": NOTES}))
