"""One token's read of M slots inside a kernel: scores s and log weights b give read weights and their mass; docs/theory/slots.md, P12."""

import triton
import triton.language as tl


@triton.jit
def exp_sum(x):
    """exp(x - top) and its sum for a finite top, the maximum where there is one."""
    top = tl.max(x, 0)
    top = tl.where(top == -float("inf"), 0.0, top)
    e = tl.exp(x - top)
    return e, tl.sum(e, 0), top


@triton.jit
def log_of(Z, top):
    """log |Z| + top; -inf for Z = 0."""
    return tl.where(Z == 0, -float("inf"), tl.log(tl.abs(tl.where(Z == 0, 1.0, Z))) + top)


@triton.jit
def over_bias(log_Z, b):
    """What a level after the first adds to the log mass: log Z - lse(b), or nothing where every slot is hidden."""
    _, Z, top = exp_sum(b)
    return tl.where(Z == 0, 0.0, log_Z - log_of(tl.where(Z == 0, 1.0, Z), top))


@triton.jit
def read_weights(s, b, READ: tl.constexpr):
    """Weights p [BM] of a read of scores s with log weights b (-inf hides a slot), and log |Z|: READ is softmax, sigmoid or an order N."""
    if READ == "softmax":
        e, Z, top = exp_sum(s + b)
    elif READ == "sigmoid":
        e, Z, top = tl.exp(b) / (1 + tl.exp(-s)), 1.0, 0.0      # not divided by its sum, and without a mass
    else:
        f = tl.full(s.shape, 1.0, tl.float64)       # near its minimum an even order cancels
        for n in tl.static_range(READ):
            f = 1 + f * s / (READ - n)
        e, _, top = exp_sum(b)
        e = tl.where(b == -float("inf"), 0.0, e * f.to(tl.float32))
        Z = tl.sum(e, 0)
    return e / tl.where(Z == 0, 1.0, Z), log_of(Z, top)
