"""P27 to P29: scans, exponents, roundoff. Proofs: docs/theory/chunks.md."""

import pytest
import torch
from hypothesis import given, settings, target
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

import mva_ref as mva
from mva_ref.fast.chunk import scan
from mva_ref.fast.chunk.scan import chunk_maps, split
from mva_ref.naive.levels import write_share
from mva_ref.naive.writes import log_mass, span_sum, write_map
from mva_ref.testing.strategies import normal, problems
from mva_ref.types import SlotState

# Constants of P29's budget: roundoffs a term, for sums of at most some ten terms (worst case linear in their number).
KAPPA, KAPPA_SCORE = 8.0, 8.0


def act(g, x, X):
    """What a segment with gates g and tokens x does to an entry state X, from the form itself."""
    state = SlotState(None, X, None)
    return mva.metala(torch.zeros_like(g), x, g, initial_state=state, output_final_state=True).state


@pytest.mark.parametrize("row", ["metala", "gsa"])
@given(st.data())
def test_p27_segments_of_one_level_are_a_monoid(row, data):
    """P27: (a2, S2) after (a1, S1) is (a2 a1, diag(a2) S1 + S2): associative, and what three segments in a row do."""
    p = data.draw(problems(row, min_T=3, fixed={"key_mask": None, "slot_bias": None, "self_augmentation": None}))
    g, v = p.inputs["g"], p.inputs["v"]
    T = v.shape[1]
    cuts = sorted(data.draw(st.lists(st.integers(0, T), min_size=2, max_size=2), label="cuts"))
    parts = []
    for a, b in zip([0, *cuts], [*cuts, T], strict=True):
        state = act(g[:, a:b], v[:, a:b], torch.zeros_like(p.run(output_final_state=True).state.V))
        parts.append((state.log_decay.exp()[..., None], state.V))

    def after(two, one):
        return two[0] * one[0], two[0] * one[1] + two[1]

    left, right = after(parts[2], after(parts[1], parts[0])), after(after(parts[2], parts[1]), parts[0])
    for x, y in zip(left, right, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-14)
    whole = p.run(output_final_state=True).state
    torch.testing.assert_close(left[1], whole.V, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(left[0][..., 0], whole.log_decay.exp(), rtol=1e-11, atol=1e-14)


@pytest.mark.rows("mva")
@pytest.mark.parametrize("when", ["post", "pre"])
@given(st.data())
def test_p27_a_second_level_needs_the_block_below_the_diagonal(when, data):
    """P27: K^2 <- diag(a2) K^2 + S^2 - C K^1, C = sum_t (w2_t exp(g2 after t)) (x) (rho_t exp(g1 through t)), t - 1 for "pre"."""
    p = data.draw(problems("mva", fixed={"key_mask": None, "low_query": None, "branches": "shared", "slot_bias": None, "residual": when}))
    levels = p.inputs["g_levels"][:1].expand(2, -1, -1, -1, -1).clone()
    levels[1] = data.draw(normal(*levels[1].shape, label="second")).clamp(max=0)
    B, T, H, M = levels[0].shape
    D, V = p.inputs["k"].shape[-1], p.inputs["v"].shape[-1]
    entry = SlotState(data.draw(normal(B, 2, H, M, D, label="K")), data.draw(normal(B, 2, H, M, V, label="V")), torch.zeros(B, 2, H, M))
    from_zero = p.run(g_levels=levels, output_final_state=True).state
    from_entry = p.run(g_levels=levels, output_final_state=True, initial_state=entry).state
    g1, g2 = levels
    later = torch.stack([g2[:, t + 1 :].sum(1) for t in range(T)], 1)
    until = torch.stack([g1[:, : t + (when == "post")].sum(1) for t in range(T)], 1)
    C = torch.einsum("bthc,bthm->bhcm", -torch.expm1(g2) * later.exp(), write_share(g1) * until.exp())
    for got, zero, start in ((from_entry.K, from_zero.K, entry.K), (from_entry.V, from_zero.V, entry.V)):
        expected = g2.sum(1).exp()[..., None] * start[:, 1] + zero[:, 1] - C @ start[:, 0]
        torch.testing.assert_close(got[:, 1], expected, rtol=1e-11, atol=1e-12)
    assert (C >= 0).all() and (C.sum(-1) <= 1 - g2.sum(1).exp() + 1e-12).all()


class Exponents(TorchFunctionMode):
    """Records the largest number that is exponentiated."""

    def __init__(self):
        super().__init__()
        self.largest, self.calls = -torch.inf, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in ("exp", "expm1", "exp_", "exp2") and args[0].numel():
            self.calls, self.largest = self.calls + 1, max(self.largest, float(args[0].detach().max()))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("impl", ["naive", "chunk"])
@pytest.mark.parametrize("row", ["metala", "gsa", "mva", "gsa_sw", "mva_sw"])
@given(st.data())
def test_p28_no_exponent_is_positive(row, impl, data):
    """P28: under any gates, every number that is exponentiated (decays, write weights, shifted scores) is <= 0 up to roundoff."""
    p = data.draw(problems(row, fixed={"slot_bias": data.draw(st.sampled_from((None, "mass")), label="bias"), "read": "softmax"}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "CHUNK", 4)
        with Exponents() as seen:
            out = p.run(impl)
    assert seen.calls >= 2
    assert seen.largest <= 1e-12 and out.o.isfinite().all()


def test_p28_the_recorder_sees_a_positive_exponent():
    """P28: the recorder of the test above does see a factored decay, whose second factor has a positive exponent."""
    g = torch.full((1, 4, 1, 1), -30.0)
    with Exponents() as seen:
        G = g.cumsum(1)
        factored = G.exp()[:, 3] * (-G).exp()[:, 2]
    assert seen.largest > 88 and not factored.isfinite().all()
    assert (write_map(g).omega.isfinite()).all() and abs(span_sum(g)[0, 0, 3, 2, 0] + 30) < 1e-6


@given(st.data())
def test_p28_chunk_maps_are_the_naive_ones(data):
    """P28: inside a chunk, omega, kept, tail and total are the quadratic form's, to the last digits, for gates of 0 to -inf."""
    p = data.draw(problems("gsa", max_T=scan.CHUNK, default=True))
    g = p.inputs["g"]
    T = g.shape[1]
    maps, naive = chunk_maps(split(g)), write_map(g)
    torch.testing.assert_close(maps.omega[:, 0, :, :T, :T], naive.omega, rtol=1e-13, atol=0)
    torch.testing.assert_close(maps.kept[:, 0, :T], naive.kept, rtol=1e-13, atol=0)
    torch.testing.assert_close(maps.tail[:, 0, :T].movedim(1, 2), naive.omega[:, :, -1], rtol=1e-13, atol=0)
    torch.testing.assert_close(maps.total[:, 0], naive.kept[:, -1], rtol=1e-13, atol=0)


def budget(q, k, v, g, scale, bias, u):
    """P29's budget of every component of GSA's output [B, T, HQ, V], in float64."""
    R = q.shape[2] // k.shape[2]
    span = span_sum(g)
    omega = write_map(g).omega
    plus = torch.where(omega > 0, omega * (1 + span.abs()), 0)
    sigma = scale * torch.einsum("bhtic,bthrd,bihd->bthrc", plus, q.unflatten(2, (-1, R)).abs(), k.abs())
    b = log_mass(g, None)[:, :, :, None].expand_as(sigma) if bias == "mass" else torch.zeros_like(sigma)
    shown = b > -torch.inf
    delta = KAPPA_SCORE * u * torch.where(shown, sigma + torch.where(shown, b.abs(), 0), 0).amax(-1)
    s = scale * torch.einsum("bhtic,bthrd,bihd->bthrc", omega, q.unflatten(2, (-1, R)), k)
    p = torch.where(shown.any(-1, keepdim=True), s + b, 0).softmax(-1)
    values = torch.einsum("bhtic,bihv->bthcv", omega, v)[:, :, :, None].expand(*sigma.shape, v.shape[-1])
    high = torch.where(shown[..., None], values, -torch.inf).amax(-2)
    low = torch.where(shown[..., None], values, torch.inf).amin(-2)
    spread = torch.where(shown.any(-1)[..., None], high - low, 0)
    terms = torch.einsum("bthrc,bhtic,bihv->bthrv", p, plus, v.abs())
    return (KAPPA * u * (2 * delta).exp()[..., None] * terms + (delta / 2).tanh()[..., None] * spread).flatten(2, 3)


@settings(max_examples=100)
@pytest.mark.rows("gsa")
@pytest.mark.parametrize("impl", ["naive", "recurrent", "chunk"])
@given(st.data())
def test_p29_float32_stays_within_its_budget_row_by_row(impl, data):
    """P29: every component of every row computed in float32 lies within c u (|p| Omega |v|) + tanh(delta / 2) spread of float64."""
    bias = data.draw(st.sampled_from((None, "mass")), label="bias")
    p = data.draw(problems("gsa", dtype=torch.float32, fixed={"read": "softmax", "slot_bias": bias, "key_mask": None, "scale": 1.0}))
    exact = p._replace(inputs={n: x.double() for n, x in p.inputs.items()})
    allowed = budget(*exact.inputs.values(), 1.0, bias, torch.finfo(torch.float32).eps / 2)
    error = (p.run(impl).o.double() - exact.run().o).abs()
    worst = (error / (allowed + 1e-37)).max()
    target(float(worst), label=f"error in budgets, {impl}")
    assert worst <= 1


@pytest.mark.rows("gsa")
def test_p29_one_ratio_for_a_tensor_hides_a_dead_row():
    """P29: one dead row of 4,096 is 1/64 of an RMS ratio, below a tolerance of 2 %, and thousands of budgets."""
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 64, 64, 4, generator=rng, dtype=torch.float64) for _ in range(3))
    g = -torch.rand(1, 64, 64, 3, generator=rng, dtype=torch.float64)
    exact = mva.gsa(q, k, v, g, scale=1.0).o
    broken = exact.clone()
    broken[0, 40, 7] = 0
    assert (broken - exact).norm() / exact.norm() < 0.02
    allowed = budget(q[:, :, 7:8], k[:, :, 7:8], v[:, :, 7:8], g[:, :, 7:8], 1.0, None, torch.finfo(torch.float32).eps / 2)
    assert ((broken - exact)[:, :, 7:8].abs() / allowed).max() > 1e4
