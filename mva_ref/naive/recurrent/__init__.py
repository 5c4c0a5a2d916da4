"""The same functions, one token at a time with explicit state: other algebra, second oracle. Slow on purpose."""

from .composed import gsa_sw, mva, mva_sw
from .slots import abc, gsa, metala
from .tokens import softmax, taylor

__all__ = ["abc", "gsa", "gsa_sw", "metala", "mva", "mva_sw", "softmax", "taylor"]
