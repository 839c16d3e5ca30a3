"""Label noise: how many labels change, into what, and what bad input gets."""

import io
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitempered.noise import asymmetric, from_file, large_margin, mistakes, pair_flip, small_margin, symmetric


@given(
    rate=st.floats(0, 1),
    num_classes=st.sampled_from([2, 3, 10, 200]),  # smallest, odd, digits, past the range of int8
    dtype=st.sampled_from([np.int64, np.int32, np.uint8]),  # uint8: the sum of two labels overflows
    size=st.integers(0, 300),
    seed=st.integers(0, 100),
)
def test_symmetric_changes_exactly_the_rate(rate, num_classes, dtype, size, seed):
    labels = np.random.default_rng(seed).integers(0, num_classes, size).astype(dtype)
    before = labels.copy()
    noisy = symmetric(labels, rate, rng=np.random.default_rng(seed), num_classes=num_classes)
    assert (noisy != labels).sum() == round(rate * size)
    assert noisy.dtype == labels.dtype
    assert size == 0 or (noisy.min() >= 0 and noisy.max() < num_classes)
    np.testing.assert_array_equal(labels, before)


def test_symmetric_is_uniform_over_the_other_classes():
    labels = np.full(90_000, 3)
    counts = np.bincount(symmetric(labels, 1.0, rng=np.random.default_rng(0), num_classes=10), minlength=10)
    assert counts[3] == 0
    # 10,000 expected in each; five standard deviations of a binomial count are 471.
    assert np.abs(np.delete(counts, 3) - 10_000).max() < 471


def test_symmetric_flips_every_position_equally_often():
    rng = np.random.default_rng(0)
    labels = np.arange(10)
    flips = sum(symmetric(labels, 0.3, rng=rng, num_classes=10) != labels for _ in range(10_000))
    # 3,000 expected at each; five standard deviations of a binomial count are 229.
    assert np.abs(flips - 3_000).max() < 229


def test_symmetric_follows_its_generator():
    labels = np.arange(100) % 10
    first, same, other = (symmetric(labels, 0.4, rng=np.random.default_rng(s), num_classes=10) for s in (0, 0, 1))
    np.testing.assert_array_equal(first, same)
    assert (first != other).any()


@pytest.mark.parametrize(
    ("labels", "rate", "num_classes", "message"),
    [
        ([0, 1], 1.5, 2, r"rate must be in \[0, 1\], got 1.5"),
        ([0, 1], -0.1, 2, r"rate must be in \[0, 1\], got -0.1"),
        ([0, 1], float("nan"), 2, r"rate must be in \[0, 1\], got nan"),
        ([0.0, 1.0], 0.1, 2, "integers, got shape .* and dtype float64"),
        ([[0, 1]], 0.1, 2, r"one-dimensional array of integers, got shape \(1, 2\)"),
        ([0, 2], 0.1, 2, r"labels must be in \[0, 2\) .* got labels from 0 to 2"),
        ([-1, 0], 0.1, 2, "got labels from -1 to 0"),
        ([0, 0], 0.1, 1, "num_classes must be at least 2, got 1"),
        (np.zeros(2, np.uint8), 0.1, 257, "uint8 cannot hold 257 classes; convert the labels, for instance to int64"),
        (np.zeros(2, np.int8), 0.1, 129, "int8 cannot hold 129 classes"),
    ],
)
def test_symmetric_refuses_bad_input(labels, rate, num_classes, message):
    with pytest.raises(ValueError, match=message):
        symmetric(np.array(labels), rate, rng=np.random.default_rng(0), num_classes=num_classes)


def test_as_many_classes_as_a_narrow_dtype_holds():
    labels = np.full(3000, 5, np.uint8)
    noisy = symmetric(labels, 1.0, rng=np.random.default_rng(0), num_classes=256)
    assert (noisy != labels).all()
    with pytest.raises(TypeError, match=r"num_classes must be a whole number, got 2\.5"):
        symmetric(labels, 1.0, rng=np.random.default_rng(0), num_classes=2.5)


# The other models: name, arguments beside labels, rate and rng for labels of ten classes.


