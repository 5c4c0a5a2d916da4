"""All Hypothesis strategies, and nothing else: small problems for any registry row, with the gates that break kernels."""

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ..registry import method
from .examples import DECAYS, Problem, elu_plus_one, into, shape

GATES = (0.0, -1e-6, -1.0, -20.0, -90.0, -1e4, -torch.inf)


def exponential(x: Tensor) -> Tensor:
    """A positive feature map that is not bounded: exp(x / 4)."""
    return (x / 4).exp()


@st.composite
def normal(draw: st.DrawFn, *shape: int, scale: float = 1.0, label: str = "seed", dtype: torch.dtype = torch.float64) -> Tensor:
    """Independent normal numbers from a drawn seed."""
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1), label=label))
    return scale * torch.randn(*shape, generator=rng, dtype=torch.float64).to(dtype)


@st.composite
def gates(draw: st.DrawFn, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Log decays: all ordinary, all from the list of extremes, or a mixture. A drawn seed places them, a drawn subset chooses them."""
    pool = draw(st.lists(st.sampled_from(GATES), max_size=len(GATES), unique=True), label="extreme gates")
    share = draw(st.sampled_from((0.0, 0.3, 1.0)), label="share of extreme gates") if pool else 0.0
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1), label="gate seed"))
    ordinary = -torch.rand(*shape, generator=rng, dtype=torch.float64)
    if not pool:
        return ordinary.to(dtype)
    extreme = torch.tensor(pool, dtype=torch.float64)[torch.randint(len(pool), shape, generator=rng)]
    return torch.where(torch.rand(*shape, generator=rng) < share, extreme, ordinary).to(dtype)


@st.composite
def one_hot_gates(draw: st.DrawFn, B: int, T: int, H: int, M: int) -> Tensor:
    """Gates that write each token to one slot of its own (P13): -inf there, 0 elsewhere; needs T <= M."""
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1), label="slot seed"))
    g = torch.zeros(B, T, H, M, dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            g[b, range(T), h, torch.randperm(M, generator=rng)[:T]] = -torch.inf
    return g


@st.composite
def problems(
    draw: st.DrawFn, name: str, *, max_T: int = 9, min_T: int = 1, default: bool = False, dtype: torch.dtype = torch.float64,
    fixed: dict[str, Any] | None = None,
) -> Problem:
    """A small problem for one registry row: D, V, M unequal and unround, grouped heads, extreme gates.

    With default=True only what the method requires is drawn; otherwise its options too. `fixed` sets options (and then draws
    nothing for them; those that the row does not have are ignored); options that depend on each other are drawn together.

    Never drawn, because a test makes them from the drawn problem: initial_state, output_final_state and cu_seqlens; nor
    self_augmentation, under which MetaLA is not linear in v.
    """
    row = method(name)
    fixed = {key: x for key, x in (fixed or {}).items() if key in row.options}
    B, H, R, L = (draw(st.integers(1, n), label=label) for n, label in ((2, "B"), (2, "H"), (2, "R"), (3, "L")))
    T = draw(st.integers(min_T, max_T), label="T")
    D, V, M = (draw(st.integers(1, n), label=label) for n, label in ((4, "D"), (5, "V"), (4, "M")))
    HQ = H * R
    sizes = {"B": B, "T": T, "H": H, "HQ": HQ, "D": D, "V": V, "M": M, "L": L, "E": draw(st.integers(1, 3), label="E")}

    def tensor(key: str) -> Tensor:
        axes = shape(name, key, sizes)
        if key in DECAYS:
            g: Tensor = draw(gates(*axes, dtype=dtype), label=key)
            return g
        size = draw(st.sampled_from((1.0, 0.3, 4.0)), label=f"size of {key}")
        return into(key, draw(normal(*axes, scale=size, label=key, dtype=dtype)))

    inputs = {key: tensor(key) for key in row.inputs}
    if default and "q" in inputs and draw(st.booleans(), label="a query of zeros"):
        inputs["q"][0, 0] = 0                                   # to which every key of a homogeneous kernel weighs nothing
    if "beta" in inputs:                                        # a delta rule is stable for keys no longer than one
        inputs["k"] = inputs["k"] / inputs["k"].norm(dim=-1, keepdim=True).clamp(min=1)
    options: dict[str, Any] = {}

    def option(key: str, strategy: st.SearchStrategy[Any]) -> None:
        if key in row.options and key not in fixed and (not default or key in row.required):
            options[key] = draw(strategy, label=key)

    option("order", st.integers(0, 4))
    option("window", st.integers(1, T + 1))
    option("sinks", st.integers(0, 3))
    option("scale", st.sampled_from((None, 0.7, 2.0)))
    option("centre", st.sampled_from((None, "mean", "running")))
    option("read", st.sampled_from(("softmax", "sigmoid", 2, 1)))
    option("residual", st.sampled_from(("post", "pre")))
    option("integration", st.sampled_from(("soft", "hard")))
    option("slot_bias", st.sampled_from((None, "mass")) | normal(B, T, HQ, M, label="slot_bias", dtype=dtype))
    option("branches", st.sampled_from(("shared", "separate", "gated")))
    option("key_mask", st.none() | st.lists(st.booleans(), min_size=B * T, max_size=B * T).map(lambda x: torch.tensor(x).view(B, T)))
    option("feature_map", st.sampled_from((elu_plus_one, exponential)))
    option("segment", st.integers(1, T + 1))
    option("power", st.sampled_from((2, 4)))
    option("halves", st.booleans())
    option("own_maximum", st.booleans())
    option("eps", st.sampled_from((1e-5, 0.1)))
    left = [key for key in row.shapes if key not in row.inputs and key not in fixed and (not default or key in row.required)]
    given = {key for key in left if key in row.required or draw(st.booleans(), label=f"{key} given")}
    if any(key in row.shapes and key not in given and fixed.get(key) is None for key in ("W_q", "W_k")):
        sizes["E"] = D                                          # the identity stands for a projection left out
    options |= {key: tensor(key) if key in given else None for key in left}
    known = {**options, **fixed}
    always_hard = "hard_weight" in row.options and "integration" not in row.options and not default
    if (known.get("integration") == "hard" or always_hard) and "hard_weight" not in fixed:
        options["hard_weight"] = draw(normal(B, T, HQ, label="hard_weight", dtype=dtype)).sigmoid()
    branches = known.get("branches", "shared")
    if "low_query" in row.options and "low_query" not in fixed and not default:
        if branches != "shared" or draw(st.booleans(), label="low-order branch"):
            options["low_query"] = draw(normal(B, T, HQ, M, label="low_query", dtype=dtype))
    if branches == "separate" and "low_g" not in fixed:
        options["low_g"] = draw(gates(B, T, H, M, dtype=dtype), label="low_g")
    if branches == "gated" and "branch_gate" not in fixed:
        options["branch_gate"] = draw(normal(B, T, HQ, label="branch_gate", dtype=dtype)).sigmoid()
    if known.get("read") == "sigmoid" and "perceptron" not in fixed and draw(st.booleans(), label="perceptron given"):
        options["perceptron"] = (draw(normal(HQ, M, M, label="W", dtype=dtype)), draw(normal(M, label="a", dtype=dtype)))
    return Problem(name, inputs, {**options, **fixed})
