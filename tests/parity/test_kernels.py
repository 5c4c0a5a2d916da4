"""The Triton kernels against float64 references: in the interpreter on a CPU (small chunks, float32 and float16), compiled on a GPU.

Inputs are drawn in the kernel's type and only then made float64, so that nothing but the kernel's own rounding is measured.
"""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import mva_ref as mva
from mva_ref.frame import leaves, tree_map
from mva_ref.naive.levels import before_write
from mva_ref.naive.writes import end_state, slot_scores, slot_values, write_map
from mva_ref.testing.examples import example
from mva_ref.testing.strategies import gates, normal, problems

pytest.importorskip("triton")
from mva_ref.fast.triton import attention, forms, ops

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
ROWS = ("metala", "gsa", "mva")
# Shrinking a failure takes minutes in the interpreter.
QUICK = dict(suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate])
FEW = settings(max_examples=4, **QUICK)
# What a float32 form may be off by, in roundoffs of the largest number of a row and of its tensor's mean; gradients pass several products.
FACTOR, GRADIENT = 64, 512
U = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


@pytest.fixture(autouse=True, scope="module")
def small_chunks():
    """Chunks of 16 tokens in the interpreter, so that a few tokens cross borders."""
    kept = forms.AHEAD, forms.BACK
    if not GPU:
        forms.AHEAD = forms.BACK = 16
    yield
    forms.AHEAD, forms.BACK = kept


def to(x: Any, dtype: torch.dtype) -> Any:
    return tree_map(lambda y: y.detach().to(DEVICE, dtype).clone().requires_grad_() if y.is_floating_point() else y.to(DEVICE), x)


def assert_close(x: torch.Tensor, y: torch.Tensor, bound: float, what: str) -> None:
    """Row by row: no row may hide behind the others."""
    assert x.isfinite().all() or not y.isfinite().all(), what
    if not y.numel():
        return
    size = torch.where(y.isfinite(), y, 0).abs()
    allowed = bound * (size.amax(-1, keepdim=True) + size.mean())
    same = (x.double() - y).abs() <= allowed
    assert (same | (x.double() == y)).all(), f"{what}: {((x.double() - y).abs() / allowed).max():.3g} of what is allowed"


def results(out: mva.Output) -> dict[str, torch.Tensor]:
    found = {"o": out.o} | ({} if out.lse is None else {"lse": torch.where(out.lse.isneginf(), 0, out.lse)})
    return found | {f"state {n}": x for n, x in enumerate(leaves(out.state))}


def compare(row: str, given_: dict[str, Any], dtype: torch.dtype, conditioned: bool = True, **changes: Any) -> None:
    """Outputs, log-mass, states and every gradient."""
    mine, oracle, eager = ({n: to(x, d) for n, x in given_.items()} for d in (dtype, torch.float64, dtype))
    exact = {n: to(tree_map(lambda y: y.to(dtype) if y.is_floating_point() else y, x), torch.float64) for n, x in oracle.items()}
    a, b = mva.attention(row, **mine, impl="triton", **changes), mva.attention(row, **exact, impl="naive", **changes)
    c = mva.attention(row, **eager, impl="naive", **changes) if dtype == torch.float32 else None
    losses = []
    for out in (a, b, c):
        if out is not None:
            parts = results(out)
            rng = torch.Generator().manual_seed(0)
            weight = {n: torch.randn(x.shape, generator=rng).to(DEVICE) for n, x in parts.items()}
            losses.append(sum((torch.where(x.isfinite(), x, 0) * weight[n]).sum() for n, x in parts.items()))
            losses[-1].backward()
    for (what, x), y in zip(results(a).items(), results(b).values(), strict=True):
        assert_close(x.detach(), y.detach(), FACTOR * U[dtype], what)
    for n in given_:
        for x, y, z in zip(leaves((mine[n],)), leaves((exact[n],)), leaves((eager[n],)), strict=True):
            if not x.is_floating_point() or y.grad is None:
                continue
            # where the eager form loses digits too (rho jumps as w -> 0), as many are allowed here
            lost = 0.0 if z.grad is None else float((z.grad.double() - y.grad).abs().max() / (y.grad.abs().max() + 1e-30))
            assert x.grad is not None and x.grad.dtype == x.dtype, n
            assert_close(x.grad, y.grad, GRADIENT * U[dtype] + 8 * lost, f"gradient of {n}")


