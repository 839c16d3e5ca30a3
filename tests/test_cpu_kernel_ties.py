"""The gradients of the CPU kernel where classes tie."""

import functools

import mpmath as mp
import oracle
import pytest
import torch
from cpu_kernel_cases import run

DTYPES = [torch.float32, torch.float64, torch.bfloat16]
# Of the norm of a row's gradient. Results in bfloat16 are rounded to 2^-9 of themselves.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2**-8}


def assert_gradient_is(gradient, want, tolerance):
    """The oracle itself is off by 1e-30."""
    norm = mp.sqrt(mp.fsum(x**2 for x in want))
    error = mp.sqrt(mp.fsum((mp.mpf(x) - w) ** 2 for x, w in zip(gradient.tolist(), want, strict=True)))
    assert error <= tolerance * norm + 1e-30


# Gaps to the tail, which leave it 1e-14 of the mass or less, but for t2 = 4, whose tails are heavy, and t2 = 0.5, whose
# support ends between them.
TAILS = {(0.2, 0.5): 1.25, (0.5, 1.0): 32.0, (1.0, 1.0): 32.0, (0.8, 1.2): 2.0**13, (0.5, 4.0): 2.0**46}
TARGETS = ["far", "tied", "top", "heavy", "smoothed", "weighted", "tied and weighted", "even", "uneven", "close"]


def tied_logits(classes, ties, tail):
    """The first, the last and the third class are the largest, or all of them."""
    logits = -tail * (1 + torch.arange(classes) % 2 / 2)
    logits[[0, -1, 2][:ties]] = 0.0
    return logits if ties < classes else torch.zeros(classes)


def tied_target(kind, classes):
    """A label or probabilities, class weights and smoothing: numbers that bfloat16 has, so that all dtypes agree."""
    weight = torch.arange(classes) % 3 + 1.0 if "weighted" in kind else None
    weight = torch.full((classes,), 16.0) if kind == "heavy" else weight  # float32 is not enough for it
    smoothing = 0.125 if kind == "smoothed" or "weighted" in kind else 0.0
    if kind not in ("even", "uneven", "close"):
        return {"tied": 0, "tied and weighted": 0, "top": classes - 1}.get(kind, classes // 2), weight, smoothing
    y = torch.zeros(classes)
    y[[1, classes // 2]] = torch.tensor([0.5, 0.5 if kind == "close" else 0.25])
    y[[0, -1]] = torch.tensor({"even": [2, 2], "uneven": [1, 3], "close": [2**-16, 2**-15]}[kind]) / 16
    return y, weight, smoothing


@functools.cache
def exact_with_ties(kind, classes, ties, t1, t2):
    """The gradient by the oracle, to which equal classes are one."""
    target, weight, smoothing = tied_target(kind, classes)
    y = target.tolist() if torch.is_tensor(target) else [float(i == target) for i in range(classes)]
    y = [(1 - mp.mpf(smoothing)) * x + mp.mpf(smoothing) / classes for x in y]
    w = [1.0] * classes if weight is None else weight.tolist()
    table = list(zip(tied_logits(classes, ties, TAILS[t1, t2]).tolist(), y, w, strict=True))
    kinds = list(dict.fromkeys(table))
    a, y, w = zip(*kinds, strict=True)
    _, gradient = oracle.loss_and_gradient(a, y, t1, t2, w, [table.count(x) for x in kinds])
    return [gradient[kinds.index(x)] for x in table]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("classes", [8, 600])  # side by side, or folded into columns if they are adjacent
def test_classes_that_tie_keep_the_digits_of_their_gradients(dtype, kind, classes):
    """They may have nearly all of the mass, and yet a gradient of 1e-18."""
    target, weight, smoothing = tied_target(kind, classes)
    weight = None if weight is None else weight.to(dtype)
    target = target.to(dtype) if torch.is_tensor(target) else torch.tensor(target)
    counts = [1, 2, 3, classes]
    for t1, t2 in TAILS:
        logits = torch.stack([tied_logits(classes, ties, TAILS[t1, t2]) for ties in counts]).to(dtype)
        y = target.expand(len(counts), *target.shape)
        options = {"weight": weight, "label_smoothing": smoothing, "reduction": "none"}
        _, rows = run(logits, y, t1, t2, **options)
        _, positions = run(logits.T[None].contiguous(), y.movedim(0, -1)[None].contiguous(), t1, t2, **options)
        for i, ties in enumerate(counts):
            want = exact_with_ties(kind, classes, ties, t1, t2)
            # The gradient of a sure row without ties is a product with 1 - y_hat, which has few of float64's digits.
            tolerance = TOLERANCE[dtype] if ties > 1 else max(TOLERANCE[dtype], 1e-5)
            assert_gradient_is(rows[i], want, tolerance)
            assert_gradient_is(positions[0, :, i], want, tolerance)
