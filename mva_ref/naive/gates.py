"""Gate parametrisations: from what a model projects to the natural-log decay g. Theory: docs/theory/slots.md."""

from torch import Tensor, einsum
from torch.nn.functional import logsigmoid


def slot_gates(x: Tensor, W: Tensor, a: Tensor | None = None, damping: float = 8.0) -> Tensor:
    """Data-dependent gates of M slots.

    Equation:  g = logsigmoid(x W + a) / damping
    Shapes:    x [B, T, H, D], W [D, M] shared by the heads or [H, D, M], a [M] or [H, M] -> g [B, T, H, M]
    Numerics:  in the dtype of x; g <= 0 always.
    Source:    GSA (2409.07146), damping 8 there; MetaLA (2411.10741) damps by 16.

    >>> import torch
    >>> g = slot_gates(torch.zeros(1, 5, 2, 4), torch.zeros(4, 3)); g.shape, round(g[0, 0, 0, 0].item() * 8, 4)
    (torch.Size([1, 5, 2, 3]), -0.6931)
    """
    logits = einsum("bthd,hdm->bthm", x, W.expand(x.shape[2], *W.shape[-2:]))
    return logsigmoid(logits if a is None else logits + a) / damping
