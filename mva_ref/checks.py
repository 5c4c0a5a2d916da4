"""All argument checks, in one place, before any work. Each error names the argument, what it is and what was wanted.

Checks that read values synchronise, so on a GPU they run only with check_finite=True, and never under compilation or capture.
"""

import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from . import types
from .method import Method
from .types import ArgumentError, Output

SHAPES = {
    "q": "B T HQ D", "k": "B T H D", "v": "B T H V", "g": "B T H M", "g_levels": "L B T H M", "r": "B T HQ M", "s": "B T H M",
    "low_query": "B T HQ M", "low_g": "B T H M", "key_mask": "B T",
}
BROADCAST = {"slot_bias": "B T HQ M", "hard_weight": "B T HQ", "branch_gate": "B T HQ"}
CHOICES: dict[str, tuple[str, ...]] = {
    "residual": ("post", "pre"), "branches": ("shared", "separate", "gated"), "integration": ("soft", "hard"),
}
LARGEST = torch.finfo(torch.float64).max
RANGES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    **dict.fromkeys(("g", "g_levels", "low_g", "log_decay", "head_decay"), (lambda x: x <= 0, "natural-log decays in [-inf, 0]")),
    **dict.fromkeys(("hard_weight", "branch_gate", "window_weight"),
                    (lambda x: (x >= 0) & (x <= 1), "a probability in [0, 1], not a logit")),
    "slot_bias": (lambda x: x < math.inf, "log weights in [-inf, inf)"),
    "beta": (lambda x: (x >= 0) & (x <= 2), "write strengths in [0, 2]"),
    "dt": (lambda x: (x >= 0) & (x < math.inf), "time steps in [0, inf)"),
    "A": (lambda x: x <= 0, "rates in [-inf, 0]"),
}
STATE_DTYPES = {"present": (torch.bool,), "sink_present": (torch.bool,), "seen": (torch.int64,), "written": (torch.int64,)}
MOST_FEATURES = 2**22


def fail(name: str, is_: str, wanted: str) -> None:
    """Raise the one error every check raises."""
    raise ArgumentError(f"{name}: {is_}; wanted {wanted}")


def show(x: Any) -> str:
    """A short description of an argument for an error message."""
    if isinstance(x, Tensor):
        return f"a {x.dtype} tensor of shape {list(x.shape)} on {x.device}"
    return f"{type(x).__name__} {x!r}"[:120]


def reads_values(x: Tensor, check_finite: bool) -> bool:
    """May this check look at the numbers in x?"""
    return x.device.type != "meta" and (x.device.type == "cpu" or check_finite) and not torch.compiler.is_compiling()


def _tensor(name: str, x: Any, shape: str, dims: dict[str, int], origin: dict[str, str]) -> None:
    letters, kind = shape.split(), "bool" if name == "key_mask" else "floating"
    wanted = f"a {kind} tensor [{', '.join(letters)}]"
    if not isinstance(x, Tensor):
        fail(name, f"is {show(x)}", wanted)
    if (x.dtype != torch.bool) if kind == "bool" else not x.is_floating_point():
        fail(name, f"is {show(x)}", wanted)
    if x.ndim != len(letters):
        fail(name, f"is {show(x)}", wanted)
    for letter, size in zip(letters, x.shape, strict=True):
        if letter in dims and dims[letter] != size:
            fail(name, f"is {show(x)}, so {letter} = {size}", f"{wanted} with {letter} = {dims[letter]} as in {origin[letter]}")
        if size == 0 and letter != "T":
            fail(name, f"is {show(x)}, so {letter} = 0", f"{letter} >= 1")
        dims.setdefault(letter, size)
        origin.setdefault(letter, name)


def _broadcast(name: str, x: Any, shape: str, dims: dict[str, int]) -> None:
    target = [dims[letter] for letter in shape.split()]
    levels = name == "slot_bias" and "L" in dims
    wanted = f"a floating tensor broadcastable to [{', '.join(shape.split())}] = {target}"
    wanted += ", with L first if it has 5 axes" if levels else ""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        fail(name, f"is {show(x)}", wanted)
    if levels and x.ndim == 5:
        target = [dims["L"], *target]
    try:
        fits = list(torch.broadcast_shapes(x.shape, target)) == target
    except RuntimeError:
        fits = False
    if not fits:
        fail(name, f"is {show(x)}", wanted)


