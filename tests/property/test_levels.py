"""P16 to P20: multi-level vocabulary decomposition. Proofs: docs/theory/levels.md."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mva_ref as mva
from mva_ref.naive.levels import residual
from mva_ref.naive.multi_level import Low, Reading, read_levels
from mva_ref.naive.writes import write_map
from mva_ref.testing.strategies import gates, normal, one_hot_gates, problems
from mva_ref.types import SlotState


def one_query(K, V, q, bias=None):
    """MVA on given slots: L levels of M slots, one token that writes nothing, so that the state alone is read."""
    L, M, D = K.shape
    state = SlotState(K[None, :, None], V[None, :, None], torch.zeros(1, L, 1, M, dtype=K.dtype))
    nothing = torch.zeros(L, 1, 1, 1, M, dtype=K.dtype)
    return mva.mva(q.view(1, 1, 1, D), torch.zeros(1, 1, 1, D, dtype=K.dtype), torch.zeros(1, 1, 1, V.shape[-1], dtype=K.dtype), nothing,
                   scale=1.0, slot_bias=None if bias is None else bias.view(L, 1, 1, 1, M), initial_state=state)


@pytest.mark.rows("mva")
@given(st.data())
def test_p16_levels_are_a_product_vocabulary(data):
    """P16: softmax over all M^L sums of one entry a level equals the sum of the levels' softmax reads, in output and log-mass."""
    L, M, D = (data.draw(st.integers(1, n), label=label) for n, label in ((3, "L"), (3, "M"), (3, "D")))
    K, V, q = data.draw(normal(L, M, D, label="K")), data.draw(normal(L, M, 2, label="V")), 2 * data.draw(normal(D, label="q"))
    b = data.draw(normal(L, M, label="bias"))
    codes = list(itertools.product(range(M), repeat=L))
    keys, values, log_weights = (torch.stack([sum(x[level, c] for level, c in enumerate(code)) for code in codes]) for x in (K, V, b))
    s = keys @ q + log_weights
    out = one_query(K, V, q, b)
    torch.testing.assert_close(out.o.flatten(), s.softmax(0) @ values, rtol=1e-11, atol=1e-11)
    later = b[1:].logsumexp(-1).sum()                                   # later levels carry weights that sum to one
    torch.testing.assert_close(out.lse.flatten()[0], s.logsumexp(0) - later, rtol=1e-11, atol=1e-11)


@pytest.mark.rows("mva")
def test_p16_needs_all_composites():
    """P16: with correlated codes, where only the composites (c, c) exist, the sum of reads is another function."""
    K = torch.tensor([[[1.0], [0.0]], [[1.0], [0.0]]], dtype=torch.float64)
    V = torch.tensor([[[1.0], [0.0]], [[0.0], [0.0]]], dtype=torch.float64)
    q = torch.tensor([1.0], dtype=torch.float64)
    existing = torch.tensor([2.0, 0.0], dtype=torch.float64).softmax(0)[0]
    assert abs(existing.item() - 0.881) < 5e-4 and abs(one_query(K, V, q).o.item() - 0.731) < 5e-4


@pytest.mark.parametrize("row", ["mva", "mva_sw"])
@given(st.data())
def test_p17_lossless_writes_leave_nothing(row, data):
    """P17: where level 1 writes every token one-hot, "post" leaves k' = v' = 0, and any number of levels equals one level."""
    p = data.draw(problems("gsa", default=True, max_T=6))
    q, k, v, _ = p.inputs.values()
    B, T, H, _ = k.shape
    first = data.draw(one_hot_gates(B, T, H, T + 1))
    for x in (k, v):
        assert residual(x, first, write_map(first), None, "post").abs().max() < 1e-13
    more = data.draw(st.integers(1, 2), label="more")
    levels = torch.stack([first, *(data.draw(gates(*first.shape), label="later") for _ in range(more))])
    bias = data.draw(st.sampled_from((None, "mass")), label="bias")
    options = {"slot_bias": bias, **({"window": 2, "sinks": 1} if row == "mva_sw" else {})}
    many, one = mva.attention(row, q, k, v, levels, **options), mva.attention(row.replace("mva", "gsa"), q, k, v, first, **options)
    torch.testing.assert_close(many.o, one.o, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(many.lse, one.lse, rtol=1e-11, atol=1e-11)


@pytest.mark.rows("mva")
def test_p17_needs_the_residual_after_the_write():
    """P17: with "pre", one token in one slot leaves all of itself to level 2, and is counted twice: output 2 for v = 1."""
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    g = torch.full((2, 1, 1, 1, 1), -torch.inf, dtype=torch.float64)
    assert mva.mva(one, one, one, g, residual="post").o.item() == 1 and mva.mva(one, one, one, g, residual="pre").o.item() == 2


@pytest.mark.rows("mva")
@given(st.data())
def test_p18_pythagoras(data):
    """P18: subtracting two-pass cluster means lowers the energy by exactly sum_c n_c |mu_c|^2, level by level."""
    t, D = data.draw(st.integers(1, 8), label="t"), data.draw(st.integers(1, 4), label="D")
    x = data.draw(normal(t, D, label="x"))
    for _ in range(3):
        owner = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=t, max_size=t), label="cluster"))
        member = torch.nn.functional.one_hot(owner, 3).double()
        n = member.sum(0)
        mean = member.T @ x / n.clamp(min=1)[:, None]
        rest = x - mean[owner]
        fall = (n * mean.square().sum(1)).sum()
        torch.testing.assert_close(x.square().sum() - rest.square().sum(), fall, rtol=1e-10, atol=1e-12)
        x = rest


