"""Multi-level vocabulary decomposition: what one level loses is the next one's input. Theory: docs/theory/levels.md (P16 to P20)."""

import torch
from torch import Tensor, einsum
from torch.nn.functional import pad

from .writes import Written


def write_share(g: Tensor) -> Tensor:
    """How a token's write is shared out among the slots.

    Equation:  rho_t[c] = w_t[c] / sum_c w_t[c],   w = 1 - exp(g);   0 where nothing is written
    Shapes:    g [..., M] -> [..., M]
    Numerics:  the value and the derivative are 0 where every gate is 0; rho jumps as w -> 0, so w is never rounded.
    Source:    our reading of the paper's "compression error".

    >>> write_share(torch.tensor([[0.0, 0.0], [-torch.inf, 0.0]])).abs().tolist()
    [[0.0, 0.0], [1.0, 0.0]]
    """
    w = -torch.expm1(g)
    total = w.sum(-1, keepdim=True)
    return torch.where(total > 0, w / torch.where(total > 0, total, 1), 0)


def before_write(written: Written) -> Written:
    """The slots as the token finds them.

    Equation:  Omega_pre[t] = Omega[t - 1], and nothing but the initial state at t = 1
    Shapes:    omega [B, H, T, T, M], kept [B, T, H, M], unchanged
    Numerics:  exact.
    Source:    the delta rule's order (2102.11174).

    >>> before_write(Written(torch.ones(1, 1, 2, 2, 1), torch.zeros(1, 2, 1, 1))).kept.flatten().tolist()
    [1.0, 0.0]
    """
    return Written(pad(written.omega, (0, 0, 0, 0, 1, 0))[:, :, :-1], pad(written.kept, (0, 0, 0, 0, 1, 0), value=1.0)[:, :-1])


def residual(x: Tensor, g: Tensor, written: Written, X0: Tensor | None, when: str) -> Tensor:
    """The compression loss of one level.

    Equation:  x'_t = x_t - rho_t X_t ("post": after the token's own write) or x_t - rho_t X_{t-1} ("pre")
    Shapes:    x [B, T, H, D], g [B, T, H, M], X0 [B, H, M, D] -> [B, T, H, D]
    Numerics:  in the dtype of x.
    Source:    "recursively compresses the compression error into additional states" (ICML 2025); the read rho is our reading.

    A write that replaces the slot loses nothing:

    >>> from .writes import write_map
    >>> x, g = torch.randn(1, 5, 2, 3), torch.full((1, 5, 2, 1), -torch.inf)
    >>> residual(x, g, write_map(g), None, "post").abs().max().item()
    0.0
    """
    rho = write_share(g)
    at = before_write(written) if when == "pre" else written
    read = einsum("bhti,bihd->bthd", einsum("bthc,bhtic->bhti", rho, at.omega), x)
    if X0 is not None:
        read = read + einsum("bthc,bhcd->bthd", rho * at.kept, X0)
    return x - read
