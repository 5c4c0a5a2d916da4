"""What one level of a vocabulary loses and the next one gets, x - rho_t X_t, with rho = w / sum w; and the first half of its gradient.

The loss is a read with the weights -rho, one more query head as it were: beyond rho itself, its gradient is that of any read.
"""

import triton
import triton.language as tl
from torch import Tensor

from .attend import launches, read_matrix, read_scores
from .maps import before, elsewhere, load_gates, load_rows, load_state, product, span_sums, store_rows, write_weights
from .plan import Work


@triton.jit
def shares(w):
    """rho = w / sum w, 0 where nothing is written; and the sum, 1 there."""
    total = tl.sum(w, 1)[:, None]
    divisor = tl.where(total > 0, total, 1.0)
    return tl.where(total > 0, w / divisor, 0.0), divisor


@triton.jit
def residual_kernel(
    p_k, p_v, p_g, p_K, p_V, p_lost_k, p_lost_v, p_steep, p_start, p_length, H,
    M, D, V, BC: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr,
    EXACT: tl.constexpr, LOG: tl.constexpr, EXCL: tl.constexpr, CHUNKS: tl.constexpr,
):
    """k - rho_t K_t and v - rho_t V_t (EXCL: K_{t-1}, V_{t-1}), for one chunk and one KV head."""
    i_c, i_h = tl.program_id(0), tl.program_id(1)
    if elsewhere(p_steep, i_c * H + i_h, CHUNKS):
        return
    o_c = tl.arange(0, BC)
    m_t = o_c < tl.load(p_length + i_c)
    token = tl.load(p_start + i_c) + o_c
    g = load_gates(p_g, token, H, i_h, M, BM, m_t)
    w = write_weights(g, EXACT)
    sums = span_sums(before(BC, EXCL), g, EXACT)
    rho, _ = shares(w)
    A = read_matrix(rho, w, g, sums, BC, LOG, DT, PREC, EXACT, EXCL, CHUNKS)
    entry = rho * tl.exp(sums)
    k = load_rows(p_k, token, H, i_h, D, BD, m_t)
    read = product(A, k, DT, PREC) + product(entry, tl.trans(load_state(p_K, i_c, H, i_h, M, D, BM, BD)), DT, PREC)
    store_rows(p_lost_k, k.to(tl.float32) - read, token, H, i_h, D, BD, m_t)
    v = load_rows(p_v, token, H, i_h, V, BV, m_t)
    read = product(A, v, DT, PREC) + product(entry, tl.trans(load_state(p_V, i_c, H, i_h, M, V, BM, BV)), DT, PREC)
    store_rows(p_lost_v, v.to(tl.float32) - read, token, H, i_h, V, BV, m_t)


@triton.jit
def residual_weights_kernel(
    p_k, p_v, p_g, p_K, p_V, p_dlost_k, p_dlost_v, p_a, p_dg, p_steep, p_start, p_length, H,
    M, D, V, BC: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr,
    EXACT: tl.constexpr, LOG: tl.constexpr, EXCL: tl.constexpr, CHUNKS: tl.constexpr,
):
    """The read weights a = -rho, and the gradient of the gates through rho alone, for one chunk and one KV head.

    drho_t = -(K_t dk'_t + V_t dv'_t),   dw = (drho - rho.drho) / sum w,   dg = -exp(g) dw
    """
    i_c, i_h = tl.program_id(0), tl.program_id(1)
    if elsewhere(p_steep, i_c * H + i_h, CHUNKS):
        return
    o_c = tl.arange(0, BC)
    m_t = o_c < tl.load(p_length + i_c)
    token = tl.load(p_start + i_c) + o_c
    g = load_gates(p_g, token, H, i_h, M, BM, m_t)
    w = write_weights(g, EXACT)
    sums = span_sums(before(BC, EXCL), g, EXACT)
    rho, divisor = shares(w)
    store_rows(p_a, -rho, token, H, i_h, M, BM, m_t)

    y = load_rows(p_dlost_k, token, H, i_h, D, BD, m_t)
    yx = product(y, tl.trans(load_rows(p_k, token, H, i_h, D, BD, m_t)), DT, PREC)
    inter = product(y, load_state(p_K, i_c, H, i_h, M, D, BM, BD), DT, PREC)
    y = load_rows(p_dlost_v, token, H, i_h, V, BV, m_t)
    yx += product(y, tl.trans(load_rows(p_v, token, H, i_h, V, BV, m_t)), DT, PREC)
    inter += product(y, load_state(p_V, i_c, H, i_h, M, V, BM, BV), DT, PREC)
    drho = -read_scores(yx, inter, w, g, sums, BC, LOG, DT, PREC, EXACT, EXCL, CHUNKS)
    drho = tl.where((tl.arange(0, BM) < M)[None, :], drho, 0.0)
    some = tl.sum(w, 1)[:, None] > 0
    dw = tl.where(some, (drho - tl.sum(rho * drho, 1)[:, None]) / divisor, 0.0)
    store_rows(p_dg, -tl.exp(g) * dw, token, H, i_h, M, BM, m_t)


def residual(
    k: Tensor, v: Tensor, g: Tensor, K: Tensor, V: Tensor, steep: Tensor, work: Work, excl: bool, lost_k: Tensor, lost_v: Tensor
) -> None:
    """Fill lost_k and lost_v, shaped as k and v. K, V are border states [chunks, H, ., M]."""
    run(residual_kernel, k, v, g, K, V, lost_k, lost_v, steep=steep, work=work, excl=excl)


def residual_weights(
    k: Tensor, v: Tensor, g: Tensor, K: Tensor, V: Tensor, steep: Tensor, work: Work, excl: bool, dlost_k: Tensor, dlost_v: Tensor,
    a: Tensor, dg: Tensor,
) -> None:
    """Fill a = -rho and dg, shaped as g."""
    run(residual_weights_kernel, k, v, g, K, V, dlost_k, dlost_v, a, dg, steep=steep, work=work, excl=excl)


def run(kernel: triton.JITFunction, k: Tensor, v: Tensor, g: Tensor, *tensors: Tensor, steep: Tensor, work: Work, excl: bool) -> None:
    for sizes in launches(k, v, g, work):
        kernel[(work.plan.chunks, g.shape[1])](
            k, v, g, *tensors, steep, work.plan.start, work.plan.length, g.shape[1], **sizes, EXCL=excl)
