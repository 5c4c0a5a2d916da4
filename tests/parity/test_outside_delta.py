"""Delta rules against the plain-torch references of flash-linear-attention.

Tolerance: float32 roundoff times a sum of absolute values. The written values u of a delta rule solve a triangular system, whose condition
the row sums of |A| do not show: it is bounded here through the inverse with absolute values,
|scale q.k| |Gamma| |T^-1| |T| |T^-1| beta |v|.
The constant 4 T + 2 D + 8 counts the products and sums a term passes through, twice for the solve.
"""

import math

import pytest
import torch
from hypothesis import given, target
from hypothesis import strategies as st

import mva_ref as mva
from mva_ref.naive.writes import span_sum
from mva_ref.testing.strategies import problems
from mva_ref.types import MatrixState

rules = pytest.importorskip("fla.ops.delta_rule.naive", reason="flash-linear-attention is not installed")
gated = pytest.importorskip("fla.ops.gated_delta_rule.naive", reason="flash-linear-attention is not installed")
U = 2.0**-24


def sequences(p):
    """The inputs in float32, with as many KV heads as query heads: fla repeats them before it calls."""
    R = p.inputs["q"].shape[2] // p.inputs["k"].shape[2]
    return {n: (x if n == "q" else x.repeat_interleave(R, 2)).float() for n, x in p.inputs.items()}


def conditions(x, scale):
    """[B, T, H, V] and [B, H, D, V]: output and state with every factor made positive."""
    q, k, v, beta = (x[n].double() for n in ("q", "k", "v", "beta"))
    T = q.shape[1]
    causal = torch.ones(T, T, dtype=torch.bool).tril()
    span = span_sum(x.get("g", torch.zeros_like(x["beta"])).double()[..., None])[..., 0]
    gamma = torch.where(causal, span.exp() + torch.where(span.isneginf(), 0, span).abs() * span.exp(), 0)
    system = torch.eye(T, dtype=torch.float64) + beta.movedim(1, 2)[..., None] * torch.einsum("bthd,bihd->bhti", k, k) * gamma.tril(-1)
    inverse = torch.linalg.inv(system).abs()
    written = inverse @ system.abs() @ inverse @ (beta[..., None] * v.abs()).movedim(1, 2)
    o = scale * torch.einsum("bthd,bihd,bhti,bhiv->bthv", q.abs(), k.abs(), gamma, written)
    return o, torch.einsum("bihd,bhi,bhiv->bhdv", k.abs(), gamma[:, :, -1], written)


def within(theirs, ours, cond, x, what):
    allowed = (4 * x["q"].shape[1] + 2 * x["q"].shape[-1] + 8) * U * cond
    assert theirs.shape == ours.shape and theirs.isfinite().all(), what
    error = (ours - theirs.double()).abs()
    worst = float(torch.where(error == 0, 0, error / allowed).max())
    target(worst, label=what)
    assert worst <= 1, f"{what}: {worst:.3g} budgets"


@given(st.data())
def test_delta_rule(data):
    p = data.draw(problems("delta", default=True))
    x = sequences(p)
    q, k, v, beta = (y.transpose(1, 2) for y in x.values())
    ours = mva.delta(**{n: y.double() for n, y in x.items()}, output_final_state=True)
    of_o, of_S = conditions(x, q.shape[-1] ** -0.5)
    theirs, state = rules.delta_rule_recurrence(q, k, v, beta)
    within(theirs.transpose(1, 2), ours.o, of_o, x, "recurrence")
    within(state, ours.state.S, of_S, x, "state of the recurrence")
    theirs, A = rules.delta_rule_parallel(q, k, v, beta, BM=1, BN=1)
    within(theirs.transpose(1, 2), ours.o, of_o, x, "parallel")
    ours_A = mva.weights("delta", **{n: y.double() for n, y in x.items()})      # fla leaves the column's beta to the values
    each = torch.eye(A.shape[-1])[None, :, None].expand(*x["v"].shape[:-1], -1)
    within(A * beta[:, :, None], ours_A, conditions({**x, "v": each}, q.shape[-1] ** -0.5)[0].transpose(1, 2), x, "A")
    theirs, state = rules.delta_rule_chunkwise(q, k, v, beta, chunk_size=q.shape[2])
    within(theirs.transpose(1, 2), ours.o, of_o, x, "chunk")
    within(state, ours.state.S, of_S, x, "state")


