"""`bitempered compare`: its recipe, its files, its command line, and what bad input gets."""

import inspect
import json
import shutil
import signal
import statistics
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from bitempered import cli
from bitempered.experiments import cells, files, runs
from bitempered.experiments import train as train_loop
from bitempered.experiments.data import Dataset, Split
from bitempered.experiments.datasets import default_training, load
from bitempered.experiments.losses import Loss
from bitempered.experiments.recipes import compare
from bitempered.experiments.recipes.compare import comparison
from bitempered.experiments.report import png
from bitempered.experiments.sources import DataError

TINY = replace(comparison(levels=(0.0, 0.4), seeds=2), training=replace(default_training("digits"), epochs=2, width=16))
TINY_OPTIONS = ["compare", "--noise", "0.4,0", "--seeds", "2", "--epochs", "1"]


def levels(recipe, *kept):
    return replace(recipe, cells=tuple(cell for cell in recipe.cells if cell.noise in kept))


def silent(done, total, text):
    pass


def invoke(*options):
    return CliRunner().invoke(cli.app, [str(option) for option in options])


def results(rows):
    """The rows without what may differ between two runs of one recipe."""
    return [{name: value for name, value in row.items() if name not in ("fleet", "fleet_seconds")} for row in rows]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return cells.run(TINY, folder, silent), folder


# Data


def test_split_is_stratified_disjoint_and_fixed_by_its_seed():
    split, same, other = load("digits", 0), load("digits", 0), load("digits", 1)
    parts = (split.train, split.validation, split.test)
    assert [len(y) for _, y in parts] == [500, 500, 797]
    for x, y in parts:
        assert x.dtype == np.float32
        assert x.min() >= 0
        assert x.max() <= 1
        # Digits has 174 to 183 of each class: about a tenth of every part.
        assert np.abs(np.bincount(y, minlength=10) / len(y) - 0.1).max() < 0.01
    images = [{row.tobytes() for row in x} for x, _ in parts]
    assert images[0].isdisjoint(images[1] | images[2])
    assert images[1].isdisjoint(images[2])
    np.testing.assert_array_equal(split.train[0], same.train[0])
    np.testing.assert_array_equal(split.test[0], other.test[0])
    assert {row.tobytes() for row in other.train[0]} != images[0]


# The recipe


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dataset": "cifar"}, "unknown dataset 'cifar'; choose from: digits, mnist, fashion-mnist, cifar100, a path"),
        ({"levels": (0.1, 1.5)}, r"noise levels must be in \[0, 1\], got \[0.1, 1.5\]"),
        ({"levels": (float("nan"),)}, "noise levels must be"),
        ({"levels": ()}, "noise levels must be"),
        ({"seeds": 0}, "seeds must be at least 1, got 0"),
        ({"seeds": -1}, "seeds must be at least 1, got -1"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"rates": (1.0, 2.0, 3.0)}, "one learning rate for each of the 2 losses, got 3"),
        ({"rates": (float("nan"),)}, r"learning rates must be positive and finite, got \[nan\]"),
        ({"rates": (float("inf"), 1.0)}, "learning rates must be positive and finite"),
        ({"rates": (0.0,)}, r"learning rates must be positive and finite, got \[0.0\]"),
        ({"losses": (Loss("mae"), Loss("mae"))}, "each loss can be named once, got mae, mae"),
        (
            {"noise_model": "gaussian"},
            "unknown noise model 'gaussian'; choose from: symmetric, symmetric-all",
        ),
        ({"network": "vgg"}, "unknown network 'vgg'; choose from: mlp, mnist_cnn, resnet56, resnet56-wide"),
        ({"noise_model": "human"}, "digits has no human labels; choose from: cifar100"),
    ],
)
def test_recipe_refuses_bad_values(change, message):
    with pytest.raises(ValueError, match=message):
        comparison(**change)


def test_rows_say_what_was_run_and_on_what(tiny):
    rows, folder = tiny
    cells = [(row["seed"], row["noise"], row["loss"]) for row in rows]
    assert cells == [(s, n, loss) for s in (0, 1) for n in (0.0, 0.4) for loss in ("logistic", "bi-tempered")]
    for row in rows:
        assert row["torch"] == torch.__version__
        assert row["fleet_seconds"] > 0
        assert row["fleet"] == 4
        assert row["commit"]
        assert row["date"]
        assert row["device"].startswith("cpu")
        assert 0 < row["test_last"] <= 1
        assert 1 <= row["chosen_epoch"] <= 2
        assert row["validation_chosen"] >= row["validation_last"]
    assert files.read_rows(folder / "compare.jsonl") == rows


