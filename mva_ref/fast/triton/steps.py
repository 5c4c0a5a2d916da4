"""All levels of slots token by token in one kernel: write, read, residual. Equations: mva_ref.naive.recurrent.

One program walks through one sequence for one KV head. Its slots lie in the tensors that the call returns and are updated in place; the
first token reads them from the initial state instead, so that a decode step is this launch and nothing else. Sums are float32.
"""

import triton
import triton.language as tl
from torch import Tensor

from ...types import SlotState
from .maps import write_weights
from .reads import over_bias, read_weights


@triton.jit
def slots(p_initial, p_last, offsets, mask, older, STATE: tl.constexpr):
    """Slots before this token: the initial state or zeros before the first one (not older), then what the last token has left."""
    p = tl.where(older, p_last, p_initial)
    return tl.load(p + offsets, mask=mask if STATE else mask & older, other=0.0)


@triton.jit
def lost(x, rho, X):
    """x - rho X: what the next level gets."""
    return x - tl.sum(rho[:, None] * X, 0)


@triton.jit
def steps_kernel(
    p_q, p_k, p_v, p_g, p_bias, p_low, p_beta, p_low_g, p_W, p_a, p_K0, p_V0, p_decay0, p_low_V0, p_K, p_V, p_decay, p_low_V, p_o, p_lse,
    p_ends, scale, T, tokens, bias_tokens, L, H, R, M, D, V,
    BR: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, READ: tl.constexpr, BIAS: tl.constexpr, LOW: tl.constexpr,
    GATED: tl.constexpr, RESIDUAL: tl.constexpr, W: tl.constexpr, A: tl.constexpr, STATE: tl.constexpr, PACKED: tl.constexpr,
):
    """For every token t of sequence i_n and level l:  X <- exp(g) X + w (x) x,   o += p V,   x <- x - rho X  for X = K, V.

    READ none: no keys, o = r V. LOW: r is read from level 1 (shared) or from slots of its own (separate); with GATED, beta weighs both.
    """
    i_n, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_r, o_m, o_d, o_v = tl.arange(0, BR), tl.arange(0, BM), tl.arange(0, BD), tl.arange(0, BV)
    m_m, m_d, m_v = o_m < M, o_d < D, o_v < V
    m_K, m_V = m_m[:, None] & m_d[None, :], m_m[:, None] & m_v[None, :]
    at_K, at_V = o_m[:, None] * D + o_d[None, :], o_m[:, None] * V + o_v[None, :]
    first, length = i_n * T, T
    if PACKED:
        first = tl.load(p_ends + i_n).to(tl.int64)
        length = (tl.load(p_ends + i_n + 1) - first).to(tl.int32)
    for n in range(0, length):
        t = first + n
        head = t * H + i_h
        v = tl.load(p_v + head * V + o_v, mask=m_v, other=0.0).to(tl.float32)
        k = v
        if READ != "none":
            k = tl.load(p_k + head * D + o_d, mask=m_d, other=0.0).to(tl.float32)
        o = tl.zeros([BR, BV], tl.float32)
        lse = tl.zeros([BR], tl.float32)
        for i_l in range(0, L):
            level = ((i_n * L + i_l) * H + i_h) * M
            g = tl.load(p_g + ((i_l * tokens + t) * H + i_h) * M + o_m, mask=m_m, other=0.0)
            decay = slots(p_decay0 + level, p_decay + level, o_m, m_m, n > 0, STATE)
            X_V = slots(p_V0 + level * V, p_V + level * V, at_V, m_V, n > 0, STATE)
            if READ != "none":
                X_K = slots(p_K0 + level * D, p_K + level * D, at_K, m_K, n > 0, STATE)
            tl.debug_barrier()                          # some threads load the same slots: none may store before the others have loaded
            w, kept = write_weights(g, True), tl.exp(g)
            total = tl.sum(w, 0)
            rho = w / tl.where(total > 0, total, 1.0)
            next_k, next_v = k, v
            if RESIDUAL == "pre":
                next_k, next_v = lost(k, rho, X_K), lost(v, rho, X_V)
            decay += g
            X_V = kept[:, None] * X_V + w[:, None] * v[None, :]
            tl.store(p_decay + level + o_m, decay, mask=m_m)
            tl.store(p_V + level * V + at_V, X_V, mask=m_V)
            if READ != "none":
                X_K = kept[:, None] * X_K + w[:, None] * k[None, :]
                tl.store(p_K + level * D + at_K, X_K, mask=m_K)
            if RESIDUAL == "post":
                next_k, next_v = lost(k, rho, X_K), lost(v, rho, X_V)
            k, v = next_k, next_v

            b = tl.where(m_m, 0.0, -float("inf"))
            if BIAS == "mass":
                mass = write_weights(decay, True)
                b = tl.where(mass > 0, tl.log(tl.where(mass > 0, mass, 1.0)), -float("inf"))
            for r in range(0, R):
                i_q = head * R + r
                a = tl.zeros([BM], tl.float32)
                if READ != "none":
                    q = tl.load(p_q + i_q * D + o_d, mask=m_d, other=0.0).to(tl.float32)
                    s = scale * tl.sum(X_K * q[None, :], 1)
                    if W:
                        at_W = (i_l * (H * R) + i_h * R + r) * M * M + o_m[:, None] * M + o_m[None, :]
                        s = tl.sum(tl.load(p_W + at_W, mask=m_m[:, None] & m_m[None, :], other=0.0) * s[None, :], 1)
                    if A:
                        s += tl.load(p_a + (i_l * (H * R) + i_h * R + r) * M + o_m, mask=m_m, other=0.0)
                    if BIAS == "tensor":
                        b = tl.load(p_bias + (((i_l * bias_tokens + t) * H + i_h) * R + r) * M + o_m, mask=m_m, other=-float("inf"))
                    a, log_Z = read_weights(s, b, READ)
                    if READ == "softmax":
                        lse += tl.where(o_r == r, log_Z if i_l == 0 else over_bias(log_Z, b), 0.0)
                    else:
                        lse += tl.where((o_r == r) & (i_l == 0), log_Z, 0.0)
                if GATED:
                    a *= 1 - tl.load(p_beta + i_q)
                if LOW == "shared":
                    low = tl.load(p_low + i_q * M + o_m, mask=m_m & (i_l == 0), other=0.0)
                    a += low * tl.load(p_beta + i_q) if GATED else low
                o += tl.where((o_r == r)[:, None], tl.sum(a[:, None] * X_V, 0)[None, :], 0.0)
        if LOW == "separate":
            level = (i_n * H + i_h) * M
            g = tl.load(p_low_g + head * M + o_m, mask=m_m, other=0.0)
            v = tl.load(p_v + head * V + o_v, mask=m_v, other=0.0).to(tl.float32)
            X_V = slots(p_low_V0 + level * V, p_low_V + level * V, at_V, m_V, n > 0, STATE)
            tl.debug_barrier()
            X_V = tl.exp(g)[:, None] * X_V + write_weights(g, True)[:, None] * v[None, :]
            tl.store(p_low_V + level * V + at_V, X_V, mask=m_V)
            for r in range(0, R):
                low = tl.load(p_low + (head * R + r) * M + o_m, mask=m_m, other=0.0)
                o += tl.where((o_r == r)[:, None], tl.sum(low[:, None] * X_V, 0)[None, :], 0.0)
        tl.store(p_o + (head * R + o_r[:, None]) * V + o_v[None, :], o.to(p_o.dtype.element_ty), mask=(o_r < R)[:, None] & m_v[None, :])
        if READ != "none":
            tl.store(p_lse + head * R + o_r, lse, mask=o_r < R)
        tl.debug_barrier()                              # the next token loads what other threads have stored


