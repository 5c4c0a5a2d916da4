"""The figures of the study: each draws one group of cases, one panel a layer."""

from collections.abc import Callable
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd

from .study import pooled

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure


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
    for (system, curve), marker in zip(part.groupby("system", sort=False), "osD^", strict=False):
        ax.plot(curve.state, curve.error, marker=marker, label=str(system))
    states = sorted(part.state.unique())
    ax.set_xticks(states, [f"{s:,.0f}" for s in states])
    ax.set(xlabel="state (numbers per KV head)")


def draw_integration(df: pd.DataFrame, ax: Axes) -> None:
    """Soft against hard integration, beside the window alone."""
    part = pooled(df[(df.group == "window and slots") | ((df.group == "window") & (df.window == 64))], ["case"])
    place = range(len(part), 0, -1)  # one order in every panel, the window alone on top: panels share their axis
    colour = ["C3" if "hard" in c else "C0" if "soft" in c else "0.6" for c in part.case]
    ax.barh(place, part.error, color=colour, height=0.7)
    ax.set_yticks(place, part.case)
    ax.set(xlabel="relative output error")
    ax.grid(axis="y", visible=False)


FIGURES: dict[str, tuple[str, Callable[[pd.DataFrame, Axes], None]]] = {
    "orders": ("Taylor orders", draw_orders),
    "windows": ("Sliding windows and sinks", draw_windows),
    "slots": ("Slots and levels at equal and at doubled state, gates fitted on other texts", draw_slots),
    "integration": ("Window of 64 and slots: soft against hard integration", draw_integration),
}


def draw_figure(name: str, table: pd.DataFrame, about: dict[str, Any]) -> Figure:
    """One figure: its title, a panel a layer, and where the numbers come from."""
    title, draw = FIGURES[name]
    layers = list(table.layer.unique())[:4]
    wide = name == "integration"
    fig, axes = plt.subplots(1, len(layers), squeeze=False, sharey=True, figsize=(7.0, 3.0 if wide else 2.6))
    for ax, layer in zip(axes[0], layers, strict=True):
        draw(table[table.layer == layer], ax)
        ax.set_title(f"layer {layer}")
    if not wide:
        axes[0][0].set_ylabel("relative output error")
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
