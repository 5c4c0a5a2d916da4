"""Studies and figures. `compute` returns a tidy table, `draw` draws it; the mathematics is in mva_ref."""
