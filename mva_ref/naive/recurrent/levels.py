"""One token through all levels, and the two branches of a window, for the step-by-step loops."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...types import SlotState
from .tokenwise import Far, log_of, read_token, slot_bias_at, write


class Levels(NamedTuple):
    """The state between tokens: lists over levels of K [B, H, M, D], V [B, H, M, V], log decay [B, H, M]; and low_V [B, H, M, V]."""

    K: list[Tensor]
    V: list[Tensor]
    decay: list[Tensor]
    low_V: Tensor | None

    def state(self) -> SlotState:
        """As the SlotState that a call returns."""
        K, V, decay = (torch.stack(x, 1) for x in (self.K, self.V, self.decay))
        return SlotState(K, V, decay, self.low_V)


class Options(NamedTuple):
    """The options of `mva` that every token reads: see there."""

    scale: float
    read: str | int
    perceptron: tuple[Tensor | None, Tensor | None] | None
    residual: str
    slot_bias: str | Tensor | None
    low_query: Tensor | None
    branch_gate: Tensor | None
    normalised: bool


def start(k: Tensor, v: Tensor, g_levels: Tensor, low_g: Tensor | None, s0: SlotState | None) -> Levels:
    """Empty slots, or those of a state.

    Equation:  K = 0, V = 0, log decay = 0
    Shapes:    as Levels
    Numerics:  exact.
    Source:    P9.

    >>> x = torch.zeros(1, 5, 2, 3); len(start(x, x, torch.zeros(4, 1, 5, 2, 6), None, None).K)
    4
    """
    L, B, _, H, M = g_levels.shape
    if s0 is not None:
        assert s0.K is not None
        decay = k.new_zeros(B, L, H, M) if s0.log_decay is None else s0.log_decay
        return Levels(list(s0.K.unbind(1)), list(s0.V.unbind(1)), list(decay.unbind(1)), s0.low_V)
    K, V, decay = k.new_zeros(B, H, M, k.shape[-1]), v.new_zeros(B, H, M, v.shape[-1]), k.new_zeros(B, H, M)
    return Levels([K] * L, [V] * L, [decay] * L, None if low_g is None else V)


def token(
    levels: Levels, q: Tensor, k: Tensor, v: Tensor, gates: Tensor, low_gate: Tensor | None, t: int, how: Options
) -> tuple[Levels, Far]:
    """Write one token to every level, read every level with one query.

    Equation:  X^l <- diag(alpha^l) X^l + w^l (x) x^l,   o += p^l V^l,   x^{l+1} = x^l - rho^l X^l (after or before the write)
    Shapes:    q [B, T, HQ, D] of which row t is read; k [B, H, D], v [B, H, V], gates [B, L, H, M]
    Numerics:  as mva_ref.naive.mva.
    Source:    docs/theory/levels.md.

    >>> q, x = torch.zeros(1, 1, 1, 2), torch.ones(1, 1, 2); g = torch.full((1, 1, 1, 1), -torch.inf)
    >>> how = Options(1.0, "softmax", None, "post", None, None, None, True)
    >>> token(start(q, q, g[None], None, None), q, x, x, g, None, 0, how)[1].o.flatten().tolist()
    [1.0, 1.0]
    """
    (B, T, HQ, _), H, L = q.shape, k.shape[1], gates.shape[1]
    R = HQ // H
    query = q[:, t].unflatten(1, (H, R))
    after: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
    high, first, log_Z, sign = q.new_zeros(()), v, q.new_zeros(()), q.new_zeros(())
    for level in range(L):
        g, K0, V0 = gates[:, level], levels.K[level], levels.V[level]
        K, V, decay = write(K0, g, k), write(V0, g, v), levels.decay[level] + g
        b = slot_bias_at(own_level(how.slot_bias, level, 5), decay, t, T, R)
        W, a = (own_level(x, level, axes) for x, axes in zip(how.perceptron or (None, None), (4, 3), strict=True))
        p = read_token(how.scale * query @ K.mT, b, how.read, W, a)
        if how.normalised:
            high = high + p.weight / torch.where(p.Z == 0, torch.inf, p.Z)[..., None] @ V
        else:
            high = high + p.shift.exp()[..., None] * p.weight @ V
        if level == 0:
            log_Z, sign = log_of(p), p.Z.sign()
        elif how.read == "softmax":
            some = (~b.isneginf()).any(-1)
            prior = torch.where(some[..., None], b, 0).logsumexp(-1)
            log_Z = log_Z + torch.where(some, torch.where(some, log_of(p), 0) - prior, 0)
        w = -torch.expm1(g)
        total = w.sum(-1, keepdim=True)
        rho = torch.where(total > 0, w / torch.where(total > 0, total, 1), 0)[..., None, :]
        k, v = k - (rho @ (K0 if how.residual == "pre" else K))[..., 0, :], v - (rho @ (V0 if how.residual == "pre" else V))[..., 0, :]
        for kept, new in zip(after, (K, V, decay), strict=True):
            kept.append(new)
    low_V = None if levels.low_V is None or low_gate is None else write(levels.low_V, low_gate, first)
    if how.low_query is not None:
        low = how.low_query[:, t].unflatten(1, (H, R)) @ (after[1][0] if low_V is None else low_V)
        if how.branch_gate is None:
            high = low + high
        else:
            beta = how.branch_gate.expand(B, T, HQ)[:, t].unflatten(1, (H, R))[..., None]
            high = beta * low + (1 - beta) * high
    return Levels(*after, low_V), Far(high, log_Z, sign)


def own_level(x: Any, level: int, axes: int) -> Any:
    """The part of an option that belongs to one level, if the option has a level axis first.

    Equation:  x[l] where x has `axes` axes, else x
    Shapes:    [L or 1, ...] -> [...]
    Numerics:  a view.
    Source:    docs/theory/levels.md.

    >>> own_level(torch.tensor([3.0, 4.0]), 1, 1).item(), own_level("mass", 1, 1)
    (4.0, 'mass')
    """
    return x[level if x.shape[0] > 1 else 0] if isinstance(x, Tensor) and x.ndim == axes else x
