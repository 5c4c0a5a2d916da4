"""The linear recurrences with decay against implementations that others wrote: plain torch of fla and of transformers, on a CPU.

They compute in float32. So the inputs are drawn in float32, ours runs on the same numbers in float64, and a row may differ by

    budget(row) = c u cond(row),   u = 2^-24,   c = 4 T + D + 8, and + sum |g| where exponents are summed before exp

cond is the row with the absolute value in place of every factor. c counts roundings: a term passes T steps with a decay, its exp
(two roundings), and a sum; then D products are added; queries, scale and writes take a few. A rounded exponent g changes its term by
u |g|. Gradients have the same cond, of the gradient, and twice the roundings, with a sum over V. Nothing is absolute.
"""

from typing import Any

import pytest
import torch
from hypothesis import currently_in_test_context, given, target
from hypothesis import strategies as st
from torch import Tensor

import mva_ref as mva
from mva_ref.frame import tree_map
from mva_ref.naive.baselines.gla import gla_gates
from mva_ref.naive.baselines.mamba2 import rates, time_step
from mva_ref.naive.baselines.retnet import retnet_decay
from mva_ref.naive.baselines.rwkv6 import rwkv6_gates
from mva_ref.naive.baselines.supra import supra_decay, supra_features
from mva_ref.testing.examples import axes
from mva_ref.testing.strategies import Problem, normal, problems

U = 2.0**-24
PLAIN = {"key_mask": None, "scale": None}
ORDINARY_DECAYS = {"g": -0.7, "A": -0.7, "head_decay": -0.7}


def outside(module: str, function: str) -> Any:
    """A function of somebody else's package; skips where that is not installed."""
    reason = f"{module.partition('.')[0]} is not installed: no outside implementation to compare with"
    return getattr(pytest.importorskip(module, reason=reason, exc_type=ImportError), function)


def double(x: Any) -> Any:
    return tree_map(lambda t: t.double() if t.is_floating_point() else t, x)


def ours(p: Problem, state: Any = None, absolute: bool = False) -> Any:
    """Our result in float64; with absolute=True the condition sums: every factor that has a sign by its absolute value."""
    given_ = {n: double(x) for n, x in {**p.inputs, **p.options}.items()}
    if absolute:
        given_ |= {n: x.abs() for n, x in given_.items() if isinstance(x, Tensor) and n not in ORDINARY_DECAYS}
    state = None if state is None else tree_map(lambda x: x.double().abs() if absolute else x.double(), state)
    return mva.attention(p.name, **given_, initial_state=state, output_final_state=True)


def heads(p: Problem) -> dict[str, Tensor]:
    """What the others take: every tensor with the KV heads repeated for the query heads."""
    R, axis = p.inputs["q"].shape[2] // p.inputs["k"].shape[2], axes(p.name, "H")
    tensors = {n: x for n, x in {**p.inputs, **p.options}.items() if isinstance(x, Tensor)}
    return {n: x.repeat_interleave(R, axis[n]) if n in axis else x for n, x in tensors.items()}


def heads_first(*x: Tensor) -> list[Tensor]:
    return [y.transpose(1, 2) for y in x]


def steps(p: Problem, exponents: float = 0.0) -> float:
    """The constant c of the budget."""
    return 4 * p.inputs["q"].shape[1] + p.inputs["q"].shape[-1] + 8 + exponents


def assert_within(got: Tensor, wanted: Tensor, condition: Tensor, c: float, what: str = "o") -> None:
    assert got.shape == wanted.shape and got.isfinite().all()
    error, budget = (got.double() - wanted).abs(), c * U * condition
    worst = float(torch.where(error == 0, 0, error / budget).max()) if error.numel() else 0.0
    if currently_in_test_context():
        target(worst, label=what)
    assert worst <= 1, f"{what}: {worst:.3g} budgets"


def assert_output(p: Problem, o: Tensor, S: Tensor | None = None, state: Any = None, exponents: float = 0.0, what: str = "o") -> None:
    """Output and, where given with query heads, state are ours within the budget."""
    wanted, condition = ours(p, state), ours(p, state, absolute=True)
    assert_within(o, wanted.o, condition.o, steps(p, exponents), what)
    if S is not None:
        R = p.inputs["q"].shape[2] // p.inputs["k"].shape[2]
        repeated = [x.state.S.repeat_interleave(R, 1) for x in (wanted, condition)]
        assert_within(S, *repeated, steps(p, exponents), f"state beside {what}")


