"""One token's write and one token's read, shared by the step-by-step loops."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, einsum


def write(X: Tensor, g: Tensor, x: Tensor) -> Tensor:
    """One step of the vocabulary recurrence.

    Equation:  X_t = diag(alpha_t) X_{t-1} + w_t (x) x_t,   alpha = exp(g),   w = 1 - alpha
    Shapes:    X [B, H, M, D], g [B, H, M], x [B, H, D] -> [B, H, M, D]
    Numerics:  w = -expm1(g).
    Source:    docs/theory/slots.md.

    >>> write(torch.ones(1, 1, 1, 2), torch.full((1, 1, 1), -torch.inf), torch.full((1, 1, 2), 5.0)).flatten().tolist()
    [5.0, 5.0]
    """
    return g.exp()[..., None] * X - torch.expm1(g)[..., None] * x[:, :, None]


class Token(NamedTuple):
    """What a read gives for one token: weights e^b f(s) [B, H, R, M] and their sum Z, both times e^{-shift}."""

    weight: Tensor
    Z: Tensor
    shift: Tensor


def read_token(s: Tensor, b: Tensor, kind: str | int, W: Tensor | None, a: Tensor | None) -> Token:
    """Un-normalised read weights of one token.

    Equation:  e^{b_c} f(s_c) e^{-shift},   f = exp, sigmoid(W s + a), or phi_N written out as a sum of powers
    Shapes:    s, b [B, H, R, M], W [HQ, M, M], a [HQ, M] -> Token
    Numerics:  shift = max(s + b) for softmax, max(b) else.
    Source:    P12.

    >>> s = torch.zeros(1, 1, 1, 4); read_token(s, s, 2, None, None).Z.item()
    4.0
    """
    shift = (s + b if kind == "softmax" else b).detach().amax(-1, keepdim=True)
    shift = torch.where(shift.isneginf(), 0, shift)
    weight = (s + b - shift).exp()
    if kind != "softmax":
        H, R, M = s.shape[1:]
        if kind == "sigmoid":
            y = s if W is None else einsum("bhrc,hrmc->bhrm", s, W.expand(H * R, M, M).unflatten(0, (H, R)))
            f = 1 / (1 + (-y if a is None else -y - a.expand(H * R, M).unflatten(0, (H, R))).exp())
        else:
            f = torch.stack([s**n / math.factorial(n) for n in range(int(kind) + 1)]).sum(0)
        weight = torch.where(b.isneginf(), 0, (b - shift).exp() * f)
    return Token(weight, weight.sum(-1), shift[..., 0])


def slot_bias_at(slot_bias: str | Tensor | None, decay: Tensor, t: int, T: int, R: int) -> Tensor:
    """The log weight of every slot at one token.

    Equation:  0, log(1 - exp(total log decay)) ("mass"), or the tensor
    Shapes:    slot_bias broadcastable to [B, T, HQ, M], decay [B, H, M] -> [B, H, R, M]
    Numerics:  log of 0 is -inf, with derivative 0.
    Source:    P12.

    >>> slot_bias_at("mass", torch.zeros(1, 1, 1), 0, 1, 1).item()
    -inf
    """
    B, H, M = decay.shape
    if isinstance(slot_bias, Tensor):
        return slot_bias.expand(B, T, H * R, M)[:, t].reshape(B, H, R, M)
    if slot_bias is None:
        return decay.new_zeros(B, H, R, M)
    b = torch.where(decay < 0, torch.log(-torch.expm1(torch.where(decay < 0, decay, -1))), -torch.inf)
    return b[:, :, None].expand(B, H, R, M)


def stacked(steps: list[Tensor], empty: Tensor) -> Tensor:
    """Steps [B, H, R, ...] side by side in time, query heads flat; `empty` where there are none.

    Equation:  none
    Shapes:    T tensors [B, H, R, ...] -> [B, T, HQ, ...]
    Numerics:  exact.
    Source:    none; a list becomes a tensor.

    >>> stacked([torch.zeros(1, 2, 3, 4)] * 5, torch.zeros(0)).shape
    torch.Size([1, 5, 6, 4])
    """
    return torch.stack(steps, 1).flatten(2, 3) if steps else empty


def log_of(p: Token) -> Tensor:
    """log |Z| of a read, -inf where Z = 0.

    Equation:  log |Z e^{-shift}| + shift
    Shapes:    Token of [B, H, R] -> [B, H, R]
    Numerics:  derivative 0 where Z = 0.
    Source:    P21.

    >>> log_of(Token(torch.zeros(1), torch.zeros(1), torch.zeros(1))).item()
    -inf
    """
    return torch.where(p.Z == 0, -torch.inf, torch.where(p.Z == 0, 1, p.Z).abs().log() + p.shift)


class Far(NamedTuple):
    """What the slots give one token: o [B, H, R, V], log |Z| [B, H, R] and the sign of Z (0 where Z = 0)."""

    o: Tensor
    log_Z: Tensor
    sign: Tensor


def put(where: Tensor, new: Tensor, old: Tensor | None = None) -> Tensor:
    """Choose `new` where a mask over the leading axes holds, else `old` (0).

    Equation:  none
    Shapes:    where [B] or [B, W], new and old [B, (W or 1), ...] -> [B, (W,) ...]
    Numerics:  exact.
    Source:    none

    >>> put(torch.tensor([True, False]), torch.ones(2, 1)).flatten().tolist()
    [1.0, 0.0]
    """
    wide: Tensor = where.view(*where.shape, *[1] * (new.ndim - where.ndim))
    return torch.where(wide, new, new.new_zeros(()) if old is None else old)


def blend(window_sum: Tensor, window_mass: Tensor, far: Far, empty: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """Window and history of one token, soft (weight None) or hard.

    Equation:  (sum_window e^x v + Z^H o^H) / (Z^W + Z^H),   or   b o^W + (1 - b) o^H
    Shapes:    window_sum = o^W [B, H, R, V], window_mass = log Z^W [B, H, R] -> o [B, H, R, V], log(Z^W + Z^H) [B, H, R]
    Numerics:  one shared maximum; an empty history has Z^H = 0, b = 1.
    Source:    docs/theory/window.md.

    >>> zero, one = torch.zeros(1, 1, 1), torch.ones(1, 1, 1, 1)
    >>> blend(one, zero, Far(4 * one, torch.tensor(2.0).log() + zero, zero + 1), zero > 0, None)[0].item()
    3.0
    """
    log_Z = torch.where(empty, -torch.inf, far.log_Z)
    top = torch.maximum(window_mass, log_Z).detach()
    top = torch.where(top.isneginf(), 0, top)
    ZW, ZH = (window_mass - top).exp(), (log_Z - top).exp() * far.sign
    Z = ZW + ZH
    if weight is None:
        o = (ZW[..., None] * window_sum + ZH[..., None] * far.o) / torch.where(Z == 0, torch.inf, Z)[..., None]
    else:
        b = torch.where(empty, 1, weight)[..., None]
        o = b * window_sum + (1 - b) * far.o
    return o, torch.where(Z > 0, torch.where(Z > 0, Z, 1).log() + top, -torch.inf)
