"""A window joined with features of what has left it, against the definitions in 40 digits and against parts that others wrote.

No public package has these systems, so the first oracle is their definition as a sum over tokens in mpmath. All weights w_i are positive,
so with a relative error r_i in each, a row is wrong by at most

    sum_i r_i w_i (|v_i| + |o|) / sum_i w_i

r_i counts roundings: T + F + 12 for the sums, 2 D + 6 for each unit of a score (exp of a rounded score, the logarithms of the masses),
T for each unit of an exponent of decay, and what a feature map loses: elu + 1 rounds to u, not to u times itself.
"""

from typing import Any

import pytest
import torch
from hypothesis import given, target
from hypothesis import strategies as st
from mpmath import mp, mpf
from torch.nn.functional import scaled_dot_product_attention

from mva_ref.testing.examples import elu_plus_one
from mva_ref.testing.strategies import exponential, problems

mp.dps = 40
ROWS = ("gla_sw", "lolcats", "infini")
U, U64 = 2.0**-24, 2.0**-53


def numbers(x: Any) -> Any:
    return [numbers(y) for y in x] if isinstance(x, list) else mpf(x)


def dot(x: Any, y: Any) -> Any:
    return sum((a * b for a, b in zip(x, y, strict=True)), mpf(0))


def size(x: Any, y: Any) -> Any:
    return sum((abs(a * b) for a, b in zip(x, y, strict=True)), mpf(0))


def shares(x: Any) -> Any:
    top = max(x)
    terms = [mp.exp(y - top) for y in x]
    return [y / sum(terms) for y in terms]


def features(x: Any, W: Any, how: dict[str, Any]) -> tuple[Any, Any, Any]:
    """phi(x), its relative error, its absolute error, in units of u."""
    if "feature_map" in how and how["feature_map"] is exponential:
        return [mp.exp(y / 4) for y in x], 4 + max(map(abs, x)), 0
    if "own_maximum" not in how:
        return [y + 1 if y > 0 else mp.exp(y) for y in x], 4, 2
    y = x if W is None else [dot(x, column) for column in zip(*W, strict=True)]
    lost = max(map(abs, x)) if W is None else max(size(x, column) for column in zip(*W, strict=True))
    return shares(y) + shares([-z for z in y]), len(y) + 8 + 2 * (len(x) + 2) * lost, 0


