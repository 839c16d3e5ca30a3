"""`bitempered tune`: the search over the experiments, its pages, and the recipe that it prints."""

import inspect
import os
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import replace

import numpy as np
import optuna
import pytest
import torch
from experiment_cases import TINY, error_lines, invoke, results, silent
from torch.nn.functional import cross_entropy

from bitempered import cli, schedules
from bitempered.experiments import cells, tune_report
from bitempered.experiments.files import read_rows
from bitempered.experiments.losses import Loss, LossSettings
from bitempered.experiments.optimizers import OPTIMIZERS
from bitempered.experiments.recipes import compare, tune, tuned
from bitempered.experiments.recipes.plans import SEARCH_SEED
from bitempered.experiments.runs import RESULTS, find
from bitempered.torch import bi_tempered_logistic_loss

OPTIONS = ["tune", "--trials", 4, "--epochs", 2]


def load(folder, name="digits-0.4-bi-tempered"):
    return optuna.load_study(study_name=name, storage=f"sqlite:///{folder / 'study.db'}")


def finished(study):
    return [trial for trial in study.trials if trial.state.name in ("COMPLETE", "PRUNED")]


def test_the_command_end_to_end(tmp_path):
    out = tmp_path / "new" / "out"
    done = invoke(*OPTIONS, "--out", out)
    assert done.exit_code == 0, done.output
    study = load(out)
    assert len(finished(study)) == 4
    assert f"{study.best_value:.2%}" in done.stdout
    assert {path.name for path in out.iterdir() if path.suffix != ".lock"} == {
        "study.db", "tune.md", "tune.csv", "importance.png", "contour.png",
    }  # fmt: skip
    assert len((out / "tune.csv").read_text().splitlines()) == 5
    # The first two trials are the first leg of the default schedule and cross-entropy.
    t1, t2 = schedules.default(10, 1).legs[0].end
    assert study.trials[0].params | {"t1": t1, "t2": t2, "annealed": True} == study.trials[0].params
    assert study.trials[1].params | {"t1": 1.0, "t2": 1.0, "annealed": False} == study.trials[1].params

    # The printed command trains the best trial again: its accuracy on validation labels is the score.
    (command,) = re.findall(r"^  (bitempered compare .*)$", done.stdout, re.MULTILINE)
    again = invoke(*shlex.split(command)[1:], "--seeds", 1, "--out", tmp_path / "compare")
    assert again.exit_code == 0, again.output
    (row,) = read_rows(tmp_path / "compare" / "compare.jsonl")
    searched = cells.run(replace(cells.comparison_of([row]), seeds=(SEARCH_SEED,)), tmp_path / "again", silent)
    assert (searched[0]["validation_last"] + searched[0]["validation_chosen"]) / 2 == pytest.approx(study.best_value)

    # A finished study is only read; more trials go on with it; another setting is refused.
    assert invoke(*OPTIONS, "--out", out).exit_code == 0
    assert len(load(out).trials) == 4
    assert invoke("tune", "--trials", 5, "--epochs", 2, "--out", out).exit_code == 0
    assert len(finished(load(out))) == 5
    other = invoke("tune", "--trials", 5, "--epochs", 3, "--out", out)
    assert other.exit_code == 1
    assert error_lines(other) == [
        "bitempered: the study 'digits-0.4-bi-tempered' was made with other about: epochs was 2, not 3; give another "
        "name or storage"
    ]


def test_the_command_s_defaults_are_the_recipe_s():
    given, ours = (inspect.signature(function).parameters for function in (cli.tune, tune.request))
    shared = [name for name in ours if name in given]
    assert {"dataset", "loss", "trials", "seeds", "noise_model"} <= {*shared}
    assert {name: given[name].default for name in shared} == {name: ours[name].default for name in shared}


