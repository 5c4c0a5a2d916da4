"""MetaLA, GSA and MVA by chunks in Triton. Arguments and equations: the functions of the same name in mva_ref.naive."""

import functools
import inspect
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...frame import tree_map
from ...types import ArgumentError, Output, SlotState, has_mass
from ..chunk.reading import Perceptron
from ..compose import Attended, Options, Read, groups, read_levels, silent
from .attention import slot_attention
from .ops import slot_scores, slot_values

AHEAD, BACK = 64, 32  # tokens of a chunk: what keeps the kernels within their registers
WIDE = 32             # at most as many where products are of four bytes: what keeps them within shared memory


class Call(NamedTuple):
    """What all operations of one call share.

    ends    where each sequence ends along the joined tokens, 0 first
    ahead, back     tokens of a chunk, forward and backward
    kind    the dtype of the tokens
    """

    ends: tuple[int, ...]
    ahead: int
    back: int
    kind: torch.dtype

    def level(self, g: Tensor) -> "TritonLevel":
        """The engine of mva_ref.fast.compose."""
        return TritonLevel(g, self)


class TritonLevel:
    """The slots of one level; see mva_ref.fast.compose.Level."""

    def __init__(self, g: Tensor, call: Call) -> None:
        self.g, self.call = g, call

    def scores(self, q: Tensor, k: Tensor, K0: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        s, end = slot_scores(q.flatten(2, 3).flatten(0, 1), k.flatten(0, 1), self.g.flatten(0, 1), K0, *self.call, scale)
        return s.view(*q.shape[:-1], -1), end

    def values(self, p: Tensor, v: Tensor, V0: Tensor, before: bool = False) -> tuple[Tensor, Tensor]:
        o, end = slot_values(p.flatten(2, 3).flatten(0, 1), v.flatten(0, 1), self.g.flatten(0, 1), V0, *self.call, before)
        return o.view(*p.shape[:-1], -1), end

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, low: Tensor | None, K0: Tensor, V0: Tensor, scale: float,
        lost: str | None,
    ) -> Attended:
        B, T, H, R, _ = q.shape
        b, r = (None if x is None else x.float().expand(B, T, H, R, -1).flatten(2, 3).flatten(0, 1) for x in (bias, low))
        o, lse, K, V, lost_k, lost_v = slot_attention(
            q.flatten(2, 3).flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), self.g.flatten(0, 1), b, r, K0, V0, *self.call, scale,
            lost or "")
        left = (lost_k.view(k.shape), lost_v.view(v.shape)) if lost else None
        return Attended(o.view(B, T, H, R, -1), lse.view(B, T, H, R), K, V, left)

    def sequences(self) -> list[Tensor]:
        joined = self.g.flatten(0, 1)
        return [joined[a:b] for a, b in pairwise(self.call.ends)]

    def running(self, initial: Tensor) -> Tensor:
        return torch.cat([g.cumsum(0) + x for g, x in zip(self.sequences(), initial, strict=True)]).view(self.g.shape)

    def total(self, initial: Tensor) -> Tensor:
        return torch.stack([g.sum(0) for g in self.sequences()]) + initial


def kernel_form(f: Callable[..., Output]) -> Callable[..., Output]:
    """Let a function of (call, arguments) take plain or packed batches: tokens keep their type, all else is float32, autocast is off."""
    signature = inspect.signature(f)
    parameters = list(signature.parameters.values())[1:]
    extra = inspect.Parameter("cu_seqlens", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="Tensor | None")
    outer = signature.replace(parameters=[*parameters, extra])

    @functools.wraps(f)
    def wrapped(*args: Any, **options: Any) -> Output:
        bound = outer.bind(*args, **options)
        bound.apply_defaults()
        given = dict(bound.arguments)
        cu_seqlens, first = given.pop("cu_seqlens"), next(iter(given.values()))
        if first.dtype == torch.float64:
            raise ArgumentError('impl: "triton" computes in float32; wanted inputs in float32, bfloat16 or float16, or another impl')
        B, T = first.shape[:2]
        ends = tuple(n * T for n in range(B + 1)) if cu_seqlens is None else tuple(cu_seqlens.tolist())
        most = WIDE if first.dtype == torch.float32 else AHEAD
        call = Call(ends, min(AHEAD, most), min(BACK, most), first.dtype)
        tokens = {"q", "k", "v"}
        wide = {n: x if n in tokens else tree_map(lambda y: y.float() if y.is_floating_point() else y, x) for n, x in given.items()}
        with torch.autocast(first.device.type, enabled=False):
            out = f(call, **wide)
        return Output(out.o.to(first.dtype), out.state, out.lse)

    wrapped.__signature__ = outer  # type: ignore[attr-defined]
    return wrapped


