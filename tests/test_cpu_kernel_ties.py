"""The gradients of the CPU kernel where it has to tell equal numbers: classes that tie, and edges of a support."""

import functools
import itertools
import math
from fractions import Fraction

import mpmath as mp
import numpy as np
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


# Gaps to the tail that leave each of its classes about 1e-14 of the mass or less, except for t2 = 4, whose tails are
# heavy, and t2 = 0.5, whose support ends between them.
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


def exact_at_0(logits, y):
    """The gradient at t1 = t2 = 0 in fractions, and whether a class lies on the edge of the support, which is inside.

    There y_hat is the projection onto the simplex, [a - tau]_+, and every class of the support has the same escort.
    """
    a, y = [Fraction(x) for x in logits], [Fraction(x) for x in y]
    above = list(itertools.accumulate(sorted(a, reverse=True)))
    tau = max((total - 1) / count for count, total in enumerate(above, 1))
    v = [x - tau - q if x >= tau else None for x, q in zip(a, y, strict=True)]
    inside = [x for x in v if x is not None]
    return [0.0 if x is None else float(x - sum(inside) / len(inside)) for x in v], tau in a


def rows_with_an_edge(support, classes, rows, seed):
    """Multiples of 1/1024: so many classes in the support, two on its edge, the rest far outside, in any order.

    For a support of 2^n such classes the largest probability, which is the gap of an edge, is one too.
    """
    rng = np.random.default_rng(seed)
    while rows:
        gaps = rng.integers(0, 1024 // support, support)
        gaps[0] = 0
        gaps[-1] += -(1024 + gaps.sum()) % support
        edge = (1024 + gaps.sum()) // support
        if gaps.max() < edge < 256:  # bfloat16 has 8 bits
            outside = 512 * rng.integers(3, 9, classes - support - 2)
            yield rng.permutation(-np.concatenate((gaps, [edge, edge], outside)) / 1024.0).tolist()
            rows -= 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.25])
@pytest.mark.parametrize("classes", [20, 600])
@pytest.mark.parametrize("support", [8, 16])
def test_at_t_0_an_edge_of_the_support_is_inside(dtype, smoothing, classes, support):
    rows = list(rows_with_an_edge(support, classes, 50, [support, classes]))
    target = torch.arange(len(rows)).remainder(classes)
    options = {"label_smoothing": smoothing, "reduction": "none"}
    logits = torch.tensor(rows, dtype=torch.float64).to(dtype)
    _, gradient = run(logits, target, 0.0, 0.0, **options)
    soft = torch.nn.functional.one_hot(target, classes).to(dtype)
    _, of_soft = run(logits.T[None].contiguous(), soft.T[None].contiguous(), 0.0, 0.0, **options)
    for i, (row, label) in enumerate(zip(logits.double().tolist(), target.tolist(), strict=True)):
        y = [(1 - Fraction(smoothing)) * (j == label) + Fraction(smoothing) / classes for j in range(classes)]
        want, has_edge = exact_at_0(row, y)
        assert has_edge
        assert_gradient_is(gradient[i], want, TOLERANCE[dtype])
        assert_gradient_is(of_soft[0, :, i], want, TOLERANCE[dtype])


@pytest.mark.parametrize(("dtype", "apart"), [(torch.float32, 2.0**-26), (torch.float64, 2.0**-40)], ids=str)
def test_a_class_next_to_the_edge_is_inside_or_outside(dtype, apart):
    """So near that float32, in which m is off by 1e-7, cannot tell."""
    for i, row in enumerate(rows_with_an_edge(8, 12, 200, 0)):
        logits = np.array(row) - np.sort(row)[3]  # the edge is at 0, where the grid is finest
        first, second = np.flatnonzero(logits == 0)
        logits[first], logits[second] = apart * (-1) ** i, -5.0
        label = int(logits.argmax() if i % 8 > 5 else first)
        want, has_edge = exact_at_0(logits.tolist(), np.eye(12)[label].tolist())
        assert not has_edge
        _, gradient = run(torch.tensor(logits[None], dtype=dtype), torch.tensor([label]), 0.0, 0.0)
        assert_gradient_is(gradient[0], want, TOLERANCE[dtype])


