"""A window joined with features, or segments with a memory."""

from ..method import Method

ROWS: tuple[Method, ...] = ()
