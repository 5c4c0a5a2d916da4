"""P1 to P8 and the master lemma: what the order of a read is. Proofs: docs/theory/orders.md."""

import math

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mva_ref as mva
from mva_ref.naive.orders import features, phi, remainder
from mva_ref.testing.strategies import normal, problems

seeds = st.integers(0, 2**32 - 1)


def rows(draw, n, scale):
    return draw(normal(n, scale=scale, label="scores"))


def phi_exact(x: float, order: int) -> mpmath.mpf:
    with mpmath.workdps(60):
        return sum((mpmath.mpf(x) ** n / mpmath.factorial(n) for n in range(order + 1)), mpmath.mpf(0))


def total_variation(a, b):
    return (a - b).abs().sum(-1) / 2


@given(st.data())
def test_lemma_a_perturbed_softmax_moves_by_at_most_tanh(data):
    """Lemma: TV(a, b) <= tanh(omega / 4), and the output moves by at most that times the diameter of the values."""
    n = data.draw(st.integers(1, 7), label="n")
    size = data.draw(st.sampled_from((1e-3, 1.0, 20.0)), label="size")
    x, delta = rows(data.draw, n, 3.0), data.draw(normal(n, scale=size, label="delta"))
    v = data.draw(normal(n, 3, label="v"))
    a, b = x.softmax(0), (x + delta).softmax(0)
    bound = math.tanh(float(delta.max() - delta.min()) / 4)
    diameter = torch.cdist(v, v).max()
    assert total_variation(a, b) <= bound + 1e-14
    assert (a @ v - b @ v).norm() <= bound * diameter + 1e-13


@given(st.floats(1e-3, 30))
def test_lemma_equality_for_two_points(omega):
    """Lemma: two points with a_1 = 1 / (1 + e^{omega/2}) reach the bound."""
    a1 = 1 / (1 + math.exp(omega / 2))
    a = torch.tensor([a1, 1 - a1], dtype=torch.float64)
    b = a * torch.tensor([omega, 0.0], dtype=torch.float64).exp()
    assert abs(total_variation(a, b / b.sum()) - math.tanh(omega / 4)) < 1e-12


@given(st.data())
def test_p1_softmax_is_a_mixture_of_orders(data):
    """P1: for x > 0, softmax attention is sum_n pi_n o^(n), pi_n proportional to sum_i x_i^n / n!, o^(n) the order-n read."""
    n = data.draw(st.integers(1, 6), label="n")
    x, v = rows(data.draw, n, 2.0).abs() + 1e-3, data.draw(normal(n, 3, label="v"))
    N = torch.arange(80, dtype=torch.float64)
    log_terms = N[:, None] * x.log() - torch.lgamma(N + 1)[:, None]      # order, token
    pi = log_terms.logsumexp(1).softmax(0)
    reads = log_terms.softmax(1) @ v
    torch.testing.assert_close(pi @ reads, x.softmax(0) @ v, rtol=1e-12, atol=1e-12)


@pytest.mark.rows("taylor")
@given(st.floats(-60, 60), st.integers(0, 40))
def test_p2_the_remainder_is_exact(x, order):
    """P2: e^x - phi_N(x) = x^{N+1}/(N+1)! 1F1(1; N+2; x), without cancellation."""
    with mpmath.workdps(60):
        exact = mpmath.mpf(x) ** (order + 1) / mpmath.factorial(order + 1) * mpmath.hyp1f1(1, order + 2, mpmath.mpf(x))
        assert abs(exact - (mpmath.exp(x) - phi_exact(x, order))) <= mpmath.mpf(10) ** -45 * (1 + abs(exact))
    if x > -order - 1 and abs(exact) > 1e-290:
        assert abs(remainder(torch.tensor(x, dtype=torch.float64), order).item() - exact) <= 2e-13 * abs(exact)


def test_p2_a_difference_has_no_right_digit():
    """P2: at N = 6, x = 1e-3 the difference exp(x) - phi_6(x) is wrong in every digit, the remainder is right in all."""
    x = torch.tensor(1e-3, dtype=torch.float64)
    with mpmath.workdps(60):
        exact = float(mpmath.exp(mpmath.mpf(1e-3)) - phi_exact(1e-3, 6))
    assert abs((x.exp() - phi(x, 6)).item() - exact) > 0.5 * exact
    assert abs(remainder(x, 6).item() - exact) < 1e-14 * exact


@pytest.mark.rows("taylor")
@given(st.floats(-60, 60), st.integers(0, 40))
def test_p3_even_orders_are_positive_and_above_exp_on_the_left(x, order):
    """P3: phi_N > 0 for even N, phi_N(x) > e^x for x < 0; phi is accurate to its last digits, roots of odd orders aside."""
    value, exact = phi(torch.tensor(x, dtype=torch.float64), order).item(), phi_exact(x, order)
    # near the root of an odd order the two terms e^x and remainder cancel: relative to their size, not to the difference
    size = abs(exact) if order % 2 == 0 or x >= 0 else max(abs(exact), mpmath.exp(x))
    assert abs(value - exact) <= 2e-13 * size
    if order % 2 == 0:
        assert value > 0
        if x < 0:
            assert value >= math.exp(x) * (1 - 1e-13)


