"""Delta rules: recurrences that correct what they hold before they add to it."""

from ..method import Method

ROWS: tuple[Method, ...] = ()
