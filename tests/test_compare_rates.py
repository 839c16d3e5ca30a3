"""`bitempered compare`: a rate for each loss, the default schedule, noisy tables, and what the reader is told."""

import inspect
import json
import re
from dataclasses import replace

import numpy as np
import pytest
from experiment_cases import assert_rendered, comparison, error_lines, invoke, results, silent
from rich.console import Console

from bitempered import cli, schedules
from bitempered.experiments import cells, checkpoints, compare_report, files, progress, report
from bitempered.experiments.cells import Cell
from bitempered.experiments.losses import Loss
from bitempered.experiments.recipes import compare
from bitempered.experiments.recipes.compare import Contender, request

LOGISTIC, MAE, CONSTANT = Loss("logistic"), Loss("mae"), Loss("bi-tempered", (0.8, 1.2))
NAMES = ("ant", "bee", "cat")


def tiny_request(losses="logistic,mae", **options):
    """Two epochs of a narrow net."""
    made = request(losses=tuple(map(Contender.parse, losses.split(","))), **options)
    training = replace(made.comparison.training, epochs=2, width=16)
    return replace(made, comparison=replace(made.comparison, training=training))


def write_table(path, n, seed, flip=0.0):
    """Three classes, far apart; some labels moved to the next class."""
    rng = np.random.default_rng(seed)
    y = np.arange(n) % 3
    x = 4 * y[:, None] + rng.normal(size=(n, 2))
    shown = (y + (rng.random(n) < flip)) % 3
    lines = [f"{a:.3f},{b:.3f},{NAMES[label]}" for (a, b), label in zip(x, shown, strict=True)]
    path.write_text("\n".join(["a,b,kind", *lines]) + "\n")
    return shown


@pytest.fixture
def fleets(monkeypatch):
    """The members and the split of every fleet that is trained, as a list that grows."""
    seen, real = [], cells.train
    monkeypatch.setattr(
        cells, "train", lambda t, members, split, **o: seen.append((members, split)) or real(t, members, split, **o)
    )
    return seen


# Rates


def test_every_loss_tries_the_same_rates_and_keeps_its_best(tmp_path, fleets):
    asked = tiny_request("logistic,mae,gce:0.7@0.1", levels=(0.0, 0.4), seeds=1, rates=(1e-5, 1e-2))
    made, rows, tried = compare.run(asked, tmp_path, silent)
    trials = [(level, loss, rate, seed) for level in (0.0, 0.4) for seed in compare.SEARCH_SEEDS
              for loss in ("logistic", "mae") for rate in (1e-5, 1e-2)]  # fmt: skip
    assert [(row["noise"], row["loss"], row["learning_rate"], row["seed"]) for row in tried] == trials
    assert set(compare.SEARCH_SEEDS).isdisjoint(made.seeds)
    # Two epochs at 1e-5 move nothing, so that 1e-2 is better for both losses.
    shown = [(row["noise"], row["loss"], row["learning_rate"]) for row in rows]
    assert shown == [
        (n, loss, rate) for n in (0.0, 0.4) for loss, rate in (("logistic", 0.01), ("mae", 0.01), ("gce", 0.1))
    ]
    assert files.read_rows(tmp_path / "search" / "search.jsonl") == tried
    assert files.read_rows(tmp_path / "compare.jsonl") == rows
    assert [len(members) for members, _ in fleets] == [4, 4, 4, 4, 6]

    searched, at_edge = compare_report.rate_notes(made, tried)
    assert {float(rate) for rate in re.findall(r"\d\S*\d", searched.split(" on ")[0])} == {1e-5, 1e-2}
    assert list(map(int, re.findall(r"(\d+) rates x (\d+) seeds .* = (\d+) trials", searched)[0])) == [2, 2, 4]
    # Of two rates the best is always the first or the last; gce was given its own.
    assert re.findall(r"(logistic|mae|gce)\b.*? at (\d+%)", at_edge) == [
        (loss, level) for level in ("0%", "40%") for loss in ("logistic", "mae")
    ]
    report.write(tmp_path, compare_report.pages(made, rows, tried, cells.curves_of(tmp_path, rows)))
    assert_rendered(tmp_path, "compare.csv", "compare.md", "compare.png")
    again = compare.run(asked, tmp_path, silent)
    assert again == (made, rows, tried)
    assert len(fleets) == 5  # nothing was trained again


def trial(loss, rate, *accuracies, noise=0.4, seed=100):
    names = ("validation_last", "validation_chosen", "test_last", "test_chosen")
    row = {"loss": loss.name, "numbers": list(loss.numbers), "schedule": None, "rescale": False}
    return {**row, "noise": noise, "learning_rate": rate, "seed": seed, **dict(zip(names, accuracies, strict=True))}


