"""The rows of the registry, by family."""

from . import decayed, delta, hybrid, kernel, paper

ROWS = (*paper.ROWS, *kernel.ROWS, *decayed.ROWS, *delta.ROWS, *hybrid.ROWS)
