"""What every method keeps to, whatever its mathematics; generated from the registry."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

import mva_ref as mva
from mva_ref.frame import leaves, tree_map
from mva_ref.testing.examples import DECAYS, axes, by_head
from mva_ref.testing.strategies import Problem, normal, problems

ROWS = [row.name for row in mva.methods()]
FORMS = [(row.name, impl) for row in mva.methods() for impl in row.portable()]
STATEFUL = [(row, impl) for row, impl in FORMS if mva.registry.method(row).stateful]
FEW = settings(max_examples=12)  # rows x forms x examples: each test runs some 250 problems even so
ORDINARY: dict[str, Any] = {"order": 2, "power": 2, "read": "softmax", "centre": None}


def tensors(p: Problem) -> dict[str, Any]:
    return {**p.inputs, **p.options}


def on_tokens(p: Problem, index: torch.Tensor) -> Problem:
    time = axes(p.name, "T")

    def part(name: str, x: Any) -> Any:
        return x.index_select(time[name], index) if name in time and isinstance(x, torch.Tensor) else x
    return p._replace(inputs={n: part(n, x) for n, x in p.inputs.items()}, options={n: part(n, x) for n, x in p.options.items()})


def first_sequence(p: Problem) -> Problem:
    batch = axes(p.name, "B")

    def part(name: str, x: Any) -> Any:
        return x.narrow(batch[name], 0, 1) if name in batch and isinstance(x, torch.Tensor) else x
    return p._replace(inputs={n: part(n, x) for n, x in p.inputs.items()}, options={n: part(n, x) for n, x in p.options.items()})


def assert_equal_outputs(a: Any, b: Any) -> None:
    for x, y in zip(leaves(a), leaves(b), strict=True):
        assert x.dtype == y.dtype
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("row", "impl"), FORMS)
@FEW
@given(st.data())
def test_packed_sequences_are_sequences(row, impl, data):
    """Property: with cu_seqlens each packed sequence, empty ones included, gives its own output, log-mass and state."""
    p = first_sequence(data.draw(problems(row, fixed=ORDINARY)))
    T = p.inputs["v"].shape[1]
    ends = [0, *sorted(data.draw(st.lists(st.integers(0, T), max_size=3), label="boundaries")), T]
    options = {} if not mva.registry.method(row).stateful else {"output_final_state": True}
    packed = p.run(impl, cu_seqlens=torch.tensor(ends, dtype=data.draw(st.sampled_from((torch.int32, torch.int64)))), **options)
    alone = [on_tokens(p, torch.arange(a, b)).run(impl, **options) for a, b in pairwise(ends)]
    torch.testing.assert_close(packed.o, torch.cat([x.o for x in alone], 1), rtol=1e-10, atol=1e-10)
    if packed.lse is not None:
        torch.testing.assert_close(packed.lse, torch.cat([x.lse for x in alone], 1), rtol=1e-10, atol=1e-10)
    for n, single in enumerate(alone):
        assert_equal_outputs(tree_map(lambda x, n=n: x[n : n + 1], packed.state), single.state)


@pytest.mark.parametrize(("row", "impl"), FORMS)
@FEW
@given(st.data())
def test_grouped_heads_are_repeated_heads(row, impl, data):
    """Property: query head h reads KV head h // (HQ / H): the same as repeating keys, values and gates for every query head."""
    p = by_head(data.draw(problems(row, fixed=ORDINARY)))
    H = p.inputs["v"].shape[2]
    R = p.run(impl).o.shape[2] // H
    axis = axes(row, "H")
    repeated = {n: x.repeat_interleave(R, axis[n]) for n, x in tensors(p).items() if n in axis and isinstance(x, torch.Tensor)}
    torch.testing.assert_close(p.run(impl, **repeated).o, p.run(impl).o, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("row", "impl"), FORMS)
@FEW
@given(st.data())
def test_a_masked_token_is_neither_seen_nor_written(row, impl, data):
    """Property: what a masked token contains changes nothing; where no window counts places, neither does leaving it out."""
    p = data.draw(problems(row, min_T=2, fixed={**ORDINARY, "key_mask": None, "branches": "shared"}))
    B, T = p.inputs["v"].shape[:2]
    t = data.draw(st.integers(0, T - 1), label="masked")
    keep = torch.arange(T) != t
    mask = keep.expand(B, T)
    changed, time = {}, axes(row, "T")
    for name in ("k", "v", "g", "g_levels", "s", "beta", "dt"):
        if name in p.inputs:
            x = p.inputs[name].clone()
            x.select(time[name], t).fill_(1.5 if name in ("beta", "dt") else -7.0)
            changed[name] = x
    options = {} if not mva.registry.method(row).stateful else {"output_final_state": True}
    plain = p.run(impl, key_mask=mask, **options)
    same = p.run(impl, key_mask=mask, **changed, **options)
    if row != "metala" or p.options.get("self_augmentation") is None:
        torch.testing.assert_close(same.o, plain.o, rtol=1e-10, atol=1e-10)
    if mva.registry.method(row).state_type != "WindowState" and p.options.get("window") is None:
        assert_equal_outputs(same.state, plain.state)
        rest = keep.nonzero().flatten()
        torch.testing.assert_close(on_tokens(p, rest).run(impl).o, plain.o[:, rest], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("row", "impl"), FORMS)
