"""The three oracles agree: mpmath from the definitions, float64 matrices, float64 recurrence; and so does the chunked form."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import mva_ref as mva
from mva_ref.testing.strategies import normal, problems

from .exact import KNOWN, exact

FORMS = {row.name: row.portable() for row in mva.methods() if row.name in KNOWN}


@pytest.mark.parametrize("row", FORMS)
@settings(max_examples=40)
@given(st.data())
def test_every_form_is_the_definition_in_forty_digits(row, data):
    """Property: o and lse of each implementation, with all options, against sums over tokens and slots in mpmath."""
    p = data.draw(problems(row, max_T=4))
    if row == "metala" and data.draw(st.booleans(), label="self-augmentation"):
        M = p.inputs["r"].shape[-1]
        p.options["self_augmentation"] = data.draw(normal(M, label="self_augmentation"))
    o, lse, condition = exact(row, p.inputs, p.options)
    assume(condition < 1e6)     # an odd order's normaliser can come close to 0: then float64 has few digits, whoever computes it
    tolerance = 1e-13 * (10 + condition)
    for impl in FORMS[row]:
        out = p.run(impl)
        torch.testing.assert_close(out.o, o, rtol=tolerance, atol=tolerance, msg=lambda m, impl=impl: f"{impl}: {m}")
        if out.lse is not None:
            torch.testing.assert_close(out.lse, lse, rtol=tolerance, atol=tolerance, msg=lambda m, impl=impl: f"{impl}: {m}")
