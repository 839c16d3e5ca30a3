"""The CPU kernel against the 50-digit oracle: weights, smoothing, temperatures and logits of every size."""

import itertools

import mpmath as mp
import numpy as np
import oracle
import pytest
import torch
from cpu_kernel_cases import run


def want_exactly(logits, label, weight, smoothing, t1, t2):
    """W, loss and gradient of one row by the oracle; equal classes are one to it, and have one gradient.

    Which these are is in `kinds`. An ignored row is 0.
    """
    classes, smoothing = len(logits), mp.mpf(smoothing)
    weight = torch.ones(classes) if weight is None else weight
    table = torch.stack((logits, weight, torch.arange(classes) == label), 1)
    kind, kinds, counts = np.unique(table.double().numpy(), axis=0, return_inverse=True, return_counts=True)
    kinds = torch.tensor(kinds.reshape(-1))
    if label == -100:
        return mp.mpf(0), mp.mpf(0), [mp.mpf(0)] * len(kind), kinds
    a, w, is_label = kind.T.tolist()
    y = [smoothing / classes + (1 - smoothing) * hit for hit in is_label]
    loss, gradient = oracle.loss_and_gradient(a, y, t1, t2, w, counts.tolist())
    W = mp.fsum(n * mp.mpf(wi) * yi for n, wi, yi in zip(counts.tolist(), w, y, strict=True))
    return W, loss, gradient, kinds


def assert_exact(values, exact, W, rounding=1e-18):
    """The bar: 3e-6 of the value, or of min(1, W) where the value is less; for W multiplies all.

    Above 1 that may ask for more digits of a value than float64 has for its terms: so much of W is `rounding`. 1e-44
    is for float32's smallest numbers. A value beyond its largest is infinite.
    """
    for value in values.unique().tolist():
        if abs(exact) > torch.finfo(torch.float32).max:
            assert value == mp.sign(exact) * mp.inf
        else:
            assert abs(value - exact) <= 3e-6 * max(min(1, W), abs(exact)) + rounding * W + 1e-44


def assert_gradient_is_exact(gradient, exact, kinds, W):
    for i, value in enumerate(exact):
        assert_exact(gradient[kinds == i], value, W, 1e-13)  # a difference of numbers as large as W


def assert_row_is_exact(logits, label, weight, smoothing, t1, t2):
    options = {"weight": weight, "label_smoothing": smoothing, "reduction": "none"}
    loss, gradient = run(logits[None], torch.tensor([label]), t1, t2, **options)
    W, want, want_gradient, kinds = want_exactly(logits, label, weight, smoothing, t1, t2)
    assert_exact(loss, want, W)
    if want < mp.inf:
        assert_gradient_is_exact(gradient[0], want_gradient, kinds, W)


def draw_temperature(rng):
    kinds = [
        lambda: rng.choice([0.0, 0.5, 0.8, 1.0, 1.05, 1.2, 1.5, 2.0, 4.0, 10.0, 100.0]),
        lambda: 1 + rng.choice([-1, 1]) * 10 ** rng.uniform(-9, -3),
        lambda: 2 - 10 ** rng.uniform(-6, -1),
        lambda: rng.uniform(0, 4),
        lambda: rng.uniform(4, 100),
    ]
    return float(kinds[rng.integers(len(kinds))]())


def draw_row(rng, classes):
    """Of many classes there are few kinds, so that the oracle can follow."""
    kinds = min(classes, 8)
    kind = np.arange(classes) if classes == kinds else rng.choice(kinds, classes, p=rng.dirichlet(np.ones(kinds)))
    # A new head, near ties, usual, confident, absurd.
    logits = rng.choice([0.0, 1e-3, 0.3, 1.0, 5.0, 30.0, 1e4]) * rng.normal(size=kinds)
    if rng.random() < 0.15:
        logits[rng.random(kinds) < 0.3] = -np.inf
        logits[kind[0]] = 1.0
    weight = [None, np.full(kinds, 10 ** rng.uniform(-30, 30)), 10 ** rng.uniform(-30, 30, kinds), rng.random(kinds)]
    weight = weight[rng.integers(4)]
    if weight is not None and rng.random() < 0.2:
        weight[rng.integers(kinds)] = 0
    logits = torch.tensor(logits[kind], dtype=torch.float32)
    weight = None if weight is None else torch.tensor(weight[kind], dtype=torch.float32)
    label = int(logits.argmax() if rng.random() < 0.3 else rng.integers(classes))
    return logits, label, weight


