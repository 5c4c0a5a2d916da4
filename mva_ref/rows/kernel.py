"""Attention by a kernel of features, without decay."""

from ..method import Method

STATE = {"S": "B H F V", "z": "B H F"}
HERE = "mva_ref.naive.baselines"
PROJECTIONS = {"W_q": "HQ D E", "W_k": "H D E", "b_q": "HQ E", "b_k": "H E"}

ROWS = (
    Method(
        name="linear", title="Linear attention (elu + 1)", order="all, of its own kernel", compression="features", decay="none",
        integration="none", state="F * (V + 1)", exact="never", source="2006.16236", inputs=("q", "k", "v"),
        naive=f"{HERE}.linear:linear", recurrent=f"{HERE}.linear:recurrent", state_type="FeatureState", state_fields=STATE,
        normalised=True, positive=True, rotation=False,
    ),
    Method(
        name="t2r", title="T2R (learned ReLU features)", order="all, of its own kernel", compression="features", decay="none",
        integration="none", state="F * (V + 1)", exact="never", source="2103.13076", inputs=("q", "k", "v"), shapes=PROJECTIONS,
        naive=f"{HERE}.t2r:t2r", recurrent=f"{HERE}.t2r:recurrent", features="E", state_type="FeatureState", state_fields=STATE,
        positive=True, rotation=False,
    ),
    Method(
        name="hedgehog", title="Hedgehog (softmax features)", order="all, of its own kernel", compression="features", decay="none",
        integration="none", state="F * (V + 1)", exact="never", source="2402.04347", inputs=("q", "k", "v"), shapes=PROJECTIONS,
        naive=f"{HERE}.hedgehog:hedgehog", recurrent=f"{HERE}.hedgehog:recurrent", features="2 * E", state_type="FeatureState",
        state_fields=STATE, normalised=True, positive=True, rotation=False,
    ),
    Method(
        name="based", title="Based (Taylor order 2)", order="0 to 2", compression="features", decay="none", integration="none",
        state="F * (V + 1)", exact="never", source="2402.18668", inputs=("q", "k", "v"), naive=f"{HERE}.based:based",
        recurrent=f"{HERE}.based:recurrent", features="comb(D + 2, 2)", state_type="FeatureState", state_fields=STATE,
        normalised=True, positive=True,
    ),
    Method(
        name="rebased", title="ReBased (square after LayerNorm)", order="2, of normalised q and k", compression="features", decay="none",
        integration="none", state="F * (V + 1)", exact="never", source="2402.10644", inputs=("q", "k", "v"),
        shapes={"gain": "D", "offset": "D"}, naive=f"{HERE}.rebased:rebased", recurrent=f"{HERE}.rebased:recurrent",
        features="comb(D + 1, 2)", state_type="FeatureState", state_fields=STATE, cancellation=f"{HERE}.rebased:cancellation",
        positive=True, rotation=False,
    ),
    Method(
        name="power", title="Power attention", order="p alone, even", compression="features", decay="head, optional", integration="none",
        state="F * (V + 1)", exact="never", source="2507.04239", inputs=("q", "k", "v"), required=("power",), shapes={"g": "B T H"},
        naive=f"{HERE}.power:power", recurrent=f"{HERE}.power:recurrent", features="comb(D + N - 1, N)", state_type="FeatureState",
        state_fields=STATE, cancellation=f"{HERE}.powers:power_cancellation", positive=True,
    ),
)
