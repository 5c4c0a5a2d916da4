"""P9 to P15: what slots are, and what every form of them keeps to. Proofs: docs/theory/slots.md."""

import inspect
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mva_ref as mva
from mva_ref.frame import leaves
from mva_ref.method import load
from mva_ref.naive.reads import normalised_read
from mva_ref.naive.writes import write_map
from mva_ref.testing.examples import axes, by_head
from mva_ref.testing.strategies import Problem, gates, normal, one_hot_gates, problems

ALL = [row.name for row in mva.methods()]
SLOTTED = ["metala", "gsa", "mva", "gsa_sw", "mva_sw"]
KEYED = [row.name for row in mva.methods() if row.rotation]
FORMS = [(row.name, impl) for row in mva.methods() for impl in row.portable()]
OTHER_FORMS = [(row.name, impl) for row in mva.methods() for impl in row.portable() if impl != "naive"]


def cancellation(p: Problem) -> Any:
    """How much larger the products of features are than what they add up to, where the registry says that this has no bound."""
    if (dotted := mva.registry.method(p.name).cancellation) is None:
        return 1
    function = load(dotted)
    known = inspect.signature(function).parameters
    return function(**{n: x for n, x in {**p.inputs, **p.options}.items() if n in known})[..., None]


def condition(p: Problem) -> torch.Tensor:
    """How much larger the terms of a row are than the row itself: 1 but where weights or features cancel. [B, T, HQ, 1]"""
    return (1 + p.matrices().abs().sum(-1).amax(2).movedim(1, 2)[..., None].square()) * cancellation(p)


def size(p: Problem) -> float:
    """The size of the largest intermediate numbers of a problem of these few tokens."""
    q = p.inputs.get("q", torch.ones(1))
    k = p.inputs.get("k", torch.ones(1))
    return float((1 + q.abs().max()) * (1 + k.abs().max()) * (1 + p.inputs["v"].abs().max()))


def assert_same(p: Problem, got: torch.Tensor, wanted: torch.Tensor, what: str = "o", factor: Any = None) -> None:
    assert got.shape == wanted.shape, what
    close = (got == wanted) | ((got - wanted).abs() <= 1e-12 * size(p) * (condition(p) if factor is None else factor))
    assert close.all(), f"{what} of {p.name} differs by {(got - wanted).abs().nan_to_num(torch.inf).max():.3g}"


def assert_same_state(p: Problem, got: Any, wanted: Any) -> None:
    """States agree, log decays (sums of up to 1e4 a step) relative to their own size."""
    for x, y in zip(leaves(wanted), leaves(got), strict=True):
        assert_same(p, y.double(), x.double(), "state", 10 + x.double().abs().nan_to_num(0, posinf=0))


def take(p: Problem, axes: dict[str, int], index: Any) -> Problem:
    """The same problem on some tokens, heads or batch entries."""
    def part(name: str, x: Any) -> Any:
        return x.index_select(axes[name], index) if isinstance(x, torch.Tensor) and name in axes and x.ndim > axes[name] else x
    return p._replace(inputs={n: part(n, x) for n, x in p.inputs.items()}, options={n: part(n, x) for n, x in p.options.items()})


def stateful(p: Problem) -> bool:
    return p.name != "softmax" and p.options.get("centre") != "mean"


@pytest.mark.parametrize(("row", "impl"), OTHER_FORMS)
@given(st.data())
def test_p9_every_form_is_the_same_function(row, impl, data):
    """P9: recurrent = quadratic = chunked: output, log-mass and state, for every option and every gate."""
    p = data.draw(problems(row))
    if row == "taylor" and impl == "recurrent" and p.options["order"] > 2:
        p = p._replace(options={**p.options, "order": 2})          # the loss of higher orders is measured by P6's test
    options = {"output_final_state": True} if stateful(p) else {}
    if row == "taylor":
        p = p._replace(inputs={n: x / (1 + x.abs().max()) for n, x in p.inputs.items()})
    a, b = p.run("naive", **options), p.run(impl, **options)
    assert not a.o.isnan().any()
    assert_same(p, b.o, a.o)
    assert (a.lse is None) == (b.lse is None)
    if a.lse is not None:
        assert_same(p, b.lse, a.lse, "lse", 10)
    assert_same_state(p, b.state, a.state)


