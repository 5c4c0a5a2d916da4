"""The strategies draw what they promise: a property that holds for all problems says little if the hard ones are never drawn."""

import hypothesis
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import mva_ref as mva
from mva_ref.testing.strategies import GATES, Problem, gates, normal, one_hot_gates, problems

ROWS = {row.name: row for row in mva.methods()}
# States and packing are made by the tests that need them, from a drawn problem; self-augmentation is not linear in v.
NOT_DRAWN = {"initial_state", "output_final_state", "cu_seqlens", "self_augmentation"}
DRAWN = [(name, option) for name, row in ROWS.items() for option in row.options if option not in NOT_DRAWN]
VALUES = {
    "order": (0, 1, 2, 3, 4), "centre": (None, "mean", "running"), "read": ("softmax", "sigmoid", 1, 2), "residual": ("post", "pre"),
    "integration": ("soft", "hard"), "branches": ("shared", "separate", "gated"), "slot_bias": (None, "mass"), "sinks": (0, 1, 2, 3),
    "power": (2, 4), "halves": (False, True),
}
# No shrinking: that something is found is all that is asked.
SEARCH = settings(max_examples=2000, database=None, deadline=None, derandomize=True, phases=[Phase.generate])


def find(strategy, condition):
    return hypothesis.find(strategy, condition, settings=SEARCH)


def same(x, y):
    return type(x) is type(y) and not isinstance(x, torch.Tensor) and x == y


@given(gates(2, 3, 2, 2))
def test_gates_are_decays(g):
    assert g.shape == (2, 3, 2, 2) and g.dtype == torch.float64
    assert (g <= 0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("extreme", GATES)
def test_every_extreme_gate_occurs(extreme, dtype):
    wanted = torch.tensor(extreme, dtype=dtype)
    assert find(gates(1, 3, 1, 2, dtype=dtype), lambda g: (g == wanted).any()).dtype == dtype


def test_gates_are_all_extreme_all_ordinary_or_mixed():
    extremes = torch.tensor(GATES, dtype=torch.float64)
    find(gates(1, 3, 1, 2), lambda g: torch.isin(g, extremes).all())
    find(gates(1, 3, 1, 2), lambda g: not torch.isin(g, extremes).any())
    find(gates(1, 3, 1, 2), lambda g: 0 < torch.isin(g, extremes).sum() < g.numel())


@given(st.data())
def test_one_hot_gates_give_each_token_a_slot_of_its_own(data):
    B, H, M = (data.draw(st.integers(1, n)) for n in (2, 3, 6))
    T = data.draw(st.integers(1, M))
    g = data.draw(one_hot_gates(B, T, H, M))
    assert g.shape == (B, T, H, M)
    assert ((g == 0) | g.isneginf()).all()
    assert (g.isneginf().sum(-1) == 1).all(), "one slot a token"
    assert (g.isneginf().sum(1) <= 1).all(), "one token a slot"


@given(normal(2, 3, scale=4.0, dtype=torch.float32))
def test_normal_numbers(x):
    assert x.shape == (2, 3) and x.dtype == torch.float32 and x.isfinite().all()


@pytest.mark.parametrize(("row", "option"), DRAWN)
def test_every_option_is_drawn(row, option):
    assert find(problems(row), lambda p: p.options.get(option) is not None).name == row


@pytest.mark.parametrize(("row", "option", "value"), [(row, option, x) for row, option in DRAWN for x in VALUES.get(option, ())])
def test_every_value_of_a_choice_is_drawn(row, option, value):
    find(problems(row), lambda p: option in p.options and same(p.options[option], value))


@pytest.mark.parametrize("row", [name for name in ROWS if "slot_bias" in ROWS[name].options])
def test_a_tensor_bias_is_drawn(row):
    find(problems(row), lambda p: isinstance(p.options["slot_bias"], torch.Tensor))


@pytest.mark.parametrize("row", ROWS)
def test_masks_heads_and_lengths_are_drawn(row):
    heads, kv = ROWS[row].inputs[0], "v"
    find(problems(row), lambda p: p.inputs[heads].shape[2] > p.inputs[kv].shape[2] > 1)
    find(problems(row), lambda p: p.inputs[kv].shape[0] == 2 and p.inputs[kv].shape[1] == 9)
    find(problems(row), lambda p: p.options.get("key_mask") is not None and not p.options["key_mask"].any())


@pytest.mark.parametrize("row", ROWS)
@given(st.data())
def test_a_default_problem_has_required_options_only(row, data):
    p = data.draw(problems(row, default=True))
    assert tuple(p.inputs) == ROWS[row].inputs
    assert set(p.options) == set(ROWS[row].required)
    p.run("naive")


@pytest.mark.parametrize("row", ROWS)
@given(st.data())
def test_fixed_options_are_kept_and_foreign_ones_dropped(row, data):
    fixed = {"output_final_state": True, "key_mask": None, "sinks": 1, "nonsense": 3}
    p = data.draw(problems(row, fixed=fixed, min_T=2, max_T=3))
    assert {key: p.options[key] for key in fixed if key in p.options} == {key: x for key, x in fixed.items() if key in ROWS[row].options}
    assert 2 <= p.inputs["v"].shape[1] <= 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("row", ROWS)
@given(st.data())
def test_problems_are_valid(row, dtype, data):
    p = data.draw(problems(row, dtype=dtype))
    assert isinstance(p, Problem) and tuple(p.inputs) == ROWS[row].inputs and set(p.options) <= set(ROWS[row].options)
    o = p.run("naive", check_finite=True).o
    assert o.dtype == dtype and o.shape == (*p.inputs[ROWS[row].inputs[0]].shape[:3], p.inputs["v"].shape[-1])
