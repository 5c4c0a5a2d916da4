"""Slots: compress the past into M entries, then read them. Theory: docs/theory/slots.md (P9 to P15)."""

import torch
from torch import Tensor

from ..frame import form
from ..types import Output, SlotState
from .reads import Perceptron, plain_read
from .softmax_attention import group
from .writes import end_state, log_mass, slot_scores, slot_values, write_map


def bias(slot_bias: str | Tensor | None, g: Tensor, log_decay: Tensor | None, query_heads: int) -> Tensor:
    """The log weight b of every slot.

    Equation:  b = 0, b = log mass_t ("mass"), or the tensor
    Shapes:    g [B, T, H, M], slot_bias broadcastable to [B, T, HQ, M] -> [B, T, H, R, M]
    Numerics:  -inf hides a slot.
    Source:    P12.

    >>> bias(None, torch.zeros(1, 2, 1, 3), None, 4).shape
    torch.Size([1, 2, 1, 4, 3])
    """
    B, T, H, M = g.shape
    if isinstance(slot_bias, Tensor):
        return group(slot_bias.expand(B, T, query_heads, M), H)
    b = torch.zeros_like(g) if slot_bias is None else log_mass(g, log_decay)
    return b[:, :, :, None].expand(B, T, H, query_heads // H, M)


def masked(g: Tensor, key_mask: Tensor | None) -> Tensor:
    """Gates under which a masked token writes nothing and lets nothing decay.

    Equation:  g_t = 0 where token t is masked
    Shapes:    g [B, T, H, M], key_mask bool [B, T] -> [B, T, H, M]
    Numerics:  exact.
    Source:    P15: g = 0 writes nothing.

    >>> masked(torch.full((1, 2, 1, 1), -3.0), torch.tensor([[True, False]])).flatten().tolist()
    [-3.0, 0.0]
    """
    return g if key_mask is None else torch.where(key_mask[..., None, None], g, 0)


def total_decay(g: Tensor, initial: Tensor | None) -> Tensor:
    """The state's log_decay after the last token.

    Equation:  log_decay_T = log_decay_0 + sum_j g_j
    Shapes:    g [B, T, H, M], initial [B, H, M] -> [B, H, M]
    Numerics:  -inf once a slot was replaced.
    Source:    P12.

    >>> total_decay(torch.full((1, 2, 1, 1), -3.0), torch.tensor([[[-1.0]]])).item()
    -7.0
    """
    return g.sum(1) if initial is None else g.sum(1) + initial


@form
def metala(
    r: Tensor, v: Tensor, g: Tensor, *, self_augmentation: Tensor | None = None,
    initial_state: SlotState | None = None, output_final_state: bool = False, key_mask: Tensor | None = None,
) -> Output:
    """MetaLA: a linear, signed, un-normalised query in slot space; the write weight stands in for the key.

    Equation:  o_t = r_t V_t = sum_i A_ti v_i,   A_ti = sum_c r_t[c] Omega[t, i, c];
               with self-augmentation u:  o_t + sigmoid((sum_c r_t[c] u[c] w_t[c]) v_t), which is not linear in v
    Shapes:    r [B, T, HQ, M], v [B, T, H, V], g [B, T, H, M], u [M] or [HQ, M] -> o [B, T, HQ, V]
    Numerics:  at least float32, float64 stays; takes no scale (fold M^-1/2 into r); no lse: the weights can be negative.
    Source:    MetaLA (2411.10741); P11.

    >>> r, v, g = torch.randn(1, 4, 2, 3), torch.randn(1, 4, 2, 5), torch.zeros(1, 4, 2, 3)
    >>> metala(r, v, g).o.abs().max().item()    # gates of 0 write nothing
    0.0
    """
    g, s0 = masked(g, key_mask), initial_state
    r_grouped = group(r, g.shape[2])
    o = slot_values(r_grouped, v, write_map(g), s0.V if s0 else None)
    if self_augmentation is not None:
        u = group(self_augmentation.expand(1, 1, *r.shape[2:]), g.shape[2])
        o = o + ((r_grouped * u * -torch.expm1(g)[:, :, :, None]).sum(-1, keepdim=True) * v[:, :, :, None]).sigmoid()
    state = SlotState(None, end_state(g, v, s0.V if s0 else None), total_decay(g, s0.log_decay if s0 else None))
    return Output(o.flatten(2, 3), state if output_final_state else None)


@form
def gsa(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, *, scale: float | None = None,
    read: str | int = "softmax", perceptron: Perceptron | None = None, slot_bias: str | Tensor | None = None,
    initial_state: SlotState | None = None, output_final_state: bool = False, key_mask: Tensor | None = None,
) -> Output:
    """Gated slot attention, the high-order branch of MVA, as T x T matrices.

    Equation:  s_t = scale K_t q_t,   p_t = read(s_t + b_t),   o_t = p_t V_t = sum_i A_ti v_i,   A_ti = sum_c p_t[c] Omega[t, i, c]
    Shapes:    q [B, T, HQ, D], k [B, T, H, D], v [B, T, H, V], g [B, T, H, M] -> o [B, T, HQ, V], lse [B, T, HQ]
    Numerics:  at least float32, float64 stays. An unwritten slot reads as zero and keeps its weight, unless slot_bias="mass" (P12).
               lse = log sum_c e^b f(s) for softmax and even orders, None for the sigmoid read and odd orders.
    Source:    GSA (2409.07146); the other reads are the paper's sigmoid perceptron and our order-N read.

    One slot that always replaces its content (g = -inf) is the identity on v:

    >>> q, k, v = torch.randn(3, 1, 5, 2, 4).unbind(0)
    >>> torch.equal(gsa(q, k, v, torch.full((1, 5, 2, 1), -torch.inf)).o, v)
    True
    """
    g, s0 = masked(g, key_mask), initial_state
    K0, V0, log_decay = (s0.K, s0.V, s0.log_decay) if s0 else (None, None, None)
    written = write_map(g)                                                                         # 1. the past, compressed
    s = slot_scores(q, k, written, K0, q.shape[-1] ** -0.5 if scale is None else scale)            # 2. meets the query
    p, lse = plain_read(s, bias(slot_bias, g, log_decay, q.shape[2]), read, perceptron)            # 3. at all orders at once
    o = slot_values(p, v, written, V0)                                                             # 4. and averages the values
    state = SlotState(end_state(g, k, K0), end_state(g, v, V0), total_decay(g, log_decay)) if output_final_state else None
    return Output(o.flatten(2, 3), state, lse)
