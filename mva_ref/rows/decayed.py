"""Linear recurrences with decay: un-normalised, of order 1."""

from ..method import Method

STATE = {"S": "B H D V"}
HERE = "mva_ref.naive.baselines"

ROWS = (
    Method(
        name="gla", title="Gated linear attention", order="1", compression="features", decay="channel", integration="none", state="D * V",
        exact="never", source="2312.06635", inputs=("q", "k", "v", "g"), shapes={"g": "B T H D"},
        naive=f"{HERE}.gla:gla", recurrent=f"{HERE}.gla:recurrent", state_type="MatrixState", state_fields=STATE, rotation=False,
    ),
)
