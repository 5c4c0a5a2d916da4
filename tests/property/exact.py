"""The definitions once more, in mpmath with 40 digits: sums over tokens and slots, written for one head and never for speed.

Nothing here comes from mva_ref but the names of the arguments; `exact` takes a drawn problem and returns o and lse in float64.
"""

from typing import Any, NamedTuple

import torch
from mpmath import mp, mpf
from torch import Tensor

mp.dps = 40
Number, Vector, Matrix = Any, list[Any], list[list[Any]]
ZERO, INF = mpf(0), mpf("inf")


class Row(NamedTuple):
    """One output row, its mass Z (which an odd order can make negative), and sum |terms of Z| / |Z|."""

    o: Vector
    Z: Number
    condition: Number = mpf(1)


def numbers(x: Any) -> Any:
    """A tensor as nested lists of exact mpmath numbers."""
    return mpf(x) if not isinstance(x, list) else [numbers(y) for y in x]


def dot(x: Vector, y: Vector) -> Number:
    return sum((a * b for a, b in zip(x, y, strict=True)), ZERO)


def combine(weights: Vector, rows: Matrix, width: int) -> Vector:
    return [sum((w * row[d] for w, row in zip(weights, rows, strict=True)), ZERO) for d in range(width)]


def phi(x: Number, order: int) -> Number:
    return sum((x**n / mp.factorial(n) for n in range(order + 1)), ZERO)


def average(terms: Vector, rows: Matrix, width: int) -> Row:
    """sum terms rows / sum terms; 0 where the sum is 0."""
    Z = sum(terms, ZERO)
    if Z == 0:
        return Row([ZERO] * width, ZERO, INF if any(terms) else mpf(1))
    return Row(combine([x / Z for x in terms], rows, width), Z, sum(map(abs, terms)) / abs(Z))


def softmax(t: int, q: Vector, k: Matrix, v: Matrix, seen: list[int], scale: Number) -> Row:
    return average([mp.exp(scale * dot(q, k[i])) for i in seen], [v[i] for i in seen], len(v[0]))


def taylor(t: int, q: Vector, k: Matrix, v: Matrix, seen: list[int], scale: Number, order: int, centre: Vector) -> Row:
    r = scale * dot(q, centre)
    row = average([phi(scale * dot(q, k[i]) - r, order) for i in seen], [v[i] for i in seen], len(v[0]))
    # a state keeps features of k and of q, whose products are powers of x and of r: those add up to x - r, or cancel
    parts = sum((phi(abs(scale * dot(q, k[i])) + abs(r), order) for i in seen), ZERO)
    return row._replace(Z=row.Z * mp.exp(r), condition=parts / abs(row.Z) if row.Z else row.condition)


def written(g: Matrix, t: int) -> Matrix:
    """Omega[i][c] at time t: what token i wrote, times the decays of the tokens after it."""
    M = len(g[0])
    return [[(1 - mp.exp(g[i][c])) * mp.fprod(mp.exp(g[j][c]) for j in range(i + 1, t + 1)) for c in range(M)] for i in range(t + 1)]


def slots(x: Matrix, g: Matrix, t: int) -> Matrix:
    """X_t[c] = sum_i Omega[i][c] x_i."""
    omega = written(g, t)
    return [combine([omega[i][c] for i in range(t + 1)], x[: t + 1], len(x[0])) for c in range(len(g[0]))]


def lost(x: Matrix, g: Matrix, when: str) -> Matrix:
    """x_t - sum_c rho_t[c] X[c], with the slots after ("post") or before ("pre") the token's own write."""
    left = []
    for t in range(len(x)):
        w = [1 - mp.exp(y) for y in g[t]]
        rho = [y / sum(w) if sum(w) else ZERO for y in w]
        read = combine(rho, slots(x, g, t if when == "post" else t - 1), len(x[0]))
        left.append([a - b for a, b in zip(x[t], read, strict=True)])
    return left


