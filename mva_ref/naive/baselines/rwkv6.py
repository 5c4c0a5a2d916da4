"""RWKV-6 (Finch): a decay for every key channel that the reading token does not apply, and a bonus for that token."""

import torch
from torch import Tensor, einsum
from torch.nn.functional import pad

from ...frame import form
from ...types import MatrixState, Output
from ..softmax_attention import group
from .decayed import decayed_matrix
from .kernel import seen


def rwkv6_gates(x: Tensor, W: Tensor, b: Tensor | None = None) -> Tensor:
    """The decays of RWKV-6.

    Equation:  g = -exp(x W + b)
    Shapes:    x [B, T, H, D], W [H, D, D], b [H, D] -> [B, T, H, D]
    Numerics:  in [-inf, 0]; in the dtype of x.
    Source:    RWKV-6 (2404.05892); there W has a low rank, and x is mixed with the token before.

    >>> rwkv6_gates(torch.zeros(1, 1, 1, 2), torch.zeros(1, 2, 2)).flatten().tolist()
    [-1.0, -1.0]
    """
    y = einsum("bthd,hde->bthe", x, W)
    return -(y if b is None else y + b).exp()


@form
def rwkv6(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, u: Tensor, *, initial_state: MatrixState | None = None, output_final_state: bool = False,
    key_mask: Tensor | None = None,
) -> Output:
    """RWKV-6: order 1, un-normalised; a token reads the past as the token before left it, and itself with weight u.

    Equation:  o_t = sum_{i <= t} A_ti v_i,   A_ti = sum_d q_td k_id exp(sum_{i < j < t} g_jd) for i < t,   A_tt = sum_d u_d q_td k_td
    Shapes:    q (its r) [B, T, HQ, D], k [B, T, H, D], v [B, T, H, V], g (log w) [B, T, H, D] natural-log decay, bonus u [H, D]
               -> o [B, T, HQ, V]
    Numerics:  at least float32, float64 stays; signed weights, no lse; takes no scale; gates of 0 and -inf are exact.
    Source:    RWKV-6 (2404.05892).

    A gate of -inf forgets the past only for the tokens after its own:

    >>> x = torch.ones(1, 3, 1, 1); g = torch.tensor([0.0, -torch.inf, 0.0]).view(1, 3, 1, 1)
    >>> rwkv6(x, x, x, g, torch.tensor([[5.0]])).o.flatten().tolist()
    [5.0, 6.0, 6.0]
    """
    # Behind an empty token in front, row t reads what t - 1 has left, before the decay of t.
    keys, values, decays = (pad(x, (0, 0, 0, 0, 1, 0)) for x in (k, v, g))
    mask = None if key_mask is None else pad(key_mask, (1, 0))
    read, state = decayed_matrix(pad(q, (0, 0, 0, 0, 0, 1)), keys, values, decays, 1.0, mask, initial_state)
    itself = einsum("bthrd,bthd,hd,bth->bthr", group(q, k.shape[2]), k, u, seen(v, key_mask)[..., None].expand(v.shape[:3]))
    o = read[:, :-1] + (itself[..., None] * v[:, :, :, None]).flatten(2, 3)
    return Output(o, state if output_final_state else None)


@form
def recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, u: Tensor, *, initial_state: MatrixState | None = None, output_final_state: bool = False,
    key_mask: Tensor | None = None,
) -> Output:
    """`rwkv6` one token at a time.

    Equation:  o_t = q_t (S_{t-1} + diag(u) k_t (x) v_t),   S_t = diag(e^{g_t}) S_{t-1} + k_t (x) v_t
    Shapes:    as `rwkv6`; state S [B, H, D, V]
    Numerics:  as `rwkv6`.
    Source:    RWKV-6 (2404.05892).

    >>> q, k, v = torch.randn(3, 1, 5, 2, 4).unbind(0); g, u = -torch.rand(1, 5, 2, 4), torch.randn(2, 4)
    >>> torch.allclose(recurrent(q, k, v, g, u).o, rwkv6(q, k, v, g, u).o, atol=1e-5)
    True
    """
    (B, T, H, V), D, keep = v.shape, k.shape[-1], seen(v, key_mask)
    S = v.new_zeros(B, H, D, V) if initial_state is None else initial_state.S
    queries, o = group(q, H), []
    for t in range(T):
        here = keep[:, t, None, None, None] > 0
        new = torch.where(here, k[:, t, ..., None] * v[:, t, :, None], 0)
        o.append(einsum("bhrd,bhdv->bhrv", queries[:, t], S + u[..., None] * new))
        S = torch.where(here, g[:, t].exp()[..., None] * S + new, S)
    out = torch.stack(o, 1).flatten(2, 3) if o else v.new_zeros(B, 0, q.shape[2], V)
    return Output(out, MatrixState(S) if output_final_state else None)
