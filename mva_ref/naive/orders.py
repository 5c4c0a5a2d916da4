"""QK integration by order: the Taylor polynomials of exp and attention with them. Theory: docs/theory/orders.md (P1 to P8)."""

import math
from itertools import combinations_with_replacement

import torch
from torch import Tensor


def remainder(x: Tensor, order: int) -> Tensor:
    """What the order leaves out of the exponential.

    Equation:  e^x - phi_N(x) = x^{N+1} / (N+1)! 1F1(1; N+2; x)
    Shapes:    x [...] -> [...]
    Numerics:  never a difference. 1F1 by its own recurrence 1F1(1; b; x) = 1 + x/b 1F1(1; b+1; x), started far enough up that the
               start no longer matters; for x < 0 it is accurate down to -(N + 1), beyond which it cancels (see `phi`).
    Source:    P2.

    >>> remainder(torch.tensor(1e-3, dtype=torch.float64), 6).item() * math.factorial(7) * 1e21  # doctest: +ELLIPSIS
    1.00012...
    """
    if x.numel() == 0:
        return x
    start = int(x.abs().max()) + order + 60 + 9 * math.isqrt(int(x.abs().max()) + order)
    f = torch.ones_like(x)
    for b in range(start, order + 1, -1):
        f = 1 + x / b * f
    for n in range(1, order + 2):
        f = f * x / n
    return f


def phi(x: Tensor, order: int) -> Tensor:
    """The Taylor polynomial of exp, to full relative precision wherever it is not a root.

    Equation:  phi_N(x) = sum_{n <= N} x^n / n!
    Shapes:    x [...] -> [...]
    Numerics:  Horner where its terms do not cancel (x >= 0 and x <= -N-1); between, e^x - remainder, whose two terms have the same sign
               for even N: the computed phi_N of an even order is positive. Evaluated in float64 whatever the input.
    Source:    P3.

    >>> phi(torch.tensor([-1.0, 0.0, 2.0]), 1).tolist(), phi(torch.tensor(-10.0, dtype=torch.float64), 2).item()
    ([0.0, 1.0, 3.0], 41.0)
    """
    y = x.double()
    if order <= 2:
        return torch.stack([y**n / math.factorial(n) for n in range(order + 1)]).sum(0).to(x.dtype)
    between = (y < 0) & (y > -order - 1)
    outside = torch.where(between, 0, y)
    inside = torch.where(between, y, 0)
    horner = torch.ones_like(y)
    for n in range(order, 0, -1):
        horner = 1 + outside / n * horner
    return torch.where(between, inside.exp() - remainder(inside, order), horner).to(x.dtype)


def features(x: Tensor, n: int) -> Tensor:
    """The symmetric tensor features of one order.

    Equation:  F_n(x)[I] = prod_{d in I} x_d / sqrt(prod_d mult_d(I)!),   I a multiset of n coordinates;   F_n(x).F_n(y) = (x.y)^n / n!
    Shapes:    x [..., D] -> [..., C(D + n - 1, n)]
    Numerics:  in the dtype of x; the number of features explodes with n.
    Source:    P6; symmetric power features as in Based (2402.18668) and power attention (2507.04239).

    >>> x, y = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.5, -1.0, 2.0])
    >>> round((features(x, 3) @ features(y, 3)).item() * 6, 3) == round((x @ y).item() ** 3, 3)
    True
    """
    sets = list(combinations_with_replacement(range(x.shape[-1]), n))
    size = torch.tensor([math.prod(math.factorial(s.count(d)) for d in set(s)) for s in sets], dtype=x.dtype, device=x.device)
    index = torch.tensor(sets, device=x.device, dtype=torch.long).view(len(sets), n)
    return x[..., index].prod(-1) * size.rsqrt()


def query_features(q: Tensor, order: int, scale: float, r: Tensor) -> Tensor:
    """The query's side of the feature map; the keys' side is `F_0 .. F_N` side by side, free of scale and centre.

    Equation:  phi_N(scale q.k - r) = sum_m (scale q.k)^m / m! phi_{N-m}(-r) = psi(q).(F_0(k), ..., F_N(k))
    Shapes:    q [..., D], r [...] -> [..., C(D + N, N)]
    Numerics:  in the dtype of q.
    Source:    P5, P6.

    >>> q, k, r = torch.randn(4, dtype=torch.float64), torch.randn(4, dtype=torch.float64), torch.tensor(0.3, dtype=torch.float64)
    >>> key = torch.cat([features(k, m) for m in range(4)])
    >>> torch.allclose(query_features(q, 3, 0.5, r) @ key, phi(0.5 * q @ k - r, 3))
    True
    """
    return torch.cat([features(scale * q, m) * phi(-r, order - m)[..., None] for m in range(order + 1)], -1)


def ratio(numerator: Tensor, Z: Tensor) -> Tensor:
    """Numerator [..., n] over a signed normaliser Z [...]; a normaliser of exactly zero gives a row of 0, never NaN (P3).

    Equation:  n / Z, and 0 where Z = 0
    Shapes:    numerator [..., n], Z [...] -> [..., n]
    Numerics:  no eps, and the sign of Z is not corrected.
    Source:    P3.

    >>> ratio(torch.ones(2, 1), torch.tensor([0.0, -2.0])).tolist()
    [[0.0], [-0.5]]
    """
    return torch.where((Z == 0)[..., None], 0, numerator / torch.where(Z == 0, 1, Z)[..., None])
