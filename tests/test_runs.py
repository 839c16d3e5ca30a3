"""Runs: when a row or a checkpoint is used again, going on after an interruption, several processes in one folder."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import experiment_cases
import numpy as np
import pytest
from experiment_cases import TINY, comparison, invoke, results, silent, without

from bitempered.experiments import cells, checkpoints, files, runs
from bitempered.experiments.cells import Cell
from bitempered.experiments.losses import Loss

tiny = experiment_cases.tiny

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


def stop_after_two(done, total, text):
    if done == 2:
        raise KeyboardInterrupt


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
    monkeypatch.setattr(checkpoints, "SAVE_SECONDS", 0)

    with pytest.raises(KeyboardInterrupt):
        cells.run(one, tmp_path / "out", stop_after_two)
    (checkpoint,) = (tmp_path / "out").glob("*.checkpoint")
    epochs = []
    rows = cells.run(other, tmp_path / "out", lambda done, *_: epochs.append(done))
    assert epochs == [1, 2, 3]
    assert f"{checkpoint} belongs to a stopped run" in caplog.text
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
        lambda row: row.update(clip=1.0),
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


def test_rows_without_what_was_added_later_are_those_of_its_default(tmp_path, trained):
    recipe = comparison(levels=(0.0,), seeds=1)
    old = without(cells.run(recipe, tmp_path, silent), "schedule", "rescale", "clip", "problem")
    files.write_rows(tmp_path / "compare.jsonl", old)
    assert cells.run(recipe, tmp_path, silent) == old
    assert len(trained) == 1
    constant = Loss("bi-tempered", (0.2, 1.2))
    for place, other in enumerate((replace(constant, schedule=(0, 1)), replace(constant, rescale=True)), start=2):
        (row,) = cells.run(comparison(losses=(other,), levels=(0.0,), seeds=1), tmp_path, silent)
        assert Cell.of(row).loss == other
        assert len(trained) == place


def test_another_commit_or_machine_is_not_another_run(tmp_path, trained, monkeypatch):
    recipe = comparison(levels=(0.0,), seeds=1, epochs=1)
    rows = cells.run(recipe, tmp_path, silent)
    other = {"commit": "other", "device": "abacus", "threads": 7, "torch": "1.0"}
    monkeypatch.setattr(runs, "provenance", lambda device: other)
    assert cells.run(recipe, tmp_path, silent) == rows
    assert len(trained) == 1


def test_a_checkpoint_goes_on_after_another_commit_but_not_with_other_results(tmp_path, monkeypatch):
    recipe = comparison(levels=(0.0,), seeds=1, epochs=3)
    monkeypatch.setattr(checkpoints, "SAVE_SECONDS", 0)

    with pytest.raises(KeyboardInterrupt):
        cells.run(recipe, tmp_path, stop_after_two)
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


@pytest.mark.parametrize("made_before", [0, 1])  # runs of the job, by another recipe
def test_a_checkpoint_whose_rows_are_there_is_removed(made_before, tmp_path, monkeypatch, trained, caplog):
    """A process can be killed between its rows and its checkpoint, also between its curves and its rows."""
    recipe = comparison(levels=(0.0,), seeds=1, epochs=1)
    if made_before:
        cells.run(replace(recipe, cells=recipe.cells[:made_before]), tmp_path, silent)
        trained.clear()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda *_, **__: None)
        rows = cells.run(recipe, tmp_path, silent)
    assert list(tmp_path.glob("*.checkpoint"))
    (tmp_path / "larger").mkdir()
    for path in tmp_path.glob("*.*"):
        shutil.copy(path, tmp_path / "larger")
    assert cells.run(recipe, tmp_path, silent) == rows
    assert sorted(path.name for path in tmp_path.glob("*.*")) == ["compare.jsonl", "curves.jsonl"]
    assert len(trained) == 1

    larger = replace(recipe, cells=(*recipe.cells, replace(recipe.cells[0], loss=Loss("mae"))))
    cells.run(larger, tmp_path / "larger", silent)
    assert sorted(path.name for path in (tmp_path / "larger").iterdir()) == ["compare.jsonl", "curves.jsonl"]
    assert "belongs to a stopped run" not in caplog.text

    (tmp_path / "compare.jsonl").unlink()
    again = cells.run(recipe, tmp_path, silent)
    assert results(again) == results(rows)
    assert len(files.read_rows(tmp_path / "curves.jsonl")) == len(rows)


def test_a_stopped_part_of_a_job_goes_on_in_another_job(tmp_path, monkeypatch):
    """A checkpoint belongs to the runs it holds, whichever job trained them."""
    recipe = comparison(levels=(0.0,), seeds=1, epochs=3)
    first, second = (replace(recipe, cells=(cell,)) for cell in recipe.cells)
    monkeypatch.setattr(checkpoints, "SAVE_SECONDS", 0)
    cells.run(first, tmp_path, silent)
    with pytest.raises(KeyboardInterrupt):
        cells.run(recipe, tmp_path, stop_after_two)
    epochs = []
    rows = cells.run(second, tmp_path, lambda done, *_: epochs.append(done))
    assert epochs == [2, 3]
    assert results(rows) == results(cells.run(second, tmp_path / "afresh", silent))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["afresh", "compare.jsonl", "curves.jsonl"]


def test_a_damaged_checkpoint_of_other_runs_is_left_alone(tmp_path, caplog):
    other = tmp_path / "seed0-0123456789ab.checkpoint"
    other.write_bytes(b"damaged")
    cells.run(comparison(levels=(0.0,), seeds=1, epochs=1), tmp_path, silent)
    assert other.read_bytes() == b"damaged"
    assert f"{other} belongs to a stopped run" in caplog.text


# Several processes


KILLING = """
import os, random, signal, sys, time
from dataclasses import replace
from pathlib import Path
import torch
from bitempered.experiments import cells, checkpoints, runs
from bitempered.experiments.losses import Loss
from experiment_cases import comparison

