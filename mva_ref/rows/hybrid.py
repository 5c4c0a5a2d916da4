"""A window joined with features of what has left it."""

from ..method import Method
from .paper import PAPER, RING, WHOLE

HERE = "mva_ref.naive.baselines"
HISTORY = {"S": "B H F V", "z": "B H F"}

ROWS = (
    Method(
        name="gla_sw", title="GLA with a sliding window", order="all; of its own kernel beyond the window", compression="features",
        decay="channel", integration="soft or hard", state="F * (V + 1) + (W + n) * (D + V) + W * D", exact=WHOLE, source=PAPER,
        inputs=("q", "k", "v", "g"), required=("window", "feature_map"), shapes={"g": "B T H D"}, naive=f"{HERE}.gla_sw:gla_sw",
        recurrent=f"{HERE}.gla_sw:recurrent", chunk="mva_ref.fast.chunk.hybrid:gla_sw", state_type="WindowState",
        state_fields={"slots": HISTORY, **RING, "g": "B W H D", "low_g": None}, normalised=True, positive=True, rotation=False,
    ),
    Method(
        name="lolcats", title="LoLCATs", order="all; of its own kernel beyond the window", compression="features", decay="none",
        integration="soft, by its own maximum", state="F * (V + 1) + W * (D + V)", exact=WHOLE, source="2410.10254",
        inputs=("q", "k", "v"), required=("window",), shapes={"W_q": "HQ D E", "W_k": "H D E", "window_weight": "HQ"}, features="2 * E",
        naive=f"{HERE}.lolcats:lolcats", recurrent=f"{HERE}.lolcats:recurrent", chunk="mva_ref.fast.chunk.hybrid:lolcats",
        state_type="WindowState", state_fields={"slots": HISTORY, **RING, "g": None, "low_g": None},
        normalised=True, positive=True, rotation=False,
    ),
    Method(
        name="infini", title="Infini-attention", order="all; of its own kernel beyond the segment", compression="features", decay="none",
        integration="hard", state="F * (V + 1) + C * (D + V)", exact="segment of T", source="2404.07143", inputs=("q", "k", "v"),
        required=("segment",), naive=f"{HERE}.infini:infini", recurrent=f"{HERE}.infini:recurrent", state_type="WindowState",
        state_fields={"slots": HISTORY, **{name: x.replace("W", "C") for name, x in RING.items()}, "g": None, "low_g": None},
        normalised=True, positive=True, rotation=False,
    ),
)
