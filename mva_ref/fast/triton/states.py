"""The slots at every chunk border: forward the states that tokens have written, backward the gradients that later reads have left."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .maps import after, before, load_gates, load_rows, product, span_sums, state_offsets, write_weights
from .plan import Work


@triton.jit
def states_kernel(
    p_x, p_a, p_x2, p_a2, p_more, p_more_x, p_more_x2, p_g, p_entry, p_entry2, p_states, p_states2, p_end, p_end2, p_total, p_steep,
    p_segment, p_start, p_length, scale, H,
    R: tl.constexpr, M, D, D2, BC: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
    BD2: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr, EXACT: tl.constexpr, REVERSE: tl.constexpr, EXCL: tl.constexpr,
    LOCAL: tl.constexpr, TWO: tl.constexpr, MORE: tl.constexpr, MORE_EXCL: tl.constexpr,
):
    """One segment of chunks, one KV head: the states of x and, with TWO, of x2, which share the gates.

    Forward:  S <- exp(sum g) S + sum_i (w_i exp(sum of g after i)) (x) x_i
    REVERSE:  S <- exp(sum g) S + sum_t (scale a_t exp(sum of g up to t)) (x) x_t, last chunk first, over the R query heads of the group;
              scale belongs to a alone; with MORE, over one more read of both by each KV head
    LOCAL starts from zero and stores what the segment adds and its total decay; otherwise every chunk's entry state is stored.
    """
    i_s, i_h = tl.program_id(0), tl.program_id(1)
    o_c, o_m, o_d, o_d2 = tl.arange(0, BC), tl.arange(0, BM), tl.arange(0, BD), tl.arange(0, BD2)
    m_state, m_state2 = (o_d < D)[:, None] & (o_m < M)[None, :], (o_d2 < D2)[:, None] & (o_m < M)[None, :]
    first, last = tl.load(p_segment + i_s), tl.load(p_segment + i_s + 1)
    S = tl.zeros([BD, BM], tl.float32)
    S2 = tl.zeros([BD2, BM], tl.float32)
    if not LOCAL:
        S += tl.load(p_entry + state_offsets(i_s, H, i_h, o_d, o_m, M, D), mask=m_state, other=0.0).to(tl.float32)
        if TWO:
            S2 += tl.load(p_entry2 + state_offsets(i_s, H, i_h, o_d2, o_m, M, D2), mask=m_state2, other=0.0).to(tl.float32)
    total = tl.zeros([BM], tl.float32)
    near, far = (last - 1, first) if REVERSE else (first, last - 1)
    g_next = load_gates(p_g, tl.load(p_start + near) + o_c, H, i_h, M, BM, o_c < tl.load(p_length + near))
    for n in range(0, last - first):
        i_c = near - n if REVERSE else near + n
        if not LOCAL:
            tl.store(p_states + state_offsets(i_c, H, i_h, o_d, o_m, M, D), S.to(p_states.dtype.element_ty), mask=m_state)
            if TWO:
                tl.store(p_states2 + state_offsets(i_c, H, i_h, o_d2, o_m, M, D2), S2.to(p_states2.dtype.element_ty), mask=m_state2)
        m_t = o_c < tl.load(p_length + i_c)
        token = tl.load(p_start + i_c) + o_c
        g = g_next                                                                                  # [BC, BM]
        ahead = tl.maximum(i_c - 1, far) if REVERSE else tl.minimum(i_c + 1, far)                   # the next chunk's gates come early
        g_next = load_gates(p_g, tl.load(p_start + ahead) + o_c, H, i_h, M, BM, o_c < tl.load(p_length + ahead))
        decay = tl.sum(g, 0)
        kept = tl.exp(decay)[None, :]
        S *= kept
        S2 *= kept
        total += decay
        if REVERSE:
            f = tl.exp(span_sums(before(BC, EXCL), g, EXACT))
            for r in range(0, R):
                a = scale * f * load_rows(p_a, token, H * R, i_h * R + r, M, BM, m_t).to(tl.float32)   # [BC, BM]
                S += product(tl.trans(load_rows(p_x, token, H * R, i_h * R + r, D, BD, m_t)), a, DT, PREC)
                if TWO:
                    a2 = f * load_rows(p_a2, token, H * R, i_h * R + r, M, BM, m_t).to(tl.float32)
                    S2 += product(tl.trans(load_rows(p_x2, token, H * R, i_h * R + r, D2, BD2, m_t)), a2, DT, PREC)
            if MORE:
                f_more = tl.exp(span_sums(before(BC, MORE_EXCL), g, EXACT))
                more = f_more * load_rows(p_more, token, H, i_h, M, BM, m_t).to(tl.float32)
                S += product(tl.trans(load_rows(p_more_x, token, H, i_h, D, BD, m_t)), more, DT, PREC)
                S2 += product(tl.trans(load_rows(p_more_x2, token, H, i_h, D2, BD2, m_t)), more, DT, PREC)
        else:
            if not LOCAL:
                half = tl.sum(tl.where((o_c <= BC // 2)[:, None], g, 0.0), 0)
                tl.store(p_steep + i_c * H + i_h, tl.max(tl.maximum(-half, half - decay), 0))
            a = write_weights(g, EXACT) * tl.exp(span_sums(after(BC), g, EXACT))
            S += product(tl.trans(load_rows(p_x, token, H, i_h, D, BD, m_t)), a, DT, PREC)
            if TWO:
                S2 += product(tl.trans(load_rows(p_x2, token, H, i_h, D2, BD2, m_t)), a, DT, PREC)
    tl.store(p_end + state_offsets(i_s, H, i_h, o_d, o_m, M, D), S, mask=m_state)
    if TWO:
        tl.store(p_end2 + state_offsets(i_s, H, i_h, o_d2, o_m, M, D2), S2, mask=m_state2)
    tl.store(p_total + (i_s.to(tl.int64) * H + i_h) * M + o_m, total, mask=o_m < M)


@triton.jit
def scan_kernel(
    p_initial, p_end, p_total, p_entry, p_final, p_sequence, H,
    M, D, BM: tl.constexpr, BD: tl.constexpr, REVERSE: tl.constexpr,
):
    """Segments of one sequence in a row: the entry state of each from what the earlier ones add, and the state at the far end."""
    i_n, i_h, i_d = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    o_m, o_d = tl.arange(0, BM), i_d * BD + tl.arange(0, BD)
    m_state = (o_d < D)[:, None] & (o_m < M)[None, :]
    here = state_offsets(i_n, H, i_h, o_d, o_m, M, D)
    S = tl.load(p_initial + here, mask=m_state, other=0.0).to(tl.float32)
    first, last = tl.load(p_sequence + i_n), tl.load(p_sequence + i_n + 1)
    for n in range(0, last - first):
        i_s = last - 1 - n if REVERSE else first + n
        there = state_offsets(i_s, H, i_h, o_d, o_m, M, D)
        tl.store(p_entry + there, S, mask=m_state)
        total = tl.load(p_total + (i_s.to(tl.int64) * H + i_h) * M + o_m, mask=o_m < M, other=0.0)
        S = tl.exp(total)[None, :] * S + tl.load(p_end + there, mask=m_state, other=0.0)
    tl.store(p_final + here, S, mask=m_state)


class Borders(NamedTuple):
    """States at the borders of all chunks [chunks, H, D, M], and after the last token of each sequence [N, H, D, M]."""

    states: Tensor
    end: Tensor


class More(NamedTuple):
    """One more read by each KV head: weights a [tokens, H, M], what it sends back to both states x [tokens, H, D], x2 [tokens, H, D2]."""

    a: Tensor
    x: Tensor
    x2: Tensor
    excl: bool


def chunk_states(
    xs: list[Tensor], g: Tensor, initial: list[Tensor], work: Work, weights: list[Tensor] | None = None, scale: float = 1.0,
    excl: bool = False, more: More | None = None,
) -> tuple[list[Borders], Tensor]:
    """Border states of one or two tensors that share their gates, and how steep the gates [chunks, H] of each chunk are.

    xs [tokens, H, D], g [tokens, H, M], initial [N, H, D, M]: states that x was written to, from first to last token.
    With weights [tokens, HQ, M] and xs [tokens, HQ, D]: gradients of the states, from last to first token; scale is for the first, and
    `more` is one more read of both.
    """
    (plan, tiles), (_, H, M), reverse, two = work, g.shape, weights is not None, len(xs) == 2
    D, R = [x.shape[-1] for x in xs], xs[0].shape[1] // H
    states = [x.new_empty(plan.chunks, H, d, M, dtype=tiles.state_dtype) for x, d in zip(xs, D, strict=True)]
    ends = [x.new_empty(plan.segments, H, d, M, dtype=torch.float32) for x, d in zip(xs, D, strict=True)]
    entries, finals = [torch.empty_like(x) for x in ends], [torch.empty_like(x, dtype=torch.float32) for x in initial]
    total = g.new_empty(plan.segments, H, M, dtype=torch.float32)
    steep = g.new_empty(plan.chunks, H, dtype=torch.float32)
    a = weights or [g, g]

    def walk(local: bool) -> None:
        if plan.segments:
            states_kernel[(plan.segments, H)](
                xs[0], a[0], xs[-1], a[-1], *(more[:3] if more else (g, g, g)), g, entries[0], entries[-1], states[0], states[-1], ends[0],
                ends[-1], total, steep,
                plan.segment, plan.start, plan.length, scale, H, R=R, M=M, D=D[0], D2=D[-1], BC=tiles.BC, BM=tiles.BM(M), BD=tiles.BD(D[0]),
                BD2=tiles.BD(D[-1]) if two else 16, **tiles.precision, REVERSE=reverse, EXCL=excl, LOCAL=local, TWO=two,
                MORE=more is not None, MORE_EXCL=more is not None and more.excl, num_warps=tiles.warps(M, *D), num_stages=tiles.stages)

    walk(local=True)
    for x0, end, entry, final, d in zip(initial, ends, entries, finals, D, strict=True):
        BD = min(64, tiles.BD(d))
        scan_kernel[(plan.sequences, H, -(-d // BD))](
            x0, end, total, entry, final, plan.sequence, H, M=M, D=d, BM=tiles.BM(M), BD=BD, REVERSE=reverse, num_warps=4)
    walk(local=False)
    return [Borders(x, y) for x, y in zip(states, finals, strict=True)], steep