@pytest.mark.parametrize("row", ROWS)
@FEW
@given(st.data())
def test_every_option_and_every_gradient(row, data):
    read = data.draw(st.sampled_from(("softmax", "softmax", "sigmoid")), label="read")
    p = data.draw(problems(row, max_T=33, dtype=torch.float32, fixed={"read": read}))
    compare(row, {**p.inputs, **p.options}, torch.float32, output_final_state=True)


@pytest.mark.parametrize("row", ROWS)
@FEW
@given(st.data())
def test_an_initial_state(row, data):
    p = data.draw(problems(row, max_T=18, dtype=torch.float32, fixed={"read": "softmax", "branches": "shared"}))
    state = p.run("naive", output_final_state=True).state
    state = type(state)(*(None if x is None else x - 0.1 for x in state))
    compare(row, {**p.inputs, **p.options, "initial_state": state}, torch.float32, output_final_state=True)


@pytest.mark.parametrize("dtype", [torch.float16, *([torch.bfloat16] if GPU else [])])
@pytest.mark.parametrize("row", ROWS)
def test_half_precision(row, dtype):
    """Both ways through a chunk: with one reference where gates are gentle, by levels where they are steep."""
    for steep in (False, True):
        p = example(row, B=1, H=2, HQ=4, T=21, D=16, V=8, M=5, L=2)
        given_ = {n: x.clone() for n, x in {**p.inputs, **p.options}.items()}
        for n in ("g", "g_levels"):
            if n in given_ and steep:
                given_[n].select(-3, 7).fill_(-90.0)
                given_[n].select(-3, 20).fill_(-torch.inf)
        compare(row, given_, dtype)


