"""ABC: slots filled by a softmax over time instead of gates. Theory: docs/theory/slots.md."""

import torch
from torch import Tensor

from ..frame import form
from ..types import AbcState, Output
from .softmax_attention import normalise
from .writes import Written, slot_scores, slot_values


def logit_write_map(s: Tensor, z0: Tensor) -> tuple[Written, Tensor]:
    """Omega and z of slot logits.

    Equation:  Omega[t, i, c] = exp(s_i[c] - z_t[c]) for i <= t,   z_t = log(e^{z_0} + sum_{i <= t} e^{s_i}),   kept_t = e^{z_0 - z_t}
    Shapes:    s [B, T, H, M], z0 [B, H, M] -> omega [B, H, T, T, M], kept and z [B, T, H, M]
    Numerics:  one softmax over the state (column 0) and the tokens; s = -inf writes nothing.
    Source:    ABC (2110.02488).

    >>> logit_write_map(torch.zeros(1, 2, 1, 1), torch.full((1, 1, 1), -torch.inf))[0].omega[0, 0, :, :, 0].tolist()
    [[1.0, 0.0], [0.5, 0.5]]
    """
    B, T, H, M = s.shape
    seen = torch.ones(T, T, dtype=torch.bool, device=s.device).tril()
    tokens = torch.where(seen, s.permute(0, 2, 3, 1)[:, :, :, None], -torch.inf)                    # b h c t i
    p, z = normalise(torch.cat([z0[..., None, None].expand(B, H, M, T, 1), tokens], -1))
    return Written(p[..., 1:].permute(0, 1, 3, 4, 2), p[..., 0].permute(0, 3, 1, 2)), z.permute(0, 3, 1, 2)


@form
def abc(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, *, scale: float | None = None,
    initial_state: AbcState | None = None, output_final_state: bool = False, key_mask: Tensor | None = None,
) -> Output:
    """Attention with bounded-memory control: every slot is a softmax average of the past, read by softmax.

    Equation:  K_t[c] = sum_i Omega[t, i, c] k_i,   Omega[t, i, c] = e^{s_i[c]} / sum_{j <= t} e^{s_j[c]},   o_t = softmax(K_t q_t) V_t
    Shapes:    q [B, T, HQ, D] times scale, k [B, T, H, D], v [B, T, H, V], slot logits s [B, T, H, M] -> o [B, T, HQ, V]
    Numerics:  at least float32, float64 stays; logits of any size; before anything is written every slot is 0 and so is o.
    Source:    ABC (2110.02488); it is GSA with g_t = z_{t-1} - z_t and g_1 = -inf.

    Equal logits average the past:

    >>> q, k, v = torch.randn(3, 1, 5, 2, 4).unbind(0)
    >>> torch.allclose(abc(q, k, v, torch.zeros(1, 5, 2, 3)).o, v.cumsum(1) / torch.arange(1, 6).view(5, 1, 1), atol=1e-6)
    True
    """
    s0 = initial_state
    if key_mask is not None:
        s = torch.where(key_mask[..., None, None], s, -torch.inf)
    z0 = s0.z if s0 else s.new_full((s.shape[0], *s.shape[2:]), -torch.inf)
    written, z = logit_write_map(s, z0)
    p, _ = normalise(slot_scores(q, k, written, s0.K if s0 else None, q.shape[-1] ** -0.5 if scale is None else scale))
    o = slot_values(p, v, written, s0.V if s0 else None).flatten(2, 3)
    if not output_final_state:
        return Output(o)
    last, _ = normalise(torch.cat([z0[..., None], s.permute(0, 2, 3, 1)], -1))                      # b h c 1+i
    z_end = torch.cat([z0[:, None], z], 1)[:, -1]

    def end(x: Tensor, x0: Tensor | None) -> Tensor:
        new = torch.einsum("bhci,bihd->bhcd", last[..., 1:], x)
        return new if x0 is None else new + last[..., :1] * x0

    return Output(o, AbcState(end(k, s0.K if s0 else None), end(v, s0.V if s0 else None), z_end))
