"""Label noise: how many labels change, into what, and what bad input gets."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitempered.noise import symmetric


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
    ],
)
def test_symmetric_refuses_bad_input(labels, rate, num_classes, message):
    with pytest.raises(ValueError, match=message):
        symmetric(np.array(labels), rate, rng=np.random.default_rng(0), num_classes=num_classes)