def _integer(name: str, x: Any, least: int) -> None:
    if isinstance(x, bool) or not isinstance(x, int) or x < least:
        fail(name, f"is {show(x)}", f"an integer >= {least}")


def _range(name: str, x: Tensor, ok: Callable[[Tensor], Tensor], wanted: str, check_finite: bool) -> None:
    if reads_values(x, check_finite) and not bool(ok(x).all()):
        bad = x[~ok(x)].flatten()[0].item()
        fail(name, f"contains {bad}", wanted)


def _packed(cu: Any, device: torch.device, dims: dict[str, int]) -> int:
    """Check cu_seqlens and return the number of sequences."""
    wanted = "an int32 or int64 tensor [N + 1] that starts at 0, never decreases and ends at T, with B = 1"
    if not isinstance(cu, Tensor) or cu.dtype not in (torch.int32, torch.int64) or cu.ndim != 1 or cu.numel() < 2:
        fail("cu_seqlens", f"is {show(cu)}", wanted)
    if cu.device.type != "cpu" and (cu.device != device or cu.device.type == "meta"):
        fail("cu_seqlens", f"is on {cu.device}", "cpu" if device.type in ("cpu", "meta") else f"cpu or {device}")
    if dims["B"] != 1:
        fail("cu_seqlens", f"comes with B = {dims['B']}", "B = 1: packed sequences lie one after the other along T")
    ends = cu.tolist()
    if ends[0] != 0 or ends[-1] != dims["T"] or any(b < a for a, b in pairwise(ends)):
        fail("cu_seqlens", f"is {ends} for T = {dims['T']}", wanted)
    return len(ends) - 1


def _perceptron(x: Any, args: dict[str, Any], dims: dict[str, int]) -> None:
    if x is None:
        return
    if args["read"] != "sigmoid":
        fail("perceptron", f"comes with read = {args['read']!r}", 'read = "sigmoid"')
    if not isinstance(x, tuple) or len(x) != 2:
        fail("perceptron", f"is {show(x)}", "a pair (W, a); either may be None")
    M, HQ, device = dims["M"], dims["HQ"], args["q"].device
    for name, part, tail in (("perceptron W", x[0], [M, M]), ("perceptron a", x[1], [M])):
        if part is None:
            continue
        allowed = [tail, [HQ, *tail]] + ([[dims["L"], h, *tail] for h in (1, HQ)] if "L" in dims else [])
        if not isinstance(part, Tensor) or not part.is_floating_point() or list(part.shape) not in allowed or part.device != device:
            fail(name, f"is {show(part)}", f"a floating tensor on {device} of shape {' or '.join(map(str, allowed))}")


def _state(row: Method, state: Any, args: dict[str, Any], sizes: dict[str, int], check_finite: bool) -> None:
    """Check a state against what this call would return."""
    if state is None:
        return
    kind = getattr(types, row.state_type or "")
    if not isinstance(state, kind):
        fail("initial_state", f"is {show(state)}", f"a {kind.__name__}, as {row.name} returns with output_final_state=True")
    _fields("initial_state", state, row.state_fields, args, sizes, check_finite)


def _fields(name: str, state: Any, fields: Mapping[str, Any], args: dict[str, Any], sizes: dict[str, int], check_finite: bool) -> None:
    device = next(x.device for x in args.values() if isinstance(x, Tensor))
    for key, letters in fields.items():
        x, where = getattr(state, key), f"{name}.{key}"
        if isinstance(letters, Mapping):
            kind = types.SlotState if "log_decay" in letters else types.FeatureState
            if not isinstance(x, kind):
                fail(where, f"is {show(x)}", f"a {kind.__name__}")
            _fields(where, x, letters, args, sizes, check_finite)
            continue
        absent = letters is None or (key.startswith("low_") and args.get("branches") != "separate")
        shape = None if absent else [sizes[letter] for letter in letters.split()]
        if key == "log_decay" and x is None:
            if args.get("slot_bias") == "mass":
                fail(where, "is None", 'the total log decay of every slot, which slot_bias = "mass" needs')
        elif shape is None:
            if x is not None:
                fail(where, f"is {show(x)}", "None for these options")
        elif not isinstance(x, Tensor) or list(x.shape) != shape or x.device != device:
            fail(where, f"is {show(x)}", f"a tensor of shape {shape} on {device}")
        elif x.dtype not in (dtypes := STATE_DTYPES.get(key, (torch.float32, torch.float64))):
            why = ": states are never kept in a half type" if x.dtype in (torch.float16, torch.bfloat16) else ""
            fail(where, f"is {show(x)}", " or ".join(str(d).removeprefix("torch.") for d in dtypes) + why)
        elif key in RANGES:
            _range(where, x, *RANGES[key], check_finite)
        elif x.is_floating_point() and check_finite:
            empty = key == "z" and isinstance(state, types.AbcState)    # the logsumexp of a slot that nothing was written to is -inf
            _range(where, x, (lambda y: y < math.inf) if empty else torch.isfinite, "finite numbers (check_finite=True)", True)


