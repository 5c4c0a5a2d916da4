"""Reads of M slots, for scores and biases [..., H, R, M]. Equations: docs/theory/slots.md, P12."""

import math

import torch
from torch import Tensor, einsum

Perceptron = tuple[Tensor | None, Tensor | None]


def masked_softmax(x: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over the last axis and its logsumexp; a row of -inf gives zeros and -inf, with derivative 0.

    Divided by the sum, not exp(x - lse): the roundoff of lse would be a relative error of the whole row (P29).
    """
    some = (x > -torch.inf).any(-1, keepdim=True)
    shift = torch.where(some, x.detach().amax(-1, keepdim=True), 0) if x.shape[-1] else x.new_zeros(some.shape)
    e = (x - shift).exp()
    Z = torch.where(some, e.sum(-1, keepdim=True), 1)
    return e / Z, torch.where(some, Z.log() + shift, -torch.inf).squeeze(-1)


def polynomial(s: Tensor, order: int) -> Tensor:
    """phi_N(s) in float64. For s < 0 an even order is e^s plus a sum of positive terms, so that it cannot cancel to something negative:

    phi_N(s) = e^s + e^s |s|^{N+1} / N! sum_j |s|^j / (j! (N + 1 + j))
    """
    y = s.double()
    total = torch.stack([y**n / math.factorial(n) for n in range(order + 1)]).sum(0)
    if order > 4 and order % 2 == 0 and y.numel():
        size = torch.where(y < 0, -y, 0)
        term, tail = (-size).exp() * size ** (order + 1) / math.factorial(order), torch.zeros_like(y)
        for j in range(2 * int(size.max()) + 40):
            tail = tail + term / (order + 1 + j)
            term = term * size / (j + 1)
        total = torch.where(y < 0, (-size).exp() + tail, total)
    return total.to(s.dtype)


def read(
    s: Tensor, b: Tensor, kind: str | int, perceptron: Perceptron, normalised: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Read weights, log |Z|, and the sign of Z where it can be negative. Sigmoid weights are divided by Z only if `normalised`."""
    if kind == "softmax":
        p, log_Z = masked_softmax(s + b)
        return p, log_Z, None
    if kind == "sigmoid":
        f = _affine(s, perceptron).sigmoid()
        if not normalised:
            return b.exp() * f, b[..., 0], None
    else:
        f = polynomial(s, int(kind))
    hidden, top = b.isneginf(), b.detach().amax(-1, keepdim=True)
    top = torch.where(top.isneginf(), 0, top)
    e = torch.where(hidden, 0, f * torch.where(hidden, -torch.inf, b - top).exp())
    Z = e.sum(-1, keepdim=True)
    divisor = torch.where(Z == 0, 1, Z)
    log_Z = torch.where(Z == 0, -torch.inf, divisor.abs().log() + top).squeeze(-1)
    sign = Z.squeeze(-1).sign() if kind != "sigmoid" and int(kind) % 2 else None
    return torch.where(Z == 0, 0, e / divisor), log_Z, sign


def _affine(s: Tensor, perceptron: Perceptron) -> Tensor:
    (W, a), (H, R, M) = perceptron, s.shape[-3:]
    if W is not None:
        s = einsum("...hrc,hrmc->...hrm", s, W.expand(H * R, M, M).unflatten(0, (H, R)))
    return s if a is None else s + a.expand(H * R, M).unflatten(0, (H, R))


def log_written(total: Tensor) -> Tensor:
    """The bias "mass": log(1 - exp(total log decay)), -inf for an unwritten slot."""
    written = total < 0
    return torch.where(written, (-torch.expm1(torch.where(written, total, -1))).log(), -torch.inf)