def walk(
    q: Tensor | None, k: Tensor | None, v: Tensor, g: Tensor, low_query: Tensor | None, branch_gate: Tensor | None, low_g: Tensor | None,
    slot_bias: str | Tensor | None, W: Tensor | None, a: Tensor | None, initial: SlotState | None, last: SlotState, o: Tensor, lse: Tensor,
    ends: Tensor | None, scale: float | None, read: str | int, residual: str,
) -> None:
    """Fill o [B, T, HQ, V], lse [B, T, HQ] and the slots `last` [N, L, H, M, .] by one launch. ends [N + 1] of packed sequences.

    Without q [B, T, HQ, D] and k [B, T, H, D], o = low_query V. low_g [B, T, H, M] gives low_query [B, T, HQ, M] slots of its own.
    v [B, T, H, V], g [L, B, T, H, M], branch_gate [B, T, HQ], slot_bias [L or 1, B, T, HQ, M] or "mass", W [L, HQ, M, M], a [L, HQ, M].
    """
    (L, B, T, H, M), (HQ, V), D = g.shape, o.shape[2:], 1 if k is None else k.shape[-1]
    bias = slot_bias if isinstance(slot_bias, Tensor) else None
    bias_tokens = 0 if bias is None or len(bias) == 1 else B * T
    pointers = (q, k, v, g, bias, low_query, branch_gate, low_g, W, a, *(initial or last), *last, o, lse, ends)
    BR, BM, BD, BV = (1 << (n - 1).bit_length() for n in (HQ // H, M, D, V))
    if T:
        steps_kernel[(len(last.V), H)](
            *(v if x is None else x.contiguous() for x in pointers), float(D**-0.5 if scale is None else scale), T, B * T, bias_tokens,
            L, H, HQ // H, M, D, V, BR=BR, BM=BM, BD=BD, BV=BV, READ="none" if q is None else read,
            BIAS="tensor" if bias is not None else slot_bias or "none", GATED=branch_gate is not None,
            LOW="none" if low_query is None else "shared" if low_g is None else "separate", RESIDUAL=residual if L > 1 else "none",
            W=W is not None, A=a is not None, STATE=initial is not None, PACKED=ends is not None,
            num_warps=min(16, max(4, BM * max(BD, BV) // 1024)), num_stages=1)