folder, seconds, seeds, overlap = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "True"
checkpoints.SAVE_SECONDS = 0
torch.set_num_threads(1)  # a pool of threads does not outlive a fork
# whose three processes take most of the time
runs.provenance = lambda device: {"commit": "this", "device": "cpu", "torch": "2"}


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


@pytest.mark.parametrize(
    ("overlap", "seconds", "seeds"),  # of two recipes that have cells in common, or of one
    [
        pytest.param(True, 3, 8, id="short"),
        pytest.param(True, 60, 120, id="a minute", marks=[pytest.mark.slow, pytest.mark.first]),
        pytest.param(False, 15, 30, id="one recipe", marks=pytest.mark.slow),
    ],
)
def test_two_processes_that_are_killed_and_restarted_lose_and_double_nothing(overlap, seconds, seeds, tmp_path):
    folder = tmp_path / "out"
    command = [sys.executable, "-c", KILLING, folder, seconds, seeds, overlap]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=20 * seconds + 60, env=environment
    )
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
        if text == "waiting for another process, which is training seed0":
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


# Where a row comes from


@pytest.mark.parametrize(
    ("changed", "dirty"), [("runs.py", True), ("c/solver.c", True), ("c/vectors.h", True), ("rows.jsonl", False)]
)
def test_a_commit_is_dirty_if_code_has_changed(changed, dirty, tmp_path, monkeypatch):
    for name in ("runs.py", "c/solver.c", "c/vectors.h", "rows.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("old")
    author = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
    for command in (["init", "-q"], ["add", "."], [*author, "commit", "-qm", "all"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    monkeypatch.setattr(runs, "__file__", str(tmp_path / "runs.py"))
    clean = runs.commit()
    assert len(clean) == 40
    (tmp_path / changed).write_text("new")
    assert runs.commit() == clean + ("-dirty" if dirty else "")
