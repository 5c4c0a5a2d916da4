"""Every bad argument gives an ArgumentError that names it, before any work."""

from importlib import import_module

import pytest
import torch

import mva_ref as mva
from mva_ref.method import Method
from mva_ref.registry import METHODS
from mva_ref.testing.examples import DECAYS, example, shape
from mva_ref.testing.examples import SIZES as EXAMPLE_SIZES
from mva_ref.types import Output, SlotState

B, T, H, HQ, D, V, M, L, W = 2, 5, 2, 4, 3, 6, 7, 2, 3
NAN, INF = float("nan"), float("inf")
SIZES = {"q": (B, T, HQ, D), "k": (B, T, H, D), "v": (B, T, H, V), "g": (B, T, H, M), "g_levels": (L, B, T, H, M), "r": (B, T, HQ, M),
         "s": (B, T, H, M)}
real_resolve = Method.resolve


class Reached(Exception):
    """A form was called: the check let the argument pass."""


def reached(*args, **kwargs):
    raise Reached


@pytest.fixture(autouse=True)
def no_work(monkeypatch):
    def resolve(self, impl):
        real_resolve(self, impl)
        return reached

    monkeypatch.setattr(Method, "resolve", resolve)
    monkeypatch.setattr(import_module("mva_ref.naive.merging"), "merge", reached)


def ones(*shape, dtype=torch.float64, device="cpu"):
    return torch.ones(*shape, dtype=dtype, device=device)


def ints(*x, dtype=torch.int64):
    return torch.tensor(x, dtype=dtype)


def one(x, *shape):
    """Ones, and one number x at the end."""
    full = ones(*shape)
    full.view(-1)[-1] = x
    return full


def low(x):
    """Gates of -1, and x at the end."""
    return one(-x, B, T, H, M).neg()


def arguments(name):
    """Ones of the right shapes, decays of -1, and what else the row requires."""
    p = example(name)
    made = {key: shape(name, key, EXAMPLE_SIZES) for key in p.inputs}
    return {**{key: -ones(*x) if key in DECAYS else ones(*x) for key, x in made.items()}, **p.options}


def call(name, **changes):
    """A call of a method that is right but for the changes."""
    return lambda: getattr(mva, name)(**{**arguments(name), **changes})


def packed(cu, n=1):
    """GSA on n sequences of five tokens, packed as cu says."""
    return lambda: mva.gsa(**{key: x[:n] for key, x in arguments("gsa").items()}, cu_seqlens=cu)


def through(function, name, without=(), extra=(), **changes):
    """The same by registry name, with inputs left out or added."""
    given = {key: x for key, x in {**arguments(name), **changes}.items() if key not in without}
    return lambda: function(name, *extra, **given)


def state_of(name, **options):
    """The state that a call returns, from the real form."""
    args = {**arguments(name), **options}
    return real_resolve(METHODS[name], "naive")(**args, output_final_state=True).state


def slots(dtype=torch.float64, m=M, log_decay=True):
    return SlotState(ones(B, H, m, D, dtype=dtype), ones(B, H, m, V, dtype=dtype), -ones(B, H, m, dtype=dtype) if log_decay else None)


def ring(**changes):
    return state_of("gsa_sw", sinks=1)._replace(**changes)


