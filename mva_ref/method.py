"""What the registry says of one attention system."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from math import comb
from typing import Any

from .types import ArgumentError


def load(dotted: str) -> Callable[..., Any]:
    """The function that `package.module:function` names."""
    module, function = dotted.split(":")
    return getattr(import_module(module), function)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Method:
    """An attention system: where its forms are, what it takes, what it costs and what is true of it.

    Forms are dotted names, imported on first use. `inputs` are the tensors in positional order; options are the rest of the naive
    form's signature. Sizes are letters: D, V, M, L, E (width of a feature projection), F (number of features, from `features`),
    W (window), n (sinks), N (order or power), C (segment), T. `state` is the number of float numbers a KV head keeps for the next token;
    log decays and counters are left out.
    """

    name: str
    title: str
    order: str                      # which powers of q.k a read contains
    compression: str                # what the past is kept in: nothing, features, slots, levels of slots
    decay: str                      # what the decay depends on
    integration: str                # how a window and the rest are put together
    state: str
    exact: str                      # when the method is softmax attention exactly
    source: str
    inputs: tuple[str, ...]
    naive: str
    recurrent: str
    chunk: str | None = None
    triton: str | None = None
    triton_recurrent: str | None = None
    required: tuple[str, ...] = ()  # options without a default
    shapes: Mapping[str, str] = field(default_factory=dict)    # of tensors of this row, where they are not those of checks.SHAPES
    by_head: Mapping[str, str] = field(default_factory=dict)   # options [H] whose default depends on the index of a head: what gives it
    features: str = "D"
    state_type: str | None = None
    state_fields: Mapping[str, Any] = field(default_factory=dict)
    cancellation: str | None = None     # where features cancel without bound: by how much what a row adds up exceeds its sum
    # What holds for every input, at default options; where a row says False, a test finds a counterexample.
    normalised: bool = False        # rows of A sum to one
    positive: bool = False          # no entry of A is negative
    rotation: bool = True           # one rotation of q and k changes nothing
    shift: bool = False             # adding one vector to all keys changes nothing
    one_matrix: bool = True         # all value channels share the matrix A, so that `weights` exists
    forms: tuple[str, ...] = field(default=("naive", "recurrent", "chunk", "triton", "triton_recurrent"), repr=False)

    @cached_property
    def options(self) -> tuple[str, ...]:
        """The keyword arguments, from the signature of the naive form."""
        return tuple(name for name in inspect.signature(load(self.naive)).parameters if name not in self.inputs)

    @property
    def stateful(self) -> bool:
        """Does a call take and return a state?"""
        return self.state_type is not None

    def implementations(self) -> tuple[str, ...]:
        """The impl names this row offers."""
        return tuple(name for name in self.forms if getattr(self, name) is not None)

    def portable(self) -> tuple[str, ...]:
        """The implementations in plain torch: any device, float64 too."""
        return tuple(name for name in self.implementations() if not name.startswith("triton"))

    def feature_count(self, **sizes: int) -> int:
        """The number of features of a key, at D, E, N."""
        return int(eval(self.features, {"__builtins__": {}}, {"comb": comb, "D": 0, "N": 0, "E": sizes.get("D", 0), **sizes}))

    def state_numbers(self, **sizes: int) -> int:
        """The number of float numbers a KV head keeps, at D, V, M, L, E, W, n, N, C, T."""
        known = {"E": sizes.get("D", 0), "F": self.feature_count(**sizes), **sizes}
        return int(eval(self.state, {"__builtins__": {}}, known))

    def resolve(self, impl: str) -> Callable[..., Any]:
        """The function behind one implementation; an ArgumentError names the ones that exist."""
        if impl not in self.implementations():
            raise ArgumentError(f"impl: {self.name} has no implementation {impl!r}; it has {', '.join(self.implementations())}")
        return load(getattr(self, impl))
