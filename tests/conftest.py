"""Hypothesis profiles, the reasons for which a test is skipped, and the count of what the property tests cover."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is decorated, so before any kernel module is imported

COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
settings.register_profile("dev", max_examples=15, **COMMON)
settings.register_profile("ci", max_examples=40, derandomize=True, database=None, print_blob=True, **COMMON)
settings.register_profile("deep", max_examples=2000, print_blob=True, **COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

torch.set_num_threads(1)  # the tensors are tiny; threads only cost

PROPERTY = Path(__file__).parent / "property"
PAIRS = pytest.StashKey[set[tuple[str, str]]]()


def pairs(item: pytest.Item) -> set[tuple[str, str]]:
    """(proposition or property, registry row) of one test: the docstring names the first, the argument or the marker `rows` the second."""
    if not isinstance(item, pytest.Function) or not item.path.is_relative_to(PROPERTY):
        return set()
    label = (item.function.__doc__ or "").partition(":")[0].strip()
    if label == "Property":
        label = item.originalname
    rows = {name for mark in item.iter_markers("rows") for name in mark.args}
    if hasattr(item, "callspec") and "row" in item.callspec.params:
        row = item.callspec.params["row"]
        rows.add(getattr(row, "name", row))
    return {(label, row) for row in rows}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[PAIRS] = {pair for item in items for pair in pairs(item)}
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if found := config.stash.get(PAIRS, None):
        terminalreporter.write_line(f"{len(found)} (proposition or property, registry row) pairs")
