"""MVA from two operations on slots, whoever computes them: scores q_t.K_t and values p_t V_t. Equations: mva_ref.naive.multi_level.

An engine computes them for the gates of one level; see Engine. The plain chunked form and the Triton kernels are engines.
"""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..types import SlotState
from .chunk.reading import Perceptron, log_written, masked_softmax, read

Read = str | int


class Attended(NamedTuple):
    """One level read by softmax: output, its logsumexp, the last slots, and what the level has lost of keys and values, if wanted."""

    o: Tensor
    lse: Tensor
    K: Tensor
    V: Tensor
    lost: tuple[Tensor, Tensor] | None


class Level(Protocol):
    """Slots under the gates g [B, T, H, M] of one level. X0 are slots before the first token, [N, H, M, ...]."""

    def scores(self, q: Tensor, k: Tensor, K0: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """scale q_t.K_t [B, T, H, R, M] for q [B, T, H, R, D], k [B, T, H, D], and the slots K after the last token."""

    def values(self, p: Tensor, v: Tensor, V0: Tensor, before: bool = False) -> tuple[Tensor, Tensor]:
        """p_t V_t [B, T, H, R, V] (before: p_t V_{t-1}) for p [B, T, H, R, M], v [B, T, H, V], and the slots V after the last token."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, low: Tensor | None, K0: Tensor, V0: Tensor, scale: float,
        lost: str | None,
    ) -> Attended | None:
        """(softmax(scores + bias) + low) V_t, and what else is wanted at once; None where there is no such kernel."""

    def running(self, initial: Tensor) -> Tensor:
        """Total log decay [B, T, H, M] of the slots at every token; initial [N, H, M]."""

    def total(self, initial: Tensor) -> Tensor:
        """Total log decay [N, H, M] of the slots after the last token."""


class Engine(Protocol):
    """Makes a Level of gates."""

    def __call__(self, g: Tensor) -> Level: ...


class Options(NamedTuple):
    """What a multi-level read takes beside q, k, v and gates; see mva_ref.naive.mva."""

    low_query: Tensor | None
    branches: str
    low_g: Tensor | None
    branch_gate: Tensor | None
    scale: float
    read: Read
    perceptron: Perceptron | None
    residual: str
    slot_bias: str | Tensor | None
    normalised: bool
    state: bool     # is the state after the last token wanted?


def silent(g: Tensor, key_mask: Tensor | None) -> Tensor:
    """Gates [..., B, T, H, M] with 0 for masked tokens: nothing is written, nothing decays."""
    return g if key_mask is None else torch.where(key_mask[..., None, None], g, 0)


def groups(x: Tensor, H: int) -> Tensor:
    """Query heads [B, T, HQ, ...] as [B, T, H, R, ...]."""
    grouped: Tensor = x.unflatten(2, (H, x.shape[2] // H))
    return grouped


def _level(x: Any, level: int, axes: int) -> Any:
    """The part of an option with a leading level axis (more than `axes` axes) that belongs to this level."""
    return x[level if x.shape[0] > 1 else 0] if isinstance(x, Tensor) and x.ndim > axes else x


def _bias(slot_bias: str | Tensor | None, at: Level, g: Tensor, initial: Tensor, HQ: int) -> Tensor | None:
    B, T, H, M = g.shape
    if isinstance(slot_bias, Tensor):
        return groups(slot_bias.expand(B, T, HQ, M), H)
    if slot_bias is None:
        return None
    return log_written(at.running(initial))[:, :, :, None].expand(B, T, H, HQ // H, M)


def lost(x: Tensor, g: Tensor, at: Level, X0: Tensor, when: str) -> Tensor:
    """x_t - rho_t X_t ("post") or x_t - rho_t X_{t-1} ("pre"): what one level loses and the next one gets."""
    w = -torch.expm1(g)
    total = w.sum(-1, keepdim=True)
    rho = torch.where(total > 0, w / torch.where(total > 0, total, 1), 0)
    return x - at.values(rho[:, :, :, None], x, X0, before=when == "pre")[0][:, :, :, 0]


def read_levels(
    engine: Engine, q: Tensor, k: Tensor, v: Tensor, g_levels: Tensor, how: Options, state: SlotState
) -> tuple[Tensor, Tensor, Tensor | None, SlotState]:
    """o [B, T, H, R, V], log |Z| and its sign [B, T, H, R], and the state after the last token."""
    (B, T, HQ, _), H = q.shape, k.shape[2]
    queries = groups(q, H)
    r = None if how.low_query is None else groups(how.low_query, H)
    beta = None if how.branch_gate is None else groups(how.branch_gate.expand(B, T, HQ), H)[..., None]
    o, log_Z, sign, ends, values = None, q.new_zeros(()), None, [], v
    assert state.K is not None
    for level, g in enumerate(g_levels):
        at, K0, V0 = engine(g), state.K[:, level], state.V[:, level]
        initial = torch.zeros_like(V0[..., 0]) if state.log_decay is None else state.log_decay[:, level]
        b = _bias(_level(how.slot_bias, level, 4), at, g, initial, HQ)
        W, a = how.perceptron or (None, None)
        own = _level(W, level, 3), _level(a, level, 2)
        low = r if level == 0 and how.branches != "separate" else None      # it reads the same slots, so the weights of both add up
        more = how.residual if level + 1 < len(g_levels) else None
        fused = at.attend(queries, k, values, b, low, K0, V0, how.scale, more) if how.read == "softmax" and beta is None else None
        left = None
        if fused is not None:
            part, log_own, K, V, left = fused
            sign_own = None
        else:
            s, K = at.scores(queries, k, K0, how.scale)
            p, log_own, sign_own = read(s, torch.zeros_like(s) if b is None else b, how.read, own, how.normalised)
            p = p if beta is None else (1 - beta) * p
            p = p if low is None else p + (low if beta is None else beta * low)
            part, V = at.values(p, values, V0)
        if level == 0:
            log_Z, sign = log_own, sign_own
        elif how.read == "softmax":
            prior = masked_softmax(g.new_zeros(1, g.shape[-1]) if b is None else b)[1]
            used = ~prior.isneginf()
            log_Z = log_Z + torch.where(used, torch.where(used, log_own, 0) - torch.where(used, prior, 0), 0)
        o = part if o is None else o + part
        ends.append((K, V, at.total(initial) if how.state else initial))
        if more:
            k, values = left or (lost(k, g, at, K0, more), lost(values, g, at, V0, more))
    assert o is not None
    low_V = None
    if r is not None and how.low_g is not None:
        low, low_V = engine(how.low_g).values(r, v, torch.zeros_like(state.V[:, 0]) if state.low_V is None else state.low_V)
        o = o + low
    K_T, V_T, log_decay = (torch.stack(x, 1) for x in zip(*ends, strict=True))
    return o, log_Z, sign, SlotState(K_T, V_T, log_decay, low_V)
