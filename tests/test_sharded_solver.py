"""The normaliser that works in rounds of four values: how many rounds the hardest logits need."""

import numpy as np
import pytest
import torch
from adversary import CLASS_COUNTS, FLOAT32, FLOAT64, search, weighted, witnesses

from bitempered import core
from bitempered.torch.autograd import xp
from bitempered.torch.sharded_solver import LEAST_T, bracketed_normalizer, rounds

# In float32 a sum over 2^18 classes is itself off by about 3e-6.
BAR = {FLOAT64: 1e-11, FLOAT32: 3e-6}


def after_rounds(classes):
    """`adversary.mass_error` for rounds instead of Newton steps, among so many classes."""

    def mass_error(gaps, counts, t, count):
        u, n = torch.from_numpy(gaps), torch.from_numpy(counts)

        def log_masses(points):
            return [torch.log((n * core.log_ratios(u, m, t, xp=xp).exp()).sum(1, keepdim=True)) - m for m in points]

        zero = torch.zeros(len(u), 1, dtype=torch.float64)
        m = bracketed_normalizer(log_masses, zero, t, classes=classes, count=count).numpy()
        of = weighted(counts)
        return np.abs(of.sum(np.exp(core.log_probs(gaps, m, t, xp=of)), axis=1) - 1)[:, 0]

    return mass_error


def allowed(classes, eps):
    # At the edge of a finite support each of K equal classes adds the rounding of an exp and of a product.
    return BAR[eps] + 2 * classes * 2.0**-52


@pytest.mark.parametrize("eps", [FLOAT64, FLOAT32], ids=["float64", "float32"])
def test_the_hardest_known_logits(eps):
    tried = [w for w in witnesses() if w["t"] >= LEAST_T]
    assert len(tried) > 20
    for w in tried:
        gaps, counts = np.array([w["gaps"]]), np.array([w["counts"]], dtype=float)
        left = after_rounds(w["classes"])(gaps, counts, w["t"], rounds(w["t"], eps))
        assert left <= allowed(w["classes"], eps), w


@pytest.mark.slow
@pytest.mark.parametrize("classes", CLASS_COUNTS)
@pytest.mark.parametrize("t", [0.5, 0.55, 0.6, 0.7, 0.8, 0.9, 0.99, 1 + 1e-6, 1.01, 1.05, 1.2, 1.5, 2, 3, 4, 10, 100])
def test_no_search_beats_the_number_of_rounds(t, classes):
    dtypes = [FLOAT32, FLOAT64]
    found = search(t, classes, *(allowed(classes, eps) for eps in dtypes), error=after_rounds(classes))
    for eps, (count, _) in zip(dtypes, found, strict=True):
        assert count < rounds(t, eps)


def test_two_rounds_fewer_are_too_few():
    classes = CLASS_COUNTS[-1]
    ((hardest, _),) = search(2.0, classes, 3e-6, population=200, generations=10, error=after_rounds(classes))
    assert hardest >= rounds(2.0, FLOAT32) - 2


def test_no_round_is_needed_at_one():
    logits = 30 * torch.randn(5, 100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gaps = logits.amax(1, keepdim=True) - logits
    m = bracketed_normalizer(
        lambda points: [torch.log(torch.exp(-gaps).sum(1, keepdim=True)) - m for m in points],
        torch.zeros(5, 1, dtype=torch.float64), 1.0, classes=100, count=rounds(1.0, FLOAT64),
    )  # fmt: skip
    torch.testing.assert_close(logits.amax(1) + m[:, 0], logits.logsumexp(1), rtol=1e-15, atol=0)
