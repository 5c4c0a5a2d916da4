"""P21 to P26: windows, merging, soft and hard integration. Proofs: docs/theory/window.md."""

from functools import reduce

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mva_ref as mva
from mva_ref.testing.strategies import gates, normal, one_hot_gates, problems
from mva_ref.types import Output

BOTH = ["gsa_sw", "mva_sw"]


@st.composite
def outputs(draw, n):
    """n attention results over disjoint keys, some of them empty."""
    B, T, H, V = (draw(st.integers(1, 3)) for _ in range(4))
    found = []
    for _ in range(n):
        o, lse = draw(normal(B, T, H, V)), draw(normal(B, T, H, scale=draw(st.sampled_from((1.0, 30.0, 800.0)), label="size of lse")))
        empty = torch.tensor(draw(st.lists(st.booleans(), min_size=T, max_size=T), label="empty"))[:, None].expand(B, T, H)
        found.append(Output(torch.where(empty[..., None], 0, o), None, torch.where(empty, -torch.inf, lse)))
    return found


def assert_close(a, b, tolerance=1e-12):
    for x, y in ((a.o, b.o), (a.lse, b.lse)):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.rows("softmax", "gsa", "mva", "gsa_sw", "mva_sw")
@given(outputs(3))
def test_p21_merge_is_a_commutative_monoid(parts):
    """P21: merge is associative and commutative, with identity (0, -inf); two empty rows merge to an empty row."""
    a, b, c = parts
    none = Output(torch.zeros_like(a.o), None, torch.full_like(a.lse, -torch.inf))
    assert_close(mva.merge(mva.merge(a, b), c), mva.merge(a, mva.merge(b, c)))
    assert_close(mva.merge(a, b), mva.merge(b, a))
    assert_close(mva.merge(a, none), a, 1e-14)
    assert torch.equal(mva.merge(none, none).o, none.o) and torch.equal(mva.merge(none, none).lse, none.lse)


@pytest.mark.parametrize("row", ["softmax", "taylor"])
@given(st.data())
def test_p21_any_partition_of_the_keys_merges_back(row, data):
    """P21: attention over the parts of any partition of the keys, empty parts included, merges to attention over all."""
    fixed = {"order": 2, "centre": None} if row == "taylor" else {}
    p = data.draw(problems(row, fixed={"key_mask": None, **fixed}))
    B, T = p.inputs["v"].shape[:2]
    part = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=B * T, max_size=B * T), label="part")).view(B, T)
    pieces = [p.run(key_mask=part == i) for i in data.draw(st.permutations(range(3)), label="order of merging")]
    assert_close(reduce(mva.merge, pieces), p.run(), 1e-11)