def test_a_study_of_other_results_or_another_version_is_refused(tmp_path, monkeypatch):
    options = ["tune", "--trials", 1, "--epochs", 1, "--loss", "logistic", "--out", tmp_path]
    assert invoke(*options).exit_code == 0
    for name, value, shown in (("RESULTS", RESULTS + 1, "results was"), ("__version__", "0.0.0", "bitempered was")):
        with monkeypatch.context() as patch:
            patch.setattr(f"bitempered.experiments.runs.{name}", value)
            other = invoke(*options)
        assert other.exit_code == 1
        (line,) = error_lines(other)
        assert shown in line
    assert invoke(*options).exit_code == 0


def test_printed_python_runs():
    recipe = LossSettings(Loss("bi-tempered", (0.3, 1.5), (0.5, 1.5), smoothing=0.1), 0.01, 1e-4)
    for one in (recipe, LossSettings(Loss("logistic", smoothing=0.1), 0.01, 1e-4)):
        for optimizer in OPTIMIZERS:
            training = replace(tune.request(epochs=2).comparison.training, optimizer=optimizer)
            scope = {"model": torch.nn.Linear(2, 3)}
            exec(tune_report.python(training, one), scope)
            assert scope["optimizer"].param_groups[0]["weight_decay"] == 1e-4
            assert scope["criterion"].label_smoothing == 0.1
    assert scope["optimizer"].defaults["momentum"] == 0.9


def test_clean_rows_score_the_trials(tmp_path):
    """Validation labels are as in the data, on the first rows alone; training labels are as noisy as without."""
    recipe = replace(TINY, seeds=(0,), clean_rows=20)
    data = cells.read_data(recipe, None)
    split, members, runs = cells.prepare(recipe, data, 0, None)
    noisy_split, noisy, others = cells.prepare(replace(recipe, clean_rows=None), data, 0, None)
    assert len(split.validation[0]) == len(split.validation[1]) == 20
    for member, other, run, theirs in zip(members, noisy, runs, others, strict=True):
        np.testing.assert_array_equal(member.validation, noisy_split.validation[1][:20])
        np.testing.assert_array_equal(member.train, other.train)
        assert run["clean_rows"] == 20
        assert run["data"] != theirs["data"]
    with pytest.raises(cells.DataError, match="digits has 500 validation rows, not 501 clean ones"):
        cells.prepare(replace(recipe, clean_rows=501), data, 0, None)
    assert invoke(*OPTIONS, "--trials", 2, "--loss", "logistic", "--clean", 20, "--out", tmp_path).exit_code == 0
    values = [20 * trial.value for trial in load(tmp_path, "digits-0.4-logistic-20-clean").trials]
    assert values == pytest.approx([round(2 * value) / 2 for value in values])  # halves of twentieths


def test_a_table_with_a_clean_one(tmp_path):
    """A trial's score is the accuracy on the second table, whose labels follow the rule that training labels follow."""
    rng = np.random.default_rng(0)
    for name, rows in (("noisy", 200), ("clean", 40)):
        x = rng.normal(size=(rows, 2))
        label = np.where((x[:, 0] > 0) ^ ((rng.random(rows) < 0.2) & (name == "noisy")), "a", "b")
        lines = [f"{a},{b},{c}" for (a, b), c in zip(x, label, strict=True)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["x,y,kind", *lines]))
    options = ["--dataset", tmp_path / "noisy.csv", "--clean", tmp_path / "clean.csv", "--label-column", "kind"]
    done = invoke("tune", "--trials", 2, "--epochs", 5, *options, "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert f"accuracy on the labels in {tmp_path / 'clean.csv'}" in done.stdout
    assert "--label-column kind" in done.stdout
    values = [80 * trial.value for trial in load(tmp_path / "out", "noisy-0-bi-tempered-file-clean").trials]
    assert values == pytest.approx(np.round(values))  # halves of fortieths
    assert max(values) > 0.8 * 80


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--loss", "gce"], "unknown loss 'gce'; choose from: bi-tempered, logistic"),
        (["--trials", "0"], "trials must be at least 1, got 0"),
        (["--seeds", "0"], "seeds must be at least 1, got 0"),
        (["--noise", "1.5"], "noise levels must be in [0, 1]"),
        (["--clean", "few"], "--clean must be a number of rows of digits, got 'few'"),
        (["--clean", "²"], "--clean must be a number of rows of digits, got '²'"),
        (["--clean", "0"], "the number of rows with clean labels must be at least 1, got 0"),
        (["--dataset", "a.csv", "--clean", "100"], "--clean must be a table with clean labels"),
        (["--dataset", "letters"], "unknown dataset 'letters'"),
    ],
)
def test_bad_options_get_one_line_and_write_nothing(options, message, tmp_path):
    result = invoke("tune", "--out", tmp_path / "out", *options)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_bad_storage_gets_one_line(tmp_path):
    (tmp_path / "study.db").write_text("no database, but a text of some length" * 100)
    for storage in (tmp_path / "study.db", "nodatabase://here"):
        result = invoke(*OPTIONS, "--storage", storage, "--out", tmp_path / "out")
        assert result.exit_code == 1
        (line,) = error_lines(result)
        assert line.startswith(f"bitempered: cannot use the storage {storage}: ")


