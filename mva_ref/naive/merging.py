"""Putting two branches together. Theory: docs/theory/window.md (P21, P24 to P26)."""

import torch
from torch import Tensor

from ..types import Output
from .orders import ratio
from .reads import Mass


def soft(window: Output, history: Output, mass: Mass) -> Output:
    """Both branches weighted by their attention mass.

    Equation:  o = (Z^W o^W + Z^H o^H) / (Z^W + Z^H)
    Shapes:    o [..., V], masses [...] -> o [..., V], lse = log(Z^W + Z^H) [...], None where Z^H can be negative
    Numerics:  one shared maximum is subtracted from both masses (P26); both empty: o = 0, lse = -inf.
    Source:    the paper's soft integration; P21.

    >>> one = Output(torch.tensor([[1.0]]), None, torch.tensor([0.0])); two = Output(torch.tensor([[4.0]]))
    >>> soft(one, two, Mass(torch.tensor([2.0]).log())).o.item()
    3.0
    """
    assert window.lse is not None
    top = torch.maximum(window.lse, mass.log).detach()
    top = torch.where(top.isneginf(), 0, top)
    ZW, ZH = (window.lse - top).exp(), (mass.log - top).exp()
    if mass.sign is not None:
        ZH = ZH * mass.sign
    Z = ZW + ZH
    o = ratio(ZW[..., None] * window.o + ZH[..., None] * history.o, Z)
    lse = torch.where(Z > 0, torch.where(Z > 0, Z, 1).log() + top, -torch.inf) if mass.sign is None else None
    return Output(o, None, lse)


def hard(window: Output, history: Output, empty: Tensor, weight: Tensor) -> Output:
    """Both branches weighted by a number that ignores the scores.

    Equation:  o = b o^W + (1 - b) o^H,   b = 1 while the history is empty
    Shapes:    o [..., V], empty bool [...], b in [0, 1] [...] -> o [..., V], no lse
    Numerics:  exact at b = 0 and b = 1.
    Source:    the baseline of the paper's ablation; Infini-attention's gate (2404.07143).

    >>> one, two = Output(torch.tensor([[1.0]])), Output(torch.tensor([[4.0]]))
    >>> hard(one, two, torch.tensor([False]), torch.tensor([0.5])).o.item()
    2.5
    """
    b = torch.where(empty, 1, weight)[..., None]
    return Output(b * window.o + (1 - b) * history.o)


def merge(a: Output, b: Output) -> Output:
    """Merge two attention results over disjoint sets of keys: an associative, commutative operation with identity (0, -inf).

    Equation:  o = (e^{lse_a} o_a + e^{lse_b} o_b) / (e^{lse_a} + e^{lse_b}),   lse = log(e^{lse_a} + e^{lse_b})
    Shapes:    o [B, T, HQ, V], lse [B, T, HQ], the same for both
    Numerics:  natural logs; at least float32; two empty rows merge to an empty row.
    Source:    P21; online softmax (1805.02867).

    >>> empty = Output(torch.zeros(1, 1, 1, 2), None, torch.full((1, 1, 1), -torch.inf))
    >>> merge(empty, empty).lse.item()
    -inf
    """
    assert a.lse is not None and b.lse is not None
    dtype = torch.promote_types(a.lse.dtype, b.lse.dtype)
    out = soft(Output(a.o.to(dtype), None, a.lse.to(dtype)), Output(b.o.to(dtype)), Mass(b.lse.to(dtype)))
    return Output(out.o.to(a.o.dtype), None, out.lse)