def sums_of_squares(total, largest, count):
    """The ways to write `total` as a sum of at most `count` squares."""
    if total == 0:
        yield []
    for x in range(min(largest, math.isqrt(total)) if count else 0, 0, -1):
        yield from ([x, *rest] for rest in sums_of_squares(total - x * x, x, count - 1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.25])
def test_at_t1_equal_to_t2_a_label_on_the_edge_of_the_support_is_inside(dtype, smoothing):
    """Its y_hat^(t2-t1) is 0^0 = 1. If its roots are multiples of 1/16, logits of 1/8 are exact."""
    for size in (8, 16):
        for roots in itertools.islice(sums_of_squares(size**2, size - 1, 7), 60):
            at_edge, outside = len(roots), len(roots) + 1
            logits = torch.tensor([[2 * (x - roots[0]) / size for x in [*roots, 0, -size]]], dtype=dtype)
            p, root = [(x / size) ** 2 for x in roots], [x / size for x in roots]
            share = smoothing / len(logits[0])
            v = [x - share for x in p] + [-share - (1 - smoothing), 0.0]
            want = [x - e / sum(root) * sum(v) for x, e in zip(v, [*root, 0.0, 0.0], strict=True)]
            target = torch.tensor([at_edge])
            _, gradient = run(logits, target, 0.5, 0.5, label_smoothing=smoothing)
            assert_gradient_is(gradient[0], want, TOLERANCE[dtype])
            assert gradient[0, outside] == 0


# A label a little outside the support, by more than float64's rounding: a class just inside has moved the edge.
BESIDE_AN_EDGE = [
    ([-12.4375, -13.0, -3.0], 0.9, torch.bfloat16),
    ([-9.4375, -10.0, 0.0], 0.9, torch.float32),
    ([1.0, -1.0, 2.0**-21 - 1], 0.5, torch.float32),
    ([1.0, -1.0, 2.0**-21 - 1], 0.5, torch.float64),
    ([4.0, 0.0, 2.0**-9], 0.75, torch.float32),
    ([1 + 5e-14, 0.0, -2.0], 0.0, torch.float64),
    ([2 + 1e-13, 0.0, -0.3], 0.5, torch.float64),
    ([1.0, -1e-14, -2.0], 0.0, torch.float32),
]


@pytest.mark.parametrize(("row", "t", "dtype"), BESIDE_AN_EDGE)
def test_a_label_beside_the_edge_of_the_support_is_outside(row, t, dtype):
    logits = torch.tensor([row], dtype=dtype)
    _, want = oracle.loss_and_gradient(logits[0].double().tolist(), [0.0, 1.0, 0.0], t, t)
    assert want[1] == 0
    _, gradient = run(logits, torch.tensor([1]), t, t)
    assert gradient[0, 1] == 0
    assert_gradient_is(gradient[0], want, max(TOLERANCE[dtype], 1e-6))


@pytest.mark.parametrize(("t1", "t2"), [(0.099, 0.1), (0.0, 0.1), (0.297, 0.3)])
def test_a_row_with_an_edge_does_not_depend_on_its_neighbours(t1, t2):
    """For t1 just below t2 the gradient nearly jumps at the edge, so float32 is not enough."""
    row, neighbour = (
        [1.0, 1.0, 0.4045703113079071, 0.4045702815055847, 0.4045702815055847],
        [-0.1, -0.3, -0.7, -0.9, -1.2],
    )
    logits, target = torch.tensor([row, neighbour]), torch.tensor([3, 0])
    _, want = oracle.loss_and_gradient(logits[0].tolist(), np.eye(5)[3].tolist(), t1, t2)
    _, alone = run(logits[:1], target[:1], t1, t2, reduction="sum")
    _, beside = run(logits, target, t1, t2, reduction="sum")
    assert_gradient_is(alone[0], want, 1e-5)
    assert_gradient_is(beside[0], want, 1e-5)
