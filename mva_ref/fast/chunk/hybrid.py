"""A window joined with features of what has left it, linear in T. Equations: mva_ref.naive.baselines.feature_window."""

from collections.abc import Callable

import torch
from torch import Tensor

from ...frame import form
from ...ring import advance, delay_gates, fresh_ring, room
from ...types import FeatureState, MatrixState, Output, WindowState
from .decayed import decayed_chunks
from .local import local_attention
from .reading import masked_softmax

Map = Callable[[Tensor], Tensor]


def hybrid(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, phi_q: Map, phi_k: Map, window: int, sinks: int, scale: float, log_weight: Tensor,
    own_maximum: bool, hard_weight: Tensor | None, s0: WindowState | None, keep: bool, key_mask: Tensor | None,
) -> Output:
    """Blocked local attention, and a normalised decayed recurrence over the delayed tokens; own_maximum: its mass lacks its level."""
    (B, T, H, _), HQ = k.shape, q.shape[2]
    if s0 is None:
        window, sinks = (window, sinks) if keep else room(window, sinks, T)
        z = torch.zeros_like(phi_k(k.new_zeros(B, 1, *k.shape[2:]))[:, 0])
        s0 = fresh_ring(k, v, g, FeatureState(z[..., None].expand(*z.shape, v.shape[-1]), z), None, window, sinks)
    books = advance(k, v, key_mask, s0)
    near, log_near, top = local_attention(q, books, scale)
    log_near = log_near + log_weight - (torch.where(top.isneginf(), 0, top) if own_maximum else 0)
    gates, ring_g = (k.new_zeros(B, T, H, 1), None) if g is None else delay_gates(g, s0.g, s0.seen, books.counts)
    values = torch.cat([books.v[:, :T], torch.ones_like(books.v[:, :T, :, :1])], -1)                # the sum is one more value
    start = MatrixState(torch.cat([s0.slots.S, s0.slots.z[..., None]], -1))
    sums, end = decayed_chunks(phi_q(q), phi_k(books.k[:, :T]), values, gates, 1.0, books.counts, start)
    far, Z, empty = sums[..., :-1], sums[..., -1], (books.history == 0)[..., None].expand(B, T, HQ)
    some = ~empty & (Z > 0)
    divisor = torch.where(some, Z, 1)
    far, lse = torch.where(some[..., None], far / divisor[..., None], 0), None
    if hard_weight is None:
        share, lse = masked_softmax(torch.stack([log_near, torch.where(some, divisor.log(), -torch.inf)], -1))
    else:
        b = torch.where(empty, 1, hard_weight.expand(B, T, HQ))
        share = torch.stack([b, 1 - b], -1)
    o = share[..., :1] * near + share[..., 1:] * far
    history = FeatureState(end.S[..., :-1], end.S[..., -1])
    return Output(o, books.after._replace(slots=history, g=ring_g) if keep else None, lse)


@form
def gla_sw(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, window: int, feature_map: Map, *, integration: str = "soft",
    hard_weight: Tensor | None = None, sinks: int = 0, scale: float | None = None, initial_state: WindowState | None = None,
    output_final_state: bool = False, key_mask: Tensor | None = None,
) -> Output:
    """GLA-SW, linear in T; see mva_ref.naive.baselines.gla_sw."""
    scale, b = q.shape[-1] ** -0.5 if scale is None else scale, hard_weight if integration == "hard" else None
    return hybrid(q, k, v, g, feature_map, feature_map, window, sinks, scale, q.new_zeros(()), False, b, initial_state, output_final_state,
                  key_mask)


@form
def lolcats(
    q: Tensor, k: Tensor, v: Tensor, window: int, *, W_q: Tensor | None = None, W_k: Tensor | None = None,
    window_weight: Tensor | None = None, own_maximum: bool = True, scale: float | None = None, initial_state: WindowState | None = None,
    output_final_state: bool = False, key_mask: Tensor | None = None,
) -> Output:
    """LoLCATs, linear in T; see mva_ref.naive.baselines.lolcats."""

    def features(W: Tensor | None) -> Map:
        def phi(x: Tensor) -> Tensor:
            y = x if W is None else torch.einsum("bthd,hde->bthe", x, W)
            return torch.cat([y.softmax(-1), (-y).softmax(-1)], -1)

        return phi

    scale = q.shape[-1] ** -0.5 if scale is None else scale
    log_weight = q.new_zeros(()) if window_weight is None else torch.where(window_weight > 0, window_weight, 0).log()
    out = hybrid(q, k, v, None, features(W_q), features(W_k), window, 0, scale, log_weight, own_maximum, None, initial_state,
                 output_final_state, key_mask)
    return out._replace(lse=None if own_maximum else out.lse)