def test_a_storage_without_its_driver_gets_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg2", None)
    result = invoke(*OPTIONS, "--storage", "postgresql+psycopg2://localhost/x", "--out", tmp_path / "out")
    assert result.exit_code == 1
    (line,) = error_lines(result)
    assert "psycopg2" in line
    assert line.endswith("install what the storage postgresql+psycopg2://localhost/x needs")


def test_a_file_of_trials_needs_no_driver(tmp_path, monkeypatch):
    """So a package that is missing elsewhere is not blamed on it."""

    def fails(*_, **__):
        raise ModuleNotFoundError("No module named 'other'")

    monkeypatch.setattr(tune.tune, "tune", fails)
    result = invoke(*OPTIONS, "--out", tmp_path / "out")
    (line,) = error_lines(result)
    assert "No module named 'other'" in line
    assert "storage" not in line


def test_missing_optuna_gets_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    for command in (OPTIONS, ["reproduce", "tuned", "--quick"]):
        result = invoke(*command, "--out", tmp_path / "out")
        assert result.exit_code == 1
        (line,) = error_lines(result)
        assert line.endswith('"typer>=0.12" "optuna>=3"')


@pytest.mark.slow
def test_ctrl_c_keeps_the_study(tmp_path):
    # A job in the background begins with Ctrl-C ignored.
    code = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from bitempered.cli import main