def test_curves_are_the_runs_by_epoch(tiny):
    rows, folder = tiny
    curves = files.read_rows(folder / "curves.jsonl")
    assert len(curves) == len(rows)
    for row, curve in zip(rows, curves, strict=True):
        assert all(curve[name] == row[name] for name in ("loss", "noise", "seed", "learning_rate", "commit"))
        assert curve["test"][-1] == row["test_last"]
        assert curve["noisy"][-1] == row["train_last"]
        # The first of the epochs that are best on noisy validation labels.
        best = curve["validation"].index(max(curve["validation"]))
        assert (row["chosen_epoch"], row["test_chosen"]) == (best + 1, curve["test"][best])


def test_a_run_depends_on_its_settings_alone(tiny, tmp_path):
    rows, _ = tiny
    alone = cells.run(levels(TINY, 0.4), tmp_path, silent)
    for row, expected in zip(alone, [row for row in rows if row["noise"] == 0.4], strict=True):
        # Products of two matrices at once may round otherwise than products of four: a close decision or two.
        assert row["test_last"] == pytest.approx(expected["test_last"], abs=2.1 / 797)
        assert row["learning_rate"] == expected["learning_rate"]


def test_both_losses_at_temperature_one_train_alike(tmp_path):
    """With t1 = t2 = 1 the contenders share data, noise, weights, batches and gradient."""
    recipe = comparison(losses=(Loss("logistic"), Loss("bi-tempered", (1.0, 1.0))), levels=(0.2,), seeds=1, epochs=2)
    logistic, ours = cells.run(recipe, tmp_path, silent)
    # Rounding may differ in the last bit, and so flip a close decision or two among 797 and 500.
    assert ours["test_last"] == pytest.approx(logistic["test_last"], abs=2.1 / 797)
    assert ours["validation_last"] == pytest.approx(logistic["validation_last"], abs=2.1 / 500)


@pytest.mark.parametrize(
    ("model", "rate", "wrong"), [("symmetric", 0.4, 200), ("pair-flip", 0.4, 200), ("symmetric-all", 0.4, None)]
)
def test_noise_reaches_training_and_validation_but_not_test(model, rate, wrong, monkeypatch, tmp_path):
    seen = []

    def spy(training, members, split, **options):
        seen.append((members, split))
        raise KeyboardInterrupt

    monkeypatch.setattr(cells, "train", spy)
    with pytest.raises(KeyboardInterrupt):
        cells.run(comparison(levels=(rate,), seeds=1, noise_model=model), tmp_path, silent)
    ((ours, theirs), split), clean = seen[0], load("digits", 0)
    np.testing.assert_array_equal(split.test[1], clean.test[1])
    for part in ("train", "validation"):
        noisy, labels = getattr(ours, part), getattr(clean, part)[1]
        np.testing.assert_array_equal(noisy, getattr(theirs, part))
        changed = (noisy != labels).sum()
        # Over all classes, a tenth of the 200 that are drawn keep their label: 180, standard deviation 4.2.
        assert changed == wrong if wrong else abs(changed - 180) < 20
        if model == "pair-flip":
            assert set((noisy - labels) % 10) == {0, 1}


def test_human_labels_follow_their_images(tmp_path):
    rng = np.random.default_rng(0)
    labels, people = rng.integers(0, 100, 50), rng.integers(0, 100, 50)
    order = rng.permutation(50)
    rows = (order[:40], order[40:])
    np.savez(tmp_path / "cifar100n.npz", noisy_label=people, clean_label=labels)
    split = Split(*((None, labels[part]) for part in rows), (None, None), 100, rows)
    train, validation = cells.human_labels(split, tmp_path)
    np.testing.assert_array_equal(train, people[rows[0]])
    np.testing.assert_array_equal(validation, people[rows[1]])
    with pytest.raises(DataError, match="name with --data-dir"):
        cells.human_labels(split, None)


def test_human_labels_that_are_not_there_leave_nothing(tmp_path, monkeypatch):
    labels = np.arange(400) % 100
    parts = [(np.zeros((400, 3, 32, 32), np.uint8), labels)] * 2
    monkeypatch.setattr(cells, "read", lambda *_: Dataset("cifar100", *parts, 100, 200))
    with pytest.raises(DataError, match=r"cifar100n\.npz"):
        cells.run(comparison("cifar100", noise_model="human"), tmp_path / "out", silent, data_dir=tmp_path)
    assert not (tmp_path / "out").exists()


