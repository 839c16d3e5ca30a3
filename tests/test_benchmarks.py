"""The scripts in benchmarks/: what they compute, and that their committed pages are what their rows say."""

import importlib.util
import sys
from fractions import Fraction
from pathlib import Path
from statistics import mean

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

from experiment_cases import without

from bitempered import noise
from bitempered.experiments.files import read_rows, write_rows

RENDERED = (
    "calibration", "choosing", "classes", "collapse", "decay", "logistic_regression", "peers", "playground",
    "rare_classes",
)  # fmt: skip
FOLDER = Path(__file__).parents[1] / "benchmarks"


def load(name):
    specification = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.fixture
def calibration():
    pytest.importorskip("sklearn", minversion="1.8", reason="method='temperature'")
    return load("calibration")


@pytest.mark.parametrize("name", [*RENDERED, "estimators", "scale", "scale_linear"])
def test_committed_pages_are_rendered_from_their_rows(name, tmp_path, monkeypatch):
    if name == "estimators":
        pytest.importorskip("lightgbm")
        pytest.importorskip("xgboost")
    script = load(name)
    rows = tmp_path / f"{name}.jsonl"
    rows.write_bytes((FOLDER / rows.name).read_bytes())
    monkeypatch.setattr(script, "ROWS", rows)
    monkeypatch.setattr(script, "measure", lambda: pytest.fail("--render must not measure"))
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--render"])
    script.main()
    assert rows.with_suffix(".md").read_bytes() == (FOLDER / f"{name}.md").read_bytes()
    assert rows.read_bytes() == (FOLDER / rows.name).read_bytes()


def exact_calibration_error(p, y, bins):
    """The definition in exact fractions: bin b holds the rows with a confidence in (b / bins, (b + 1) / bins]."""
    total = Fraction(0)
    for b in range(bins):
        inside = [i for i, row in enumerate(p) if Fraction(b, bins) < Fraction(max(row)) <= Fraction(b + 1, bins)]
        if inside:
            accuracy = Fraction(sum(p[i][y[i]] == max(p[i]) for i in inside), len(inside))
            confidence = sum(Fraction(max(p[i])) for i in inside) / len(inside)
            total += Fraction(len(inside), len(p)) * abs(accuracy - confidence)
    return float(total)


@pytest.mark.parametrize("classes", [2, 10])  # confidences from 1/2 on, and in nearly all bins
def test_the_calibration_error_is_that_of_its_definition(calibration, classes):
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.full(classes, 0.3), 400)
    # Right with probability 0.7 at any confidence: too unsure in low bins, too sure in high ones; so bins count.
    y = (p.argmax(axis=1) + (rng.random(400) < 0.3)) % classes
    exact = exact_calibration_error(p.tolist(), y.tolist(), 15)
    assert exact > 1e-3 + abs(np.mean(p.argmax(axis=1) == y) - p.max(axis=1).mean())
    assert calibration.calibration_error(p, y) == pytest.approx(exact, abs=1e-12)  # rounding of 400 sums


def test_calibration_error_of_known_cases(calibration):
    sure = np.eye(3)[[0, 1, 2, 0]]
    assert calibration.calibration_error(sure, np.array([0, 1, 2, 0])) == 0
    assert calibration.calibration_error(sure, np.array([1, 2, 0, 1])) == 1
    # Too sure and too unsure in one bin cancel out; in two bins they do not.
    p, y = np.array([[0.9, 0.1], [0.6, 0.4]]), np.array([1, 0])
    assert calibration.calibration_error(p, y, bins=1) == pytest.approx(0.25)
    assert calibration.calibration_error(p, y, bins=5) == pytest.approx((0.9 + 0.4) / 2)


@pytest.mark.parametrize("rate", [0.0, 0.2, 0.4])
def test_undoing_noise_inverts_the_noise_that_is_made(calibration, rate):
    classes, n = 4, 60_000
    moved = [noise.symmetric(np.full(n, c), rate, rng=np.random.default_rng(c), num_classes=classes) for c in range(4)]
    kernel = np.array([np.bincount(labels, minlength=classes) / n for labels in moved])  # P(noisy label | label)
    q = np.random.default_rng(0).dirichlet(np.ones(classes), 50)
    # Shares of 60,000 draws are off by about 0.002, which the inverse divides by 1 - 0.4 * 4 / 3.
    np.testing.assert_allclose(calibration.undo_noise(q @ kernel, rate), q, atol=0.02)


