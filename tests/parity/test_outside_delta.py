"""Delta rules against the plain-torch references of flash-linear-attention.

Tolerance: float32 roundoff times a sum of absolute values. The written values u of a delta rule solve a triangular system, whose condition
the row sums of |A| do not show: it is bounded here through the inverse with absolute values, |scale q.k| |Gamma| |T^-1| beta |v|, by rows.
The constant 4 T + 2 D + 8 counts the products and sums a term passes through, twice for the solve.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mva_ref as mva
from mva_ref.naive.writes import span_sum
from mva_ref.testing.strategies import problems

rules = pytest.importorskip("fla.ops.delta_rule.naive", reason="flash-linear-attention is not installed")
gated = pytest.importorskip("fla.ops.gated_delta_rule.naive", reason="flash-linear-attention is not installed")
U = 2.0**-24


def sequences(p):
    """The inputs in float32, with as many KV heads as query heads: fla repeats them before it calls."""
    R = p.inputs["q"].shape[2] // p.inputs["k"].shape[2]
    return {n: (x if n == "q" else x.repeat_interleave(R, 2)).float() for n, x in p.inputs.items()}


def condition(x, scale):
    """[B, T, H, 1]: the output with every factor made positive."""
    q, k, v, beta = (x[n].double() for n in ("q", "k", "v", "beta"))
    T = q.shape[1]
    causal = torch.ones(T, T, dtype=torch.bool).tril()
    span = span_sum(x["g"].double()[..., None])[..., 0] if "g" in x else torch.zeros(1, dtype=torch.float64)
    gamma = torch.where(causal, span.exp() + torch.where(span.isneginf(), 0, span).abs() * span.exp(), 0)
    system = torch.eye(T, dtype=torch.float64) + beta.movedim(1, 2)[..., None] * torch.einsum("bthd,bihd->bhti", k, k) * gamma.tril(-1)
    inverse = torch.linalg.inv(system).abs()
    written = inverse @ system.abs() @ inverse @ (beta[..., None] * v.abs()).movedim(1, 2)
    A = scale * torch.einsum("bthd,bihd->bhti", q.abs(), k.abs()) * gamma
    return (A @ written).movedim(1, 2).amax(-1, keepdim=True)


def assert_within(ours, theirs, x, scale):
    T, D = x["q"].shape[1], x["q"].shape[-1]
    allowed = (4 * T + 2 * D + 8) * U * condition(x, scale)
    assert ((ours - theirs.double()).abs() <= allowed).all(), ((ours - theirs.double()).abs() / allowed).max()


@given(st.data())
def test_delta_rule(data):
    p = data.draw(problems("delta", default=True))
    x = sequences(p)
    q, k, v, beta = (y.transpose(1, 2) for y in x.values())
    scale = q.shape[-1] ** -0.5
    ours = mva.delta(**{n: y.double() for n, y in x.items()}, output_final_state=True)
    theirs, state = rules.delta_rule_recurrence(q, k, v, beta)
    assert_within(ours.o, theirs.transpose(1, 2), x, scale)
    assert ours.state.S.shape == state.shape
    theirs, A = rules.delta_rule_parallel(q, k, v, beta, BM=1, BN=1)
    assert_within(ours.o, theirs.transpose(1, 2), x, scale)
    ours_A = mva.weights("delta", **{n: y.double() for n, y in x.items()})      # fla leaves the column's beta to the values
    torch.testing.assert_close(ours_A, A.double() * beta[:, :, None].double(), rtol=1e-4, atol=1e-5)


@given(st.data())
def test_gated_delta_rule(data):
    p = data.draw(problems("gated_delta", default=True))
    x = sequences(p)
    scale = x["q"].shape[-1] ** -0.5
    ours = mva.gated_delta(**{n: y.double() for n, y in x.items()}, output_final_state=True)
    theirs, state = gated.naive_recurrent_gated_delta_rule(x["q"], x["k"], x["v"], x["beta"], x["g"], scale=scale, output_final_state=True)
    assert_within(ours.o, theirs, x, scale)
    assert ours.state.S.shape == state.shape
