"""The function of each registry row: check, choose an implementation, run. Its types are in functions.pyi, written from the forms."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .checks import check
from .method import Method, load
from .registry import ALIASES, METHODS
from .types import Output

# Up to here the T x T x M tensors of the naive form are small; beyond, a form linear in T is chosen where there is one.
NAIVE_LENGTH = 64


def choose(row: Method, first: Tensor) -> str:
    """The implementation that impl=None means for a call whose first input is `first`."""
    if row.triton is not None and first.is_cuda and first.dtype != torch.float64:
        return "triton_recurrent" if row.triton_recurrent is not None and first.shape[1] == 1 else "triton"
    return "chunk" if row.chunk is not None and first.shape[1] > NAIVE_LENGTH else "naive"


@functools.cache
def public(name: str) -> Callable[..., Output]:
    """The function of one registry row: the naive form's signature and docstring, and the keywords impl and check_finite."""
    row = METHODS[name]
    form = load(row.naive)
    ours = [inspect.Parameter("impl", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="str | None"),
            inspect.Parameter("check_finite", inspect.Parameter.KEYWORD_ONLY, default=False, annotation="bool")]
    signature = inspect.signature(form)
    signature = signature.replace(parameters=[*signature.parameters.values(), *ours])

    @functools.wraps(form)
    def call(*args: Any, **options: Any) -> Output:
        bound = signature.bind(*args, **options)
        bound.apply_defaults()
        given = dict(bound.arguments)
        impl, check_finite = given.pop("impl"), given.pop("check_finite")
        function = None if impl is None else row.resolve(impl)
        check(row, given, check_finite, impl)
        for key, dotted in row.by_head.items():
            if given[key] is None:
                v = given["v"]
                given[key] = load(dotted)(v.shape[2]).to(v.device, torch.promote_types(torch.float32, v.dtype))
        if function is None:
            function = row.resolve(choose(row, given[row.inputs[0]]))
        return function(**given)  # type: ignore[no-any-return]

    call.__signature__ = signature  # type: ignore[attr-defined]
    call.__doc__ = f"""{(form.__doc__ or "").rstrip()}

    impl        one of {", ".join(row.implementations())}; None chooses by the device and the length of the sequence
    check_finite    also refuse NaN and infinity in the inputs; reads every tensor
    """
    return call


def __getattr__(name: str) -> Any:
    if (row := ALIASES.get(name, name)) in METHODS:
        return public(row)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
