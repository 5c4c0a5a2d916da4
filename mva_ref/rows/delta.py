"""Delta rules: recurrences that correct what they hold before they add to it."""

from typing import Any

from ..method import Method

HERE = "mva_ref.naive.baselines"
SHARED: dict[str, Any] = {
    "order": "1, of corrected keys", "compression": "features", "integration": "none", "state": "D * V", "exact": "never",
    "state_type": "MatrixState", "state_fields": {"S": "B H D V"},
}

ROWS = (
    Method(
        name="delta", title="DeltaNet", decay="what is overwritten", source="2406.06484", inputs=("q", "k", "v", "beta"),
        shapes={"beta": "B T H"}, naive=f"{HERE}.delta:delta", recurrent=f"{HERE}.delta:recurrent", **SHARED,
    ),
    Method(
        name="gated_delta", title="Gated DeltaNet", decay="head and token, and what is overwritten", source="2412.06464",
        inputs=("q", "k", "v", "beta", "g"), shapes={"beta": "B T H", "g": "B T H"}, naive=f"{HERE}.gated_delta:gated_delta",
        recurrent=f"{HERE}.gated_delta:recurrent", **SHARED,
    ),
)