@pytest.mark.parametrize("row", [row.name for row in mva.methods() if row.chunk])
@given(st.data())
def test_p9_chunks_across_many_boundaries(row, data):
    """P9: the chunked form equals the quadratic one when T spans several chunks, whatever the chunk size."""
    from mva_ref.fast.chunk import local, scan

    p = data.draw(problems(row, min_T=5, max_T=11))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "CHUNK", data.draw(st.integers(1, 5), label="chunk"))
        patch.setattr(local, "BLOCK", data.draw(st.integers(1, 5), label="block"))
        got = p.run("chunk", output_final_state=True)
    wanted = p.run("naive", output_final_state=True)
    assert_same(p, got.o, wanted.o)
    assert_same_state(p, got.state, wanted.state)


@pytest.mark.parametrize("row", ["metala", "gsa"])
@given(st.data())
def test_p10_mass(row, data):
    """P10: sum_i Omega[t, i, c] = 1 - prod_i alpha_i[c]; the rows of A sum to sum_c p_t[c] mass_t[c]."""
    p = data.draw(problems(row, default=True))
    g = p.inputs["g"]
    mass = -torch.expm1(g.cumsum(1))                                                # b t h c
    torch.testing.assert_close(write_map(g).omega.sum(3).movedim(1, 2), mass, rtol=1e-11, atol=1e-13)
    A = p.weights()
    R = A.shape[1] // g.shape[2]
    full = mass.repeat_interleave(R, 2)
    if row == "metala":
        read = p.inputs["r"]
    else:
        # a value of 1 in one slot at a time reads off p * mass
        K = torch.einsum("bhtic,bihd->bthcd", write_map(g).omega, p.inputs["k"]).repeat_interleave(R, 2)
        read = (torch.einsum("bthcd,bthd->bthc", K, p.inputs["q"]) * p.inputs["q"].shape[-1] ** -0.5).softmax(-1)
    torch.testing.assert_close(A.sum(-1).movedim(1, 2), (read * full).sum(-1), rtol=1e-10, atol=1e-10)


