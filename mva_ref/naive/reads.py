"""How a query reads M slots: by softmax, by a sigmoid perceptron, or by one order. Theory: docs/theory/slots.md, P12."""

from typing import NamedTuple

import torch
from torch import Tensor, einsum

from .orders import phi, ratio
from .softmax_attention import normalise

Perceptron = tuple[Tensor | None, Tensor | None]


class Mass(NamedTuple):
    """The normaliser Z of a read as log |Z| and, where it can be negative, its sign (odd orders)."""

    log: Tensor
    sign: Tensor | None = None


def perceptron_scores(s: Tensor, perceptron: Perceptron | None) -> Tensor:
    """The affine map in front of the sigmoid.

    Equation:  W s + a,   identity and 0 by default
    Shapes:    s [B, T, H, R, M], W [M, M] or [HQ, M, M], a [M] or [HQ, M] -> [B, T, H, R, M]
    Numerics:  in the dtype of s.
    Source:    the paper's sigmoid perceptron; shared across heads there, per query head here on request.

    >>> s = torch.randn(1, 2, 1, 3, 4); torch.equal(perceptron_scores(s, None), s)
    True
    """
    W, a = perceptron if perceptron is not None else (None, None)
    H, R, M = s.shape[2:]
    if W is not None:
        s = einsum("bthrc,hrmc->bthrm", s, W.expand(H * R, M, M).unflatten(0, (H, R)))
    return s if a is None else s + a.expand(H * R, M).unflatten(0, (H, R))


def normalised_read(s: Tensor, b: Tensor, kind: str | int, perceptron: Perceptron | None = None) -> tuple[Tensor, Mass]:
    """Weights of the slots, divided by their sum, and that sum.

    Equation:  p_c = e^{b_c} f(s_c) / Z,   Z = sum_c e^{b_c} f(s_c),   f = exp ("softmax"), sigmoid(W s + a) ("sigmoid") or phi_N (N)
    Shapes:    s, b [B, T, H, R, M] -> p [B, T, H, R, M], Mass of [B, T, H, R]
    Numerics:  b = -inf hides a slot; all hidden, or Z = 0: p = 0. The largest bias is factored out before it is exponentiated.
    Source:    P12; softmax GSA (2409.07146), the sigmoid is the paper's, the order our reading.

    Order 0 ignores the scores:

    >>> s = torch.randn(1, 1, 1, 1, 4); normalised_read(s, torch.zeros_like(s), 0)[0].flatten().tolist()
    [0.25, 0.25, 0.25, 0.25]
    """
    if kind == "softmax":
        p, lse = normalise(s + b)
        return p, Mass(lse)
    top = b.detach().amax(-1, keepdim=True)
    top = torch.where(top.isneginf(), 0, top)
    f = perceptron_scores(s, perceptron).sigmoid() if kind == "sigmoid" else phi(s, int(kind))
    weight = (b - top).exp()
    p = torch.where(weight > 0, weight * f, 0)
    Z = p.sum(-1)
    log = torch.where(Z == 0, -torch.inf, torch.where(Z == 0, 1, Z).abs().log() + top.squeeze(-1))
    return ratio(p, Z), Mass(log, Z.sign() if kind != "sigmoid" and int(kind) % 2 else None)


def plain_read(s: Tensor, b: Tensor, kind: str | int, perceptron: Perceptron | None = None) -> tuple[Tensor, Tensor | None]:
    """The read of a form without a window: the sigmoid perceptron is not divided by its sum, the others are.

    Equation:  p_c = e^{b_c} sigmoid(W s + a)_c, or as in `normalised_read`;   lse = log Z
    Shapes:    s, b [B, T, H, R, M] -> p [B, T, H, R, M], lse [B, T, H R] or None where Z can be negative or is no mass (sigmoid)
    Numerics:  as in `normalised_read`.
    Source:    P12.

    >>> s = torch.zeros(1, 1, 1, 1, 4); plain_read(s, s, "sigmoid")[0].flatten().tolist()
    [0.5, 0.5, 0.5, 0.5]
    """
    if kind == "sigmoid":
        return b.exp() * perceptron_scores(s, perceptron).sigmoid(), None
    p, mass = normalised_read(s, b, kind)
    return p, mass.log.flatten(2, 3) if mass.sign is None else None
