"""MVA, and the sliding-window forms of GSA and MVA. Theory: docs/theory/levels.md and docs/theory/window.md."""

import torch
from torch import Tensor

from ..frame import form, tree_map
from ..ring import advance, delay_gates, fresh_state, room
from ..types import Output, SlotState, WindowState, has_mass
from .merging import hard, soft
from .multi_level import Low, Reading, read_levels
from .reads import Mass, Perceptron
from .slots import masked
from .window import exact_branch


@form
def mva(
    q: Tensor, k: Tensor, v: Tensor, g_levels: Tensor, *, low_query: Tensor | None = None, branches: str = "shared",
    low_g: Tensor | None = None, branch_gate: Tensor | None = None, scale: float | None = None,
    read: str | int = "softmax", perceptron: Perceptron | None = None, residual: str = "post", slot_bias: str | Tensor | None = None,
    initial_state: SlotState | None = None, output_final_state: bool = False, key_mask: Tensor | None = None,
) -> Output:
    """MVA: a low-order and a high-order query on L levels of slots, each level storing what the one before it lost.

    Equation:  o_t = r_t V^1_t + sum_l p^l_t V^l_t,   p^l_t = read(scale K^l_t q_t + b^l_t),   level l + 1 works on
               k'_t = k_t - rho_t K^l_t,   v'_t = v_t - rho_t V^l_t,   rho_t = w_t / sum_c w_t[c]
    Shapes:    q [B, T, HQ, D], k [B, T, H, D], v [B, T, H, V], g_levels [L, B, T, H, M], low_query r and low_g [B, T, HQ or H, M],
               branch_gate [B, T, HQ], slot_bias [(L,) B, T, HQ, M] -> o [B, T, HQ, V], lse [B, T, HQ]
    Numerics:  at least float32, float64 stays. lse = log-mass of the product vocabulary for softmax, of level 1 for even orders, else None.
    Source:    MVA (ICML 2025, PMLR 267). Its equations are not public: the residual's read rho, the shared value state and the sum of
               reads are our reading (docs/theory/levels.md).

    Slots that always replace their content lose nothing, so a second level adds nothing:

    >>> q, k, v = torch.randn(3, 1, 5, 2, 4).unbind(0)
    >>> torch.equal(mva(q, k, v, torch.full((2, 1, 5, 2, 1), -torch.inf)).o, v)
    True
    """
    g_levels = torch.stack([masked(g, key_mask) for g in g_levels])
    low = Low(low_query, branches, None if low_g is None else masked(low_g, key_mask), branch_gate)
    how = Reading(q.shape[-1] ** -0.5 if scale is None else scale, read, perceptron, slot_bias)
    o, mass, state = read_levels(q, k, v, g_levels, low, how, residual, initial_state)
    return Output(o.flatten(2, 3), state if output_final_state else None, mass.log.flatten(2, 3) if has_mass(read) else None)


