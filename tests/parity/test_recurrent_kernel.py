"""The recurrent Triton kernel against float64 references, in the interpreter on a CPU or compiled on a GPU, and what decoding rests on."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import mva_ref as mva
from mva_ref.frame import TIME_AXIS, leaves, tree_map
from mva_ref.testing.examples import example
from mva_ref.testing.strategies import problems

from .test_kernels import DEVICE, FACTOR, GPU, GRADIENT, QUICK, ROWS, U, assert_close, results, small_chunks, to  # noqa: F401

pytest.importorskip("triton")
from mva_ref.fast.triton import steps

FORM = "triton_recurrent"


def compare(row: str, given_: dict[str, Any], dtype: torch.dtype = torch.float32, gradients: bool = False, **changes: Any) -> None:
    """Outputs, log-mass, states and, if asked for, every gradient."""
    mine = {n: to(x, dtype) for n, x in given_.items()}
    exact, eager = {n: to(x, torch.float64) for n, x in mine.items()}, {n: to(x, dtype) for n, x in mine.items()}
    with torch.set_grad_enabled(gradients):
        outs = [mva.attention(row, **x, impl=impl, output_final_state=True, **changes)
                for x, impl in ((mine, FORM), (exact, "naive"), (eager, "naive"))]
    for (what, x), y in zip(results(outs[0]).items(), results(outs[1]).values(), strict=True):
        assert_close(x.detach(), y.detach(), FACTOR * U[dtype], what)
    for out in outs if gradients else ():
        rng, losses = torch.Generator().manual_seed(0), []
        for x in results(out).values():
            weight = torch.randn(x.shape, generator=rng).to(DEVICE)
            losses.append((torch.where(x.isfinite(), x, 0) * weight).sum().double())
        torch.stack(losses).sum().backward()
    for n in given_ if gradients else ():
        for x, y, z in zip(leaves((mine[n],)), leaves((exact[n],)), leaves((eager[n],)), strict=True):
            if x.is_floating_point() and y.grad is not None:
                # where the eager form loses digits too (rho jumps as w -> 0), as many are allowed here
                lost = float((z.grad.double() - y.grad).abs().max() / (y.grad.abs().max() + 1e-30)) if y.numel() else 0.0
                assert x.grad is not None and x.grad.dtype == x.dtype, n
                assert_close(x.grad, y.grad, GRADIENT * U[dtype] + 8 * lost, f"gradient of {n}")


def part(given_: dict[str, Any], a: int, b: int) -> dict[str, Any]:
    """Tokens a to b of the arguments of a call."""
    return {n: x.narrow(TIME_AXIS[n], a, b - a) if n in TIME_AXIS else x for n, x in given_.items()}


def arguments(row: str, **sizes: int) -> dict[str, torch.Tensor]:
    """A call's inputs; for MVA with a low-order branch that has slots of its own."""
    p = example(row, dtype=torch.float32, **sizes)
    if row != "mva":
        return {n: x.to(DEVICE) for n, x in p.inputs.items()}
    low = {"low_query": torch.randn(*p.inputs["q"].shape[:3], p.inputs["g_levels"].shape[-1], generator=torch.Generator().manual_seed(1)),
           "low_g": p.inputs["g_levels"][0] - 0.1}
    return {n: x.to(DEVICE) for n, x in {**p.inputs, **low}.items()}


def call(row: str, given_: dict[str, Any], **changes: Any) -> mva.Output:
    branches = {"branches": "separate"} if "low_g" in given_ else {}
    return mva.attention(row, **{**given_, **branches, "impl": FORM, **changes})


@pytest.mark.parametrize("row", ROWS)
@settings(max_examples=14, **QUICK)
@given(st.data())
def test_every_option(row, data):
    p = data.draw(problems(row, max_T=6, dtype=torch.float32))
    compare(row, {**p.inputs, **p.options})


@pytest.mark.parametrize("row", ROWS)
@settings(max_examples=2, **QUICK)
@given(st.data())
def test_an_initial_state_and_every_gradient(row, data):
    p = data.draw(problems(row, max_T=4, dtype=torch.float32))
    state = p.run("naive", output_final_state=True).state
    state = type(state)(*(None if x is None else x - 0.1 for x in state))
    compare(row, {**p.inputs, **p.options, "initial_state": state}, gradients=True)