def check(row: Method, args: dict[str, Any], check_finite: bool, impl: str | None = None) -> None:
    """Check every argument of one method; `args` holds all of them by name, defaults included."""
    dims: dict[str, int] = {}
    origin: dict[str, str] = {}
    inputs, shapes = row.inputs, {**SHAPES, **row.shapes}
    identity = [key for key in ("W_q", "W_k") if key in shapes and args[key] is None]      # a projection left out: then E is D
    for key in [*inputs, *(x for x in shapes if x in args and x not in inputs)]:
        if key in inputs or args[key] is not None:
            _tensor(key, args[key], shapes[key], dims, origin)
        if identity and key == "k":
            dims["E"], origin["E"] = dims["D"], f"{identity[0]} = None, the identity"
    dims.setdefault("HQ", dims["H"])
    if dims["HQ"] % dims["H"]:
        fail(inputs[0], f"has HQ = {dims['HQ']} query heads for H = {dims['H']} KV heads", "HQ a multiple of H")
    for key, letters in BROADCAST.items():
        if args.get(key) is not None and not isinstance(args[key], str):
            _broadcast(key, args[key], letters, dims)

    first = args[inputs[0]]
    for key, x in args.items():
        if isinstance(x, Tensor) and key != "cu_seqlens" and x.device != first.device:
            fail(key, f"is on {x.device}", f"{first.device}, where {inputs[0]} is")
        if key in ("k", "v") and x.dtype != first.dtype:
            fail(key, f"is {x.dtype}", f"{first.dtype}, the dtype of {inputs[0]}")
    _options(row.name, args, dims)
    for key, (ok, wanted) in RANGES.items():
        if isinstance(args.get(key), Tensor):
            _range(key, args[key], ok, wanted, check_finite)
    if check_finite:
        W, a = args.get("perceptron") or (None, None)
        for key, x in {**args, "perceptron W": W, "perceptron a": a}.items():
            if isinstance(x, Tensor) and x.is_floating_point() and key not in {*RANGES, "s"}:
                _range(key, x, torch.isfinite, "finite numbers (check_finite=True)", True)
        if args.get("s") is not None:
            _range("s", args["s"], lambda x: x < math.inf, "slot logits in [-inf, inf) (check_finite=True)", True)
    states = _packed(args["cu_seqlens"], first.device, dims) if args.get("cu_seqlens") is not None else dims["B"]
    if isinstance(args.get("centre"), Tensor):
        wide = [[states, dims["H"], dims["D"]], [1, dims["H"], dims["D"]]]
        if list(args["centre"].shape) not in wide or not args["centre"].is_floating_point():
            fail("centre", f"is {show(args['centre'])}", f"a floating tensor [B, H, D] = {wide[0]}")
    if not row.stateful:
        return
    carried = args["initial_state"] is not None or args["output_final_state"]
    sizes = {**dims, "B": states, "N": args.get("order", args.get("power", 0)), "W": args.get("window", 0), "n": args.get("sinks", 0),
             "C": args.get("segment", 0)}
    sizes.setdefault("E", dims.get("D", 0))
    sizes["F"] = row.feature_count(**sizes)
    if sizes["F"] > MOST_FEATURES and (carried or impl == "recurrent"):
        fail("power" if "power" in args else "order", f"is {sizes['N']}, so that a state has {sizes['F']:.3g} features",
             f"at most {MOST_FEATURES} features, or no state")
    _state(row, args["initial_state"], args, sizes, check_finite)