@form
def mva_sw(
    q: Tensor, k: Tensor, v: Tensor, g_levels: Tensor, window: int, *, integration: str = "soft", hard_weight: Tensor | None = None,
    sinks: int = 0, low_query: Tensor | None = None, branches: str = "shared", low_g: Tensor | None = None,
    branch_gate: Tensor | None = None, scale: float | None = None, read: str | int = "softmax", perceptron: Perceptron | None = None,
    residual: str = "post", slot_bias: str | Tensor | None = None, initial_state: WindowState | None = None,
    output_final_state: bool = False, key_mask: Tensor | None = None,
) -> Output:
    """MVA-SW: softmax over sinks and window, MVA over what has left the window, integrated by mass or by a given weight.

    Equation:  soft: o_t = (Z^W_t o^W_t + Z^H_t o^H_t) / (Z^W_t + Z^H_t);   hard: o_t = b o^W_t + (1 - b) o^H_t
               o^W, Z^W over {i <= t : i > t - window or i < sinks};   o^H, Z^H: MVA over the rest, each read divided by its sum
    Shapes:    as `mva`; hard_weight b [B, T, HQ] in [0, 1]: the window's weight -> o [B, T, HQ, V], lse = log(Z^W + Z^H) for soft softmax
               and even orders
    Numerics:  at least float32, float64 stays; one shared maximum for both masses; an empty history has Z^H = 0 (hard: b = 1).
    Source:    soft integration: MVA (ICML 2025), section 3.4, our reading; docs/theory/window.md.

    A window that holds everything is softmax attention (P22):

    >>> from mva_ref.naive.softmax_attention import softmax
    >>> q, k, v = torch.randn(3, 1, 5, 2, 4).unbind(0)
    >>> torch.allclose(mva_sw(q, k, v, -torch.rand(2, 1, 5, 2, 3), window=5).o, softmax(q, k, v).o, atol=1e-6)
    True
    """
    (B, T), HQ = k.shape[:2], q.shape[2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    window, sinks = (window, sinks) if initial_state or output_final_state else room(window, sinks, T)
    s0 = initial_state or fresh_state(k, v, g_levels, low_g, window, sinks)
    books = advance(k, v, key_mask, s0)
    g, ring_g = delay_gates(g_levels.movedim(0, 2), s0.g, s0.seen, books.counts)
    low_g, ring_low = (None, None) if low_g is None or s0.low_g is None else delay_gates(low_g, s0.low_g, s0.seen, books.counts)
    near = exact_branch(q, books, scale)
    low, how = Low(low_query, branches, low_g, branch_gate), Reading(scale, read, perceptron, slot_bias, normalised=True)
    o, mass, slots = read_levels(q, books.k[:, :T], books.v[:, :T], g.movedim(2, 0), low, how, residual, s0.slots)
    far = Output(o.flatten(2, 3))
    empty = (books.history == 0)[..., None].expand(B, T, HQ)
    if integration == "soft":
        sign = None if mass.sign is None else mass.sign.flatten(2, 3)
        out = soft(near, far, Mass(torch.where(empty, -torch.inf, mass.log.flatten(2, 3)), sign))
    else:
        assert hard_weight is not None
        out = hard(near, far, empty, hard_weight.expand(B, T, HQ))
    state = books.after._replace(slots=slots, g=ring_g, low_g=ring_low) if output_final_state else None
    return Output(out.o, state, out.lse if has_mass(read) else None)


@form
def gsa_sw(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, window: int, *, integration: str = "soft", hard_weight: Tensor | None = None,
    sinks: int = 0, scale: float | None = None, read: str | int = "softmax", perceptron: Perceptron | None = None,
    slot_bias: str | Tensor | None = None, initial_state: WindowState | None = None, output_final_state: bool = False,
    key_mask: Tensor | None = None,
) -> Output:
    """GSA-SW: softmax over sinks and window, GSA over what has left the window. MVA-SW with one level and no low-order branch.

    Equation:  as `mva_sw` with L = 1
    Shapes:    q [B, T, HQ, D], k [B, T, H, D], v [B, T, H, V], g [B, T, H, M] -> o [B, T, HQ, V], lse [B, T, HQ]; states without axis L
    Numerics:  as `mva_sw`.
    Source:    the paper applies its integration to GSA too; docs/theory/window.md.

    Gates of 0 write nothing; with slot_bias="mass" the window stands alone:

    >>> q, k, v = torch.randn(3, 1, 5, 2, 4).unbind(0)
    >>> torch.allclose(gsa_sw(q, k, v, torch.zeros(1, 5, 2, 3), window=1, slot_bias="mass").o, v)
    True
    """
    s0 = initial_state and initial_state._replace(slots=tree_map(lambda x: x[:, None], initial_state.slots), g=initial_state.g[:, :, None])
    out = mva_sw(q, k, v, g[None], window, integration=integration, hard_weight=hard_weight, sinks=sinks, scale=scale, read=read,
                 perceptron=perceptron, slot_bias=slot_bias, initial_state=s0, output_final_state=output_final_state, key_mask=key_mask)
    state = out.state and out.state._replace(slots=tree_map(lambda x: x[:, 0], out.state.slots), g=out.state.g[:, :, 0])
    return out._replace(state=state)
