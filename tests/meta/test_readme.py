"""The README shows what the registry says, and what it shows runs."""

import re
from pathlib import Path

import pytest
import torch

from mva_ref.registry import METHODS

from .write_tables import files

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("path", "text"), [pytest.param(path, text, id=path.name) for path, text in files().items()])
def test_what_is_written_from_the_registry_is_fresh(path, text):
    assert path.read_text() == text, "run  python -m tests.meta.write_tables"
    assert all(f"`{name}`" in text or f"def {name}(" in text for name in METHODS)


def test_the_two_commands_come_first():
    code = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    assert [line.split("#")[0].strip() for line in code.splitlines()] == ["make study", "make test"]


def test_the_example_runs():
    example = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    scope: dict[str, object] = {}
    for block in example:
        exec(block, scope)
    o, A, v = scope["out"].o, scope["A"], scope["v"].repeat_interleave(4, 2)
    assert torch.allclose(torch.einsum("bhti,bihv->bthv", A, v), o, atol=1e-5)
    assert torch.allclose(scope["reference"].float(), o, atol=1e-5)


def test_links_lead_somewhere():
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target and re.fullmatch(r"[\w./-]+", target):
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_method_is_in_the_study():
    from analysis.cases import known

    assert known() == set(METHODS)
