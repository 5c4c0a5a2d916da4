"""Slot attention of one level in one kernel: scores, softmax over the slots, values; and the first half of its gradient."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .maps import (
    before,
    elsewhere,
    level,
    load_gates,
    load_rows,
    load_state,
    one_reference,
    own_share,
    product,
    span_sums,
    store_rows,
    write_weights,
)
from .plan import Work


@triton.jit
def read_scores(
    yx, inter, w, g, sums, BC: tl.constexpr, LOG: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr, EXACT: tl.constexpr,
    EXCL: tl.constexpr, CHUNKS: tl.constexpr,
):
    """sum_i Omega[t, i, c] yx[t, i] + exp(sums[t, c]) inter[t, c], [BC, BM]; EXCL: over the tokens before t, as t - 1 left them."""
    t, i = tl.arange(0, BC)[:, None], tl.arange(0, BC)[None, :]
    s = tl.exp(sums) * inter
    if not EXCL:
        s += tl.sum(tl.where(t == i, yx, 0.0), 1)[:, None] * w
    if CHUNKS == 1:
        f_q, f_k = one_reference(g, sums, BC, EXCL)
        s += f_q * product(tl.where(i < t, yx, 0.0), w * f_k, DT, PREC)
    else:
        for n in range(0, LOG):
            right, pair, span = level(n, BC, EXCL)
            f = tl.exp(span_sums(span, g, EXACT))
            s += tl.where(right, f * product(tl.where(pair, yx, 0.0), w * f, DT, PREC), 0.0)
    return s


@triton.jit
def read_matrix(
    a, w, g, sums, BC: tl.constexpr, LOG: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr, EXACT: tl.constexpr, EXCL: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """A_ti = sum_c a_t[c] Omega[t, i, c], [BC, BC]; EXCL as in read_scores."""
    t, i = tl.arange(0, BC)[:, None], tl.arange(0, BC)[None, :]
    A = tl.zeros([BC, BC], tl.float32)
    if not EXCL:
        A += tl.where(t == i, own_share(a, w), 0.0)
    if CHUNKS == 1:
        f_q, f_k = one_reference(g, sums, BC, EXCL)
        A += tl.where(i < t, product(a * f_q, tl.trans(w * f_k), DT, PREC), 0.0)
    else:
        for n in range(0, LOG):
            _, pair, span = level(n, BC, EXCL)
            f = tl.exp(span_sums(span, g, EXACT))
            A += tl.where(pair, product(a * f, tl.trans(w * f), DT, PREC), 0.0)
    return A


@triton.jit
def slot_softmax(s, M, BM: tl.constexpr):
    """Softmax over the slots and its logsumexp; a row of -inf gives zeros and -inf."""
    s = tl.where((tl.arange(0, BM) < M)[None, :], s, -float("inf"))
    top = tl.max(s, 1)
    top = tl.where(top == -float("inf"), 0.0, top)
    e = tl.exp(s - top[:, None])
    Z = tl.sum(e, 1)
    some = tl.where(Z > 0, Z, 1.0)
    return e / some[:, None], tl.where(Z > 0, tl.log(some) + top, -float("inf"))


@triton.jit
def attend_kernel(
    p_q, p_k, p_v, p_g, p_bias, p_low, p_K, p_V, p_o, p_lse, p_steep, p_start, p_length, scale, H,
    R: tl.constexpr, M, D, V, BC: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
    BV: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr, EXACT: tl.constexpr, LOG: tl.constexpr, BIAS: tl.constexpr, LOW: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """o_t = (softmax(scale q_t K_t + b_t) + r_t) V_t and the logsumexp, for one chunk and one query head."""
    i_c, i_q = tl.program_id(0), tl.program_id(1)
    i_h = i_q // R
    if elsewhere(p_steep, i_c * H + i_h, CHUNKS):
        return
    o_c = tl.arange(0, BC)
    m_t = o_c < tl.load(p_length + i_c)
    token = tl.load(p_start + i_c) + o_c
    g = load_gates(p_g, token, H, i_h, M, BM, m_t)                                                  # [BC, BM]
    w = write_weights(g, EXACT)
    sums = span_sums(before(BC, False), g, EXACT)

    q = load_rows(p_q, token, H * R, i_q, D, BD, m_t)                                               # [BC, BD]
    k = load_rows(p_k, token, H, i_h, D, BD, m_t)                                                   # [BC, BD]
    qk = product(q, tl.trans(k), DT, PREC)                                                          # [BC, BC]
    inter = product(q, load_state(p_K, i_c, H, i_h, M, D, BM, BD), DT, PREC)              # [BC, BM]
    s = scale * read_scores(qk, inter, w, g, sums, BC, LOG, DT, PREC, EXACT, False, CHUNKS)
    if BIAS:
        s += load_rows(p_bias, token, H * R, i_q, M, BM, m_t)
    a, lse = slot_softmax(s, M, BM)
    tl.store(p_lse + token.to(tl.int64) * (H * R) + i_q, lse, mask=m_t)
    if LOW:
        a += load_rows(p_low, token, H * R, i_q, M, BM, m_t)

    A = read_matrix(a, w, g, sums, BC, LOG, DT, PREC, EXACT, False, CHUNKS)                                              # [BC, BC]
    v = load_rows(p_v, token, H, i_h, V, BV, m_t)                                                   # [BC, BV]
    o = product(A, v, DT, PREC) + product(a * tl.exp(sums), tl.trans(load_state(p_V, i_c, H, i_h, M, V, BM, BV)), DT, PREC)
    store_rows(p_o, o, token, H * R, i_q, V, BV, m_t)


@triton.jit
def weights_kernel(
    p_q, p_k, p_v, p_g, p_bias, p_low, p_K, p_V, p_do, p_dlse, p_a, p_ds, p_dlow, p_steep, p_start, p_length, scale, H,
    R: tl.constexpr, M, D, V, BC: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
    BV: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr, EXACT: tl.constexpr, LOG: tl.constexpr, BIAS: tl.constexpr, LOW: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """The read weights a = softmax + r once more, the gradient ds of the biased scores, and that of r, for one chunk and query head.

    da_t = V_t do_t,   ds = p (da - p.da + dlse)
    """
    i_c, i_q = tl.program_id(0), tl.program_id(1)
    i_h = i_q // R
    if elsewhere(p_steep, i_c * H + i_h, CHUNKS):
        return
    o_c = tl.arange(0, BC)
    m_t = o_c < tl.load(p_length + i_c)
    token = tl.load(p_start + i_c) + o_c
    g = load_gates(p_g, token, H, i_h, M, BM, m_t)
    w = write_weights(g, EXACT)
    sums = span_sums(before(BC, False), g, EXACT)

    q = load_rows(p_q, token, H * R, i_q, D, BD, m_t)
    k = load_rows(p_k, token, H, i_h, D, BD, m_t)
    qk = product(q, tl.trans(k), DT, PREC)
    inter = product(q, load_state(p_K, i_c, H, i_h, M, D, BM, BD), DT, PREC)
    s = scale * read_scores(qk, inter, w, g, sums, BC, LOG, DT, PREC, EXACT, False, CHUNKS)
    if BIAS:
        s += load_rows(p_bias, token, H * R, i_q, M, BM, m_t)
    p, _ = slot_softmax(s, M, BM)
    a = p
    if LOW:
        a += load_rows(p_low, token, H * R, i_q, M, BM, m_t)
    store_rows(p_a, a, token, H * R, i_q, M, BM, m_t)

    do = load_rows(p_do, token, H * R, i_q, V, BV, m_t)
    v = load_rows(p_v, token, H, i_h, V, BV, m_t)
    ov = product(do, tl.trans(v), DT, PREC)
    inter = product(do, load_state(p_V, i_c, H, i_h, M, V, BM, BV), DT, PREC)
    da = read_scores(ov, inter, w, g, sums, BC, LOG, DT, PREC, EXACT, False, CHUNKS)
    if LOW:
        store_rows(p_dlow, da, token, H * R, i_q, M, BM, m_t)
    dlse = tl.load(p_dlse + token.to(tl.int64) * (H * R) + i_q, mask=m_t, other=0.0)
    ds = p * (da - tl.sum(p * da, 1)[:, None] + dlse[:, None])
    store_rows(p_ds, ds, token, H * R, i_q, M, BM, m_t)


def attend(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, bias: Tensor | None, low: Tensor | None, K: Tensor, V: Tensor, steep: Tensor, work: Work,
    scale: float, o: Tensor, lse: Tensor,
) -> None:
    """Fill o [tokens, HQ, V] and lse [tokens, HQ]. K, V are border states [chunks, H, ., M]; bias and low [tokens, HQ, M] in float32."""
    for sizes in launches(k, v, g, work):
        attend_kernel[(work.plan.chunks, q.shape[1])](
            q, k, v, g, g if bias is None else bias, g if low is None else low, K, V, o, lse, steep, work.plan.start,
            work.plan.length, scale, g.shape[1], R=q.shape[1] // g.shape[1], BIAS=bias is not None, LOW=low is not None, **sizes)


def weights(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, bias: Tensor | None, low: Tensor | None, K: Tensor, V: Tensor, steep: Tensor, work: Work,
    scale: float, do: Tensor, dlse: Tensor, a: Tensor, ds: Tensor, dlow: Tensor | None,
) -> None:
    """Fill a and ds [tokens, HQ, M], and dlow where it is given."""
    for sizes in launches(k, v, g, work):
        weights_kernel[(work.plan.chunks, q.shape[1])](
            q, k, v, g, g if bias is None else bias, g if low is None else low, K, V, do, dlse, a, ds, g if dlow is None else dlow, steep,
            work.plan.start, work.plan.length, scale, g.shape[1], R=q.shape[1] // g.shape[1], BIAS=bias is not None, LOW=low is not None,
            **sizes)


def launches(k: Tensor, v: Tensor, g: Tensor, work: Work) -> list[dict[str, Any]]:
    """What the launches of one kernel differ in, and what they share."""
    (plan, tiles), D, V, M = work, k.shape[-1], v.shape[-1], g.shape[-1]
    shared = dict(M=M, D=D, V=V, BC=tiles.BC, BM=tiles.BM(M), BD=tiles.BD(D), BV=tiles.BD(V), LOG=tiles.BC.bit_length() - 1,
                  **tiles.precision, num_warps=tiles.warps(M, D, V), num_stages=1)
    return [{**shared, "CHUNKS": chunks} for chunks in tiles.paths] if plan.chunks else []
