"""Fit what a method leaves open, on documents that are not measured: gates, projections, feature maps, hard-integration weights."""

from typing import Any

import torch
from torch import Tensor, nn

import mva_ref as mva
from mva_ref.models.capture import QKV

from .cases import Case
from .parametrise import METHODS

STEPS = 80
BATCH = 2
# Adam's rate by the name of a tensor. q and k are large: a projection of them that learns faster diverges.
RATES = {
    **dict.fromkeys(("W", "b", "b_g", "b_t", "b_beta", "A_log", "u"), 0.05), **dict.fromkeys(("logit", "weight"), 0.1),
    **dict.fromkeys(("W_q", "W_k", "W_f", "W_s", "W_g", "b_q", "b_k", "gain", "offset"), 0.01),
    **dict.fromkeys(("W_t", "W_beta"), 0.002), "W_r": 0.001,
}


class Parameters(nn.Module):
    """The fitted parameters of one case in one layer; what they are: analysis.parametrise."""

    def __init__(self, case: Case, qkv: QKV, seed: int) -> None:
        super().__init__()
        self.case = case
        started = METHODS[case.method].start(case, qkv, torch.Generator().manual_seed(seed))
        self.tensors = nn.ParameterDict({name: nn.Parameter(x) for name, x in started.items()})

    def inputs(self, qkv: QKV) -> dict[str, Any]:
        """The arguments of the method on one batch of q, k, v."""
        impl = {"impl": "recurrent"} if self.case.method == "mamba" else {}     # its quadratic form is T x T x V x D, and it has no chunks
        return {"v": qkv.v, **METHODS[self.case.method].arguments(self.case, dict(self.tensors), qkv), **self.case.options, **impl}


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
    optimiser = torch.optim.Adam([{"params": [p], "lr": RATES[name]} for name, p in parameters.tensors.items()])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    rng = torch.Generator().manual_seed(seed + 1)
    targets = [mva.softmax(d.q, d.k, d.v, scale=d.scale).o for d in documents]
    order: list[int] = []
    for _ in range(steps):
        if len(order) < BATCH:
            order += torch.randperm(len(documents), generator=rng).tolist()
        chosen, order = order[:BATCH], order[BATCH:]
        out = mva.attention(case.method, **parameters.inputs(batch([documents[i] for i in chosen])))
        loss = relative_error(out.o, torch.cat([targets[i] for i in chosen]))
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        schedule.step()
    return parameters.requires_grad_(False).double()