@given(st.data())
def test_gated_delta_rule(data):
    p = data.draw(problems("gated_delta", default=True))
    x = sequences(p)
    scale = x["q"].shape[-1] ** -0.5
    ours = mva.gated_delta(**{n: y.double() for n, y in x.items()}, output_final_state=True)
    of_o, of_S = conditions(x, scale)
    theirs, state = gated.naive_recurrent_gated_delta_rule(x["q"], x["k"], x["v"], x["beta"], x["g"], scale=scale, output_final_state=True)
    within(theirs, ours.o, of_o, x, "recurrence")
    within(state, ours.state.S, of_S, x, "state")


@given(st.data())
def test_gated_delta_rule_by_chunks(data):
    """fla's chunks take g before beta. They subtract sums of gates, so decays stay ordinary here."""
    p = data.draw(problems("gated_delta", default=True))
    x = sequences(p)
    x["g"] = x["g"].clamp(min=-2)
    scale, size = x["q"].shape[-1] ** -0.5, data.draw(st.integers(1, 4), label="chunk")
    ours = mva.gated_delta(**{n: y.double() for n, y in x.items()}, output_final_state=True)
    theirs, state = gated.naive_chunk_gated_delta_rule(
        x["q"], x["k"], x["v"], x["g"], x["beta"], chunk_size=size, scale=scale, output_final_state=True)
    of_o, of_S = conditions(x, scale)
    within(theirs, ours.o, of_o, x, "chunks")
    within(state, ours.state.S, of_S, x, "state")


@pytest.mark.parametrize("name", ["delta", "gated_delta"])
@given(st.data())
def test_both_go_on_from_the_same_state(name, data):
    """Where fla stopped, ours goes on, and the other way round."""
    p = data.draw(problems(name, default=True, min_T=2))
    x = sequences(p)
    n, scale = data.draw(st.integers(1, x["q"].shape[1] - 1), label="tokens before"), x["q"].shape[-1] ** -0.5
    head, tail = ({m: y[:, part] for m, y in x.items()} for part in (slice(n), slice(n, None)))
    whole = mva.attention(name, **{m: y.double() for m, y in x.items()}, output_final_state=True)
    start = mva.attention(name, **head, output_final_state=True).state.S

    def theirs(y, S):
        if name == "gated_delta":
            return gated.naive_recurrent_gated_delta_rule(*y.values(), initial_state=S, output_final_state=True)
        o, S = rules.delta_rule_recurrence(*(z.transpose(1, 2) for z in y.values()), initial_state=S)
        return o.transpose(1, 2), S

    of_o, of_S = conditions(x, scale)
    o, S = theirs(tail, start)
    within(o, whole.o[:, n:], of_o[:, n:], x, "fla goes on")
    within(S, whole.state.S, of_S, x, "its state")
    ours = mva.attention(name, **tail, initial_state=MatrixState(theirs(head, None)[1]), output_final_state=True)
    within(ours.o, whole.o[:, n:], of_o[:, n:], x, "ours goes on")
    within(ours.state.S, whole.state.S, of_S, x, "our state")


def test_a_gate_that_forgets_everything():
    """fla's chunks form -inf + inf; its recurrence and ours keep the token itself."""
    x, g = torch.ones(1, 1, 1, 1), torch.full((1, 1, 1), -torch.inf)
    assert gated.naive_chunk_gated_delta_rule(x, x, x, g, x[..., 0], chunk_size=1)[0].isnan().all()
    assert gated.naive_recurrent_gated_delta_rule(x, x, x, x[..., 0], g)[0].item() == mva.gated_delta(x, x, x, x[..., 0], g).o.item() == 1


def test_a_strong_gate_costs_the_chunks_the_tokens_after_it():
    """Sums of gates up to -2^25 hold no gate of -1/2 in float32: fla's chunks lose it, a recurrence does not."""
    x, g = torch.ones(1, 3, 1, 1), torch.tensor([0.0, -(2.0**25), -0.5]).view(1, 3, 1)
    beta = torch.tensor([1.0, 1.0, 0.0]).view(1, 3, 1)
    right = math.exp(-0.5)                                          # the second token alone is held, decayed once
    assert gated.naive_chunk_gated_delta_rule(x, x, x, g, beta, chunk_size=3)[0][0, 2].item() == 1
    for o in (gated.naive_recurrent_gated_delta_rule(x, x, x, beta, g)[0], mva.gated_delta(x, x, x, beta, g).o):
        assert o[0, 2].item() == pytest.approx(right, rel=1e-6)
