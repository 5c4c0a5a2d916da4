"""The public face: what it offers, how it chooses a form, and that the registry, the functions and the forms say the same."""

import inspect
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

import mva_ref as mva
from mva_ref import registry
from mva_ref.functions import NAIVE_LENGTH, choose
from mva_ref.method import Method, load
from mva_ref.registry import METHODS
from mva_ref.testing.examples import example

ROOT = Path(__file__).parents[1]
ROWS = list(METHODS.values())
NAMES = list(METHODS)
FORMS = [(row.name, impl) for row in ROWS for impl in row.portable()]
MATRICES = [(name, impl) for name, impl in FORMS if METHODS[name].one_matrix]
ABSENT = [(row.name, impl) for row in ROWS for impl in row.forms if impl not in row.implementations()]
OURS = {"impl", "check_finite"}      # what the public functions add to inputs and options


def tensors(name, **sizes):
    return example(name, **{"T": 3, "V": 5, "M": 4, **sizes}).inputs


def required(name, **sizes):
    return example(name, **{"T": 3, "V": 5, "M": 4, **sizes}).options


def same(a, b):
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def public(name):
    return inspect.signature(getattr(mva, name)).parameters


@pytest.fixture
def resolved(monkeypatch):
    """The implementations that were asked for, in order."""
    seen = []
    real = Method.resolve

    def resolve(self, impl):
        seen.append((self.name, impl))
        return real(self, impl)

    monkeypatch.setattr(Method, "resolve", resolve)
    return seen


# The face


def test_dir_and_all():
    assert set(mva.__all__) <= set(dir(mva))
    assert len(mva.__all__) == len(set(mva.__all__))
    assert {"attention", "merge", "weights", "methods", "ArgumentError", "Output", *NAMES, *registry.ALIASES} <= set(mva.__all__)
    for name in dir(mva):
        assert getattr(mva, name) is not None


def test_star_import():
    names = {}
    exec("from mva_ref import *", names)
    assert set(mva.__all__) <= set(names)


def test_what_all_names_comes_from_where_it_is_defined():
    api, functions, types = (import_module(f"mva_ref.{name}") for name in ("api", "functions", "types"))
    for name in mva.__all__:
        if name != "__version__":
            home = functions if name in {*NAMES, *registry.ALIASES} else types if name in vars(types) else api
            assert getattr(mva, name) is getattr(home, name)


def test_modules_are_attributes_after_a_bare_import():
    code = "import mva_ref as m; print([getattr(m, x).__name__ for x in ('fast', 'naive', 'registry', 'testing')], m.gsa.__name__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['mva_ref.fast', 'mva_ref.naive', 'mva_ref.registry', 'mva_ref.testing'] gsa"


def test_an_unknown_attribute():
    with pytest.raises(AttributeError, match=r"module 'mva_ref' has no attribute 'flash'"):
        _ = mva.flash
    assert not hasattr(mva, "torch")


def test_aliases():
    assert mva.mqva is mva.mva and mva.mqvswa is mva.mva_sw
    for alias, name in registry.ALIASES.items():
        assert registry.method(alias) is METHODS[name]
        x = tensors(name)
        assert torch.equal(mva.attention(alias, **x, **required(name)).o, mva.attention(name, **x, **required(name)).o)


def test_methods_are_the_registry():
    assert mva.methods() == tuple(ROWS)
    assert [row.name for row in mva.methods()] == NAMES


def test_the_error_is_a_value_error():
    assert issubclass(mva.ArgumentError, ValueError)


# The registry


def test_table():
    lines = registry.table().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert {len(row) for row in cells} == {8}
    assert all(line.startswith("| ") and line.endswith(" |") for line in lines)
    assert cells[0][0] == "method" and set(cells[1]) == {"--"}
    assert [row[0] for row in cells[2:]] == [f"`{name}`" for name in NAMES]
    assert [row[6] for row in cells[2:]] == [", ".join(row.implementations()) for row in ROWS]