MARGIN = np.random.default_rng(9).normal(size=200)
MODELS = [
    (symmetric, {"num_classes": 10}),
    (symmetric, {"num_classes": 10, "including_self": True}),
    (asymmetric, {"mapping": {9: 1, 2: 0, 4: 7, 3: 5, 5: 3}}),
    (pair_flip, {"num_classes": 10}),
    (small_margin, {"num_classes": 10, "margin": MARGIN}),
    (large_margin, {"num_classes": 10, "margin": MARGIN, "pool": 0.6}),
]


@pytest.mark.parametrize(("model", "options"), MODELS)
@pytest.mark.parametrize("dtype", [np.int64, np.uint8])
def test_every_model_is_seeded_keeps_the_dtype_and_leaves_its_input_alone(model, options, dtype):
    labels = np.random.default_rng(0).integers(0, 10, 200).astype(dtype)
    before = labels.copy()
    first, same, other = (model(labels, 0.4, rng=np.random.default_rng(seed), **options) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, same)
    assert (first != other).any()
    assert first.dtype == dtype
    np.testing.assert_array_equal(labels, before)
    np.testing.assert_array_equal(model(labels, 0.0, rng=np.random.default_rng(0), **options), labels)


@pytest.mark.parametrize(("model", "options"), MODELS)
@pytest.mark.parametrize(
    ("labels", "rate", "message"),
    [([0, 1], 1.5, r"rate must be in \[0, 1\], got 1.5"), ([0.5, 1.0], 0.1, "integers, got shape .* dtype float64")],
)
def test_every_model_refuses_bad_input(model, options, labels, rate, message):
    with pytest.raises(ValueError, match=message):
        model(np.array(labels), rate, rng=np.random.default_rng(0), **options)


@pytest.mark.parametrize(("model", "options"), MODELS)
def test_every_model_says_which_generator_it_takes(model, options):
    for rng in (0, np.random.RandomState(0)):
        with pytest.raises(TypeError, match=r"rng must be a generator such as numpy.random.default_rng\(0\), got"):
            model(np.zeros(200, dtype=int), 0.4, rng=rng, **options)


def test_symmetric_over_all_classes_draws_exactly_the_rate_anew():
    labels = np.full(100_000, 3)
    noisy = symmetric(labels, 0.5, rng=np.random.default_rng(0), num_classes=10, including_self=True)
    counts = np.bincount(noisy, minlength=10)
    # 50,000 draws over ten classes: 5,000 each, on top of the 50,000 never drawn; five standard deviations are 336.
    assert np.abs(counts - 5_000 - 50_000 * (np.arange(10) == 3)).max() < 336


@given(rate=st.floats(0, 1), size=st.integers(0, 200), seed=st.integers(0, 50))
def test_asymmetric_changes_exactly_the_rate_of_the_mapped_labels(rate, size, seed):
    labels = np.random.default_rng(seed).integers(0, 5, size)
    # 4 -> 4 is allowed and moves nothing, so its labels do not count.
    noisy = asymmetric(labels, rate, rng=np.random.default_rng(seed), mapping={0: 1, 1: 0, 3: 2, 4: 4})
    mapped = np.isin(labels, [0, 1, 3])
    assert (noisy != labels).sum() == round(rate * mapped.sum())
    assert {(0, 1), (1, 0), (3, 2)} >= set(zip(labels[noisy != labels], noisy[noisy != labels], strict=True))


@given(rate=st.floats(0, 1), size=st.integers(0, 200), seed=st.integers(0, 50))
def test_pair_flip_moves_exactly_the_rate_to_the_next_class(rate, size, seed):
    labels = np.random.default_rng(seed).integers(0, 5, size)
    noisy = pair_flip(labels, rate, rng=np.random.default_rng(seed), num_classes=5)
    changed = noisy != labels
    assert changed.sum() == round(rate * size)
    np.testing.assert_array_equal(noisy[changed], (labels[changed] + 1) % 5)


