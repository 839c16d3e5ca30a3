"""Class-dependent noise and a weak model's mistakes, as `bitempered compare` adds them to labels."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from experiment_cases import TINY_OPTIONS, assert_rendered, comparison, invoke, silent
from sklearn.linear_model import LogisticRegression

from bitempered.experiments import cells, compare_report, data, datasets, files
from bitempered.experiments.data import Split
from bitempered.experiments.datasets import DATASETS, read

TABLES = ("breast-cancer", "wine")


def noisy_labels(dataset, model, level, split, seed=0):
    return cells.corrupt(comparison(dataset, levels=(level,), noise_model=model), split, level, seed)


def shuffled(split):
    """The split with the training inputs dealt out anew, the labels where they were."""
    x, labels = split.train
    return replace(split, train=(np.random.default_rng(1).permutation(x), labels))


# Class-dependent


@pytest.mark.parametrize("level", [0.0, 0.2, 0.4, 1.0])
@pytest.mark.parametrize("dataset", ["digits", *TABLES])
def test_class_dependent_noise_is_an_exact_fraction_of_the_mistaken_classes(dataset, level):
    split = read(dataset).split(0)
    mapping = cells.confused_classes(dataset, split.num_classes)
    made = noisy_labels(dataset, "class-dependent", level, split)
    for noisy, (_, labels) in zip(made, (split.train, split.validation), strict=True):
        changed = noisy != labels
        assert changed.sum() == round(level * np.isin(labels, list(mapping)).sum())
        assert all(mapping[label] == wrong for label, wrong in zip(labels[changed], noisy[changed], strict=True))


def test_digits_are_mistaken_as_in_the_literature():
    expected = {2: 7, 3: 8, 5: 6, 6: 5, 7: 1}  # Patrini et al., CVPR 2017, section 5
    assert cells.confused_classes("digits", 10) == cells.confused_classes("mnist", 10) == expected
    text = " ".join(invoke("compare", "--help").stdout.replace("│", " ").split())
    assert "7 for 1, 2 for 7, 5 for 6, 6 for 5 and 3 for 8" in text


@pytest.mark.parametrize("classes", [2, 3, 10, 100])  # one of two, two of three, half of ten and of a hundred
def test_elsewhere_half_of_the_classes_are_mistaken(classes):
    mapping = cells.confused_classes("table.csv", classes)
    assert mapping == cells.confused_classes("other.csv", classes)
    assert len(mapping) == (classes + 1) // 2
    assert all(label != wrong for label, wrong in mapping.items())
    assert len(set(mapping.values())) == len(mapping)
    assert {*mapping, *mapping.values()} <= set(range(classes))


def test_class_dependent_noise_does_not_depend_on_the_inputs():
    split = read("digits").split(0)
    for first, same in zip(
        noisy_labels("digits", "class-dependent", 0.4, split),
        noisy_labels("digits", "class-dependent", 0.4, shuffled(split)),
        strict=True,
    ):
        np.testing.assert_array_equal(first, same)


# A weak model


@pytest.mark.parametrize("level", [0.0, 0.1, 0.2, 0.4])
@pytest.mark.parametrize("dataset", ["digits", *TABLES])
def test_a_weak_model_makes_exactly_the_rate_wrong(dataset, level):
    split = read(dataset).split(0)
    made = noisy_labels(dataset, "weak-model", level, split)
    for noisy, (_, labels) in zip(made, (split.train, split.validation), strict=True):
        assert (noisy != labels).sum() == round(level * len(labels))
        assert noisy.dtype == labels.dtype
        assert set(noisy) <= set(range(split.num_classes))


def test_a_weak_model_learns_from_one_per_cent_of_each_class_at_least_three_rows(monkeypatch):
    seen = []

    def spy(self, x, y):
        seen.append((x, y))
        return original(self, x, y)

    original = LogisticRegression.fit
    monkeypatch.setattr(LogisticRegression, "fit", spy)
    rng = np.random.default_rng(0)
    labels = np.repeat([0, 1, 3], [1_000, 240, 2])  # 10, 3 rather than 2, and all there are; no row of class 2
    x = np.arange(len(labels), dtype=np.float32)[:, None]
    model = data.weak_model((x, labels), rng)
    ((rows, right),) = seen
    assert np.bincount(right).tolist() == [10, 3, 0, 2]
    np.testing.assert_array_equal(labels[rows[:, 0].astype(int)], right)
    assert len(np.unique(rows)) == 15
    scores = data.scores(model, x, 4)
    assert scores.shape == (len(x), 4)
    assert (scores.argmin(axis=1) == 2).all()


def test_two_classes_have_two_scores_and_bytes_are_pixels():
    x = np.array([[[[0]]], [[[51]]], [[[204]]], [[[255]]]] * 3, dtype=np.uint8)
    labels = np.array([0, 0, 1, 1] * 3)
    assert data.flat(x).ravel()[:4].tolist() == [0.0, 0.2, 0.8, 1.0]
    assert data.flat(x.astype(np.float32)).dtype == np.float64
    model = data.weak_model((x, labels), np.random.default_rng(0))
    scores = data.scores(model, x, 2)
    np.testing.assert_array_equal(scores.argmax(axis=1), model.predict(data.flat(x)))
    assert (scores[:, 0] == 0).all()


def test_a_weak_model_s_noise_depends_on_the_inputs():
    split = read("digits").split(0)
    labels = split.train[1]
    noisy, _ = noisy_labels("digits", "weak-model", 0.4, split)
    other, _ = noisy_labels("digits", "weak-model", 0.4, shuffled(split))
    assert (noisy != other).any()
    # A wrong row looks more like the class it is taken for than the right rows of its class do.
    means = np.stack([split.train[0][labels == label].mean(axis=0) for label in range(10)])
    distance = np.linalg.norm(split.train[0][:, None] - means, axis=2)
    nearer, counted = 0, 0
    for label in range(10):
        for wrong in np.unique(noisy[(labels == label) & (noisy != label)]):
            gap = distance[:, wrong] - distance[:, label]
            taken, kept = (labels == label) & (noisy == wrong), (labels == label) & (noisy == label)
            if taken.any() and kept.any():
                nearer, counted = nearer + (gap[taken].mean() < gap[kept].mean()), counted + 1
    # By chance half of them would be; nearly all are.
    assert counted > 20
    assert nearer > 0.8 * counted


@pytest.mark.parametrize("model", ["class-dependent", "weak-model"])
def test_noise_is_fixed_by_its_seed(model):
    split = read("digits").split(0)
    first, same, other = (noisy_labels("digits", model, 0.4, split, seed)[0] for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, same)
    assert (first != other).any()


def test_noise_reaches_any_number_of_classes_and_a_tiny_table():
    rng = np.random.default_rng(0)
    labels = np.arange(8) % 4
    part = (rng.normal(size=(8, 2)).astype(np.float32), labels)
    split = Split(part, part, part, 4)
    for model in ("class-dependent", "weak-model"):
        made = noisy_labels("table.csv", model, 0.5, split)
        # Half of the two classes that are mistaken, with two rows each; half of all rows.
        assert [(noisy != labels).sum() for noisy in made] == ([2, 2] if model == "class-dependent" else [4, 4])


# The report


@pytest.mark.parametrize(
    ("model", "dataset", "said"),
    [
        ("class-dependent", "digits", "some classes are mistaken (7 for 1, 2 for 7, 5 for 6, 6 for 5, 3 for 8); the"),
        ("class-dependent", "wine", "half of the classes, each for one other); the noise is the fraction of their"),
        ("weak-model", "wine", "mistakes of a linear model that learnt from 1% of the training rows"),
        ("pair-flip", "wine", None),
    ],
)
def test_the_report_says_what_the_noise_is(model, dataset, said):
    notes = compare_report.model_notes(comparison(dataset, noise_model=model))
    assert len(notes) == (said is not None)
    assert said is None or said in notes[0]
    assert compare_report.model_notes(comparison(dataset, levels=(0.0,), noise_model=model)) == []


@pytest.mark.parametrize("dataset", TABLES)
def test_tables_of_scikit_learn_are_standardised_and_run(dataset, tmp_path):
    split = read(dataset).split(0)
    assert split.train[0].dtype == np.float32
    # Float32: the mean of up to 300 numbers of size 1 carries a few units of the last of seven digits.
    np.testing.assert_allclose(split.train[0].mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(split.train[0].std(axis=0), 1, atol=1e-5)
    assert len(np.unique(split.test[1])) == DATASETS[dataset].num_classes == split.num_classes
    rows = cells.run(comparison(dataset, seeds=1, noise_model="weak-model"), tmp_path, silent)
    assert [row["noise_model"] for row in rows] == ["weak-model"] * 4


def test_rows_of_other_noise_keep_their_identity():
    """The rows in results/compare were made before these models: their labels must have the same hashes."""
    kept = files.read_rows(Path(__file__).parents[1] / "results" / "compare" / "compare.jsonl")
    recipe = cells.comparison_of(kept)
    _, _, runs = cells.prepare(recipe, datasets.read("digits"), 0, None)
    assert {run["data"] for run in runs} == {row["data"] for row in kept if row["seed"] == 0}


@pytest.mark.parametrize("model", ["class-dependent", "weak-model"])
def test_the_command_compares_under_this_noise(model, tmp_path):
    done = invoke(*TINY_OPTIONS, "--noise-model", model, "--out", tmp_path)
    assert done.exit_code == 0, done.output
    assert f"{model}: " in done.stdout
    assert {row["noise_model"] for row in files.read_rows(tmp_path / "compare.jsonl")} == {model}
    assert_rendered(tmp_path, "compare.md", "compare.csv", "compare.png")
