"""Softmax, Taylor orders, and the slot methods of the paper with what they are built from."""

from ..method import Method

SLOTS = {"K": "B H M D", "V": "B H M V", "log_decay": "B H M", "low_V": None}
LEVELS = {"K": "B L H M D", "V": "B L H M V", "log_decay": "B L H M", "low_V": "B H M V"}
RING = {"k": "B W H D", "v": "B W H V", "present": "B W", "sink_k": "B n H D", "sink_v": "B n H V", "sink_present": "B n", "seen": "B",
        "written": "B"}
ALWAYS, WHOLE = "always", "window of T"
PAPER = "ICML 2025, PMLR 267"

ROWS = (
    Method(
        name="softmax", title="Softmax attention", order="all", compression="none", decay="none", integration="window, sinks",
        state="T * (D + V)", exact=ALWAYS, source="1706.03762", inputs=("q", "k", "v"),
        naive="mva_ref.naive.softmax_attention:softmax", recurrent="mva_ref.naive.recurrent.tokens:softmax",
        normalised=True, positive=True, shift=True,
    ),
    Method(
        name="taylor", title="Taylor order N", order="0 to N", compression="features", decay="none", integration="none",
        state="F * (V + 1) + D", exact="N to infinity", source="2402.18668 (N = 2)", inputs=("q", "k", "v"), required=("order",),
        naive="mva_ref.naive.taylor_attention:taylor", recurrent="mva_ref.naive.recurrent.tokens:taylor",
        features="comb(D + N, N)", state_type="TaylorState",
        state_fields={"S": "B H F V", "z": "B H F", "key_sum": "B H D", "tokens": "B"},
        normalised=True,
    ),
    Method(
        name="metala", title="MetaLA", order="1 in slot space", compression="slots", decay="slot", integration="none", state="M * V",
        exact="never", source="2411.10741", inputs=("r", "v", "g"),
        naive="mva_ref.naive.slots:metala", recurrent="mva_ref.naive.recurrent.slots:metala", chunk="mva_ref.fast.chunk.forms:metala",
        triton="mva_ref.fast.triton.forms:metala", triton_recurrent="mva_ref.fast.triton.recurrent:metala",
        state_type="SlotState", state_fields={**SLOTS, "K": None}, rotation=False,
    ),
    Method(
        name="abc", title="ABC", order="all, of slots", compression="slots", decay="none", integration="none", state="M * (D + V + 1)",
        exact="a slot a token", source="2110.02488", inputs=("q", "k", "v", "s"),
        naive="mva_ref.naive.logit_slots:abc", recurrent="mva_ref.naive.recurrent.slots:abc",
        chunk="mva_ref.fast.chunk.forms:abc", state_type="AbcState", state_fields={"K": "B H M D", "V": "B H M V", "z": "B H M"},
        normalised=True, positive=True, shift=True,
    ),
    Method(
        name="gsa", title="Gated slot attention", order="all, of slots", compression="slots", decay="slot", integration="none",
        state="M * (D + V)", exact="a slot a token, mass bias", source="2409.07146", inputs=("q", "k", "v", "g"),
        naive="mva_ref.naive.slots:gsa", recurrent="mva_ref.naive.recurrent.slots:gsa", chunk="mva_ref.fast.chunk.forms:gsa",
        triton="mva_ref.fast.triton.forms:gsa", triton_recurrent="mva_ref.fast.triton.recurrent:gsa",
        state_type="SlotState", state_fields=SLOTS, positive=True,
    ),
    Method(
        name="mva", title="MVA", order="1 and all, of slots", compression="levels of slots", decay="slot", integration="none",
        state="L * M * (D + V)", exact="a slot a token, mass bias", source=PAPER, inputs=("q", "k", "v", "g_levels"),
        naive="mva_ref.naive.composed:mva", recurrent="mva_ref.naive.recurrent.composed:mva", chunk="mva_ref.fast.chunk.forms:mva",
        triton="mva_ref.fast.triton.forms:mva", triton_recurrent="mva_ref.fast.triton.recurrent:mva",
        state_type="SlotState", state_fields=LEVELS,
    ),
    Method(
        name="gsa_sw", title="GSA with a sliding window", order="all; of slots beyond the window", compression="slots", decay="slot",
        integration="soft or hard", state="(M + W + n) * (D + V) + W * M", exact=WHOLE, source=PAPER, inputs=("q", "k", "v", "g"),
        required=("window",), naive="mva_ref.naive.composed:gsa_sw", recurrent="mva_ref.naive.recurrent.composed:gsa_sw",
        chunk="mva_ref.fast.chunk.forms:gsa_sw", state_type="WindowState",
        state_fields={"slots": SLOTS, **RING, "g": "B W H M", "low_g": None}, positive=True,
    ),
    Method(
        name="mva_sw", title="MVA with a sliding window", order="all; 1 and all of slots beyond the window",
        compression="levels of slots", decay="slot", integration="soft or hard",
        state="(L * M + W + n) * (D + V) + W * L * M", exact=WHOLE, source=PAPER, inputs=("q", "k", "v", "g_levels"),
        required=("window",), naive="mva_ref.naive.composed:mva_sw", recurrent="mva_ref.naive.recurrent.composed:mva_sw",
        chunk="mva_ref.fast.chunk.forms:mva_sw", state_type="WindowState",
        state_fields={"slots": LEVELS, **RING, "g": "B W L H M", "low_g": "B W H M"},
    ),
)
