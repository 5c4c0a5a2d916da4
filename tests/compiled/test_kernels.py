"""The Triton kernels as the compiler makes them for Hopper, run on a CPU: right numbers in every precision, no race, nothing out of bounds.

The interpreter knows neither bfloat16 products nor tiles, warps and barriers. This does, and it needs no GPU (tests/compiled/machine.py);
what is left to a GPU is what the assembler and the hardware make of it, and speed.
"""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

# What an output or a gradient may be off by, relative to its largest number.
BOUND = {"float32": 2e-6, "float16": 4e-3, "bfloat16": 3e-2}
CASES = {
    "one level, bfloat16, gentle gates": dict(method="gsa", dtype="bfloat16", sizes=dict(T=70, D=40, V=24, M=20)),
    "two levels, bfloat16, steep gates": dict(method="mva", dtype="bfloat16", sizes=dict(T=70, D=24, V=40, M=40, L=2), gates=4.0),
    "two levels, float32, small tiles": dict(method="mva", dtype="float32", sizes=dict(T=40, D=11, V=24, M=11, L=2)),
    "two levels, float16": dict(method="mva", dtype="float16", sizes=dict(T=40, D=40, V=11, M=24, L=2)),
}


def test_values_gradients_and_barriers_of_compiled_kernels(case):
    """Property: a compiled kernel agrees with the float64 reference, and its warps wait for each other."""
    env = {key: x for key, x in os.environ.items() if key != "TRITON_INTERPRET"}
    made = subprocess.run([sys.executable, "-m", "tests.compiled.launch", json.dumps(case)], capture_output=True, text=True, env=env)
    assert made.returncode == 0, made.stderr[-2000:]
    found = json.loads(made.stdout)
    assert not found["notes"]
    assert all(x <= BOUND[case["dtype"]] for x in found["errors"].values()), found["errors"]


@pytest.fixture(params=CASES.values(), ids=CASES)
def case(request):
    return request.param
