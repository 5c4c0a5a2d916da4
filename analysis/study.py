"""The first study: how far every method is from true softmax attention, on a real model's q, k, v.

Per layer, head and held-out text: the relative error of the output and the total variation of the weights. One small CSV a (layer, case)
is written as soon as it is done, so an interrupted run goes on where it stopped.
"""

import hashlib
import json
import os
import platform
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from tqdm import tqdm

import mva_ref as mva
from mva_ref.models.capture import QKV, capture
from mva_ref.models.load import load

from . import fit as fitting
from . import texts
from .cases import Case, cases


@dataclass(frozen=True)
class Config:
    """What decides the numbers of a study. Two runs with the same config give the same files."""

    model: str = "smollm2"
    layers: tuple[int, ...] | None = (0, 10, 29)  # None: all
    tokens: int = texts.TOKENS
    steps: int = fitting.STEPS
    seed: int = 0
    quick: bool = False

    def fingerprint(self, layers: tuple[int, ...]) -> dict[str, Any]:
        """Config, versions and constants, as they are written beside the results."""
        return {
            **asdict(replace(self, layers=layers)),
            "mva_ref": mva.__version__, "torch": torch.__version__, "python": platform.python_version(),
            "held_out": texts.HELD_OUT, "fit": texts.FIT, "rates": fitting.RATES, "batch": fitting.BATCH, "shared_gates": fitting.SHARED,
            "memory": fitting.MEMORY,
        }


def quick(config: Config) -> Config:
    """The same study in a minute: fewer cases, shorter texts, fewer steps, two layers. Its numbers are not the study's."""
    layers = config.layers if config.layers is None or len(config.layers) < 2 else (config.layers[0], config.layers[-1])
    return replace(config, quick=True, tokens=192, steps=20, layers=layers)


def measure(case: Case, qkv: QKV, parameters: fitting.Parameters | None) -> pd.DataFrame:
    """One case on one text in one layer, in float64: one row a query head.

    error_sq and target_sq are squared Frobenius norms over positions, so that errors of several heads can be pooled exactly;
    total_variation is the mean over positions of sum_i |A_ti - softmax_ti| / 2.
    """
    x = fitting.to(qkv, torch.float64)
    truth, A_true = mva.softmax(x.q, x.k, x.v, scale=x.scale).o, mva.weights("softmax", x.q, x.k, x.v, scale=x.scale)
    given = {"q": x.q, "k": x.k, "v": x.v, "scale": x.scale, **case.options} if parameters is None else parameters.inputs(x)
    A = mva.weights(case.method, **given)
    o = torch.einsum("bhti,bihv->bthv", A, x.v.repeat_interleave(x.q.shape[2] // x.k.shape[2], 2))
    error, target = ((z.square().sum((0, 1, 3))) for z in (o - truth, truth))
    return pd.DataFrame({
        "head": range(x.q.shape[2]), "relative_error": (error / target).sqrt().tolist(),
        "total_variation": ((A - A_true).abs().sum(-1) / 2).mean((0, 2)).tolist(), "error_sq": error.tolist(), "target_sq": target.tolist(),
    })


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, suffix=".part", encoding="utf-8") as file:
        file.write(text)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def read_documents(config: Config) -> tuple[dict[str, dict[int, QKV]], tuple[int, ...]]:
    """q, k, v of every text in every layer of the study, and the layers."""
    model, tokenizer = load(config.model)
    count = model.config.num_hidden_layers
    layers = tuple(range(count)) if config.layers is None else config.layers
    bad = [layer for layer in layers if not 0 <= layer < count]
    if bad:
        raise mva.ArgumentError(f"layers: {bad[0]} does not exist; {config.model} has layers 0 to {count - 1}")
    own = None if config.model == "smollm2" else tokenizer
    names = texts.HELD_OUT + texts.FIT
    return {name: capture(model, texts.load(name, own, config.tokens), layers) for name in tqdm(names, desc="reading texts")}, layers


def compute(config: Config, out: Path) -> pd.DataFrame:
    """Run the study, or what is missing of it, and return the tidy table. Writes out/study.csv, out/study.json and out/parts/."""
    documents, layers = read_documents(config)
    first = documents[texts.HELD_OUT[0]][layers[0]]
    D, V = first.q.shape[-1], first.v.shape[-1]
    print_ = config.fingerprint(layers)
    digest = hashlib.sha256(json.dumps(print_, sort_keys=True).encode()).hexdigest()[:12]
    todo = [(layer, case) for layer in layers for case in cases(D, V, config.quick)]
    tables = []
    for layer, case in (bar := tqdm(todo, desc="study")):
        bar.set_postfix_str(f"layer {layer}: {case.label}")
        part = out / "parts" / digest / f"{layer:02d}-{case.key}.csv"
        if not part.exists():
            fitted = fitting.fit(case, [documents[n][layer] for n in texts.FIT], config.steps, config.seed) if case.slots else None
            rows = pd.concat([measure(case, documents[text][layer], fitted).assign(text=text) for text in texts.HELD_OUT])
            what = {
                "layer": layer, "group": case.group, "case": case.label, "method": case.method, "order": case.options.get("order"),
                "centre": case.options.get("centre"), "window": case.options.get("window"), "sinks": case.options.get("sinks"),
                "integration": case.options.get("integration"), "levels": case.levels or None, "slots": case.slots or None,
                "state": case.state(D, V, config.tokens), "mva_ref": mva.__version__,
            }
            write(part, rows.assign(**what)[[*what, "text", *rows.columns[:-1]]].to_csv(index=False))
        tables.append(pd.read_csv(part))
    table = pd.concat([t.dropna(axis=1, how="all") for t in tables], ignore_index=True)
    table = table.reindex(columns=tables[0].columns)
    write(out / "study.csv", table.to_csv(index=False))
    write(out / "study.json", json.dumps(print_, indent=1) + "\n")
    return table


def pooled(table: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Relative error over all heads and positions (Frobenius) and mean total variation, for each value of `by`; order of rows kept."""
    groups = table.groupby(by, sort=False, dropna=False)
    sums = groups[["error_sq", "target_sq"]].sum()
    pool = pd.DataFrame({"error": (sums.error_sq / sums.target_sq) ** 0.5, "total_variation": groups.total_variation.mean()})
    return (pool if "state" in by else pool.assign(state=groups.state.first())).reset_index()