def test_any_table_with_a_label_column(tmp_path):
    rng = np.random.default_rng(0)
    kind, numbers = rng.integers(0, 2, 200), rng.normal(size=(2, 200))
    lines = [f"{k + 0.1 * a:.3f},{b:.3f},{'cat' if k else 'dog'}" for k, a, b in zip(kind, *numbers, strict=True)]
    (tmp_path / "pets.csv").write_text("\n".join(["weight,noise,animal", *lines]))
    result = invoke(
        "compare", "--dataset", tmp_path / "pets.csv", "--label-column", "animal", "--epochs", "30", "--seeds", "1",
        "--noise", "0,0.2", "--losses", "logistic,bi-tempered:0.5:1.5,mae", "--rates", "0.01", "--out", tmp_path,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    rows = files.read_rows(tmp_path / "compare.jsonl")
    assert len(rows) == 6
    assert min(row["test_chosen"] for row in rows) > 0.9  # the classes are ten standard deviations apart


# What a result belongs to


def write_table(path, seed=0):
    """Two columns that could be labels, each of which a number beside it tells."""
    rng = np.random.default_rng(seed)
    a, b = rng.integers(0, 2, (2, 60))
    x, y = np.stack([a, b]) + 0.1 * rng.normal(size=(2, 60))
    path.write_text("x,y,a,b\n" + "".join(f"{x[i]:.3f},{y[i]:.3f},{a[i]},{b[i]}\n" for i in range(60)))


def table_options(folder, label_column):
    return [
        "compare", "--dataset", folder / "table.csv", "--label-column", label_column, "--epochs", "1", "--seeds", "1",
        "--noise", "0.2", "--rates", "0.01", "--losses", "logistic,mae", "--out", folder / "out", "--json",
    ]  # fmt: skip


@pytest.fixture
def trained(monkeypatch):
    """The number of fleets that are trained, as a list that grows."""
    seen, real = [], cells.train
    monkeypatch.setattr(cells, "train", lambda *given, **options: seen.append(1) or real(*given, **options))
    return seen


def test_other_data_are_another_run(tmp_path, trained):
    write_table(tmp_path / "table.csv")
    made = []
    for label_column in ("a", "b"):
        done = invoke(*table_options(tmp_path, label_column))
        assert done.exit_code == 0, done.output
        made.append(json.loads(done.stdout))
    assert len(trained) == 2
    assert [row["label_column"] for row in made[0] + made[1]] == ["a", "a", "b", "b"]
    assert json.loads(invoke(*table_options(tmp_path, "a")).stdout) == made[0]
    assert len(trained) == 2  # the same data are the same run

    # One number in one row, of which training may see nothing.
    lines = (tmp_path / "table.csv").read_text().splitlines()
    lines[-1] = "9" + lines[-1][1:]
    (tmp_path / "table.csv").write_text("\n".join(lines))
    made.append(json.loads(invoke(*table_options(tmp_path, "a")).stdout))
    assert len(trained) == 3
    digests = [row["data"].split("-")[0] for rows in made for row in rows]
    assert len(set(digests)) == 3
    assert digests[::2] == digests[1::2]

    (tmp_path / "table.csv").unlink()
    done = invoke(*table_options(tmp_path, "a"))
    assert done.exit_code == 1
    assert done.stderr.count("\n") == 1
    assert "No such file" in done.stderr
    assert done.stdout == ""


def test_other_noisy_labels_are_another_run(tmp_path, trained, monkeypatch):
    """As another version of NumPy may draw them, or another file of people's labels has them."""
    recipe = comparison(levels=(0.2,), seeds=1, epochs=1)
    first, real = cells.run(recipe, tmp_path, silent), cells.corrupt
    for part in range(2):
        monkeypatch.setattr(
            cells,
            "corrupt",
            lambda *given, part=part: tuple(y[:: -1 if i == part else 1] for i, y in enumerate(real(*given))),
        )
        rows = cells.run(recipe, tmp_path, silent)
        assert len(trained) == 2 + part
        for row, other in zip(rows, first, strict=True):
            assert row["data"] != other["data"]
            assert row["data"].split("-")[0] == other["data"].split("-")[0]


def test_a_stopped_run_does_not_go_on_with_other_labels(tmp_path, monkeypatch, caplog):
    write_table(tmp_path / "table.csv")
    one = replace(comparison(str(tmp_path / "table.csv"), levels=(0.2,), seeds=1, epochs=3), label_column="a")
    other = replace(one, label_column="b")
    monkeypatch.setattr(train_loop, "SAVE_SECONDS", 0)

    def stop(done, total, text):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cells.run(one, tmp_path / "out", stop)
    (checkpoint,) = (tmp_path / "out").glob("*.checkpoint")
    epochs = []
    rows = cells.run(other, tmp_path / "out", lambda done, *_: epochs.append(done))
    assert epochs == [1, 2, 3]
    assert f"{checkpoint} belongs to a stopped run with other settings, data or version" in caplog.text
    assert results(rows) == results(cells.run(other, tmp_path / "afresh", silent))
    # The stopped one is still there to go on with.
    epochs.clear()
    rows = cells.run(one, tmp_path / "out", lambda done, *_: epochs.append(done))
    assert epochs == [2, 3]
    assert results(rows) == results(cells.run(one, tmp_path / "afresh", silent))
    assert not list((tmp_path / "out").glob("*.checkpoint"))


@pytest.mark.parametrize(
    "change",
    [
        lambda row: row.pop("data"),
        lambda row: row.pop("results"),
        lambda row: row.update(results=runs.RESULTS - 1),
        lambda row: row.update(bitempered="0.0.0"),
        lambda row: row.update(clip=1.0),  # which a run without clipping does not have
    ],
    ids=["no data", "no results number", "other results number", "other version", "clipped"],
)
def test_rows_of_another_identity_or_of_none_are_never_used(change, tmp_path, trained):
    recipe = comparison(levels=(0.0,), seeds=1, epochs=1)
    rows = cells.run(recipe, tmp_path, silent)
    for row in rows:
        change(row)
        row["test_last"] = -1
    files.write_rows(tmp_path / "compare.jsonl", rows)
    again = cells.run(recipe, tmp_path, silent)
    assert len(trained) == 2
    assert min(row["test_last"] for row in again) > 0
    assert files.read_rows(tmp_path / "compare.jsonl") == rows + again  # kept, and may be drawn


def test_another_commit_or_machine_is_not_another_run(tmp_path, trained, monkeypatch):
    recipe = comparison(levels=(0.0,), seeds=1, epochs=1)
    rows = cells.run(recipe, tmp_path, silent)
    other = {"commit": "other", "device": "abacus", "threads": 7, "torch": "1.0"}
    monkeypatch.setattr(runs, "provenance", lambda device: other)
    assert cells.run(recipe, tmp_path, silent) == rows
    assert len(trained) == 1


def test_a_checkpoint_goes_on_after_another_commit_but_not_with_other_results(tmp_path, monkeypatch):
    recipe = comparison(levels=(0.0,), seeds=1, epochs=3)
    monkeypatch.setattr(train_loop, "SAVE_SECONDS", 0)

    def stop(done, total, text):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cells.run(recipe, tmp_path, stop)
    for number, commit, expected in ((runs.RESULTS + 1, "this", [1, 2, 3]), (runs.RESULTS, "other", [2, 3])):
        monkeypatch.setattr(runs, "RESULTS", number)
        monkeypatch.setattr(runs, "commit", lambda commit=commit: commit)
        epochs = []
        cells.run(recipe, tmp_path, lambda done, *_, epochs=epochs: epochs.append(done))
        assert epochs == expected


# Interruption and resumption


def test_an_interrupted_run_keeps_its_rows_and_goes_on(tiny, tmp_path, monkeypatch):
    def interrupt(done, total, text):
        if done == 3:  # the first epoch of the second seed
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cells.run(TINY, tmp_path, interrupt)
    kept = files.read_rows(tmp_path / "compare.jsonl")
    assert [row["seed"] for row in kept] == [0] * 4

    made = []
    real = cells.run_seed
    monkeypatch.setattr(cells, "run_seed", lambda *given: made.append(given[3]) or real(*given))
    rows = cells.run(TINY, tmp_path, silent)
    assert made == [1]
    assert rows[:4] == kept
    assert results(rows) == results(tiny[0])


def test_rows_of_other_settings_or_code_are_kept_but_not_used(tmp_path):
    path = tmp_path / "compare.jsonl"
    recipe = comparison(levels=(0.0,), seeds=1, epochs=1)
    first = cells.run(recipe, tmp_path, silent)
    files.write_rows(path, [{**first[0], "bitempered": "0.0.0", "test_last": -1}, first[1]])
    other = comparison(losses=(Loss("logistic"), Loss("bi-tempered", (0.2, 3.0))), levels=(0.0,), seeds=1, epochs=1)
    rows = cells.run(other, tmp_path, silent)
    assert rows[0]["test_last"] == pytest.approx(first[0]["test_last"], abs=1.1 / 797)
    assert [row["numbers"] for row in rows] == [[], [0.2, 3.0]]
    assert len(files.read_rows(path)) == 4


def test_a_checkpoint_whose_rows_are_there_is_removed(tmp_path, monkeypatch, trained):
    """A process can be killed between its rows and its checkpoint, also between its curves and its rows."""
    recipe = comparison(levels=(0.0,), seeds=1, epochs=1)
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: None)
    rows = cells.run(recipe, tmp_path, silent)
    monkeypatch.undo()
    assert list(tmp_path.glob("*.checkpoint"))
    assert cells.run(recipe, tmp_path, silent) == rows
    assert sorted(path.name for path in tmp_path.iterdir()) == ["compare.jsonl", "curves.jsonl"]
    assert len(trained) == 1

    (tmp_path / "compare.jsonl").unlink()
    again = cells.run(recipe, tmp_path, silent)
    assert results(again) == results(rows)
    assert len(files.read_rows(tmp_path / "curves.jsonl")) == len(rows)