@pytest.mark.parametrize(("model", "nearest_first"), [(small_margin, True), (large_margin, False)])
def test_margin_noise_stays_in_its_pool(model, nearest_first):
    labels = np.arange(200) % 3
    distances = np.sort(np.abs(MARGIN))
    for rate, pool in [(0.1, None), (0.1, 0.1), (0.1, 0.25), (0.25, 1.0)]:
        noisy = model(labels, rate, rng=np.random.default_rng(0), margin=MARGIN, num_classes=3, pool=pool)
        changed = np.abs(MARGIN[noisy != labels])
        assert len(changed) == round(rate * 200)
        size = round((rate if pool is None else pool) * 200)
        if nearest_first:
            assert changed.max() <= distances[size - 1]
        else:
            assert changed.min() >= distances[-size]


def test_margins_may_be_integers_of_a_narrow_dtype():
    options = {"rng": np.random.default_rng(0), "num_classes": 2}
    margin = np.array([-128, 5, 100], np.int8)
    assert small_margin(np.zeros(3, int), 1 / 3, margin=margin, **options).tolist() == [0, 1, 0]
    assert large_margin(np.zeros(3, int), 1 / 3, margin=margin, **options).tolist() == [1, 0, 0]
    margin = np.array([0, 5, 200], np.uint8)
    assert large_margin(np.zeros(3, int), 1 / 3, margin=margin, **options).tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("margin", "pool", "message"),
    [
        ([0.1], None, r"margin must be one number for each of the 2 labels, got shape \(1,\)"),
        ([0.1, float("nan")], None, "with 1 NaN"),
        ([0.1, 0.2], 0.4, r"pool must be in \[rate, 1\] = \[0.5, 1\], got 0.4"),
        ([0.1, 0.2], float("nan"), "pool must be in"),
    ],
)
def test_margin_noise_refuses_bad_margins_and_pools(margin, pool, message):
    with pytest.raises(ValueError, match=message):
        small_margin(
            np.array([0, 1]), 0.5, rng=np.random.default_rng(0), margin=np.array(margin), num_classes=2, pool=pool
        )


@pytest.mark.parametrize("mapping", [{0: -1}, {0: 1.5}, {0: 300}, {"cat": 1}])
def test_asymmetric_refuses_what_is_no_class(mapping):
    with pytest.raises(ValueError, match="mapping must send classes to classes"):
        asymmetric(np.array([0, 1], dtype=np.uint8), 0.5, rng=np.random.default_rng(0), mapping=mapping)


# A model's mistakes


@given(rate=st.floats(0, 1), size=st.integers(0, 200), classes=st.integers(2, 5), seed=st.integers(0, 50))
def test_mistakes_change_exactly_the_rate_the_surest_first(rate, size, classes, seed):
    rng = np.random.default_rng(seed)
    labels, scores = rng.integers(0, classes, size).astype(np.uint8), rng.normal(size=(size, classes))
    before = labels.copy(), scores.copy()
    noisy = mistakes(labels, rate, scores=scores)
    changed = noisy != labels
    assert changed.sum() == round(rate * size)
    assert noisy.dtype == labels.dtype
    ahead = np.empty(size)
    for i, label in enumerate(labels):
        others = {other: scores[i, other] for other in range(classes) if other != label}
        best = max(others, key=others.get)
        ahead[i] = scores[i, label] - others[best]
        assert noisy[i] == (best if changed[i] else label)
    assert ahead[changed].max(initial=-np.inf) <= ahead[~changed].min(initial=np.inf)
    np.testing.assert_array_equal(before[0], labels)
    np.testing.assert_array_equal(before[1], scores)


def test_at_the_model_s_own_rate_its_mistakes_are_its_predictions():
    rng = np.random.default_rng(0)
    labels, scores = rng.integers(0, 4, 1_000), rng.normal(size=(1_000, 4))
    scores[np.arange(1_000), labels] += 1
    predicted = scores.argmax(axis=1)
    wrong = (predicted != labels).mean()
    assert 0.2 < wrong < 0.6
    np.testing.assert_array_equal(mistakes(labels, wrong, scores=scores), predicted)
    fewer, more = (mistakes(labels, rate, scores=scores) for rate in (wrong / 2, 1.2 * wrong))
    assert set(np.flatnonzero(fewer != labels)) < set(np.flatnonzero(predicted != labels))
    assert set(np.flatnonzero(more != labels)) > set(np.flatnonzero(predicted != labels))


