"""The pages of the protocols: rows, tables and figures of results/protocol-a and protocol-b."""

import re
from pathlib import Path

import numpy as np
import pytest

from bitempered.experiments.datasets import CIFAR100N
from bitempered.experiments.files import read_rows, write_rows
from bitempered.experiments.losses import Loss
from bitempered.experiments.recipes import protocols
from bitempered.experiments.streams import Setting


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_page_states_its_rows_training_and_leaves_out_rows_of_another(name, tmp_path):
    folder = Path(__file__).parents[1] / "results" / f"protocol-{name}"
    rows = read_rows(folder / f"protocol-{name}.jsonl")
    other = [row | {"epochs": 7, "batch_size": 60, "learning_rate": 0.3, "momentum": 0.8} for row in rows[:2]]
    write_rows(tmp_path / f"protocol-{name}.jsonl", rows[1:] + other)
    page = protocols.render(tmp_path / f"protocol-{name}.jsonl")[f"protocol-{name}.md"].decode()
    assert "7 epochs, SGD at 0.3, momentum 0.8" in page
    assert "batches of 60" in page
    shown = [f"{100 * row['test_last']:.2f} |" in page for row in rows]
    assert shown == [True, True] + [False] * (len(rows) - 2)


@pytest.mark.parametrize("name", ["a", "b"])
def test_committed_rows_are_of_the_recipe_s_settings(name):
    """And their page says which are annealed; tests/test_report.py renders it again."""
    folder = Path(__file__).parents[1] / "results" / f"protocol-{name}"
    rows, page = read_rows(folder / f"protocol-{name}.jsonl"), (folder / f"protocol-{name}.md").read_text()
    # `reproduce --seeds` has more seeds of the settings that hold nothing out.
    seeds = [row["seed"] if row["held_out"] else 0 for row in rows]
    settings = [
        Setting(Loss.of(row), row["noise"], seed, row["held_out"]) for row, seed in zip(rows, seeds, strict=True)
    ]
    assert set(settings) <= set(protocols.SETTINGS[name])
    logistic = [row for row in rows if row["loss"] == "logistic" and row["noise"] in (0.4, CIFAR100N.wrong)]
    last, best = (f"{100 * np.mean([row[key] for row in logistic]):.2f}" for key in ("test_last", "test_best"))
    assert re.search(rf"\| 40% \| logistic \| {last}[ ±.0-9]* \| {best}[ ±.0-9]* \| {len(logistic)} \|", page)
    assert (", from (1, 1) over epochs 5 to 40" in page) == any(row["schedule"] == [5, 40] for row in rows)


def test_a_figure_shows_the_epochs_measured_of_all_images_and_of_the_best_schedule():
    folder = Path(__file__).parents[1] / "results" / "protocol-a"
    rows, curves = (
        [row for row in read_rows(folder / name) if row["noise"] == 0.4 and row["seed"] in (0, 100)]
        for name in ("protocol-a.jsonl", "curves.jsonl")
    )
    constant = [row for row in rows if not row["schedule"] and not row["held_out"]]
    good, better = (
        next(row for row in rows if row["held_out"] and row["numbers"] == [0.5, t2] and row["schedule"][-1] == 120)
        for t2 in (2.3, 2.5)
    )
    panels = protocols.figure([*constant, better, good], curves).axes
    assert [axes.get_title() for axes in panels] == [title for _, title in protocols.PANELS]
    lines = {line.get_label(): line for line in panels[0].lines}
    held_out = "bi-tempered (0.5, 2.5), annealed; 5,000 images held out"
    assert lines.keys() == {*(str(Loss.of(row)) for row in constant), held_out}
    (gce,) = [row["epochs_measured"] for row in curves if row["loss"] == "gce" and not row["held_out"]]
    x, y = lines["gce (0.7)"].get_data()
    assert list(x) == [epoch["epoch"] for epoch in gce] == list(range(5, 201, 5))
    np.testing.assert_allclose(y, [100 * epoch["test"] for epoch in gce])

    on_all = better | {"held_out": 0, "seed": 0}
    again = protocols.figure([*constant, better, good, on_all], curves).axes[0]
    names = [line.get_label() for line in again.lines]
    assert "bi-tempered (0.5, 2.5), annealed" in names
    assert held_out not in names


def test_a_figure_of_runs_that_hold_images_out_only():
    folder = Path(__file__).parents[1] / "results" / "protocol-a"
    rows, curves = (
        [row for row in read_rows(folder / name) if row["held_out"]] for name in ("protocol-a.jsonl", "curves.jsonl")
    )
    assert len(protocols.figure(rows, curves).axes[0].lines) == 1  # the best schedule
    alone = [row for row in rows if row["loss"] == "gce"]
    assert [line.get_label() for line in protocols.figure(alone, []).axes[0].lines] == [
        "gce (0.7); 5,000 images held out"
    ]