CTRL_C = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background begins with it ignored

def stop(*given, **options):
    os.kill(os.getpid(), signal.SIGINT)

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            stop()

sys.meta_path.insert(0, Finder())
from bitempered import cli
if {function!r}:
    import importlib
    where, name = {function!r}.rsplit(".", 1)
    setattr(importlib.import_module(where), name, stop)
sys.argv = ["bitempered", "compare", "--epochs", "1", "--seeds", "1", "--noise", "0", "--out", sys.argv[1]]
cli.main()
"""


@pytest.mark.parametrize(
    ("module", "function"),
    [
        ("typer", ""),
        ("torch._C", ""),  # inside an import that others catch errors of
        ("", "bitempered.experiments.cells.read"),
        ("", "bitempered.experiments.cells.train"),  # before the first epoch
    ],
)
def test_ctrl_c_at_any_time_gets_one_line(module, function, tmp_path):
    code = CTRL_C.format(module=module, function=function)
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "out"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 130, done.stderr
    assert done.stderr.startswith("bitempered: stopped")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def test_ctrl_c_says_where_the_rows_are(tmp_path, monkeypatch):
    def interrupted(*given, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(cells, "run", interrupted)
    result = invoke(*TINY_OPTIONS, "--out", tmp_path)
    assert result.exit_code == 130
    assert f"stopped; the same command goes on with what is there ({tmp_path})" in result.stderr
    assert "Traceback" not in result.output


# Files


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "file"
    files.write_atomically(path, b"old")

    def full(source, target):
        raise OSError("No space left on device")

    monkeypatch.setattr(files.os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        files.write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("torn", [b'{"a": ', b"{", b'{"a": 4'])
def test_a_row_that_was_torn_off_is_no_row(torn, tmp_path):
    path = tmp_path / "rows"
    files.append_rows(path, [{"a": 1}, {"a": 2}])
    with path.open("ab") as file:
        file.write(torn)
    assert files.read_rows(path) == [{"a": 1}, {"a": 2}]
    files.append_rows(path, [{"a": 3}])
    assert path.read_bytes() == b'{"a": 1}\n{"a": 2}\n{"a": 3}\n'


def test_a_row_without_its_end_of_line_is_a_row(tmp_path):
    path = tmp_path / "rows"
    path.write_bytes(b'{"a": 1}')
    assert files.read_rows(path) == [{"a": 1}]
    files.append_rows(path, [{"a": 2}])
    assert path.read_bytes() == b'{"a": 1}\n{"a": 2}\n'


@pytest.mark.parametrize("content", [b"not JSON", b'{"a": 1}\n[]', b'{"a": \n{"a": 1}\n', b"\xff"])
def test_other_damage_is_not_taken_for_a_torn_row(content, tmp_path):
    path = tmp_path / "rows"
    path.write_bytes(content)
    with pytest.raises(files.BadRows, match="is not a JSON object"):
        files.read_rows(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("before", [b"", b'{"a": 1}\n'])
def test_rows_that_do_not_fit_on_the_disk_leave_what_was_there(before, tmp_path):
    path = tmp_path / "rows"
    if before:
        path.write_bytes(before)
    code = """
