"""The figures of the study: each draws one group of cases, one panel a layer."""

from collections.abc import Callable
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd

from .cases import STATE
from .study import pooled

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

MARKERS = "osD^vPX*"


def marked(part: pd.DataFrame) -> list[tuple[str, pd.DataFrame, str]]:
    """The curve of every system, each with a marker of its own."""
    curves = [(str(name), curve) for name, curve in part.groupby("system", sort=False)]
    assert len(curves) <= len(MARKERS), "a system would share its marker or be left out"
    return [(*curve, marker) for curve, marker in zip(curves, MARKERS, strict=False)]


def draw_orders(df: pd.DataFrame, ax: Axes) -> None:
    """Error against Taylor order, keys as they are and centred."""
    part = pooled(df[df.group == "order"].assign(centre=lambda x: x.centre.fillna("none")), ["centre", "order"])
    for (centre, curve), marker in zip(part.groupby("centre", sort=False), "os", strict=False):
        ax.plot(range(len(curve)), curve.error, marker=marker, label={"none": "raw", "mean": "keys centred"}[str(centre)])
    ax.set_xticks(range(part.order.nunique()), [f"{n:.0f}" for n in part.order.unique()])
    ax.set(yscale="log", xlabel="Taylor order")
    ax.axhline(1, color="0.5", lw=0.8, ls=":")


def draw_windows(df: pd.DataFrame, ax: Axes) -> None:
    """Error against window, with and without sinks."""
    part = pooled(df[df.group == "window"], ["sinks", "window"])
    for (sinks, curve), marker in zip(part.groupby("sinks"), "os", strict=False):
        ax.plot(range(len(curve)), curve.error, marker=marker, label=f"{sinks:.0f} sinks")
    ax.set_xticks(range(part.window.nunique()), [f"{w:.0f}" for w in part.window.unique()])
    ax.set(xlabel="window (keys, own key included)")


def draw_slots(df: pd.DataFrame, ax: Axes) -> None:
    """Error of the slot methods against their state."""
    part = pooled(df[df.group == "slots"].assign(system=lambda x: x.case.str.split(",").str[0]), ["system", "state"])
    for name, curve, marker in marked(part):
        ax.plot(curve.state, curve.error, marker=marker, label=name)
    states = [x for x in sorted(part.state.unique()) if x % df.unit.iloc[0] == 0]
    ax.set_xticks(states, [f"{s:,.0f}" for s in states])
    ax.set(xlabel="state (numbers per KV head)")


def draw_integration(df: pd.DataFrame, ax: Axes) -> None:
    """Soft against hard integration, beside the window alone."""
    joined = df.group.isin(["window and slots", "window and features"])
    part = pooled(df[joined | ((df.group == "window") & (df.window == 64))], ["case"])
    place = range(len(part), 0, -1)  # one order in every panel, the window alone on top: panels share their axis
    colour = ["C3" if "hard" in c or "Infini" in c else "C0" if "soft" in c or "LoLCATs" in c else "0.6" for c in part.case]
    ax.barh(place, part.error, color=colour, height=0.7)
    ax.set_yticks(place, part.case)
    ax.set(xlabel="relative output error")
    ax.grid(axis="y", visible=False)


COLOURS = {"order": "0.5", "window": "k", "slots": "C0", "window and slots": "C3", "features": "C2", "recurrences": "C1",
           "window and features": "C4"}
BESIDE = {"slots": 0.9, "recurrences": 1.1}  # families of equal state are drawn side by side
TOP = 1.25  # a point above it is drawn at the edge, with its error beside it


def system(case: str) -> str:
    """What a case is without its size."""
    if case.startswith("order"):
        return f"Taylor {case}"
    if case.startswith("window"):
        return "window + 4 sinks" if "sinks" in case else "window"
    return case.removesuffix(", equal state").removesuffix(", doubled state")


