"""MetaLA, ABC and GSA one token at a time."""

import torch
from torch import Tensor, einsum

from ...frame import form
from ...types import AbcState, Output, SlotState, has_mass
from .tokenwise import log_of, read_token, slot_bias_at, stacked, write


@form
def metala(
    r: Tensor, v: Tensor, g: Tensor, *, self_augmentation: Tensor | None = None, initial_state: SlotState | None = None,
    output_final_state: bool = False, key_mask: Tensor | None = None,
) -> Output:
    """MetaLA as a recurrence.

    Equation:  V_t = diag(alpha_t) V_{t-1} + w_t (x) v_t,   o_t = r_t V_t (+ sigmoid((r_t * u).w_t v_t))
    Shapes:    as mva_ref.naive.metala
    Numerics:  as mva_ref.naive.metala.
    Source:    MetaLA (2411.10741).

    >>> v = torch.randn(1, 5, 2, 4); r = torch.ones(1, 5, 2, 1)
    >>> torch.equal(metala(r, v, torch.full((1, 5, 2, 1), -torch.inf)).o, v)
    True
    """
    (B, T, H, M), o = g.shape, []
    V, decay = v.new_zeros(B, H, M, v.shape[-1]), g.new_zeros(B, H, M)
    if initial_state is not None:
        V, decay = initial_state.V, decay if initial_state.log_decay is None else initial_state.log_decay
    for t in range(T):
        gate = g[:, t] if key_mask is None else torch.where(key_mask[:, t, None, None], g[:, t], 0)
        V, decay, query = write(V, gate, v[:, t]), decay + gate, r[:, t].unflatten(1, (H, -1))
        read = query @ V
        if self_augmentation is not None:
            u = self_augmentation.expand(r.shape[2], M).unflatten(0, (H, -1))
            read = read + (einsum("bhrc,hrc,bhc->bhr", query, u, -torch.expm1(gate))[..., None] * v[:, t, :, None]).sigmoid()
        o.append(read)
    return Output(stacked(o, r.new_zeros(B, 0, r.shape[2], v.shape[-1])), SlotState(None, V, decay) if output_final_state else None)


@form
def abc(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, *, scale: float | None = None, initial_state: AbcState | None = None,
    output_final_state: bool = False, key_mask: Tensor | None = None,
) -> Output:
    """ABC as a recurrence.

    Equation:  z_t = log(e^{z_{t-1}} + e^{s_t}),   X_t = e^{z_{t-1} - z_t} X_{t-1} + e^{s_t - z_t} (x) x_t,   o_t = softmax(K_t q_t) V_t
    Shapes:    as mva_ref.naive.abc
    Numerics:  a slot that nothing was written to stays 0.
    Source:    ABC (2110.02488).

    >>> q, k, v = torch.randn(3, 1, 5, 2, 4).unbind(0)
    >>> torch.allclose(abc(q, k, v, torch.zeros(1, 5, 2, 3)).o, v.cumsum(1) / torch.arange(1, 6).view(5, 1, 1), atol=1e-6)
    True
    """
    (B, T, H, M), o = s.shape, []
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    K, V, z = k.new_zeros(B, H, M, k.shape[-1]), v.new_zeros(B, H, M, v.shape[-1]), s.new_full((B, H, M), -torch.inf)
    if initial_state is not None:
        K, V, z = initial_state
    for t in range(T):
        logit = s[:, t] if key_mask is None else torch.where(key_mask[:, t, None, None], s[:, t], -torch.inf)
        some = ~(z.isneginf() & logit.isneginf())
        old, new = torch.where(some, z, 0), torch.where(some, logit, 0)
        total = torch.logaddexp(old, new)
        keep, add = torch.where(some, (old - total).exp(), 1)[..., None], torch.where(some, (new - total).exp(), 0)[..., None]
        K, V, z = keep * K + add * k[:, t, :, None], keep * V + add * v[:, t, :, None], torch.where(some, total, -torch.inf)
        o.append((scale * q[:, t].unflatten(1, (H, -1)) @ K.mT).softmax(-1) @ V)
    return Output(stacked(o, q.new_zeros(B, 0, q.shape[2], v.shape[-1])), AbcState(K, V, z) if output_final_state else None)


@form
def gsa(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, *, scale: float | None = None, read: str | int = "softmax",
    perceptron: tuple[Tensor | None, Tensor | None] | None = None, slot_bias: str | Tensor | None = None,
    initial_state: SlotState | None = None, output_final_state: bool = False, key_mask: Tensor | None = None,
) -> Output:
    """GSA as a recurrence: MVA with one level.

    Equation:  K_t = diag(alpha_t) K_{t-1} + w_t (x) k_t,   V_t likewise,   o_t = read(scale K_t q_t) V_t
    Shapes:    as mva_ref.naive.gsa
    Numerics:  as mva_ref.naive.gsa.
    Source:    GSA (2409.07146).

    >>> q, k, v = torch.randn(3, 1, 5, 2, 4).unbind(0)
    >>> torch.equal(gsa(q, k, v, torch.full((1, 5, 2, 1), -torch.inf)).o, v)
    True
    """
    (B, T, H, M), R = g.shape, q.shape[2] // g.shape[2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    K, V, decay = k.new_zeros(B, H, M, k.shape[-1]), v.new_zeros(B, H, M, v.shape[-1]), g.new_zeros(B, H, M)
    if initial_state is not None:
        assert initial_state.K is not None
        K, V, decay = initial_state.K, initial_state.V, decay if initial_state.log_decay is None else initial_state.log_decay
    o, lse, (W, a) = [], [], perceptron or (None, None)
    for t in range(T):
        gate = g[:, t] if key_mask is None else torch.where(key_mask[:, t, None, None], g[:, t], 0)
        K, V, decay = write(K, gate, k[:, t]), write(V, gate, v[:, t]), decay + gate
        p = read_token(scale * q[:, t].unflatten(1, (H, R)) @ K.mT, slot_bias_at(slot_bias, decay, t, T, R), read, W, a)
        norm = torch.where(p.Z == 0, torch.inf, p.Z) if read != "sigmoid" else (-p.shift).exp()
        o.append(p.weight / norm[..., None] @ V)
        lse.append(log_of(p))
    out = Output(stacked(o, q.new_zeros(B, 0, q.shape[2], v.shape[-1])), SlotState(K, V, decay) if output_final_state else None)
    return out._replace(lse=stacked(lse, q.new_zeros(B, 0, q.shape[2]))) if has_mass(read) else out