def test_calibration_runs(calibration, tmp_path, monkeypatch):
    monkeypatch.setattr(calibration, "ROWS", tmp_path / "calibration.jsonl")
    monkeypatch.setattr(calibration, "MODELS", {"two epochs": {"max_iter": 2}})
    monkeypatch.setattr(calibration, "NOISE", (0.0, 0.4))
    monkeypatch.setattr(calibration, "SEEDS", (0,))
    monkeypatch.setattr(sys, "argv", ["calibration.py"])
    calibration.main()
    rows = read_rows(tmp_path / "calibration.jsonl")
    assert [(row["noise"], row["remedy"]) for row in rows] == [
        (rate, remedy) for rate in (0.0, 0.4) for remedy in calibration.REMEDIES
    ]
    for row in rows:
        assert 0 <= row["calibration_error"] <= 1
        assert {"commit", "date", "device", "sklearn"} <= set(row)
    assert "two epochs" in (tmp_path / "calibration.md").read_text()


def test_the_rows_bear_out_the_advice_on_calibration(calibration):
    rows = read_rows(FOLDER / "calibration.jsonl")
    for rate in (0.2, 0.4):
        for name in calibration.MODELS:
            cell = [row for row in rows if (row["noise"], row["model"]) == (rate, name)]
            by_remedy = {remedy: [row for row in cell if row["remedy"] == remedy] for remedy in calibration.REMEDIES}
            error = {key: mean(row["calibration_error"] for row in cell) for key, cell in by_remedy.items()}
            assert error["temperature"] < 0.5 * min(error[other] for other in error if other != "temperature")
            assert error["noise undone"] < error["nothing"]
            accuracy = {key: [row["accuracy"] for row in cell] for key, cell in by_remedy.items()}
            assert accuracy["temperature"] == accuracy["noise undone"] == accuracy["nothing"]


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")  # one epoch
def test_rare_classes_are_cut_and_weights_are_those_of_the_noisy_labels(monkeypatch):
    script = load("rare_classes")
    y = np.repeat(np.arange(10), 50)
    kept = script.cut(y, 7, np.random.default_rng(0))
    assert len(set(kept)) == len(kept)
    assert np.bincount(y[kept]).tolist() == [50, 7] * 5
    fits, make = [], script.classifier

    def classifier(rows):
        model = make(rows)
        fit, model.max_iter = type(model).fit, 1

        def watched(X, y, sample_weight=None):
            fits.append((y, sample_weight))
            return fit(model, X, y, sample_weight=sample_weight)

        model.fit = watched
        return model

    monkeypatch.setattr(script, "classifier", classifier)
    rows = script.run_one(30, 0.2, 0)
    assert [(row["model"], row["balanced"]) for row in rows] == [
        (name, balanced) for name in script.MODELS for balanced in (False, True)
    ]
    for row, (given, weights) in zip(rows, fits, strict=True):
        assert 640 <= len(given) <= 660  # 5 x about 100 and 5 x 30
        assert (weights is None) == (not row["balanced"])
        if weights is not None:
            per_class = np.bincount(given, weights)
            np.testing.assert_allclose(per_class, per_class[0])
        assert 0 <= row["rare"] <= 1
        assert 0 <= row["common"] <= 1


def test_collapse_runs_and_goes_on_from_its_rows(tmp_path, monkeypatch):
    collapse = load("collapse")
    monkeypatch.setattr(collapse, "ROWS", tmp_path / "collapse.jsonl")
    for name, value in {"BOX": {3: 1.3}, "T1": (0.8,), "T2": (1.0, 1.2)}.items():
        monkeypatch.setattr(collapse, name, value)
    monkeypatch.setattr(collapse, "STRONGER", [(3, 1.3, (1.0, 0.1), ((0.8, 1.2),))])
    monkeypatch.setattr(sys, "argv", ["collapse.py"])
    collapse.main()
    rows = read_rows(tmp_path / "collapse.jsonl")
    assert len(rows) == 3 + 2
    assert all(row["accuracy"] > 0.8 and row["never_predicted"] == 0 for row in rows)
    text = (tmp_path / "collapse.md").read_text()
    assert "Of 2 fits, 0 never predict one of the classes" in text
    monkeypatch.setattr(collapse, "fit", lambda *_: pytest.fail("all rows are there"))
    collapse.main()
    assert (tmp_path / "collapse.md").read_text() == text
    # Rows of other data, or without a hash of it, are shown but not used again.
    for changed in ([row | {"data": "other"} for row in rows], without(rows, "data")):
        write_rows(tmp_path / "collapse.jsonl", changed)
        with pytest.raises(pytest.fail.Exception, match="all rows are there"):
            collapse.main()


