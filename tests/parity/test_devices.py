"""Every form on a GPU: the same numbers as on the CPU, in float64, with states that stay on the device."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mva_ref as mva
from mva_ref.frame import leaves, tree_map
from mva_ref.testing.strategies import problems

FORMS = [(row.name, impl) for row in mva.methods() for impl in row.portable()]


@pytest.mark.gpu
@pytest.mark.parametrize(("row", "impl"), FORMS)
@settings(max_examples=5)
@given(st.data())
def test_a_gpu_gives_what_the_cpu_gives(row, impl, data):
    p = data.draw(problems(row, max_T=20, fixed={"order": 2, "centre": "running"}))
    options = {} if row == "softmax" else {"output_final_state": True}
    there = tree_map(lambda x: x.cuda(), tuple({**p.inputs, **p.options}.values()))
    here, gpu = p.run(impl, **options), mva.attention(row, **dict(zip([*p.inputs, *p.options], there, strict=True)), **options, impl=impl)
    assert gpu.o.is_cuda and all(x.is_cuda for x in leaves(gpu.state))
    torch.testing.assert_close(gpu.o.cpu(), here.o, rtol=1e-9, atol=1e-9)
    for x, y in zip(leaves(gpu.state), leaves(here.state), strict=True):
        torch.testing.assert_close(x.cpu(), y, rtol=1e-9, atol=1e-9)