def read_slots(q: Vector, K: Matrix, V: Matrix, b: Vector, kind: str | int, how: dict[str, Any], normalised: bool) -> Row:
    s = [how["scale"] * dot(q, row) for row in K]
    if kind == "sigmoid":
        W, a = how["perceptron"]
        f = [1 / (1 + mp.exp(-dot(W[c], s) - a[c])) for c in range(len(s))]
    else:
        f = [mp.exp(x) if kind == "softmax" else phi(x, int(kind)) for x in s]
    terms = [mp.exp(x) * y for x, y in zip(b, f, strict=True)]
    if kind == "sigmoid" and not normalised:
        return Row(combine(terms, V, len(V[0])), ZERO)
    return average(terms, V, len(V[0]))


def slot_row(t: int, now: int, h: dict[str, Any], how: dict[str, Any], kind: str | int, normalised: bool) -> Row:
    """Row t of MVA with the slots as they are after token `now`; one level is GSA."""
    k, v, out, Z, condition = h["k"], h["v"], [ZERO] * len(h["v"][0]), mpf(1), mpf(1)
    for level, g in enumerate(h["g_levels"]):
        if h["slot_bias"] == "mass":
            mass = [sum(column, ZERO) for column in zip(*written(g, now), strict=True)] or [ZERO] * len(g[0])
            b = [mp.log(x) if x else -INF for x in mass]
        else:
            b = [ZERO] * len(g[0]) if h["slot_bias"] is None else h["slot_bias"][t]
        row = read_slots(h["q"][t], slots(k, g, now), slots(v, g, now), b, kind, how, normalised)
        out = [x + y for x, y in zip(out, row.o, strict=True)]
        prior = sum(map(mp.exp, b), ZERO)
        Z *= row.Z if level == 0 else row.Z / prior if kind == "softmax" and prior else 1
        condition = max(condition, row.condition)
        k, v = lost(k, g, how["residual"]), lost(v, g, how["residual"])
    if h["low_query"] is not None:
        g = h["low_g"] if how["branches"] == "separate" else h["g_levels"][0]
        low = combine(h["low_query"][t], slots(h["v"], g, now), len(out))
        beta = h["branch_gate"][t] if how["branches"] == "gated" else None
        out = [x + y if beta is None else beta * x + (1 - beta) * y for x, y in zip(low, out, strict=True)]
    return Row(out, Z, condition)


def abc_row(t: int, h: dict[str, Any], seen: list[int], scale: Number) -> Row:
    K, V = ([average([mp.exp(h["s"][i][c]) for i in seen], [x[i] for i in seen], len(x[0])).o for c in range(len(h["s"][0]))]
            for x in (h["k"], h["v"]))
    return softmax(t, h["q"][t], K, V, list(range(len(K))), scale)


def metala_row(t: int, h: dict[str, Any]) -> Row:
    g, r = h["g_levels"][0], h["r"][t]
    o = combine(r, slots(h["v"], g, t), len(h["v"][0]))
    if h["self_augmentation"] is not None:
        own = sum(a * b * (1 - mp.exp(c)) for a, b, c in zip(r, h["self_augmentation"], g[t], strict=True))
        o = [x + 1 / (1 + mp.exp(-own * y)) for x, y in zip(o, h["v"][t], strict=True)]
    return Row(o, ZERO)


def window_row(t: int, h: dict[str, Any], how: dict[str, Any], keep: list[bool]) -> Row:
    """Softmax over window and sinks, the slots over the rest, which is written as it leaves the window."""
    W, n, v = how["window"], how["sinks"], h["v"]
    near = softmax(t, h["q"][t], h["k"], v, [i for i in range(t + 1) if keep[i] and (i > t - W or i < n)], how["scale"])
    far = slot_row(t, max(t - W, -1), h, how, how["read"], normalised=True)
    empty = not any(keep[n : max(t - W + 1, 0)])
    if how["integration"] == "hard":
        b = mpf(1) if empty else h["hard_weight"][t]
        return Row([b * x + (1 - b) * y for x, y in zip(near.o, far.o, strict=True)], ZERO, far.condition)
    both = average([near.Z, ZERO if empty else far.Z], [near.o, far.o], len(near.o))
    return both._replace(condition=mpf(1) if empty else both.condition * far.condition)