@pytest.mark.parametrize(("order", "root"), [(1, -1.0), (3, -1.596), (5, -2.181)])
def test_p3_an_odd_order_has_one_root(order, root):
    """P3: phi_1, phi_3, phi_5 vanish at -1, -1.596, -2.181 and nowhere else."""
    x = torch.linspace(-50, 50, 200001, dtype=torch.float64)
    y = phi(x, order)
    changes = (y[1:].sign() != y[:-1].sign()).nonzero()
    assert phi(torch.tensor([root - 1e-3, root + 1e-3], dtype=torch.float64), order).prod() <= 0
    assert abs(x[changes].mean() - root) < 2e-3 and x[changes].max() - x[changes].min() < 2e-3


@pytest.mark.rows("taylor")
@pytest.mark.parametrize("impl", ["naive", "recurrent"])
def test_p3_a_vanishing_normaliser_gives_a_zero_row(impl):
    """P3: one key at score -1 and order 1: the normaliser is exactly 0, so the row is 0, its gradient finite, lse None."""
    q, k, v = (torch.tensor(x, dtype=torch.float64).view(1, 1, 1, 1).requires_grad_() for x in (1.0, -1.0, 3.0))
    out = mva.taylor(q, k, v, 1, scale=1.0, impl=impl)
    assert out.o.item() == 0 and out.lse is None
    out.o.sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in (q, k, v))


