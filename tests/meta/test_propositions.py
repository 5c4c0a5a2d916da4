"""Propositions and tests belong together: every one is stated, proved, discussed and tested, and every property test says what it tests."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mva_ref.registry import METHODS

ROOT = Path(__file__).parents[2]
NUMBERS = set(range(1, 30))
LABEL = re.compile(r"(P([1-9]\d*)|Lemma|Property): \S")
FILES = sorted((ROOT / "tests" / "property").rglob("test_*.py"))
TESTS = [
    (f"{path.name}::{node.name}", node)
    for path in FILES
    for node in ast.walk(ast.parse(path.read_text("utf-8")))
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test")
]
SECTIONS = [
    (int(match[1]), match[0])
    for path in sorted((ROOT / "docs" / "theory").glob("*.md"))
    for match in re.finditer(r"^## P(\d+)\. .*?(?=^## |\Z)", path.read_text("utf-8"), re.MULTILINE | re.DOTALL)
]


@pytest.mark.parametrize("node", [pytest.param(node, id=name) for name, node in TESTS])
def test_a_property_test_says_what_it_tests(node):
    doc = ast.get_docstring(node)
    assert doc and LABEL.match(doc), "the docstring starts with `P<n>: `, `Lemma: ` or `Property: `"


@pytest.mark.parametrize("node", [pytest.param(node, id=name) for name, node in TESTS])
def test_the_rows_marker_names_rows(node):
    marks = [x for x in node.decorator_list if isinstance(x, ast.Call) and ast.unparse(x.func) == "pytest.mark.rows"]
    named = {arg.value for mark in marks for arg in mark.args if isinstance(arg, ast.Constant)}
    assert named <= set(METHODS)


def test_every_proposition_is_tested():
    labels = [LABEL.match(ast.get_docstring(node) or "") for _, node in TESTS]
    assert {int(label[2]) for label in labels if label and label[2]} == NUMBERS


def test_every_proposition_is_stated_once():
    assert sorted(number for number, _ in SECTIONS) == sorted(NUMBERS)


@pytest.mark.parametrize("text", [pytest.param(text, id=f"P{number}") for number, text in SECTIONS])
def test_a_proposition_is_stated_proved_and_discussed(text):
    found = re.findall(r"^\*\*(Proposition|Proof|Discussion)\.\*\* +\S", text, re.MULTILINE)
    assert found == ["Proposition", "Proof", "Discussion"]


def test_the_pairs_are_many():
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests/property"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    count = re.search(r"^(\d+) \(proposition or property, registry row\) pairs$", done.stdout, re.MULTILINE)
    assert count, done.stdout[-3000:]
    assert int(count[1]) >= 60
