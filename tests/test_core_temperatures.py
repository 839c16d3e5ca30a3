"""The derivatives in the temperatures, core's closed forms, against differences of the 50-digit oracle."""

import math

import mpmath as mp
import numpy as np
import oracle
import pytest
import torch
from cases import SOFT, WEIGHT, error, slope

from bitempered import core
from bitempered.torch.autograd import xp

NEAR_ONE = [1 + sign * d for d in (1e-9, 1e-6, 1e-3) for sign in (-1, 1)]
# A finite support, across 1, at 1, the paper's, above 1, above 2, far above; then next to 1 in one, the other and both.
PAIRS = [(0.0, 0.0), (0.3, 0.3), (0.5, 0.8), (0.2, 1.0), (1.0, 1.0), (0.8, 1.2), (1.3, 1.6), (0.5, 4.0), (0.2, 100.0)]
PAIRS += [(t, t) for t in NEAR_ONE] + [(0.8, t) for t in NEAR_ONE[2:]] + [(t, 1.5) for t in NEAR_ONE[2:]]
LOGITS = [
    [0.0] * 6,
    [0.3, -0.1, 0.5, -0.6, 0.2, 0.1],
    [4.0, -5.0, 1.0, -3.5, 8.0, 0.5],
    [90.0, -60.0, 5.0, 20.0, -7.0, 1.0],
]
LABEL = [0.0, 0.0, 0.0, 1.0, 0.0, 0.0]
TARGETS = {"label": LABEL, "smoothed": [0.9 * y + 0.1 / 6 for y in LABEL], "soft": SOFT[0].tolist()}


def column(values):
    return torch.tensor(values, dtype=torch.float64)[:, None]


def by_core(logits, y, t1, t2, weight, *, is_label):
    y, w = (None if x is None else torch.tensor(x, dtype=torch.float64) for x in (y, weight))
    target = core.weigh(y, w, is_label=is_label, axis=-1, xp=xp)
    at = core.state(*core.solve(torch.as_tensor(logits), t2, axis=-1, xp=xp), t2, axis=-1, xp=xp)
    return core.temperature_gradients(target, at, t1, t2, axis=-1, xp=xp)


def exact_slopes(logits, y, t1, t2, weight):
    def loss(t1, t2):
        return oracle.loss_and_gradient(logits, y, t1, t2, weight)[0]

    return slope(lambda t: loss(t, t2), t1), slope(lambda t: loss(t1, t), t2)


@pytest.mark.parametrize("weight", [None, WEIGHT.tolist()], ids=["plain", "weights"])
@pytest.mark.parametrize("kind", TARGETS)
def test_derivatives_of_the_loss_equal_the_oracle(kind, weight):
    y, is_label = TARGETS[kind], kind == "label"
    for row, logits in enumerate(LOGITS):
        pairs = PAIRS[row % 2 :: 2]  # each pair with two of the four rows
        exact = [exact_slopes(logits, y, t1, t2, weight) for t1, t2 in pairs]
        a = torch.tensor([logits], dtype=torch.float64)
        numbers = [torch.cat(by_core(a, y, t1, t2, weight, is_label=is_label), 1) for t1, t2 in pairs]
        t1, t2 = (column(t) for t in zip(*pairs, strict=True))
        arrays = by_core(a.expand(len(pairs), -1), y, t1, t2, weight, is_label=is_label)
        for got in (torch.cat(numbers), torch.cat(arrays, 1)):
            assert error(got, [value for both in exact for value in both]) < 1e-13


@pytest.mark.parametrize("t", [0.0, 0.6, 1.0, *NEAR_ONE, 1.2, 3.0])
def test_derivatives_of_the_softmax_equal_the_oracle(t):
    for logits in LOGITS[1:3]:

        def exact(function, logits=logits):
            return slope(lambda t: function(t, logits), t)

        a = torch.tensor(logits, dtype=torch.float64)
        for given in (t, torch.tensor([t], dtype=torch.float64)):
            at = core.state(*core.solve(a, given, axis=0, xp=xp), given, axis=0, xp=xp)
            got = core.log_probs_slope(at.log_p, given, axis=0, xp=xp)
            wanted = [
                exact(lambda t, a, i=i: mp.log(oracle.softmax(a, t)[i])) if p > -math.inf else mp.mpf(0)
                for i, p in enumerate(at.log_p.tolist())
            ]
            assert error(got, wanted) < 1e-12
            partition = core.log_partition_slope(at.log_p, given, axis=0, xp=xp)
            assert error(partition, [exact(lambda t, a: oracle.normalizer(a, t))]) < 1e-12
            m = core.normalizer_slope(at, given, axis=0, xp=xp)
            assert error(m, [-exact(lambda t, a: mp.log(max(oracle.softmax(a, t))))]) < 1e-12


