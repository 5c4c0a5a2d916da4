"""The mathematics: every method as T x T matrices, in any float dtype; float64 is the oracle.

`mva_ref.naive.gsa` and so on are the forms themselves: no argument checks, no choice of implementation. Start reading with
softmax_attention.py, then orders.py, writes.py, slots.py, levels.py, window.py, composed.py.
"""

from .baselines.based import based
from .baselines.delta import delta
from .baselines.gated_delta import gated_delta
from .baselines.gla import gla
from .baselines.gla_sw import gla_sw
from .baselines.hedgehog import hedgehog
from .baselines.infini import infini
from .baselines.linear import linear
from .baselines.lolcats import lolcats
from .baselines.mamba import mamba
from .baselines.mamba2 import mamba2
from .baselines.power import power
from .baselines.rebased import rebased
from .baselines.retnet import retnet
from .baselines.rwkv6 import rwkv6
from .baselines.supra import supra
from .baselines.t2r import t2r
from .composed import gsa_sw, mva, mva_sw
from .gates import slot_gates
from .logit_slots import abc
from .merging import merge
from .orders import phi, remainder
from .slots import gsa, metala
from .softmax_attention import softmax
from .taylor_attention import taylor

__all__ = [
    "abc", "based", "delta", "gated_delta", "gla", "gla_sw", "gsa", "gsa_sw", "hedgehog", "infini", "linear", "lolcats", "mamba",
    "mamba2", "merge", "metala", "mva", "mva_sw", "phi", "power", "rebased", "remainder", "retnet", "rwkv6", "slot_gates",
    "softmax", "supra", "t2r", "taylor",
]
