"""The first study: how far every method is from true softmax attention, on a real model's q, k, v.

Per layer, head and held-out text: the relative error of the output and the total variation of the weights. One small CSV a cell (layer,
case) is written as soon as it is done, so an interrupted run goes on where it stopped, and cells run in several processes.
"""

import hashlib
import json
import os
import platform
import signal
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from tqdm import tqdm

import mva_ref as mva
from mva_ref.models.capture import QKV, capture
from mva_ref.models.load import load

from . import fit as fitting
from . import texts
from .cases import ROWS, Case, cases
from .parametrise import MEMORY, SHARED
from .parametrise import METHODS as PARAMETRISED


@dataclass(frozen=True)
class Config:
    """What decides the numbers of a study. Two runs with the same config give the same files."""

    model: str = "smollm2"
    layers: tuple[int, ...] | None = (0, 10, 29)  # None: all
    tokens: int = texts.TOKENS
    steps: int = fitting.STEPS
    seed: int = 0
    quick: bool = False

    def fingerprint(self, layers: tuple[int, ...], key_and_value: int) -> dict[str, Any]:
        """Config, versions and constants, as they are written beside the results."""
        return {
            **asdict(replace(self, layers=layers)), "key_and_value": key_and_value,
            "mva_ref": mva.__version__, "torch": torch.__version__, "python": platform.python_version(),
            "held_out": texts.HELD_OUT, "fit": texts.FIT, "rates": fitting.RATES, "batch": fitting.BATCH, "shared_gates": SHARED,
            "memory": MEMORY,
        }


def quick(config: Config) -> Config:
    """The same study in a minute: fewer cases, shorter texts, fewer steps, two layers. Its numbers are not the study's."""
    layers = config.layers if config.layers is None or len(config.layers) < 2 else (config.layers[0], config.layers[-1])
    return replace(config, quick=True, tokens=192, steps=20, layers=layers)


def measure(case: Case, qkv: QKV, parameters: fitting.Parameters | None) -> pd.DataFrame:
    """One case on one text in one layer, in float64: one row a query head.

    error_sq and target_sq are squared Frobenius norms over positions, so that errors of several heads can be pooled exactly;
    total_variation is the mean over positions of sum_i |A_ti - softmax_ti| / 2, NaN where value channels have matrices of their own.
    """
    x = fitting.to(qkv, torch.float64)
    truth, A_true = mva.softmax(x.q, x.k, x.v, scale=x.scale).o, mva.weights("softmax", x.q, x.k, x.v, scale=x.scale)
    given = {"q": x.q, "k": x.k, "v": x.v, "scale": x.scale, **case.options} if parameters is None else parameters.inputs(x)
    if ROWS[case.method].one_matrix:
        A = mva.weights(case.method, **given)
        o = torch.einsum("bhti,bihv->bthv", A, x.v.repeat_interleave(x.q.shape[2] // x.k.shape[2], 2))
        variation = ((A - A_true).abs().sum(-1) / 2).mean((0, 2))
    else:
        o, variation = mva.attention(case.method, **given).o, torch.full((x.q.shape[2],), torch.nan)
    error, target = ((z.square().sum((0, 1, 3))) for z in (o - truth, truth))
    return pd.DataFrame({
        "head": range(x.q.shape[2]), "relative_error": (error / target).sqrt().tolist(),
        "total_variation": variation.tolist(), "error_sq": error.tolist(), "target_sq": target.tolist(),
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


class Job(NamedTuple):
    """The cells (layer, case) of one study: each is fitted, measured and written on its own, so that they run in any order and place."""

    documents: dict[str, dict[int, QKV]]
    config: Config
    folder: Path

    def path(self, layer: int, case: Case) -> Path:
        """Where the rows of a cell are kept."""
        return self.folder / f"{layer:02d}-{case.key}.csv"

    def run(self, layer: int, case: Case) -> str:
        """Do one cell, on one thread: sums over threads would depend on how many there are."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            rows = self.rows(layer, case)
        finally:
            torch.set_num_threads(threads)
        write(self.path(layer, case), rows.to_csv(index=False))
        return f"layer {layer}: {case.label}"

    def rows(self, layer: int, case: Case) -> pd.DataFrame:
        documents, config = self.documents, self.config
        fit = [documents[n][layer] for n in texts.FIT]
        fitted = fitting.fit(case, fit, config.steps, config.seed) if case.method in PARAMETRISED else None
        rows = pd.concat([measure(case, documents[text][layer], fitted).assign(text=text) for text in texts.HELD_OUT])
        D, V = fit[0].q.shape[-1], fit[0].v.shape[-1]
        what = {
            "layer": layer, "group": case.group, "case": case.label, "method": case.method, "order": case.options.get("order"),
            "centre": case.options.get("centre"), "window": case.options.get("window"), "sinks": case.options.get("sinks"),
            "integration": case.options.get("integration"), "levels": case.levels or None, "slots": case.slots or None,
            "width": case.width or None, "state": case.state(D, V, config.tokens), "mva_ref": mva.__version__,
        }
        return rows.assign(**what)[[*what, "text", *rows.columns[:-1]]]


_job: Job  # of a worker process


def _start_worker(job: Job) -> None:
    global _job
    _job = job
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # cells are written whole or not at all


def _run_cell(cell: tuple[int, Case]) -> str:
    return _job.run(*cell)


def compute(config: Config, out: Path, workers: int = 1) -> pd.DataFrame:
    """Run the study, or what is missing of it, and return the tidy table. Writes out/study.csv, out/study.json and out/parts/.

    The cells are spread over `workers` processes; the numbers do not depend on how many.
    """
    documents, layers = read_documents(config)
    first = documents[texts.HELD_OUT[0]][layers[0]]
    print_ = config.fingerprint(layers, first.q.shape[-1] + first.v.shape[-1])
    digest = hashlib.sha256(json.dumps(print_, sort_keys=True).encode()).hexdigest()[:12]
    job = Job(documents, config, out / "parts" / digest)
    cells = [(layer, case) for layer in layers for case in cases(first.q.shape[-1], first.v.shape[-1], config.quick)]
    todo = [cell for cell in cells if not job.path(*cell).exists()]
    bar = tqdm(total=len(cells), initial=len(cells) - len(todo), desc="study")
    with bar, ExitStack() as stack:
        if workers == 1 or len(todo) < 2:
            done = (job.run(*cell) for cell in todo)
        else:
            pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (job,))
            stack.callback(pool.shutdown, wait=False, cancel_futures=True)
            done = (future.result() for future in as_completed([pool.submit(_run_cell, cell) for cell in todo]))
        for label in done:
            bar.set_postfix_str(label)
            bar.update()
    tables = [pd.read_csv(job.path(*cell)) for cell in cells]
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
