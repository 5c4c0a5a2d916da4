"""The one-page report of the study. Every number and every ranking in it is computed from the table."""

from pathlib import Path
from typing import Any

import pandas as pd

from .figures import FIGURES
from .study import pooled


def markdown(rows: list[list[str]]) -> str:
    """A Markdown table; the first row is the head."""
    return "\n".join("| " + " | ".join(row) + " |" for row in [rows[0], ["--"] * len(rows[0]), *rows[1:]])


def number(x: float) -> str:
    """Three digits at most, never 0 for something that is not."""
    return f"{x:.3g}" if x < 0.01 or x >= 10 else f"{x:.2f}"


def errors(table: pd.DataFrame, group: str) -> str:
    """Relative error by case and layer, with the total variation behind it."""
    part = pooled(table[table.group == group], ["case", "layer"])
    layers = list(part.layer.unique())
    rows = [["", "state", *(f"layer {layer}" for layer in layers)]]
    for case, own in part.groupby("case", sort=False):
        cells = [f"{number(e)} ({number(tv)})" if tv == tv else number(e) for e, tv in zip(own.error, own.total_variation, strict=True)]
        rows.append([str(case), f"{own.state.iloc[0]:.3g}" if own.state.iloc[0] > 1e6 else f"{own.state.iloc[0]:,.0f}", *cells])
    return markdown(rows)


def best(table: pd.DataFrame, group: str, contains: str = "") -> str:
    """The best case of a group, layer by layer."""
    part = pooled(table[(table.group == group) & table.case.str.contains(contains)], ["layer", "case"])
    chosen = part.loc[part.groupby("layer").error.idxmin()]
    return "; ".join(f"layer {row.layer}: {row.case} ({number(row.error)})" for row in chosen.itertuples())


def comparison(table: pd.DataFrame, better: str, worse: str) -> str:
    """In how many layers one case beats another, with the errors."""
    part = pooled(table[table.case.isin([better, worse])], ["layer", "case"]).pivot(index="layer", columns="case", values="error")
    if not {better, worse} <= set(part):
        return f"{better} and {worse} were not both measured."
    wins = int((part[better] < part[worse]).sum())
    pairs = ", ".join(f"{a:.3f} against {b:.3f} in layer {layer}" for layer, a, b in zip(part.index, part[better], part[worse], strict=True))
    return f"{better} has the smaller error than {worse} in {wins} of {len(part)} layers ({pairs})."


def report(table: pd.DataFrame, about: dict[str, Any]) -> str:
    """The report as Markdown."""
    layers = ", ".join(str(x) for x in table.layer.unique())
    quick = "**This is a quick run: short texts, few steps. Its numbers only show that everything works.**\n\n" if about["quick"] else ""
    return f"""# How far from softmax attention?

{quick}Every method below replaces softmax attention by something with a smaller state. We took the queries, keys and values of a trained
model ({about["model"]}, layers {layers}, all heads, after rotary embedding), let each method compute the attention output from them, and compared
it with true softmax attention. Two held-out texts ({" and ".join(about["held_out"])}), {about["tokens"]} tokens each.

**How to read the tables.** A cell is *relative error (total variation)*. Relative error: Frobenius norm of the output's error over all heads and
positions, divided by that of the output; 1 is as bad as answering zero. Total variation: mean over positions and heads of half the sum of
|difference| of the attention weights; 0 is equal, 1 is disjoint for weights that sum to one. *State*: numbers a KV head must keep for the next
token; softmax keeps {about["tokens"]} x {about["key_and_value"]} = {about["tokens"] * about["key_and_value"]:,} here.

## The order of a read

Softmax sums all orders of the score; here the exponential's Taylor series is cut after order N, with keys as they are or minus their mean.
Odd orders are not positive and can divide by almost zero: order 1 is far off for that reason. A Taylor order with many features has a huge
state; these rows show what an order *means*, not a practical method. Best: {best(table, "order")}.

{errors(table, "order")}

![Taylor orders](orders.png)

## A window and sinks

Softmax over the last W keys only, with or without the first four tokens (sinks). Best: {best(table, "window")}.

{errors(table, "window")}

![Windows](windows.png)

## Slots and levels, without a window

The past is compressed into slots by gates, which were fitted for {about["steps"]} steps on {len(about["fit"])} other texts (g = logsigmoid(k W + b) / 8
from the rotated keys{", shared by all heads" if about["shared_gates"] else ", one projection a KV head"}; MetaLA and MVA also a low-order query r = q W_r).
{comparison(table, "MVA-2, equal state", "GSA, equal state")} {comparison(table, "MVA-2, equal state", "MVA-3, equal state")}
{comparison(table, "GSA, equal state", "MetaLA, equal state")}

{errors(table, "slots")}

![Slots](slots.png)

## A window and slots

The window holds the last 64 keys, the slots what has left it. *Soft* integration weights the two by their attention mass, *hard* by one fitted
number a head. {comparison(table, "GSA-SW, soft, 4 sinks", "GSA-SW, hard, 4 sinks")} {comparison(table, "MVA-2-SW, soft, 4 sinks", "MVA-2-SW, hard, 4 sinks")}
{comparison(table, "GSA-SW, soft, 4 sinks", "window 64 + 4 sinks")}

{errors(table, "window and slots")}

![Integration](integration.png)

## Features without decay

Softmax's exponential is replaced by a product of features: a fixed map, or learned ones, of queries and keys that pass through fitted affine
maps of each head, with as many columns as fill a state of about 6,144 numbers. Best: {best(table, "features")}.

{errors(table, "features")}

## Recurrences with decay or correction

Order 1 in mapped queries and keys, no sum to divide by. The maps, the gates and the write strengths were fitted as above; RetNet's and
SUPRA's decays are theirs. Mamba has a matrix for every value channel, so there is no one matrix to compare. SUPRA's state is that of its
heads and cannot be chosen. Best: {best(table, "recurrences")}.
{comparison(table, "Gated DeltaNet", "GSA, equal state")} {comparison(table, "Gated DeltaNet", "MVA-2, equal state")}

{errors(table, "recurrences")}

## A window and features

The window or segment of 64 keys again, its past kept in features. LoLCATs is soft by its own maximum, Infini-attention hard by segments.
{comparison(table, "GLA-SW, soft, 4 sinks", "GLA-SW, hard, 4 sinks")} {comparison(table, "MVA-2-SW, soft, 4 sinks", "GLA-SW, soft, 4 sinks")}

{errors(table, "window and features")}

## All of them

Error against the size of the state, up to softmax's own: its KV cache of {about["tokens"]} tokens is the right end, where the error is zero.
Taylor orders from 2 on need more than that. Families of equal state are drawn side by side.

![States](states.png)

## What this does not show

One small model, {len(about["held_out"])} texts, gates fitted for a minute rather than trained with the model, and the model's own weights left as they are. An
error of the attention output is not a loss in perplexity. A larger state is harder to fit in {about["steps"]} steps: a row with doubled state says what this fit reached,
not what the method can. The paper's methods are trained; this measures approximation alone.

Every number is in study.csv, by layer, head and text. mva_ref {about["mva_ref"]}, torch {about["torch"]}, Python {about["python"]}, seed {about["seed"]}.
"""


def write_report(table: pd.DataFrame, about: dict[str, Any], out: Path) -> Path:
    """Figures and report.md in `out`; returns the report's path."""
    from .figures import draw_all
    from .study import write

    draw_all(table, about, out)
    assert {f"{name}.png" for name in FIGURES} <= {p.name for p in out.iterdir()}
    write(out / "report.md", report(table, about))
    return out / "report.md"