import resource, signal, sys
from pathlib import Path
from bitempered.experiments import files
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    files.append_rows(Path(sys.argv[1]), [{"a": "b" * 3000}])
except OSError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, timeout=60)
    assert "File too large" in done.stdout, done.stderr
    assert (path.read_bytes() if path.exists() else b"") == before
    assert path.exists() == bool(before)


# Several processes


KILLING = """
import os, random, signal, sys, time
from dataclasses import replace
from pathlib import Path
import torch
from bitempered.experiments import cells, runs, train
from bitempered.experiments.losses import Loss
from bitempered.experiments.recipes.compare import comparison

folder, seconds, seeds, overlap = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "True"
train.SAVE_SECONDS = 0
torch.set_num_threads(1)  # a pool of threads does not outlive a fork
runs.provenance = lambda device: {"commit": "this"}  # whose three processes take most of the time


def recipe(second):
    made = comparison(losses=(Loss("logistic"), second), levels=(0.0, 0.4), seeds=seeds, epochs=3)
    return replace(made, training=replace(made.training, width=16))


recipes = [recipe(Loss("mae")), recipe(Loss("gce", (0.7,)) if overlap else Loss("mae"))]


def start(place):
    process = os.fork()
    if process:
        return process, time.monotonic() + random.expovariate(3)
    code = 1
    try:
        cells.run(recipes[place], folder, lambda *_: None)
        code = 0
    finally:
        if code:
            sys.excepthook(*sys.exc_info())
        os._exit(code)


end, killed, codes = time.monotonic() + seconds, 0, set()
running = [start(place) for place in range(2)]
while time.monotonic() < end:
    for place, (process, until) in enumerate(running):
        done, status = os.waitpid(process, os.WNOHANG)
        if not done and time.monotonic() > until:
            os.kill(process, signal.SIGKILL)
            done, status = os.waitpid(process, 0)
            killed += 1
        if done:
            codes.add(os.waitstatus_to_exitcode(status))
            running[place] = start(place)
    time.sleep(0.002)
codes |= {os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process, _ in running}
print(killed, *codes)
"""


