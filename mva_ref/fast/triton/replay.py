"""Gradients for a function that only goes forward, from another form of the same function: its graph is built in the backward pass."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...frame import leaves, tree_map
from ...types import Output
from .forms import Call

HOLE = torch.empty(0)   # stands where a tensor was


def fill(holes: Any, tensors: Any) -> Any:
    """Nested tuples with a tensor in every hole; the inverse of `leaves`."""
    left = iter(tensors)
    return tree_map(lambda _: next(left), holes)


class Recurrent(torch.autograd.Function):
    """Forward token by token, backward by chunks, from the inputs alone."""

    @staticmethod
    def forward(ctx: Any, f: Any, chunked: Any, call: Call, names: Any, holes: Any, made: list[Output], *tensors: Tensor) -> Any:
        out = f(call, **dict(zip(names, fill(holes, tensors), strict=True)))
        made.append(tree_map(lambda _: HOLE, out))
        ctx.save_for_backward(*tensors)
        ctx.call = chunked, call, names, holes
        ctx.set_materialize_grads(False)
        return tuple(leaves(out))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        chunked, call, names, holes = ctx.call
        wanted = ctx.needs_input_grad[6:]
        inputs = [x.detach().requires_grad_(w) for x, w in zip(ctx.saved_tensors, wanted, strict=True)]
        with torch.enable_grad(), torch.autocast(inputs[0].device.type, enabled=False):
            out = chunked(call, **dict(zip(names, fill(holes, inputs), strict=True)))
        pairs = [(y, dy.to(y.dtype)) for y, dy in zip(leaves(out), grads, strict=True) if dy is not None and y.requires_grad]
        ys, dys = [y for y, _ in pairs], [dy for _, dy in pairs]
        left = iter(torch.autograd.grad(ys, [x for x in inputs if x.requires_grad], dys, allow_unused=True))
        return *[None] * 6, *(next(left) if w else None for w in wanted)


def gradients_of(form: Callable[..., Output]) -> Callable[[Callable[..., Output]], Callable[..., Output]]:
    """Let a function of (call, arguments) that only goes forward have the gradients of a form by chunks."""
    def decorate(f: Callable[..., Output]) -> Callable[..., Output]:
        @functools.wraps(f)
        def wrapped(call: Call, **given: Any) -> Output:
            tensors = leaves(tuple(given.values()))
            if not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
                return f(call, **given)
            made: list[Output] = []
            holes = tree_map(lambda _: HOLE, tuple(given.values()))
            flat = Recurrent.apply(f, form.__wrapped__, call, tuple(given), holes, made, *tensors)  # type: ignore[attr-defined]
            return fill(made[0], flat)  # type: ignore[no-any-return]
        return wrapped
    return decorate
