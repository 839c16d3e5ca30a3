"""What commands do where little can be printed, with rows that somebody has edited, and with odd figures."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import experiment_cases
import pytest
from experiment_cases import TINY, error_lines, invoke, silent

from bitempered.experiments import cells, compare_report, recipes
from bitempered.experiments import report as report_parts
from bitempered.experiments.files import BadRows, read_rows, write_rows
from bitempered.experiments.losses import Loss
from bitempered.experiments.recipes import compare

tiny = experiment_cases.tiny
PROTOCOL_B = Path(__file__).parents[1] / "results" / "protocol-b"


def report(folder, out, **environment):
    shutil.copytree(PROTOCOL_B, folder)
    command = [sys.executable, "-m", "bitempered", "report", str(folder)]
    variables = {**os.environ, **environment} if environment else None
    return subprocess.run(command, stdout=out, stderr=subprocess.PIPE, timeout=120, env=variables)


def test_what_an_encoding_lacks_is_a_question_mark(tmp_path):
    done = report(tmp_path / "rows", subprocess.PIPE, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, b"")
    assert b" ? " in done.stdout  # a plus-minus sign


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_output_that_cannot_be_written_gets_one_line(tmp_path):
    with open("/dev/full", "wb") as full:
        done = report(tmp_path / "rows", full)
    assert done.returncode == 1
    assert done.stderr == b"bitempered: cannot print the output: [Errno 28] No space left on device\n"


def damaged(tiny, folder, name, change):
    """Copy a finished comparison and change its last row of a file."""
    shutil.copytree(tiny[1], folder)
    rows = read_rows(folder / name)
    change(rows[-1])
    write_rows(folder / name, rows)
    return folder


@pytest.mark.parametrize("name", ["test_last", "validation_chosen", "chosen_epoch", "date"])
def test_a_row_without_its_results_is_named(name, tiny, tmp_path):
    folder = damaged(tiny, tmp_path / "rows", "compare.jsonl", lambda row: row.pop(name))
    message = rf"bi-tempered at noise 0.4, seed 1 lacks {name}; delete the row to train it again"
    with pytest.raises(BadRows, match=message):
        cells.run(TINY, folder, silent)


@pytest.mark.parametrize(
    ("values", "message"), [(None, "a row has no accuracies by epoch"), ([0.5], "rows have 2 and 1 epochs")]
)
def test_damaged_curves_get_one_line(values, message, tiny, tmp_path):
    folder = damaged(tiny, tmp_path / "rows", "curves.jsonl", lambda row: row.update(test=values))
    done = invoke("report", folder)
    assert done.exit_code == 1
    assert f"curves.jsonl is damaged: {message}" in done.stderr
    assert len(error_lines(done)) == 1
    with pytest.raises(BadRows, match=message):
        compare.render(folder / "compare.jsonl")


@pytest.mark.parametrize("smoothing", [-1, 1e308])
def test_rows_with_odd_smoothing_get_one_line(smoothing, tiny, tmp_path):
    folder = damaged(tiny, tmp_path / "rows", "compare.jsonl", lambda row: row.update(smoothing=smoothing))
    with pytest.raises(BadRows, match="label_smoothing must be between 0 and 1"):
        recipes.render(folder)
    assert json.loads((folder / "compare.jsonl").read_text().splitlines()[-1])["smoothing"] == smoothing


# Figures


def drawn(losses, epochs):
    """Draw a comparison with made-up accuracies; return its figure, laid out."""
    recipe = experiment_cases.comparison(losses=losses, levels=(0.4,), seeds=1, epochs=epochs)
    made = [recipe.setting(cell, 0) for cell in recipe.cells]
    rows = [row | {"chosen_epoch": 1, "test_chosen": 0.5 + place / 100} for place, row in enumerate(made)]
    curves = [row | {"test": [row["test_chosen"]] * epochs} for row in rows]
    figure = compare_report.figure(recipe, rows, curves)
    figure.draw_without_rendering()
    return figure


def test_long_names_of_losses_are_whole():
    schedules = [(1.25, 12.5, 0.123, 1.456, last) for last in (50.25, 60.25)]
    losses = [Loss("bi-tempered", (0.123, 1.987), schedule, smoothing=0.125) for schedule in schedules]
    figure = drawn((Loss("logistic"), *losses), 60)
    texts = figure.legends[0].get_texts()
    assert {text.get_text().replace("\n", "") for text in texts} >= {loss.text for loss in losses}
    for text in texts:
        box = text.get_window_extent()
        assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1
        assert figure.bbox.y0 <= box.y0 < box.y1 <= figure.bbox.y1


def test_twelve_lines_of_a_loss_look_different():
    names = [("bi-tempered", place < 2) for place in range(12)] + [("gce", False)] * 5
    assert len(set(report_parts.looks(names))) == 17
    assert report_parts.looks(names[:4]) == [("tab:blue", style) for style in report_parts.MARKS]


def test_one_epoch_is_one_tick_and_its_marks_are_inside():
    axes = drawn((Loss("logistic"), Loss("mae")), 1).axes[0]
    assert axes.get_xticks().tolist() == [1]
    low, high = axes.get_ylim()
    margin = 0.02 * (high - low)
    assert low + margin < 50 < 51 < high - margin