@pytest.mark.parametrize("overlap", [False, True])  # of one recipe, or of two that have cells in common
@pytest.mark.parametrize(
    ("seconds", "seeds"), [(3, 8), pytest.param(60, 120, marks=pytest.mark.slow)], ids=["short", "a minute"]
)
def test_two_processes_that_are_killed_and_restarted_lose_and_double_nothing(seconds, seeds, overlap, tmp_path):
    folder = tmp_path / "out"
    command = [sys.executable, "-c", KILLING, folder, seconds, seeds, overlap]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=20 * seconds + 60)
    assert done.returncode == 0, done.stderr
    killed, *codes = map(int, done.stdout.split())
    assert killed, done.stderr  # about six in a second
    assert set(codes) <= {0, -signal.SIGKILL}, done.stderr
    losses = ["logistic", "mae", "gce"] if overlap else ["logistic", "mae"]
    wanted = Counter((seed, noise, loss) for seed in range(seeds) for noise in (0.0, 0.4) for loss in losses)
    for name in ("compare.jsonl", "curves.jsonl"):
        rows = files.read_rows(folder / name)
        assert Counter((row["seed"], row["noise"], row["loss"]) for row in rows) == wanted
    # Neither a lock nor a checkpoint nor a part of one.
    assert sorted(path.name for path in folder.iterdir()) == ["compare.jsonl", "curves.jsonl"]
    print(f"{killed} killed, {len(rows)} rows")


def test_a_lock_that_was_waited_for_is_the_one_that_is_there(tmp_path, monkeypatch):
    """Its holder removes the file at the end, and whoever waited must not be content with what is gone."""
    waiting = threading.Event()
    real = files.fcntl.flock

    def flock(*given):
        if threading.current_thread() is not threading.main_thread():
            waiting.set()
        real(*given)

    def second():
        with files.lock(tmp_path, "seed0", wait=True) as held:
            return held, (tmp_path / ".seed0.lock").exists()

    monkeypatch.setattr(files.fcntl, "flock", flock)
    with ThreadPoolExecutor(1) as pool:
        with files.lock(tmp_path, "seed0", wait=False) as held:
            assert held
            with files.lock(tmp_path, "seed0", wait=False) as again, files.lock(tmp_path, "seed1", wait=False) as other:
                assert (again, other) == (False, True)
            future = pool.submit(second)
            assert waiting.wait(60)
        assert future.result() == (True, True)
    assert not list(tmp_path.iterdir())