def test_the_best_rate_is_chosen_on_validation_labels_at_both_epochs():
    tried = [
        # The best epoch alone would choose 0.1, one seed alone 0.1, the test labels 1.
        trial(MAE, 0.01, 0.50, 0.55, 0.1, 0.1), trial(MAE, 0.01, 0.50, 0.55, 0.1, 0.1, seed=101),
        trial(MAE, 0.1, 0.40, 0.57, 0.2, 0.2), trial(MAE, 0.1, 0.52, 0.56, 0.2, 0.2, seed=101),
        trial(MAE, 1.0, 0.30, 0.50, 0.9, 0.9), trial(MAE, 1.0, 0.30, 0.50, 0.9, 0.9, seed=101),
        # Of other cells.
        trial(MAE, 1.0, 0.99, 0.99, 0.9, 0.9, noise=0.0), trial(LOGISTIC, 1.0, 0.99, 0.99, 0.9, 0.9),
    ]  # fmt: skip
    assert compare.best_rate(tried, MAE, 0.4, (0.01, 0.1, 1.0)) == 0.01
    assert compare.best_rate([trial(MAE, rate, 0.5, 0.5, 0, 0) for rate in (0.1, 0.2)], MAE, 0.4, (0.1, 0.2)) == 0.1


def test_one_rate_is_used_without_a_search(tmp_path, fleets):
    made, rows, tried = compare.run(tiny_request(levels=(0.0,), seeds=1, rates=(0.02,)), tmp_path, silent)
    assert len(fleets) == 1
    assert not tried
    assert not (tmp_path / "search").exists()
    assert {row["learning_rate"] for row in rows} == {0.02}
    assert not re.search(r"\d", " ".join(compare_report.rate_notes(made, tried)))  # neither rates nor trials


def test_the_same_loss_at_two_rates_has_two_lines(tmp_path):
    asked = tiny_request("logistic@0.01,logistic@0.02", levels=(0.4,), seeds=2)
    made, rows, _ = compare.run(asked, tmp_path, silent)
    shown = compare_report.lines(made, rows)
    assert [(line[0].removesuffix(" !"), line[1]) for line in shown] == [("logistic", "0.01"), ("logistic", "0.02")]
    assert shown[0][2:] != shown[1][2:]
    names = {line.get_label() for line in compare_report.figure(made, rows, []).axes[0].lines}
    assert {"logistic, rate 0.01", "logistic, rate 0.02"} <= names


