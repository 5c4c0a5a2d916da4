"""What the study compares: every method at every setting, as data."""

from dataclasses import dataclass, field
from typing import Any

import mva_ref as mva

ROWS = {row.name: row for row in mva.methods()}
ORDERS = (0, 1, 2, 4, 8, 16, 32)
WINDOWS = (16, 64, 128)
SINKS = (0, 4)
STATE = 6144          # float numbers a KV head at D = V = 64: 48 slots of GSA, 24 of MVA-2, 16 of MVA-3, 96 of MetaLA
SLOT_WINDOW = 64      # window of the slot methods with one


@dataclass(frozen=True)
class Case:
    """One method at one setting. `slots` and `levels` are 0 for a method without parameters to fit."""

    group: str
    label: str
    method: str
    options: dict[str, Any] = field(default_factory=dict)
    levels: int = 0
    slots: int = 0

    @property
    def key(self) -> str:
        """A file name."""
        return "".join(c if c.isalnum() else "-" for c in f"{self.group} {self.label}").lower()

    def state(self, D: int, V: int, T: int) -> int:
        """Float numbers a KV head keeps for the next token; for a window without slots, those of its ring and sinks."""
        window, sinks = self.options.get("window"), self.options.get("sinks", 0)
        if self.method == "softmax" and window is not None:
            return (min(window, T) + min(sinks, T)) * (D + V)
        return ROWS[self.method].state_numbers(
            D=D, V=V, T=T, M=self.slots, L=max(self.levels, 1), W=window or 0, n=sinks, N=self.options.get("order", 0)
        )


def slot_count(name: str, levels: int, D: int, V: int, numbers: int) -> int:
    """Slots that fill a state of so many numbers."""
    return numbers // (V if name == "metala" else levels * (D + V))


def cases(D: int, V: int, quick: bool = False) -> list[Case]:
    """All cases, cheapest first. D and V are the head sizes of the model."""
    orders, windows, sinks = (ORDERS, WINDOWS, SINKS) if not quick else ((0, 2, 8, 32), (16, 64), SINKS)
    found = []
    for centre, suffix in ((None, ""), ("mean", ", centred")):
        found += [Case("order", f"order {n}{suffix}", "taylor", {"order": n, "centre": centre}) for n in orders]
    for n in sinks:
        suffix = f" + {n} sinks" if n else ""
        found += [Case("window", f"window {w}{suffix}", "softmax", {"window": w, "sinks": n}) for w in windows]
    numbers = STATE * (D + V) // 128
    for name, size in (("equal", numbers), ("doubled", 2 * numbers))[: 1 if quick else 2]:
        for title, row, L in (("MetaLA", "metala", 1), ("GSA", "gsa", 1), ("MVA-2", "mva", 2), ("MVA-3", "mva", 3)):
            found.append(Case("slots", f"{title}, {name} state", row, {}, L, slot_count(row, L, D, V, size)))
    for title, row, L in (("GSA-SW", "gsa_sw", 1), ("MVA-2-SW", "mva_sw", 2)):
        for integration in ("soft", "hard"):
            for n in sinks if not quick else (4,):
                options = {"window": SLOT_WINDOW, "sinks": n, "integration": integration}
                label = f"{title}, {integration}{f', {n} sinks' if n else ''}"
                found.append(Case("window and slots", label, row, options, L, slot_count(row, L, D, V, numbers)))
    return found


def known() -> set[str]:
    """Registry rows that the study has a case for."""
    return {case.method for case in cases(64, 64)} & set(ROWS)
