"""What every chunk kernel shares: gates, matrix products by precision, the log-depth split of a chunk (docs/theory/chunks.md).

A chunk's pairs (t, i), i < t, are met once each by size of block: for b = C/2, ..., 2, 1 the pairs whose t lies in the right and whose i
lies in the left half of a block of 2b tokens. With the border between the halves as reference, the query's factor exp(sum of g after it)
and the key's exp(sum of g before it) are both <= 1. A row is either right or left in each level, so one 0/1 matrix `span` gives both sums.
Where the gates of a chunk add up to little, one reference serves the whole chunk instead.
"""

import triton
import triton.language as tl

# Which chunks a kernel works on: all of them by levels; the gentle ones with one reference for the whole chunk; the steep ones by levels.
ALL, GENTLE, STEEP = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
LIMIT = tl.constexpr(40.0)    # a chunk is gentle if its gates add up to at most this on either side of its middle: exp(80) is a float32
LOWEST = tl.constexpr(-1e30)  # stands for -inf, whose product with 0 would be NaN


@triton.jit
def product(x, y, DT: tl.constexpr, PREC: tl.constexpr):
    """x @ y with float32 sums: operands rounded to DT, or float32 operands in the precision PREC."""
    return tl.dot(x.to(DT), y.to(DT), input_precision=PREC)


@triton.jit
def span_sums(span, g, EXACT: tl.constexpr):
    """span @ g for a 0/1 matrix: to float32 accuracy in three steps, or to 16 bits in two products of bfloat16."""
    if EXACT:
        return tl.dot(span.to(tl.float32), g, input_precision="tf32x3")
    high = g.to(tl.bfloat16)
    low = (g - high.to(tl.float32)).to(tl.bfloat16)
    zeros_and_ones = span.to(tl.bfloat16)
    return tl.dot(zeros_and_ones, high) + tl.dot(zeros_and_ones, low)


@triton.jit
def load_gates(p_g, token, H, i_h, M, BM: tl.constexpr, m_t):
    """g [BC, BM] in float32; 0, which writes nothing and decays nothing, beyond the chunk and beyond M."""
    o_m = tl.arange(0, BM)
    p = p_g + (token[:, None].to(tl.int64) * H + i_h) * M + o_m[None, :]
    g = tl.load(p, mask=m_t[:, None] & (o_m < M)[None, :], other=0.0).to(tl.float32)
    return tl.maximum(g, LOWEST)


@triton.jit
def load_rows(p_x, token, heads, i_h, N, BN: tl.constexpr, m_t):
    """x [BC, BN] of a [tokens, heads, N] tensor in its own dtype; 0 beyond the chunk and beyond N."""
    o_n = tl.arange(0, BN)
    p = p_x + (token[:, None].to(tl.int64) * heads + i_h) * N + o_n[None, :]
    return tl.load(p, mask=m_t[:, None] & (o_n < N)[None, :], other=0.0)


@triton.jit
def store_rows(p_x, x, token, heads, i_h, N, BN: tl.constexpr, m_t):
    """The inverse of load_rows, rounded to the tensor's dtype."""
    o_n = tl.arange(0, BN)
    p = p_x + (token[:, None].to(tl.int64) * heads + i_h) * N + o_n[None, :]
    tl.store(p, x.to(p_x.dtype.element_ty), mask=m_t[:, None] & (o_n < N)[None, :])


@triton.jit
def state_offsets(i, H, i_h, o_d, o_m, M, D):
    """Offsets of state i of head i_h in a [states, H, D, M] tensor: kept this way round, a state is a product without a transpose."""
    return ((i.to(tl.int64) * H + i_h) * D + o_d[:, None]) * M + o_m[None, :]


@triton.jit
def load_state(p, i_c, H, i_h, M, D, BM: tl.constexpr, BD: tl.constexpr):
    """The border state [BD, BM] of a chunk."""
    o_m, o_d = tl.arange(0, BM), tl.arange(0, BD)
    return tl.load(p + state_offsets(i_c, H, i_h, o_d, o_m, M, D), mask=(o_d < D)[:, None] & (o_m < M)[None, :], other=0.0)


@triton.jit
def write_weights(g, EXACT: tl.constexpr):
    """w = 1 - exp(g), by its series where the difference would lose digits: to float32 accuracy, or to 16 bits."""
    if not EXACT:
        x = tl.maximum(g, -0.01)
        return tl.where(g > -0.01, -x * (1 + x * (0.5 + x / 6)), 1 - tl.exp(g))
    x = tl.maximum(g, -1.0)
    series = 1 + x / 6 * (1 + x / 7 * (1 + x / 8 * (1 + x / 9)))
    series = 1 + x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5 * series)))
    return tl.where(g > -0.5, -x * series, 1 - tl.exp(g))


@triton.jit
def own_share(a, w):
    """sum_c a_t[c] w_t[c], [BC, 1]: what a read finds of the token itself, w >= 0.

    The select keeps the compiler from fusing product and sum, which gives the lanes that share a row different last bits.
    """
    return tl.sum(tl.where(w > 0, a * w, 0.0), 1)[:, None]


@triton.jit
def before(BC: tl.constexpr, EXCL: tl.constexpr):
    """span[t, j]: g_j lies between the chunk's entry and the read of token t (inclusive; EXCL: before the token's own gate)."""
    t, j = tl.arange(0, BC)[:, None], tl.arange(0, BC)[None, :]
    return (j < t) if EXCL else (j <= t)


@triton.jit
def after(BC: tl.constexpr):
    """span[i, j]: g_j lies between token i and the chunk's end."""
    return tl.arange(0, BC)[None, :] > tl.arange(0, BC)[:, None]


@triton.jit
def level(n, BC: tl.constexpr, EXCL: tl.constexpr):
    """right [BC, 1], pairs [t, i] and span [row, j] of the level whose halves have 2^n tokens."""
    t, j = tl.arange(0, BC)[:, None], tl.arange(0, BC)[None, :]
    right = (t >> n) & 1 == 1
    pairs = right & ((j >> n) & 1 == 0) & (t >> (n + 1) == j >> (n + 1))
    upto = (j < t) if EXCL else (j <= t)
    span = (t >> n == j >> n) & ((right & upto) | (((t >> n) & 1 == 0) & (j > t)))
    return right, pairs, span


@triton.jit
def elsewhere(p_steep, i, CHUNKS: tl.constexpr):
    """Does another launch work on this chunk?"""
    if CHUNKS == 0:
        return False
    steep = tl.load(p_steep + i) > LIMIT
    return steep if CHUNKS == 1 else not steep


@triton.jit
def one_reference(g, sums, BC: tl.constexpr, EXCL: tl.constexpr):
    """Factors of query and key rows with the middle of the chunk as reference, for chunks that are gentle. sums = span_sums(before)."""
    middle = tl.sum(tl.where((tl.arange(0, BC) <= BC // 2)[:, None], g, 0.0), 0)[None, :]
    upto = sums + g if EXCL else sums
    return tl.exp(sums - middle), tl.exp(middle - upto)
