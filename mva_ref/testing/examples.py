"""One valid call of any registry row, from a seed: what a test that needs no search starts from."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import elu, logsigmoid, softplus

from ..checks import BROADCAST, SHAPES
from ..method import load
from ..registry import method
from ..types import Output

DECAYS = ("g", "g_levels", "low_g", "head_decay", "A")      # what may be anything in [-inf, 0]
# From normal numbers to what an argument may be; every other tensor may be anything.
INTO: dict[str, Callable[[Tensor], Tensor]] = {
    **dict.fromkeys(DECAYS, logsigmoid), **dict.fromkeys(("beta", "window_weight", "hard_weight", "branch_gate"), torch.sigmoid),
    "dt": softplus,
}
SIZES = {"B": 2, "T": 5, "H": 2, "HQ": 4, "D": 3, "V": 6, "M": 7, "L": 2, "E": 4}


def into(key: str, x: Tensor) -> Tensor:
    """Normal numbers as values that the argument may have."""
    return INTO[key](x) if key in INTO else x


def elu_plus_one(x: Tensor) -> Tensor:
    """A positive feature map: elu(x) + 1."""
    return elu(x) + 1


REQUIRED: dict[str, Any] = {"order": 2, "window": 3, "segment": 2, "power": 2, "feature_map": elu_plus_one}


class Problem(NamedTuple):
    """One call of one method: `inputs` by name in positional order, `options` by name."""

    name: str
    inputs: dict[str, Tensor]
    options: dict[str, Any]

    def run(self, impl: str | None = "naive", **changes: Any) -> Output:
        """Call the method; `changes` replace inputs or options."""
        from ..api import attention

        return attention(self.name, **{**self.inputs, **self.options, "impl": impl, **changes})

    def weights(self, impl: str | None = "naive", **changes: Any) -> Tensor:
        """The T x T matrix A of the call."""
        from ..api import weights

        return weights(self.name, **{**self.inputs, **self.options, "impl": impl, **changes})

    def matrices(self, **changes: Any) -> Tensor:
        """A for each value channel, [B, HQ, V or 1, T, T]: one for all, but where the registry says that the channels differ."""
        if method(self.name).one_matrix:
            return self.weights(**changes)[:, :, None]
        v = self.inputs["v"]
        token = torch.eye(v.shape[1], dtype=v.dtype)[:, None, :, None, None]            # one token at a time, in all channels
        return torch.stack([self.run(v=x.expand(v.shape), **changes).o for x in token], -1).permute(0, 2, 3, 1, 4)


def axes(name: str, letter: str) -> dict[str, int]:
    """Where the tensors of a row have a letter's axis: axes("gla", "T") is {"q": 1, ...}."""
    letters = {key: x.split() for key, x in {**BROADCAST, **SHAPES, **method(name).shapes}.items()}
    return {key: x.index(letter) for key, x in letters.items() if letter in x}


def by_head(p: Problem) -> Problem:
    """The same problem with the defaults that depend on the index of a head written out, so that heads may be taken apart."""
    H = p.inputs["v"].shape[2]
    defaults = {key: load(dotted)(H).to(p.inputs["v"].dtype) for key, dotted in method(p.name).by_head.items()}
    return p._replace(options={**p.options, **{key: x for key, x in defaults.items() if p.options.get(key) is None}})


def shape(name: str, key: str, sizes: dict[str, int]) -> list[int]:
    """The shape of one tensor of a row at the given sizes."""
    return [sizes[letter] for letter in {**SHAPES, **method(name).shapes}[key].split()]


def example(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float64, **sizes: int) -> Problem:
    """A call with everything the row requires and nothing else; `sizes` are letters: T=9, HQ=4, ..."""
    row, rng = method(name), torch.Generator().manual_seed(seed)

    def tensor(key: str) -> Tensor:
        x = torch.randn(shape(name, key, {**SIZES, **sizes}), generator=rng, dtype=torch.float64)
        return into(key, x).to(dtype)

    required = {key: tensor(key) if key in row.shapes else REQUIRED[key] for key in row.required}
    return Problem(row.name, {key: tensor(key) for key in row.inputs}, required)
