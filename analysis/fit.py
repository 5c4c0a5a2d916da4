"""Fit what a slot method leaves open, on documents that are not measured: its gates, its low-order query, its hard-integration weight."""

from typing import Any

import torch
from torch import Tensor, nn

import mva_ref as mva
from mva_ref.models.capture import QKV

from .cases import Case

STEPS = 80
BATCH = 2
RATES = {"W": 0.05, "b": 0.05, "W_r": 0.001, "logit": 0.1}  # q and k are large: a query projection that learns faster diverges
SHARED = False  # gates of one KV head each; True: one projection for all heads, as in the paper
MEMORY = 6.0    # the slots start with gate biases spread over 0 .. MEMORY: time scales of about 12 to 3,000 tokens


class Parameters(nn.Module):
    """The fitted parameters of one case in one layer.

    gates W_l [H or 1, D, M], b_l [H or 1, M]; low-order query W_r [HQ or 1, D, M]; one hard-integration logit a query head.
    """

    def __init__(self, case: Case, qkv: QKV, seed: int) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(seed)
        HQ, D, H, L, M = qkv.q.shape[2], qkv.q.shape[3], qkv.k.shape[2], case.levels, case.slots
        heads, queries = (1, 1) if SHARED else (H, HQ)
        self.case = case
        self.W = nn.Parameter(0.1 * D**-0.5 * torch.randn(L, heads, D, M, generator=rng))
        self.b = nn.Parameter(torch.linspace(0, MEMORY, M).expand(L, heads, M).clone())
        low = 0.1 * D**-0.5 * torch.randn(queries, D, M, generator=rng)
        self.W_r = nn.Parameter(low) if case.method in ("metala", "mva", "mva_sw") else None
        self.logit = nn.Parameter(torch.zeros(HQ)) if case.options.get("integration") == "hard" else None

    def inputs(self, qkv: QKV) -> dict[str, Any]:
        """The arguments of the method on one batch of q, k, v."""
        q, k, v, scale = qkv
        g = torch.stack([mva.naive.slot_gates(k, W, b) for W, b in zip(self.W, self.b, strict=True)])
        given: dict[str, Any] = {"v": v, **self.case.options}
        r = None if self.W_r is None else torch.einsum("bthd,hdm->bthm", q, self.W_r.expand(q.shape[2], -1, -1))
        if self.case.method == "metala":
            return {**given, "r": r, "g": g[0]}
        given.update(q=q, k=k, scale=scale)
        if self.case.method in ("mva", "mva_sw"):
            given.update(g_levels=g, low_query=r)
        else:
            given["g"] = g[0]
        if self.logit is not None:
            given["hard_weight"] = self.logit.sigmoid()[None, None]
        return given


def to(qkv: QKV, dtype: torch.dtype) -> QKV:
    """The same tensors in another dtype."""
    return QKV(qkv.q.to(dtype), qkv.k.to(dtype), qkv.v.to(dtype), qkv.scale)


def batch(documents: list[QKV]) -> QKV:
    """Documents of one length, side by side."""
    q, k, v = (torch.cat(x) for x in list(zip(*documents, strict=True))[:3])
    return QKV(q, k, v, documents[0].scale)


def relative_error(o: Tensor, target: Tensor) -> Tensor:
    """Squared Frobenius error over all heads and positions, relative to the target's."""
    return (o - target).square().sum() / target.square().sum()


def fit(case: Case, documents: list[QKV], steps: int = STEPS, seed: int = 0) -> Parameters:
    """Fit one case in one layer by Adam on the relative squared output error; float32, seeds fixed, so the same call gives the same bits.

    documents  q, k, v of the fitting texts in this layer, each [1, T, ...]
    """
    parameters = Parameters(case, documents[0], seed)
    optimiser = torch.optim.Adam([{"params": [p], "lr": RATES[name]} for name, p in parameters.named_parameters()])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    rng = torch.Generator().manual_seed(seed + 1)
    targets = [mva.softmax(d.q, d.k, d.v, scale=d.scale).o for d in documents]
    order: list[int] = []
    for _ in range(steps):
        if len(order) < BATCH:
            order += torch.randperm(len(documents), generator=rng).tolist()
        chosen, order = order[:BATCH], order[BATCH:]
        out = mva.attention(case.method, **parameters.inputs(batch([documents[i] for i in chosen])), impl="chunk")
        loss = relative_error(out.o, torch.cat([targets[i] for i in chosen]))
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        schedule.step()
    return parameters.requires_grad_(False).double()