@pytest.mark.parametrize("row", BOTH)
@given(st.data())
def test_p22_a_window_that_holds_everything_is_softmax(row, data):
    """P22: W + n >= T is softmax attention, output and log-mass, whatever the gates, reads, biases and levels.

    W and n may be beyond any memory: without a state to carry, only what the tokens fill is kept.
    """
    p = data.draw(problems(row))
    q, k, v = (p.inputs[n] for n in "qkv")
    T = q.shape[1]
    sinks = data.draw(st.integers(0, T - 1), label="sinks")
    window = data.draw(st.sampled_from((T - sinks, 2**60)), label="window")
    sinks = data.draw(st.sampled_from((sinks, 2**60)), label="sinks in the call")
    exact = mva.softmax(q, k, v, scale=p.options["scale"], key_mask=p.options["key_mask"])
    for impl in ("naive", "recurrent", "chunk"):
        out = p.run(impl, window=window, sinks=sinks)
        torch.testing.assert_close(out.o, exact.o, rtol=1e-12, atol=1e-12)
        if out.lse is not None:
            torch.testing.assert_close(out.lse, exact.lse, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("row", BOTH)
@given(st.data())
def test_p22_one_token_less_is_not(row, data):
    """P22: the bound is sharp: with W + n = T - 1 one token is in the slots, and gates that write nothing lose it."""
    p = data.draw(problems(row, min_T=2, default=True))
    q, k, v = (p.inputs[n] for n in "qkv")
    name = "g_levels" if row == "mva_sw" else "g"
    out = p.run(window=q.shape[1] - 1, slot_bias="mass", **{name: torch.zeros_like(p.inputs[name])})
    A = mva.weights("softmax", q, k, v)
    lost = A[:, :, -1, 0]
    assert (lost > 0).all()
    rest = torch.arange(q.shape[1]).expand(q.shape[:2]) > 0
    torch.testing.assert_close(out.o[:, -1], mva.softmax(q, k, v, key_mask=rest).o[:, -1])


@pytest.mark.rows("lolcats")
@pytest.mark.parametrize("own_maximum", [True, False])
@given(st.data())
def test_p26_lolcats_does_not_see_the_level_of_its_window(own_maximum, data):
    """P26: a number added to the scores of the window alone gives it more weight, but not where LoLCATs subtracts the window's maximum.

    Scores move when every key gets one more coordinate, which the features of the history do not see.
    """
    T, window = data.draw(st.integers(3, 7), label="T"), data.draw(st.integers(1, 2), label="W")
    q, k, v = (data.draw(normal(1, T, 1, 3, label=n)) for n in "qkv")
    W = torch.eye(4, 3, dtype=q.dtype)[None]                                   # features of the first three coordinates

    def outputs(shift):
        more = torch.ones_like(q[..., :1])
        return mva.lolcats(torch.cat([q, more], -1), torch.cat([k, shift * more], -1), v, window, W_q=W, W_k=W, own_maximum=own_maximum,
                           scale=1.0).o

    still, moved = outputs(0.0), outputs(3.0)
    if own_maximum:
        torch.testing.assert_close(moved, still, rtol=1e-10, atol=1e-12)
    else:
        assert (moved[:, window:] - still[:, window:]).abs().max() > 1e-6     # the window counts e^3 times what it did


@pytest.mark.parametrize(("row", "levels"), [("gsa_sw", 1), ("mva_sw", 1), ("mva_sw", 2), ("mva_sw", 3)])
@given(st.data())
def test_p23_window_and_lossless_slots_are_softmax(row, levels, data):
    """P23: softmax read, bias "mass": a window and slots that store each token in one of their own are softmax, at every L."""
    p = data.draw(problems("softmax", default=True))
    q, k, v = p.inputs.values()
    B, T, H, _ = k.shape
    g = data.draw(one_hot_gates(B, T, H, T))
    if row == "mva_sw":
        g = torch.stack([g, *(data.draw(gates(*g.shape), label="later") for _ in range(levels - 1))])
    window, sinks = data.draw(st.integers(1, T), label="W"), data.draw(st.integers(0, 3), label="n")
    out = mva.attention(row, q, k, v, g, window=window, sinks=sinks, slot_bias="mass")
    exact = mva.softmax(q, k, v)
    torch.testing.assert_close(out.o, exact.o, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(out.lse, exact.lse, rtol=1e-10, atol=1e-10)


def branches(p):
    """Exact window branch, exact history branch, and the history branch of the method, with their masses; rows with both."""
    q, k, v = (p.inputs[n] for n in "qkv")
    scale, W, n = p.options.get("scale"), p.options["window"], p.options.get("sinks", 0)
    T = q.shape[1]
    exact, near = mva.softmax(q, k, v, scale=scale), mva.softmax(q, k, v, scale=scale, window=W, sinks=n)
    t = torch.arange(T)
    has = (t - W >= n)[None, :, None].expand(near.lse.shape)
    far_mass = torch.where(has, exact.lse + torch.log1p(-(near.lse - exact.lse).exp().clamp(max=1 - 1e-12)), 0)
    b = torch.where(has, (near.lse - exact.lse).exp(), 1)
    far = torch.where(has[..., None], (exact.o - b[..., None] * near.o) / (1 - b).clamp(min=1e-300)[..., None], 0)
    return exact, near, far, far_mass, b, has


@pytest.mark.parametrize("row", BOTH)
@given(st.data())
def test_p24_soft_error(row, data):
    """P24: error <= b_H' eps + tanh(|eta| / 4) |o^W - o^H|, eta the error of the log-mass, eps that of the history's output."""
    fixed = {"read": "softmax", "integration": "soft", "key_mask": None, "low_query": None, "branches": "shared"}
    p = data.draw(problems(row, min_T=3, fixed=fixed))
    exact, near, far, far_mass, b, has = branches(p)
    has = has & (b < 1 - 1e-6)
    out = p.run()
    hat_b = torch.where(has, (near.lse - out.lse).exp().clamp(max=1), 1)                    # the approximate weight of the window
    has = has & (hat_b < 1 - 1e-6)
    hat_mass = out.lse + torch.log1p(-torch.where(has, hat_b, 0))
    hat_far = (out.o - hat_b[..., None] * near.o) / torch.where(has, 1 - hat_b, 1)[..., None]
    eps = (hat_far - far).norm(dim=-1)
    bound = (1 - hat_b) * eps + ((hat_mass - far_mass).abs() / 4).tanh() * (near.o - far).norm(dim=-1)
    error = (out.o - exact.o).norm(dim=-1)
    size = 1 + p.inputs["v"].abs().max()
    assert (error[has] <= bound[has] * (1 + 1e-8) + 1e-8 * size).all()


@pytest.mark.parametrize("row", BOTH)
@given(st.data())
def test_p25_hard_error(row, data):
    """P25: with both branches exact, the error of hard integration is |b - b*| |o^W - o^H|."""
    p = data.draw(problems("softmax", default=True, min_T=3))
    q, k, v = p.inputs.values()
    B, T, H, _ = k.shape
    g = data.draw(one_hot_gates(B, T, H, T))
    window, sinks = data.draw(st.integers(1, T - 1), label="W"), data.draw(st.integers(0, 1), label="n")
    weight = data.draw(normal(B, T, q.shape[2], label="b")).sigmoid()
    out = mva.attention(row, q, k, v, g[None] if row == "mva_sw" else g, window=window, sinks=sinks, slot_bias="mass", integration="hard",
                        hard_weight=weight)
    assert out.lse is None
    exact, near, far, _, b, has = branches(p._replace(options={"window": window, "sinks": sinks}))
    has = has & (b < 1 - 1e-6)
    error, expected = (out.o - exact.o).norm(dim=-1), (weight - b).abs() * (near.o - far).norm(dim=-1)
    torch.testing.assert_close(error[has], expected[has], rtol=1e-7, atol=1e-8)
    empty = ~(torch.arange(T) - window >= sinks)
    torch.testing.assert_close(out.o[:, empty], exact.o[:, empty], rtol=1e-12, atol=1e-12)       # b = 1 while the history is empty


@pytest.mark.parametrize("row", BOTH)
@given(st.data())
def test_p26_one_number_added_to_all_scores_of_a_row_changes_nothing(row, data):
    """P26: softmax read: adding c_t to every score of row t, window and level-1 slots alike, moves lse by c_t and nothing else."""
    p = data.draw(problems("softmax", default=True))
    q, k, v = p.inputs.values()
    B, T, H, _ = k.shape
    M = T + 1
    first = data.draw(one_hot_gates(B, T, H, M))
    # an extra coordinate, 1 in every key and c_t in the query, adds c_t to every window score and to every full slot's score
    c = 5 * data.draw(normal(B, T, q.shape[2], 1, label="c"))
    shifted_q, shifted_k = torch.cat([q, c], -1), torch.cat([k, torch.ones(B, T, H, 1, dtype=k.dtype)], -1)
    levels = torch.stack([first, data.draw(gates(*first.shape), label="second")])
    g = levels if row == "mva_sw" else first
    options = {"window": data.draw(st.integers(1, T), label="W"), "slot_bias": "mass", "scale": 0.7}
    plain, moved = mva.attention(row, q, k, v, g, **options), mva.attention(row, shifted_q, shifted_k, v, g, **options)
    torch.testing.assert_close(moved.o, plain.o, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(moved.lse, plain.lse + 0.7 * c[..., 0], rtol=1e-10, atol=1e-10)


def test_p26_a_maximum_of_the_window_alone_breaks_it():
    """P26: LoLCATs subtracts the window's own maximum and does not compensate in the linear term: a common shift changes its output."""
    phi_q, phi_k, v = torch.tensor([1.0]), torch.tensor([[0.5], [2.0]]), torch.tensor([[0.0], [0.0], [1.0]])

    def lolcats(window_scores, log_linear_shift):
        window = (window_scores - window_scores.max()).exp()
        linear = (phi_k @ phi_q) * torch.tensor(log_linear_shift).exp()
        weights = torch.cat([linear, window])
        return (weights @ v / weights.sum()).item()

    assert abs(lolcats(torch.tensor([1.0]), 0.0) - lolcats(torch.tensor([1.0]) + 3, 3.0)) > 0.1
