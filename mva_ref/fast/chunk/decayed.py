"""Linear recurrences with decay, linear in T: values of slots whose write weights are the keys. Equations: mva_ref.naive.baselines.

MetaLA is GLA whose keys are 1 - exp(g); the chunks of one are those of the other.
"""

import torch
from torch import Tensor, einsum

from ...frame import form
from ...types import MatrixState, Output
from ..compose import groups
from .scan import ChunkedLevel


def counted(v: Tensor, key_mask: Tensor | None) -> Tensor:
    """1 for a token that counts, 0 for a masked one, [B, T, 1, 1]."""
    return v.new_ones(*v.shape[:2], 1, 1) if key_mask is None else key_mask.to(v.dtype)[..., None, None]


def decayed_chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float, key_mask: Tensor | None, s0: MatrixState | None, before: bool = False
) -> tuple[Tensor, MatrixState]:
    """What mva_ref.naive.baselines.decayed.decayed_matrix computes; before: a token reads the state that the token before left."""
    keep = counted(v, key_mask)
    at = ChunkedLevel(torch.where(keep > 0, g, 0).expand(k.shape), k * keep)
    S0 = v.new_zeros(v.shape[0], v.shape[2], k.shape[-1], v.shape[-1]) if s0 is None else s0.S
    o, S = at.values(scale * groups(q, v.shape[2]), v, S0, before)
    return o.flatten(2, 3), MatrixState(S)


@form
def gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, *, scale: float | None = None, initial_state: MatrixState | None = None,
    output_final_state: bool = False, key_mask: Tensor | None = None,
) -> Output:
    """GLA by chunks; see mva_ref.naive.baselines.gla."""
    o, state = decayed_chunks(q, k, v, g, q.shape[-1] ** -0.5 if scale is None else scale, key_mask, initial_state)
    return Output(o, state if output_final_state else None)


@form
def retnet(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, head_decay: Tensor | None = None,
    initial_state: MatrixState | None = None, output_final_state: bool = False, key_mask: Tensor | None = None,
) -> Output:
    """Retention and SUPRA by chunks; see mva_ref.naive.baselines.retnet. The decays are never left out: mva_ref.retnet fills them in."""
    assert head_decay is not None
    g = head_decay[:, None].expand(*v.shape[:3], 1)
    o, state = decayed_chunks(q, k, v, g, q.shape[-1] ** -0.5 if scale is None else scale, key_mask, initial_state)
    return Output(o, state if output_final_state else None)


@form
def mamba2(
    q: Tensor, k: Tensor, v: Tensor, dt: Tensor, A: Tensor, *, skip: Tensor | None = None, initial_state: MatrixState | None = None,
    output_final_state: bool = False, key_mask: Tensor | None = None,
) -> Output:
    """Mamba-2 by chunks; see mva_ref.naive.baselines.mamba2."""
    at_once = A.isneginf()                                                                          # and no time is no decay
    g = torch.where(at_once, torch.where(dt > 0, -torch.inf, 0), dt * torch.where(at_once, 0, A))[..., None]
    o, state = decayed_chunks(q, dt[..., None] * k, v, g, 1.0, key_mask, initial_state)
    if skip is not None:
        o = o + (skip[:, None] * v * counted(v, key_mask)).repeat_interleave(q.shape[2] // v.shape[2], 2)
    return Output(o, state if output_final_state else None)


@form
def rwkv6(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, u: Tensor, *, initial_state: MatrixState | None = None, output_final_state: bool = False,
    key_mask: Tensor | None = None,
) -> Output:
    """RWKV-6 by chunks; see mva_ref.naive.baselines.rwkv6."""
    read, state = decayed_chunks(q, k, v, g, 1.0, key_mask, initial_state, before=True)
    bonus = einsum("bthrd,bthd,hd->bthr", groups(q, k.shape[2]), k * counted(v, key_mask), u)
    return Output(read + (bonus[..., None] * v[:, :, :, None]).flatten(2, 3), state if output_final_state else None)