@pytest.mark.parametrize("read", ["softmax", "sigmoid", 0, 3, 16])
def test_options_of_each_level_and_high_orders(read):
    """Biases, and perceptrons, that differ between levels and heads."""
    p, rng = example("mva", B=1, T=3, L=3), torch.Generator().manual_seed(1)
    options = {"slot_bias": torch.randn(3, 1, 1, 4, 7, generator=rng), "read": read}
    if read == "sigmoid":
        options["perceptron"] = torch.randn(3, 4, 7, 7, generator=rng), torch.randn(3, 1, 7, generator=rng)
    compare("mva", {**p.inputs, **options}, residual="pre")


def test_self_augmentation():
    p = example("metala", T=3)
    compare("metala", {**p.inputs, "self_augmentation": torch.randn(4, 7)}, gradients=True)


@pytest.mark.parametrize("dtype", [torch.float16, *([torch.bfloat16] if GPU else [])])
@pytest.mark.parametrize("row", ROWS)
def test_half_precision(row, dtype):
    compare(row, example(row, B=1, D=16, V=8).inputs, dtype, gradients=True)


@pytest.mark.parametrize("row", ROWS)
def test_two_calls_are_one_and_packed_sequences_are_sequences(row):
    x = arguments(row, B=1, T=7)
    whole = call(row, x, output_final_state=True)
    first = call(row, part(x, 0, 4), output_final_state=True)
    second = call(row, part(x, 4, 7), output_final_state=True, initial_state=first.state)
    assert torch.equal(torch.cat([first.o, second.o], 1), whole.o)
    assert all(torch.equal(y, z) for y, z in zip(leaves(second.state), leaves(whole.state), strict=True))
    some, none = (first.state._replace(log_decay=y) for y in (torch.zeros_like(first.state.log_decay), None))
    outs = [call(row, part(x, 4, 7), output_final_state=True, initial_state=y) for y in (some, none)]
    assert all(torch.equal(y, z) for y, z in zip(*(leaves(y) for y in outs), strict=True))
    s0 = tree_map(lambda y: torch.cat([torch.zeros_like(y), y, 2 * y, -y.abs()]), first.state)
    cu = torch.tensor([0, 0, 4, 4, 7], dtype=torch.int32, device=DEVICE)
    for state in (None, s0):
        packed = call(row, x, output_final_state=True, cu_seqlens=cu, initial_state=state)
        for n, (a, b) in enumerate(((0, 0), (0, 4), (4, 4), (4, 7))):
            own = state and tree_map(lambda y, n=n: y[n : n + 1], state)
            alone = call(row, part(x, a, b), output_final_state=True, initial_state=own)
            torch.testing.assert_close(packed.o[:, a:b], alone.o, rtol=1e-6, atol=1e-6)
            for y, z in zip(leaves(packed.state), leaves(alone.state), strict=True):
                torch.testing.assert_close(y[n : n + 1], z, rtol=1e-6, atol=1e-6)
                assert a != b or state is not None or not z.any()
            if a == b and own is not None:
                assert all(torch.equal(y, z) for y, z in zip(leaves(alone.state), leaves(own), strict=True))


@pytest.mark.parametrize("row", ROWS)
def test_inputs_stay_repeats_are_equal_and_nothing_beyond_a_tensor_counts(row):
    """Strided inputs, and inputs in the middle of buffers of NaN, give the same bits."""
    def guarded(y: torch.Tensor) -> torch.Tensor:
        buffer = torch.full((y.numel() + 512,), torch.nan, device=DEVICE)
        buffer[256:-256] = y.flatten()
        return buffer[256:-256].view(y.shape)

    x = arguments(row, T=3)
    x["initial_state"] = call(row, x, output_final_state=True).state
    kept = tree_map(torch.clone, tuple(x.values()))
    outs = [call(row, {n: tree_map(f, y) for n, y in x.items()}, output_final_state=True)
            for f in (lambda y: y, lambda y: y, lambda y: y.transpose(0, -1).contiguous().transpose(0, -1), guarded)]
    for out in outs[1:]:
        assert all(torch.equal(y, z) for y, z in zip(leaves(out), leaves(outs[0]), strict=True))
    assert all(torch.equal(y, z) for y, z in zip(leaves(kept), leaves(tuple(x.values())), strict=True))


