"""Linear recurrences with decay: un-normalised, of order 1."""

from typing import Any

from ..method import Method

STATE = {"S": "B H D V"}
HERE = "mva_ref.naive.baselines"


def forms(name: str, chunk: str | None = None) -> dict[str, Any]:
    """Where the forms of a row are."""
    chunk = f"mva_ref.fast.chunk.decayed:{chunk or name}"
    return {"naive": f"{HERE}.{name}:{name}", "recurrent": f"{HERE}.{name}:recurrent", "chunk": chunk}


ROWS = (
    Method(
        name="gla", title="Gated linear attention", order="1", compression="features", decay="channel", integration="none", state="D * V",
        exact="never", source="2312.06635", inputs=("q", "k", "v", "g"), shapes={"g": "B T H D"},
        **forms("gla"), state_type="MatrixState", state_fields=STATE, rotation=False,
    ),
    Method(
        name="retnet", title="RetNet", order="1", compression="features", decay="head, fixed", integration="none", state="D * V",
        exact="never", source="2307.08621", inputs=("q", "k", "v"), shapes={"head_decay": "H"},
        **forms("retnet"), state_type="MatrixState", state_fields=STATE,
        by_head={"head_decay": f"{HERE}.retnet:retnet_decay"},
    ),
    Method(
        name="supra", title="SUPRA", order="1, of its features", compression="features", decay="head, fixed", integration="none",
        state="D * V", exact="never", source="2405.06640", inputs=("q", "k", "v"), shapes={"head_decay": "H"},
        **forms("supra", "retnet"), state_type="MatrixState", state_fields=STATE,
        by_head={"head_decay": f"{HERE}.supra:supra_decay"},
    ),
    Method(
        name="mamba2", title="Mamba-2 (SSD)", order="1", compression="features", decay="head", integration="none", state="D * V",
        exact="never", source="2405.21060", inputs=("q", "k", "v", "dt"), required=("A",),
        shapes={"dt": "B T H", "A": "H", "skip": "H"}, **forms("mamba2"),
        state_type="MatrixState", state_fields=STATE,
    ),
    Method(
        name="mamba", title="Mamba (selective scan)", order="1", compression="features", decay="key and value channel",
        integration="none", state="D * V", exact="never", source="2312.00752", inputs=("q", "k", "v", "dt"), required=("A",),
        shapes={"dt": "B T H V", "A": "H V D", "skip": "H V"}, naive=f"{HERE}.mamba:mamba", recurrent=f"{HERE}.mamba:recurrent",
        state_type="MatrixState", state_fields=STATE, rotation=False, one_matrix=False,
    ),
    Method(
        name="rwkv6", title="RWKV-6", order="1", compression="features", decay="channel", integration="none", state="D * V",
        exact="never", source="2404.05892", inputs=("q", "k", "v", "g"), required=("u",), shapes={"g": "B T H D", "u": "H D"},
        **forms("rwkv6"), state_type="MatrixState", state_fields=STATE, rotation=False,
    ),
)