def assert_gradients(p: Problem, names: tuple[str, ...], theirs: Any, upstream: Tensor) -> None:
    """Gradients of the query-head tensors agree; `theirs` maps what `heads` gives to o."""
    def gradients(f: Any, x: dict[str, Tensor], do: Tensor) -> tuple[Tensor, ...]:
        x = {n: t.detach().clone().requires_grad_(n in names) for n, t in x.items()}
        found: tuple[Tensor, ...] = torch.autograd.grad(f(x), [x[n] for n in names], do, materialize_grads=True)
        return found

    def mine(x: dict[str, Tensor]) -> Tensor:
        o: Tensor = mva.attention(p.name, **x).o
        return o

    x = heads(p)
    wanted = gradients(mine, double_all(x), upstream.double())
    size = {n: t.abs() if n not in ORDINARY_DECAYS else t for n, t in double_all(x).items()}
    condition = gradients(mine, size, upstream.double().abs())
    c = 2 * steps(p) + p.inputs["v"].shape[-1]
    for n, got, want, cond in zip(names, gradients(theirs, x, upstream), wanted, condition, strict=True):
        assert_within(got, want, cond, c, f"d{n}")


def double_all(x: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: t.double() for n, t in x.items()}


def ordinary(p: Problem) -> Problem:
    """The same problem with decays between -0.7 and 0, where sums of exponents keep their digits."""
    def part(n: str, x: Any) -> Any:
        if n not in ORDINARY_DECAYS or x is None:
            return x
        return ORDINARY_DECAYS[n] * torch.rand(x.shape, generator=torch.Generator().manual_seed(x.numel()), dtype=torch.float64).to(x.dtype)
    return p._replace(inputs={n: part(n, x) for n, x in p.inputs.items()}, options={n: part(n, x) for n, x in p.options.items()})


def in_sight(g: Tensor) -> float:
    """The sum of |g| over the tokens; a decay below exp(-80) counts as none, since it leaves less than a rounding."""
    return float(torch.where(g < -80, 0, g).abs().sum(1).max())


def rounded_steps(x: Tensor, g: Tensor) -> float:
    """What a time step softplus(x) in float32 adds to c: its relative error is (|x| + 4) u, in every write and exponent."""
    return (4 + float(x.abs().max())) * (1 + in_sight(g))


