"""The public functions, one per method: check, choose an implementation, run. `import mva_ref` exposes them; see there."""

import inspect
from typing import Any

import torch
from torch import Tensor

from .checks import check, check_mergeable, fail, feature_count
from .registry import METHODS, Method, method
from .types import AbcState, ArgumentError, Output, SlotState, TaylorState, WindowState

Read = str | int
Perceptron = tuple[Tensor | None, Tensor | None]

# Up to here the T x T x M tensors of the naive form are small; beyond, a form linear in T is chosen where there is one.
NAIVE_LENGTH = 64


def choose(row: Method, tokens: int) -> str:
    """The implementation that impl=None means."""
    return "chunk" if row.chunk is not None and tokens > NAIVE_LENGTH else "naive"


def _call(name: str, impl: str | None, check_finite: bool, **args: Any) -> Output:
    row = METHODS[name]
    function = None if impl is None else row.resolve(impl)
    check(name, row.inputs, args, check_finite)
    if name == "taylor" and impl == "recurrent":
        feature_count(args["q"].shape[-1], args["order"])
    if function is None:
        function = row.resolve(choose(row, args[row.inputs[0]].shape[1]))
    return function(**args)  # type: ignore[no-any-return]


def softmax(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, window: int | None = None, sinks: int = 0,
    cu_seqlens: Tensor | None = None, key_mask: Tensor | None = None, impl: str | None = None, check_finite: bool = False,
) -> Output:
    """Causal softmax attention, whole or through a sliding window with sinks. Equation and shapes: `mva_ref.naive.softmax`."""
    return _call("softmax", impl, check_finite, q=q, k=k, v=v, scale=scale, window=window, sinks=sinks, cu_seqlens=cu_seqlens,
                 key_mask=key_mask)


def taylor(
    q: Tensor, k: Tensor, v: Tensor, order: int, *, scale: float | None = None, centre: str | Tensor | None = None,
    initial_state: TaylorState | None = None, output_final_state: bool = False, cu_seqlens: Tensor | None = None,
    key_mask: Tensor | None = None, impl: str | None = None, check_finite: bool = False,
) -> Output:
    """Attention whose exponential is cut after `order`. Equation and shapes: `mva_ref.naive.taylor`."""
    return _call("taylor", impl, check_finite, q=q, k=k, v=v, order=order, scale=scale, centre=centre, initial_state=initial_state,
                 output_final_state=output_final_state, cu_seqlens=cu_seqlens, key_mask=key_mask)


def metala(
    r: Tensor, v: Tensor, g: Tensor, *, self_augmentation: Tensor | None = None, initial_state: SlotState | None = None,
    output_final_state: bool = False, cu_seqlens: Tensor | None = None, key_mask: Tensor | None = None, impl: str | None = None,
    check_finite: bool = False,
) -> Output:
    """MetaLA: a linear, signed query in slot space. Equation and shapes: `mva_ref.naive.metala`."""
    return _call("metala", impl, check_finite, r=r, v=v, g=g, self_augmentation=self_augmentation, initial_state=initial_state,
                 output_final_state=output_final_state, cu_seqlens=cu_seqlens, key_mask=key_mask)


def abc(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, *, scale: float | None = None, initial_state: AbcState | None = None,
    output_final_state: bool = False, cu_seqlens: Tensor | None = None, key_mask: Tensor | None = None, impl: str | None = None,
    check_finite: bool = False,
) -> Output:
    """Attention with bounded-memory control. Equation and shapes: `mva_ref.naive.abc`."""
    return _call("abc", impl, check_finite, q=q, k=k, v=v, s=s, scale=scale, initial_state=initial_state,
                 output_final_state=output_final_state, cu_seqlens=cu_seqlens, key_mask=key_mask)


def gsa(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, *, scale: float | None = None, read: Read = "softmax",
    perceptron: Perceptron | None = None, slot_bias: str | Tensor | None = None, initial_state: SlotState | None = None,
    output_final_state: bool = False, cu_seqlens: Tensor | None = None, key_mask: Tensor | None = None, impl: str | None = None,
    check_finite: bool = False,
) -> Output:
    """Gated slot attention. Equation and shapes: `mva_ref.naive.gsa`."""
    return _call("gsa", impl, check_finite, q=q, k=k, v=v, g=g, scale=scale, read=read, perceptron=perceptron, slot_bias=slot_bias,
                 initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens, key_mask=key_mask)