@pytest.mark.rows("taylor", "softmax")
@given(st.data())
def test_p4_truncation_error(data):
    """P4: with delta_i = log phi_N(x_i) - x_i, weights and output differ from softmax by at most tanh(omega / 4), times diam(V)."""
    p = data.draw(problems("taylor", default=True, fixed={"order": data.draw(st.sampled_from((0, 2, 4, 8)), label="order")}))
    q, k, v = p.inputs.values()
    order = p.options["order"]
    A, S = p.weights(), mva.weights("softmax", q, k, v)
    x = torch.einsum("bthd,bihd->bhti", q, k.repeat_interleave(q.shape[2] // k.shape[2], 2)) * q.shape[-1] ** -0.5
    delta = phi(x, order).log() - x
    seen = torch.ones(A.shape[-2:], dtype=torch.bool).tril()
    omega = torch.where(seen, delta, -torch.inf).amax(-1) - torch.where(seen, delta, torch.inf).amin(-1)
    bound = (omega / 4).tanh()
    assert (total_variation(A, S) <= bound + 1e-12).all()
    V = v.repeat_interleave(q.shape[2] // k.shape[2], 2).transpose(1, 2)
    error = (A @ V - S @ V).norm(dim=-1)
    pairs = torch.where(seen[:, :, None] & seen[:, None], torch.cdist(V, V)[:, :, None], 0)
    diameter = pairs.flatten(-2).amax(-1)
    assert (error <= bound * diameter + 1e-11 * (1 + V.norm())).all()


@pytest.mark.parametrize("row", ["softmax", "taylor"])
@given(st.data())
def test_p5_softmax_does_not_see_a_common_shift_of_the_keys(row, data):
    """P5: softmax is invariant under k_i -> k_i + c; so is a Taylor order whose centre moves along."""
    fixed = {"softmax": {"sinks": 0}, "taylor": {"centre": None}}[row]
    p = data.draw(problems(row, fixed=fixed))
    q, k = p.inputs["q"], p.inputs["k"]
    c = data.draw(normal(k.shape[0], k.shape[2], k.shape[3], label="c"))
    if row == "softmax":
        torch.testing.assert_close(p.run(k=k + c[:, None]).o, p.run().o, rtol=1e-10, atol=1e-10)
        return
    shifted, plain = p.run(k=k + c[:, None], centre=c), p.run()
    A = p.weights().abs().sum(-1).movedim(1, 2)[..., None]            # odd orders: the condition of the row
    assert ((shifted.o - plain.o).abs() <= 1e-10 * A * A * (1 + p.inputs["v"].abs().max()) * (1 + q.abs().max())).all()


@pytest.mark.rows("taylor")
@given(st.data())
def test_p5_the_running_centre_is_a_centre_of_its_own_for_every_row(data):
    """P5: centre "running" gives row t the result of the tensor centre mean(k_1..k_t); "mean" that of the mean of all keys."""
    p = data.draw(problems("taylor", fixed={"key_mask": None, "order": data.draw(st.sampled_from((0, 2, 4)), label="order")}))
    k = p.inputs["k"]
    running = p.run(centre="running")
    for t in range(k.shape[1]):
        one = p.run(centre=k[:, : t + 1].mean(1))
        torch.testing.assert_close(running.o[:, t], one.o[:, t], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(running.lse[:, t], one.lse[:, t], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(p.run(centre="mean").o, p.run(centre=k.mean(1)).o, rtol=1e-10, atol=1e-10)


def test_p5_centring_need_not_help():
    """P5: for x = (0, 0, 0, 8) and N = 2, omega grows from 4.29 to 4.78 when the scores are centred at their mean."""
    x = torch.tensor([0.0, 0.0, 0.0, 8.0], dtype=torch.float64)

    def omega(y):
        delta = phi(y, 2).log() - y
        return (delta.max() - delta.min()).item()

    assert abs(omega(x) - 4.29) < 0.005 and abs(omega(x - x.mean()) - 4.78) < 0.005


@pytest.mark.rows("taylor")
@given(st.data())
def test_p6_features_give_the_polynomial(data):
    """P6: F_n(x).F_n(y) = (x.y)^n / n!, in C(D+n-1, n) features, so that phi_N(x.y) is one inner product."""
    D, N = data.draw(st.integers(1, 4), label="D"), data.draw(st.integers(0, 5), label="N")
    x, y = data.draw(normal(D, label="x")), data.draw(normal(D, label="y"))
    F = [(features(x, n), features(y, n)) for n in range(N + 1)]
    for n, (a, b) in enumerate(F):
        assert len(a) == math.comb(D + n - 1, n)
        assert abs(a @ b - (x @ y) ** n / math.factorial(n)) < 1e-12 * (1 + (x.norm() * y.norm()) ** n)
    total = sum(float(a @ b) for a, b in F)
    assert abs(total - phi(x @ y, N)) < 1e-11 * (1 + math.exp(x.norm() * y.norm()))


@pytest.mark.rows("taylor")
@given(st.data())
def test_p6_the_feature_recurrence_is_the_polynomial(data):
    """P6: the recurrence over features and the quadratic form are the same function, within the condition of each row."""
    p = data.draw(problems("taylor"))
    A = p.weights().abs().sum(-1).movedim(1, 2)[..., None]
    size = 1 + p.inputs["v"].abs().max()
    q, k = p.inputs["q"], p.inputs["k"]
    x = (p.options["scale"] or q.shape[-1] ** -0.5) * q.norm(dim=-1).max() * k.norm(dim=-1).max()
    growth = phi(2 * x, p.options["order"])              # sums of positive and negative terms of this size cancel in the recurrence
    assert ((p.run().o - p.run("recurrent").o).abs() <= 1e-13 * growth**2 * A * A * size).all()


@pytest.mark.rows("taylor", "softmax")
@given(st.data())
def test_p7_limits(data):
    """P7: order 0 is the causal mean; a high order is softmax."""
    p = data.draw(problems("softmax", default=True))
    q, k, v = p.inputs.values()
    R = q.shape[2] // k.shape[2]
    mean = (v.cumsum(1) / torch.arange(1, v.shape[1] + 1).view(-1, 1, 1)).repeat_interleave(R, 2)
    torch.testing.assert_close(mva.taylor(q, k, v, 0).o, mean, rtol=1e-12, atol=1e-12)
    largest = (q.norm(dim=-1).max() * k.norm(dim=-1).max() * q.shape[-1] ** -0.5).item()
    order = 2 * int(2 * largest) + 60        # even, so that there is a log-mass
    exact, high = p.run(), mva.taylor(q, k, v, order)
    torch.testing.assert_close(high.o, exact.o, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(high.lse, exact.lse, rtol=1e-9, atol=1e-9)


@given(st.data())
def test_p7_a_high_even_power_is_hard_attention_on_the_modulus(data):
    """P7: weights proportional to x^p, p even, go to the largest |x| as p grows."""
    x = torch.tensor(data.draw(st.lists(st.integers(-9, 9), min_size=2, max_size=6, unique_by=abs), label="x"), dtype=torch.float64)
    weights = (400 * x.abs().log()).softmax(0)
    assert weights[x.abs().argmax()] > 1 - 1e-12


@given(st.data())
def test_p8_order_is_frequency(data):
    """P8: for x > 0, |a^(n)|^2 does not decrease with n; |a|^2 - 1/t is the energy at the non-zero frequencies (Parseval)."""
    t = data.draw(st.integers(1, 8), label="t")
    log_x = rows(data.draw, t, data.draw(st.sampled_from((0.0, 0.5, 3.0)), label="spread"))
    a = (torch.arange(30, dtype=torch.float64)[:, None] * log_x).softmax(1)
    energy = a.square().sum(1)
    assert (energy.diff() >= -1e-14).all()
    spectrum = torch.fft.fft(a, dim=1).abs().square() / t
    torch.testing.assert_close(spectrum[:, 1:].sum(1), energy - 1 / t, rtol=1e-9, atol=1e-14)


@settings(max_examples=15)
@pytest.mark.rows("softmax", "taylor")
@given(st.data())
def test_p8_order_zero_gathers_only_the_zero_frequency(data):
    """P8: the weights of order 0 have no energy at a non-zero frequency; softmax has, unless its row is constant."""
    p = data.draw(problems("taylor", default=True, min_T=2, fixed={"order": 0}))
    q, k, v = p.inputs.values()
    flat, sharp = p.weights()[:, :, -1], mva.weights("softmax", q, k, v)[:, :, -1]
    high = torch.fft.fft(flat, dim=-1).abs()[..., 1:]
    assert high.max() < 1e-14
    assert (sharp.square().sum(-1) >= flat.square().sum(-1) - 1e-14).all()