@pytest.mark.parametrize("name", NAMES)
def test_inputs_and_options_are_the_signature(name):
    row, parameters = METHODS[name], public(name)
    assert len({*row.inputs, *row.options}) == len(row.inputs) + len(row.options)
    assert {*row.inputs, *row.options} == set(parameters) - OURS
    assert tuple(parameters)[: len(row.inputs)] == row.inputs
    assert OURS <= set(parameters) and parameters["impl"].default is None and parameters["check_finite"].default is False


@pytest.mark.parametrize("name", NAMES)
def test_only_inputs_and_required_options_have_no_default_and_may_be_positional(name):
    row, parameters = METHODS[name], public(name)
    assert {key for key, p in parameters.items() if p.default is p.empty} == {*row.inputs, *row.required}
    assert {key for key, p in parameters.items() if p.kind is not p.KEYWORD_ONLY} == {*row.inputs, *row.required}


@pytest.mark.parametrize(("name", "impl"), FORMS)
def test_forms_accept_inputs_and_options(name, impl):
    row = METHODS[name]
    signature = inspect.signature(row.resolve(impl))
    signature.bind(**dict.fromkeys((*row.inputs, *row.options)))
    signature.bind(*row.inputs, **required(name))
    assert not OURS & set(signature.parameters)


@pytest.mark.parametrize(("name", "impl"), FORMS)
def test_forms_have_the_public_defaults(name, impl):
    parameters = inspect.signature(METHODS[name].resolve(impl)).parameters
    for key, p in public(name).items():
        if key in parameters:
            assert parameters[key].default == p.default, key


@pytest.mark.parametrize(("name", "impl"), FORMS)
def test_forms_are_found_by_their_name(name, impl):
    form = METHODS[name].resolve(impl)
    shared = {("supra", "chunk"): "retnet"}      # the same but for its decays
    assert callable(form) and form.__name__ in (shared.get((name, impl), name), "recurrent")


# attention and weights


@pytest.mark.parametrize("name", NAMES)
def test_attention_takes_positional_inputs_and_options(name):
    x, options = tensors(name), required(name)
    key_mask = torch.tensor([[True, False, True], [True, True, False]])
    wanted = getattr(mva, name)(**x, **options, key_mask=key_mask)
    assert torch.equal(mva.attention(name, *x.values(), **options, key_mask=key_mask).o, wanted.o)
    assert torch.equal(mva.attention(name, **x, **options, key_mask=key_mask).o, wanted.o)
    first, *rest = x
    assert torch.equal(mva.attention(name, x[first], **{key: x[key] for key in rest}, **options, key_mask=key_mask).o, wanted.o)
    assert wanted.o.shape == (2, 3, 4, 5)
    assert not torch.equal(getattr(mva, name)(**x, **options).o, wanted.o), "the option changed nothing"