def test_what_a_killed_process_left_half_written_is_cleared_away(tmp_path):
    for name in (".seed0-1234.checkpoint.abc", ".seed00-1234.checkpoint.abc", ".seed0.lock", "mine"):
        (tmp_path / name).touch()
    with files.lock(tmp_path, "seed0", wait=False) as held:
        assert held
    assert sorted(path.name for path in tmp_path.iterdir()) == [".seed00-1234.checkpoint.abc", "mine"]


def test_processes_share_the_seeds(tmp_path, monkeypatch):
    """While one process is at seed 0 another does seed 1, then waits for the first and uses its rows."""
    recipe = comparison(levels=(0.0,), seeds=2, epochs=1)
    at_work, other_done = threading.Event(), threading.Event()
    real, made = cells.train, []

    def train(*given, seed, **options):
        made.append((threading.current_thread().name, seed))
        if threading.current_thread().name == "first":
            at_work.set()
            assert other_done.wait(60)
        return real(*given, seed=seed, **options)

    def progress(done, total, text):
        if text == "seed 0: another process is training it":
            other_done.set()

    monkeypatch.setattr(cells, "train", train)
    with ThreadPoolExecutor(1) as pool:

        def first():
            threading.current_thread().name = "first"
            return cells.run(recipe, tmp_path, silent)

        future = pool.submit(first)
        assert at_work.wait(60)
        rows = cells.run(recipe, tmp_path, progress)
        assert future.result() == rows
    assert made == [("first", 0), ("MainThread", 1)]
    assert len(files.read_rows(tmp_path / "compare.jsonl")) == len(rows) == 4


# Reports


def test_table_states_mean_and_sample_standard_deviation_of_the_rows(tiny):
    rows, _ = tiny
    for column, place in (("test_last", 1), ("test_chosen", 3)):
        values = [100 * row[column] for row in rows if row["noise"] == 0.4 and row["loss"] == "logistic"]
        expected = f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"
        assert compare.cells(TINY, rows)[1][place] == expected
    page = compare.markdown(TINY, rows)
    assert f"| {' | '.join(compare.cells(TINY, rows)[1])} |" in page
    assert "n = 2 seeds" in page


def test_one_seed_has_no_spread(tiny):
    recipe = replace(TINY, seeds=(0,))
    rows = [row for row in tiny[0] if row["seed"] == 0]
    assert "±" not in compare.markdown(recipe, rows)
    assert png(compare.figure(recipe, rows)).startswith(b"\x89PNG")


# The command line


def test_defaults_of_the_command_are_the_recipe_s():
    defaults, theirs = (
        {name: p.default for name, p in inspect.signature(function).parameters.items()}
        for function in (cli.compare, comparison)
    )
    assert tuple(float(level) for level in defaults["noise"].split(",")) == theirs["levels"]
    assert tuple(Loss.parse(loss) for loss in defaults["losses"].split(",")) == theirs["losses"]
    for name in ("dataset", "seeds", "epochs", "rates", "noise_model", "label_column", "network"):
        assert defaults[name] == theirs[name]


@pytest.mark.parametrize(
    ("dataset", "folder"), [("digits", "compare"), ("mnist", "compare-mnist"), ("some/iris.csv", "compare-iris")]
)
def test_each_data_set_has_a_folder_of_its_own(dataset, folder, tmp_path, monkeypatch):
    def stop(recipe, folder, *rest, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(cells, "run", stop)
    monkeypatch.chdir(tmp_path)
    done = invoke("compare", "--dataset", dataset, "--losses", "logistic, mae")
    assert done.exit_code == 130, done.output
    assert done.stderr.endswith(f"(results/{folder})\n")


def test_compare_end_to_end(tmp_path):
    """The command as a person types it, in a process of its own; --json prints JSON and nothing else."""
    out = tmp_path / "new" / "folder"
    command = [sys.executable, "-m", "bitempered", *TINY_OPTIONS, "--out", str(out)]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [row["noise"] for row in rows] == [0.0, 0.0, 0.4, 0.4] * 2
    assert files.read_rows(out / "compare.jsonl") == rows
    made = ["compare.csv", "compare.jsonl", "compare.md", "compare.png", "curves.jsonl"]
    assert sorted(path.name for path in out.iterdir()) == made
    assert len((out / "compare.csv").read_text().splitlines()) == 1 + len(rows)
    assert (out / "compare.png").read_bytes().startswith(b"\x89PNG")

    again = invoke(*TINY_OPTIONS, "--out", out)
    assert again.exit_code == 0, again.output
    assert files.read_rows(out / "compare.jsonl") == rows  # nothing was trained again
    assert "n = 2 seeds" in again.stdout
    assert f"{100 * statistics.mean(row['test_last'] for row in rows[2::4]):.1f} ±" in again.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--losses", "bi-tempered:1.5:1.2"], "t1 must not exceed t2"),
        (["--losses", "hinge"], "unknown loss 'hinge'"),
        (["--rates", "fast"], "--rates must be numbers separated by commas"),
        (["--device", "tpu"], "--device must be cpu or cuda, got 'tpu'"),
        (["--dataset", "cifar"], "unknown dataset 'cifar'; choose from: digits, mnist"),
        (["--noise", "0,1.5"], "noise levels must be in [0, 1]"),
        (["--noise", "some"], "--noise must be numbers separated by commas, such as 0,0.2,0.4; got 'some'"),
        (["--noise", ""], "--noise must be numbers separated by commas"),
        (["--seeds", "0"], "seeds must be at least 1, got 0"),
        (["--seeds", "-1"], "seeds must be at least 1, got -1"),
    ],
)
def test_bad_options_get_one_line_and_write_nothing(options, message, tmp_path):
    out = tmp_path / "out"
    result = invoke("compare", "--out", out, *options)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
    assert not out.exists()