@pytest.mark.rows("mva", "gsa")
@given(st.data())
def test_p19_level_one_is_gsa_and_reads_add(data):
    """P19: MVA's output is GSA's on level 1 plus GSA's on the residuals; gates of 0 at later levels, under "mass", add nothing."""
    p = data.draw(problems("mva", fixed={"low_query": None, "branches": "shared", "slot_bias": "mass", "perceptron": None}))
    q, k, v, levels = p.inputs.values()
    when, options = p.options["residual"], {n: p.options[n] for n in ("scale", "read", "key_mask")}
    mask = p.options["key_mask"]
    total, condition = 0.0, 1.0
    for g in levels:
        one = {**options, "slot_bias": "mass"}
        total = total + mva.gsa(q, k, v, g, **one).o
        condition = condition + mva.weights("gsa", q, k, v, g, **one).abs().sum(-1).max() ** 2
        shown = g if mask is None else torch.where(mask[..., None, None], g, 0)
        k, v = (residual(x, shown, write_map(shown), None, when) for x in (k, v))
    size = 1 + p.inputs["v"].abs().max() * (1 + q.abs().max()) * (1 + p.inputs["k"].abs().max())
    assert (p.run().o - total).abs().max() <= 1e-11 * size * condition
    silent = torch.cat([levels[:1], torch.zeros_like(levels)])
    first = mva.mva(*list(p.inputs.values())[:3], levels[:1], residual=when, slot_bias="mass", **options)
    more = mva.mva(*list(p.inputs.values())[:3], silent, residual=when, slot_bias="mass", **options)
    assert torch.equal(more.o, first.o) and (first.lse is None or torch.equal(more.lse, first.lse))


@pytest.mark.rows("mva")
@given(st.data())
def test_p19_the_parts_are_the_whole(data):
    """P19: the low-order branch adds r_t V^1_t: MVA with it minus MVA without it is MetaLA on level 1."""
    p = data.draw(problems("mva", fixed={"branches": "shared", "low_query": None}))
    q, _, v, levels = p.inputs.values()
    r = data.draw(normal(*q.shape[:3], levels.shape[-1], label="r"))
    low = mva.metala(r, v, levels[0], key_mask=p.options["key_mask"]).o
    A = p.weights().abs().sum(-1).max()
    assert (p.run(low_query=r).o - p.run().o - low).abs().max() <= 1e-12 * (1 + A) * (1 + v.abs().max()) * (1 + r.abs().max())


@pytest.mark.parametrize("row", [row.name for row in mva.methods()])
@given(st.data())
def test_p20_state(row, data):
    """P20: a KV head carries exactly the registry's count of numbers from token to token; MVA's is L M (D + V)."""
    fixed = {"centre": "running", "branches": "shared"}
    p = data.draw(problems(row, fixed=fixed))
    k, v = p.inputs.get("k", p.inputs["v"]), p.inputs["v"]
    (B, T, H, D), V = k.shape, v.shape[-1]
    gate = next((p.inputs[n] for n in ("g_levels", "g", "s") if n in p.inputs), torch.zeros(1, 1))
    L = len(gate) if gate.ndim == 5 else 1
    o = p.options
    sizes = {"D": D, "V": V, "T": T, "M": gate.shape[-1], "L": L, "N": o.get("order", o.get("power", 0)), "W": o.get("window") or 0,
             "n": o.get("sinks", 0), "C": o.get("segment", 0), "E": D if o.get("W_k") is None else o["W_k"].shape[-1]}
    expected = mva.registry.method(row).state_numbers(**sizes)
    if row == "softmax":
        carried = k[0, :, 0].numel() + v[0, :, 0].numel()              # its state is the keys and values themselves
    else:
        state = p.run(output_final_state=True).state
        kept = [x for name, x in _fields(state) if name not in ("log_decay", "tokens", "seen", "written", "present", "sink_present")]
        carried = sum(x.numel() for x in kept) / (B * H)
    assert carried == expected
    if row == "mva":
        assert expected == L * gate.shape[-1] * (D + V)


def _fields(state):
    for name, x in zip(state._fields, state, strict=True):
        if isinstance(x, tuple):
            yield from _fields(x)
        elif x is not None:
            yield name, x


@pytest.mark.rows("mva")
@given(st.data())
def test_p19_a_hidden_level_adds_nothing(data):
    """P19: a level whose slots all have bias -inf adds neither to the output nor to the log-mass."""
    p = data.draw(problems("mva", default=True))
    q, k, v, levels = p.inputs.values()
    B, T, HQ, _ = q.shape
    bias = torch.zeros(2, B, T, HQ, levels.shape[-1], dtype=q.dtype)
    bias[1] = -torch.inf
    two = torch.stack([levels[0], data.draw(gates(*levels[0].shape), label="second")])
    hidden, alone = mva.mva(q, k, v, two, slot_bias=bias), mva.mva(q, k, v, levels[:1])
    assert torch.equal(hidden.o, alone.o) and torch.equal(hidden.lse, alone.lse)
    o, mass, _ = read_levels(q, k, v, two, Low(), Reading(q.shape[-1] ** -0.5, slot_bias=bias), "post", None)
    assert o.isfinite().all() and mass.log.isfinite().all()