def _options(name: str, args: dict[str, Any], dims: dict[str, int]) -> None:
    scale = args.get("scale")
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, (int, float)) or not abs(scale) <= LARGEST):
        fail("scale", f"is {show(scale)}", "a finite number, or None for D^-0.5")
    for key, least in (("order", 0), ("sinks", 0), ("window", 1), ("segment", 1)):
        if key in args and not (key == "window" and name == "softmax" and args[key] is None):
            _integer(key, args[key], least)
    if "power" in args:
        _integer("power", args["power"], 2)
        if args["power"] % 2:
            fail("power", f"is {args['power']}", "an even integer >= 2, so that no weight is negative")
    for key in ("halves", "own_maximum"):
        if key in args and not isinstance(args[key], bool):
            fail(key, f"is {show(args[key])}", "True or False")
    if "feature_map" in args and not callable(args["feature_map"]):
        fail("feature_map", f"is {show(args['feature_map'])}", "a positive function of a tensor [..., D]")
    if "eps" in args:
        eps = args["eps"]
        if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0 <= eps <= LARGEST:
            fail("eps", f"is {show(eps)}", "a finite number >= 0")
    for key, choices in CHOICES.items():
        if key in args and not (isinstance(args[key], str) and args[key] in choices):
            fail(key, f"is {show(args[key])}", " or ".join(f'"{c}"' for c in choices))
    read = args.get("read", "softmax")
    if read not in ("softmax", "sigmoid"):
        if isinstance(read, str):
            fail("read", f"is {read!r}", '"softmax", "sigmoid" or an order N >= 0')
        _integer("read", read, 0)
    if "perceptron" in args:
        _perceptron(args["perceptron"], args, dims)
    if isinstance(args.get("slot_bias"), str) and args["slot_bias"] != "mass":
        fail("slot_bias", f"is {args['slot_bias']!r}", 'None, "mass" or a tensor')
    if not isinstance(args.get("output_final_state", False), bool):
        fail("output_final_state", f"is {show(args['output_final_state'])}", "True or False")
    _pairs(args)
    centre = args.get("centre")
    if "centre" in args and not isinstance(centre, Tensor):
        if not (centre is None or (isinstance(centre, str) and centre in ("mean", "running"))):
            fail("centre", f"is {show(centre)}", 'None, "mean", "running" or a tensor [B, H, D]')
        if centre == "mean" and (args["initial_state"] is not None or args["output_final_state"]):
            fail("centre", 'is "mean", which sees the whole sequence', '"running", a tensor or None where states are carried')
    aug = args.get("self_augmentation")
    if aug is not None:
        shapes = [dims["M"]], [dims["HQ"], dims["M"]]
        if not isinstance(aug, Tensor) or not aug.is_floating_point() or list(aug.shape) not in shapes:
            fail("self_augmentation", f"is {show(aug)}", f"a floating tensor [M] = {shapes[0]} or [HQ, M] = {shapes[1]}")


def _pairs(args: dict[str, Any]) -> None:
    """Options that need, or exclude, one another."""
    if "integration" in args:
        if args["integration"] == "hard" and args["hard_weight"] is None:
            fail("hard_weight", "is None", 'the window\'s weight [B, T, HQ] in [0, 1] for integration = "hard"')
        if args["integration"] == "soft" and args["hard_weight"] is not None:
            fail("hard_weight", 'comes with integration = "soft"', 'None, or integration = "hard"')
    if "branches" in args:
        for key, branch in (("low_g", "separate"), ("branch_gate", "gated")):
            if args["branches"] == branch and (args[key] is None or args["low_query"] is None):
                fail("branches", f'is "{branch}" without {"low_query" if args["low_query"] is None else key}', f"low_query and {key}")
            if args["branches"] != branch and args[key] is not None:
                fail(key, f"comes with branches = {args['branches']!r}", f'branches = "{branch}"')


def check_mergeable(a: Any, b: Any) -> None:
    """Check the two arguments of merge."""
    for name, x in (("a", a), ("b", b)):
        if not isinstance(x, Output):
            fail(name, f"is {show(x)}", "an Output")
        if x.lse is None:
            fail(name, "has lse = None", "an Output with a log-mass: only those can be merged")
        if not isinstance(x.o, Tensor) or not isinstance(x.lse, Tensor):
            fail(name, f"has o {show(x.o)} and lse {show(x.lse)}", "tensors")
        if x.o.shape[:-1] != x.lse.shape:
            fail(name, f"has o {list(x.o.shape)} and lse {list(x.lse.shape)}", "lse of the shape of o without its last axis")
    if a.o.shape != b.o.shape:
        fail("b", f"has o of shape {list(b.o.shape)}", f"the shape of a's o, {list(a.o.shape)}")
    if a.o.device != b.o.device:
        fail("b", f"is on {b.o.device}", f"{a.o.device}, where a is")