@pytest.mark.parametrize("row", ROWS)
def test_a_decode_step_is_one_launch(row, monkeypatch):
    """Of all levels, and beside it tensors are only made and viewed: no copy, no look at a value."""
    launches: list[tuple[int, ...]] = []
    operations: set[str] = set()

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            launches.append(grid)
            return lambda *args, **sizes: None

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            operations.add(f.overloadpacket.__name__)
            return f(*args, **(kwargs or {}))

    x = arguments(row, T=1, **({"L": 3} if row == "mva" else {}))
    state = call(row, x, output_final_state=True).state
    monkeypatch.setattr(steps, "steps_kernel", Kernel())
    form, branches = mva.registry.method(row).resolve(FORM), {"branches": "separate"} if row == "mva" else {}
    with Watch():
        form(**x, **branches, output_final_state=True, initial_state=state)
    assert launches == [(2, 2)]
    assert operations <= {"new_empty", "empty", "empty_like", "select", "slice", "unsqueeze", "expand", "view", "detach"}, operations


@pytest.mark.parametrize(("row", "bias"), [("metala", None), ("gsa", "mass"), ("gsa", "tensor"), ("mva", "mass"), ("mva", "tensor")])
def test_masked_tokens_and_hidden_slots(row, bias):
    """At first nothing is written, so that "mass" hides every slot; the tensor hides all of them from some heads, some from others."""
    x: dict[str, Any] = arguments(row, T=3)
    x["key_mask"] = torch.tensor([[False, True, False], [False, False, True]], device=DEVICE)
    if bias is not None:
        hidden = torch.randint(2, (1, 1, 4, 7), generator=torch.Generator().manual_seed(0)).bool()
        hidden[..., 0, :] = True
        x["slot_bias"] = "mass" if bias == "mass" else torch.where(hidden, -torch.inf, 0.3).to(DEVICE)
    for read in ("softmax", "sigmoid", 2) if row == "gsa" else ("softmax",):
        compare(row, x if read == "softmax" else {**x, "read": read}, **({"branches": "separate"} if row == "mva" else {}))


def test_an_even_order_keeps_its_digits():
    """phi_N(s) is near exp(s) for s far below 0, but adds up terms that are much larger."""
    one, s = torch.ones(1, 4, 1, 1), torch.tensor([-1.0, -4.0, -7.0, -9.0]).view(1, 4, 1, 1)
    for order in (12, 16, 32):
        out = mva.gsa(one.to(DEVICE), s.to(DEVICE), one.to(DEVICE), torch.full_like(s, -torch.inf).to(DEVICE), read=order, impl=FORM)
        exact = sum(s.double().pow(n) / float(math.factorial(n)) for n in range(order + 1)).log()
        torch.testing.assert_close(out.lse.cpu().double(), exact[..., 0], rtol=1e-6, atol=1e-6)


def test_what_it_does_not_compute_is_refused():
    p = example("gsa", dtype=torch.float32)
    with pytest.raises(mva.ArgumentError, match="read: is 33"):
        p.run(FORM, read=33)
    with pytest.raises(mva.ArgumentError, match="computes in float32"):
        example("gsa").run(FORM)
    x = {n: y.to(DEVICE).requires_grad_() for n, y in p.inputs.items()}
    (first,) = torch.autograd.grad(mva.gsa(**x, impl=FORM).o.square().sum(), [x["v"]], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("T", "HQ", "H", "D", "V", "M", "L"), [
    (70, 8, 2, 128, 128, 64, 2), (33, 4, 4, 64, 64, 64, 3), (1, 2, 1, 100, 72, 33, 1), (9, 2, 2, 256, 256, 128, 2),
])
def test_real_sizes(T, HQ, H, D, V, M, L, dtype):
    p = example("mva", B=2, T=T, HQ=HQ, H=H, D=D, V=V, M=M, L=L)
    r = torch.randn(2, T, HQ, M, generator=torch.Generator().manual_seed(1))
    compare("mva", {**p.inputs, "low_query": r}, dtype, gradients=dtype == torch.float32)


@pytest.mark.gpu
def test_a_decode_step_in_a_cuda_graph():
    x = arguments("mva", T=1)
    state = call("mva", x, output_final_state=True).state
    eager = call("mva", x, output_final_state=True, initial_state=state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call("mva", x, output_final_state=True, initial_state=state)
    for y in leaves(out):
        y.zero_()
    graph.replay()
    assert all(torch.equal(y, z) for y, z in zip(leaves(out), leaves(eager), strict=True))
