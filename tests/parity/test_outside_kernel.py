"""Kernels, Taylor orders, softmax and slots against implementations that others wrote, all of them plain torch on a CPU.

A normalised row is o = N / Z, N = sum a_i v_i, Z = sum a_i. It may differ from ours, which runs in float64 on the same numbers, by

    budget(row) = c u cond(row) + underflow,   cond = (N' + |o| Z') / Z

where N' and Z' are N and Z with the absolute value in place of every factor, and u = 2^-24 for the implementations that compute in
float32 and 2^-53 for those that stay in the dtype of their inputs. c counts roundings, and stands at each test: T additions over time,
F or D over channels, one for each factor, and for softmax what a rounded score x does to exp(x). Underflow is what float32 cannot
hold: 2^-126 for each of the products. Where an implementation adds an eps to Z, ours is multiplied by Z / (Z + eps). Nothing else is
absolute.
"""

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, currently_in_test_context, given, target
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import mva_ref as mva
from mva_ref.frame import tree_map
from mva_ref.naive.baselines.based import based_features
from mva_ref.naive.baselines.hedgehog import hedgehog_features
from mva_ref.naive.baselines.linear import elu_features
from mva_ref.naive.baselines.powers import power_features
from mva_ref.naive.baselines.rebased import rebased_inputs
from mva_ref.naive.baselines.t2r import t2r_features
from mva_ref.testing.examples import axes
from mva_ref.testing.strategies import Problem, normal, problems

U, U64, TINY = 2.0**-24, 2.0**-53, 2.0**-126
PROJECTIONS = ("W_q", "W_k", "b_q", "b_k")


def outside(module: str, function: str) -> Any:
    """A function of somebody else's package; skips where that is not installed."""
    reason = f"{module.partition('.')[0]} is not installed: no outside implementation to compare with"
    return getattr(pytest.importorskip(module, reason=reason, exc_type=ImportError), function)


def draw(data: st.DataObject, name: str, dtype: torch.dtype = torch.float32, **fixed: Any) -> Problem:
    """A problem of a row, whose numbers are exact in the dtype that the others compute in, as float64."""
    p: Problem = data.draw(problems(name, dtype=dtype, fixed={"key_mask": None, **fixed}))
    return p._replace(**{part: {n: tree_map(lambda t: t.double() if t.is_floating_point() else t, x) for n, x in tensors.items()}
                         for part, tensors in (("inputs", p.inputs), ("options", p.options))})


def heads(p: Problem) -> dict[str, Tensor]:
    """The tensors with KV heads repeated for the query heads."""
    R, axis = p.run().o.shape[2] // p.inputs["v"].shape[2], axes(p.name, "H")
    tensors = {n: x for n, x in {**p.inputs, **p.options}.items() if isinstance(x, Tensor)}
    return {n: x.repeat_interleave(R, axis[n]) if n in axis else x for n, x in tensors.items()}


def first(*x: Tensor) -> list[Tensor]:
    """Heads before time, and back."""
    return [y.transpose(1, 2) for y in x]


def within(got: Tensor, wanted: Tensor, budget: Tensor, what: str = "o") -> None:
    assert got.shape == wanted.shape and got.isfinite().all(), what
    error = (got.double() - wanted).abs()
    worst = float(torch.where(error == 0, 0, error / budget).max()) if error.numel() else 0.0
    if currently_in_test_context():
        target(worst, label=what)
    assert worst <= 1, f"{what}: {worst:.3g} budgets"