main()
"""
    command = [sys.executable, "-c", code, "tune", "--trials", "1000", "--epochs", "2", "--out", str(tmp_path)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    first = process.stderr.readline()  # progress, after some trials
    os.kill(process.pid, signal.SIGINT)
    rest = process.communicate(timeout=60)[1]
    assert "trial" in first
    assert process.returncode == 130
    assert rest.splitlines()[-1].startswith("bitempered: stopped; the finished trials are kept: run the same command")
    assert {trial.state.name for trial in load(tmp_path).trials} <= {"COMPLETE", "PRUNED", "FAIL"}


def test_pages_of_a_study_with_one_complete_trial():
    study = optuna.create_study()
    study.add_trial(
        optuna.trial.create_trial(
            params={"rate": 0.1, "decay": 0.1, "smoothing": 0.1}, value=0.5,
            distributions=dict.fromkeys(("rate", "decay", "smoothing"), optuna.distributions.FloatDistribution(0.1, 1)),
        )
    )  # fmt: skip
    pages = tune_report.pages("title", study, "command", "python")
    assert pages["importance.png"].startswith(b"\x89PNG")
    assert pages["contour.png"].startswith(b"\x89PNG")


# Label smoothing in the experiments


@pytest.mark.parametrize("name", ["logistic", "bi-tempered"])
def test_smoothing_reaches_the_loss(name):
    logits, labels = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 1, 0])
    if name == "logistic":
        want = cross_entropy(logits, labels, label_smoothing=0.1, reduction="none")
        loss = Loss("logistic", smoothing=0.1)
    else:
        want = bi_tempered_logistic_loss(logits, labels, 0.5, 1.5, label_smoothing=0.1, reduction="none")
        loss = Loss("bi-tempered", (0.5, 1.5), (2, 4), smoothing=0.1).at(4)
    torch.testing.assert_close(loss(logits, labels), want)
    assert Loss.of(loss.row()) == loss == Loss.parse(loss.text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("logistic:smoothing=2", "label_smoothing"),
        ("logistic:smoothing=some", "could not convert"),
        ("logistic:anneal=1..2", "rescale and schedule are for the bi-tempered loss"),
        ("bi-tempered:0.5:1.5:anneal=5", "schedule must be BEGIN..FINISH or BEGIN..EPOCH..T1..T2..FINISH"),
        ("bi-tempered:0.5:1.5:anneal=5..7..0.5..9", "schedule must be BEGIN..FINISH or BEGIN..EPOCH..T1..T2..FINISH"),
        ("bi-tempered:0.5:1.5:anneal=5..4..0.5..2..9", "begin must not be after finish"),
        ("bi-tempered:0.5:1.5:anneal=5..7..0.5..0.4..9", "t1 must not exceed t2"),
        ("bi-tempered:0.5:1.5:anneal=5..2", "begin must not be after finish"),
        ("bi-tempered:0.5:1.5:speed=5", "unknown option 'speed'; choose from: anneal=BEGIN..FINISH, smoothing=PART"),
    ],
)
def test_bad_options_of_a_loss(text, message):
    with pytest.raises(ValueError, match=re.escape(f"cannot use the loss {text!r}")) as error:
        Loss.parse(text)
    assert message in str(error.value)


def test_an_empty_schedule_of_a_loss():
    with pytest.raises(ValueError, match=r"schedule must be .*, got no numbers"):
        Loss("bi-tempered", (0.5, 1.5), schedule=())


def test_rows_from_before_smoothing_are_found():
    setting = TINY.setting(TINY.cells[0], 0)
    old = {name: value for name, value in setting.items() if name not in ("smoothing", "clean_rows")}
    assert find([old], setting) is old
    assert cells.comparison_of([old | {"seed": 0}]).clean_rows is None
    smoothed = TINY.setting(replace(TINY.cells[0], loss=Loss("logistic", smoothing=0.1)), 0)
    assert find([old], smoothed) is None


def test_decay_of_compare():
    assert compare.request(weight_decay=0.01).comparison.training.weight_decay == 0.01
    with pytest.raises(ValueError, match="weight_decay must be a finite number >= 0, got -1"):
        compare.request(weight_decay=-1)


# reproduce tuned


def test_tuned_in_small(tmp_path):
    done = invoke("reproduce", "tuned", "--quick", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    rows = read_rows(tmp_path / "tuned.jsonl")
    assert sorted({tuned.contender(row) for row in rows}) == sorted(tuned.CONTENDERS)
    assert len(rows) == 6  # three contenders, scored on noisy and on clean labels
    trials = read_rows(tmp_path / "trials.jsonl")
    assert len(trials) == 8  # two of each loss for each
    for row in trials:
        assert row["results"] == RESULTS
        assert row["seeds"] == list(tuned.SEARCH_SEEDS)
        assert all(row[name] for name in ("data", "bitempered", "commit", "device", "date"))
        assert {made["data"].split("-")[0] for made in rows} == {row["data"]}
    assert "had 2 trials, of 2 networks each" in (tmp_path / "tuned.md").read_text()
    again = invoke("reproduce", "tuned", "--quick", "--out", tmp_path)
    assert again.exit_code == 0, again.output
    assert results(read_rows(tmp_path / "tuned.jsonl")) == results(rows)
    assert tuned.render(tmp_path / "tuned.jsonl")["tuned.md"] == (tmp_path / "tuned.md").read_bytes()