perceptron = (ones(M, M), ones(M))
low_query, branch, hard = ones(B, T, HQ, M), ones(B, T, HQ), ones(B, T, HQ) / 2
mask = torch.ones(B, T, dtype=torch.bool)
meta = {key: ones(*shape, device="meta") for key, shape in SIZES.items()}
table = [
    # Tensors: kind, axes, sizes, dtype, device
    ("q not a tensor", call("gsa", q=[1.0]), "q: is list [1.0]; wanted a floating tensor [B, T, HQ, D]"),
    ("q None", call("gsa", q=None), "q: is NoneType None"),
    ("q of integers", call("gsa", q=ones(*SIZES["q"]).long()), "q: is a torch.int64 tensor of shape [2, 5, 4, 3] on cpu"),
    ("q of complex numbers", call("softmax", q=ones(*SIZES["q"]).cfloat()), "q: is a torch.complex64 tensor"),
    ("q with 3 axes", call("gsa", q=ones(B, T, D)), "q: is a torch.float64 tensor of shape [2, 5, 3]"),
    ("q with 5 axes", call("softmax", q=ones(1, *SIZES["q"])), "q: is a torch.float64 tensor of shape [1, 2, 5, 4, 3]"),
    ("no query heads", call("softmax", q=ones(B, T, 0, D)), "q: is a torch.float64 tensor of shape [2, 5, 0, 3] on cpu, so HQ = 0"),
    ("no channels", call("softmax", q=ones(B, T, HQ, 0)), "q: is a torch.float64 tensor of shape [2, 5, 4, 0] on cpu, so D = 0"),
    ("no batch", call("softmax", q=ones(0, T, HQ, D)), "q: is a torch.float64 tensor of shape [0, 5, 4, 3] on cpu, so B = 0"),
    ("k batch", call("gsa", k=ones(1, T, H, D)), "k: is a torch.float64 tensor of shape [1, 5, 2, 3] on cpu, so B = 1"),
    ("k length", call("gsa", k=ones(B, 4, H, D)), "k: is a torch.float64 tensor of shape [2, 4, 2, 3] on cpu, so T = 4"),
    ("k channels", call("gsa", k=ones(B, T, H, 4)), "k: is a torch.float64 tensor of shape [2, 5, 2, 4] on cpu, so D = 4"),
    ("v heads", call("gsa", v=ones(B, T, 1, V)), "v: is a torch.float64 tensor of shape [2, 5, 1, 6] on cpu, so H = 1"),
    ("g heads", call("gsa", g=-ones(B, T, HQ, M)), "g: is a torch.float64 tensor of shape [2, 5, 4, 7] on cpu, so H = 4"),
    ("g with levels", call("gsa", g=-ones(L, B, T, H, M)), "g: is a torch.float64 tensor of shape [2, 2, 5, 2, 7]"),
    ("g_levels without levels", call("mva", g_levels=-ones(B, T, H, M)), "g_levels: is a torch.float64 tensor of shape [2, 5, 2, 7]"),
    ("no levels", call("mva", g_levels=-ones(0, B, T, H, M)),
     "g_levels: is a torch.float64 tensor of shape [0, 2, 5, 2, 7] on cpu, so L = 0"),
    ("g slots against r", call("metala", g=-ones(B, T, H, 3)), "g: is a torch.float64 tensor of shape [2, 5, 2, 3] on cpu, so M = 3"),
    ("s length", call("abc", s=ones(B, 4, H, M)), "s: is a torch.float64 tensor of shape [2, 4, 2, 7] on cpu, so T = 4"),
    ("low_query slots", call("mva", low_query=ones(B, T, HQ, 2)),
     "low_query: is a torch.float64 tensor of shape [2, 5, 4, 2] on cpu, so M = 2"),
    ("low_query heads", call("mva", low_query=ones(B, T, H, M)),
     "low_query: is a torch.float64 tensor of shape [2, 5, 2, 7] on cpu, so HQ = 2"),
    ("low_g shape", call("mva", low_query=low_query, branches="separate", low_g=-ones(B, T, H, 1)), "low_g: is a torch.float64 tensor"),
    ("key_mask of numbers", call("gsa", key_mask=ones(B, T)),
     "key_mask: is a torch.float64 tensor of shape [2, 5] on cpu; wanted a bool tensor"),
    ("key_mask length", call("gsa", key_mask=mask[:, :4]), "key_mask: is a torch.bool tensor of shape [2, 4] on cpu, so T = 4"),
    ("key_mask axes", call("softmax", key_mask=mask[0]), "key_mask: is a torch.bool tensor of shape [5]"),
    ("query heads", call("gsa", q=ones(B, T, 3, D)), "q: has HQ = 3 query heads for H = 2 KV heads"),
    ("fewer query heads", call("softmax", q=ones(B, T, 1, D)), "q: has HQ = 1 query heads for H = 2 KV heads"),
    ("query heads of r", call("metala", r=ones(B, T, 5, M)), "r: has HQ = 5 query heads for H = 2 KV heads"),
    ("k dtype", call("gsa", k=ones(*SIZES["k"]).float()), "k: is torch.float32; wanted torch.float64, the dtype of q"),
    ("v dtype", call("metala", v=ones(*SIZES["v"]).half()), "v: is torch.float16; wanted torch.float64, the dtype of r"),
    ("k device", call("gsa", k=meta["k"]), "k: is on meta; wanted cpu, where q is"),
    ("v device", call("softmax", v=meta["v"]), "v: is on meta"),
    ("g device", call("gsa", g=meta["g"]), "g: is on meta"),
    ("q device", call("softmax", q=meta["q"]), "k: is on cpu; wanted meta, where q is"),
    ("key_mask device", call("gsa", key_mask=mask.to("meta")), "key_mask: is on meta"),
    ("slot_bias device", call("gsa", slot_bias=ones(M, device="meta")), "slot_bias: is on meta"),
    ("hard_weight device", call("gsa_sw", integration="hard", hard_weight=hard.to("meta")), "hard_weight: is on meta"),
    ("centre device", call("taylor", centre=ones(B, H, D, device="meta")), "centre: is on meta"),
    ("self_augmentation device", call("metala", self_augmentation=ones(M, device="meta")), "self_augmentation: is on meta"),
    # Values
    ("g positive", call("gsa", g=low(0.5)), "g: contains 0.5; wanted natural-log decays in [-inf, 0]"),
    ("g NaN", call("gsa", g=low(NAN)), "g: contains nan"),
    ("g inf", call("metala", g=low(INF)), "g: contains inf"),
    ("g_levels positive", call("mva", g_levels=ones(L, B, T, H, M)), "g_levels: contains 1.0"),
    ("g of MVA-SW NaN", call("mva_sw", g_levels=one(NAN, L, B, T, H, M) - 1), "g_levels: contains nan"),
    ("low_g positive", call("mva", low_query=low_query, branches="separate", low_g=low(1.0)), "low_g: contains 1.0"),
    ("q NaN", call("gsa", q=one(NAN, *SIZES["q"]), check_finite=True), "q: contains nan; wanted finite numbers (check_finite=True)"),
    ("k inf", call("softmax", k=one(INF, *SIZES["k"]), check_finite=True), "k: contains inf"),
    ("v -inf", call("taylor", v=one(-INF, *SIZES["v"]), check_finite=True), "v: contains -inf"),
    ("r NaN", call("metala", r=one(NAN, *SIZES["r"]), check_finite=True), "r: contains nan"),
    ("s NaN", call("abc", s=one(NAN, *SIZES["s"]), check_finite=True), "s: contains nan"),
    ("s inf", call("abc", s=one(INF, *SIZES["s"]), check_finite=True), "s: contains inf; wanted slot logits in [-inf, inf)"),
    ("low_query NaN", call("mva", low_query=one(NAN, B, T, HQ, M), check_finite=True), "low_query: contains nan"),
    ("hard_weight above 1", call("gsa_sw", integration="hard", hard_weight=one(1.5, B, T, HQ)), "hard_weight: contains 1.5"),
    ("hard_weight below 0", call("mva_sw", integration="hard", hard_weight=one(-0.5, B, T, HQ)), "hard_weight: contains -0.5"),
    ("hard_weight NaN", call("gsa_sw", integration="hard", hard_weight=one(NAN, B, T, HQ)), "hard_weight: contains nan"),
    ("branch_gate above 1", call("mva", low_query=low_query, branches="gated", branch_gate=2 * branch), "branch_gate: contains 2.0"),
    ("slot_bias inf", call("gsa", slot_bias=one(INF, M)), "slot_bias: contains inf; wanted log weights in [-inf, inf)"),
    ("slot_bias NaN", call("mva", slot_bias=one(NAN, M)), "slot_bias: contains nan"),
    # What is broadcast
    ("slot_bias shape", call("gsa", slot_bias=ones(3)), "slot_bias: is a torch.float64 tensor of shape [3]"),
    ("slot_bias too many axes", call("gsa", slot_bias=ones(1, B, T, HQ, M)),
     "slot_bias: is a torch.float64 tensor of shape [1, 2, 5, 4, 7]"),
    ("slot_bias other levels", call("mva", slot_bias=ones(3, B, T, HQ, M)),
     "slot_bias: is a torch.float64 tensor of shape [3, 2, 5, 4, 7]"),
    ("slot_bias of integers", call("gsa", slot_bias=ints(*range(M))), "slot_bias: is a torch.int64 tensor"),
    ("slot_bias a number", call("gsa", slot_bias=0.0), "slot_bias: is float 0.0"),
    ("slot_bias unknown", call("gsa", slot_bias="masss"), "slot_bias: is 'masss'; wanted None, \"mass\" or a tensor"),
    ("hard_weight shape", call("gsa_sw", integration="hard", hard_weight=ones(B, T, 3)), "hard_weight: is a torch.float64 tensor"),
    ("branch_gate shape", call("mva", low_query=low_query, branches="gated", branch_gate=ones(2, 2, 2)), "branch_gate: is a torch.float64"),
    # Packed sequences
    ("cu_seqlens start", packed(ints(1, 5)), "cu_seqlens: is [1, 5] for T = 5"),
    ("cu_seqlens decreasing", packed(ints(0, 4, 3, 5)), "cu_seqlens: is [0, 4, 3, 5] for T = 5"),
    ("cu_seqlens end", packed(ints(0, 4)), "cu_seqlens: is [0, 4] for T = 5"),
    ("cu_seqlens beyond the end", packed(ints(0, 6)), "cu_seqlens: is [0, 6] for T = 5"),
    ("cu_seqlens dtype", packed(ints(0, 5, dtype=torch.int16)), "cu_seqlens: is a torch.int16 tensor of shape [2] on cpu"),
    ("cu_seqlens of floats", packed(ones(2)), "cu_seqlens: is a torch.float64 tensor of shape [2] on cpu"),
    ("cu_seqlens a list", packed([0, 5]), "cu_seqlens: is list [0, 5]"),
    ("cu_seqlens axes", packed(ints(0, 5)[None]), "cu_seqlens: is a torch.int64 tensor of shape [1, 2]"),
    ("cu_seqlens too short", packed(ints(0)), "cu_seqlens: is a torch.int64 tensor of shape [1]"),
    ("cu_seqlens with a batch", packed(ints(0, 5), n=2), "cu_seqlens: comes with B = 2; wanted B = 1"),
    # Numbers and choices
    ("scale NaN", call("gsa", scale=NAN), "scale: is float nan; wanted a finite number"),
    ("scale inf", call("softmax", scale=INF), "scale: is float inf"),
    ("scale a string", call("taylor", scale="1"), "scale: is str '1'"),
    ("scale True", call("abc", scale=True), "scale: is bool True"),
    ("scale a tensor", call("mva", scale=ones(())), "scale: is a torch.float64 tensor of shape []"),
    ("window 0", call("gsa_sw", window=0), "window: is int 0; wanted an integer >= 1"),
    ("window 0 of softmax", call("softmax", window=0), "window: is int 0"),
    ("window None", call("mva_sw", window=None), "window: is NoneType None"),
    ("window 2.0", call("mva_sw", window=2.0), "window: is float 2.0"),
    ("window True", call("softmax", window=True), "window: is bool True"),
    ("sinks -1", call("gsa_sw", sinks=-1), "sinks: is int -1; wanted an integer >= 0"),
    ("sinks of softmax -1", call("softmax", window=1, sinks=-1), "sinks: is int -1"),
    ("sinks None", call("mva_sw", sinks=None), "sinks: is NoneType None"),
    ("order -1", call("taylor", order=-1), "order: is int -1; wanted an integer >= 0"),
    ("order 1.5", call("taylor", order=1.5), "order: is float 1.5"),
    ("order True", call("taylor", order=True), "order: is bool True"),
    ("order None", call("taylor", order=None), "order: is NoneType None"),
    ("power odd", call("power", power=3), "power: is 3; wanted an even integer >= 2, so that no weight is negative"),
    ("power 0", call("power", power=0), "power: is int 0; wanted an integer >= 2"),
    ("power 2.0", call("power", power=2.0), "power: is float 2.0"),
    ("power's g with channels", call("power", g=-ones(B, T, H, D)), "g: is a torch.float64 tensor of shape [2, 5, 2, 3] on cpu; wanted"),
    ("halves 1", call("hedgehog", halves=1), "halves: is int 1; wanted True or False"),
    ("eps negative", call("rebased", eps=-1e-5), "eps: is float -1e-05; wanted a finite number >= 0"),
    ("eps True", call("rebased", eps=True), "eps: is bool True"),
    ("gain a head", call("rebased", gain=ones(H, D)), "gain: is a torch.float64 tensor of shape [2, 3] on cpu"),
    ("W_k heads", call("t2r", W_k=ones(HQ, D, D)), "W_k: is a torch.float64 tensor of shape [4, 3, 3] on cpu, so H = 4"),
    ("W_q wider than the identity", call("t2r", W_q=ones(HQ, D, 4)),
     "W_q: is a torch.float64 tensor of shape [4, 3, 4] on cpu, so E = 4; wanted a floating tensor [HQ, D, E] with E = 3 as in W_k = None"),
    ("b_k wider than the identity", call("hedgehog", b_k=ones(H, 4)),
     "b_k: is a torch.float64 tensor of shape [2, 4] on cpu, so E = 4; wanted a floating tensor [H, E] with E = 3"),
    ("W_q and W_k of two widths", call("t2r", W_q=ones(HQ, D, 4), W_k=ones(H, D, 2)), "W_k: is a torch.float64 tensor of shape [2, 3, 2]"),
    ("read unknown", call("gsa", read="soft"), "read: is 'soft'; wanted \"softmax\", \"sigmoid\" or an order N >= 0"),
    ("read -1", call("mva", read=-1), "read: is int -1; wanted an integer >= 0"),
    ("read 1.5", call("gsa", read=1.5), "read: is float 1.5"),
    ("read True", call("gsa_sw", read=True), "read: is bool True"),
    ("read None", call("gsa", read=None), "read: is NoneType None"),
    ("residual unknown", call("mva", residual="after"), "residual: is str 'after'; wanted \"post\" or \"pre\""),
    ("branches unknown", call("mva", branches="both"), "branches: is str 'both'; wanted \"shared\" or \"separate\" or \"gated\""),
    ("integration unknown", call("gsa_sw", integration="sum"), "integration: is str 'sum'; wanted \"soft\" or \"hard\""),
    ("centre unknown", call("taylor", centre="median"), "centre: is str 'median'"),
    ("centre a number", call("taylor", centre=0), "centre: is int 0"),
    ("centre shape", call("taylor", centre=ones(B, HQ, D)), "centre: is a torch.float64 tensor of shape [2, 4, 3]"),
    ("centre batch", call("taylor", centre=ones(3, H, D)), "centre: is a torch.float64 tensor of shape [3, 2, 3]"),
    ("output_final_state 1", call("gsa", output_final_state=1), "output_final_state: is int 1; wanted True or False"),
    ("self_augmentation shape", call("metala", self_augmentation=ones(3)), "self_augmentation: is a torch.float64 tensor of shape [3]"),
    ("self_augmentation a number", call("metala", self_augmentation=1.0), "self_augmentation: is float 1.0"),
    # Options that belong together
    ("perceptron without sigmoid", call("gsa", perceptron=perceptron),
     "perceptron: comes with read = 'softmax'; wanted read = \"sigmoid\""),
    ("perceptron with an order", call("mva", read=2, perceptron=perceptron), "perceptron: comes with read = 2"),
    ("perceptron no pair", call("gsa", read="sigmoid", perceptron=ones(M, M)), "perceptron: is a torch.float64 tensor"),
    ("perceptron of three", call("gsa", read="sigmoid", perceptron=(None,) * 3), "perceptron: is tuple (None, None, None)"),
    ("perceptron W shape", call("gsa", read="sigmoid", perceptron=(ones(M, 2), None)),
     "perceptron W: is a torch.float64 tensor of shape [7, 2]"),
    ("perceptron W heads", call("gsa", read="sigmoid", perceptron=(ones(H, M, M), None)), "perceptron W: is a torch.float64 tensor"),
    ("perceptron a shape", call("mva", read="sigmoid", perceptron=(None, ones(3))), "perceptron a: is a torch.float64 tensor of shape [3]"),
    ("perceptron a of integers", call("gsa", read="sigmoid", perceptron=(None, ints(*range(M)))), "perceptron a: is a torch.int64 tensor"),
    ("separate alone", call("mva", branches="separate"), "branches: is \"separate\" without low_query; wanted low_query and low_g"),
    ("separate without low_g", call("mva", branches="separate", low_query=low_query), "branches: is \"separate\" without low_g"),
    ("gated alone", call("mva_sw", branches="gated"), "branches: is \"gated\" without low_query; wanted low_query and branch_gate"),
    ("gated without branch_gate", call("mva", branches="gated", low_query=low_query), "branches: is \"gated\" without branch_gate"),
    ("gated without low_query", call("mva", branches="gated", branch_gate=branch), "branches: is \"gated\" without low_query"),
    ("low_g with shared", call("mva", low_query=low_query, low_g=low(-1.0)),
     "low_g: comes with branches = 'shared'; wanted branches = \"separate\""),
    ("low_g with gated", call("mva", low_query=low_query, branches="gated", branch_gate=branch, low_g=low(-1.0)),
     "low_g: comes with branches = 'gated'"),
    ("branch_gate with shared", call("mva", low_query=low_query, branch_gate=branch), "branch_gate: comes with branches = 'shared'"),
    ("branch_gate with separate", call("mva_sw", low_query=low_query, branches="separate", low_g=low(-1.0), branch_gate=branch),
     "branch_gate: comes with branches = 'separate'; wanted branches = \"gated\""),
    ("hard without weight", call("gsa_sw", integration="hard"), "hard_weight: is None; wanted the window's weight"),
    ("soft with weight", call("mva_sw", hard_weight=hard), "hard_weight: comes with integration = \"soft\""),
    # States
    ("mean with a final state", call("taylor", centre="mean", output_final_state=True),
     "centre: is \"mean\", which sees the whole sequence"),
    ("mean with a state", lambda: call("taylor", centre="mean", initial_state=state_of("taylor"))(), "centre: is \"mean\""),
    ("state a dict", call("gsa", initial_state={}), "initial_state: is dict {}; wanted a SlotState, as gsa returns"),
    ("state of another row", call("abc", initial_state=slots()), "initial_state: is SlotState"),
    ("state ABC for GSA", lambda: call("gsa", initial_state=state_of("abc"))(), "initial_state: is AbcState"),
    ("state slots for a window", call("gsa_sw", initial_state=slots()), "initial_state: is SlotState"),
    ("state shape", call("gsa", initial_state=slots(m=3)), "initial_state.K: is a torch.float64 tensor of shape [2, 2, 3, 3] on cpu"),
    ("state without levels", call("mva", initial_state=slots()), "initial_state.K: is a torch.float64 tensor of shape [2, 2, 7, 3] on cpu"),
    ("state with keys", call("metala", initial_state=slots()), "initial_state.K: is a torch.float64 tensor"),
    ("state without keys", call("gsa", initial_state=slots()._replace(K=None)), "initial_state.K: is NoneType None"),
    ("state half", call("gsa", initial_state=slots(torch.float16)),
     "initial_state.K: is a torch.float16 tensor of shape [2, 2, 7, 3] on cpu; wanted float32 or float64: states are never kept"),
    ("state bfloat16", call("gsa", initial_state=slots()._replace(log_decay=-ones(B, H, M).bfloat16())),
     "initial_state.log_decay: is a torch.b"),
    ("state device", call("gsa", initial_state=slots()._replace(V=ones(B, H, M, V, device="meta"))),
     "initial_state.V: is a torch.float64 tensor"),
    ("state with low_V", call("gsa", initial_state=slots()._replace(low_V=ones(B, H, M, V))),
     "initial_state.low_V: is a torch.float64 tensor"),
    ("state without low_V", lambda: call("mva", branches="separate", low_query=low_query, low_g=low(-1.0), initial_state=state_of("mva"))(),
     "initial_state.low_V: is NoneType None"),
    ("state of other sequences", lambda: mva.gsa(
        **{key: x[:1] for key, x in arguments("gsa").items()}, cu_seqlens=ints(0, 1, 2, 5), initial_state=slots()),
     "initial_state.K: is a torch.float64 tensor of shape [2, 2, 7, 3] on cpu; wanted a tensor of shape [3, 2, 7, 3]"),
    ("mass without log_decay", call("gsa", slot_bias="mass", initial_state=slots(log_decay=False)), "initial_state.log_decay: is None"),
    ("mass without log_decay in a window", lambda: call("gsa_sw", sinks=1, slot_bias="mass", initial_state=ring(
        slots=slots(log_decay=False)))(), "initial_state.slots.log_decay: is None"),
    ("window state of no slots", lambda: call("gsa_sw", sinks=1, initial_state=ring(slots=None))(),
     "initial_state.slots: is NoneType None"),
    ("window state of another", lambda: call("gsa_sw", sinks=1, window=2, initial_state=ring())(),
     "initial_state.k: is a torch.float64"),
    ("window state of other sinks", lambda: call("gsa_sw", sinks=2, initial_state=ring())(),
     "initial_state.sink_k: is a torch.float64 tensor"),
    ("Taylor state of another order", lambda: call("taylor", order=3, initial_state=state_of("taylor"))(),
     "initial_state.S: is a torch.float64"),
    ("Taylor state too large", lambda: mva.taylor(*(ones(1, 1, 1, 64) for _ in "qkv"), 32, output_final_state=True),
     "order: is 32, so that a state has 2.97e+25 features"),
    ("Taylor recurrence too large", lambda: mva.taylor(*(ones(1, 1, 1, 64) for _ in "qkv"), 32, impl="recurrent"),
     "order: is 32, so that a state has 2.97e+25 features"),
    ("power recurrence too large", lambda: mva.power(*(ones(1, 1, 1, 64) for _ in "qkv"), 8, impl="recurrent"),
     "power: is 8, so that a state has 1.06e+10 features"),
    # Devices, dtypes and values inside tuples and states
    ("perceptron device", call("gsa", read="sigmoid", perceptron=(ones(M, M, device="meta"), None)), "perceptron W: is a torch.float64"),
    ("self_augmentation of integers", call("metala", self_augmentation=ints(*range(M))), "self_augmentation: is a torch.int64 tensor"),
    ("self_augmentation of complex numbers", call("metala", self_augmentation=ones(M).cfloat()), "self_augmentation: is a torch.complex64"),
    ("centre of complex numbers", call("taylor", centre=ones(B, H, D).cfloat()), "centre: is a torch.complex64 tensor"),
    ("state of integers", call("gsa", initial_state=SlotState(*(x.long() for x in slots()[:3]))), "initial_state.K: is a torch.int64"),
    ("state of complex numbers", call("gsa", initial_state=slots()._replace(V=ones(B, H, M, V).cfloat())),
     "initial_state.V: is a torch.complex64"),
    ("state that grows", call("gsa", initial_state=slots()._replace(log_decay=ones(B, H, M))), "initial_state.log_decay: contains 1.0"),
    ("window state that grows", lambda: call("gsa_sw", sinks=1, initial_state=ring(g=ones(B, W, H, M)))(),
     "initial_state.g: contains 1.0"),
    ("window state, present", lambda: call("gsa_sw", sinks=1, initial_state=ring(present=ones(B, W)))(),
     "initial_state.present: is a torch.float64 tensor of shape [2, 3] on cpu; wanted bool"),
    ("window state, seen", lambda: call("gsa_sw", sinks=1, initial_state=ring(seen=ones(B)))(),
     "initial_state.seen: is a torch.float64 tensor of shape [2] on cpu; wanted int64"),
    ("cu_seqlens device", packed(ints(0, 5).to("meta")), "cu_seqlens: is on meta; wanted cpu"),
    ("scale too large an integer", call("gsa", scale=10**400), "scale: is int 1000"),
    ("centre a NumPy array", call("taylor", centre=ones(2).numpy()), "centre: is ndarray"),
    ("residual a NumPy array", call("mva", residual=ones(2).numpy()), "residual: is ndarray"),
    ("perceptron NaN", call("gsa", read="sigmoid", perceptron=(one(NAN, M, M), None), check_finite=True), "perceptron W: contains nan"),
    ("centre inf", call("taylor", centre=one(INF, B, H, D), check_finite=True), "centre: contains inf; wanted finite numbers"),
    ("self_augmentation NaN", call("metala", self_augmentation=one(NAN, M), check_finite=True), "self_augmentation: contains nan"),
    ("state NaN", call("gsa", initial_state=slots()._replace(K=one(NAN, B, H, M, D)), check_finite=True), "initial_state.K: contains nan"),
    ("ring NaN", lambda: call("gsa_sw", sinks=1, initial_state=ring(v=one(NAN, B, W, H, V)), check_finite=True)(),
     "initial_state.v: contains nan"),
    # Names
    ("impl unknown", call("gsa", impl="cuda"), "impl: gsa has no implementation 'cuda'; it has naive, recurrent, chunk"),
    ("impl that softmax lacks", call("softmax", impl="chunk"), "impl: softmax has no implementation 'chunk'; it has naive, recurrent"),
    ("impl a number", call("gsa", impl=1), "impl: gsa has no implementation 1"),
    ("impl before tensors", call("gsa", impl="cuda", q=None), "impl: gsa has no implementation 'cuda'"),
    ("method unknown", lambda: mva.attention("flash"), "method: there is no method 'flash'; there are softmax, taylor, metala, abc"),
    ("method a list", lambda: mva.attention([]), "method: there is no method []"),
    ("method unknown to weights", lambda: mva.weights("flash"), "method: there is no method 'flash'"),
    ("option unknown", through(mva.attention, "gsa", window=3), "window: is no option of gsa; wanted one of q, k, v, g, scale"),
    ("option unknown to weights", through(mva.weights, "softmax", order=3), "order: is no option of softmax"),
    ("input missing", through(mva.attention, "gsa", without=["g"]), "g: is missing; wanted q, k, v, g for gsa"),
    ("all inputs missing", lambda: mva.attention("metala"), "r: is missing; wanted r, v, g for metala"),
    ("window missing", through(mva.attention, "gsa_sw", without=["window"]), "window: is missing; wanted q, k, v, g, window for gsa_sw"),
    ("order missing", through(mva.attention, "taylor", without=["order"]), "order: is missing; wanted q, k, v, order for taylor"),
    ("too many inputs", lambda: mva.attention("softmax", *4 * [ones(*SIZES["v"])]), "inputs: are 4 tensors; wanted 3: q, k, v"),
    ("an input twice", lambda: mva.attention("gsa", *arguments("gsa").values(), q=ones(*SIZES["q"])),
     "q: is given by position and by name; wanted it once"),
    # weights and merge
    ("an input of weights twice", lambda: mva.weights("gsa", *arguments("gsa").values(), v=ones(*SIZES["v"])),
     "v: is given by position and by name"),
    ("too many inputs to weights", lambda: mva.weights("softmax", *arguments("softmax").values(), ones(1)),
     "inputs: are 4 tensors; wanted 3: q, k, v"),
    ("merge without o", lambda: mva.merge(Output(None, None, ones(1)), Output(ones(1, 1), None, ones(1))),
     "a: has o NoneType None"),
    ("merge devices", lambda: mva.merge(*(Output(ones(1, 1, device=x), None, ones(1, device=x)) for x in ("cpu", "meta"))),
     "b: is on meta; wanted cpu, where a is"),
    ("weights with self_augmentation", through(mva.weights, "metala", self_augmentation=ones(M)),
     "self_augmentation: is given; wanted None"),
    ("weights with a state", through(mva.weights, "gsa", initial_state=slots()), "initial_state: is given; wanted None"),
    ("weights without v", through(mva.weights, "gsa", without=["v"]), "v: is missing or not [B, T, H, V]"),
    ("weights with v of 3 axes", through(mva.weights, "gsa", v=ones(B, T, V)), "v: is missing or not [B, T, H, V]"),
    ("weights of no tokens", lambda: mva.weights("softmax", *3 * [ones(1, 0, 1, 2)]), "v: has T = 0; wanted at least one token"),
    ("weights with a bad gate", through(mva.weights, "gsa", g=low(1.0)), "g: contains 1.0"),
    ("merge a no output", lambda: mva.merge(ones(1), Output(ones(1, 1), None, ones(1))), "a: is a torch.float64 tensor"),
    ("merge a without lse", lambda: mva.merge(Output(ones(1, 1)), Output(ones(1, 1), None, ones(1))), "a: has lse = None"),
    ("merge b without lse", lambda: mva.merge(Output(ones(1, 1), None, ones(1)), Output(ones(1, 1))), "b: has lse = None"),
    ("merge lse shape", lambda: mva.merge(Output(ones(1, 1), None, ones(2)), Output(ones(1, 1), None, ones(1))),
     "a: has o [1, 1] and lse [2]"),
    ("merge shapes", lambda: mva.merge(Output(ones(1, 1), None, ones(1)), Output(ones(2, 1), None, ones(2))), "b: has o of shape [2, 1]"),
]


