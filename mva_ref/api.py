"""The public face beside the functions of the rows: by name, as matrices, merged. `import mva_ref` exposes all of it; see there."""

import inspect
from typing import Any

import torch
from torch import Tensor

from .checks import check_mergeable, fail
from .functions import public
from .method import Method
from .registry import METHODS, method
from .types import ArgumentError, Output


def merge(a: Output, b: Output) -> Output:
    """Merge two attention results over disjoint keys by their log-masses (P21). See `mva_ref.naive.merge`."""
    from .naive.merging import merge as form

    check_mergeable(a, b)
    return form(a, b)


def methods() -> tuple[Method, ...]:
    """The registry, as rows."""
    return tuple(METHODS.values())


def _by_name(row: Method, inputs: tuple[Tensor, ...], options: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call by name; each may be given once."""
    if len(inputs) > len(row.inputs):
        fail("inputs", f"are {len(inputs)} tensors", f"{len(row.inputs)}: {', '.join(row.inputs)}")
    given = dict(zip(row.inputs, inputs, strict=False))
    for name in given:
        if name in options:
            fail(name, "is given by position and by name", "it once")
    return {**given, **options}


def attention(name: str, *inputs: Tensor, **options: Any) -> Output:
    """A method by its registry name: `attention("gsa", q, k, v, g, slot_bias="mass")`."""
    row = method(name)
    known = inspect.signature(public(row.name)).parameters
    for option in options:
        if option not in known:
            fail(option, f"is no option of {row.name}", f"one of {', '.join(known)}")
    given = _by_name(row, inputs, options)
    missing = [x for x in (*row.inputs, *row.required) if x not in given]
    if missing:
        fail(missing[0], "is missing", f"{', '.join((*row.inputs, *row.required))} for {row.name}")
    return public(row.name)(**given)


def weights(name: str, *inputs: Tensor, **options: Any) -> Tensor:
    """The T x T matrix A of a method: its output on v = identity.

    Shapes: the inputs of the method, v included (only its dtype and device matter) -> A [B, HQ, T, T] with o_t = sum_i A_ti v_i
    Errors: refused where there is no such matrix (self-augmentation is not linear in v, Mamba has one for each value channel), and
            for an initial state, which is not a token.
    """
    row = method(name)
    given = _by_name(row, inputs, options)
    if not row.one_matrix:
        fail("method", f"is {row.name}, whose matrix differs from one value channel to the next", "one with a single matrix A")
    if given.get("self_augmentation") is not None:
        fail("self_augmentation", "is given", "None: it is not linear in v, so there is no matrix")
    if given.get("initial_state") is not None:
        fail("initial_state", "is given", "None: the matrix is over the tokens of this call")
    v = given.get("v")
    if not isinstance(v, Tensor) or v.ndim != 4:
        raise ArgumentError("v: is missing or not [B, T, H, V]; wanted the values, whose shape gives B, T and H")
    B, T, H, _ = v.shape
    if not T:
        fail("v", "has T = 0", "at least one token")
    eye = torch.eye(T, dtype=v.dtype, device=v.device)[None, :, None].expand(B, T, H, T)
    return attention(row.name, **{**given, "v": eye}).o.movedim(2, 1)