@pytest.mark.rows("gsa", "metala")
@given(st.data())
def test_p11_gsa_is_metala_with_another_query(data):
    """P11: GSA's second pass is MetaLA's recurrence with r_t = softmax(tau K_t q_t)."""
    p = data.draw(problems("gsa", default=True))
    q, k, v, g = p.inputs.values()
    (B, T, _, M), R, r = g.shape, q.shape[2] // k.shape[2], []
    each_slot = torch.eye(M, dtype=g.dtype).expand(B, T, M, M)                     # M query heads, each of which reads one slot
    for h in range(q.shape[2]):
        own = slice(h // R, h // R + 1)
        K = mva.metala(each_slot, k[:, :, own], g[:, :, own]).o                    # b t c d: GSA's first pass
        r.append((torch.einsum("btcd,btd->btc", K, q[:, :, h]) * q.shape[-1] ** -0.5).softmax(-1))
    torch.testing.assert_close(mva.metala(torch.stack(r, 2), v, g).o, p.run().o, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("row", ["gsa", "mva", "gsa_sw", "mva_sw"])
@given(st.data())
def test_p12_an_unwritten_slot_has_no_weight_under_mass(row, data):
    """P12: under bias "mass" an unwritten slot takes no weight: a method with an extra slot that is never written is unchanged."""
    p = data.draw(problems(row, fixed={"slot_bias": "mass", "perceptron": None, "branches": "shared", "low_query": None}))
    name = "g_levels" if "g_levels" in p.inputs else "g"
    padded = torch.nn.functional.pad(p.inputs[name], (0, 1))
    assert_same(p, p.run(**{name: padded}).o, p.run().o)


@pytest.mark.parametrize("row", ["gsa", "mva", "gsa_sw", "mva_sw"])
@given(st.data())
def test_p12_a_slot_bias_is_a_log_weight(row, data):
    """P12: bias log 2 on every slot is every slot twice; -inf on all slots reads 0 with lse -inf and gradients 0."""
    fixed = {"slot_bias": None, "perceptron": None, "branches": "shared", "low_query": None, "integration": "soft"}
    p = data.draw(problems(row, fixed=fixed))
    name = "g_levels" if "g_levels" in p.inputs else "g"
    twice = torch.cat([p.inputs[name]] * 2, -1)
    one_level = p.inputs[name].ndim == 4 or len(p.inputs[name]) == 1
    bias = torch.tensor(2.0, dtype=torch.float64).log().view(1, 1, 1, 1)
    if one_level and p.options["read"] != "sigmoid":
        assert_same(p, p.run(slot_bias=bias).o, p.run(**{name: twice}).o, factor=condition(p) + 10)
    if row in ("gsa", "mva"):
        k = p.inputs["k"].clone().requires_grad_()
        out = p.run(slot_bias=torch.full((1, 1, 1, 1), -torch.inf, dtype=torch.float64), k=k)
        assert (out.o == 0).all() and (out.lse is None or out.lse.isneginf().all())
        out.o.sum().backward()
        assert k.grad is not None and (k.grad == 0).all()


@pytest.mark.parametrize("row", ["gsa", "mva"])
@given(st.data())
def test_p13_lossless_storage_is_softmax(row, data):
    """P13: one-hot writes, at most M tokens, bias "mass": softmax attention at every t, in output and log-mass."""
    p = data.draw(problems("softmax", default=True))
    B, T, H, _ = p.inputs["k"].shape
    g = data.draw(one_hot_gates(B, T, H, T + data.draw(st.integers(0, 2), label="spare slots")))
    if row == "mva":
        g = torch.stack([g, data.draw(gates(*g.shape))])           # what level 1 stores without loss leaves nothing to level 2 (P17)
    got, wanted = mva.attention(row, *p.inputs.values(), g, slot_bias="mass"), p.run()
    torch.testing.assert_close(got.o, wanted.o, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(got.lse, wanted.lse, rtol=1e-10, atol=1e-10)


@pytest.mark.rows("gsa")
@given(st.data())
def test_p14_clustering_error(data):
    """P14: slots that hold cluster means, biased by log n_c, are off by at most tanh(omega / 4) diam(V).

    Here delta_i = tau q.(mu_c(i) - k_i), and omega is its span.
    """
    t, D, M = (data.draw(st.integers(1, n), label=label) for n, label in ((8, "t"), (3, "D"), (3, "M")))
    k, v, q = data.draw(normal(t, D, label="k")), data.draw(normal(t, 3, label="v")), 2 * data.draw(normal(D, label="q"))
    owner = torch.tensor(data.draw(st.lists(st.integers(0, M - 1), min_size=t, max_size=t), label="cluster"))
    member = torch.nn.functional.one_hot(owner, M).double()
    n = member.sum(0)
    mean_k, mean_v = (member.T @ x / n.clamp(min=1)[:, None] for x in (k, v))
    p, mass = normalised_read((mean_k @ q)[None, None, None, None], n.log()[None, None, None, None], "softmax")
    delta = mean_k[owner] @ q - k @ q
    exact, bound = (k @ q).softmax(0) @ v, torch.tanh((delta.max() - delta.min()) / 4) * torch.cdist(v, v).max()
    assert (p[0, 0, 0, 0] @ mean_v - exact).norm() <= bound + 1e-12
    assert mass.log.item() <= (k @ q).logsumexp(0).item() + 1e-12          # Jensen: means have at most the mass of their members


@pytest.mark.parametrize("row", ALL)
@given(st.data())
def test_p15_linear_in_v(row, data):
    """P15: the output is A v, with A from v = identity; so it is linear in v."""
    p = data.draw(problems(row))
    A, v = p.matrices(), p.inputs["v"]
    o = torch.einsum("bhvti,bihv->bthv", A.expand(-1, -1, v.shape[-1], -1, -1), v.repeat_interleave(A.shape[1] // v.shape[2], 2))
    assert_same(p, o, p.run().o)


@pytest.mark.parametrize("row", KEYED)
@given(st.data())
def test_p15_one_rotation_of_queries_and_keys_changes_nothing(row, data):
    """P15: invariant under one rotation of q and k, equivariant under a rotation of v."""
    p = data.draw(problems(row))
    q, k, v = p.inputs["q"], p.inputs["k"], p.inputs["v"]
    U, S = (torch.linalg.qr(data.draw(normal(n, n, label="rotation")))[0] for n in (q.shape[-1], v.shape[-1]))
    factor = condition(p) ** 1.5 * (1 + p.options.get("order", 0)) ** 2
    assert_same(p, p.run(q=q @ U, k=k @ U).o, p.run().o, factor=100 * factor)
    assert_same(p, p.run(v=v @ S).o, p.run().o @ S, factor=10 * factor)


@pytest.mark.parametrize("row", [*SLOTTED, "abc"])
@given(st.data())
def test_p15_slots_have_no_order(row, data):
    """P15: permuting the slots of gates, bias, low-order query, W and a together, level by level, changes nothing."""
    p = data.draw(problems(row, fixed={"key_mask": None}))
    M = next(p.inputs[n] for n in ("g_levels", "g", "s") if n in p.inputs).shape[-1]
    perm = torch.tensor(data.draw(st.permutations(range(M)), label="permutation"))
    changed = {n: x[..., perm] for n, x in {**p.inputs, **p.options}.items()
               if n in ("g", "g_levels", "s", "r", "low_query", "low_g", "slot_bias") and isinstance(x, torch.Tensor)}
    if p.options.get("perceptron") is not None:
        W, a = p.options["perceptron"]
        changed["perceptron"] = (W[..., perm, :][..., perm], a[..., perm])
    assert_same(p, p.run(**changed).o, p.run().o, factor=10 * condition(p))


@pytest.mark.parametrize("row", [row for row in KEYED if "scale" in mva.registry.method(row).options])
@given(st.data())
def test_p15_scale_and_query_enter_as_a_product(row, data):
    """P15: (scale, q) and (scale / 4, 4 q) are the same, to the bit; so is the default scale D^-1/2."""
    p = data.draw(problems(row, fixed={"scale": 0.5}))
    torch.testing.assert_close(p.run(scale=0.125, q=4 * p.inputs["q"]).o, p.run().o, rtol=0, atol=0)
    D = p.inputs["q"].shape[-1]
    assert torch.equal(p.run(scale=None).o, p.run(scale=D**-0.5).o)


@pytest.mark.parametrize("row", ALL)
@given(st.data())
def test_p15_heads_and_sequences_are_independent(row, data):
    """P15: a batch entry alone, or a group of heads alone, gives what it gives among the others."""
    p = by_head(data.draw(problems(row, fixed={"perceptron": None})))
    B, H = p.inputs["v"].shape[0], p.inputs["v"].shape[2]
    b, h = data.draw(st.integers(0, B - 1), label="b"), data.draw(st.integers(0, H - 1), label="h")
    whole = p.run()
    assert_same(p, take(p, axes(row, "B"), torch.tensor([b])).run().o, whole.o[b : b + 1], factor=condition(p)[b : b + 1])
    R = whole.o.shape[2] // H
    queries = torch.arange(h * R, (h + 1) * R)
    one = take(take(p, axes(row, "HQ"), queries), axes(row, "H"), torch.tensor([h]))
    assert_same(p, one.run().o, whole.o[:, :, queries], factor=condition(p)[:, :, queries])


@pytest.mark.parametrize(("row", "impl"), FORMS)
@given(st.data())
def test_p15_the_past_does_not_see_the_future(row, impl, data):
    """P15: strictly causal: what comes from t on does not change a bit of the rows before t."""
    p = data.draw(problems(row, fixed={"centre": "running"} if row == "taylor" else {}))
    t = data.draw(st.integers(0, p.inputs["v"].shape[1] - 1), label="t")
    before = p.run(impl)
    changed, time = {}, axes(row, "T")
    for name in mva.registry.method(row).inputs:
        x = p.inputs[name].clone()
        x.narrow(time[name], t, x.shape[time[name]] - t).fill_({"g": -3.0, "g_levels": -3.0, "beta": 1.5}.get(name, 1e3))
        changed[name] = x
    after = p.run(impl, **changed)
    assert torch.equal(after.o[:, :t], before.o[:, :t])
    assert before.lse is None or torch.equal(after.lse[:, :t], before.lse[:, :t])


@pytest.mark.parametrize("row", ["metala", "gsa", "mva"])
@given(st.data())
def test_p15_a_gate_of_zero_writes_nothing_and_minus_infinity_replaces(row, data):
    """P15: a token with g = 0 may as well not be there; g = -inf at token t makes the slots forget all before t."""
    p = data.draw(problems(row, min_T=2, fixed={"key_mask": None, "perceptron": None, "slot_bias": None, "branches": "shared"}))
    T = p.inputs["v"].shape[1]
    t = data.draw(st.integers(0, T - 2), label="t")
    name = "g_levels" if row == "mva" else "g"
    silent = p.inputs[name].clone()
    silent.select(axes(row, "T")[name], t).zero_()
    rest = torch.tensor([i for i in range(T) if i != t])
    gone = take(p._replace(inputs={**p.inputs, name: silent}), axes(row, "T"), rest)
    assert_same(p, gone.run().o, p.run(**{name: silent}).o[:, rest], factor=10 * condition(p)[:, rest] ** 1.5)
    if row != "mva":
        forget = p.inputs[name].clone()
        forget.select(axes(row, "T")[name], t).fill_(-torch.inf)
        assert (p.weights(**{name: forget})[:, :, t:, :t] == 0).all()


@pytest.mark.parametrize(("row", "impl"), [(row, impl) for row, impl in FORMS if row != "softmax"])
@given(st.data())
def test_p15_a_sequence_cut_in_two_equals_the_whole(row, impl, data):
    """P15: a sequence cut anywhere, with the state carried, equals the whole: output, log-mass and state."""
    fixed: dict[str, Any] = {"centre": data.draw(st.sampled_from((None, "running")), label="centre")} if row == "taylor" else {}
    p = data.draw(problems(row, fixed=fixed))
    if row == "taylor":
        p = p._replace(inputs={n: x / (1 + x.abs().max()) for n, x in p.inputs.items()})
    T = p.inputs["v"].shape[1]
    cut = data.draw(st.integers(0, T), label="cut")
    whole = p.run(impl, output_final_state=True)
    first = take(p, axes(row, "T"), torch.arange(cut)).run(impl, output_final_state=True)
    second = take(p, axes(row, "T"), torch.arange(cut, T)).run(impl, output_final_state=True, initial_state=first.state)
    assert_same(p, torch.cat([first.o, second.o], 1), whole.o, factor=10 * condition(p) ** 1.5)
    if whole.lse is not None:
        assert_same(p, torch.cat([first.lse, second.lse], 1), whole.lse, "lse", 10)
    assert_same_state(p, second.state, whole.state)