def test_tasks_of_many_classes_are_made_of_digits_that_their_parts_do_not_share():
    classes = load("classes")
    for count, width in ((3, 64), (26, 128)):
        split = classes.task(count, seed=0)
        images = [set(map(bytes, x.reshape(-1, 64))) for x, _ in (split.train, split.validation, split.test)]
        assert len(set.union(*images)) == sum(map(len, images))
        for x, y in (split.train, split.validation, split.test):
            assert x.shape == (len(y), width)
            assert set(y.tolist()) == set(range(count))
    pixels, digits = np.arange(20.0).reshape(10, 2), np.arange(10)
    x, y = classes.pairs(pixels, digits, np.array([7, 42]), np.random.default_rng(0))
    assert x.tolist() == [[0, 1, 14, 15], [8, 9, 4, 5]]
    assert y.tolist() == [7, 42]


def test_classes_run_and_go_on_from_their_rows(tmp_path, monkeypatch):
    classes = load("classes")
    monkeypatch.setattr(classes, "ROWS", tmp_path / "classes.jsonl")
    for name, value in {"CLASSES": (3,), "SEEDS": (0,), "STEPS": 8, "RATES": {"adam": 1e-3}}.items():
        monkeypatch.setattr(classes, name, value)
    # The page names the rates of both optimisers.
    monkeypatch.setattr(classes, "page", lambda rows: f"{len(rows)} rows")
    monkeypatch.setattr(sys, "argv", ["classes.py"])
    classes.main()
    rows = read_rows(tmp_path / "classes.jsonl")
    assert [(row["numbers"], row["noise"]) for row in rows] == [
        (numbers, level) for numbers in ([], [0.0, 2.0], [0.0, 2.5]) for level in (0.0, 0.4)
    ]
    monkeypatch.setattr(classes, "run", lambda *_: pytest.fail("all rows are there"))
    classes.main()
    assert (tmp_path / "classes.md").read_text() == "6 rows"


def test_decay_runs(tmp_path, monkeypatch):
    decay = load("decay")
    monkeypatch.setattr(decay, "ROWS", tmp_path / "decay.jsonl")
    for name, value in {"DECAYS": (0.0, 0.1), "SEEDS": (0,), "EPOCHS": 2}.items():
        monkeypatch.setattr(decay, name, value)
    monkeypatch.setattr(sys, "argv", ["decay.py"])
    decay.main()
    rows = read_rows(tmp_path / "decay.jsonl")
    assert len(rows) == 2 * len(decay.MODELS) * len(decay.NOISE)
    without_decay, with_decay = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    assert [r["test_last"] for r in without_decay] != [r["test_last"] for r in with_decay]
    assert "| decay 0 | decay 0.1 |" in (tmp_path / "decay.md").read_text()


@pytest.mark.slow
def test_estimators_run_and_go_on_from_their_rows(tmp_path, monkeypatch):
    pytest.importorskip("lightgbm")
    pytest.importorskip("xgboost")
    script = load("estimators")
    values = {"ROWS": tmp_path / "estimators.jsonl", "TRIALS": 2, "SEEDS": range(2), "SEARCH_SEEDS": (100,)}
    for name, value in {**values, "FAMILIES": {"linear": script.linear}}.items():
        monkeypatch.setattr(script, name, value)
    monkeypatch.setattr(sys, "argv", ["estimators.py"])
    script.main()
    rows = read_rows(tmp_path / "estimators.jsonl")
    assert len(rows) == 2 * (2 + 2)  # of two losses: two trials, and two seeds of the better one
    assert ["test" in row for row in rows] == [False] * 4 + [True] * 4
    assert all(row["data"] and row["results"] and row["date"] for row in rows)
    page = (tmp_path / "estimators.md").read_text()
    monkeypatch.setattr(script, "run_one", lambda *_: pytest.fail("all rows are there"))
    script.main()
    assert (tmp_path / "estimators.md").read_text() == page
    # Rows of other data are not used again.
    write_rows(tmp_path / "estimators.jsonl", [row | {"data": "other"} for row in rows])
    with pytest.raises(pytest.fail.Exception, match="all rows are there"):
        script.main()