def causal(a: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """N and Z of kernel values a [B, HQ, T, T] and values v [B, T, HQ, V]."""
    a = a.tril()
    return torch.einsum("bhti,bihv->bthv", a, v), a.sum(-1).transpose(1, 2)[..., None]


def scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    return scale * torch.einsum("bthd,bihd->bhti", q, k)


def row_condition(x: dict[str, Tensor], o: Tensor, kernel: Any, scale: float) -> tuple[Tensor, Tensor]:
    """cond and Z of a kernel of q.k with positive coefficients; o is the exact row."""
    N, Z = causal(kernel(scores(x["q"].abs(), x["k"].abs(), scale)), x["v"].abs())
    true = causal(kernel(scores(x["q"], x["k"], scale)), x["v"])[1]
    return (N + o.abs() * Z) / torch.where(true == 0, 1, true), true


def features_agree(p: Problem, phi_q: Tensor, phi_k: Tensor) -> None:
    """Kernel attention with these features, by fla, is ours: c = T + F + 10."""
    attend = outside("fla.ops.linear_attn.naive", "naive_recurrent_linear_attn")
    R, v = phi_q.shape[2] // phi_k.shape[2], heads(p)["v"]
    phi_k = phi_k.repeat_interleave(R, 2)
    (_, T, _, F), eps = phi_q.shape, 1e-10
    got, (S, z) = attend(phi_q, phi_k, v, scale=1.0, normalize=True, output_final_state=True)
    ours = p.run(output_final_state=True)
    Z = (phi_q * phi_k.cumsum(1)).sum(-1, keepdim=True)
    size = p.run(v=p.inputs["v"].abs()).o + ours.o.abs()
    under = F * T * TINY * (1 + phi_q.max()) * (1 + phi_k.max()) * (1 + v.abs().max() + ours.o.abs()) / (Z + eps)
    within(got, ours.o * Z / (Z + eps), ((T + F + 10) * U * size * Z + under * eps) / (Z + eps) + under)
    ends = [x.repeat_interleave(R, 1) for x in ours.state]
    within(S, ends[0], (T + 4) * U * torch.einsum("bihf,bihv->bhfv", phi_k, v.abs()) + T * TINY * (1 + v.abs().max()), "S")
    within(z[:, 0], ends[1], (T + 4) * U * phi_k.sum(1) + T * TINY, "z")


@given(st.data())
def test_linear(data):
    """Linear attention is fla's recurrence on elu + 1, states included."""
    p = draw(data, "linear")
    features_agree(p, *(torch.where(x > 0, x + 1, x.clamp(max=0).exp()) for x in (p.inputs["q"], p.inputs["k"])))


@given(st.data())
def test_linear_goes_on_from_a_state(data):
    """A sequence cut in two is the whole one in fla too, with the states handed over from one to the other."""
    attend = outside("fla.ops.linear_attn.naive", "naive_recurrent_linear_attn")
    p: Problem = draw(data, "linear")
    T = p.inputs["v"].shape[1]
    assume(T > 1)
    cut = data.draw(st.integers(1, T - 1), label="cut")
    before = p._replace(inputs={n: x[:, :cut] for n, x in p.inputs.items()}).run(output_final_state=True).state
    x, R = heads(p), p.inputs["q"].shape[2] // p.inputs["k"].shape[2]
    phi_q, phi_k = elu_features(x["q"]), elu_features(x["k"])
    S, z = (y.repeat_interleave(R, 1).float() for y in before)
    got = attend(*(y[:, cut:] for y in (phi_q, phi_k, x["v"])), scale=1.0, normalize=True, initial_state=(S, z[:, None]))[0]
    Z = (phi_q * phi_k.cumsum(1)).sum(-1, keepdim=True)
    wanted, size = p.run().o, p.run(v=p.inputs["v"].abs()).o
    budget = (T + phi_q.shape[-1] + 12) * U * (size + wanted.abs())
    within(got, (wanted * Z / (Z + 1e-10))[:, cut:], budget[:, cut:])


@given(st.data())
def test_linear_gradients(data):
    """Gradients of linear attention are those of fla's recurrence; condition and c are those of N' and Z' once more, and V for do.v."""
    attend = outside("fla.ops.linear_attn.naive", "naive_recurrent_linear_attn")
    p = draw(data, "linear")
    x = heads(p)
    T, F, V = x["v"].shape[1], x["q"].shape[-1], x["v"].shape[-1]
    do = data.draw(normal(*x["v"].shape, label="do", dtype=torch.float32)).double()
    names = ("q", "k", "v")

    def gradients(f: Any) -> tuple[Tensor, ...]:
        leaves = {n: x[n].clone().requires_grad_() for n in names}
        found: tuple[Tensor, ...] = torch.autograd.grad(f(leaves), list(leaves.values()))
        return found

    o = mva.linear(**x).o
    Z = causal(torch.einsum("bthd,bihd->bhti", elu_features(x["q"]), elu_features(x["k"])), x["v"])[1]
    assume(float(Z.min()) > 1e-3)                                    # so that fla's eps of 1e-10 is less than a rounding

    def absolute(y: dict[str, Tensor]) -> Tensor:
        N, total = causal(torch.einsum("bthd,bihd->bhti", elu_features(y["q"]), elu_features(y["k"])),
                          x["v"].abs() + y["v"] - y["v"].detach())
        return (do.abs() * (N + o.abs() * total) / Z).sum()

    theirs = gradients(lambda y: (do * attend(elu_features(y["q"]), elu_features(y["k"]), y["v"], scale=1.0, normalize=True)[0]).sum())
    ours = gradients(lambda y: (do * mva.linear(**y).o).sum())
    for n, got, wanted, condition in zip(names, theirs, ours, gradients(absolute), strict=True):
        within(got, wanted, (3 * T + 2 * F + V + 16) * U * condition, f"d{n}")


def projections(data: st.DataObject, p: Problem, E: int, bias: bool) -> dict[str, Tensor | None]:
    HQ, H, D = p.inputs["q"].shape[2], p.inputs["k"].shape[2], p.inputs["q"].shape[3]
    shapes = {"W_q": (HQ, D, E), "W_k": (H, D, E), "b_q": (HQ, E), "b_k": (H, E)}
    return {n: data.draw(normal(*s, label=n)) if bias or n[0] == "W" else None for n, s in shapes.items()}


def by_map(make: Any, x: Tensor, W: Tensor, b: Tensor | None) -> Tensor:
    """A module of somebody else's with a `layer`, one for each head, in float64."""
    found = []
    for h in range(x.shape[2]):
        module = make().double()
        module.layer.weight.data = W[h].T.clone()
        if b is not None:
            module.layer.bias.data = b[h].clone()
        found.append(module(x[:, :, h]).detach())
    return torch.stack(found, 2)


@pytest.mark.parametrize("bias", [False, True])
@given(st.data())
def test_t2r(bias, data):
    """T2R is fla's feature map and its kernel attention; rows whose features never meet are 0 in both."""
    feature_map = outside("fla.modules.feature_map", "T2RFeatureMap")
    p = draw(data, "t2r", **dict.fromkeys(PROJECTIONS))
    D, E = p.inputs["q"].shape[-1], data.draw(st.integers(1, 3), label="E")
    options = projections(data, p, E, bias)
    p = p._replace(options={**p.options, **options})
    phi = [by_map(lambda: feature_map(D, E, bias=bias), p.inputs[n], options[f"W_{n}"], options[f"b_{n}"]) for n in ("q", "k")]
    for n, theirs in zip("qk", phi, strict=True):
        torch.testing.assert_close(t2r_features(p.inputs[n], options[f"W_{n}"], options[f"b_{n}"]), theirs, rtol=1e-13, atol=1e-13)
    features_agree(p, *phi)


@given(st.data())
def test_hedgehog(data):
    """Hedgehog is fla's feature map, a softmax over both signs together, and its kernel attention."""
    feature_map = outside("fla.modules.feature_map", "HedgehogFeatureMap")
    p = draw(data, "hedgehog", halves=False, **dict.fromkeys(PROJECTIONS))
    D = p.inputs["q"].shape[-1]
    options = projections(data, p, D, bias=True)
    p = p._replace(options={**p.options, **options})
    phi = [by_map(lambda: feature_map(D), p.inputs[n], options[f"W_{n}"], options[f"b_{n}"]) for n in ("q", "k")]
    for n, theirs in zip("qk", phi, strict=True):
        torch.testing.assert_close(hedgehog_features(p.inputs[n], options[f"W_{n}"], options[f"b_{n}"]), theirs, rtol=1e-12, atol=0)
    features_agree(p, *phi)


@given(st.data())
def test_hedgehog_halves(data):
    """With halves each sign is a softmax of its own, as in LoLCATs: written out here, then through fla's kernel attention."""
    p = draw(data, "hedgehog", halves=True, **dict.fromkeys(PROJECTIONS))
    options = projections(data, p, data.draw(st.integers(1, 3), label="E"), bias=data.draw(st.booleans(), label="bias"))
    p = p._replace(options={**p.options, **options})
    phi = []
    for n in ("q", "k"):
        W, b = options[f"W_{n}"], options[f"b_{n}"]
        y = torch.stack([p.inputs[n][:, :, h] @ W[h] + (0 if b is None else b[h]) for h in range(W.shape[0])], 2)
        up, down = (y - y.max(-1, keepdim=True)[0]).exp(), (y.min(-1, keepdim=True)[0] - y).exp()
        phi.append(torch.cat([up / up.sum(-1, keepdim=True), down / down.sum(-1, keepdim=True)], -1))
    features_agree(p, *phi)


def taylor_kernel(order: int) -> Any:
    return lambda x: sum(x**n / math.factorial(n) for n in range(order + 1))


@given(st.data())
def test_based(data):
    """Based is fla's quadratic form and its chunks: c = 2 (D + 3) + T + 8, in chunks D^2 more. fla adds 1e-6 to Z."""
    parallel, chunk = (outside("fla.ops.based.naive", f"naive_{form}_based") for form in ("parallel", "chunk"))
    p = draw(data, "based", torch.float64, scale=None)
    x, o, eps = heads(p), p.run().o, 1e-6
    (_, T, _, D) = x["q"].shape
    condition, Z = row_condition(x, o, taylor_kernel(2), D**-0.5)
    budget = (2 * (D + 3) + T + 8) * U64 * condition
    q, k, v = first(x["q"], x["k"], x["v"])
    within(parallel(q, k, v).transpose(1, 2), o * Z / (Z + eps), budget, "quadratic")
    sums = [parallel(q, k, y, use_norm=False).transpose(1, 2) for y in (v, torch.ones_like(v))]
    within(sums[0] / sums[1], o, budget, "ratio of sums")
    size = data.draw(st.sampled_from([n for n in range(1, T + 1) if T % n == 0]), label="chunk")
    within(chunk(q, k, v, size).transpose(1, 2), o * Z / (Z + eps), budget + D * D * U64 * condition, "chunks")


@given(st.data())
def test_based_features(data):
    """The features of Based are those of fla up to their order, with the scale shared out between q and k."""
    x = data.draw(normal(3, data.draw(st.integers(1, 5), label="D"), label="x"))
    theirs = outside("fla.modules.feature_map", "TaylorFeatureMap")(x.shape[-1])(x)
    ours = based_features(x * x.shape[-1] ** -0.25)
    torch.testing.assert_close(ours.sort(-1)[0], theirs.sort(-1)[0], rtol=1e-13, atol=1e-15)


@given(st.data())
def test_based_is_taylor_of_order_two(data):
    """Based and the Taylor row of order 2 are one function: outputs, states and what follows from them."""
    p: Problem = data.draw(problems("based"))
    T = p.inputs["v"].shape[1]
    a, b = p.run(output_final_state=True), mva.attention("taylor", **p.inputs, **p.options, order=2, output_final_state=True)
    scale = p.options.get("scale") or p.inputs["q"].shape[-1] ** -0.5
    budget = 4 * (T + 10) * U64 * row_condition(heads(p), b.o, taylor_kernel(2), abs(scale))[0]
    if p.options["key_mask"] is None:
        within(a.o, b.o, budget)
    torch.testing.assert_close(a.o, b.o, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(tuple(a.state), tuple(b.state)[:2], rtol=1e-12, atol=1e-12)
    more = p.run(initial_state=a.state).o, mva.attention("taylor", **p.inputs, **p.options, order=2, initial_state=b.state).o
    torch.testing.assert_close(*more, rtol=1e-9, atol=1e-9)


@given(st.data())
def test_taylor(data):
    """Every order of the Taylor row is the packed Taylor attention of its authors (SATA), whose coefficients are float32: c = 2."""
    module = outside("sata_attention", "SymmetryAwareTaylorApproximatedAttention")
    order = data.draw(st.integers(0, 4), label="N")
    p = draw(data, "taylor", torch.float64, scale=None, centre=None, order=order)
    x, o = heads(p), p.run().o
    D, V = x["q"].shape[-1], x["v"].shape[-1]
    condition, Z = row_condition(x, o, taylor_kernel(order), D**-0.5)
    assume(float((causal(taylor_kernel(order)(scores(x["q"].abs(), x["k"].abs(), D**-0.5)), x["v"])[1] / Z).abs().max()) < 1e4)
    theirs = module(D, V, is_causal=True, n_taylor=order + 1).double()(*first(x["q"], x["k"], x["v"])).transpose(1, 2)
    within(theirs, o, 2 * U * condition.abs())


@given(st.data())
def test_rebased(data):
    """ReBased after its LayerNorm is fla's quadratic form: c = 2 (D + 3) + T + 8. fla adds 1e-6 to Z, and a constant key is 0 to both."""
    parallel = outside("fla.ops.rebased.naive", "naive_parallel_rebased")
    p = draw(data, "rebased", torch.float64, scale=None)
    known = {n: p.options[n] for n in ("gain", "offset", "eps")}
    x, o, eps = heads(p), p.run().o, 1e-6
    q, k = (rebased_inputs(x[n], **known) for n in ("q", "k"))
    (_, T, _, D) = q.shape
    condition, Z = row_condition({"q": q, "k": k, "v": x["v"]}, o, torch.square, D**-0.5)
    theirs = parallel(*first(q, k, x["v"])).transpose(1, 2)
    within(theirs, o * Z / (Z + eps), (2 * (D + 3) + T + 8) * U64 * torch.where(Z == 0, 0, condition))


@pytest.mark.parametrize("gain", [False, True])
@given(st.data())
def test_rebased_features(gain, data):
    """LayerNorm and the features of its square are those of fla, with gain; offset and eps are written out."""
    feature_map = outside("fla.modules.feature_map", "RebasedFeatureMap")
    D = data.draw(st.integers(2, 5), label="D")
    x = data.draw(normal(4, D, label="x"))
    module = feature_map(D, use_gamma=gain, use_beta=False).double()
    weight, offset = (data.draw(normal(D, label=n)) for n in ("gain", "offset"))
    if gain:
        module.gamma.data = weight
    given_ = weight if gain else None
    ours = power_features(rebased_inputs(x, given_), 2) / D**0.5
    theirs = module(x).detach()
    size = (1 + (x.abs().amax(-1) / (x.var(-1, correction=0) + 1e-5).sqrt())[:, None]) * (1 + weight.abs().max()) ** 2
    assert ((ours.sort(-1)[0] - theirs.sort(-1)[0]).abs() <= 100 * U64 * size**2).all()
    centred = x - x.mean(-1, keepdim=True)
    for eps in (1e-5, 0.1):
        wanted = weight * centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() + offset
        assert ((rebased_inputs(x, weight, offset, eps) - wanted).abs() <= 100 * U64 * (size + offset.abs())).all()


@given(st.data())
def test_power(data):
    """Power attention, with or without a decay, is its authors' reference.

    That divides Z by its largest term, rounds it to float32 and adds 1e-6; and it adds 1e-7 to each |score|: the budget is what that
    can change, two roundings to float32, and in float64 c = p (D + 6) + T + 8 + the sum of |g|.
    """
    attend = outside("retention._attention.reference", "attention")
    p = draw(data, "power", torch.float64, scale=None)
    if p.options["g"] is not None:                                   # sums of gates are subtracted there: no -inf
        p.options["g"] = -torch.rand(p.options["g"].shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    x, o, power = heads(p), p.run().o, p.options["power"]
    (_, T, _, D), G = x["q"].shape, None if p.options["g"] is None else p.options["g"].cumsum(1)
    theirs = attend(*p.inputs.values(), G, power, scale=D**-0.5, norm=True)
    g = torch.zeros(x["v"].shape[:3], dtype=torch.float64) if G is None else x["g"]
    left = (g.cumsum(1).mT[..., None] - g.cumsum(1).mT[:, :, None]).tril().exp()
    s = scores(x["q"], x["k"], D**-0.5).abs()
    (_, Z), (N_abs, Z_abs) = (causal(y**power * left, x["v"].abs()) for y in (s, scores(x["q"].abs(), x["k"].abs(), D**-0.5)))
    guard = causal(((s + 1e-7) ** power - s**power) * left, x["v"].abs())
    exact = (power * (D + 6) + T + 8 + float(g.abs().sum(1).max())) * U64 * (N_abs + o.abs() * Z_abs) / Z
    eps = 1e-6 * ((s + 1e-7) ** power * left).tril().amax(-1).transpose(1, 2)[..., None]
    within(theirs, o * Z / (Z + eps), exact + 1.01 * (guard[0] + o.abs() * guard[1]) / Z + 2 * U * o.abs())


def test_power_of_a_query_of_zero():
    """Orthogonal to every key, a row of an even power has no weight: ours is 0, while the guards of its authors' reference average."""
    attend = outside("retention._attention.reference", "attention")
    q, k, v = torch.zeros(1, 2, 1, 1), torch.ones(1, 2, 1, 1), torch.tensor([1.0, 3.0]).view(1, 2, 1, 1)
    assert mva.power(q, k, v, 2).o.flatten().tolist() == [0, 0]
    torch.testing.assert_close(attend(q, k, v, None, 2, norm=True).flatten(), torch.tensor([1.0, 2.0]))


def softmax_budget(p: Problem, o: Tensor) -> Tensor:
    """c = T + 8 + 2 (D + 3) max |x|, with |x| of absolute factors; cond = sum A |v| + |o|."""
    x, D = heads(p), p.inputs["q"].shape[-1]
    scale = D**-0.5 if p.options["scale"] is None else abs(p.options["scale"])
    largest = scores(x["q"].abs(), x["k"].abs(), scale).tril().amax(-1).transpose(1, 2)[..., None]
    c = o.shape[1] + 8 + 2 * (D + 3) * largest
    return c * U64 * (p.run(v=p.inputs["v"].abs()).o + o.abs())


@given(st.data())
def test_softmax_is_torch(data):
    """Softmax with windows, sinks, masked keys and grouped heads is torch's attention under a mask."""
    p: Problem = data.draw(problems("softmax"))
    q, k, v = first(*p.inputs.values())
    t = torch.arange(q.shape[2])
    ago, window, mask = t[:, None] - t, p.options["window"] or 10**9, p.options["key_mask"]
    visible = (ago >= 0) & ((ago < window) | (t < p.options["sinks"]))
    visible = visible if mask is None else visible & mask[:, None, None]
    theirs = scaled_dot_product_attention(q, k, v, visible.expand(q.shape[0], 1, *ago.shape), scale=p.options["scale"], enable_gqa=True)
    o = p.run().o
    some = visible.any(-1).expand(q.shape[:3]).transpose(1, 2)[..., None]
    within(torch.where(some, theirs.transpose(1, 2), 0), o, torch.where(some, softmax_budget(p, o), 0))


@given(st.data())
def test_softmax_windows_are_those_of_fla(data):
    """A window of W holds W keys, the query's own included, in fla as here."""
    attend = outside("fla.ops.attn.naive", "naive_parallel_attn")
    p = draw(data, "softmax", torch.float64, sinks=0)
    o = p.run().o
    within(attend(*p.inputs.values(), p.options["scale"], p.options["window"])[0], o, softmax_budget(p, o))


def largest_of(x: Tensor, x0: Tensor | None) -> Tensor:
    """The largest size in each channel of what a slot averages: x [B, T, H, D] and a state x0 [B, H, M, D] -> [B, H, 1, D]."""
    parts = [x.movedim(1, 2), *([] if x0 is None else [x0])]
    return torch.cat(parts, 2).abs().amax(2, keepdim=True)


def slot_budget(p: Problem, o: Tensor, writes: float, state: Any = None) -> Tensor:
    """A slot is an average of relative error (writes + T) u, so its score x errs by (writes + T + D) u |x|, and softmax by twice that."""
    q, k, v = (p.inputs[n].abs() for n in "qkv")
    (_, T, HQ, D), M, scale = q.shape, p.inputs["s" if p.name == "abc" else "g"].shape[-1], p.options["scale"]
    keys = largest_of(k, None if state is None else state.K)[:, :, 0].repeat_interleave(HQ // k.shape[2], 1)
    largest = (D**-0.5 if scale is None else abs(scale)) * torch.einsum("bthd,bhd->bth", q, keys)[..., None]
    c = (writes + T + 4) * (1 + 2 * largest) + 2 * (D + 4) * largest + M + 8
    past = {} if state is None else {"initial_state": state._replace(V=state.V.abs())}
    size = p.run(v=v, **past).o + o.abs()
    return c * U * size + M * T * TINY * (1 + largest) * (1 + largest_of(v, None if state is None else state.V).max())


@given(st.data())
def test_abc(data):
    """ABC is fla's recurrence and its sum over time; a write e^{s - z} errs by the size of its exponents, at every step."""
    recurrent, cumsum = (outside("fla.ops.abc.naive", f"naive_{form}_abc") for form in ("recurrent", "cumsum"))
    p = draw(data, "abc")
    T, scale = p.inputs["q"].shape[1], p.options["scale"]
    ours, largest = p.run(output_final_state=True), float(p.inputs["s"].abs().max()) + math.log(T)
    writes = T * (6 + 4 * largest)
    theirs, (K, V) = recurrent(*first(*p.inputs.values()), scale=scale, output_final_state=True)
    within(theirs.transpose(1, 2), ours.o, slot_budget(p, ours.o, writes))
    for n, got, wanted, x in (("K", K.mT, ours.state.K, p.inputs["k"]), ("V", V, ours.state.V, p.inputs["v"])):
        within(got, wanted, (writes + T + 4) * U * x.abs().amax(1)[:, :, None].expand(wanted.shape), n)
    if scale is None:
        x = heads(p)
        within(cumsum(*first(*(x[n] for n in "qkvs")))[0].transpose(1, 2), ours.o, slot_budget(p, ours.o, 4 + 4 * largest), "sums")


@given(st.data())
def test_gsa(data):
    """GSA is fla's recurrence with writes 1 - e^g, for every gate, from any state, grouped heads included."""
    recurrent = outside("fla.ops.gsa.naive", "naive_recurrent_gsa")
    p = draw(data, "gsa", read="softmax", slot_bias=None)
    (q, k, v, g), scale, state, given_ = p.inputs.values(), p.options["scale"], None, None
    (B, T, H, M), D, V = g.shape, q.shape[-1], v.shape[-1]
    if data.draw(st.booleans(), label="initial state"):
        K0, V0 = (data.draw(normal(B, H, M, n, label="state", dtype=torch.float32)) for n in (D, V))
        state, given_ = mva.SlotState(K0.double(), V0.double(), None), (K0.mT, V0)
    theirs, ends = recurrent(q, k, v, -torch.expm1(g), g, scale, given_, True)
    ours = p.run(initial_state=state, output_final_state=True)
    within(theirs, ours.o, slot_budget(p, ours.o, 3 * T, state))
    for n, x, end in (("K", k, ends[0].mT), ("V", v, ends[1])):
        wanted = getattr(ours.state, n)
        size = largest_of(x, None if state is None else getattr(state, n)).expand(wanted.shape)
        within(end, wanted, ((4 * T + 4) * U + T * TINY) * size, n)


@given(st.data())
def test_metala(data):
    """The core of MetaLA is fla's GLA with keys 1 - e^g; its fixed scale M^-1/2 is taken out again."""
    recurrent = outside("fla.ops.gla.naive", "naive_recurrent_gla")
    p = draw(data, "metala")
    x, T, M = heads(p), p.inputs["v"].shape[1], p.inputs["g"].shape[-1]
    theirs, S = recurrent(x["r"], -torch.expm1(x["g"]), x["v"], x["g"], None, True)
    ours = p.run(output_final_state=True)
    size = p.run(r=p.inputs["r"].abs(), v=p.inputs["v"].abs(), output_final_state=True)
    under = M * T * TINY * (1 + p.inputs["r"].abs().max()) * (1 + p.inputs["v"].abs().max())
    within(theirs * M**0.5, ours.o, (4 * T + M + 8) * U * size.o + under)
    R = x["v"].shape[2] // p.inputs["v"].shape[2]
    within(S, ours.state.V.repeat_interleave(R, 1), ((4 * T + 8) * U * size.state.V + under).repeat_interleave(R, 1), "state")


def test_gsa_without_gates_is_abc():
    """Without gates fla's GSA takes its slot logits for ABC's."""
    gsa, abc = outside("fla.ops.gsa.naive", "naive_recurrent_gsa"), outside("fla.ops.abc.naive", "naive_recurrent_abc")
    rng = torch.Generator().manual_seed(0)
    q, k, v, s = (torch.randn(1, 3, 1, 2, generator=rng) for _ in range(4))
    torch.testing.assert_close(gsa(q, k, v, s)[0], abc(*first(q, k, v, s))[0].transpose(1, 2))


def test_abc_states_of_fla_have_no_mass():
    """Two equal tokens: their slots hold the mean. fla's state does not say how much was written, so that going on from it adds up."""
    recurrent = outside("fla.ops.abc.naive", "naive_recurrent_abc")
    one = torch.ones(1, 2, 1, 1)
    whole = mva.abc(one, one, one, one, output_final_state=True).state
    half = mva.abc(*4 * [one[:, :1]], output_final_state=True).state
    again = mva.abc(*4 * [one[:, 1:]], initial_state=half, output_final_state=True).state
    assert whole.V.item() == again.V.item() == 1
    state = recurrent(*first(*4 * [one[:, :1]]), output_final_state=True)[1]
    assert recurrent(*first(*4 * [one[:, 1:]]), initial_state=state, output_final_state=True)[1][1].item() == 2
