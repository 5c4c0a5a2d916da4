"""Hypothesis profiles, and the reasons for which a test is skipped."""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
settings.register_profile("dev", max_examples=15, **COMMON)
settings.register_profile("ci", max_examples=40, derandomize=True, database=None, print_blob=True, **COMMON)
settings.register_profile("deep", max_examples=2000, print_blob=True, **COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

torch.set_num_threads(1)  # the tensors are tiny; threads only cost


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