@pytest.mark.parametrize(("name", "impl"), MATRICES)
def test_weights_give_the_output(name, impl):
    x, options = tensors(name, T=6), {**required(name), "impl": impl}
    A = mva.weights(name, *x.values(), **options)
    assert A.shape == (2, 4, 6, 6)
    assert torch.equal(A, A.tril())
    o = torch.einsum("bhti,bihv->bthv", A, x["v"].repeat_interleave(2, 2))
    torch.testing.assert_close(o, getattr(mva, name)(**x, **options).o, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(A, mva.weights(name, **x, **options), rtol=0, atol=0)


@pytest.mark.parametrize("name", [row.name for row in ROWS if not row.one_matrix])
def test_weights_are_refused_where_channels_differ(name):
    with pytest.raises(mva.ArgumentError, match=f"^method: is {name}, whose matrix differs from one value channel to the next; wanted"):
        mva.weights(name, **tensors(name), **required(name))


# Which form runs


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("T", [1, NAIVE_LENGTH, NAIVE_LENGTH + 1])
def test_the_form_is_chosen_by_length(name, T, resolved):
    wanted = "chunk" if T > NAIVE_LENGTH and METHODS[name].chunk else "naive"
    assert choose(METHODS[name], torch.empty(1, T, 1, 1)) == wanted
    mva.attention(name, **tensors(name, T=T, B=1), **required(name))
    assert resolved == [(name, wanted)]


def test_the_length_at_which_the_choice_changes():
    assert NAIVE_LENGTH == 64
    assert {"metala", "gsa", "mva", "gsa_sw", "mva_sw", "gla", "lolcats"} < {row.name for row in ROWS if row.chunk} < set(NAMES)


@pytest.mark.parametrize(("name", "impl"), FORMS)
@pytest.mark.parametrize("T", [2, NAIVE_LENGTH + 1])
def test_an_explicit_form_is_the_one_that_runs(name, impl, T, resolved):
    mva.attention(name, **tensors(name, T=T, B=1, H=1, HQ=1), **required(name, T=T, B=1, H=1, HQ=1), impl=impl)
    assert resolved == [(name, impl)]


@pytest.mark.parametrize(("name", "impl"), ABSENT)
def test_an_absent_form_is_refused(name, impl):
    with pytest.raises(mva.ArgumentError, match=f"^impl: {name} has no implementation '{impl}'; it has naive, recurrent"):
        mva.attention(name, **tensors(name), **required(name), impl=impl)


@pytest.mark.parametrize(("name", "impl"), [*FORMS, *[(name, None) for name in NAMES]])
def test_a_form_that_fails_is_not_replaced(name, impl, monkeypatch):
    asked = []

    def resolve(self, form):
        asked.append(form)
        return broken

    def broken(**arguments):
        raise NotImplementedError("broken")

    monkeypatch.setattr(Method, "resolve", resolve)
    with pytest.raises(NotImplementedError, match="broken"):
        mva.attention(name, **tensors(name), **required(name), impl=impl)
    assert asked == [impl or "naive"]


@pytest.mark.parametrize("name", NAMES)
def test_the_form_gets_every_argument_by_name(name, monkeypatch):
    calls = []
    monkeypatch.setattr(Method, "resolve", lambda self, impl: lambda **arguments: calls.append(arguments))
    x = tensors(name)
    mva.attention(name, **x, **required(name))
    row, parameters = METHODS[name], public(name)
    assert set(calls[0]) == {*row.inputs, *row.options}
    for key, got in calls[0].items():
        if key in row.by_head:                   # a default that depends on the index of a head is filled in
            assert torch.equal(got, load(row.by_head[key])(2))
        else:
            assert got is x[key] if key in x else same(got, required(name).get(key, parameters[key].default))


def test_a_default_by_head_is_not_rounded_to_the_type_of_the_tokens(monkeypatch):
    calls = []
    monkeypatch.setattr(Method, "resolve", lambda self, impl: lambda **arguments: calls.append(arguments))
    mva.retnet(**{key: y.bfloat16() for key, y in tensors("retnet").items()})
    wanted = load(METHODS["retnet"].by_head["head_decay"])(2)
    assert torch.equal(calls[0]["head_decay"], wanted.float()) and not torch.equal(wanted.float(), wanted.bfloat16().float())


def test_no_tokens():
    for name in NAMES:
        assert mva.attention(name, **tensors(name, T=0), **required(name)).o.shape == (2, 0, 4, 5)


def test_merge():
    x = tensors("softmax", T=4)
    mask = torch.tensor([[True, False, True, False]]).expand(2, 4)
    whole = mva.softmax(**x)
    got = mva.merge(mva.softmax(**x, key_mask=mask), mva.softmax(**x, key_mask=~mask))
    torch.testing.assert_close(got.o, whole.o)
    torch.testing.assert_close(got.lse, whole.lse)
    assert got.state is None
