"""Delta rules: a recurrence that corrects what it holds for a key before it writes, without decay (DeltaNet) or with (Gated DeltaNet)."""

import torch
from torch import Tensor, einsum
from torch.nn.functional import normalize

from ...frame import form
from ...types import MatrixState, Output
from ..softmax_attention import group
from ..writes import span_sum
from .kernel import seen


def delta_keys(x: Tensor) -> Tensor:
    """Keys of length one, for which the rule is stable up to beta = 2.

    Equation:  x / |x|
    Shapes:    x [..., D] -> [..., D]
    Numerics:  a length below 1e-12 counts as 1e-12, so a key of zeros stays zero.
    Source:    2406.06484.

    >>> delta_keys(torch.tensor([3.0, 4.0])).norm().item()
    1.0
    """
    return normalize(x, dim=-1)


def delta_matrix(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, scale: float, key_mask: Tensor | None, s0: MatrixState | None
) -> tuple[Tensor, MatrixState]:
    """A delta rule as a T x T matrix: a triangular system turns values into what is really written.

    Equation:  o = A v,   A = (scale Q K^T * Gamma) (I + diag(beta) (K K^T * Gamma)_{i < t})^{-1} diag(beta),
               Gamma_ti = exp(sum_{i < j <= t} g_j) for i <= t
    Shapes:    q [B, T, HQ, D], k [B, T, H, D], v [B, T, H, V], beta and g [B, T, H] -> o [B, T, HQ, V], state S [B, H, D, V]
    Numerics:  spans are summed one by one, so gates of -inf are exact; keys longer than one can grow without bound.
    Source:    DeltaNet (2406.06484), Gated DeltaNet (2412.06464).

    >>> x = torch.ones(1, 2, 1, 1); one = torch.ones(1, 2, 1)
    >>> delta_matrix(x, x, 3 * x, one, 0 * one, 1.0, None, None)[0].flatten().tolist()      # the second write corrects nothing
    [3.0, 3.0]
    """
    T, keep = v.shape[1], seen(v, key_mask)[..., None]
    g, beta = torch.where(keep > 0, g, 0), keep * beta
    causal = torch.ones(T, T, dtype=torch.bool, device=v.device).tril()
    gamma = torch.where(causal, span_sum(g[..., None])[..., 0].exp(), 0)                            # b h t i
    overlap = einsum("bthd,bihd->bhti", k, k) * gamma.tril(-1)
    strength = beta.movedim(1, 2)[..., None]                                                        # b h t 1
    kept = g.cumsum(1).exp().movedim(1, 2)[..., None]                                               # b h t 1
    right = v.movedim(1, 2)
    if s0 is not None:
        right = right - kept * einsum("bthd,bhdv->bhtv", k, s0.S)
    eye = torch.eye(T, dtype=v.dtype, device=v.device)
    written = torch.linalg.solve_triangular(eye + strength * overlap, strength * right, upper=False, unitriangular=True)
    queries = scale * group(q, v.shape[2])
    o = einsum("bthri,bhiv->bthrv", einsum("bthrd,bihd,bhti->bthri", queries, k, gamma), written)
    S = einsum("bihd,bhi,bhiv->bhdv", k, gamma[:, :, -1], written) if T else v.new_zeros(*right.shape[:2], k.shape[-1], v.shape[-1])
    if s0 is not None:
        o = o + einsum("bthrd,bhtx,bhdv->bthrv", queries, kept, s0.S)
        S = S + (kept[:, :, -1:] if T else 1) * s0.S
    return o.flatten(2, 3), MatrixState(S)


def delta_steps(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, scale: float, key_mask: Tensor | None, s0: MatrixState | None
) -> tuple[Tensor, MatrixState]:
    """A delta rule one token at a time.

    Equation:  S'_t = e^{g_t} S_{t-1},   S_t = S'_t + beta_t k_t (x) (v_t - k_t S'_t),   o_t = scale q_t S_t
    Shapes:    as `delta_matrix`
    Numerics:  one product a step.
    Source:    2102.11174, 2412.06464.

    >>> x = torch.ones(1, 2, 1, 1); one = torch.ones(1, 2, 1)
    >>> delta_steps(x, x, 3 * x, one, 0 * one, 1.0, None, None)[0].flatten().tolist()
    [3.0, 3.0]
    """
    (B, T, H, V), D, keep = v.shape, k.shape[-1], seen(v, key_mask)
    S, queries, o = s0.S if s0 is not None else v.new_zeros(B, H, D, V), group(q, H), []
    for t in range(T):
        decayed = g[:, t, :, None, None].exp() * S
        error = v[:, t] - einsum("bhd,bhdv->bhv", k[:, t], decayed)
        new = decayed + beta[:, t, :, None, None] * k[:, t, ..., None] * error[:, :, None]
        S = torch.where(keep[:, t, None, None, None] > 0, new, S)
        o.append(scale * einsum("bhrd,bhdv->bhrv", queries[:, t], S))
    return torch.stack(o, 1).flatten(2, 3) if o else v.new_zeros(B, 0, q.shape[2], V), MatrixState(S)


@form
def delta(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, *, scale: float | None = None, initial_state: MatrixState | None = None,
    output_final_state: bool = False, key_mask: Tensor | None = None,
) -> Output:
    """DeltaNet: write only what the state does not hold yet for this key.

    Equation:  S_t = S_{t-1} + beta_t k_t (x) (v_t - k_t S_{t-1}),   o_t = scale q_t S_t
    Shapes:    q [B, T, HQ, D], k [B, T, H, D], v [B, T, H, V], beta [B, T, H] in [0, 2] -> o [B, T, HQ, V]
    Numerics:  at least float32, float64 stays; keys are used as they come: see `delta_keys`; signed weights, no lse.
    Source:    2102.11174, 2406.06484.

    beta = 1 returns the value of a key of length one at once:

    >>> k, v = delta_keys(torch.randn(1, 5, 2, 4)), torch.randn(1, 5, 2, 3)
    >>> torch.allclose(delta(k, k, v, torch.ones(1, 5, 2), scale=1.0).o, v, atol=1e-5)
    True
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    o, state = delta_matrix(q, k, v, beta, torch.zeros_like(beta), scale, key_mask, initial_state)
    return Output(o, state if output_final_state else None)


@form
def recurrent(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, *, scale: float | None = None, initial_state: MatrixState | None = None,
    output_final_state: bool = False, key_mask: Tensor | None = None,
) -> Output:
    """`delta` one token at a time.

    Equation:  as `delta_steps` with g = 0
    Shapes:    as `delta`; state S [B, H, D, V]
    Numerics:  as `delta`.
    Source:    2102.11174.

    >>> q, k, v = torch.randn(3, 1, 5, 2, 4).unbind(0); k, beta = delta_keys(k), torch.rand(1, 5, 2)
    >>> torch.allclose(recurrent(q, k, v, beta).o, delta(q, k, v, beta).o, atol=1e-5)
    True
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    o, state = delta_steps(q, k, v, beta, torch.zeros_like(beta), scale, key_mask, initial_state)
    return Output(o, state if output_final_state else None)
