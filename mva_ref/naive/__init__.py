"""The mathematics: every method as T x T matrices, in any float dtype; float64 is the oracle.

`mva_ref.naive.gsa` and so on are the forms themselves: no argument checks, no choice of implementation. Start reading with
softmax_attention.py, then orders.py, writes.py, slots.py, levels.py, window.py, composed.py.
"""

from .baselines.gla import gla
from .baselines.linear import linear
from .composed import gsa_sw, mva, mva_sw
from .gates import slot_gates
from .logit_slots import abc
from .merging import merge
from .orders import phi, remainder
from .slots import gsa, metala
from .softmax_attention import softmax
from .taylor_attention import taylor

__all__ = [
    "abc", "gla", "gsa", "gsa_sw", "linear", "merge", "metala", "mva", "mva_sw", "phi", "remainder", "slot_gates", "softmax", "taylor",
]