@FEW
@given(st.data())
def test_inputs_are_left_alone(row, impl, data):
    """Property: inputs and initial state are the same bits after the call."""
    p = data.draw(problems(row, fixed=ORDINARY))
    given_ = tensors(p)
    if mva.registry.method(row).stateful:
        given_["initial_state"] = p.run(impl, output_final_state=True).state
        given_["output_final_state"] = True
    before = tree_map(torch.clone, tuple(given_.values()))
    mva.attention(row, **given_, impl=impl)
    assert all(torch.equal(x, y) for x, y in zip(leaves(before), leaves(tuple(given_.values())), strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("row", "impl"), FORMS)
@settings(max_examples=5)
@given(st.data())
def test_dtypes(row, impl, dtype, data):
    """Property: o has the dtype of q; states and lse are float32, or float64 with float64 inputs; autocast changes no bit."""
    p = data.draw(problems(row, dtype=dtype, fixed={"key_mask": None, **ORDINARY}))
    options = {} if not mva.registry.method(row).stateful else {"output_final_state": True}
    out = p.run(impl, **options)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert out.o.dtype == dtype
    assert all(x.dtype == wide for x in leaves((out.state, out.lse)) if x.is_floating_point())
    with torch.autocast("cpu", torch.bfloat16):
        again = p.run(impl, **options)
    assert torch.equal(again.o, out.o)


def away_from_zero(state: Any) -> Any:
    """The same state with every log decay a little below 0, so that a step of finite differences stays a decay."""
    if not hasattr(state, "_fields"):
        return state
    parts = {n: away_from_zero(x) for n, x in state._asdict().items()}
    return type(state)(**{n: x - 0.1 if n in ("log_decay", "g", "low_g") and x is not None else x for n, x in parts.items()})


def differentiable(p: Problem) -> dict[str, Any]:
    return {n: tree_map(lambda x: x.clone().requires_grad_() if x.is_floating_point() else x, x) for n, x in tensors(p).items()}


@pytest.mark.parametrize(("row", "impl"), FORMS)
@settings(max_examples=4, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_gradients_are_derivatives(row, impl, data):
    """Property: gradients through every floating input, gates and initial state included, are those of finite differences."""
    fixed = {"key_mask": None, "slot_bias": data.draw(st.sampled_from((None, "mass")), label="bias"), "order": 2, "power": 2}
    p = data.draw(problems(row, max_T=4, fixed=fixed))
    gates = {n: -torch.rand(x.shape, generator=torch.Generator().manual_seed(1), dtype=x.dtype) - 0.1
             for n, x in tensors(p).items() if n in DECAYS and x is not None}
    gates |= {n: x + 0.1 for n, x in p.inputs.items() if n == "dt"}
    p = p._replace(inputs={**p.inputs, **{n: x for n, x in gates.items() if n in p.inputs}},
                   options={**p.options, **{n: x for n, x in gates.items() if n in p.options}})
    fixed_options = {}
    if mva.registry.method(row).stateful and p.options.get("centre") != "mean":
        fixed_options["initial_state"] = away_from_zero(p.run(impl, output_final_state=True).state)
    x = {**tensors(p), **fixed_options}
    names = [n for n, v in x.items() if isinstance(v, torch.Tensor) and v.is_floating_point() and n != "hard_weight"]
    state = x.get("initial_state")
    parts = [] if state is None else [v for v in leaves(state) if v.is_floating_point()]

    def f(*values):
        new = dict(zip(names, values[: len(names)], strict=True))
        if state is not None:
            fresh = iter(values[len(names) :])
            new["initial_state"] = tree_map(lambda v: next(fresh) if v.is_floating_point() else v, state)
        out = mva.attention(row, **{**x, **new}, impl=impl)
        return (out.o,) if out.lse is None else (out.o, torch.where(out.lse.isneginf(), 0, out.lse))

    inputs = [v.clone(memory_format=torch.contiguous_format).requires_grad_() for v in [*(x[n] for n in names), *parts]]
    assert torch.autograd.gradcheck(f, inputs, eps=1e-6, atol=1e-4, rtol=1e-3, nondet_tol=0.0, fast_mode=True)


@pytest.mark.parametrize(("row", "impl"), FORMS)
@FEW
@given(st.data())
def test_gradients_are_finite_at_extreme_gates(row, impl, data):
    """Property: gates of 0, -1e4 and -inf, masked tokens and hidden slots give finite gradients, never NaN."""
    p = data.draw(problems(row, fixed={"read": data.draw(st.sampled_from(("softmax", "sigmoid", 2)), label="read"), "order": 2}))
    x = differentiable(p)
    out = mva.attention(row, **x, impl=impl)
    assert out.o.isfinite().all()
    out.o.sum().backward()
    grads = [t.grad for t in leaves(tuple(x.values())) if t.grad is not None]
    assert grads and all(g.isfinite().all() for g in grads)


def same_matrix(p: Problem, **changes: torch.Tensor) -> bool:
    A, B = p.matrices(), p.matrices(**changes)
    return bool(((A - B).abs() <= 1e-8 * (1 + A.abs().sum(-1, keepdim=True) ** 2)).all())


def sums_to_one(p: Problem, seed: int) -> bool:
    A = p.matrices()
    return bool(((A.sum(-1) - 1).abs() < 1e-10 * (1 + A.abs().sum(-1) ** 2)).all())


def non_negative(p: Problem, seed: int) -> bool:
    return bool((p.matrices() >= -1e-12).all())


def keeps_under_rotation(p: Problem, seed: int) -> bool:
    q, k = p.inputs["q"], p.inputs["k"]
    U = torch.linalg.qr(torch.randn(q.shape[-1], q.shape[-1], dtype=q.dtype, generator=torch.Generator().manual_seed(seed)))[0]
    return same_matrix(p, q=q @ U, k=k @ U)


def keeps_under_shift(p: Problem, seed: int) -> bool:
    k = p.inputs["k"]
    return same_matrix(p, k=k + torch.randn(k.shape[2:], dtype=k.dtype, generator=torch.Generator().manual_seed(seed)))


HOLDS = {"normalised": sums_to_one, "positive": non_negative, "rotation": keeps_under_rotation, "shift": keeps_under_shift}
CLAIMS = [(row.name, claim) for row in mva.methods() for claim in HOLDS
          if claim in ("normalised", "positive") or {"q", "k"} <= {*row.inputs}]
SEEDS = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize(("row", "claim"), [x for x in CLAIMS if getattr(mva.registry.method(x[0]), x[1])])
@given(st.data())
def test_weights_have_the_properties_the_registry_gives_them(row, claim, data):
    """Property: rows of A sum to one, no entry is negative, a rotation of q and k or a shift of all keys keeps A: as the registry says."""
    assert HOLDS[claim](data.draw(problems(row, default=True)), data.draw(SEEDS, label="seed"))


@pytest.mark.parametrize(("row", "claim"), [x for x in CLAIMS if not getattr(mva.registry.method(x[0]), x[1])])
def test_what_the_registry_denies_has_a_counterexample(row, claim):
    """Property: where the registry does not claim one of these properties, an input that breaks it can be found."""
    search = settings(max_examples=500, database=None, derandomize=True, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
    found = find(st.tuples(problems(row, default=True), SEEDS), lambda x: not HOLDS[claim](*x), settings=search)
    assert not HOLDS[claim](*found)


@pytest.mark.parametrize(("row", "impl"), STATEFUL)
@FEW
@given(st.data())
def test_no_tokens_change_nothing(row, impl, data):
    """Property: a call on no tokens returns no output and the state it was given."""
    p = data.draw(problems(row, fixed={**ORDINARY, "key_mask": None}))
    state = p.run(impl, output_final_state=True).state
    none = on_tokens(p, torch.arange(0)).run(impl, output_final_state=True, initial_state=state)
    assert none.o.shape[1] == 0 and none.o.shape[2:] == p.run(impl).o.shape[2:]
    assert all(torch.equal(x, y) for x, y in zip(leaves(state), leaves(none.state), strict=True))


@pytest.mark.parametrize(("row", "impl"), FORMS)
@FEW
@given(st.data())
def test_strides_do_not_matter(row, impl, data):
    """Property: transposed and expanded inputs give what their contiguous copies give, forward and backward."""
    p = data.draw(problems(row, fixed=ORDINARY))
    strided = {n: x.transpose(0, -1).contiguous().transpose(0, -1) for n, x in p.inputs.items()}
    x = {n: v.clone().requires_grad_() for n, v in p.inputs.items()}
    y = {n: v.requires_grad_() for n, v in strided.items()}
    a, b = (mva.attention(row, **{**p.options, **z}, impl=impl).o for z in (x, y))
    upstream = data.draw(normal(1, 1, 1, 1, label="upstream")).expand(a.shape)
    a.backward(upstream)
    b.backward(upstream)
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    for u, v in zip(x.values(), y.values(), strict=True):
        torch.testing.assert_close(u.grad, v.grad, rtol=1e-9, atol=1e-9)