@pytest.mark.parametrize("classes", [2, 3, 8, 600, 100_000])  # the last two are folded into columns
@pytest.mark.parametrize("smoothed", [False, True], ids=["label", "smoothed"])
def test_the_oracle_agrees(classes, smoothed):
    """Temperatures next to 1 and to 2 and up to 100, any smoothing, weights of any size, masked classes."""
    rng = np.random.default_rng([classes, smoothed])
    for _ in range(24 if classes < 100_000 else 6):
        t2 = draw_temperature(rng)
        t1 = min(draw_temperature(rng), t2)
        smoothing = rng.choice([1e-6, 0.1, 0.5, 1.0, rng.random()]) if smoothed else 0.0
        assert_row_is_exact(*draw_row(rng, classes), float(smoothing), t1 if t1 < 2 else 2 - 1e-6, t2)


# 2e-16 is the last before 2; 1.5 is where the formula changes.
NEXT_TO_1_AND_2 = [1 + sign * 10.0**e for e in range(-9, -1) for sign in (-1, 1)]
NEXT_TO_1_AND_2 += [1.0, 1.5, 1.5001, 1.76, 1.99999, 2 - 1e-6, 2 - 1e-9, 2 - 2.3e-16]


@pytest.mark.parametrize("t1", NEXT_TO_1_AND_2)
def test_smoothing_with_t1_next_to_1_and_2(t1):
    weight = torch.tensor([1.0, 1.0, 1e-15])
    for t2 in {t1, max(t1, 1.2), max(t1, 4.0)}:
        for label in range(3):
            assert_row_is_exact(torch.tensor([0.3, -0.2, 0.1]), label, weight[[label, 0, 2]], 0.1, t1, t2)
        assert_row_is_exact(torch.tensor([0.3, -0.2, 0.1]), 0, None, 0.1, t1, t2)


@pytest.mark.parametrize("classes", [3, 100_000])
@pytest.mark.parametrize("tiny", [1e-15, 1e-30])
def test_smoothing_over_tiny_weights(classes, tiny):
    logits = torch.arange(classes).remainder(3) * 0.25
    for heavy, t1 in itertools.product((0, 1), (1.0, 1.5)):  # the label's is the only usual weight, or is not
        weight = torch.full((classes,), tiny)
        weight[heavy] = 1.0
        assert_row_is_exact(logits, 0, weight, 1e-6, t1, 1.5)


@pytest.mark.parametrize(
    ("logits", "t1", "t2"),
    [
        ([1e36, 0.0], 1.9, 1.9),  # y_hat = 1e-40, yet y_hat^(2 - t1) counts
        ([1e37, 0.0, -1e37], 1.0, 100.0),  # s u is beyond float32
        ([3e38, 0.0, 1e38], 0.5, 4.0),
        ([1e38, -1e38, 0.0], 1.9, 1.95),  # half of which the float32 block has no room for
        ([3e38, 0.0], 0.0, 0.5),
    ],
)
def test_huge_gaps(logits, t1, t2):
    for label, smoothing in itertools.product(range(len(logits)), (0.0, 0.1)):
        assert_row_is_exact(torch.tensor(logits), label, None, smoothing, t1, t2)
        assert_row_is_exact(torch.tensor(logits + [0.0] * 600), label, None, smoothing, t1, t2)


@pytest.mark.parametrize("classes", [4, 600])
@pytest.mark.parametrize(("t1", "t2"), [(0.0, 0.5), (0.5, 4.0), (0.8, 1.2), (1.0, 1.0), (1.99, 1.99)])
@pytest.mark.parametrize("W", [1e10, 1e30])
def test_large_weights_do_not_magnify_rounding(classes, t1, t2, W):
    """What is small beside W: the gradient of an outlier, a loss whose target is nearly met, or surely."""
    weight = torch.full((classes,), W)
    logits = torch.tensor([1.0, 0.999, -0.5, -1.0] + [-1.0] * (classes - 4))
    assert_row_is_exact(logits, 2, weight, 0.0, t1, t2)
    assert_row_is_exact(20 * logits, 0, weight, 0.0, t1, t2)
    for distance in (1e-2, 1e-4):  # y_hat = q (1 +- distance) to first order, for a label of 0
        q = (torch.arange(classes) == 0) * 0.5 + 0.5 / classes
        log_p = q.double().log() + distance * (-1.0) ** torch.arange(classes)
        logits = log_p if t2 == 1 else torch.expm1((1 - t2) * log_p) / (1 - t2)
        assert_row_is_exact(logits.float(), 0, weight, 0.5, t1, t2)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("classes", [6, 600])