def test_the_audit_page_is_rendered_from_its_rows(tmp_path, monkeypatch):
    script = load("audit")
    rows = tmp_path / "audit.jsonl"
    rows.write_bytes((FOLDER / rows.name).read_bytes())
    monkeypatch.setattr(script, "ROWS", rows)
    monkeypatch.setattr(sys, "argv", ["audit.py", "report"])
    script.main()
    assert rows.with_suffix(".md").read_bytes() == (FOLDER / "audit.md").read_bytes()


def test_the_rows_bear_out_what_is_said_of_audit():
    """Ahead of both rivals but for one case, which docs/audit.md names; only systematic noise is called so."""
    script = load("audit")
    rows = read_rows(FOLDER / "audit.jsonl")
    rivals = (*script.CLEANLAB.values(), script.EPOCH_MARGINS)
    for part in ("digits", "mnist"):
        for model, rate in [(model, rate) for model in script.MODELS for rate in script.RATES]:
            here = [row for row in rows if row["part"] == part]
            if not script.pick(here, "audit, posterior", model, rate, "auroc"):
                continue
            for key in ("auroc", "precision"):
                ours, *others = (
                    mean(script.pick(here, name, model, rate, key)) for name in ("audit, posterior", *rivals)
                )
                behind = (part, model, rate, key) == ("digits", "symmetric", 0.2, "precision")
                assert (ours < max(others)) == behind, (part, model, rate, key)
            named, right, true = (
                script.pick(here, "audit, posterior", model, rate, key)
                for key in ("pairs", "pairs_right", "true_pairs")
            )
            assert right == true  # all confused pairs are named
            assert model != "symmetric" or not any(named)
            gains = [
                mean(script.pick(here, f"cross-entropy, {used}", model, rate, "accuracy"))
                for used in ("as given", "without cleanlab's issues", "without wrong ones")
            ]
            assert gains == sorted(gains), (part, model, rate)


def test_audit_is_judged_by_definition():
    """AUROC and precision of a known order; the estimates of an audit that knows the truth, and of one that errs."""
    script = load("audit")
    scores, wrong = np.array([0.9, 0.8, 0.7, 0.1]), np.array([True, False, True, False])
    assert script.quality(scores, wrong) == {"auroc": 0.75, "precision": 0.5}
    clean = np.repeat(np.arange(4), 100)
    labels = np.where(np.arange(400) % 100 < 20, 3, clean)  # 20 % of each class but the last are labelled 3
    known = script.label_issues(labels, np.eye(4)[clean])
    found = script.estimates(known, clean)
    assert found["true_rate"] == pytest.approx(0.15)
    assert found["confusion_error"] == pytest.approx(0, abs=1e-9)
    assert found["cleaned_right"] == 1
    assert found["pairs"] == found["true_pairs"] == found["pairs_right"] == 3
    fooled = script.estimates(script.label_issues(labels, np.eye(4)[labels]), clean)
    assert (fooled["pairs"], fooled["pairs_right"]) == (0, 0)
    assert fooled["confusion_error"] == pytest.approx(0.15)


def test_patch_features_tell_images_apart():
    """Stripes one way and the other, which have the same mean and deviation in each patch."""
    rng = np.random.default_rng(0)
    stripes = np.tile(np.array([0, 200]), 16)
    kinds = [np.broadcast_to(stripes, (3, 32, 32)), np.broadcast_to(stripes[:, None], (3, 32, 32))]
    images = np.stack([kinds[i % 2] + rng.integers(0, 20, (3, 32, 32)) for i in range(40)]).astype(np.uint8)
    x = load("audit").patch_features(images, centres=8)
    assert x.shape == (40, 32)
    apart = np.linalg.norm(x[0::2].mean(axis=0) - x[1::2].mean(axis=0))
    assert apart > 3 * np.linalg.norm(x[0::2].std(axis=0))


def test_no_committed_fit_collapses_in_silence():
    rows = read_rows(FOLDER / "collapse.jsonl")
    assert {row["classes"] for row in rows} == {2, 3, 10, 30, 100}
    assert not [row for row in rows if row["never_predicted"] and not row["warnings"]]