def mva(
    q: Tensor, k: Tensor, v: Tensor, g_levels: Tensor, *, low_query: Tensor | None = None, branches: str = "shared",
    low_g: Tensor | None = None, branch_gate: Tensor | None = None, scale: float | None = None, read: Read = "softmax",
    perceptron: Perceptron | None = None, residual: str = "post", slot_bias: str | Tensor | None = None,
    initial_state: SlotState | None = None, output_final_state: bool = False, cu_seqlens: Tensor | None = None,
    key_mask: Tensor | None = None, impl: str | None = None, check_finite: bool = False,
) -> Output:
    """MVA: low- and high-order queries on levels of slots. Equation and shapes: `mva_ref.naive.mva`."""
    return _call("mva", impl, check_finite, q=q, k=k, v=v, g_levels=g_levels, low_query=low_query, branches=branches, low_g=low_g,
                 branch_gate=branch_gate, scale=scale, read=read, perceptron=perceptron, residual=residual, slot_bias=slot_bias,
                 initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens, key_mask=key_mask)


def gsa_sw(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, window: int, *, integration: str = "soft", hard_weight: Tensor | None = None,
    sinks: int = 0, scale: float | None = None, read: Read = "softmax", perceptron: Perceptron | None = None,
    slot_bias: str | Tensor | None = None, initial_state: WindowState | None = None, output_final_state: bool = False,
    cu_seqlens: Tensor | None = None, key_mask: Tensor | None = None, impl: str | None = None, check_finite: bool = False,
) -> Output:
    """GSA with a sliding window. Equation and shapes: `mva_ref.naive.gsa_sw`."""
    return _call("gsa_sw", impl, check_finite, q=q, k=k, v=v, g=g, window=window, integration=integration, hard_weight=hard_weight,
                 sinks=sinks, scale=scale, read=read, perceptron=perceptron, slot_bias=slot_bias, initial_state=initial_state,
                 output_final_state=output_final_state, cu_seqlens=cu_seqlens, key_mask=key_mask)


def mva_sw(
    q: Tensor, k: Tensor, v: Tensor, g_levels: Tensor, window: int, *, integration: str = "soft", hard_weight: Tensor | None = None,
    sinks: int = 0, low_query: Tensor | None = None, branches: str = "shared", low_g: Tensor | None = None,
    branch_gate: Tensor | None = None, scale: float | None = None, read: Read = "softmax", perceptron: Perceptron | None = None,
    residual: str = "post", slot_bias: str | Tensor | None = None, initial_state: WindowState | None = None,
    output_final_state: bool = False, cu_seqlens: Tensor | None = None, key_mask: Tensor | None = None, impl: str | None = None,
    check_finite: bool = False,
) -> Output:
    """MVA with a sliding window. Equation and shapes: `mva_ref.naive.mva_sw`."""
    return _call("mva_sw", impl, check_finite, q=q, k=k, v=v, g_levels=g_levels, window=window, integration=integration,
                 hard_weight=hard_weight, sinks=sinks, low_query=low_query, branches=branches, low_g=low_g, branch_gate=branch_gate,
                 scale=scale, read=read, perceptron=perceptron, residual=residual, slot_bias=slot_bias, initial_state=initial_state,
                 output_final_state=output_final_state, cu_seqlens=cu_seqlens, key_mask=key_mask)


mqva, mqvswa = mva, mva_sw


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
    function = globals()[row.name]
    known = inspect.signature(function).parameters
    for option in options:
        if option not in known:
            fail(option, f"is no option of {row.name}", f"one of {', '.join(known)}")
    given = _by_name(row, inputs, options)
    missing = [x for x in (*row.inputs, *row.required) if x not in given]
    if missing:
        fail(missing[0], "is missing", f"{', '.join((*row.inputs, *row.required))} for {row.name}")
    return function(**given)  # type: ignore[no-any-return]


def weights(name: str, *inputs: Tensor, **options: Any) -> Tensor:
    """The T x T matrix A of a method: its output on v = identity.

    Shapes: the inputs of the method, v included (only its dtype and device matter) -> A [B, HQ, T, T] with o_t = sum_i A_ti v_i
    Errors: refused for self-augmentation, which is not linear in v, and for an initial state, which is not a token.
    """
    row = method(name)
    given = _by_name(row, inputs, options)
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