def _fresh(call: Call, k: Tensor, v: Tensor, g_levels: Tensor, low_g: Tensor | None) -> SlotState:
    L, _, _, H, M = g_levels.shape
    K, V = (x.new_zeros(len(call.ends) - 1, L, H, M, x.shape[-1], dtype=torch.float32) for x in (k, v))
    return SlotState(K, V, torch.zeros_like(K[..., 0]), None if low_g is None else torch.zeros_like(V[:, 0]))


@kernel_form
def metala(
    call: Call, r: Tensor, v: Tensor, g: Tensor, *, self_augmentation: Tensor | None = None, initial_state: SlotState | None = None,
    output_final_state: bool = False, key_mask: Tensor | None = None,
) -> Output:
    """MetaLA by chunks; see mva_ref.naive.metala."""
    H, HQ, M, gates = v.shape[2], r.shape[2], g.shape[-1], silent(g, key_mask)
    at, fresh = call.level(gates), tree_map(lambda x: x[:, 0], _fresh(call, v, v, gates[None], None))
    s0: SlotState = fresh if initial_state is None else initial_state
    o, end = at.values(groups(r, H), v, s0.V)
    if self_augmentation is not None:
        u = groups(self_augmentation.expand(1, 1, HQ, M), H)
        o = o + ((groups(r, H) * u * -torch.expm1(gates)[:, :, :, None]).sum(-1, keepdim=True) * v[:, :, :, None]).sigmoid()
    decay = at.total(torch.zeros_like(s0.V[..., 0]) if s0.log_decay is None else s0.log_decay)
    return Output(o.flatten(2, 3), SlotState(None, end, decay) if output_final_state else None)


@kernel_form
def mva(
    call: Call, q: Tensor, k: Tensor, v: Tensor, g_levels: Tensor, *, low_query: Tensor | None = None, branches: str = "shared",
    low_g: Tensor | None = None, branch_gate: Tensor | None = None, scale: float | None = None, read: Read = "softmax",
    perceptron: Perceptron | None = None, residual: str = "post", slot_bias: str | Tensor | None = None,
    initial_state: SlotState | None = None, output_final_state: bool = False, key_mask: Tensor | None = None,
) -> Output:
    """MVA by chunks, the levels one after the other; see mva_ref.naive.mva."""
    gates, low_gates = silent(g_levels, key_mask), None if low_g is None else silent(low_g, key_mask)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    how = Options(low_query, branches, low_gates, branch_gate, scale, read, perceptron, residual, slot_bias, read != "sigmoid",
                  output_final_state)
    o, log_Z, _, state = read_levels(call.level, q, k, v, gates, how, initial_state or _fresh(call, k, v, gates, low_g))
    return Output(o.flatten(2, 3), state if output_final_state else None, log_Z.flatten(2, 3) if has_mass(read) else None)


@kernel_form
def gsa(
    call: Call, q: Tensor, k: Tensor, v: Tensor, g: Tensor, *, scale: float | None = None, read: Read = "softmax",
    perceptron: Perceptron | None = None, slot_bias: str | Tensor | None = None, initial_state: SlotState | None = None,
    output_final_state: bool = False, key_mask: Tensor | None = None,
) -> Output:
    """GSA by chunks: MVA with one level; see mva_ref.naive.gsa."""
    gates = silent(g, key_mask)[None]
    s0: SlotState = tree_map(lambda x: x[:, None], initial_state) if initial_state else _fresh(call, k, v, gates, None)
    how = Options(None, "shared", None, None, q.shape[-1] ** -0.5 if scale is None else scale, read, perceptron, "post", slot_bias,
                  read != "sigmoid", output_final_state)
    o, log_Z, _, state = read_levels(call.level, q, k, v, gates, how, s0)
    last = tree_map(lambda x: x[:, 0], state) if output_final_state else None
    return Output(o.flatten(2, 3), last, log_Z.flatten(2, 3) if has_mass(read) else None)