def state_for(data: st.DataObject, p: Problem) -> tuple[Any, Tensor | None]:
    """A state to start from or none, and the same for every query head."""
    if not data.draw(st.booleans(), label="initial state"):
        return None, None
    (B, _, HQ, D), (H, V) = p.inputs["q"].shape, p.inputs["v"].shape[2:]
    S = data.draw(normal(B, H, D, V, label="state", dtype=torch.float32))
    return mva.MatrixState(S), S.repeat_interleave(HQ // H, 1)


def draw(data: st.DataObject, name: str, **fixed: Any) -> Problem:
    p: Problem = data.draw(problems(name, dtype=torch.float32, fixed={**PLAIN, **fixed}))
    return p


@given(st.data())
def test_gla(data):
    """GLA is fla's recurrence, for every gate."""
    naive_recurrent_gla = outside("fla.ops.gla.naive", "naive_recurrent_gla")
    p = draw(data, "gla")
    state, S = state_for(data, p)
    x = heads(p)
    assert_output(p, *naive_recurrent_gla(x["q"], x["k"], x["v"], x["g"], S, True), state)


@given(st.data())
def test_gla_gradients(data):
    """The gradients of GLA are those of fla's recurrence."""
    naive_recurrent_gla = outside("fla.ops.gla.naive", "naive_recurrent_gla")
    p = ordinary(draw(data, "gla"))
    do = data.draw(normal(*p.inputs["q"].shape[:3], p.inputs["v"].shape[-1], label="do", dtype=torch.float32))
    assert_gradients(p, ("q", "k", "v", "g"), lambda x: naive_recurrent_gla(x["q"], x["k"], x["v"], x["g"])[0], do)


@pytest.mark.parametrize("bias", [False, True])
def test_gates_are_maps_of_each_head(bias):
    """Decays of GLA are sigmoid(y)^(1/16) and of RWKV-6 exp(-exp(y)), with y the head's own linear map of its channels."""
    rng = torch.Generator().manual_seed(0)
    x, W, b = (torch.randn(*shape, generator=rng, dtype=torch.float64) for shape in ((2, 3, 2, 4), (2, 4, 4), (2, 4)))
    y = torch.stack([torch.nn.functional.linear(x[:, :, h], W[h].T, b[h] if bias else None) for h in range(2)], 2)
    given_ = (x, W, b) if bias else (x, W)
    torch.testing.assert_close(gla_gates(*given_).exp(), y.sigmoid() ** (1 / 16), rtol=1e-13, atol=0)
    torch.testing.assert_close(rwkv6_gates(*given_).exp(), (-y.exp()).exp(), rtol=1e-11, atol=0)


@given(st.data())
def test_retnet(data):
    """RetNet with its own decays is fla's retention, heads by index."""
    naive_retention = outside("fla.ops.retention.naive", "naive_retention")
    p = draw(data, "retnet", head_decay=None)
    p = p._replace(inputs=heads(p))                                                 # its decay counts all heads
    exponents = p.inputs["q"].shape[1] * float(retnet_decay(1).abs())
    assert_output(p, naive_retention(*heads_first(*p.inputs.values())).transpose(1, 2), exponents=exponents)


@pytest.mark.parametrize("row", ["retnet", "supra"])
@given(st.data())
def test_fixed_decays(row, data):
    """RetNet and SUPRA with any decay a head are fla's simple GLA with constant gates: recurrence, matrix and chunks."""
    functions = [outside("fla.ops.simple_gla.naive", f"naive_{form}_simple_gla") for form in ("recurrent", "parallel", "chunk")]
    p = draw(data, row)
    if p.options["head_decay"] is None:
        default = {"retnet": retnet_decay, "supra": supra_decay}[row](p.inputs["k"].shape[2]).float()
        p = p._replace(options={**p.options, "head_decay": default})
    state, S = state_for(data, p)
    x = heads(p)
    g = x["head_decay"].expand(*x["q"].shape[:3])
    assert_output(p, *functions[0](x["q"], x["k"], x["v"], g, initial_state=S), state)
    p = ordinary(p)
    x = heads(p)
    g = x["head_decay"].expand(*x["q"].shape[:3])
    exponents = float(g.abs().sum(1).max())
    o, A = functions[1](x["q"], x["k"], x["v"], g)
    assert_output(p, o, exponents=exponents, what="o of the matrix")
    absolute = {n: t.abs() if n in ("q", "k") else t for n, t in double_all(x).items()}
    assert_within(A, mva.weights(row, **double_all(x)), mva.weights(row, **absolute), steps(p, exponents), "A")
    size = data.draw(st.integers(1, 4), label="chunk")
    assert_output(p, *functions[2](x["q"], x["k"], x["v"], g, S, True, size), state, 2 * exponents, "o of chunks")


@pytest.mark.parametrize("H", [1, 2, 3, 8, 12, 32])
def test_supra_decays_are_alibi_slopes(H):
    """The decays of SUPRA are the slopes of ALiBi, here BLOOM's, also where H is no power of two."""
    alibi = outside("transformers.models.bloom.modeling_bloom", "build_alibi_tensor")(torch.ones(1, 2), H, torch.float32)
    slopes = alibi[:, 0, 1].double()
    assert_within(-slopes, supra_decay(H), slopes, 2.0 * H)             # a power of a rounded base


@pytest.mark.parametrize(("H", "decays"), [(32, {0: -(2**-0.25), 31: -(2.0**-8)}), (8, {0: -0.5, 7: -(2.0**-8)})])
def test_supra_decays_of_its_models(H, decays):
    """The fastest and the slowest decay, from r^(h+1) with r = 2^(-2^(-(log2 H - 3)))."""
    for h, decay in decays.items():
        assert supra_decay(H)[h].item() == pytest.approx(decay, rel=1e-15)


@given(st.data())
def test_supra_features(data):
    """The features of SUPRA are ReLU of one linear map over all heads, then the rotation of Llama; positions go on from `start`."""
    llama = "transformers.models.llama.modeling_llama"
    embedding, rotate = outside(llama, "LlamaRotaryEmbedding"), outside(llama, "apply_rotary_pos_emb")
    config = outside("transformers", "LlamaConfig")
    B, T, H, half = (data.draw(st.integers(1, n), label=label) for n, label in ((2, "B"), (6, "T"), (3, "H"), (3, "D / 2")))
    D, start = 2 * half, data.draw(st.integers(0, 20), label="start")
    x, W, b = (data.draw(normal(*s, label="x, W, b", dtype=torch.float32)) for s in ((B, T, H, D), (H * D, H * D), (H * D,)))
    cos, sin = embedding(config(hidden_size=H * D, num_attention_heads=H, head_dim=D))(x, torch.arange(start, start + T)[None])
    y = torch.nn.functional.linear(x.flatten(2), W.T, b).relu().view(x.shape)
    theirs = rotate(y, y, cos, sin, unsqueeze_dim=2)[0]
    wanted = supra_features(*double((x, W, b)), start=start)
    size = (x.abs().double().flatten(2) @ W.abs().double() + b.abs().double()).view(x.shape)
    turned = size + size.roll(half, -1)                                             # both channels of a pair, |cos| and |sin| at most 1
    assert_within(theirs, wanted, turned, H * D + 2 * (start + T) + 8)


@given(st.data())
def test_mamba2(data):
    """Mamba-2 is fla's simple GLA with q = C, k = B, v = dt x, g = dt A, for every rate."""
    naive_recurrent_simple_gla = outside("fla.ops.simple_gla.naive", "naive_recurrent_simple_gla")
    p = draw(data, "mamba2", skip=None)
    state, S = state_for(data, p)
    x = heads(p)
    g = x["dt"] * x["A"]
    got = naive_recurrent_simple_gla(x["q"], x["k"], x["dt"][..., None] * x["v"], g, 1.0, S)
    assert_output(p, *got, state, in_sight(g))


@given(st.data())
def test_mamba2_chunks(data):
    """Mamba-2 is the chunked scan of transformers: skip, states, time steps, and B and C that groups of heads share."""
    chunk_scan = outside("transformers.models.mamba2.modeling_mamba2", "mamba2_chunk_scan")
    p = ordinary(draw(data, "mamba2"))
    (B, T, G, D), H = p.inputs["k"].shape, p.inputs["k"].shape[2] * data.draw(st.integers(1, 2), label="heads a group")
    V = p.inputs["v"].shape[-1]
    A, skip, bias = (data.draw(normal(H, scale=0.5, label=n, dtype=torch.float32)) for n in ("A", "skip", "bias"))
    v, raw = (data.draw(normal(B, T, H, *s, label="v, dt", dtype=torch.float32)) for s in ((V,), ()))
    first = data.draw(normal(B, H, D, V, label="state", dtype=torch.float32))
    shared = {n: p.inputs["q" if n == "C" else "k"][:, :, :G] for n in ("B", "C")}
    o, S = chunk_scan(v, raw, rates(A), shared["B"], shared["C"], data.draw(st.integers(1, 4), label="chunk"), D=skip, dt_bias=bias,
                      initial_states=first.mT.contiguous(), dt_softplus=True, return_final_states=True)
    dt = time_step(*double((raw, bias)))
    mine = Problem("mamba2", {**{n: shared[m].repeat_interleave(H // G, 2) for n, m in (("q", "C"), ("k", "B"))}, "v": v, "dt": dt},
                   {"A": rates(A.double()), "skip": skip})
    exponents = rounded_steps(raw + bias, dt * rates(A.double()))
    assert_output(mine, o, S.mT, mva.MatrixState(first), exponents)


@given(st.data())
def test_mamba(data):
    """Mamba is the selective scan of transformers, heads side by side as channels that share B and C."""
    scan = outside("transformers.models.mamba.modeling_mamba", "mamba_selective_scan")
    p = draw(data, "mamba")
    q, k = (x[:, :, :1] for x in (p.inputs["q"], p.inputs["k"]))
    v, A, skip = p.inputs["v"], p.options["A"], p.options["skip"]
    H = v.shape[2]
    raw, bias = p.inputs["dt"], data.draw(normal(H, v.shape[-1], label="bias", dtype=torch.float32))
    channels = [x.flatten(2).transpose(1, 2) for x in (v, raw)]
    o, S = scan(*channels, A.flatten(0, 1), k[:, :, 0].mT, q[:, :, 0].mT, None if skip is None else skip.flatten(),
                delta_bias=bias.flatten(), delta_softplus=True, return_last_state=True)
    dt = time_step(*double((raw, bias)))
    mine = Problem("mamba", {"q": q.expand(-1, -1, H, -1), "k": k.expand(-1, -1, H, -1), "v": v, "dt": dt}, {"A": A, "skip": skip})
    exponents = rounded_steps(raw + bias, dt[..., None] * A.double())
    assert_output(mine, o.transpose(1, 2).unflatten(2, v.shape[2:]), S.unflatten(1, v.shape[2:]).mT, exponents=exponents)


@given(st.data())
def test_mamba_goes_on_from_a_state(data):
    """One more token of Mamba is the state update of transformers."""
    update = outside("transformers.models.mamba.modeling_mamba", "mamba_selective_state_update")
    p = data.draw(problems("mamba", max_T=1, dtype=torch.float32, fixed=PLAIN))
    p = ordinary(p._replace(inputs={n: x[:, :, :1] for n, x in p.inputs.items()},
                            options={n: None if x is None else x[:1] if n in ("A", "skip") else x for n, x in p.options.items()}))
    q, k, v, dt = p.inputs.values()
    first = data.draw(normal(v.shape[0], 1, q.shape[-1], v.shape[-1], label="state", dtype=torch.float32))
    state, skip = first[:, 0].mT.clone(), p.options["skip"]                          # it is written to
    o = update(state, v[:, 0, 0], dt[:, 0, 0], p.options["A"][0], k[:, 0, 0], q[:, 0, 0], None if skip is None else skip[0])
    exponents = float(dt.max())
    assert_output(p, o[:, None, None], state.mT[:, None], mva.MatrixState(first), exponents)


@given(st.data())
def test_rwkv6(data):
    """RWKV-6 is fla's recurrence, for every gate."""
    naive_recurrent_rwkv6 = outside("fla.ops.rwkv6.recurrent_naive", "naive_recurrent_rwkv6")
    p = draw(data, "rwkv6")
    state, S = state_for(data, p)
    x = heads(p)
    u = x.pop("u")
    o, end = naive_recurrent_rwkv6(*heads_first(*x.values()), u, 1.0, S, True)
    assert_output(p, o.transpose(1, 2), end, state)


@given(st.data())
def test_rwkv6_gradients(data):
    """The gradients of RWKV-6, bonus included, are those of fla's recurrence."""
    naive_recurrent_rwkv6 = outside("fla.ops.rwkv6.recurrent_naive", "naive_recurrent_rwkv6")
    p = ordinary(draw(data, "rwkv6"))
    do = data.draw(normal(*p.inputs["q"].shape[:3], p.inputs["v"].shape[-1], label="do", dtype=torch.float32))

    def theirs(x):
        return naive_recurrent_rwkv6(*heads_first(*(x[n] for n in "qkvg")), x["u"], 1.0)[0].transpose(1, 2)

    assert_gradients(p, ("q", "k", "v", "g", "u"), theirs, do)


@pytest.mark.parametrize("form", ["parallel", "chunk"])
def test_a_decay_of_minus_infinity(form):
    """Where fla's matrix and chunks subtract sums of exponents, -inf minus -inf is NaN; its recurrence, and ours, forget the past."""
    recurrent, other = (outside("fla.ops.simple_gla.naive", f"naive_{name}_simple_gla") for name in ("recurrent", form))
    one = torch.ones(1, 1, 1, 1)
    g = torch.full((1, 1, 1), -torch.inf)
    assert other(one, one, one, g)[0].isnan().all()
    assert recurrent(one, one, one, g)[0].item() == mva.retnet(one, one, one, head_decay=g[0, 0]).o.item() == 1


def test_no_time_and_no_memory():
    """An infinite rate over no time keeps the state, as the limit of large rates does; in transformers' scan 0 times inf is NaN."""
    scan = outside("transformers.models.mamba.modeling_mamba", "mamba_selective_scan")
    v, dt = torch.ones(1, 1, 2), torch.tensor([[[1.0, 0.0]]])                       # b c t
    assert scan(v, dt, torch.tensor([[-torch.inf]]), v, v).isnan().flatten().tolist() == [False, True]
    wanted = scan(v, dt, torch.tensor([[-1e6]]), v, v).flatten().tolist()
    one, A = torch.ones(1, 2, 1, 1), torch.tensor([[[-torch.inf]]])
    assert mva.mamba(one, one, one, dt.mT[..., None], A).o.flatten().tolist() == wanted == [1, 1]
