"""MetaLA, GSA, MVA and their window forms, linear in T. Arguments and equations: the functions of the same name in mva_ref.naive."""

from typing import Any

import torch
from torch import Tensor

from ...frame import form, tree_map
from ...ring import advance, delay_gates, fresh_slots, fresh_state, room
from ...types import Output, SlotState, WindowState, has_mass
from .local import local_attention
from .reading import Perceptron, log_written, masked_softmax, read
from .scan import chunk_maps, entry_states, join, losses, scores, split, values

Read = str | int


def _silent(g: Tensor | None, key_mask: Tensor | None) -> Tensor | None:
    """Gates [..., B, T, H, M] with 0 for masked tokens: nothing is written, nothing decays."""
    return g if g is None or key_mask is None else torch.where(key_mask[..., None, None], g, 0)


def _groups(x: Tensor, H: int) -> Tensor:
    grouped: Tensor = x.unflatten(2, (H, x.shape[2] // H))
    return grouped


def _level(x: Any, level: int, axes: int) -> Any:
    """The part of an option with a leading level axis (more than `axes` axes) that belongs to this level."""
    return x[level if x.shape[0] > 1 else 0] if isinstance(x, Tensor) and x.ndim > axes else x


def _bias(slot_bias: str | Tensor | None, g: Tensor, log_decay: Tensor, HQ: int) -> Tensor:
    B, T, H, M = g.shape
    if isinstance(slot_bias, Tensor):
        return _groups(slot_bias.expand(B, T, HQ, M), H)
    b = torch.zeros_like(g) if slot_bias is None else log_written(g, log_decay)
    return b[:, :, :, None].expand(B, T, H, HQ // H, M)


def _low(r: Tensor, v: Tensor, g: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
    """The linear read r_t V_t [B, T, H, R, V] and the value state after the last token."""
    maps, values_ = chunk_maps(split(g)), split(v)
    entries, end = entry_states(maps, values_, initial)
    return join(values(split(_groups(r, g.shape[2])), values_, maps, entries), r.shape[1]), end


def _levels(
    q: Tensor, k: Tensor, v: Tensor, g_levels: Tensor, low_query: Tensor | None, branches: str, low_g: Tensor | None,
    branch_gate: Tensor | None, scale: float, kind: Read, perceptron: Perceptron | None, when: str, slot_bias: str | Tensor | None,
    state: SlotState, normalised: bool,
) -> tuple[Tensor, Tensor, Tensor | None, SlotState]:
    """o [B, T, H, R, V], log |Z| and its sign [B, T, H, R], and the state after the last token."""
    (B, T, HQ, _), H = q.shape, k.shape[2]
    queries, ks, vs = split(_groups(q, H)), split(k), split(v)
    r = None if low_query is None else split(_groups(low_query, H))
    high, low, log_Z, sign, ends = q.new_zeros(()), None, q.new_zeros(()), None, []
    assert state.K is not None
    for level, g in enumerate(g_levels):
        decay = torch.zeros_like(state.V[:, level, ..., 0]) if state.log_decay is None else state.log_decay[:, level]
        gates = split(g)
        maps = chunk_maps(gates)
        K, K_end = entry_states(maps, ks, state.K[:, level])
        V, V_end = entry_states(maps, vs, state.V[:, level])
        b = _bias(_level(slot_bias, level, 4), g, decay, HQ)
        W, a = perceptron or (None, None)
        own = _level(W, level, 3), _level(a, level, 2)
        p, log_own, sign_own = read(scale * join(scores(queries, ks, maps, K), T), b, kind, own, normalised)
        high = high + join(values(split(p), vs, maps, V), T)
        if level == 0:
            log_Z, sign = log_own, sign_own
            if r is not None and branches != "separate":
                low = join(values(r, vs, maps, V), T)
        elif kind == "softmax":
            prior = masked_softmax(b)[1]
            used = ~prior.isneginf()
            log_Z = log_Z + torch.where(used, torch.where(used, log_own, 0) - torch.where(used, prior, 0), 0)
        ends.append((K_end, V_end, decay + g.sum(1)))
        if level + 1 < len(g_levels):
            ks, vs = losses([(ks, K), (vs, V)], gates, maps, when)
    low_V = None
    if low_query is not None and low_g is not None:
        low, low_V = _low(low_query, v, low_g, torch.zeros_like(state.V[:, 0]) if state.low_V is None else state.low_V)
    if low is not None:
        if branch_gate is None:
            high = high + low
        else:
            beta = _groups(branch_gate.expand(B, T, HQ), H)[..., None]
            high = beta * low + (1 - beta) * high
    K_T, V_T, log_decay = (torch.stack(x, 1) for x in zip(*ends, strict=True))
    return high, log_Z, sign, SlotState(K_T, V_T, log_decay, low_V)


@form
def metala(
    r: Tensor, v: Tensor, g: Tensor, *, self_augmentation: Tensor | None = None, initial_state: SlotState | None = None,
    output_final_state: bool = False, key_mask: Tensor | None = None,
) -> Output:
    """MetaLA by chunks; see mva_ref.naive.metala."""
    (B, _, H, M), HQ = g.shape, r.shape[2]
    gates = _silent(g, key_mask)
    assert gates is not None
    o, end = _low(r, v, gates, v.new_zeros(B, H, M, v.shape[-1]) if initial_state is None else initial_state.V)
    if self_augmentation is not None:
        u = self_augmentation.expand(HQ, M).unflatten(0, (H, -1))
        score = (_groups(r, H) * u * -torch.expm1(gates)[:, :, :, None]).sum(-1, keepdim=True)
        o = o + (score * v[:, :, :, None]).sigmoid()
    decay = gates.sum(1)
    if initial_state is not None and initial_state.log_decay is not None:
        decay = decay + initial_state.log_decay
    return Output(o.flatten(2, 3), SlotState(None, end, decay) if output_final_state else None)


@form
def mva(
    q: Tensor, k: Tensor, v: Tensor, g_levels: Tensor, *, low_query: Tensor | None = None, branches: str = "shared",
    low_g: Tensor | None = None, branch_gate: Tensor | None = None, scale: float | None = None, read: Read = "softmax",
    perceptron: Perceptron | None = None, residual: str = "post", slot_bias: str | Tensor | None = None,
    initial_state: SlotState | None = None, output_final_state: bool = False, key_mask: Tensor | None = None,
) -> Output:
    """MVA by chunks, the levels one after the other; see mva_ref.naive.mva."""
    gates, low_gates = _silent(g_levels, key_mask), _silent(low_g, key_mask)
    assert gates is not None
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    o, log_Z, _, state = _levels(q, k, v, gates, low_query, branches, low_gates, branch_gate, scale, read, perceptron, residual, slot_bias,
                                 initial_state or fresh_slots(k, v, gates, low_g), normalised=read != "sigmoid")
    return Output(o.flatten(2, 3), state if output_final_state else None, log_Z.flatten(2, 3) if has_mass(read) else None)


@form
def mva_sw(
    q: Tensor, k: Tensor, v: Tensor, g_levels: Tensor, window: int, *, integration: str = "soft", hard_weight: Tensor | None = None,
    sinks: int = 0, low_query: Tensor | None = None, branches: str = "shared", low_g: Tensor | None = None,
    branch_gate: Tensor | None = None, scale: float | None = None, read: Read = "softmax", perceptron: Perceptron | None = None,
    residual: str = "post", slot_bias: str | Tensor | None = None, initial_state: WindowState | None = None,
    output_final_state: bool = False, key_mask: Tensor | None = None,
) -> Output:
    """MVA-SW: blocked local attention, and MVA by chunks over the delayed tokens; see mva_ref.naive.mva_sw."""
    (B, T, HQ, _), scale = q.shape, q.shape[-1] ** -0.5 if scale is None else scale
    window, sinks = (window, sinks) if initial_state or output_final_state else room(window, sinks, T)
    s0 = initial_state or fresh_state(k, v, g_levels, low_g, window, sinks)
    books = advance(k, v, key_mask, s0)
    gates, ring_g = delay_gates(g_levels.movedim(0, 2), s0.g, s0.seen, books.counts)
    low_gates, ring_low = (None, None) if low_g is None or s0.low_g is None else delay_gates(low_g, s0.low_g, s0.seen, books.counts)
    near, log_near = local_attention(q, books, scale)
    far, log_Z, sign, slots = _levels(q, books.k[:, :T], books.v[:, :T], gates.movedim(2, 0), low_query, branches, low_gates, branch_gate,
                                      scale, read, perceptron, residual, slot_bias, s0.slots, normalised=True)
    far, empty = far.flatten(2, 3), (books.history == 0)[..., None].expand(B, T, HQ)
    lse = None
    if integration == "hard":
        assert hard_weight is not None
        b = torch.where(empty, 1, hard_weight.expand(B, T, HQ))[..., None]
        o = b * near + (1 - b) * far
    else:
        log_far = torch.where(empty, -torch.inf, log_Z.flatten(2, 3))
        if sign is None:
            share, lse = masked_softmax(torch.stack([log_near, log_far], -1))
        else:
            top = torch.maximum(log_near, log_far).detach()
            top = torch.where(top.isneginf(), 0, top)
            mass = torch.stack([(log_near - top).exp(), (log_far - top).exp() * sign.flatten(2, 3)], -1)
            Z = mass.sum(-1, keepdim=True)
            share = torch.where(Z == 0, 0, mass / torch.where(Z == 0, 1, Z))
        o = share[..., :1] * near + share[..., 1:] * far
    state = books.after._replace(slots=slots, g=ring_g, low_g=ring_low) if output_final_state else None
    return Output(o, state, lse if has_mass(read) else None)


@form
def gsa(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, *, scale: float | None = None, read: Read = "softmax",
    perceptron: Perceptron | None = None, slot_bias: str | Tensor | None = None, initial_state: SlotState | None = None,
    output_final_state: bool = False, key_mask: Tensor | None = None,
) -> Output:
    """GSA by chunks: MVA with one level; see mva_ref.naive.gsa."""
    s0 = initial_state and tree_map(lambda x: x[:, None], initial_state)
    out = mva(q, k, v, g[None], scale=scale, read=read, perceptron=perceptron, slot_bias=slot_bias, initial_state=s0,
              output_final_state=output_final_state, key_mask=key_mask)
    return out._replace(state=out.state and tree_map(lambda x: x[:, 0], out.state))


@form
def gsa_sw(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, window: int, *, integration: str = "soft", hard_weight: Tensor | None = None,
    sinks: int = 0, scale: float | None = None, read: Read = "softmax", perceptron: Perceptron | None = None,
    slot_bias: str | Tensor | None = None, initial_state: WindowState | None = None, output_final_state: bool = False,
    key_mask: Tensor | None = None,
) -> Output:
    """GSA-SW by chunks: MVA-SW with one level; see mva_ref.naive.gsa_sw."""
    s0 = initial_state and initial_state._replace(slots=tree_map(lambda x: x[:, None], initial_state.slots), g=initial_state.g[:, :, None])
    out = mva_sw(q, k, v, g[None], window, integration=integration, hard_weight=hard_weight, sinks=sinks, scale=scale, read=read,
                 perceptron=perceptron, slot_bias=slot_bias, initial_state=s0, output_final_state=output_final_state, key_mask=key_mask)
    return out._replace(state=out.state and out.state._replace(slots=tree_map(lambda x: x[:, 0], out.state.slots), g=out.state.g[:, :, 0]))
