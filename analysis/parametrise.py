"""What a method leaves open, as tensors to fit, and the arguments it gets from the queries, keys and values of a softmax model.

One entry of METHODS a registry row. Gates start with time scales of about 12 to 3,000 tokens.
"""

from typing import Any

import torch
from torch import Generator, Tensor

import mva_ref as mva
from mva_ref.models.capture import QKV

from .cases import Case
from .maps import Method, Tensors, mapped, project, small, start_affine, start_maps

baselines = mva.naive.baselines

MEMORY = 6.0    # gate biases are spread over 0 .. MEMORY
SHARED = False  # slot gates of one KV head each; True: one projection for all heads, as in the paper
# Of queries and keys whose scores are neither exponentiated nor divided by their sum, for short and for long memories: such reads start
# and learn in small steps, or they diverge.
SHORT, LONG = 0.1, 0.03


def spread(heads: int, n: int) -> Tensor:
    """Gate biases [heads, n]."""
    return torch.linspace(0, MEMORY, n).expand(heads, n).clone()


def start_slots(case: Case, qkv: QKV, rng: Generator) -> Tensors:
    """Gates W [L, H or 1, D, M], b; low-order query W_r [HQ or 1, D, M]; one hard-integration logit a query head."""
    HQ, D, H, L, M = *qkv.q.shape[2:], qkv.k.shape[2], case.levels, case.slots
    heads, queries = (1, 1) if SHARED else (H, HQ)
    tensors = {"W": small(rng, L, heads, D, M), "b": spread(heads, M).expand(L, -1, -1).clone()}
    low = small(rng, queries, D, M)
    if case.method in ("metala", "mva", "mva_sw"):
        tensors["W_r"] = low
    return tensors | ({"logit": torch.zeros(HQ)} if case.options.get("integration") == "hard" else {})


def slots(case: Case, x: Tensors, qkv: QKV) -> dict[str, Any]:
    """MetaLA, GSA, MVA and their windows: gates from the keys."""
    g = torch.stack([mva.naive.slot_gates(qkv.k, W, b) for W, b in zip(x["W"], x["b"], strict=True)])
    r = project(qkv.q, x["W_r"]) if "W_r" in x else None
    if case.method == "metala":
        return {"r": r, "g": g[0]}
    gates = {"g_levels": g, "low_query": r} if case.method in ("mva", "mva_sw") else {"g": g[0]}
    return {"q": qkv.q, "k": qkv.k, "scale": qkv.scale, **gates, **hard_weight(x)}


def hard_weight(x: Tensors) -> dict[str, Tensor]:
    """The weight of the window, one number a query head, where a case has it."""
    return {"hard_weight": x["logit"].sigmoid()[None, None]} if "logit" in x else {}


def start_abc(case: Case, qkv: QKV, rng: Generator) -> Tensors:
    D, H = qkv.q.shape[3], qkv.k.shape[2]
    return {"W_s": 10 * small(rng, H, D, case.slots)}


def abc(case: Case, x: Tensors, qkv: QKV) -> dict[str, Any]:
    """ABC: the logits of its slots from the keys."""
    return {"q": qkv.q, "k": qkv.k, "scale": qkv.scale, "s": project(qkv.k, x["W_s"])}


def features(case: Case, x: Tensors, qkv: QKV) -> dict[str, Any]:
    """A method whose own parameters are the maps of q and k."""
    return {"q": qkv.q, "k": qkv.k, **x}


def start_supra(case: Case, qkv: QKV, rng: Generator) -> Tensors:
    (HQ, D), H = qkv.q.shape[2:], qkv.k.shape[2]
    W_q, W_k = (qkv.scale**0.5 * torch.eye(n * D) for n in (HQ, H))
    return {"W_q": W_q, "W_k": W_k, "b_q": torch.zeros(HQ * D), "b_k": torch.zeros(H * D)}


def supra(case: Case, x: Tensors, qkv: QKV) -> dict[str, Any]:
    """SUPRA: one map over all heads, ReLU, rotation."""
    phi = baselines.supra.supra_features
    return {"q": phi(qkv.q, x["W_q"], x["b_q"]), "k": phi(qkv.k, x["W_k"], x["b_k"]), "scale": LONG**2}


def start_channel_gates(case: Case, qkv: QKV, rng: Generator) -> Tensors:
    D, H = qkv.q.shape[3], qkv.k.shape[2]
    return {"W_g": small(rng, H, D, case.width or D), "b_g": spread(H, case.width or D)}


def gla(case: Case, x: Tensors, qkv: QKV) -> dict[str, Any]:
    return {"g": baselines.gla.gla_gates(qkv.k, x["W_g"], x["b_g"]), "scale": 1.0}


def start_rwkv6(case: Case, qkv: QKV, rng: Generator) -> Tensors:
    gates = start_channel_gates(case, qkv, rng)
    return {**gates, "b_g": -2.5 - gates["b_g"], "u": torch.ones(qkv.k.shape[2], case.width)}


def rwkv6(case: Case, x: Tensors, qkv: QKV) -> dict[str, Any]:
    return {"g": baselines.rwkv6.rwkv6_gates(qkv.k, x["W_g"], x["b_g"]), "u": x["u"]}


