"""Ten real documents, as tokens: what the studies on a pretrained model read.

The documents are the beginnings of texts from the standard library of Python 3.11. Both the text and its tokens for SmolLM2 are data
files of this package, because the library's text differs between releases of Python. `python -m analysis.texts`, run with Python 3.11,
makes them again and says where they differ.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib.resources
import json
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

    from transformers import PreTrainedTokenizerBase

TOKENS = 512
TEXT_TOKENS = 1100  # the committed text is longer, for tokenizers that need fewer tokens and for perplexity on 1,024 tokens

FIT = ("decimal", "doctest", "difflib", "threading", "statistics", "ipaddress", "heapq", "idle")
HELD_OUT = ("topics", "email")

# name: (how the text is made, the file in the standard library)
SOURCES = {
    "topics": ("the values of `topics`, in sorted order of their keys, joined by newlines", "pydoc_data/topics.py"),
    "email": ("the text of the file", "email/architecture.rst"),
    "decimal": ("all docstrings, in order, joined by empty lines", "_pydecimal.py"),
    "doctest": ("all docstrings, in order, joined by empty lines", "doctest.py"),
    "difflib": ("all docstrings, in order, joined by empty lines", "difflib.py"),
    "threading": ("all docstrings, in order, joined by empty lines", "threading.py"),
    "statistics": ("all docstrings, in order, joined by empty lines", "statistics.py"),
    "ipaddress": ("all docstrings, in order, joined by empty lines", "ipaddress.py"),
    "heapq": ("the text of the file", "heapq.py"),
    "idle": ("the text of the file", "idlelib/HISTORY.txt"),
}
LICENSE = "PSF-2.0, https://docs.python.org/3.11/license.html; Copyright (c) 2001-2023 Python Software Foundation. All Rights Reserved."


def load(name: str, tokenizer: PreTrainedTokenizerBase | None = None, tokens: int = TOKENS) -> list[int]:
    """The first tokens of a document.

    name       one of FIT (on which a method may be fitted) or HELD_OUT (on which it is judged; neither overlaps the other).
    tokenizer  None: the committed tokens of SmolLM2. Another one reads the committed text, and adds the special tokens it adds by default.
    tokens     how many; at most 512 without a tokenizer, about 1,100 with that of SmolLM2.

    Errors:    ValueError for an unknown name, or when the document has fewer tokens.
    """
    document = _document(name)
    ids: list[int] = document["ids"] if tokenizer is None else _tokenise(tokenizer, document["text"])
    if len(ids) < tokens:
        raise ValueError(f"tokens: the document {name!r} has {len(ids)} of this tokenizer, {tokens} were wanted")
    return ids[:tokens]


def _tokenise(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, verbose=False)["input_ids"])  # verbose: no warning that the text is longer than the model's context


def _file(name: str) -> Traversable:
    return importlib.resources.files("analysis") / "texts_data" / f"{name}.json"


@functools.cache
def _document(name: str) -> dict[str, Any]:
    if name not in SOURCES:
        raise ValueError(f"name: no document {name!r}, expected one of {', '.join(FIT + HELD_OUT)}")
    document: dict[str, Any] = json.loads(_file(name).read_text(encoding="utf-8"))
    return document


def make(name: str, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The document as the running Python's standard library gives it, cut at the first end of a line after TEXT_TOKENS tokens."""
    recipe, path = SOURCES[name]
    source = (Path(sysconfig.get_path("stdlib")) / path).read_text(encoding="utf-8")
    text = _topics() if name == "topics" else _docstrings(source) if "docstrings" in recipe else source
    text = text[: 8 * TEXT_TOKENS]  # enough for every document here, and quick to tokenise
    lines = text.splitlines(keepends=True)
    count = next(n for n in range(1, len(lines) + 1) if len(_tokenise(tokenizer, "".join(lines[:n]))) >= TEXT_TOKENS)
    text = "".join(lines[:count])
    description = f"Python 3.11 standard library, Lib/{path}: {recipe}; the beginning"
    return {"name": name, "source": description, "license": LICENSE, "text": text, "ids": _tokenise(tokenizer, text)[:TOKENS]}


def _topics() -> str:
    from pydoc_data.topics import topics

    return "\n".join(topics[key] for key in sorted(topics))


def _docstrings(source: str) -> str:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds) and ast.get_docstring(node)]
    return "\n\n".join(str(ast.get_docstring(node)) for node in sorted(nodes, key=lambda node: node.body[0].lineno))


def _json(document: dict[str, Any]) -> str:
    """One field a line."""
    return "{\n" + ",\n".join(f'"{field}": {json.dumps(value, ensure_ascii=False)}' for field, value in document.items()) + "\n}\n"


def main(arguments: list[str] | None = None) -> int:
    """Make every document again; 0 if all equal the committed ones."""
    parser = argparse.ArgumentParser(prog="python -m analysis.texts", description="Make the documents again and compare them.")
    parser.add_argument("--write", action="store_true", help="also replace the data files that differ")
    write = parser.parse_args(arguments).write

    from mva_ref.models.load import load as load_model

    _, tokenizer = load_model("smollm2")
    differ = 0
    for name in SOURCES:
        made = make(name, tokenizer)
        file = Path(str(_file(name)))
        committed = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        fields = [field for field in made if made[field] != committed.get(field)]
        differ += bool(fields)
        print(f"{name:12} {'differs: ' + ', '.join(fields) if fields else 'same'}")
        if fields and write:
            file.parent.mkdir(exist_ok=True)
            file.write_text(_json(made), encoding="utf-8")
    if differ:
        outcome = "replaced" if write else "nothing was written"
        print(f"{differ} of {len(SOURCES)} differ, made with Python {sys.version.split()[0]}; {outcome}")
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
