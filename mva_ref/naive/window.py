"""The exact branch of a sliding-window form. Theory: docs/theory/window.md (P21 to P23); the bookkeeping is in mva_ref/ring.py."""

import torch
from torch import Tensor

from ..ring import Advance
from ..types import Output
from .softmax_attention import attend


def exact_branch(q: Tensor, books: Advance, scale: float) -> Output:
    """Softmax over window and sinks.

    Equation:  Z^W_t = sum exp(scale q_t.k_i) over {i <= t : i > t - W or i < n},   o^W_t = the softmax read of the same set
    Shapes:    q [B, T, HQ, D] -> o [B, T, HQ, V], lse [B, T, HQ]
    Numerics:  every token is counted once: a sink is read from the ring until it leaves the window, then from the sinks.
    Source:    P22; windows as in Mistral (2310.06825), sinks (2309.17453).

    >>> from mva_ref.ring import advance, fresh_state
    >>> q, k, v = torch.randn(3, 1, 5, 2, 4).unbind(0); g = torch.zeros(1, 1, 5, 2, 3)
    >>> torch.allclose(exact_branch(q, advance(k, v, None, fresh_state(k, v, g, None, 1, 0)), 1.0).o, v)
    True
    """
    return attend(q, *window_keys(books, q.shape[1]), scale)


def window_keys(books: Advance, T: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values of window and sinks, and which of them a row sees.

    Equation:  visible_ti = {i <= t : i > t - W or i < n}, a sink through its own copy once it has left the window
    Shapes:    k [B, W + T + n, H, D], v [B, W + T + n, H, V], visible bool [B, T, W + T + n]
    Numerics:  exact.
    Source:    P22.

    >>> from mva_ref.ring import advance, fresh_state
    >>> k, v = torch.randn(2, 1, 5, 2, 4).unbind(0); g = torch.zeros(1, 1, 5, 2, 3)
    >>> window_keys(advance(k, v, None, fresh_state(k, v, g, None, 2, 0)), 5)[2].sum(-1).tolist()
    [[1, 2, 2, 2, 2]]
    """
    after, W, n = books.after, books.after.k.shape[1], books.after.sink_k.shape[1]
    t, i = torch.arange(T, device=books.k.device)[:, None], torch.arange(W + T, device=books.k.device)
    recent = books.there[:, None] & (i > t) & (i <= t + W)
    stored = after.sink_present[:, None] & (torch.arange(n, device=books.k.device) <= books.left[..., None])
    k, v = torch.cat([books.k, after.sink_k], 1), torch.cat([books.v, after.sink_v], 1)
    return k, v, torch.cat([recent, stored], 2)
