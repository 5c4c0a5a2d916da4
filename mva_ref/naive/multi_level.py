"""Several levels of slots read by one query: the sum of MVA. Theory: docs/theory/levels.md (P16, P19) and window.md."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..types import SlotState
from .levels import residual
from .reads import Mass, Perceptron, normalised_read, perceptron_scores
from .slots import bias, total_decay
from .softmax_attention import group, normalise
from .writes import end_state, slot_scores, slot_values, write_map


class Low(NamedTuple):
    """The low-order branch: r [B, T, HQ, M]; "shared", "separate" with own gates g [B, T, H, M], or "gated" with gate [B, T, HQ]."""

    r: Tensor | None = None
    branches: str = "shared"
    g: Tensor | None = None
    gate: Tensor | None = None


class Reading(NamedTuple):
    """How slots are read: scale, read, perceptron (W, a), slot_bias; and whether each read is divided by its own sum."""

    scale: float
    read: str | int = "softmax"
    perceptron: Perceptron | None = None
    slot_bias: str | Tensor | None = None
    normalised: bool = False


def level_of(x: Tensor | None, level: int, levels: int, ndim: int) -> Tensor | None:
    """One level's part of an option that may carry a leading level axis.

    Equation:  x[l] where x has more than ndim axes, else x
    Shapes:    [L or 1, ...] of ndim + 1 axes, or at most ndim axes -> at most ndim axes
    Numerics:  a view.
    Source:    docs/theory/levels.md.

    >>> level_of(torch.tensor([[1.0], [2.0]]), 1, 2, 1).item(), level_of(torch.tensor([3.0]), 1, 2, 1).item()
    (2.0, 3.0)
    """
    return x if x is None or x.ndim <= ndim else x.expand(levels, *x.shape[1:])[level]


def product_mass(masses: list[Mass], biases: list[Tensor], read: str | int) -> Mass:
    """Mass of the product vocabulary.

    Equation:  log Z = lse(s^1 + b^1) + sum_{l >= 2} [lse(s^l + b^l) - lse(b^l)] for softmax; Z of the first level for other reads
    Shapes:    Mass of [B, T, H, R] and b [B, T, H, R, M] per level -> Mass of [B, T, H, R]
    Numerics:  a level with every slot hidden (b = -inf) adds nothing.
    Source:    P16, P23; the correction lse(b) is log M where b = 0.

    >>> zero = torch.zeros(1, 1, 1, 1); b = torch.zeros(1, 1, 1, 1, 4)
    >>> product_mass([Mass(zero), Mass(zero + 3)], [b, b], "softmax").log.item() == 3 - torch.tensor(4.0).log().item()
    True
    """
    log = masses[0].log
    for mass, b in zip(masses[1:], biases[1:], strict=True):
        if read == "softmax":
            prior = normalise(b)[1]
            log = log + torch.where(prior.isneginf(), 0, mass.log - torch.where(prior.isneginf(), 0, prior))
    return Mass(log, masses[0].sign)


def low_branch(low: Low, v: Tensor, g: Tensor, s0: SlotState | None, first_V: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The linear, signed read r_t V^1_t, and the second value state of "separate" branches.

    Equation:  r_t V^1_t ("shared", "gated"), or r_t times a value state with its own gates ("separate")
    Shapes:    r [B, T, HQ, M], v [B, T, H, V], g [B, T, H, M], first_V [B, H, M, V] -> o [B, T, H, R, V], low_V [B, H, M, V]
    Numerics:  un-normalised.
    Source:    MetaLA (2411.10741); sharing the value state is our reading.

    >>> low_branch(Low(), torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1), None, None)
    (None, None)
    """
    if low.r is None:
        return None, None
    r = group(low.r, v.shape[2])
    if low.branches != "separate":
        return slot_values(r, v, write_map(g), first_V), None
    assert low.g is not None
    V0 = s0.low_V if s0 else None
    return slot_values(r, v, write_map(low.g), V0), end_state(low.g, v, V0)


def read_levels(
    q: Tensor, k: Tensor, v: Tensor, g_levels: Tensor, low: Low, how: Reading, when: str, s0: SlotState | None
) -> tuple[Tensor, Mass, SlotState]:
    """The reads of all levels, added up; each level works on what the one before it lost.

    Equation:  o_t = r_t V^1_t + sum_l p^l_t V^l_t   (gated: beta r_t V^1_t + (1 - beta) sum_l p^l_t V^l_t)
    Shapes:    q [B, T, HQ, D], k [B, T, H, D], v [B, T, H, V], g_levels [L, B, T, H, M] -> o [B, T, H, R, V], Mass of [B, T, H, R]
    Numerics:  an un-normalised sigmoid read keeps its sum; every other read is divided by it.
    Source:    P16, P19.

    >>> q, k, v = torch.randn(3, 1, 5, 2, 4).unbind(0); g = torch.full((1, 1, 5, 2, 1), -torch.inf)
    >>> torch.equal(read_levels(q, k, v, g, Low(), Reading(1.0), "post", None)[0][:, :, :, 0], v)
    True
    """
    L, HQ = g_levels.shape[0], q.shape[2]
    first = None if s0 is None else s0.V[:, 0]
    linear, low_V = low_branch(low, v, g_levels[0], s0, first)
    o, states = torch.zeros_like(group(q, k.shape[2])[..., :1]), []
    masses: list[Mass] = []
    biases: list[Tensor] = []
    for level, g in enumerate(g_levels):
        K0, V0, decay0 = (x[:, level] if x is not None else None for x in s0[:3]) if s0 else (None, None, None)
        b = how.slot_bias if isinstance(how.slot_bias, str) else level_of(how.slot_bias, level, L, 4)
        W, a = how.perceptron if how.perceptron is not None else (None, None)
        own = level_of(W, level, L, 3), level_of(a, level, L, 2)
        written, b = write_map(g), bias(b, g, decay0, HQ)
        s = slot_scores(q, k, written, K0, how.scale)
        if how.read == "sigmoid" and not how.normalised:
            p, mass = b.exp() * perceptron_scores(s, own).sigmoid(), Mass(b[..., 0])
        else:
            p, mass = normalised_read(s, b, how.read, own)
        o = o + slot_values(p, v, written, V0)
        states.append((end_state(g, k, K0), end_state(g, v, V0), total_decay(g, decay0)))
        masses, biases = [*masses, mass], [*biases, b]
        k, v = residual(k, g, written, K0, when), residual(v, g, written, V0, when)
    if linear is not None:
        beta = None if low.gate is None else group(low.gate.expand(q.shape[:3]), k.shape[2])[..., None]
        o = linear + o if beta is None else beta * linear + (1 - beta) * o
    K, V, log_decay = (torch.stack(x, 1) for x in zip(*states, strict=True))
    return o, product_mass(masses, biases, how.read), SlotState(K, V, log_decay, low_V)
