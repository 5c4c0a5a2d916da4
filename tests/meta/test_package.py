"""The package itself: what importing it loads, who may import whom, how a reference is written down."""

import ast
import graphlib
import importlib.metadata
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mva_ref

ROOT = Path(__file__).parents[2]
FILES = sorted(path for package in ("mva_ref", "analysis") for path in (ROOT / package).rglob("*.py"))
NAIVE = [path for path in FILES if path.is_relative_to(ROOT / "mva_ref" / "naive")]

FOUNDATION = {"mva_ref._version", "mva_ref.types", "mva_ref.method", "mva_ref.checks", "mva_ref.frame", "mva_ref.ring"}
FACE = {"mva_ref", "mva_ref.models", "mva_ref.types", "mva_ref._version"}

# The dependency law: (what it holds for, what that may import beside the standard library). The first row that fits counts;
# a name stands for itself and all below it, but "mva_ref" for the public face only.
ONLY = (
    ("mva_ref._version", set()),
    ("mva_ref.types", {"torch"} | FOUNDATION),
    ("mva_ref.method", {"torch"} | FOUNDATION),
    ("mva_ref.checks", {"torch"} | FOUNDATION),
    ("mva_ref.frame", {"torch"} | FOUNDATION),
    ("mva_ref.ring", {"torch"} | FOUNDATION),
    ("mva_ref.naive", {"torch", "mva_ref.naive"} | FOUNDATION),
    ("mva_ref.fast", {"torch", "triton", "mva_ref.fast"} | FOUNDATION),
)
# The same for the rest, whose other packages are free: what it may import of ours.
OURS = (
    ("mva_ref.testing", {"mva_ref", "mva_ref.testing", "mva_ref.naive", "mva_ref.registry", "mva_ref.api"} | FOUNDATION),
    ("mva_ref.models", {"mva_ref", "mva_ref.models", "mva_ref.naive", "mva_ref.fast", "mva_ref.registry", "mva_ref.api"} | FOUNDATION),
    ("mva_ref.cli", {"analysis", "mva_ref.testing"} | FACE),
    ("analysis", {"analysis"} | FACE),
)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path) for path in FILES}


def statements(node: ast.AST, on_import: bool) -> Iterator[ast.AST]:
    """All nodes below one; with on_import only those that run when the module is imported."""
    if on_import and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        return
    if on_import and isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        for child in node.orelse:
            yield from statements(child, on_import)
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from statements(child, on_import)


def imports(source: str, module: str, is_package: bool, on_import: bool = False) -> set[str]:
    """The full names of what a module imports: of a module where the name is one of ours, else of what it is taken from."""
    found = set()
    for node in statements(ast.parse(source), on_import):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: len(module.split(".")) - node.level + is_package] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            found |= {full if (full := f"{origin}.{alias.name}") in MODULES else origin for alias in node.names}
    return found


def file_imports(path: Path, on_import: bool = False) -> set[str]:
    return imports(path.read_text("utf-8"), module_name(path), path.name == "__init__.py", on_import)


def covers(allowed: str, name: str) -> bool:
    return name == allowed or (allowed != "mva_ref" and name.startswith(f"{allowed}."))


def breaches(module: str, imported: set[str]) -> set[str]:
    """What a module imports against the dependency law."""
    others = {name for name in imported if name.partition(".")[0] not in sys.stdlib_module_names}
    for rules, ours_only in ((ONLY, False), (OURS, True)):
        for scope, allowed in rules:
            if covers(scope, module):
                judged = {name for name in others if name.partition(".")[0] in ("mva_ref", "analysis")} if ours_only else others
                return {name for name in judged if not any(covers(one, name) for one in allowed)}
    return set()


def tag(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_importing_the_package_loads_nothing_heavy():
    heavy = ["torch", "triton", "transformers", "hypothesis", "matplotlib", "pandas"]
    code = f"import sys, mva_ref; dir(mva_ref); print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_the_version_is_that_of_the_distribution():
    try:
        installed = importlib.metadata.version("mva-ref")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("mva-ref is not installed")
    assert mva_ref.__version__ == installed


@pytest.mark.parametrize("path", FILES, ids=tag)
def test_dependency_law(path):
    assert not breaches(module_name(path), file_imports(path))


@pytest.mark.parametrize(
    ("module", "source", "caught"),
    [
        ("mva_ref.types", "from .naive import gsa", "mva_ref.naive"),
        ("mva_ref.checks", "import numpy", "numpy"),
        ("mva_ref.naive.slots", "def f():\n    from ..fast import chunk", "mva_ref.fast.chunk"),
        ("mva_ref.naive.slots", "import triton.language as tl", "triton.language"),
        ("mva_ref.naive.slots", "from .. import registry", "mva_ref.registry"),
        ("mva_ref.fast.chunk", "from mva_ref import naive", "mva_ref.naive"),
        ("mva_ref.testing.budgets", "import mva_ref.fast.chunk", "mva_ref.fast.chunk"),
        ("mva_ref.models.load", "import analysis", "analysis"),
        ("mva_ref.cli", "from .naive.slots import gsa", "mva_ref.naive.slots"),
        ("analysis.study", "from mva_ref.naive import gsa", "mva_ref.naive"),
    ],
)
def test_the_law_catches(module, source, caught):
    assert breaches(module, imports(source, module, is_package=False)) == {caught}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("mva_ref.naive.slots", "import math\nimport torch.nn.functional\nfrom ..types import Output\nfrom .writes import write_map"),
        ("mva_ref.fast.chunk", "import triton\nfrom ..frame import form"),
        ("mva_ref.models.load", "import transformers\nfrom .. import naive\nfrom ..registry import METHODS"),
        ("analysis.study", "import pandas\nimport mva_ref as mva\nfrom mva_ref.models import load\nfrom . import texts"),
    ],
)
def test_the_law_allows(module, source):
    assert not breaches(module, imports(source, module, is_package=False))


def test_no_import_cycles():
    paths = [path for path in FILES if path.is_relative_to(ROOT / "mva_ref")]
    order = graphlib.TopologicalSorter({module_name(path): file_imports(path, on_import=True) & MODULES for path in paths})
    order.prepare()  # raises CycleError, which names the cycle


@pytest.mark.parametrize("path", NAIVE, ids=tag)
def test_a_reference_file_fits_150_lines(path):
    assert len(path.read_text("utf-8").splitlines()) <= 150


@pytest.mark.parametrize("path", NAIVE, ids=tag)
def test_every_reference_says_what_it_is(path):
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            text = ast.get_docstring(node) or ""
            missing = [part for part in ("Equation", "Shapes", "Numerics", "Source", ">>>") if part not in text]
            assert not missing, f"{path.name}:{node.lineno} {node.name}"
