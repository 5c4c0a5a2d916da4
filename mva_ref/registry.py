"""One row per attention system. This table drives the public face, the tests, the benchmarks, the figures and the tables in the docs."""

from typing import Any

from .method import Method
from .rows import ROWS
from .types import ArgumentError

METHODS: dict[str, Method] = {row.name: row for row in ROWS}

ALIASES = {"mqva": "mva", "mqvswa": "mva_sw"}


def method(name: str) -> Method:
    """A row by name or alias; an ArgumentError names the rows that exist."""
    row = METHODS.get(ALIASES.get(name, name)) if isinstance(name, str) else None
    if row is None:
        raise ArgumentError(f"method: there is no method {name!r}; there are {', '.join(METHODS)}")
    return row


def _markdown(rows: list[list[Any]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [rows[0], ["--"] * len(rows[0]), *rows[1:]])


def table() -> str:
    """The registry as a Markdown table."""
    head = ["method", "system", "QK order", "compression", "integration", "state, numbers per KV head", "implementations", "source"]
    return _markdown([head, *([f"`{m.name}`", m.title, m.order, m.compression, m.integration, f"`{m.state}`",
                               ", ".join(m.implementations()), m.source] for m in METHODS.values())])


def systems() -> str:
    """What the systems have in common and where they differ, as a Markdown table."""
    head = ["system", "QK order", "compression", "decay", "integration", "state, numbers per KV head", "rows sum to 1", "weights >= 0",
            "is softmax attention"]
    return _markdown([head, *([f"`{m.name}`", m.order, m.compression, m.decay, m.integration, f"`{m.state}`",
                               "yes" if m.normalised else "no", "yes" if m.positive else "no", m.exact] for m in METHODS.values())])
