"""mva_ref: references and verification for MVA, linear attention with high-order query-key integration.

    import mva_ref as mva
    out = mva.gsa(q, k, v, g)        # Output(o, state, lse)

One function per method, and `merge`, `weights`, `attention`, `methods`. Everything is loaded on first use: importing this
module costs nothing, and never loads triton, transformers, hypothesis or matplotlib.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from .api import attention, merge, methods, weights
    from .functions import (
        abc, based, delta, gated_delta, gla, gla_sw, gsa, gsa_sw, hedgehog, infini, linear, lolcats, mamba, mamba2, metala, mqva,
        mqvswa, mva, mva_sw, power, rebased, retnet, rwkv6, softmax, supra, t2r, taylor,
    )
    from .types import AbcState, ArgumentError, FeatureState, MatrixState, Output, SlotState, TaylorState, WindowState

# Names only, so that nothing is imported for them: a test compares them with the registry.
_API = ("attention", "merge", "methods", "weights")
_FUNCTIONS = (
    "abc", "based", "delta", "gated_delta", "gla", "gla_sw", "gsa", "gsa_sw", "hedgehog", "infini", "linear", "lolcats", "mamba",
    "mamba2", "metala", "mqva", "mqvswa", "mva", "mva_sw", "power", "rebased", "retnet", "rwkv6", "softmax", "supra", "t2r", "taylor",
)
_TYPES = ("AbcState", "ArgumentError", "FeatureState", "MatrixState", "Output", "SlotState", "TaylorState", "WindowState")
_MODULES = ("fast", "naive", "registry", "testing")

__all__ = ["__version__", *_API, *_FUNCTIONS, *_TYPES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name in _API:
        return getattr(import_module(".api", __name__), name)
    if name in _FUNCTIONS:
        return getattr(import_module(".functions", __name__), name)
    if name in _TYPES:
        return getattr(import_module(".types", __name__), name)
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES])
