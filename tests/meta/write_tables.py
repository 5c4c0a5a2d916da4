"""Write what is made from the registry: its tables in README.md and docs/, and the types of the public functions.

    python -m tests.meta.write_tables
"""

import inspect
import re
from pathlib import Path

from mva_ref.functions import public
from mva_ref.registry import ALIASES, METHODS, systems, table

ROOT = Path(__file__).parents[2]
HEAD = '''"""Written from the forms by tests/meta/write_tables.py."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .method import Method
from .types import *

NAIVE_LENGTH: int

def choose(row: Method, first: Tensor) -> str: ...
def public(name: str) -> Callable[..., Output]: ...'''
TABLES = (("README.md", "methods", table), ("docs/methods.md", "methods", table), ("docs/systems.md", "systems", systems))


def stub() -> str:
    """The text of mva_ref/functions.pyi."""
    lines = [HEAD]
    for name in METHODS:
        text = re.sub(r": '([^']*)'", r": \1", str(inspect.signature(public(name))))
        for full, short in (("torch.Tensor", "Tensor"), ("mva_ref.types.", ""), ("collections.abc.", "")):
            text = text.replace(full, short)
        lines.append(f"def {name}{text}: ...")
    return "\n".join([*lines, "", *(f"{alias} = {name}" for alias, name in ALIASES.items()), ""])


def between(mark: str, new: str, text: str) -> str:
    """The text with what stands between two marks replaced."""
    return re.sub(rf"(<!-- {mark} -->\n).*?(<!-- /{mark} -->)", lambda m: f"{m[1]}{new}\n{m[2]}", text, flags=re.DOTALL)


def files() -> dict[Path, str]:
    """What each written file should contain."""
    made = {ROOT / "mva_ref" / "functions.pyi": stub()}
    for name, mark, new in TABLES:
        made[ROOT / name] = between(mark, new(), (ROOT / name).read_text())
    return made


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)
