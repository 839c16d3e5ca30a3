"""`bitempered reproduce other-noise`: its cells, its files, and rendering them again from the rows."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from experiment_cases import assert_rendered, invoke, silent

from bitempered.experiments import cells, files, recipes
from bitempered.experiments.recipes import Options, other_noise

NAMES = ("other-noise.md", "other-noise.csv", "other-noise.png")


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """What the command says with --quick, and its folder."""
    folder = tmp_path_factory.mktemp("other") / "out"
    done = invoke("reproduce", "other-noise", "--quick", "--out", folder)
    assert done.exit_code == 0, done.output
    return done, folder


def test_every_data_set_has_every_noise_and_every_loss():
    for data in other_noise.DATA:
        levels = (0.1, 0.2, 0.3) if data.name == "breast-cancer" else (0.2, 0.4)
        for model in ("pair-flip", "class-dependent", "weak-model"):
            recipe = other_noise.comparison(data, model, 5)
            assert (recipe.dataset, recipe.noise_model, recipe.seeds) == (data.name, model, (0, 1, 2, 3, 4))
            assert {cell.noise for cell in recipe.cells} == set(levels)
            assert {cell.rate for cell in recipe.cells} == {1e-3}
            assert len(recipe.cells) == 3 * len(levels)
            (ours,) = {cell.loss for cell in recipe.cells if cell.loss.name == "bi-tempered"}
            # From 5 to 40 % of the run, then to its end, without rescaling.
            epochs = recipe.training.epochs
            assert ours.schedule is not None
            begin, knee, _, _, finish = ours.schedule
            assert (begin, knee, finish) == pytest.approx((0.05 * epochs, 0.4 * epochs, epochs), abs=1e-5)
            assert not ours.rescale
    assert [data.name for data in other_noise.DATA] == ["digits", "breast-cancer", "wine", "mnist"]
    assert other_noise.DATA[-1].rows == 10_000


def test_quick_writes_rows_tables_and_a_figure(quick):
    done, folder = quick
    rows = files.read_rows(folder / "other-noise.jsonl")
    # Three kinds of noise and three losses: two levels on digits, three on breast-cancer.
    assert len(rows) == 3 * 3 * (2 + 3)
    fitted = files.read_rows(folder / "estimators.jsonl")
    assert len(fitted) == 3 * 4 * (2 + 3)
    assert all(0 <= row["test"] <= 1 and row["commit"] and row["sklearn"] for row in fitted)
    # The estimators learn from the labels of the networks.
    assert {row["data"] for row in fitted} == {row["data"] for row in rows}
    page = (folder / "other-noise.md").read_text()
    assert page.count("| digits | ") == 2 * 3 * 2
    assert page.count("| breast-cancer | ") == 2 * 3 * 3
    assert "± 0" not in page  # one seed has no deviation
    assert "other-noise.md, other-noise.csv, other-noise.png" in done.stdout
    assert not list(folder.glob("*.checkpoint"))


def test_the_rows_are_rendered_again_byte_for_byte(quick, tmp_path):
    _, folder = quick
    assert_rendered(folder, *NAMES)
    done = invoke("report", folder, "--out", tmp_path)
    assert done.exit_code == 0
    for name in NAMES:
        assert next(tmp_path.rglob(name)).read_bytes() == (folder / name).read_bytes()


def test_the_page_does_not_depend_on_the_order_of_the_rows_nor_on_the_estimators(quick, tmp_path):
    _, folder = quick
    rows, fitted = (files.read_rows(folder / f"{name}.jsonl") for name in ("other-noise", "estimators"))
    whole = (folder / "other-noise.md").read_text()
    files.write_rows(tmp_path / "other-noise.jsonl", [*rows[::-1]])
    (tmp_path / "curves.jsonl").write_bytes((folder / "curves.jsonl").read_bytes())
    alone = recipes.render(tmp_path)["other-noise.md"].decode()
    assert "scikit-learn" not in alone
    assert whole.startswith(alone.rstrip())
    files.write_rows(tmp_path / "estimators.jsonl", fitted[::-1])
    assert recipes.render(tmp_path)["other-noise.md"].decode() == whole


def test_nothing_is_trained_or_fitted_twice(quick, monkeypatch):
    _, folder = quick
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def refuse(*_):
        raise AssertionError("fitted again")

    monkeypatch.setattr(other_noise, "ESTIMATORS", dict.fromkeys(other_noise.ESTIMATORS, refuse))
    monkeypatch.setattr("bitempered.experiments.cells.train", refuse)
    assert invoke("reproduce", "other-noise", "--quick", "--out", folder).exit_code == 0
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_two_processes_fit_no_estimator_twice(quick, tmp_path, monkeypatch):
    """While one process fits, another waits and then uses its rows."""
    part = other_noise.comparison(other_noise.DATA[0].quick(rows=64), "pair-flip", 1)
    data = cells.read_data(part, None)
    fitting, waiting, fitted, real = threading.Event(), threading.Event(), [], other_noise.fit

    def slowly(*given):
        fitted.append(given[0])
        fitting.set()
        assert waiting.wait(60)
        return real(*given)

    def progress(done, total, text):
        if "waiting" in text:
            waiting.set()

    monkeypatch.setattr(other_noise, "fit", slowly)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(other_noise.fit_estimators, part, data, tmp_path, silent)
        assert fitting.wait(60)
        other_noise.fit_estimators(part, data, tmp_path, progress)
        other.result()
    assert len(fitted) == 2 * 4  # two levels, four estimators
    assert len(files.read_rows(tmp_path / "estimators.jsonl")) == 2 * 4


def test_the_page_states_the_rows_rate(quick):
    _, folder = quick
    rows = [row | {"learning_rate": 0.005} for row in files.read_rows(folder / "other-noise.jsonl")]
    assert "Adam at 0.005 for" in other_noise.markdown("page", rows, [])


def test_differences_are_taken_seed_by_seed(quick):
    _, folder = quick
    row = files.read_rows(folder / "other-noise.jsonl")[0]
    tested = {"logistic": (0.5, 0.6), "gce": (0.7, 0.7), "bi-tempered": (0.55, 0.7)}
    rows = [
        row | {"loss": loss, "seed": seed, "test_last": accuracy, "test_chosen": 0.5}
        for loss, accuracies in tested.items()
        for seed, accuracy in list(enumerate(accuracies))[:: -1 if loss == "gce" else 1]
    ]
    # By hand: 5 and 10 points have the mean 7.5 and the sample deviation 5 / sqrt(2).
    assert other_noise.lines(rows, deviations=True)[0][-1] == "+7.5 ± 3.5 / +0.0 ± 0.0"
    assert other_noise.lines(rows, deviations=False)[0][-1] == "+7.5 / +0.0"
    assert other_noise.lines(rows, deviations=True)[0][2] == "55.0 ± 7.1 / 50.0 ± 0.0"


def test_mnist_without_its_files_gets_one_line(tmp_path, monkeypatch):
    mnist = replace(other_noise.DATA[-1], rows=10)
    monkeypatch.setattr(other_noise, "DATA", (mnist,))
    done = invoke("reproduce", "other-noise", "--data-dir", tmp_path / "nowhere", "--out", tmp_path / "out")
    assert done.exit_code == 1
    assert "bitempered: " in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_the_plan_names_its_folder():
    assert recipes.plan("other-noise", Options("cpu")).name == "other-noise"
    assert recipes.plan("other-noise", Options("cpu", quick=True)).name == "other-noise-quick"


def test_rows_of_a_part_are_rendered(quick, tmp_path):
    _, folder = quick
    rows = [row for row in files.read_rows(folder / "other-noise.jsonl") if row["noise_model"] == "weak-model"]
    files.write_rows(tmp_path / "other-noise.jsonl", rows[3:])  # without a level of digits
    (tmp_path / "curves.jsonl").write_bytes((folder / "curves.jsonl").read_bytes())
    page = recipes.render(tmp_path)["other-noise.md"].decode()
    assert page.count("weak-model ") == 1 + 1 + 3  # in the text, and a line for each level
    assert "pair-flip " not in page.partition("± is the")[0]
