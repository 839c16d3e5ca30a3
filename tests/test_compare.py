"""`bitempered compare`: its recipe, its files, its command line, and what bad input gets."""

import inspect
import json
import shutil
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import experiment_cases
import numpy as np
import pytest
import torch
from experiment_cases import TINY, TINY_OPTIONS, assert_rendered, comparison, error_lines, invoke, silent

from bitempered import cli
from bitempered.experiments import cells, compare_report, files
from bitempered.experiments.data import Dataset, Split
from bitempered.experiments.datasets import CIFAR100N, DATASETS, DatasetEntry, read
from bitempered.experiments.losses import Loss
from bitempered.experiments.networks import NETWORKS, Architecture, Network
from bitempered.experiments.recipes import compare
from bitempered.experiments.recipes.compare import Contender, request
from bitempered.experiments.report import png
from bitempered.experiments.sources import DataError
from bitempered.experiments.train import Training

tiny = experiment_cases.tiny


def levels(recipe, *kept):
    return replace(recipe, cells=tuple(cell for cell in recipe.cells if cell.noise in kept))


# Data


def test_split_is_stratified_disjoint_and_fixed_by_its_seed():
    split, same, other = read("digits").split(0), read("digits").split(0), read("digits").split(1)
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
        ({"dataset": "cifar"}, "unknown dataset 'cifar'; choose from: digits, .*a path"),
        ({"levels": (0.1, 1.5)}, r"noise levels must be in \[0, 1\], got \[0.1, 1.5\]"),
        ({"levels": (float("nan"),)}, "noise levels must be"),
        ({"levels": ()}, "noise levels must be"),
        ({"seeds": 0}, "seeds must be at least 1, got 0"),
        ({"seeds": -1}, "seeds must be at least 1, got -1"),
        ({"seeds": 101}, "seeds must be at most 100, got 101"),  # the next ones are the search's
        ({"epochs": 10**20}, "epochs must be at most 100,000, got 1"),
        ({"dataset": "caf\udce9.csv"}, r"the name 'caf\\udce9.csv' is not UTF-8; rename the file"),
        ({"dataset": "a.csv", "test_file": "\udce9.csv"}, r"the name '\\udce9.csv' is not UTF-8; rename the file"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"rates": (float("nan"),)}, r"learning rates must be positive and finite, got \[nan\]"),
        ({"rates": (float("inf"), 1.0)}, "learning rates must be positive and finite"),
        ({"rates": (0.0,)}, r"learning rates must be positive and finite, got \[0.0\]"),
        ({"losses": (Contender(Loss("mae"), -1.0),)}, "learning rates must be positive and finite, got .*-1.0"),
        ({"losses": (Contender(Loss("mae")),) * 2}, "each loss can be named once, or once for each learning rate"),
        ({"test_file": "clean.csv"}, "digits has test rows of its own; --test is for a .csv or .parquet file"),
        ({"dataset": "a.csv", "test_file": "clean.txt"}, "--test must be a path that ends in .csv or .parquet, got"),
        (
            {"noise_model": "gaussian"},
            "unknown noise model 'gaussian'; choose from: symmetric, symmetric-all, .*class-dependent, weak-model",
        ),
        ({"network": "vgg"}, "unknown network 'vgg'; choose from: mlp, "),
        ({"noise_model": "human"}, "digits has no human labels; choose from: cifar100"),
    ],
)
def test_recipe_refuses_bad_values(change, message):
    with pytest.raises(ValueError, match=message):
        request(**change)


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
    ("model", "rate", "wrong"),
    [("symmetric", 0.4, 200), ("pair-flip", 0.4, 200), ("weak-model", 0.4, 200), ("symmetric-all", 0.4, None)],
)
def test_noise_reaches_training_and_validation_but_not_test(model, rate, wrong, monkeypatch, tmp_path):
    seen = []

    def spy(training, members, split, **options):
        seen.append((members, split))
        raise KeyboardInterrupt

    monkeypatch.setattr(cells, "train", spy)
    with pytest.raises(KeyboardInterrupt):
        cells.run(comparison(levels=(rate,), seeds=1, noise_model=model), tmp_path, silent)
    ((ours, theirs), split), clean = seen[0], read("digits").split(0)
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
    train, validation = cells.read_human_labels(CIFAR100N, split, tmp_path)
    np.testing.assert_array_equal(train, people[rows[0]])
    np.testing.assert_array_equal(validation, people[rows[1]])
    with pytest.raises(DataError, match="name with --data-dir"):
        cells.read_human_labels(CIFAR100N, split, None)


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