@pytest.mark.parametrize(("bad", "start"), [pytest.param(bad, start, id=name) for name, bad, start in table])
def test_a_bad_argument_is_named_before_any_work(bad, start):
    with pytest.raises(mva.ArgumentError) as caught:
        bad()
    assert str(caught.value).startswith(start)
    assert "wanted" in str(caught.value) or start.startswith(("impl", "method"))


def test_no_case_is_there_twice():
    names = [name for name, *_ in table]
    assert len(set(names)) == len(names)


EVERY_INPUT = [(name, key) for name, row in METHODS.items() for key in row.inputs]


@pytest.mark.parametrize(("name", "key"), EVERY_INPUT)
@pytest.mark.parametrize("what", ["axes", "dtype", "type"])
def test_every_input_of_every_row_is_checked(name, key, what):
    x = arguments(name)[key]
    with pytest.raises(mva.ArgumentError, match=f"^{key}: is "):
        call(name, **{key: {"axes": x[0], "dtype": x.long(), "type": x.tolist()}[what]})()


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, key in EVERY_INPUT if key != METHODS[name].inputs[0]])
def test_every_input_of_every_row_is_on_one_device(name, key):
    with pytest.raises(mva.ArgumentError, match=f"^{key}: is on meta"):
        call(name, **{key: arguments(name)[key].to("meta")})()


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("impl", [None, "naive", "recurrent"])
def test_a_right_call_reaches_the_form(name, impl):
    with pytest.raises(Reached):
        call(name, impl=impl, check_finite=True)()


def test_a_right_merge_reaches_the_form():
    with pytest.raises(Reached):
        mva.merge(*2 * [Output(ones(1, 1), None, ones(1))])


@pytest.mark.parametrize("check_finite", [False, True])
def test_values_are_not_read_where_there_are_none(check_finite):
    with pytest.raises(Reached):
        mva.gsa(**{key: meta[key] for key in METHODS["gsa"].inputs}, check_finite=check_finite)


@pytest.mark.parametrize("name", [name for name, row in METHODS.items() if "initial_state" in row.options])
def test_a_state_that_a_call_returned_passes(name):
    with pytest.raises(Reached):
        call(name, initial_state=state_of(name), check_finite=True)()


def test_an_infinite_value_passes_unless_asked_for():
    with pytest.raises(Reached):
        call("gsa", q=one(INF, *SIZES["q"]))()
