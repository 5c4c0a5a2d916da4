"""Softmax over sinks and a sliding window, block by block: linear in T."""

import torch
from torch import Tensor, einsum

from ...ring import Advance
from .reading import masked_softmax

BLOCK = 64


def local_attention(q: Tensor, books: Advance, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """o [B, T, HQ, V], its log-mass and its largest score [B, T, HQ], -inf for none.

    Row t sees places t + 1 .. t + W of the books, and the sinks that have left.
    """
    after, (B, T, HQ, D), H, W = books.after, q.shape, books.k.shape[2], books.after.k.shape[1]
    N = -(-T // BLOCK)
    short = N * BLOCK - T

    def behind(x: Tensor, n: int) -> Tensor:
        return torch.cat([x, x.new_zeros(B, n, *x.shape[2:])], 1)

    queries = behind(q, short).view(B, N, BLOCK, H, HQ // H, D)
    near = [behind(x, short).unfold(1, BLOCK + W, BLOCK) for x in (books.k, books.v, books.there)] if N else None
    if near is None:
        none = q.new_zeros(B, 0, HQ)
        return q.new_zeros(B, 0, HQ, books.v.shape[-1]), none, none
    k, v, there = near                                                                             # b n h d j, b n h v j, b n j
    t, j = torch.arange(BLOCK, device=q.device)[:, None], torch.arange(BLOCK + W, device=q.device)
    visible = (there[:, :, None] & (j > t) & (j <= t + W))[:, :, :, None, None]
    far = (after.sink_present[:, None] & (torch.arange(after.sink_k.shape[1], device=q.device) <= books.left[..., None]))
    far = behind(far, short).view(B, N, BLOCK, 1, 1, -1)
    x = torch.cat([
        torch.where(visible, scale * einsum("bnthrd,bnhdj->bnthrj", queries, k), -torch.inf),
        torch.where(far, scale * einsum("bnthrd,bshd->bnthrs", queries, after.sink_k), -torch.inf),
    ], -1)
    a, lse = masked_softmax(x)
    o = einsum("bnthrj,bnhvj->bnthrv", a[..., : BLOCK + W], v) + einsum("bnthrs,bshv->bnthrv", a[..., BLOCK + W :], after.sink_v)
    o, lse, top = (y.flatten(1, 2)[:, :T].flatten(2, 3) for y in (o, lse, x.amax(-1)))
    return o, lse, top
