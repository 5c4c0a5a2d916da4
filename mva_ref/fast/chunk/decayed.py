"""Linear recurrences with decay, linear in T: values of slots whose write weights are the keys. Equations: mva_ref.naive.baselines.

MetaLA is GLA whose keys are 1 - exp(g); the chunks of one are those of the other.
"""

import torch
from torch import Tensor, einsum

from ...frame import form
from ...naive.baselines.decayed import per_token, skipped, time_decay
from ...naive.baselines.kernel import seen
from ...naive.baselines.retnet import retnet_decay
from ...naive.baselines.supra import supra_decay
from ...types import MatrixState, Output
from ..compose import groups
from .scan import ChunkedLevel


def decayed_chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float, key_mask: Tensor | None, s0: MatrixState | None, before: bool = False
) -> tuple[Tensor, MatrixState]:
    """What mva_ref.naive.baselines.decayed.decayed_matrix computes; before: a token reads the state that the token before left."""
    keep = seen(v, key_mask)[..., None, None]
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
    """Retention by chunks; see mva_ref.naive.baselines.retnet."""
    g = per_token(retnet_decay(k.shape[2]) if head_decay is None else head_decay, v)
    o, state = decayed_chunks(q, k, v, g, q.shape[-1] ** -0.5 if scale is None else scale, key_mask, initial_state)
    return Output(o, state if output_final_state else None)


@form
def supra(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, head_decay: Tensor | None = None,
    initial_state: MatrixState | None = None, output_final_state: bool = False, key_mask: Tensor | None = None,
) -> Output:
    """SUPRA by chunks; see mva_ref.naive.baselines.supra."""
    g = per_token(supra_decay(k.shape[2]) if head_decay is None else head_decay, v)
    o, state = decayed_chunks(q, k, v, g, q.shape[-1] ** -0.5 if scale is None else scale, key_mask, initial_state)
    return Output(o, state if output_final_state else None)


@form
def mamba2(
    q: Tensor, k: Tensor, v: Tensor, dt: Tensor, A: Tensor, *, skip: Tensor | None = None, initial_state: MatrixState | None = None,
    output_final_state: bool = False, key_mask: Tensor | None = None,
) -> Output:
    """Mamba-2 by chunks; see mva_ref.naive.baselines.mamba2."""
    o, state = decayed_chunks(q, dt[..., None] * k, v, time_decay(dt, A)[..., None], 1.0, key_mask, initial_state)
    o = o if skip is None else o + skipped(skip[:, None], v, q, key_mask)
    return Output(o, state if output_final_state else None)


@form
def rwkv6(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, u: Tensor, *, initial_state: MatrixState | None = None, output_final_state: bool = False,
    key_mask: Tensor | None = None,
) -> Output:
    """RWKV-6 by chunks; see mva_ref.naive.baselines.rwkv6."""
    read, state = decayed_chunks(q, k, v, g, 1.0, key_mask, initial_state, before=True)
    bonus = einsum("bthrd,bthd,hd->bthr", groups(q, k.shape[2]), k * seen(v, key_mask)[..., None, None], u)
    return Output(read + (bonus[..., None] * v[:, :, :, None]).flatten(2, 3), state if output_final_state else None)