def start_mamba(case: Case, qkv: QKV, rng: Generator) -> Tensors:
    """A time step for every head (Mamba-2) or value channel (Mamba), rates for every head or pair of channels."""
    D, H, V = qkv.q.shape[3], qkv.k.shape[2], qkv.v.shape[3]
    if case.method == "mamba2":
        return {"W_t": small(rng, H, D, 1), "b_t": torch.full((H, 1), -3.0), "A_log": torch.zeros(H)}
    return {"W_t": small(rng, H, D, V), "b_t": torch.full((H, V), -3.0), "A_log": (-0.5 * spread(H, case.width))[:, None].repeat(1, V, 1)}


def mamba(case: Case, x: Tensors, qkv: QKV) -> dict[str, Any]:
    dt = baselines.mamba2.time_step(project(qkv.k, x["W_t"]), x["b_t"])
    return {"dt": dt[..., 0] if case.method == "mamba2" else dt, "A": baselines.mamba2.rates(x["A_log"])}


def start_delta(case: Case, qkv: QKV, rng: Generator) -> Tensors:
    D, H = qkv.q.shape[3], qkv.k.shape[2]
    tensors = {"W_beta": small(rng, H, D, 1), "b_beta": torch.zeros(H, 1)}
    if case.method == "gated_delta":
        tensors |= {"W_t": small(rng, H, D, 1), "b_t": torch.full((H,), -3.0), "A_log": torch.zeros(H)}
    return tensors


def delta(case: Case, x: Tensors, qkv: QKV) -> dict[str, Any]:
    """Delta rules: keys of length one; queries keep their length, since no norm follows here."""
    keys = baselines.delta.delta_keys(project(qkv.k, x["W_k"], x["b_k"]))
    given = {"k": keys, "beta": project(qkv.k, x["W_beta"], x["b_beta"])[..., 0].sigmoid(), "scale": 1.0}
    if case.method == "gated_delta":
        given["g"] = baselines.gated_delta.gated_delta_gates(project(qkv.k, x["W_t"])[..., 0], x["A_log"], x["b_t"])
    return given


def start_gla_sw(case: Case, qkv: QKV, rng: Generator) -> Tensors:
    HQ, D, H = *qkv.q.shape[2:], qkv.k.shape[2]
    tensors = {"W_f": qkv.scale**0.5 * torch.eye(D).expand(H, D, D).clone(), **start_channel_gates(case, qkv, rng)}
    return tensors | ({"logit": torch.zeros(HQ)} if case.options.get("integration") == "hard" else {})


def gla_sw(case: Case, x: Tensors, qkv: QKV) -> dict[str, Any]:
    """GLA-SW: softmax features, one map a KV head."""

    def phi(y: Tensor) -> Tensor:
        return project(y, x["W_f"].repeat_interleave(y.shape[2] // x["W_f"].shape[0], 0)).softmax(-1)

    return {"q": qkv.q, "k": qkv.k, "feature_map": phi, **gla(case, x, qkv), "scale": qkv.scale, **hard_weight(x)}


def start_lolcats(case: Case, qkv: QKV, rng: Generator) -> Tensors:
    return start_maps(case, qkv, rng) | {"weight": torch.zeros(qkv.q.shape[2])}


def lolcats(case: Case, x: Tensors, qkv: QKV) -> dict[str, Any]:
    return {"q": qkv.q, "k": qkv.k, "W_q": x["W_q"], "W_k": x["W_k"], "window_weight": x["weight"].sigmoid(), "scale": qkv.scale}


def start_infini(case: Case, qkv: QKV, rng: Generator) -> Tensors:
    return {"logit": torch.zeros(qkv.q.shape[2])}


def infini(case: Case, x: Tensors, qkv: QKV) -> dict[str, Any]:
    return {"q": qkv.q, "k": qkv.k, "scale": qkv.scale, **hard_weight(x)}


def unscaled(case: Case, x: Tensors, qkv: QKV) -> dict[str, Any]:
    return {"scale": 1.0}


SLOTS = Method(start_slots, slots)
METHODS: dict[str, Method] = {
    **dict.fromkeys(("metala", "gsa", "mva", "gsa_sw", "mva_sw"), SLOTS),
    "abc": Method(start_abc, abc),
    "linear": mapped(),
    "t2r": Method(start_affine, features),
    "hedgehog": Method(start_affine, features),
    "based": mapped(arguments=unscaled),
    "rebased": mapped(
        more=lambda case, qkv, rng: {"gain": torch.ones(case.width), "offset": torch.zeros(case.width)},
        arguments=lambda case, x, qkv: {"gain": x["gain"], "offset": x["offset"]},
    ),
    "power": mapped(1.0, arguments=unscaled),
    "gla": mapped(1 / 128, LONG, start_channel_gates, gla),
    "retnet": mapped(1 / 64, LONG, arguments=unscaled),
    "supra": Method(start_supra, supra),
    "rwkv6": mapped(1 / 128, LONG, start_rwkv6, rwkv6),
    "mamba2": mapped(1.0, SHORT, start_mamba, mamba),
    "mamba": mapped(1.0, SHORT, start_mamba, mamba),
    "delta": mapped(0.0, SHORT, start_delta, delta),
    "gated_delta": mapped(0.0, SHORT, start_delta, delta),
    "gla_sw": Method(start_gla_sw, gla_sw),
    "lolcats": Method(start_lolcats, lolcats),
    "infini": Method(start_infini, infini),
}
