"""Mamba: the selective scan, a decay for every key and value channel. Its time steps and rates: `time_step`, `rates` of mamba2.py."""

import torch
from torch import Tensor, einsum

from ...frame import form
from ...types import MatrixState, Output
from ..softmax_attention import group
from ..writes import span_sum
from .decayed import skipped, time_decay
from .kernel import seen


@form
def mamba(
    q: Tensor, k: Tensor, v: Tensor, dt: Tensor, A: Tensor, *, skip: Tensor | None = None, initial_state: MatrixState | None = None,
    output_final_state: bool = False, key_mask: Tensor | None = None,
) -> Output:
    """Mamba: order 1, un-normalised; every value channel c has a T x T matrix of its own.

    Equation:  o_tc = sum_{i <= t} A^c_ti v_ic,   A^c_ti = sum_d q_td k_id exp(A_cd sum_{i < j <= t} dt_jc) dt_ic + [i = t] skip_c
    Shapes:    q (its C) [B, T, HQ, D], k (its B) [B, T, H, D], v (its u) [B, T, H, V], dt [B, T, H, V], rates A [H, V, D],
               skip (its D) [H, V] -> o [B, T, HQ, V]
    Numerics:  at least float32, float64 stays; a T x T x V x D tensor; every exponent is <= 0; signed weights, no lse; takes no scale;
               rates of -inf and dt = 0 are exact.
    Source:    Mamba (2312.00752), algorithm 2. Decays are exp(dt A), writes dt k (not the exact integral), as in its code.

    >>> q = torch.ones(1, 3, 1, 1); dt = torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1, 1)
    >>> mamba(q, q, q, dt, torch.zeros(1, 1, 1)).o.flatten().tolist()
    [1.0, 3.0, 6.0]
    """
    (B, T, H, V), D, keep = v.shape, k.shape[-1], seen(v, key_mask)
    keep = keep[..., None, None]
    g = time_decay(torch.where(keep > 0, dt, 0)[..., None], A)                                  # b t h c d
    writes, queries = torch.where(keep > 0, dt * v, 0), group(q, H)
    causal = torch.ones(T, T, dtype=torch.bool, device=v.device).tril()
    left = torch.where(causal[..., None], span_sum(g.flatten(3)).exp(), 0).unflatten(-1, (V, D))  # b h t i c d
    o = einsum("bthrd,bihd,bhticd,bihc->bthrc", queries, k, left, writes)
    S = einsum("bihd,bhicd,bihc->bhdc", k, left[:, :, -1], writes) if T else v.new_zeros(B, H, D, V)
    if initial_state is not None:
        kept = g.cumsum(1).exp()
        o = o + einsum("bthrd,bthcd,bhdc->bthrc", queries, kept, initial_state.S)
        S = S + (kept[:, -1].mT if T else 1) * initial_state.S
    o = o.flatten(2, 3)
    o = o if skip is None else o + skipped(skip, v, q, key_mask)
    return Output(o, MatrixState(S) if output_final_state else None)


@form
def recurrent(
    q: Tensor, k: Tensor, v: Tensor, dt: Tensor, A: Tensor, *, skip: Tensor | None = None, initial_state: MatrixState | None = None,
    output_final_state: bool = False, key_mask: Tensor | None = None,
) -> Output:
    """`mamba` one token at a time.

    Equation:  S_t[d, c] = e^{A_cd dt_tc} S_{t-1}[d, c] + k_td dt_tc v_tc,   o_tc = sum_d q_td S_t[d, c] + skip_c v_tc
    Shapes:    as `mamba`; state S [B, H, D, V]
    Numerics:  as `mamba`.
    Source:    Mamba (2312.00752), algorithm 2.

    >>> q, k, v = torch.randn(3, 1, 5, 2, 4).unbind(0); dt, A = torch.rand(1, 5, 2, 4), -torch.rand(2, 4, 4)
    >>> torch.allclose(recurrent(q, k, v, dt, A).o, mamba(q, k, v, dt, A).o, atol=1e-5)
    True
    """
    (B, T, H, V), D, keep = v.shape, k.shape[-1], seen(v, key_mask)
    S = v.new_zeros(B, H, D, V) if initial_state is None else initial_state.S
    queries, o = group(q, H), []
    for t in range(T):
        here = keep[:, t, None, None, None] > 0
        forget = time_decay(dt[:, t, :, None], A.mT).exp()                                      # b h d c
        S = torch.where(here, forget * S + k[:, t, ..., None] * (dt * v)[:, t, :, None], S)
        o.append(einsum("bhrd,bhdc->bhrc", queries[:, t], S))
    out = torch.stack(o, 1).flatten(2, 3) if o else v.new_zeros(B, 0, q.shape[2], V)
    out = out if skip is None else out + skipped(skip, v, q, key_mask)
    return Output(out, MatrixState(S) if output_final_state else None)
