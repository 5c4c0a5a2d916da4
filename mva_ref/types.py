"""What goes in and comes out of every method: the result, the states, the error class. Imports torch only."""

from typing import Any, NamedTuple

from torch import Tensor


class ArgumentError(ValueError):
    """A bad argument. The message names the argument, what it is and what was wanted; raised before any work."""


class SlotState(NamedTuple):
    """What GSA, MetaLA and MVA remember. N is the batch size, or the number of packed sequences.

    K         [N, H, M, D]   slot keys; None for MetaLA, which has none
    V         [N, H, M, V]   slot values
    log_decay [N, H, M]      sum of g since the start: the mass of a slot is 1 - exp(log_decay)
    low_V     [N, H, M, V]   the value state of the low-order branch, only with branches="separate"

    MVA has an axis L after N in K, V and log_decay. Always float32 or float64.
    """

    K: Tensor | None
    V: Tensor
    log_decay: Tensor | None
    low_V: Tensor | None = None


class AbcState(NamedTuple):
    """What ABC remembers: normalised slots K [N, H, M, D], V [N, H, M, V] and z [N, H, M], the logsumexp of the slot logits."""

    K: Tensor
    V: Tensor
    z: Tensor


class TaylorState(NamedTuple):
    """What a Taylor order remembers, in the F = C(D + N, N) symmetric features of P6, scale and centre not included.

    S [N, H, F, V] sum of psi(k_i) (x) v_i, z [N, H, F] sum of psi(k_i), key_sum [N, H, D] and tokens [N] for the running centre.
    """

    S: Tensor
    z: Tensor
    key_sum: Tensor
    tokens: Tensor


class MatrixState(NamedTuple):
    """What a linear recurrence remembers: S [N, H, D, V], keys by values."""

    S: Tensor


class FeatureState(NamedTuple):
    """What normalised kernel attention remembers: S [N, H, F, V] sum of phi(k_i) (x) v_i, and z [N, H, F] sum of phi(k_i)."""

    S: Tensor
    z: Tensor


class WindowState(NamedTuple):
    """What a sliding-window form remembers: the slots, and the tokens that have not been written to them yet.

    slots                        the SlotState of the history; of a feature map its FeatureState
    k [N, W, H, D], v [N, W, H, V], g [N, W, H, M] (MVA: [N, W, L, H, M]; or None), low_g [N, W, H, M] or None
                                 ring buffers: token i lies at i mod W and is written with its own gates when it leaves the window
    present [N, W]               False where the ring is still empty or the token was masked
    sink_k [N, n, H, D], sink_v [N, n, H, V], sink_present [N, n]
    seen [N]                     tokens so far, masked ones included
    written [N]                  tokens that have gone to the history
    """

    slots: Any
    k: Tensor
    v: Tensor
    g: Any
    low_g: Tensor | None
    present: Tensor
    sink_k: Tensor
    sink_v: Tensor
    sink_present: Tensor
    seen: Tensor
    written: Tensor


State = SlotState | AbcState | TaylorState | MatrixState | FeatureState | WindowState


class Output(NamedTuple):
    """The one result type.

    o      [B, T, HQ, V]   in the dtype of q
    state                  what a later call takes as initial_state; None unless output_final_state
    lse    [B, T, HQ]      natural log of the row's mass, -inf for a row that sees nothing; None where a method has no positive mass
    """

    o: Tensor
    state: Any = None
    lse: Tensor | None = None


def has_mass(read: str | int) -> bool:
    """Is the normaliser of this read a positive mass, so that the form returns lse? True for softmax and even orders."""
    return read == "softmax" or (not isinstance(read, str) and read % 2 == 0)
