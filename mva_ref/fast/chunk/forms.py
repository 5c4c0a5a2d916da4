"""MetaLA, ABC, GSA, MVA and their window forms, linear in T. Arguments and equations: the functions of the same name in mva_ref.naive."""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ...frame import form, tree_map
from ...ring import advance, delay_gates, fresh_slots, fresh_state, room
from ...types import AbcState, Output, SlotState, WindowState, has_mass
from ..compose import Options, Read, groups, read_levels, silent
from .local import local_attention
from .reading import Perceptron, masked_softmax
from .scan import ChunkedLevel

LOWEST = -1e30  # stands for a logit of -inf, whose logsumexp has no gradient


@form
def metala(
    r: Tensor, v: Tensor, g: Tensor, *, self_augmentation: Tensor | None = None, initial_state: SlotState | None = None,
    output_final_state: bool = False, key_mask: Tensor | None = None,
) -> Output:
    """MetaLA by chunks; see mva_ref.naive.metala."""
    (B, _, H, M), HQ, gates = g.shape, r.shape[2], silent(g, key_mask)
    at, V0 = ChunkedLevel(gates), v.new_zeros(B, H, M, v.shape[-1]) if initial_state is None else initial_state.V
    o, end = at.values(groups(r, H), v, V0)
    if self_augmentation is not None:
        u = self_augmentation.expand(HQ, M).unflatten(0, (H, -1))
        score = (groups(r, H) * u * -torch.expm1(gates)[:, :, :, None]).sum(-1, keepdim=True)
        o = o + (score * v[:, :, :, None]).sigmoid()
    started = None if initial_state is None else initial_state.log_decay
    decay = at.total(torch.zeros_like(V0[..., 0]) if started is None else started)
    return Output(o.flatten(2, 3), SlotState(None, end, decay) if output_final_state else None)


@form
def mva(
    q: Tensor, k: Tensor, v: Tensor, g_levels: Tensor, *, low_query: Tensor | None = None, branches: str = "shared",
    low_g: Tensor | None = None, branch_gate: Tensor | None = None, scale: float | None = None, read: Read = "softmax",
    perceptron: Perceptron | None = None, residual: str = "post", slot_bias: str | Tensor | None = None,
    initial_state: SlotState | None = None, output_final_state: bool = False, key_mask: Tensor | None = None,
) -> Output:
    """MVA by chunks, the levels one after the other; see mva_ref.naive.mva."""
    gates, low_gates = silent(g_levels, key_mask), None if low_g is None else silent(low_g, key_mask)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    how = Options(low_query, branches, low_gates, branch_gate, scale, read, perceptron, residual, slot_bias, read != "sigmoid",
                  output_final_state)
    o, log_Z, _, state = read_levels(ChunkedLevel, q, k, v, gates, how, initial_state or fresh_slots(k, v, gates, low_g))
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
    near, log_near, _ = local_attention(q, books, scale)
    how = Options(low_query, branches, low_gates, branch_gate, scale, read, perceptron, residual, slot_bias, True, output_final_state)
    far, log_Z, sign, slots = read_levels(ChunkedLevel, q, books.k[:, :T], books.v[:, :T], gates.movedim(2, 0), how, s0.slots)
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
def abc(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, *, scale: float | None = None, initial_state: AbcState | None = None,
    output_final_state: bool = False, key_mask: Tensor | None = None,
) -> Output:
    """ABC by chunks: GSA with the gates z_{t-1} - z_t, where z_t is the logsumexp of s up to t; see mva_ref.naive.abc."""
    (B, _, H, M), scale = s.shape, q.shape[-1] ** -0.5 if scale is None else scale
    K, V, z0 = initial_state or (*(x.new_zeros(B, H, M, x.shape[-1]) for x in (k, v)), s.new_full((B, H, M), -torch.inf))
    s = s if key_mask is None else torch.where(key_mask[..., None, None], s, -torch.inf)
    nothing = s.isneginf()
    z = torch.cat([z0[:, None], s], 1).clamp(min=LOWEST).logcumsumexp(1)
    g = torch.where(nothing, 0, logsigmoid(z[:, :-1] - torch.where(nothing, 0, s)))
    out = gsa(q, k, v, g, scale=scale, initial_state=SlotState(K, V, None), output_final_state=output_final_state)
    end = torch.where(z[:, -1] > LOWEST / 2, z[:, -1], -torch.inf)
    return Output(out.o, AbcState(out.state.K, out.state.V, end) if out.state else None)


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