@pytest.mark.parametrize("kind", [torch.float32, torch.float16], ids=["levels", "one reference where gentle"])
@pytest.mark.parametrize("excl", [False, True])
@settings(max_examples=4, **QUICK)
@given(st.data())
def test_scores_and_values_of_slots(excl, kind, data):
    """P28: both operations and their gradients, packed sequences and initial states, for extreme and ordinary gates."""
    H, R, D, M = (data.draw(st.integers(1, n), label=label) for n, label in ((2, "H"), (2, "R"), (5, "D"), (18, "M")))
    ends = [0, *sorted(data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=3), label="ends")), 40]
    T, N, HQ = ends[-1], len(ends) - 1, H * R
    q, k, p, K0 = (data.draw(normal(*shape, dtype=torch.float32)) for shape in ((T, HQ, D), (T, H, D), (T, HQ, M), (N, H, M, D)))
    g = data.draw(gates(T, H, M, dtype=torch.float32))
    chunk = 32 if GPU else 16               # tiles of 16 x 16 are not compiled: docs/decisions.md
    call = (ends, chunk, chunk, kind)

    def naive(read: bool, x: torch.Tensor, y: torch.Tensor, g: torch.Tensor, X0: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        parts, last = [], []
        for n in range(N):
            span = slice(ends[n], ends[n + 1])
            maps = write_map(g[None, span])
            if read:
                parts.append(slot_scores(x[None, span], y[None, span], maps, X0[n : n + 1], 0.7)[0].flatten(1, 2))
            else:
                parts.append(slot_values(x[None, span].unflatten(2, (H, R)), y[None, span], before_write(maps) if excl else maps,
                                         X0[n : n + 1])[0].flatten(1, 2))
            last.append(end_state(g[None, span], y[None, span], X0[n : n + 1])[0])
        return torch.cat(parts), torch.stack(last)

    for read, inputs in ((True, (q, k, g, K0)), (False, (p, k, g, K0))):
        mine, oracle = ([to(x, d) for x in inputs] for d in (torch.float32, torch.float64))
        o, end = ops.slot_scores(*mine, *call, 0.7) if read else ops.slot_values(*mine, *call, excl)
        exact, exact_end = naive(read, *oracle)
        weight, weight_end = torch.randn_like(exact), torch.randn_like(exact_end)
        ((o * weight).sum() + (end * weight_end).sum()).backward()
        ((exact * weight).sum() + (exact_end * weight_end).sum()).backward()
        bound = FACTOR * 2.0 ** (-24 if kind == torch.float32 or not GPU else -11)      # the interpreter multiplies in float32
        assert_close(o.detach(), exact.detach(), bound, "o")
        assert_close(end.detach(), exact_end.detach(), bound, "end")
        for x, y in zip(mine, oracle, strict=True):
            assert_close(x.grad, y.grad, 8 * bound, "gradient")


@pytest.mark.parametrize("row", ROWS)
def test_two_calls_are_one_and_packed_sequences_are_sequences(row):
    p = example(row, B=1, T=37, dtype=torch.float32)
    given_ = {n: x.to(DEVICE) for n, x in p.inputs.items()}
    axis = {n: 2 if n == "g_levels" else 1 for n in given_}

    def part(a: int, b: int) -> dict[str, torch.Tensor]:
        return {n: x.narrow(axis[n], a, b - a) for n, x in given_.items()}

    whole = mva.attention(row, **given_, impl="triton", output_final_state=True)
    first = mva.attention(row, **part(0, 21), impl="triton", output_final_state=True)
    second = mva.attention(row, **part(21, 37), impl="triton", output_final_state=True, initial_state=first.state)
    torch.testing.assert_close(torch.cat([first.o, second.o], 1), whole.o, rtol=1e-5, atol=1e-5)
    for x, y in zip(leaves(second.state), leaves(whole.state), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
    cu = torch.tensor([0, 21, 21, 37], dtype=torch.int32, device=DEVICE)
    packed = mva.attention(row, **given_, impl="triton", output_final_state=True, cu_seqlens=cu)
    alone = [mva.attention(row, **part(a, b), impl="triton", output_final_state=True) for a, b in ((0, 21), (21, 37))]
    torch.testing.assert_close(packed.o, torch.cat([x.o for x in alone], 1), rtol=1e-5, atol=1e-5)
    for n, x in ((0, alone[0]), (2, alone[1])):
        for y, z in zip(leaves(packed.state), leaves(x.state), strict=True):
            torch.testing.assert_close(y[n : n + 1], z, rtol=1e-5, atol=1e-5)
    assert all(not x[1].any() for x in leaves(packed.state))


@pytest.mark.parametrize("row", ROWS)
def test_inputs_stay_repeats_are_equal_and_strides_do_not_matter(row):
    p = example(row, B=1, T=19, dtype=torch.float32)
    given_ = {n: x.to(DEVICE).requires_grad_() for n, x in p.inputs.items()}
    copies = {n: x.detach().clone() for n, x in given_.items()}
    grads = []
    for strided in (False, False, True):
        use = {n: x.transpose(0, -1).contiguous().transpose(0, -1) if strided else x for n, x in given_.items()}
        out = mva.attention(row, **use, impl="triton").o
        grads.append([out, *torch.autograd.grad(out.sum(), list(given_.values()))])     # the upstream gradient is an expanded scalar
    once, again, transposed = grads
    assert all(torch.equal(x, y) for x, y in zip(once, again, strict=True))
    for x, y in zip(once, transposed, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(x, copies[n]) for n, x in given_.items())


@pytest.mark.parametrize("row", ROWS)
def test_nothing_beyond_a_tensor_is_read(row):
    """Inputs in the middle of buffers of NaN give the same bits."""
    p = example(row, B=1, T=19, dtype=torch.float32)

    def guarded(x: torch.Tensor) -> torch.Tensor:
        buffer = torch.full((x.numel() + 4096,), torch.nan, device=DEVICE)
        buffer[2048:-2048] = x.flatten().to(DEVICE)
        return buffer[2048:-2048].view(x.shape)

    plain, safe = ({n: f(x).requires_grad_() for n, x in p.inputs.items()} for f in (lambda x: x.to(DEVICE).clone(), guarded))
    outs = [mva.attention(row, **x, impl="triton").o for x in (plain, safe)]
    assert torch.equal(*outs)
    for out in outs:
        out.sum().backward()
    assert all(torch.equal(plain[n].grad, safe[n].grad) for n in plain)


@pytest.mark.parametrize("row", ROWS)
def test_float64_is_refused(row):
    with pytest.raises(mva.ArgumentError, match="computes in float32"):
        example(row).run("triton")


@pytest.mark.parametrize("row", ROWS)
def test_second_derivatives_are_refused(row):
    given_ = {n: x.to(DEVICE).requires_grad_() for n, x in example(row, dtype=torch.float32).inputs.items()}
    (first,) = torch.autograd.grad(mva.attention(row, **given_, impl="triton").o.square().sum(), [given_["v"]], create_graph=True)
    with pytest.raises(RuntimeError, match=r"autograd|differentiable"):
        first.sum().backward()


def call_and_gradients(f: Any, x: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    out = f(**x)
    return [out, *torch.autograd.grad(out.square().sum(), list(x.values()))]


@pytest.mark.parametrize("row", ROWS)
def test_autocast_checkpointing_and_compilation_change_no_bit(row):
    """Inside a model: under autocast, recomputed by activation checkpointing, and as an operator that torch.compile does not look into."""
    p = example(row, B=1, T=19, dtype=torch.float32)
    x = {n: y.to(DEVICE).requires_grad_() for n, y in p.inputs.items()}

    def layer(**given: torch.Tensor) -> torch.Tensor:
        return 2 * mva.attention(row, **{n: 1.0 * y for n, y in given.items()}, impl="triton").o

    eager = call_and_gradients(layer, x)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        under_autocast = call_and_gradients(layer, x)
    torch.compiler.reset()
    ways = {
        "autocast": under_autocast,
        "checkpoint": call_and_gradients(lambda **y: checkpoint(layer, use_reentrant=False, **y), x),
        "compile": call_and_gradients(torch.compile(layer, backend="aot_eager"), x),
    }
    for way, found in ways.items():
        assert all(torch.equal(a, b) for a, b in zip(eager, found, strict=True)), way


@pytest.mark.parametrize("excl", [False, True])
def test_the_operators_are_what_they_declare(excl):
    """torch.library's own check: schemas, fake implementations, registered gradients."""
    q, k, v, g = (x.float().flatten(0, 1) for x in example("gsa", B=1, T=5).inputs.values())
    K0, V0, p = torch.randn(1, g.shape[1], 7, 3), torch.randn(1, g.shape[1], 7, 6), torch.randn(5, q.shape[1], 7)
    call = ([0, 5], 16, 16, torch.float32)
    grad = [x.to(DEVICE).requires_grad_() for x in (q, k, v, g, K0, V0, p)]
    q, k, v, g, K0, V0, p = grad
    for op, args in (
        (ops.slot_scores, (q, k, g, K0, *call, 0.7)), (ops.slot_values, (p, v, g, V0, *call, excl)),
        (attention.slot_attention, (q, k, v, g, None, p, K0, V0, *call, 0.7, "pre" if excl else "post")),
    ):
        torch.library.opcheck(op, args, test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("T", "HQ", "H", "D", "V", "M", "L"), [
    (300, 8, 2, 128, 128, 64, 2), (129, 4, 4, 64, 64, 64, 3), (65, 2, 1, 100, 72, 33, 1), (31, 2, 2, 256, 256, 128, 1),
])
def test_real_sizes(T, HQ, H, D, V, M, L, dtype):
    p = example("mva", B=2, T=T, HQ=HQ, H=H, D=D, V=V, M=M, L=L)
    r = torch.randn(2, T, HQ, M, generator=torch.Generator().manual_seed(1))
    compare("mva", {**p.inputs, "low_query": r}, dtype)


@pytest.mark.gpu
def test_on_a_gpu_the_kernel_is_chosen():
    x = {n: y.cuda() for n, y in example("gsa", dtype=torch.float32).inputs.items()}
    assert torch.equal(mva.gsa(**x).o, mva.gsa(**x, impl="triton").o)


@pytest.mark.gpu
def test_a_cuda_graph_replays():
    x = {n: y.cuda() for n, y in example("gsa", T=65, dtype=torch.float32).inputs.items()}
    eager = mva.gsa(**x).o
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = mva.gsa(**x).o
    out.zero_()
    graph.replay()
    assert torch.equal(out, eager)