@pytest.mark.parametrize(
    ("labels", "rate", "scores", "message"),
    [
        ([0, 1], 0.5, [[0.0, 1.0]], r"row of finite numbers for each of the 2 labels, got shape \(1, 2\)"),
        ([0, 1], 0.5, [0.0, 1.0], r"got shape \(2,\)"),
        ([0, 1], 0.5, [[0.0, np.nan], [0.0, -np.inf]], "with 2 that are not finite"),
        ([0, 2], 0.5, [[0.0, 1.0]] * 2, r"labels must be in \[0, 2\)"),
        ([0, 0], 0.5, [[0.0]] * 2, "num_classes must be at least 2, got 1"),
        ([0, 1], 1.5, [[0.0, 1.0]] * 2, r"rate must be in \[0, 1\], got 1.5"),
    ],
)
def test_mistakes_refuse_bad_input(labels, rate, scores, message):
    with pytest.raises(ValueError, match=message):
        mistakes(np.array(labels), rate, scores=np.array(scores))


# Labels that people gave


def test_from_file_returns_the_file_s_labels(tmp_path):
    clean, noisy = np.array([0, 1, 2, 3]), np.array([0, 1, 1, 3], dtype=np.int32)
    np.savez(tmp_path / "people.npz", noisy_label=noisy, clean_label=clean)
    result = from_file(clean, tmp_path / "people.npz")
    assert result.dtype == clean.dtype
    np.testing.assert_array_equal(result, noisy)


def test_from_file_refuses_what_does_not_fit(tmp_path):
    clean, path = np.array([0, 1, 2]), tmp_path / "people.npz"
    cases = [
        ({"noisy_label": clean}, "must hold the arrays noisy_label and clean_label: .*'clean_label.npy'"),
        ({"noisy_label": clean[:2], "clean_label": clean}, r"shape \(3,\) as the labels, got int64 of shape \(2,\)"),
        ({"noisy_label": clean / 2, "clean_label": clean}, "noisy_label must be integers"),
        ({"noisy_label": clean, "clean_label": clean[::-1]}, "same order"),
        ({"noisy_label": clean + 200, "clean_label": clean}, "classes from 0 to 2, got 200 to 202"),
        ({"noisy_label": clean - 1, "clean_label": clean}, "classes from 0 to 2, got -1 to 1"),
        ({"noisy_label": np.array([print, 1, 2], dtype=object), "clean_label": clean}, "not an .npz file of plain"),
    ]
    for content, message in cases:
        np.savez(path, **content)
        with pytest.raises(ValueError, match=message):
            from_file(clean, path)
    for content in (b"", b"no zip", path.read_bytes()[:100]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"not an \.npz file"):
            from_file(clean, path)
    huge, encrypted = io.BytesIO(), io.BytesIO()
    np.lib.format.write_array_header_1_0(huge, {"descr": "<i8", "fortran_order": False, "shape": (10**13,)})
    for content in (huge.getvalue(), huge.getvalue()[:-30] + b"\0" * 2**20, b"\x93NUMPY"):
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("noisy_label.npy", content)
            archive.writestr("clean_label.npy", content)
        with pytest.raises(ValueError, match=r"not an \.npz file"):
            from_file(clean, path)
    np.savez(encrypted, noisy_label=clean, clean_label=clean)
    marked = bytearray(encrypted.getvalue())
    for signature, flags in ((b"PK\x01\x02", 8), (b"PK\x03\x04", 6)):
        marked[marked.index(signature) + flags] |= 1
    path.write_bytes(marked)
    with pytest.raises(ValueError, match=r"not an \.npz file"):
        from_file(clean, path)
    with path.open("wb") as file:
        np.save(file, clean)
    with pytest.raises(ValueError, match=r"not an \.npz file"):
        from_file(clean, path)