def draw_states(df: pd.DataFrame, ax: Axes) -> None:
    """Error of every method against its state, up to that of softmax, which has no error."""
    cache = df.cache.iloc[0]
    part = pooled(df[(df.state <= cache) & (df.centre != "mean")], ["group", "case"]).assign(system=lambda x: x.case.map(system))
    ax.axhline(part.error[part.case == "order 0"].iloc[0], color="0.5", lw=0.8, ls=":", label="Taylor order 0, the mean")
    for group, own in part[part.case != "order 0"].groupby("group", sort=False):
        for name, curve, marker in marked(own):
            equal = (curve.state / df.unit.iloc[0] % 1 + 0.04) % 1 < 0.05
            x = curve.state.where(~equal, curve.state * BESIDE.get(str(group), 1))
            ax.plot(x, curve.error.clip(upper=TOP), marker=marker, ms=3.5, lw=0.6, color=COLOURS[str(group)], label=name)
            for at, error in zip(x, curve.error, strict=True):
                if error > TOP:
                    ax.annotate(f"{error:.3g}", (at, TOP), (4, -2), textcoords="offset points", fontsize=5)
    ax.plot([cache], [0], marker="*", ms=7, color="k", ls="none", label="softmax, KV cache", clip_on=False, zorder=3)
    ax.set(xscale="log", xlabel="state (numbers per KV head)", ylim=(0, 1.05 * TOP), xlim=(1500, cache))
    ticks = [x for x in (2000, 6000, 20_000, 60_000) if x < cache]
    ax.set_xticks(ticks, [f"{x:,}" for x in ticks])
    ax.minorticks_off()


FIGURES: dict[str, tuple[str, Callable[[pd.DataFrame, Axes], None]]] = {
    "orders": ("Taylor orders", draw_orders),
    "windows": ("Sliding windows and sinks", draw_windows),
    "slots": ("Slots and levels at equal and at doubled state, gates fitted on other texts", draw_slots),
    "integration": ("Window of 64 and slots or features: soft against hard integration", draw_integration),
    "states": ("Every method: error against state, up to softmax's own", draw_states),
}


def draw_figure(name: str, table: pd.DataFrame, about: dict[str, Any]) -> Figure:
    """One figure: its title, a panel a layer, and where the numbers come from."""
    title, draw = FIGURES[name]
    layers = list(table.layer.unique())[:4]
    wide, legend_below = name == "integration", name == "states"
    fig, axes = plt.subplots(1, len(layers), squeeze=False, sharey=True, figsize=(7.0, 4.2 if legend_below else 3.4 if wide else 2.6))
    table = table.assign(cache=about["tokens"] * about["key_and_value"], unit=STATE * about["key_and_value"] // 128)
    for ax, layer in zip(axes[0], layers, strict=True):
        draw(table[table.layer == layer], ax)
        ax.set_title(f"layer {layer}")
    if not wide:
        axes[0][0].set_ylabel("relative output error")
    if legend_below:
        fig.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=5.5)
    elif not wide:
        axes[0][0].legend()
        if axes[0][0].get_yscale() == "linear":
            axes[0][0].set_ylim(bottom=0)  # last: a limit set earlier would freeze the shared axis at the first panel's range
    fig.suptitle(title, fontsize=9)
    fig.supxlabel(f"{about['model']}, {' + '.join(about['held_out'])}, {about['tokens']} tokens each, attention in float64, "
                  f"seed {about['seed']}, mva_ref {about['mva_ref']}", fontsize=6, color="0.4")
    return fig


def draw_all(table: pd.DataFrame, about: dict[str, Any], out: Path) -> list[Path]:
    """Write every figure as PDF and PNG; return the PNGs. The same table gives the same bytes."""
    paths = []
    with as_file(files("analysis") / "mva_ref.mplstyle") as style, plt.style.context(str(style)):
        for name in FIGURES:
            fig = draw_figure(name, table, about)
            for suffix, metadata in (("pdf", {"CreationDate": None, "Producer": None, "Creator": None}), ("png", {"Software": None})):
                fig.savefig(out / f"{name}.{suffix}", metadata=metadata)
            plt.close(fig)
            paths.append(out / f"{name}.png")
    return paths