def one_row(t: int, h: dict[str, Any], how: dict[str, Any], keep: list[bool]) -> tuple[Any, Any, Any, Any]:
    """o, log mass, and how far float64 may be from each."""
    seen, v, D = [i for i in range(t + 1) if keep[i]], h["v"], len(h["k"][0])
    if "segment" in how:
        near = [i for i in seen if i // how["segment"] == t // how["segment"]]
    else:
        near = [i for i in seen if i > t - how["window"] or i < how.get("sinks", 0)]
    far = [i for i in seen if i not in near]
    scores, sizes = ({i: how["scale"] * f(h["q"][t], h["k"][i]) for i in near} for f in (dot, size))
    top = max(scores.values(), default=mpf(0)) if how.get("own_maximum") else 0
    units = {i: len(v) + 12 + (2 * D + 6) * (1 + max(sizes.values())) for i in near}
    w = {i: h["weight"] * mp.exp(scores[i] - top) for i in near}
    r = {i: units[i] * w[i] for i in near}
    phi_q, lost, least = features(h["q"][t], h["W_q"], how)
    for i in far:
        phi_k, lost_k, _ = features(h["k"][i], h["W_k"], how)
        G = [sum((h["g"][j][f] for j in far if j > i), mpf(0)) if h["g"] else mpf(0) for f in range(len(phi_k))]
        parts = [(a, b, mp.exp(x), abs(x) if x > -1e3 else 0) for a, b, x in zip(phi_q, phi_k, G, strict=True)]
        w[i] = sum(a * b * e for a, b, e, _ in parts)
        r[i] = sum(((len(v) + len(parts) + 12 + lost + lost_k + len(v) * x) * a * b + least * (a + b)) * e for a, b, e, x in parts)
    Z = sum((w[i] for i in far), mpf(0))
    for i in far:
        r[i] += abs(mp.log(Z)) * w[i]

    def average(tokens: Any) -> tuple[Any, Any, Any, Any]:
        total = sum((w[i] for i in tokens), mpf(0))
        if not total:
            return [mpf(0)] * len(v[0]), total, [mpf(0)] * len(v[0]), mpf(0)
        o = [sum(w[i] * v[i][x] for i in tokens) / total for x in range(len(v[0]))]
        error = [sum(r[i] * (abs(v[i][x]) + abs(y)) for i in tokens) / total for x, y in enumerate(o)]
        return o, total, error, sum(r[i] for i in tokens) / total

    if h["hard_weight"] is None:
        o, total, error, relative = average(near + far)
        log = mp.log(total) if total else -mp.inf
        return o, log, error, relative + 8 * abs(log) if total else mpf(0)
    b = h["hard_weight"][t] if far else mpf(1)
    (x, _, e, _), (y, _, f, _) = average(near), average(far)
    return ([b * p + (1 - b) * s for p, s in zip(x, y, strict=True)], mp.nan,
            [b * (p + 4 * abs(z)) + (1 - b) * (s + 4 * abs(n)) for p, s, z, n in zip(e, f, x, y, strict=True)], mpf(0))


def definition(p: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """o and log mass of a whole call, and the errors that float64 may have."""
    given, (B, T, HQ, D), V = {**p.inputs, **p.options}, p.inputs["q"].shape, p.inputs["v"].shape[-1]
    R, mask = HQ // p.inputs["v"].shape[2], given.get("key_mask")
    how: dict[str, Any] = {"own_maximum": True} if p.name == "lolcats" else {}
    how |= {x: y for x, y in given.items() if not isinstance(y, torch.Tensor)}
    how["scale"] = mp.sqrt(mpf(1) / D) if how.get("scale") is None else mpf(how["scale"])
    hard = p.name == "infini" or given.get("integration") == "hard"
    o, log, o_error, log_error = (torch.zeros(B, T, HQ, *x, dtype=torch.float64) for x in ((V,), (), (V,), ()))
    for b in range(B):
        keep = [True] * T if mask is None else mask[b].tolist()
        for j in range(HQ):
            def part(key: str, head: int, b: int = b) -> Any:
                return None if given.get(key) is None else numbers(given[key][b, :, head].tolist())

            h = {"q": part("q", j), **{key: part(key, j // R) for key in ("k", "v", "g")}, "hard_weight": part("hard_weight", j)}
            for key, head in (("W_q", j), ("W_k", j // R)):
                h[key] = None if given.get(key) is None else numbers(given[key][head].tolist())
            h["weight"] = mpf(1) if given.get("window_weight") is None else mpf(given["window_weight"][j].item())
            if hard and h["hard_weight"] is None:
                h["hard_weight"] = [mpf(1) / 2] * T
            for t in range(T):
                x, y, e, f = one_row(t, h, how, keep)
                o[b, t, j], log[b, t, j] = torch.tensor(list(map(float, x)), dtype=o.dtype), float(y)
                o_error[b, t, j], log_error[b, t, j] = torch.tensor(list(map(float, e)), dtype=o.dtype), float(f)
    return o, log, U64 * o_error, U64 * log_error


def within(got, wanted, allowed, what):
    assert got.shape == wanted.shape and not got.isnan().any()
    same = got == wanted                                            # -inf among them
    error = torch.where(same, 0, (got - wanted).abs() / torch.where(same, 1, allowed))
    worst = float(error.max()) if error.numel() else 0.0
    target(worst, label=what)
    assert worst <= 1, f"{what}: {worst:.3g} budgets"


@pytest.mark.parametrize("row", ROWS)
@given(st.data())
def test_every_option_is_the_definition(row, data):
    p = data.draw(problems(row, max_T=7, default=data.draw(st.booleans(), label="only what is required")))
    if p.options.get("window_weight") is not None and data.draw(st.booleans(), label="a head without a window"):
        p.options["window_weight"][0] = 0
    o, log, o_error, log_error = definition(p)
    massless = row == "infini" or p.options.get("own_maximum", row == "lolcats") or p.options.get("integration") == "hard"
    for impl in ("naive", "recurrent"):
        out = p.run(impl)
        within(out.o, o, o_error, f"o, {impl}")
        assert (out.lse is None) == massless
        if out.lse is not None:
            within(out.lse, log, log_error, f"lse, {impl}")


@pytest.mark.parametrize("row", ROWS)
@given(st.data())
def test_what_fits_into_the_window_is_softmax(row, data):
    """A window or a segment of T tokens, or of more than any memory holds, is torch's attention."""
    p = data.draw(problems(row, fixed={"key_mask": None, "sinks": 0}))
    x = {n: y.transpose(1, 2) for n, y in p.inputs.items()}
    T, R = x["q"].shape[2], x["q"].shape[1] // x["k"].shape[1]
    k, v = (x[n].repeat_interleave(R, 1) for n in "kv")
    theirs = scaled_dot_product_attention(x["q"], k, v, is_causal=True, scale=p.options["scale"]).transpose(1, 2)
    for impl in ("naive", "recurrent"):
        for length in (T, 2**60):
            out = p.run(impl, **{"segment" if row == "infini" else "window": length})
            torch.testing.assert_close(out.o, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("row", ("gla_sw", "infini"))
@given(st.data())
def test_hard_integration_mixes_the_attentions_of_others(row, data):
    """b times torch's attention in the window, 1 - b times fla's recurrence over what is before it."""
    gla = pytest.importorskip("fla.ops.gla.naive", reason="flash-linear-attention is not installed").naive_recurrent_gla
    linear = pytest.importorskip("fla.ops.linear_attn.naive", reason="flash-linear-attention is not installed").naive_recurrent_linear_attn
    fixed = {"key_mask": None, "sinks": 0, "integration": "hard"}
    p = data.draw(problems(row, min_T=2, fixed=fixed, dtype=torch.float32))
    given = {n: x.double() if isinstance(x, torch.Tensor) else x for n, x in {**p.inputs, **p.options}.items()}
    R, T = given["q"].shape[2] // given["k"].shape[2], given["q"].shape[1]
    k, v = (given[n].repeat_interleave(R, 2) for n in "kv")
    phi = given.get("feature_map", elu_plus_one)
    phi_q, phi_k, b = phi(given["q"]), phi(k), given["hard_weight"]
    i = torch.arange(T)
    first = i // given["segment"] * given["segment"] if row == "infini" else (i - given["window"] + 1).clamp(min=0)
    local = (i <= i[:, None]) & (i >= first[:, None])
    heads = (x.transpose(1, 2) for x in (given["q"], k, v))
    near = scaled_dot_product_attention(*heads, attn_mask=local, scale=given["scale"]).transpose(1, 2)
    far, Z = torch.zeros_like(near), torch.ones_like(near[..., :1])
    g = given["g"].repeat_interleave(R, 2) if row == "gla_sw" else torch.zeros_like(phi_k)
    both = torch.cat([v, torch.ones_like(v[..., :1])], -1)
    for t in range(T):
        if n := int(first[t]):
            query = phi_q[:, t, None].expand_as(phi_k[:, :n])
            if row == "gla_sw":
                sums = gla(query.float(), phi_k[:, :n].float(), both[:, :n].float(), g[:, :n].float())[0][:, -1].double()
                far[:, t] = sums[..., :-1] / sums[..., -1:]
            else:
                far[:, t] = linear(query.float(), phi_k[:, :n].float(), v[:, :n].float(), scale=1.0, normalize=True)[0][:, -1].double()
            Z[:, t] = (phi_q[:, t] * phi_k[:, n - 1]).sum(-1, keepdim=True)          # no more than the sum that fla divides by
    b = torch.where(first[:, None] > 0, b, 1)[..., None]
    eps = 1e-10 if row == "infini" else 0                                            # which fla adds to that sum
    exponent = torch.where(g.isinf(), 0, g).abs().amax().clamp(max=100)              # of exp, in float32: beyond 100 it is 0
    units = 2 * T + 2 * phi_q.shape[-1] + 10 + T * exponent
    allowed = ((1 - b) * (units * U + eps / Z) + 1e-13) * 2 * v.abs().amax()
    ours = p._replace(inputs={n: given[n] for n in p.inputs}, options={n: given[n] for n in p.options}).run()
    within(ours.o, b * near + (1 - b) * far, allowed.expand_as(near), "o")
