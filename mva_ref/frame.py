"""What surrounds the mathematics of every form: the compute dtype, and packed sequences one by one. Imports torch only."""

import functools
import inspect
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .types import Output

# Where an argument has its time axis; negative for those that may be broadcast.
TIME_AXIS = {
    "q": 1, "k": 1, "v": 1, "g": 1, "r": 1, "s": 1, "low_query": 1, "low_g": 1, "key_mask": 1, "beta": 1, "dt": 1,
    "g_levels": 2, "slot_bias": -3, "hard_weight": -2, "branch_gate": -2,
}


def tree_map(f: Callable[[Tensor], Tensor], x: Any) -> Any:
    """Apply f to every tensor in nested tuples and NamedTuples; leave everything else alone."""
    if isinstance(x, Tensor):
        return f(x)
    if isinstance(x, tuple):
        parts = [tree_map(f, part) for part in x]
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    return x


def tree_cat(trees: list[Any]) -> Any:
    """Concatenate states of the same structure along their first axis."""
    first = trees[0]
    if isinstance(first, Tensor):
        return torch.cat(trees, 0)
    if isinstance(first, tuple):
        return type(first)(*(tree_cat(list(parts)) for parts in zip(*trees, strict=True)))
    return first


def leaves(x: Any) -> list[Tensor]:
    """Every tensor in nested tuples."""
    found: list[Tensor] = []
    tree_map(lambda t: found.append(t) or t, x)  # type: ignore[func-returns-value]
    return found


def compute_dtype(arguments: Any) -> torch.dtype:
    """At least float32, and float64 as soon as one input is."""
    dtype = torch.float32
    for x in leaves(arguments):
        if x.is_floating_point():
            dtype = torch.promote_types(dtype, x.dtype)
    return dtype


def _segment(name: str, x: Any, n: int, start: int, stop: int, total: int) -> Any:
    """The part of argument x that belongs to packed sequence n, tokens start to stop of total."""
    if name == "initial_state":
        return tree_map(lambda leaf: leaf[n : n + 1], x)
    if name == "centre" and isinstance(x, Tensor):
        return x[n : n + 1] if x.shape[0] > 1 else x
    if name not in TIME_AXIS or not isinstance(x, Tensor):
        return x
    axis = TIME_AXIS[name]
    if axis < 0 and (x.ndim < -axis or x.shape[axis] != total):
        return x
    return x.narrow(axis, start, stop - start)


def form(f: Callable[..., Output]) -> Callable[..., Output]:
    """Let a function on plain batches compute in at least float32 with autocast off, and accept `cu_seqlens`.

    o returns in the dtype of the first argument; states and lse stay in the compute dtype. Packed sequences run one after the
    other with their own state: nothing can leak across a boundary.
    """
    signature = inspect.signature(f)

    @functools.wraps(f)
    def wrapped(*args: Any, cu_seqlens: Tensor | None = None, **options: Any) -> Output:
        bound = signature.bind(*args, **options)
        bound.apply_defaults()
        first = next(iter(bound.arguments.values()))
        dtype = compute_dtype(tuple(bound.arguments.values()))
        given = {n: tree_map(lambda x: x.to(dtype) if x.is_floating_point() else x, a) for n, a in bound.arguments.items()}
        with torch.autocast(first.device.type, enabled=False):
            if cu_seqlens is None:
                out = f(**given)
            else:
                ends, total = cu_seqlens.tolist(), first.shape[1]
                parts = [
                    f(**{name: _segment(name, x, n, start, stop, total) for name, x in given.items()})
                    for n, (start, stop) in enumerate(pairwise(ends))
                ]
                lse = None if parts[0].lse is None else torch.cat([p.lse for p in parts if p.lse is not None], 1)
                out = Output(torch.cat([p.o for p in parts], 1), tree_cat([p.state for p in parts]), lse)
        return Output(out.o.to(first.dtype), out.state, out.lse)

    extra = inspect.Parameter("cu_seqlens", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="Tensor | None")
    wrapped.__signature__ = signature.replace(parameters=[*signature.parameters.values(), extra])  # type: ignore[attr-defined]
    return wrapped