def test_a_folder_that_cannot_be_written_is_found_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr(cells, "run_seed", lambda *_: pytest.fail("trained"))
    (tmp_path / "file").write_text("mine")
    result = invoke(*TINY_OPTIONS, "--out", tmp_path / "file")
    assert result.exit_code == 1
    assert "cannot use the folder" in result.stderr
    assert result.stderr.count("\n") == 1
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("name", ["compare.jsonl", "curves.jsonl"])
def test_a_foreign_rows_file_is_refused_and_left_alone(name, tmp_path, monkeypatch):
    monkeypatch.setattr(cells, "run_seed", lambda *_: pytest.fail("trained"))
    (tmp_path / name).write_text("not JSON\n")
    result = invoke(*TINY_OPTIONS, "--out", tmp_path)
    assert result.exit_code == 1
    assert "line 1 is not a JSON object" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "not JSON\n"


@pytest.mark.parametrize("name", ["run_seed", "prepare"])  # after the first seed was trained, or before the second
def test_a_folder_that_is_deleted_meanwhile_gets_one_line(name, tmp_path, monkeypatch):
    real = getattr(cells, name)

    def delete(*given):
        made = real(*given)
        if (tmp_path / "out").exists():
            shutil.rmtree(tmp_path / "out")
        return made

    monkeypatch.setattr(cells, name, delete)
    result = invoke(*TINY_OPTIONS, "--out", tmp_path / "out")
    assert result.exit_code == 1
    assert f"cannot use the folder {tmp_path / 'out'}" in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dataset", "mnist", "--data-dir", "nowhere"], "mnist: there is no train-images-idx3-ubyte.gz in nowhere"),
        (["--dataset", "pets.csv"], "pets.csv"),
        (["--dataset", "cifar100", "--noise-model", "human", "--data-dir", "nowhere"], "cifar100: there is no"),
    ],
)
def test_missing_data_gets_one_line(options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke("compare", "--out", "out", *options)
    assert result.exit_code == 1, result.output
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_wrong_label_column_gets_one_line(tmp_path):
    (tmp_path / "pets.csv").write_text("weight,animal\n1,cat\n2,dog\n")
    result = invoke("compare", "--dataset", tmp_path / "pets.csv", "--out", tmp_path)
    assert result.exit_code == 1
    assert "label" in result.stderr
    assert "weight, animal" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_full_disk_gets_one_line_and_leaves_nothing_half_written(tmp_path, monkeypatch):
    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "replace", full)
    result = invoke(*TINY_OPTIONS, "--out", tmp_path)
    assert result.exit_code == 1
    assert "No space left on device" in result.stderr
    assert result.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("module", ["typer", "rich", "torch", "sklearn", "matplotlib"])
def test_a_missing_extra_gets_one_line_with_the_command(module, tmp_path):
    code = f"""
import sys
sys.modules[{module!r}] = None
sys.argv = ["bitempered", "compare", "--out", {str(tmp_path / "out")!r}]
from bitempered.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert 'pip install "bitempered[experiments]"' in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_help_imports_nothing_heavy():
    code = """
import sys
from typer.testing import CliRunner
from bitempered import cli
result = CliRunner().invoke(cli.app, ["compare", "--help"])
assert result.exit_code == 0 and "--noise" in result.stdout, result.output
print(sorted({"torch", "sklearn", "matplotlib"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