def test_an_interrupted_search_goes_on(tmp_path, monkeypatch, fleets):
    asked = tiny_request(levels=(0.4,), seeds=1, rates=(1e-3, 1e-2))
    monkeypatch.setattr(checkpoints, "SAVE_SECONDS", 0)
    seen = []

    def interrupt(done, total, text):
        seen.append((done, total))
        if text.startswith("rates, seed 101: epoch 2"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare.run(asked, tmp_path / "stopped", interrupt)
    assert [row["seed"] for row in files.read_rows(tmp_path / "stopped" / "search" / "search.jsonl")] == [100] * 4
    texts = []
    rows, tried = compare.run(asked, tmp_path / "stopped", lambda done, total, text: texts.append((done, text)))[1:]
    shown = [re.sub(", mean validation.*", "", text) for _, text in texts]
    assert shown == ["rates, seed 101: epoch 2", "seed 0: epoch 1", "seed 0: epoch 2"]
    # Four trials with two seeds, then two cells with one, two epochs each.
    assert [done for done, _ in texts] == [16, 18, 20]
    assert {total for _, total in seen} == {20}
    whole = compare.run(asked, tmp_path / "whole", silent)
    assert (results(rows), results(tried)) == (results(whole[1]), results(whole[2]))
    assert not list((tmp_path / "stopped").glob("**/*.checkpoint"))


# The default schedule


@pytest.mark.parametrize(("classes", "epochs"), [(2, 1), (5, 100), (10, 150), (100, 143)])
def test_the_default_recipe_is_that_of_schedules(classes, epochs):
    ours, theirs = compare.default_recipe(classes, epochs), schedules.default(classes, epochs)
    assert ours.name == "bi-tempered"
    for epoch in range(epochs + 1):
        assert ours.at(epoch).numbers == pytest.approx(theirs(epoch), abs=1e-6)  # its epochs have six decimal places


def test_rows_say_what_the_default_recipe_was(tmp_path):
    asked = tiny_request("bi-tempered,bi-tempered:0.8:1.2", levels=(0.0,), seeds=1, rates=(1e-3,))
    made, rows, _ = compare.run(asked, tmp_path, silent)
    loss = compare.default_recipe(10, 2)
    assert loss.schedule is not None
    assert [row["loss"] for row in rows] == ["bi-tempered"] * 2
    assert [row["numbers"] for row in rows] == [list(loss.numbers), [0.8, 1.2]]
    assert [row["schedule"] for row in rows] == [list(loss.schedule), None]
    assert [row["rescale"] for row in rows] == [False, False]
    assert [Cell.of(row) for row in rows] == list(made.cells)
    (note,) = compare_report.schedule_notes(made)
    assert note.startswith(f"{loss}: ")
    assert f"{loss.schedule[0]:g} and {loss.schedule[-1]:g}, through (0, 1.75) in epoch 0.8." in note


# Tables whose labels are noisy already


@pytest.fixture
def table(tmp_path):
    labels = write_table(tmp_path / "noisy.csv", 150, 0, flip=0.2)
    write_table(tmp_path / "clean.csv", 60, 1)
    options = [
        "compare", "--dataset", tmp_path / "noisy.csv", "--label-column", "kind", "--epochs", "20", "--seeds", "1",
        "--losses", "logistic,mae", "--rates", "0.01", "--out", tmp_path / "out",
    ]  # fmt: skip
    return labels, options


def test_the_labels_of_a_table_are_used_as_given(table, fleets):
    given, options = table
    done = invoke(*options)
    assert done.exit_code == 0, done.output
    ((member, _), split), *_ = fleets
    np.testing.assert_array_equal(member.train, split.train[1])
    np.testing.assert_array_equal(member.validation, split.validation[1])
    counts = sum(np.bincount(y, minlength=3) for y in (member.train, member.validation, split.test[1]))
    assert counts.tolist() == np.bincount(given).tolist()
    shown = " ".join(done.stdout.split())
    assert "noisy.csv, labels as given: accuracy on test labels as noisy as the rest" in shown
    assert "no noise is added" in shown
    assert "even a perfect model scores about 60%" in shown
    assert "--test FILE" in shown


def test_labels_to_test_on_are_not_called_as_noisy_if_noise_is_added_to_the_others(table):
    _, options = table
    shown = " ".join(invoke(*options, "--noise", "0.4", "--epochs", "1").stdout.split())
    assert "noisy.csv, +40% label noise: accuracy on test labels as given" in shown


def test_a_clean_test_file_is_what_is_tested_on(table, tmp_path, fleets):
    _, options = table
    options = [*options, "--test", tmp_path / "clean.csv", "--json"]
    rows = json.loads(invoke(*options).stdout)
    (_, split), *_ = fleets
    assert np.bincount(split.test[1]).tolist() == [20, 20, 20]
    assert len(split.train[1]) + len(split.validation[1]) == 150
    assert {row["test_file"] for row in rows} == {str(tmp_path / "clean.csv")}
    assert {row["noise"] for row in rows} == {0.0}
    assert rows[0]["test_chosen"] > 0.85  # classes four standard deviations apart; noisy rows allow 0.8
    assert_rendered(tmp_path / "out", "compare.csv", "compare.md", "compare.png")
    page = " ".join((tmp_path / "out" / "compare.md").read_text().split())
    assert "# noisy.csv, labels as given: accuracy on clean test labels" in page
    assert "The test labels are those of clean.csv, taken to be clean." in page

    # Another number there is another run, the same file is not.
    assert json.loads(invoke(*options).stdout) == rows
    assert len(fleets) == 1
    write_table(tmp_path / "clean.csv", 60, 2)
    assert json.loads(invoke(*options).stdout)[0]["data"] != rows[0]["data"]
    assert len(fleets) == 2


def test_an_unknown_class_in_the_test_file_gets_one_line(table, tmp_path):
    _, options = table
    (tmp_path / "clean.csv").write_text("a,b,kind\n1,2,yak\n")
    done = invoke(*options, "--test", tmp_path / "clean.csv")
    assert done.exit_code == 1
    (line,) = error_lines(done)
    assert line.endswith("row 1: the class 'yak' is not in the training table, which has: ant, bee, cat")
    assert not (tmp_path / "out").exists()


def test_noise_that_is_added_to_a_table_is_named(table):
    _, options = table
    done = invoke(*options, "--noise", "0,0.2", "--epochs", "1")
    assert done.exit_code == 0, done.output
    assert "as given" in done.stdout
    assert "+20%" in done.stdout
    assert "Noise (symmetric) is added to the labels to train and validate on." in " ".join(done.stdout.split())


# What went wrong


@pytest.mark.parametrize("found", [None, "class ant is never predicted"])
def test_a_loss_that_is_not_finite_is_the_first_problem(found):
    assert cells.problem({"training_loss": [0.1, 0.2], "problem": [None, found]}, 1) == found
    assert cells.problem({"training_loss": [0.1, None], "problem": [None, found]}, 1) == cells.NOT_FINITE


def test_a_run_that_gave_up_a_class_is_marked(tmp_path):
    """With the names of the classes in the message, on the command line."""
    write_table(tmp_path / "table.csv", 150, 0)
    done = invoke(
        "compare", "--dataset", tmp_path / "table.csv", "--label-column", "kind", "--epochs", "3", "--seeds", "2",
        "--losses", "logistic@0.02,logistic@1e-12,mae@1e30", "--out", tmp_path / "out",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    marked = [line.split()[:3] for line in done.stdout.splitlines() if line.strip().startswith(("logistic", "mae"))]
    assert marked == [["logistic", "0.02", marked[0][2]], ["logistic", "!", "1e-12"], ["mae", "!", "1e+30"]]
    text = " ".join(done.stdout.split())
    assert re.search(r"! logistic, 2 of 2 runs: .*class(es)? (ant|bee|cat)", text)
    assert "! mae, 2 of 2 runs:" in text
    assert "! To try: larger learning rates (--rates); more --epochs" in text
    rows = files.read_rows(tmp_path / "out" / "compare.jsonl")
    assert [bool(row["problem"]) for row in rows] == [False, True, True] * 2


@pytest.mark.parametrize(("loss", "told"), [("mae", True), ("bi-tempered:0.8:1.2", True), ("bi-tempered", False)])
def test_nobody_is_told_to_try_what_has_just_failed(tmp_path, loss, told):
    write_table(tmp_path / "table.csv", 150, 0)
    done = invoke(
        "compare", "--dataset", tmp_path / "table.csv", "--label-column", "kind", "--epochs", "2", "--seeds", "1",
        "--losses", f"{loss}@1e-12", "--out", tmp_path / "out",
    )  # fmt: skip
    text = " ".join(done.stdout.split())
    assert "! To try: larger learning rates (--rates); more --epochs" in text
    assert ("bi-tempered without numbers" in text) == told


# What the reader sees


def printed(recipe, rows, width=80):
    console = Console(width=width, highlight=False)
    with console.capture() as capture:
        console.print(compare_report.table(recipe, rows))
    return capture.get()


@pytest.mark.parametrize(("dataset", "levels"), [("digits", (0.0, 0.4)), ("digits", (0.4,)), ("t.csv", (0.0, 0.25))])
def test_five_losses_fit_eighty_columns(dataset, levels):
    losses = (LOGISTIC, Loss("gce", (0.7,)), replace(CONSTANT, numbers=(0.2, 1.75), schedule=(7.5, 45.0)), CONSTANT,
              Loss("sce", (0.15, 0.25)))  # fmt: skip
    recipe = comparison(dataset, losses, levels, rate=0.00025)
    rows = [
        {
            **recipe.setting(cell, seed),
            "test_last": 0.5 + 0.1 * seed,
            "test_chosen": 0.8 + 0.1 * seed,
            "problem": "none",
        }
        for cell in recipe.cells
        for seed in recipe.seeds
    ]
    shown = printed(recipe, rows).splitlines()
    assert max(map(len, shown)) <= 80
    for loss in losses:
        lines = [line for line in shown if f" {loss} ! " in f" {line}"]
        assert len(lines) == len(levels)
        assert all(re.search(r" 0\.00025 +55\.0 ± 7\.1 +85\.0 ± 7\.1 *$", line) for line in lines)


def test_progress_is_a_line_now_and_then_where_there_is_no_terminal(monkeypatch, capsys):
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    tell = progress.ProgressLines()
    clock[0] = 1000  # while data were read
    tell(100, 500, "seed 0")  # an earlier process had done 100
    assert capsys.readouterr().err == " 20%: seed 0\n"
    for second in range(0, 200, 2):
        clock[0] = 1000 + second
        tell(100 + second, 500, "seed 0")
    lines = capsys.readouterr().err.splitlines()
    # Every 6 s, the first multiple of 2 after 5, for a minute; then every 30 s.
    assert len(lines) == 9 + 4
    assert lines[0] == " 21%, about 7 min left: seed 0"
    assert lines[-1] == " 55%, about 4 min left: seed 0"


def test_help_has_every_option():
    text = invoke("compare", "--help").stdout
    for name in inspect.signature(cli.compare).parameters:
        assert f"--{name.removeprefix('as_').replace('_', '-')}" in text
