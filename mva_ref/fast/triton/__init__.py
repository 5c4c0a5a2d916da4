"""Triton kernels for slots and levels. Importing this package imports Triton; importing mva_ref does not import this package."""