def test_masked_classes_and_huge_logits_keep_derivatives_finite():
    masked = torch.tensor([[1.0, -math.inf, 0.0, 2.0]], dtype=torch.float64)
    without = masked[:, [0, 2, 3]]
    for t1, t2 in [(0.0, 0.5), (0.5, 1.0), (1.0, 1.0), (1.3, 1.6), (0.8, 4.0)]:
        y, rest = [[0.0, 0.0, 0.0, 1.0]], [[0.0, 0.0, 1.0]]
        for is_label in (True, False):
            got = torch.cat(by_core(masked, y, t1, t2, None, is_label=is_label))
            torch.testing.assert_close(got, torch.cat(by_core(without, rest, t1, t2, None, is_label=is_label)))
            of_masked = torch.cat(by_core(masked, [[0.0, 1.0, 0.0, 0.0]], t1, t2, None, is_label=is_label))
            # The loss of a masked target is 1/(1-t1) - 1/(2-t1) and the others' terms, or infinite from t1 = 1 on.
            assert of_masked[0].isinf() if t1 >= 1 else of_masked.isfinite().all()
        for dtype in (torch.float32, torch.float64):
            huge = torch.tensor([[3e30, 0.0, -3e30, 1e5]], dtype=dtype)
            target = core.weigh(torch.eye(4, dtype=dtype)[:1], None, is_label=True, axis=1, xp=xp)
            for given in (t2, torch.tensor(t2, dtype=dtype)):
                at = core.state(*core.solve(huge, given, axis=1, xp=xp), given, axis=1, xp=xp)
                assert torch.cat(core.temperature_gradients(target, at, t1, given, axis=1, xp=xp)).isfinite().all()


def test_on_the_edge_of_a_support_the_derivative_is_the_one_from_inside():
    def derivatives(logit, t1, t2):
        return torch.cat(
            by_core(torch.tensor([[2.0, logit]], dtype=torch.float64), [[0.0, 1.0]], t1, t2, None, is_label=True)
        )

    for t in (0.0, 0.5):
        edge = 2.0 - 1 / (1 - t)  # where 1 - (1 - t) u is 0
        at_edge, inside = derivatives(edge, t, t), derivatives(edge + 1e-12, t, t)
        assert at_edge[1] != 0
        torch.testing.assert_close(at_edge, inside, rtol=0, atol=1e-4)  # y_hat^(1-t) inside is the root of 1e-12
        assert derivatives(edge - 1e-9, t, t)[1] == 0


def test_examples_without_weight_have_no_derivative():
    a = torch.tensor([[1.0, 2.0], [math.nan, math.nan]], dtype=torch.float64)
    target = core.weigh(torch.eye(2, dtype=torch.float64), None, is_label=True, axis=1, xp=xp)
    target = target._replace(total=column([1.0, 0.0]))
    at = core.state(*core.solve(a, 1.2, axis=1, xp=xp), 1.2, axis=1, xp=xp)
    for got in core.temperature_gradients(target, at, 0.8, 1.2, axis=1, xp=xp):
        assert got[0] != 0
        assert got[1] == 0


def test_the_derivative_in_t1_is_not_negative():
    generator = np.random.default_rng(0)
    a = torch.tensor(generator.normal(size=(2000, 5)) * np.exp(generator.normal(size=(2000, 1))))
    y = generator.dirichlet(np.ones(5), size=2000)
    t1 = column(generator.uniform(0, 2, 2000))
    for is_label, target in ((False, y), (True, np.eye(5)[y.argmax(1)])):
        by_t1, _ = by_core(a, target, t1, t1 + 0.5, None, is_label=is_label)
        assert by_t1.min() >= 0
