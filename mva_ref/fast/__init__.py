"""Optimised forms. `chunk` is plain torch and linear in T. Nothing here imports mva_ref.naive: that is what it is checked against."""
