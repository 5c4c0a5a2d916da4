"""One row per attention system. This table drives the public face, the tests, the benchmarks, the figures and the table in the docs."""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from math import comb
from typing import Any

from .types import ArgumentError

COMMON = ("initial_state", "output_final_state", "cu_seqlens", "key_mask")
SLOT_READ = ("scale", "read", "perceptron", "slot_bias")
LOW = ("low_query", "branches", "low_g", "branch_gate")
WINDOW = ("window", "integration", "hard_weight", "sinks")


@dataclass(frozen=True)
class Method:
    """An attention system: where its forms are, what it takes, what it costs and what is true of it.

    Forms are dotted names, resolved on call. `state` is the number of float numbers a KV head keeps for the next token, as an
    expression in D, V, M, L, W (window), n (sinks), N (order), T and F = C(D + N, N); log decays and
    counters are left out. `inputs` are the tensors in positional order.
    """

    name: str
    title: str
    order: str
    compression: str
    integration: str
    state: str
    source: str
    inputs: tuple[str, ...]
    options: tuple[str, ...]
    naive: str
    recurrent: str
    chunk: str | None = None
    required: tuple[str, ...] = ()
    normalised: bool = False      # rows of A sum to one, at any options for which the docs do not say otherwise
    positive: bool = False        # no entry of A is negative, at default options
    linear_in_v: bool = True
    rotation: bool = True         # invariant under one rotation of q and k
    forms: tuple[str, ...] = field(default=("naive", "recurrent", "chunk"), repr=False)

    def implementations(self) -> tuple[str, ...]:
        """The impl names this row offers."""
        return tuple(name for name in self.forms if getattr(self, name) is not None)

    def state_numbers(self, **sizes: int) -> int:
        """The number of float numbers a KV head keeps, at D, V, M, L, W, n, N, T."""
        F = comb(sizes.get("D", 0) + sizes.get("N", 0), sizes.get("N", 0))
        return int(eval(self.state, {"__builtins__": {}}, {"F": F, **sizes}))

    def resolve(self, impl: str) -> Callable[..., Any]:
        """The function behind one implementation; an ArgumentError names the ones that exist."""
        if impl not in self.implementations():
            raise ArgumentError(f"impl: {self.name} has no implementation {impl!r}; it has {', '.join(self.implementations())}")
        module, function = getattr(self, impl).split(":")
        return getattr(import_module(module), function)  # type: ignore[no-any-return]


METHODS: dict[str, Method] = {
    row.name: row
    for row in [
        Method(
            name="softmax", title="Softmax attention", order="all", compression="none", integration="window, sinks",
            state="T * (D + V)", source="1706.03762", inputs=("q", "k", "v"),
            options=("scale", "window", "sinks", "cu_seqlens", "key_mask"),
            naive="mva_ref.naive.softmax_attention:softmax", recurrent="mva_ref.naive.recurrent.tokens:softmax",
            normalised=True, positive=True,
        ),
        Method(
            name="taylor", title="Taylor order N", order="0 to N", compression="features", integration="none",
            state="F * (V + 1) + D", source="2402.18668 (N = 2)", inputs=("q", "k", "v"),
            options=("order", "scale", "centre", *COMMON), required=("order",),
            naive="mva_ref.naive.taylor_attention:taylor", recurrent="mva_ref.naive.recurrent.tokens:taylor",
            normalised=True, positive=False,
        ),
        Method(
            name="metala", title="MetaLA", order="1 in slot space", compression="slots", integration="none", state="M * V",
            source="2411.10741", inputs=("r", "v", "g"), options=("self_augmentation", *COMMON),
            chunk="mva_ref.fast.chunk.forms:metala", rotation=False, naive="mva_ref.naive.slots:metala",
            recurrent="mva_ref.naive.recurrent.slots:metala",
        ),
        Method(
            name="abc", title="ABC", order="all, of slots", compression="slots", integration="none", state="M * (D + V + 1)",
            source="2110.02488", inputs=("q", "k", "v", "s"), options=("scale", *COMMON),
            naive="mva_ref.naive.logit_slots:abc", recurrent="mva_ref.naive.recurrent.slots:abc", normalised=True, positive=True,
        ),
        Method(
            name="gsa", title="Gated slot attention", order="all, of slots", compression="slots", integration="none", state="M * (D + V)",
            source="2409.07146", inputs=("q", "k", "v", "g"), options=(*SLOT_READ, *COMMON),
            chunk="mva_ref.fast.chunk.forms:gsa", positive=True, naive="mva_ref.naive.slots:gsa",
            recurrent="mva_ref.naive.recurrent.slots:gsa",
        ),
        Method(
            name="mva", title="MVA", order="1 and all, of slots", compression="levels of slots", integration="none",
            state="L * M * (D + V)", source="ICML 2025, PMLR 267", inputs=("q", "k", "v", "g_levels"),
            options=(*LOW, "residual", *SLOT_READ, *COMMON), naive="mva_ref.naive.composed:mva",
            recurrent="mva_ref.naive.recurrent.composed:mva", chunk="mva_ref.fast.chunk.forms:mva",
        ),
        Method(
            name="gsa_sw", title="GSA with a sliding window", order="all; of slots beyond the window", compression="slots",
            integration="soft or hard", state="(M + W + n) * (D + V) + W * M", source="ICML 2025, PMLR 267", inputs=("q", "k", "v", "g"),
            options=(*WINDOW, *SLOT_READ, *COMMON), required=("window",), positive=True, naive="mva_ref.naive.composed:gsa_sw",
            recurrent="mva_ref.naive.recurrent.composed:gsa_sw", chunk="mva_ref.fast.chunk.forms:gsa_sw",
        ),
        Method(
            name="mva_sw", title="MVA with a sliding window", order="all; 1 and all of slots beyond the window",
            compression="levels of slots", integration="soft or hard", state="(L * M + W + n) * (D + V) + W * L * M",
            source="ICML 2025, PMLR 267",
            inputs=("q", "k", "v", "g_levels"), options=(*WINDOW, *LOW, "residual", *SLOT_READ, *COMMON), required=("window",),
            naive="mva_ref.naive.composed:mva_sw",
            recurrent="mva_ref.naive.recurrent.composed:mva_sw", chunk="mva_ref.fast.chunk.forms:mva_sw",
        ),
    ]
}

ALIASES = {"mqva": "mva", "mqvswa": "mva_sw"}


def method(name: str) -> Method:
    """A row by name or alias; an ArgumentError names the rows that exist."""
    row = METHODS.get(ALIASES.get(name, name)) if isinstance(name, str) else None
    if row is None:
        raise ArgumentError(f"method: there is no method {name!r}; there are {', '.join(METHODS)}")
    return row


def table() -> str:
    """The registry as a Markdown table."""
    head = ["method", "system", "QK order", "compression", "integration", "state, numbers per KV head", "implementations", "source"]
    rows = [[f"`{m.name}`", m.title, m.order, m.compression, m.integration, f"`{m.state}`", ", ".join(m.implementations()), m.source]
            for m in METHODS.values()]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["--"] * len(head), *rows])
