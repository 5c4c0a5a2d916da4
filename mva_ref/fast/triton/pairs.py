"""Reads inside a chunk, forward and backward: one kernel, because the scores of slots and the values of slots are each other's gradient."""

import triton
import triton.language as tl
from torch import Tensor

from .maps import (
    after,
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
def pairs_kernel(
    p_a, p_y, p_x, p_g, p_in, p_out, p_s, p_o, p_dx, p_dg, p_steep, p_start, p_length, scale, H,
    R: tl.constexpr, M, D, BC: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, DT: tl.constexpr,
    PREC: tl.constexpr, EXACT: tl.constexpr, LOG: tl.constexpr, EXCL: tl.constexpr, SCORES: tl.constexpr,
    VALUES: tl.constexpr, REVERSE: tl.constexpr, LEAVE: tl.constexpr, ADD: tl.constexpr, CHUNKS: tl.constexpr,
):
    """One chunk and one KV head with its R query heads.

    With Omega[t, i, c] = w_i[c] exp(sum of g_j over i < j <= t) and entry state X:
    SCORES    s_t[c] = scale (sum_i Omega[t, i, c] y_t.x_i + exp(sum of g up to t) y_t.X[c])
    VALUES    o_t = scale (sum_i A_ti x_i + (a_t exp(sum of g up to t)) X),   A_ti = sum_c a_t[c] Omega[t, i, c]
    REVERSE   with the gradient Y of the state at the chunk's end: dx_i = scale sum_t A_ti y_t + (w_i exp(sum of g after i)) Y, and dg, by
              the chain rule through every exponent; no difference of long sums is formed (docs/theory/chunks.md). Without
              LEAVE there is no Y, its terms being another launch's, and dx is added to what is there; with ADD dg is
    """
    i_c, i_h = tl.program_id(0), tl.program_id(1)
    if elsewhere(p_steep, i_c * H + i_h, CHUNKS):
        return
    o_c = tl.arange(0, BC)
    m_t = o_c < tl.load(p_length + i_c)
    token = tl.load(p_start + i_c) + o_c
    diagonal = o_c[:, None] == o_c[None, :]

    g = load_gates(p_g, token, H, i_h, M, BM, m_t)                                                  # [BC, BM]
    w = write_weights(g, EXACT)
    x = load_rows(p_x, token, H, i_h, D, BD, m_t)                                                   # [BC, BD]
    X = load_state(p_in, i_c, H, i_h, M, D, BM, BD)                                                 # [BD, BM]
    sums = span_sums(before(BC, EXCL), g, EXACT)
    f_in = tl.exp(sums)
    if REVERSE:
        dx = tl.zeros([BC, BD], tl.float32)
        dw = tl.zeros([BC, BM], tl.float32)
        dg = tl.zeros([BC, BM], tl.float32)

    for r in range(0, R):
        i_q = i_h * R + r
        if SCORES or REVERSE:
            y = load_rows(p_y, token, H * R, i_q, D, BD, m_t)                                       # [BC, BD]
            yx = product(y, tl.trans(x), DT, PREC)                                                  # [BC, BC]
            s = f_in * product(y, X, DT, PREC)                                            # [BC, BM]
        if VALUES or REVERSE:
            a = scale * load_rows(p_a, token, H * R, i_q, M, BM, m_t).to(tl.float32)                # [BC, BM]
            A = tl.zeros([BC, BC], tl.float32)
        if REVERSE:
            dg += product(tl.trans(before(BC, EXCL).to(tl.float32)), a * s, DT, PREC)
        if not EXCL:
            if SCORES or REVERSE:
                own = tl.sum(tl.where(diagonal, yx, 0.0), 1)
                s += own[:, None] * w
            if VALUES or REVERSE:
                A += tl.where(diagonal, own_share(a, w), 0.0)
            if REVERSE:
                dw += own[:, None] * a
        if CHUNKS == 1:
            f_q, f_k = one_reference(g, sums, BC, EXCL)
            pair = o_c[None, :] < o_c[:, None]
            if SCORES or REVERSE:
                here = tl.where(pair, yx, 0.0)
                scored = f_q * product(here, w * f_k, DT, PREC)
                s += scored
            if VALUES or REVERSE:
                A += tl.where(pair, product(a * f_q, tl.trans(w * f_k), DT, PREC), 0.0)
            if REVERSE:
                taken = f_k * product(tl.trans(here), a * f_q, DT, PREC)
                dw += taken
                if EXCL:
                    dg += product(tl.trans(before(BC, True).to(tl.float32)), a * scored, DT, PREC)
                    dg -= product(tl.trans(before(BC, False).to(tl.float32)), w * taken, DT, PREC)
                else:
                    dg += product(tl.trans(before(BC, False).to(tl.float32)), a * scored - w * taken, DT, PREC)
        else:
            for n in range(0, LOG):
                right, pair, span = level(n, BC, EXCL)
                f = tl.exp(span_sums(span, g, EXACT))
                if SCORES or REVERSE:
                    here = tl.where(pair, yx, 0.0)
                    scored = tl.where(right, f * product(here, w * f, DT, PREC), 0.0)
                    s += scored
                if VALUES or REVERSE:
                    A += tl.where(pair, product(a * f, tl.trans(w * f), DT, PREC), 0.0)
                if REVERSE:
                    taken = tl.where(right, 0.0, f * product(tl.trans(here), a * f, DT, PREC))
                    dw += taken
                    dg += product(tl.trans(span.to(tl.float32)), a * scored + w * taken, DT, PREC)
        if SCORES:
            store_rows(p_s, scale * s, token, H * R, i_q, M, BM, m_t)
        if VALUES:
            o = product(A, x, DT, PREC) + product(a * f_in, tl.trans(X), DT, PREC)
            store_rows(p_o, o, token, H * R, i_q, D, BD, m_t)
        if REVERSE:
            dx += product(tl.trans(A), y, DT, PREC)

    if REVERSE:
        dg -= tl.exp(g) * dw
        if LEAVE:
            Y = load_state(p_out, i_c, H, i_h, M, D, BM, BD)                                        # [BD, BM]
            span = after(BC)
            f_out = tl.exp(span_sums(span, g, EXACT))
            taken = f_out * product(x, Y, DT, PREC)                                                 # [BC, BM]
            dx += product(w * f_out, tl.trans(Y), DT, PREC)
            through = tl.exp(tl.sum(g, 0)) * tl.sum(X.to(tl.float32) * Y.to(tl.float32), 0)
            dg += product(tl.trans(span.to(tl.float32)), w * taken, DT, PREC) + through[None, :] - tl.exp(g) * taken
        else:
            dx += load_rows(p_dx, token, H, i_h, D, BD, m_t).to(tl.float32)
        if ADD:
            dg += load_rows(p_dg, token, H, i_h, M, BM, m_t)
        store_rows(p_dx, dx, token, H, i_h, D, BD, m_t)
        store_rows(p_dg, dg, token, H, i_h, M, BM, m_t)


def chunk_pairs(
    a: Tensor | None, y: Tensor | None, x: Tensor, g: Tensor, entry: Tensor, steep: Tensor, work: Work, *, scale: float = 1.0,
    excl: bool = False, s: Tensor | None = None, o: Tensor | None = None, leaving: Tensor | None = None, dx: Tensor | None = None,
    dg: Tensor | None = None, add: bool = False,
) -> None:
    """Fill those of s [tokens, HQ, M], o [tokens, HQ, D], dx [tokens, H, D] with dg [tokens, H, M] that are given.

    add: dg is added to; dx is added to where `leaving` is not given.

    a [tokens, HQ, M] read weights, y [tokens, HQ, D] queries, x [tokens, H, D], g [tokens, H, M], entry and leaving [chunks, H, D, M].
    """
    (plan, tiles), (_, H, M), D = work, g.shape, x.shape[-1]
    HQ = next(z.shape[1] for z in (a, y) if z is not None)
    pointers = [z if z is not None else g for z in (a, y, x, g, entry, leaving, s, o, dx, dg)]
    for chunks in tiles.paths if plan.chunks else ():
        pairs_kernel[(plan.chunks, H)](
            *pointers, steep, plan.start, plan.length, scale, H, R=HQ // H, M=M, D=D, BC=tiles.BC, BM=tiles.BM(M), BD=tiles.BD(D),
            **tiles.precision, LOG=tiles.BC.bit_length() - 1, EXCL=excl, SCORES=s is not None, VALUES=o is not None,
            REVERSE=dx is not None, LEAVE=leaving is not None, ADD=add, CHUNKS=chunks, num_warps=tiles.warps(M, D),
            num_stages=1)
