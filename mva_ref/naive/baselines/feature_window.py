"""A sliding window joined with kernel features of what has left it: what GLA-SW and LoLCATs share."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, einsum

from ...ring import advance, delay_gates, fresh_ring, room
from ...types import FeatureState, MatrixState, Output, WindowState
from ..merging import hard, soft
from ..orders import ratio
from ..reads import Mass
from ..recurrent.tokenwise import Far, blend, put, stacked
from ..softmax_attention import attend, group
from ..window import window_keys
from .decayed import decayed_matrix


class Hybrid(NamedTuple):
    """What a hybrid is: features of queries and keys, the window's sizes, and how much the window's mass counts (lse, largest score)."""

    phi_q: Callable[[Tensor], Tensor]
    phi_k: Callable[[Tensor], Tensor]
    window: int
    sinks: int
    scale: float
    mass: Callable[[Tensor, Tensor], Tensor]
    hard_weight: Tensor | None = None


def _start(how: Hybrid, k: Tensor, v: Tensor, g: Tensor | None, s0: WindowState | None, keep: bool) -> WindowState:
    if s0 is not None:
        return s0
    window, sinks = (how.window, how.sinks) if keep else room(how.window, how.sinks, k.shape[1])
    features = how.phi_k(k.new_zeros(1, 1, *k.shape[2:])).shape[-1]
    S = k.new_zeros(k.shape[0], k.shape[2], features, v.shape[-1])
    return fresh_ring(k, v, g, FeatureState(S, torch.zeros_like(S[..., 0])), None, window, sinks)


def window_matrix(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, how: Hybrid, s0: WindowState | None, keep: bool, key_mask: Tensor | None
) -> Output:
    """Softmax over window and sinks, features over the rest, as matrices.

    Equation:  o = (Z^W o^W + Z^H o^H) / (Z^W + Z^H),   o^H = phi(q) S / phi(q).z,   Z^H = phi(q).z   (hard: b o^W + (1 - b) o^H)
               S_t, z_t over tokens n <= i <= t - W, decayed by their own gates as they leave the window
    Shapes:    q [B, T, HQ, D], k [B, T, H, D], v [B, T, H, V], g [B, T, H, F] or None -> o [B, T, HQ, V], lse [B, T, HQ]
    Numerics:  one shared maximum for both masses; an empty history counts nothing.
    Source:    docs/theory/window.md.

    >>> q, k, v = torch.randn(3, 1, 5, 2, 4).unbind(0); how = Hybrid(torch.exp, torch.exp, 1, 0, 1.0, lambda lse, top: lse + torch.inf)
    >>> window_matrix(q, k, v, None, how._replace(window=5, mass=lambda lse, top: lse), None, False, None).o[:, 0].equal(v[:, 0])
    True
    """
    (B, T, H, _), HQ = k.shape, q.shape[2]
    s0 = _start(how, k, v, g, s0, keep)
    books = advance(k, v, key_mask, s0)
    keys, values, visible = window_keys(books, T)
    near = attend(q, keys, values, visible, how.scale)
    x = how.scale * einsum("bthrd,bihd->bthri", group(q, H), keys)
    top = torch.where(visible[:, :, None, None], x, -torch.inf).amax(-1).flatten(2, 3) if keys.shape[1] else near.lse
    assert near.lse is not None and top is not None
    left, gone = books.k[:, :T], books.v[:, :T]
    gates, ring_g = (k.new_zeros(B, T, H, 1), None) if g is None else delay_gates(g, s0.g, s0.seen, books.counts)
    both = torch.cat([gone, torch.ones_like(gone[..., :1])], -1)                                    # the sum is one more value
    start = MatrixState(torch.cat([s0.slots.S, s0.slots.z[..., None]], -1))
    sums, end = decayed_matrix(how.phi_q(q), how.phi_k(left), both, gates, 1.0, books.counts, start)
    Z, empty = sums[..., -1], (books.history == 0)[..., None].expand(B, T, HQ)
    far = Output(ratio(sums[..., :-1], Z))
    near = near._replace(lse=how.mass(near.lse, top))
    if how.hard_weight is None:
        some = ~empty & (Z > 0)
        out = soft(near, far, Mass(torch.where(some, torch.where(some, Z, 1).log(), -torch.inf)))
    else:
        out = hard(near, far, empty, how.hard_weight.expand(B, T, HQ))
    history = FeatureState(end.S[..., :-1], end.S[..., -1])
    return Output(out.o, books.after._replace(slots=history, g=ring_g) if keep else None, out.lse)


def window_steps(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, how: Hybrid, s0: WindowState | None, keep: bool, key_mask: Tensor | None
) -> Output:
    """The same one token at a time, with a ring of its own.

    Equation:  as `window_matrix`; S <- diag(e^g) S + phi(k) (x) v, z <- e^g z + phi(k) for the token that leaves the window
    Shapes:    as `window_matrix`
    Numerics:  as `window_matrix`.
    Source:    docs/theory/window.md.

    >>> q, k, v = torch.randn(3, 1, 5, 2, 4).unbind(0); how = Hybrid(torch.exp, torch.exp, 2, 1, 1.0, lambda lse, top: lse)
    >>> torch.allclose(*(f(q, k, v, None, how, None, False, None).o for f in (window_matrix, window_steps)), atol=1e-5)
    True
    """
    (B, T, H, _), HQ = k.shape, q.shape[2]
    s0 = _start(how, k, v, g, s0, keep)
    (S, z), (ring_k, ring_v, ring_g, _, present, sink_k, sink_v, sink_present, seen, written) = s0.slots, s0[1:]
    W, n = ring_k.shape[1], sink_k.shape[1]
    o, lse = [], []
    for t in range(T):
        here_now = k.new_ones(B, dtype=torch.bool) if key_mask is None else key_mask[:, t]
        here, is_sink = torch.arange(W, device=k.device) == (seen % W)[:, None], torch.arange(n, device=k.device) == seen[:, None]
        leaving = torch.arange(B, device=k.device), seen % W
        counts = present[leaving] & (seen - W >= n)
        written, F = written + counts, how.phi_k(ring_k[leaving][:, None])[:, 0]
        left = torch.ones_like(F) if ring_g is None else put(counts, ring_g[leaving]).exp()
        S = put(counts, left[..., None] * S + F[..., None] * ring_v[leaving][:, :, None], S)
        z = put(counts, left * z + F, z)
        ring_k, ring_v = put(here, k[:, t, None], ring_k), put(here, v[:, t, None], ring_v)
        ring_g = None if ring_g is None or g is None else put(here, g[:, t, None], ring_g)
        sink_k, sink_v = put(is_sink, k[:, t, None], sink_k), put(is_sink, v[:, t, None], sink_v)
        present, sink_present = put(here, here_now[:, None], present), put(is_sink, here_now[:, None], sink_present)
        stored = sink_present & (torch.arange(n, device=k.device) <= (seen - W)[:, None])
        seen = seen + 1
        visible = torch.cat([present, stored], 1)[:, None, None]
        x = how.scale * einsum("bhrd,bihd->bhri", q[:, t].unflatten(1, (H, -1)), torch.cat([ring_k, sink_k], 1))
        x, some = torch.where(visible, x, -torch.inf), visible.any(-1)
        near = torch.where(some, torch.where(some[..., None], x, 0).logsumexp(-1), -torch.inf)
        window_o = einsum("bhri,bihv->bhrv", (x - torch.where(some, near, 0)[..., None]).exp(), torch.cat([ring_v, sink_v], 1))
        phi = how.phi_q(q[:, t, None])[:, 0].unflatten(1, (H, -1))
        Z = einsum("bhrf,bhf->bhr", phi, z)
        positive = Z > 0
        far = Far(einsum("bhrf,bhfv->bhrv", phi, S) / torch.where(positive, Z, torch.inf)[..., None],
                  torch.where(positive, torch.where(positive, Z, 1).log(), -torch.inf), positive.to(Z.dtype))
        b = None if how.hard_weight is None else how.hard_weight.expand(B, T, HQ)[:, t].unflatten(1, (H, -1))
        mass = how.mass(near.flatten(1, 2), x.amax(-1).flatten(1, 2)).unflatten(1, (H, -1))
        out, total = blend(window_o, mass, far, (written == 0)[:, None, None], b)
        o.append(out)
        lse.append(total)
    state = WindowState(FeatureState(S, z), ring_k, ring_v, ring_g, None, present, sink_k, sink_v, sink_present, seen, written)
    log_Z = stacked(lse, q.new_zeros(B, 0, HQ)) if how.hard_weight is None else None
    return Output(stacked(o, q.new_zeros(B, 0, HQ, v.shape[-1])), state if keep else None, log_Z)
