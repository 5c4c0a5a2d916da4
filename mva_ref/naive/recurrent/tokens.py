"""Softmax as online softmax, and a Taylor order as a recurrence over symmetric features."""

import math

import torch
from torch import Tensor, einsum

from ...frame import form
from ...types import Output, TaylorState
from ..orders import features


@form
def softmax(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, window: int | None = None, sinks: int = 0,
    key_mask: Tensor | None = None,
) -> Output:
    """Softmax attention by scanning the keys, with a running maximum, sum and output for every query.

    Equation:  m' = max(m, x_i),   l' = l e^{m - m'} + e^{x_i - m'},   o' = (o l e^{m - m'} + e^{x_i - m'} v_i) / l'
    Shapes:    as mva_ref.naive.softmax
    Numerics:  every exponent is <= 0.
    Source:    online softmax (1805.02867).

    >>> q, k, v = torch.randn(3, 1, 5, 2, 4).unbind(0)
    >>> torch.allclose(softmax(q, k, v, window=1).o, v)
    True
    """
    (B, T, H, D), R = k.shape, q.shape[2] // k.shape[2]
    scale = D**-0.5 if scale is None else scale
    queries, t = q.unflatten(2, (H, R)), torch.arange(T, device=k.device)
    m, n, o = q.new_full((B, T, H, R), -torch.inf), q.new_zeros(B, T, H, R), q.new_zeros(B, T, H, R, v.shape[-1])
    for i in range(T):
        visible = (t >= i) & ((t < i + window) | torch.tensor(i < sinks, device=k.device)) if window is not None else t >= i
        rows = visible[None].expand(B, T) if key_mask is None else visible & key_mask[:, i, None]
        x = torch.where(rows[..., None, None], scale * einsum("bthrd,bhd->bthr", queries, k[:, i]), -torch.inf)
        new = torch.maximum(m, x)
        at = torch.where(new.isneginf(), 0, new)
        old, here = n * (m - at).exp(), (x - at).exp()
        m, n = new, old + here
        o = (old[..., None] * o + here[..., None] * v[:, i : i + 1, :, None]) / torch.where(n > 0, n, 1)[..., None]
    lse = torch.where(n > 0, torch.where(n > 0, n, 1).log() + torch.where(n > 0, m, 0), -torch.inf)
    return Output(o.flatten(2, 3), None, lse.flatten(2, 3))


@form
def taylor(
    q: Tensor, k: Tensor, v: Tensor, order: int, *, scale: float | None = None, centre: str | Tensor | None = None,
    initial_state: TaylorState | None = None, output_final_state: bool = False, key_mask: Tensor | None = None,
) -> Output:
    """Attention by Taylor order with a state of C(D + N, N) features.

    Equation:  S_t = S_{t-1} + F(k_t) (x) v_t,   z_t = z_{t-1} + F(k_t),   o_t = psi(q_t) S_t / psi(q_t).z_t,
               psi_m(q) = scale^m phi_{N-m}(-r_t) F_m(q),   F = (F_0, ..., F_N),   r_t = scale q_t.c_t
    Shapes:    as mva_ref.naive.taylor
    Numerics:  signed terms cancel where exp(x) is small; the quadratic form does not have this loss.
    Source:    P5, P6.

    >>> q, k, v = torch.randn(3, 1, 5, 2, 4).unbind(0)
    >>> torch.allclose(taylor(q, k, v, 0).o, v.cumsum(1) / torch.arange(1, 6).view(5, 1, 1), atol=1e-6)
    True
    """
    (B, T, H, D), R = k.shape, q.shape[2] // k.shape[2]
    scale = D**-0.5 if scale is None else scale
    queries = q.unflatten(2, (H, R))
    seen = k.new_ones(B, T) if key_mask is None else key_mask.to(k.dtype)
    F = torch.cat([features(k, m) for m in range(order + 1)], -1) * seen[..., None, None]
    Q = [scale**m * features(queries, m) for m in range(order + 1)]
    S, z = k.new_zeros(B, H, F.shape[-1], v.shape[-1]), k.new_zeros(B, H, F.shape[-1])
    key_sum, count = k.new_zeros(B, H, D), k.new_zeros(B)
    if initial_state is not None:
        S, z, key_sum, count = initial_state
    whole = einsum("bt,bthd->bhd", seen, k) / seen.sum(1).clamp(min=1)[:, None, None]
    o, lse = [], []
    for t in range(T):
        S, z = S + F[:, t, :, :, None] * v[:, t, :, None], z + F[:, t]
        key_sum, count = key_sum + seen[:, t, None, None] * k[:, t], count + seen[:, t]
        means = {"running": key_sum / count.clamp(min=1)[:, None, None], "mean": whole}
        c = means[centre] if isinstance(centre, str) else torch.zeros_like(key_sum) if centre is None else centre.expand(B, H, D)
        r = scale * einsum("bhrd,bhd->bhr", queries[:, t], c)
        tail = [torch.stack([(-r) ** j / math.factorial(j) for j in range(order - m + 1)]).sum(0) for m in range(order + 1)]
        psi = torch.cat([f[:, t] * w[..., None] for f, w in zip(Q, tail, strict=True)], -1)
        Z = einsum("bhrf,bhf->bhr", psi, z)
        o.append(einsum("bhrf,bhfv->bhrv", psi, S) / torch.where(Z == 0, torch.inf, Z)[..., None])
        lse.append(torch.where(Z > 0, Z, torch.nan).log().nan_to_num(-torch.inf) + r)
    out = torch.stack(o, 1).flatten(2, 3) if o else q.new_zeros(B, 0, H * R, v.shape[-1])
    mass = (torch.stack(lse, 1).flatten(2, 3) if lse else q.new_zeros(B, 0, H * R)) if order % 2 == 0 else None
    return Output(out, TaylorState(S, z, key_sum, count) if output_final_state else None, mass)
