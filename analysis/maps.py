"""Linear maps of queries and keys to fit, before analysis.parametrise gives them to methods.

Maps start so that mapped scores are, at least in expectation, a multiple of the model's own; a fit moves them from there.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, einsum

from mva_ref.models.capture import QKV

from .cases import Case

Tensors = dict[str, Tensor]


class Method(NamedTuple):
    """start(case, qkv, rng): the tensors before the fit. arguments(case, tensors, qkv): the call beside v and the case's options."""

    start: Callable[[Case, QKV, Generator], Tensors]
    arguments: Callable[[Case, Tensors, QKV], dict[str, Any]]


def small(rng: Generator, *shape: int) -> Tensor:
    """Random numbers, with D as the last axis but one, that change a projection of D numbers little."""
    return 0.1 * shape[-2] ** -0.5 * torch.randn(*shape, generator=rng)


def frame(rng: Generator, D: int, width: int) -> Tensor:
    """[D, width] with (x W).(y W) = x.y exactly for width >= D, in expectation otherwise."""
    if width >= D:
        return torch.linalg.qr(torch.randn(width, D, generator=rng))[0].mT
    return (D / width) ** 0.5 * torch.linalg.qr(torch.randn(D, width, generator=rng))[0]


def project(x: Tensor, W: Tensor, b: Tensor | None = None) -> Tensor:
    """x W + b head by head: x [B, T, H, D], W [H or 1, D, E], b [H, E]."""
    y = einsum("bthd,hde->bthe", x, W.expand(x.shape[2], -1, -1))
    return y if b is None else y + b


def start_maps(case: Case, qkv: QKV, rng: Generator) -> Tensors:
    """Maps of q and k to `width` columns that keep the scores: W_q [HQ, D, E], W_k [H, D, E]."""
    HQ, D, H, E = *qkv.q.shape[2:], qkv.k.shape[2], case.width
    W = qkv.scale**0.5 * frame(rng, D, E)
    return {"W_q": W.expand(HQ, D, E).clone(), "W_k": W.expand(H, D, E).clone()}


def start_affine(case: Case, qkv: QKV, rng: Generator, constant: float = 0.0) -> Tensors:
    """Maps with biases, whose product is `constant`: without the scores, what every token weighs."""
    b = torch.full((case.width,), (constant / case.width) ** 0.5)
    biases = {"b_q": b.expand(qkv.q.shape[2], -1).clone(), "b_k": b.expand(qkv.k.shape[2], -1).clone()}
    return start_maps(case, qkv, rng) | biases


def mapped(
    constant: float = 0.0, gain: float = 1.0, more: Callable[[Case, QKV, Generator], Tensors] | None = None,
    arguments: Callable[[Case, Tensors, QKV], dict[str, Any]] | None = None,
) -> Method:
    """A method on q' = gain (q W_q + b_q) and k' = gain (k W_k + b_k), with what else it needs; the score's scale is in W."""

    def call(case: Case, x: Tensors, qkv: QKV) -> dict[str, Any]:
        both = {"q": gain * project(qkv.q, x["W_q"], x["b_q"]), "k": gain * project(qkv.k, x["W_k"], x["b_k"])}
        return both | (arguments(case, x, qkv) if arguments else {})

    return Method(
        lambda case, qkv, rng: start_affine(case, qkv, rng, constant / gain**2) | (more(case, qkv, rng) if more else {}), call)
