"""What the study compares: every method at every setting, as data."""

from dataclasses import dataclass, field, replace
from typing import Any

import mva_ref as mva

ROWS = {row.name: row for row in mva.methods()}
ORDERS = (0, 1, 2, 4, 8, 16, 32)
WINDOWS = (16, 64, 128)
SINKS = (0, 4)
STATE = 6144          # float numbers a KV head at D = V = 64: 48 slots of GSA, 24 of MVA-2, 16 of MVA-3, 96 of MetaLA
SLOT_WINDOW = 64      # window of the methods that have one and something else
# Methods whose queries and keys are mapped to as many columns as fill the state, with their options.
FEATURES: dict[str, dict[str, Any]] = {"linear": {}, "t2r": {}, "hedgehog": {}, "based": {}, "rebased": {}, "power": {"power": 2}}
RECURRENCES: dict[str, dict[str, Any]] = {
    name: {} for name in ("retnet", "supra", "gla", "mamba2", "mamba", "rwkv6", "delta", "gated_delta")
}


@dataclass(frozen=True)
class Case:
    """One method at one setting. `slots` and `levels` are those of a slot method, `width` the columns of projected queries and keys."""

    group: str
    label: str
    method: str
    options: dict[str, Any] = field(default_factory=dict)
    levels: int = 0
    slots: int = 0
    width: int = 0

    @property
    def key(self) -> str:
        """A file name."""
        return "".join(c if c.isalnum() else "-" for c in f"{self.group} {self.label}").lower()

    def state(self, D: int, V: int, T: int) -> int:
        """Float numbers a KV head keeps for the next token; for a window without slots, those of its ring and sinks."""
        window, sinks = self.options.get("window"), self.options.get("sinks", 0)
        if self.method == "softmax" and window is not None:
            return (min(window, T) + min(sinks, T)) * (D + V)
        row = ROWS[self.method]
        columns = {"E": self.width} if "W_q" in row.options else {"D": self.width} if self.width else {}
        order = self.options.get("order", self.options.get("power", 0))
        return row.state_numbers(**{
            "D": D, "V": V, "T": T, "M": self.slots, "L": max(self.levels, 1), "W": window or 0, "n": sinks, "N": order,
            "C": self.options.get("segment", 0), **columns,
        })

    def filled(self, what: str, D: int, V: int, numbers: int) -> "Case":
        """The same with as many `slots` or columns (`width`) as fit into a state of so many numbers; a window counts apart."""
        past = replace(self, options={**self.options, "window": 0, "sinks": 0})

        def sized(case: Case, n: int) -> Case:
            return replace(case, slots=n) if what == "slots" else replace(case, width=n)

        return sized(self, next(n for n in range(1, numbers) if sized(past, n + 1).state(D, V, 0) > numbers))


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
        for title, row, L in (("MetaLA", "metala", 1), ("ABC", "abc", 1), ("GSA", "gsa", 1), ("MVA-2", "mva", 2), ("MVA-3", "mva", 3)):
            found.append(Case("slots", f"{title}, {name} state", row, {}, L).filled("slots", D, V, size))
    for title, row, L in (("GSA-SW", "gsa_sw", 1), ("MVA-2-SW", "mva_sw", 2)):
        for integration in ("soft", "hard"):
            for n in sinks if not quick else (4,):
                options = {"window": SLOT_WINDOW, "sinks": n, "integration": integration}
                label = f"{title}, {integration}{f', {n} sinks' if n else ''}"
                found.append(Case("window and slots", label, row, options, L).filled("slots", D, V, numbers))
    for group, rows in (("features", FEATURES), ("recurrences", RECURRENCES)):
        for row, options in rows.items():
            case = Case(group, ROWS[row].title, row, options)
            found.append(case if row == "supra" else case.filled("width", D, V, numbers))
    for integration in ("soft", "hard"):
        options = {"window": SLOT_WINDOW, "sinks": 4, "integration": integration}
        found.append(Case("window and features", f"GLA-SW, {integration}, 4 sinks", "gla_sw", options))
    found.append(Case("window and features", "LoLCATs", "lolcats", {"window": SLOT_WINDOW}).filled("width", D, V, numbers))
    return [*found, Case("window and features", "Infini-attention", "infini", {"segment": SLOT_WINDOW})]


def known() -> set[str]:
    """Registry rows that the study has a case for."""
    return {case.method for case in cases(64, 64)} & set(ROWS)
