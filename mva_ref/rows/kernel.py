"""Attention by a kernel of features, without decay."""

from ..method import Method

STATE = {"S": "B H F V", "z": "B H F"}
HERE = "mva_ref.naive.baselines"

ROWS = (
    Method(
        name="linear", title="Linear attention (elu + 1)", order="all, of its own kernel", compression="features", decay="none",
        integration="none", state="F * (V + 1)", exact="never", source="2006.16236", inputs=("q", "k", "v"),
        naive=f"{HERE}.linear:linear", recurrent=f"{HERE}.linear:recurrent", state_type="FeatureState", state_fields=STATE,
        normalised=True, positive=True, rotation=False,
    ),
)