@pytest.mark.parametrize(
    ("low", "high"),
    [(-30, 30), (-45, -38), (30, 38)],  # mixed; below float32's normal numbers; near its largest
)
def test_reductions_with_weights_of_every_size(smoothing, classes, low, high):
    """No sum, and nothing that a mean divides again, may overflow or vanish on the way."""
    t1, t2 = 2 - 1e-6, 2.0
    rng = np.random.default_rng(0)
    levels = torch.tensor(rng.normal(size=6), dtype=torch.float32)
    logits = levels[torch.arange(7)[:, None].add(torch.arange(classes)).remainder(6)]
    weight = torch.tensor(10.0 ** np.linspace(low, high, 6), dtype=torch.float32)[torch.arange(classes) % 6]
    target = torch.tensor([0, 1, -100, 2, 3, 4, 5])
    rows = [want_exactly(a, y, weight, smoothing, t1, t2) for a, y in zip(logits, target.tolist(), strict=True)]
    W, losses, gradients, kinds = zip(*rows, strict=True)
    options = {"weight": weight, "label_smoothing": smoothing}
    for reduction, divisor in (("none", 1), ("sum", 1), ("mean", mp.fsum(weight[target[target >= 0]].tolist()))):
        loss, gradient = run(logits, target, t1, t2, reduction=reduction, **options)
        if reduction == "none":
            for i in range(7):
                assert_exact(loss[i], losses[i], W[i])
        else:
            assert_exact(loss, mp.fsum(losses) / divisor, mp.fsum(W) / divisor)
        for i in range(7):
            assert_gradient_is_exact(gradient[i], [g / divisor for g in gradients[i]], kinds[i], W[i] / divisor)


@pytest.mark.parametrize("classes", [3, 600])
@pytest.mark.parametrize("kind", ["label", "smoothed", "probabilities"])
def test_float64_has_the_digits_of_float64(classes, kind):
    """1e-13 of the loss and of W: a few roundings of a sum over the classes, and of logarithms of small numbers."""
    rng = np.random.default_rng(classes)
    for _ in range(12):
        t2 = draw_temperature(rng)
        t1 = min(draw_temperature(rng), t2, 1.7)
        logits, label, _ = draw_row(rng, classes)
        logits = logits.double() * (1 + 1e-10)
        smoothing = 0.1 if kind == "smoothed" else 0.0
        _, want, want_gradient, kinds = want_exactly(logits, label, None, smoothing, t1, t2)
        target = torch.tensor([label])
        if kind == "probabilities":
            target = torch.nn.functional.one_hot(target, classes).double()
        loss, gradient = run(logits[None], target, t1, t2, label_smoothing=smoothing, reduction="none")
        if want == mp.inf:
            assert loss.item() == mp.inf
            continue
        assert abs(loss.item() - want) <= 1e-13 * max(1, want)
        for i, exact in enumerate(want_gradient):
            for value in gradient[0][kinds == i].unique().tolist():
                assert abs(value - exact) <= 1e-13 * max(1, abs(exact))


@pytest.mark.parametrize("classes", [3, 8, 600])
def test_probabilities_of_every_size(classes):
    """Shares down to nothing and weights of every size."""
    rng = np.random.default_rng(classes)
    for _ in range(20):
        t2 = draw_temperature(rng)
        t1 = min(draw_temperature(rng), t2, 2 - 1e-6)
        logits, _, weight = draw_row(rng, classes)
        size = rng.choice([0.0, 1.0, 10.0, 60.0])
        kinds = np.unique(logits.numpy(), return_inverse=True)[1].reshape(-1)
        shares = np.exp(size * rng.normal(size=kinds.max() + 1))[kinds]
        shares[rng.random(classes) < 0.2] = 0
        shares[0] = 1.0
        y = torch.tensor(shares / shares.sum(), dtype=torch.float32)
        w = torch.ones(classes) if weight is None else weight
        table = torch.stack((logits, w, y), 1).double().numpy()
        kind, kinds, counts = np.unique(table, axis=0, return_inverse=True, return_counts=True)
        a, of_w, of_y = kind.T.tolist()
        want, want_gradient = oracle.loss_and_gradient(a, of_y, t1, t2, of_w, counts.tolist())
        W = mp.fsum(n * mp.mpf(x) * mp.mpf(z) for n, x, z in zip(counts.tolist(), of_w, of_y, strict=True))
        loss, gradient = run(logits[None], y[None], t1, t2, weight=weight, reduction="none")
        assert_exact(loss, want, W)
        if want < mp.inf:
            assert_gradient_is_exact(gradient[0], want_gradient, torch.tensor(kinds.reshape(-1)), W)