def test_a_new_data_set_and_a_new_network_are_an_entry_each(tmp_path, monkeypatch):
    def published():
        x = np.random.default_rng(0).normal(size=(90, 2)).astype(np.float32)
        labels = np.arange(90) % 3
        x[:, 0] += 5 * labels
        return x, labels

    def read(paths):
        x, labels = published()
        return (x[:60], labels[:60]), (x[60:], labels[60:])

    def linear(shape, classes):
        return Network(
            lambda generator: {"w": 0.1 * torch.randn(*shape, classes, generator=generator)},
            lambda weights, x, drop: x.expand(len(weights["w"]), -1, -1) @ weights["w"],
        )

    monkeypatch.setitem(NETWORKS, "linear", Architecture(linear))
    training = Training("linear", "sgd", epochs=2)
    with pytest.raises(ValueError, match="needs `published`"):
        DatasetEntry(None, read, 3, training)
    blobs = DatasetEntry(None, read, 3, training, validation_rows=30, published=published)
    monkeypatch.setitem(DATASETS, "blobs", blobs)
    options = ["--noise", "0.2", "--seeds", "1", "--losses", "logistic,mae", "--rates", "0.01", "--out", tmp_path]
    assert invoke("compare", "--dataset", "blobs", *options).exit_code == 0
    done = invoke("compare", "--dataset", "digits", "--network", "linear", "--epochs", "1", *options)
    assert done.exit_code == 0, done.output
    rows = files.read_rows(tmp_path / "compare.jsonl")
    assert [(row["dataset"], row["network"]) for row in rows] == [("blobs", "linear")] * 2 + [("digits", "linear")] * 2


# Reports


def test_table_states_mean_and_sample_standard_deviation_of_the_rows(tiny):
    rows, _ = tiny
    for column, place in (("test_last", 3), ("test_chosen", 4)):
        values = [100 * row[column] for row in rows if row["noise"] == 0.4 and row["loss"] == "logistic"]
        expected = f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"
        assert compare_report.lines(TINY, rows)[2][place] == expected
    page = compare_report.markdown(TINY, rows, [])
    assert f"| {' | '.join(compare_report.lines(TINY, rows)[2])} |" in page
    assert "n = 2 seeds" in page
    assert "clean test labels" in page


def test_one_seed_has_no_spread(tiny):
    recipe = replace(TINY, seeds=(0,))
    rows = [row for row in tiny[0] if row["seed"] == 0]
    assert "±" not in compare_report.markdown(recipe, rows, [])
    for shown in (recipe, levels(recipe, 0.4)):
        assert png(compare_report.figure(shown, rows, [])).startswith(b"\x89PNG")


def test_the_figure_shows_accuracy_by_epoch(tiny):
    rows, folder = tiny
    curves = files.read_rows(folder / "curves.jsonl")
    panels = compare_report.figure(TINY, rows, curves).axes
    assert [axes.get_title() for axes in panels] == ["0% wrong labels", "40% wrong labels"]
    of_logistic = [curve["test"] for curve in curves if (curve["noise"], curve["loss"]) == (0.4, "logistic")]
    assert len(of_logistic) == 2
    line = next(line for line in panels[1].lines if line.get_label() == "logistic")
    np.testing.assert_allclose(line.get_ydata(), 100 * np.mean(of_logistic, axis=0))


def test_losses_that_differ_in_their_schedules_have_names_of_their_own():
    """In the table, the notes and the figure, which has a style and a mark for each."""
    texts = ["bi-tempered:0.5:1.5:anneal=0..1", "bi-tempered:0.5:1.5:anneal=1..2"]
    recipe = comparison(losses=tuple(map(Loss.parse, [*texts, "bi-tempered:0.5:1.5"])), levels=(0.4,), epochs=2)
    names = [*texts, "bi-tempered (0.5, 1.5)"]
    assert [line[0] for line in compare_report.lines(recipe, [])] == names
    assert [note.split(": the temperatures")[0] for note in compare_report.schedule_notes(recipe)] == texts
    rows = [
        recipe.setting(cell, 0) | {"test_last": 0.5, "test_chosen": 0.6, "chosen_epoch": 1} for cell in recipe.cells
    ]
    curves = [recipe.setting(cell, 0) | {"test": [0.5, 0.6, 0.5]} for cell in recipe.cells]
    drawn = compare_report.figure(recipe, rows, curves).axes[0].lines
    assert {line.get_label(): line.get_linestyle() for line in drawn if line.get_label() in names} == dict(
        zip(names, ("-", "--", ":"), strict=True)
    )
    assert [line.get_marker() for line in drawn if list(line.get_xdata()) == [1]] == ["x", "o", "^"]


