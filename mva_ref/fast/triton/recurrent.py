"""MetaLA, GSA and MVA token by token in one Triton kernel: a decode step is one launch for all levels.

Arguments and equations: the functions of the same name in mva_ref.naive. Gradients are those of the form by chunks, which computes the
same function: a backward of the recurrence would keep the slots of every token.
"""

import functools
from itertools import pairwise

import torch
from torch import Tensor

from ...frame import leaves, tree_map
from ...types import ArgumentError, Output, SlotState, has_mass
from ..chunk.reading import Perceptron
from ..compose import Read, groups, silent
from . import forms
from .forms import Call, kernel_form
from .replay import gradients_of
from .steps import walk

ORDER = 32              # up to here the powers of an even order, added up in float64, leave float32 its digits


@functools.lru_cache(maxsize=64)
def table(ends: tuple[int, ...], device: torch.device) -> Tensor:
    """Where packed sequences end, on the device; kept, since the same lengths come again and again."""
    return torch.tensor(ends, dtype=torch.int32, device=device)


def parameter(x: Tensor | None, levels: int, heads: int, axes: int) -> Tensor | None:
    """A perceptron's W or a with levels and query heads as its first axes."""
    if x is None:
        return None
    x = x[(None,) * (axes + 2 - x.ndim)]
    return x.expand(levels, heads, *x.shape[2:])


def run(
    call: Call, q: Tensor | None, k: Tensor | None, v: Tensor, g_levels: Tensor, s0: SlotState | None, key_mask: Tensor | None, *,
    low_query: Tensor | None = None, branch_gate: Tensor | None = None, low_g: Tensor | None = None, scale: float | None = None,
    read: Read = "softmax", perceptron: Perceptron | None = None, residual: str = "post", slot_bias: str | Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, SlotState]:
    """o [B, T, HQ, V] (in dtype, or as v), lse [B, T, HQ] and the last slots; the arguments of mva, and without q and k o = low_query V."""
    if isinstance(read, int) and read > ORDER:
        raise ArgumentError(f'read: is {read}; impl = "triton_recurrent" wanted an order <= {ORDER}; impl = "triton" reads higher ones')
    (L, B, T, H, M), N, V = g_levels.shape, len(call.ends) - 1, v.shape[-1]
    HQ = next(x.shape[2] for x in (q, low_query) if x is not None)
    decay = v.new_empty(N, L, H, M, dtype=torch.float32)
    last = SlotState(None if k is None else decay.new_empty(N, L, H, M, k.shape[-1]), decay.new_empty(N, L, H, M, V), decay,
                     None if low_g is None else decay.new_empty(N, H, M, V))
    if s0 is not None:                                      # it may lack log decays
        s0 = SlotState(*(torch.zeros_like(y) if x is None and y is not None else x for x, y in zip(s0, last, strict=True)))  # type: ignore[arg-type]
    if any(a == b for a, b in pairwise(call.ends)):         # no token carries the slots of an empty sequence over
        for i, x in enumerate(leaves(last)):
            x.copy_(leaves(s0)[i]) if s0 else x.zero_()
    if isinstance(slot_bias, Tensor):
        b = slot_bias[(None,) * (5 - slot_bias.ndim)]
        slot_bias = b.expand(len(b), B, T, HQ, M)
    W, a = perceptron or (None, None)
    o, lse = v.new_empty(B, T, HQ, V, dtype=dtype or v.dtype), v.new_empty(B, T, HQ, dtype=torch.float32)
    walk(q, k, v, silent(g_levels, key_mask), low_query, None if branch_gate is None else branch_gate.expand(B, T, HQ),
         None if low_g is None else silent(low_g, key_mask), slot_bias, parameter(W, L, HQ, 2), parameter(a, L, HQ, 1), s0, last, o, lse,
         table(call.ends, v.device) if N > B else None, scale, read, residual)
    return o, lse, last


@kernel_form
@gradients_of(forms.metala)
def metala(
    call: Call, r: Tensor, v: Tensor, g: Tensor, *, self_augmentation: Tensor | None = None, initial_state: SlotState | None = None,
    output_final_state: bool = False, key_mask: Tensor | None = None,
) -> Output:
    """MetaLA token by token; see mva_ref.naive.metala."""
    s0 = initial_state and tree_map(lambda x: x[:, None], initial_state)
    o, _, state = run(call, None, None, v, g[None], s0, key_mask, low_query=r, dtype=None if self_augmentation is None else torch.float32)
    if self_augmentation is not None:
        H, HQ, w = v.shape[2], r.shape[2], -torch.expm1(silent(g, key_mask))
        u = groups(self_augmentation.expand(1, 1, HQ, g.shape[-1]), H)
        score = (groups(r, H) * u * w[:, :, :, None]).sum(-1, keepdim=True) * v[:, :, :, None]
        o = o + score.sigmoid().flatten(2, 3)
    return Output(o, tree_map(lambda x: x[:, 0], state) if output_final_state else None)


@kernel_form
@gradients_of(forms.mva)
def mva(
    call: Call, q: Tensor, k: Tensor, v: Tensor, g_levels: Tensor, *, low_query: Tensor | None = None, branches: str = "shared",
    low_g: Tensor | None = None, branch_gate: Tensor | None = None, scale: float | None = None, read: Read = "softmax",
    perceptron: Perceptron | None = None, residual: str = "post", slot_bias: str | Tensor | None = None,
    initial_state: SlotState | None = None, output_final_state: bool = False, key_mask: Tensor | None = None,
) -> Output:
    """MVA token by token, the levels inside; see mva_ref.naive.mva."""
    o, lse, state = run(call, q, k, v, g_levels, initial_state, key_mask, low_query=low_query, branch_gate=branch_gate, low_g=low_g,
                        scale=scale, read=read, perceptron=perceptron, residual=residual, slot_bias=slot_bias)
    return Output(o, state if output_final_state else None, lse if has_mass(read) else None)


@kernel_form
@gradients_of(forms.gsa)
def gsa(
    call: Call, q: Tensor, k: Tensor, v: Tensor, g: Tensor, *, scale: float | None = None, read: Read = "softmax",
    perceptron: Perceptron | None = None, slot_bias: str | Tensor | None = None, initial_state: SlotState | None = None,
    output_final_state: bool = False, key_mask: Tensor | None = None,
) -> Output:
    """GSA token by token: MVA with one level; see mva_ref.naive.gsa."""
    s0 = initial_state and tree_map(lambda x: x[:, None], initial_state)
    o, lse, state = run(call, q, k, v, g[None], s0, key_mask, scale=scale, read=read, perceptron=perceptron, slot_bias=slot_bias)
    return Output(o, tree_map(lambda x: x[:, 0], state) if output_final_state else None, lse if has_mass(read) else None)
