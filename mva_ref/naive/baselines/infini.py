"""Infini-attention: softmax inside a segment, a linear memory of the segments before it, and one number a head to mix them."""

import torch
from torch import Tensor, einsum

from ...frame import form
from ...ring import advance, fresh_ring
from ...types import FeatureState, Output, WindowState
from ..merging import hard
from ..orders import ratio
from ..recurrent.tokenwise import put, stacked
from ..softmax_attention import attend, group
from .linear import elu_features


def _start(k: Tensor, v: Tensor, room: int, s0: WindowState | None) -> WindowState:
    if s0 is not None:
        return s0
    S = k.new_zeros(k.shape[0], k.shape[2], k.shape[-1], v.shape[-1])
    return fresh_ring(k, v, None, FeatureState(S, torch.zeros_like(S[..., 0])), None, room, 0)


def _weight(hard_weight: Tensor | None, like: Tensor) -> Tensor:
    return like.new_full(like.shape[:3], 0.5) if hard_weight is None else hard_weight.expand(like.shape[:3])


@form
def infini(
    q: Tensor, k: Tensor, v: Tensor, segment: int, *, hard_weight: Tensor | None = None, scale: float | None = None,
    initial_state: WindowState | None = None, output_final_state: bool = False, key_mask: Tensor | None = None,
) -> Output:
    """Infini-attention with its linear memory.

    Equation:  o_t = b softmax(scale q_t.k_i over i <= t in the segment of t) v + (1 - b) phi(q_t) S / phi(q_t).z,
               S = sum phi(k_i) (x) v_i,   z = sum phi(k_i)   over all segments before that of t,   phi = elu + 1
    Shapes:    q [B, T, HQ, D], k [B, T, H, D], v [B, T, H, V], b = hard_weight broadcast to [B, T, HQ], 1/2 by default -> o [B, T, HQ, V]
    Numerics:  at least float32, float64 stays; b = 1 while the memory is empty (there it would read 0 / 0); segments count tokens by index.
    Source:    2404.07143; b there is the sigmoid of one parameter a head.

    One segment is softmax attention:

    >>> from mva_ref.naive.softmax_attention import softmax
    >>> q, k, v = torch.randn(3, 1, 5, 2, 4).unbind(0)
    >>> torch.allclose(infini(q, k, v, 5).o, softmax(q, k, v).o, atol=1e-6)
    True
    """
    (_, T, H, _), scale = k.shape, q.shape[-1] ** -0.5 if scale is None else scale
    s0 = _start(k, v, segment if output_final_state else 1, initial_state)
    books, W = advance(k, v, key_mask, s0), s0.k.shape[1]
    at = s0.seen[:, None] + torch.arange(-W, T, device=k.device)                                    # index of a token of ring and call
    rows = at[:, W:] // segment
    causal = torch.arange(W + T, device=k.device) <= W + torch.arange(T, device=k.device)[:, None]
    local = books.there[:, None] & causal & (at[:, None] // segment == rows[..., None])
    past = books.there[:, None] & (at[:, None] // segment < rows[..., None])
    near = attend(q, books.k, books.v, local, scale)
    phi_q, phi_k = group(elu_features(q), H), elu_features(books.k)
    a = torch.where(past[:, :, None, None], einsum("bthrf,bihf->bthri", phi_q, phi_k), 0)
    Z = a.sum(-1) + einsum("bthrf,bhf->bthr", phi_q, s0.slots.z)
    far = ratio(einsum("bthri,bihv->bthrv", a, books.v) + einsum("bthrf,bhfv->bthrv", phi_q, s0.slots.S), Z)
    empty = (s0.written[:, None] + past.sum(-1) == 0)[..., None].expand(q.shape[:3])
    out = hard(near, Output(far.flatten(2, 3)), empty, _weight(hard_weight, q))
    if not output_final_state:
        return Output(out.o)
    gone = books.there & (at // segment < books.after.seen[:, None] // segment)
    moved = gone[..., None, None] * phi_k
    slots = FeatureState(s0.slots.S + einsum("bihf,bihv->bhfv", moved, books.v), s0.slots.z + moved.sum(1))
    stays = torch.arange(W, device=k.device) < books.after.seen[:, None] % segment                 # the ring holds the open segment alone
    return Output(out.o, books.after._replace(slots=slots, present=books.after.present & stays, written=s0.written + gone.sum(1)))


@form
def recurrent(
    q: Tensor, k: Tensor, v: Tensor, segment: int, *, hard_weight: Tensor | None = None, scale: float | None = None,
    initial_state: WindowState | None = None, output_final_state: bool = False, key_mask: Tensor | None = None,
) -> Output:
    """`infini` one token at a time.

    Equation:  read segment and memory; when a segment is full, its keys and values go to S and z, and the next one begins
    Shapes:    as `infini`
    Numerics:  as `infini`.
    Source:    2404.07143.

    >>> q, k, v = torch.randn(3, 1, 5, 2, 4).unbind(0)
    >>> torch.allclose(recurrent(q, k, v, 2).o, infini(q, k, v, 2).o, atol=1e-5)
    True
    """
    (B, T, H, _), HQ, scale = k.shape, q.shape[2], q.shape[-1] ** -0.5 if scale is None else scale
    s0 = _start(k, v, segment if output_final_state else min(segment, max(T, 1)), initial_state)   # no more than the tokens can fill
    (S, z), (ring_k, ring_v, _, _, present, *sinks, seen, written) = s0.slots, s0[1:]
    weight, o = _weight(hard_weight, q), []
    for t in range(T):
        here = torch.arange(ring_k.shape[1], device=k.device) == (seen % segment)[:, None]
        counted = k.new_ones(B, 1, dtype=torch.bool) if key_mask is None else key_mask[:, t, None]
        ring_k, ring_v, present = put(here, k[:, t, None], ring_k), put(here, v[:, t, None], ring_v), put(here, counted, present)
        x = scale * einsum("bhrd,bihd->bhri", q[:, t].unflatten(1, (H, -1)), ring_k)
        x, some = torch.where(present[:, None, None], x, -torch.inf), present.any(-1)[:, None, None, None]
        near = einsum("bhri,bihv->bhrv", torch.where(some, torch.where(some, x, 0).softmax(-1), 0), ring_v)
        phi = elu_features(q[:, t]).unflatten(1, (H, -1))
        Z = einsum("bhrf,bhf->bhr", phi, z)[..., None]
        far = einsum("bhrf,bhfv->bhrv", phi, S) / torch.where(Z == 0, torch.inf, Z)
        b = torch.where((written == 0)[:, None, None], 1, weight[:, t].unflatten(1, (H, -1)))[..., None]
        o.append(b * near + (1 - b) * far)
        seen = seen + 1
        full = (seen % segment == 0)[:, None] & present
        moved = full[..., None, None] * elu_features(ring_k)
        S, z, written = S + einsum("bihf,bihv->bhfv", moved, ring_v), z + moved.sum(1), written + full.sum(1)
        present = present & ~full
    state = WindowState(FeatureState(S, z), ring_k, ring_v, None, None, present, sinks[0], sinks[1], sinks[2], seen, written)
    return Output(stacked(o, q.new_zeros(B, 0, HQ, v.shape[-1])), state if output_final_state else None)
