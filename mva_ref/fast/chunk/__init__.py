"""The chunked form in plain torch: linear in T, for CPUs and for fitting. Theory: docs/theory/chunks.md (P9, P27, P28)."""

from .forms import gsa, gsa_sw, metala, mva, mva_sw

__all__ = ["gsa", "gsa_sw", "metala", "mva", "mva_sw"]