# The command line


def test_defaults_of_the_command_are_the_recipe_s():
    defaults, theirs = (
        {name: p.default for name, p in inspect.signature(function).parameters.items()}
        for function in (cli.compare, request)
    )
    assert tuple(Contender.parse(loss) for loss in defaults["losses"].split(",")) == theirs["losses"]
    assert defaults["noise"] is theirs["levels"] is defaults["test"] is theirs["test_file"] is None
    for name in ("dataset", "seeds", "epochs", "rates", "noise_model", "label_column", "network", "data_dir"):
        assert defaults[name] == theirs[name]


@pytest.mark.parametrize(
    ("dataset", "folder"), [("digits", "compare"), ("mnist", "compare-mnist"), ("some/iris.csv", "compare-iris")]
)
def test_each_data_set_has_a_folder_of_its_own(dataset, folder, tmp_path, monkeypatch):
    def stop(request, folder, *rest, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(compare, "run", stop)
    monkeypatch.chdir(tmp_path)
    done = invoke("compare", "--dataset", dataset, "--losses", "logistic, mae")
    assert done.exit_code == 130, done.output
    assert done.stderr.endswith(f"(output/{folder})\n")


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
    assert_rendered(out, "compare.csv", "compare.md", "compare.png")

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
        (["--noise", "some"], "got 'some'"),
        (["--noise", ""], "--noise must be numbers separated by commas"),
        (["--dataset", "cifar100", "--noise-model", "human", "--noise", "0,0.2"], "human labels have their own noise"),
        (["--seeds", "0"], "seeds must be at least 1, got 0"),
        (["--seeds", "-1"], "seeds must be at least 1, got -1"),
        (["--losses", "mae@fast"], "cannot use the loss 'mae@fast': after @ comes a learning rate"),
        (["--losses", "mae@-1"], "learning rates must be positive and finite"),
        (["--test", "clean.csv"], "digits has test rows of its own"),
        (["--label-column", "kind"], "--label-column is for a table of your own; digits has labels"),
        (["--data-dir", "."], "--data-dir is for data sets that are downloaded; digits is not"),
        (["--data-dir", ".", "--dataset", "a.csv"], "--data-dir is for data sets that are downloaded; a.csv is not"),
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
    assert len(error_lines(result)) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dataset", "mnist", "--data-dir", "nowhere"], "mnist: there is no train-images-idx3-ubyte.gz in nowhere"),
        (["--dataset", "pets.csv"], "pets.csv"),
        (["--dataset", "cifar100", "--noise-model", "human", "--data-dir", "nowhere"], "cifar100: there is no"),
        (
            ["--network", "resnet56"],
            "resnet56 takes images of shape (3, 32, 32), and the rows of digits have shape (64,)",
        ),
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
    assert len(error_lines(result)) == 1
    assert not list(tmp_path.iterdir())


REPORT = ["report", str(Path(__file__).parents[1] / "results" / "protocol-a")]


@pytest.mark.parametrize("module", ["typer", "rich", "torch", "sklearn", "matplotlib"])
@pytest.mark.parametrize("command", [["compare"], ["reproduce", "table1"], REPORT], ids=lambda command: command[0])
def test_a_missing_extra_gets_one_line_with_the_command(command, module, tmp_path):
    code = f"""
import sys
sys.modules[{module!r}] = None
sys.argv = ["bitempered", *{command!r}, "--out", {str(tmp_path / "out")!r}]
from bitempered.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert 'this command needs more packages: pip install "torch>=2.6" "matplotlib>=3.8"' in done.stderr
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


# Ctrl-C


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
sys.argv = ["bitempered", "compare", "--epochs", "1", "--seeds", "1", "--rates", "1", "--out", sys.argv[1]]
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
    assert result.stderr.startswith("bitempered: stopped; ")
    assert str(tmp_path) in result.stderr
    assert "Traceback" not in result.output