def one_head(name: str, h: dict[str, Any], how: dict[str, Any], keep: list[bool]) -> list[Row]:
    """All rows of one head. h holds its tensors as lists, how the options."""
    rows, T = [], len(h["v"])
    for t in range(T):
        seen = [i for i in range(t + 1) if keep[i]]
        if name == "softmax":
            visible = [i for i in seen if how["window"] is None or i > t - how["window"] or i < how["sinks"]]
            rows.append(softmax(t, h["q"][t], h["k"], h["v"], visible, how["scale"]))
        elif name == "taylor":
            c = {None: [], "running": seen, "mean": [i for i in range(T) if keep[i]]}[how["centre"]]
            centre = [sum((h["k"][i][d] for i in c), ZERO) / max(len(c), 1) for d in range(len(h["k"][0]))]
            rows.append(taylor(t, h["q"][t], h["k"], h["v"], seen, how["scale"], how["order"], centre))
        elif name == "metala":
            rows.append(metala_row(t, h))
        elif name == "abc":
            rows.append(abc_row(t, h, seen, how["scale"]))
        elif name in ("gsa", "mva"):
            rows.append(slot_row(t, t, h, how, how["read"], normalised=False))
        elif name in ("gsa_sw", "mva_sw"):
            rows.append(window_row(t, h, how, keep))
        else:
            raise ValueError(f"{name} is not defined here; known are {KNOWN}")
    return rows


KNOWN = ("softmax", "taylor", "metala", "abc", "gsa", "mva", "gsa_sw", "mva_sw")


def exact(name: str, inputs: dict[str, Tensor], options: dict[str, Any]) -> tuple[Tensor, Tensor, float]:
    """o [B, T, HQ, V], log |Z| [B, T, HQ] and the worst condition of a row, for one call of one method."""
    first, v = next(iter(inputs.values())), inputs["v"]
    B, T, HQ = first.shape[:3]
    R, given = HQ // v.shape[2], {**inputs, **options}
    mask = options.get("key_mask")
    how: dict[str, Any] = {"window": None, "sinks": 0, "residual": "post", "branches": "shared", "integration": "soft", "read": "softmax",
                           "centre": None, **{x: y for x, y in options.items() if not isinstance(y, Tensor | tuple)}}
    how["scale"] = mpf(how.get("scale") if how.get("scale") is not None else mp.sqrt(mpf(1) / first.shape[-1]))
    o, lse, worst = torch.zeros(B, T, HQ, v.shape[-1], dtype=torch.float64), torch.zeros(B, T, HQ, dtype=torch.float64), 1.0
    for b in range(B):
        keep = [True] * T if mask is None else mask[b].tolist()
        for j in range(HQ):
            def part(key: str, head: int, b: int = b) -> Any:
                return None if given.get(key) is None else numbers(given[key][b, :, head].tolist())

            h = {key: part(key, j) for key in ("q", "r", "low_query", "hard_weight", "branch_gate")}
            h |= {key: part(key, j // R) for key in ("k", "v", "s", "low_g")}
            gates = given.get("g_levels", given["g"][None] if "g" in given else v.new_zeros(0, 1, 1, 1, 1))
            h["g_levels"] = [numbers(g[b, :, j // R].tolist()) for g in gates]
            skip = [not here or (name.endswith("_sw") and i < how["sinks"]) for i, here in enumerate(keep)]
            for g in [*h["g_levels"], *([h["low_g"]] if h["low_g"] else [])]:
                g[:] = [[ZERO] * len(row) if skip[i] else row for i, row in enumerate(g)]
            h["slot_bias"] = given.get("slot_bias") if isinstance(given.get("slot_bias"), str) else part("slot_bias", j)
            u = given.get("self_augmentation")
            h["self_augmentation"] = None if u is None else numbers(u.tolist())
            W, a = given.get("perceptron") or (None, None)
            M = len(h["g_levels"][0][0]) if h["g_levels"] else 0
            how["perceptron"] = (numbers((torch.eye(M) if W is None else W[j]).tolist()),
                                 numbers((torch.zeros(M) if a is None else a).tolist()))
            for t, row in enumerate(one_head(name, h, how, keep)):
                o[b, t, j] = torch.tensor([float(x) for x in row.o], dtype=torch.float64)
                lse[b, t, j] = float(mp.log(abs(row.Z))) if row.Z else -torch.inf
                worst = max(worst, float(row.condition))
    return o, lse, worst
