"""The compared losses against their documented formulas, and against torch's cross-entropy in their manners."""

import re
from functools import partial

import mpmath as mp
import oracle
import pytest
import torch
from torch.nn import functional as F

from bitempered.torch import baselines, bi_tempered_logistic_loss, tempered_softmax
from bitempered.torch.baselines import (
    generalized_cross_entropy,
    mean_absolute_error,
    symmetric_cross_entropy,
    t_logistic_loss,
    tsallis_logistic_loss,
)

# Each with its softmax temperature and its documented formula in the probability p of the label.
LOSSES = {
    "tsallis": (partial(tsallis_logistic_loss, t1=0.3, t2=1.7), 1.7, lambda p: -oracle.log_t(p, 0.3)),
    "tsallis, t1 > 1": (partial(tsallis_logistic_loss, t1=1.3, t2=1.7), 1.7, lambda p: -oracle.log_t(p, 1.3)),
    "t-logistic": (partial(t_logistic_loss, t=1.6), 1.6, lambda p: -mp.log(p)),
    "generalized": (partial(generalized_cross_entropy, q=0.7), 1, lambda p: (1 - p ** mp.mpf(0.7)) / mp.mpf(0.7)),
    "symmetric": (
        partial(symmetric_cross_entropy, alpha=0.1, beta=1.5),
        1,
        lambda p: -mp.mpf(0.1) * mp.log(p) + mp.mpf(1.5) * 4 * (1 - p),
    ),
    "absolute": (mean_absolute_error, 1, lambda p: 2 * (1 - p)),
}
each = pytest.mark.parametrize("name", LOSSES)


def test_every_baseline_has_a_formula_here():
    assert {getattr(f, "func", f).__name__ for f, _, _ in LOSSES.values()} == set(baselines.__all__)


def batch(dtype=torch.float64):
    generator = torch.Generator().manual_seed(5)
    logits = 4 * torch.randn(6, 5, generator=generator, dtype=dtype)
    target = torch.randint(5, (6,), generator=generator)
    soft = torch.rand(6, 5, generator=generator, dtype=dtype)
    weight = torch.rand(5, generator=generator, dtype=dtype) + 0.1
    return logits, target, soft / soft.sum(1, keepdim=True), weight


@each
@pytest.mark.parametrize("kind", ["hard", "smoothed and weighted", "soft"])
def test_equals_its_formula_in_50_digits(name, kind):
    loss, t, formula = LOSSES[name]
    logits, target, soft, weight = batch()
    if kind == "hard":
        got, y, w = loss(logits, target, reduction="none"), torch.eye(5)[target], torch.ones(5)
    elif kind == "soft":
        got, y, w = loss(logits, soft, reduction="none"), soft, torch.ones(5)
    else:
        got = loss(logits, target, reduction="none", weight=weight, label_smoothing=0.125)
        y, w = (1 - 0.125) * torch.eye(5, dtype=torch.float64)[target] + 0.125 / 5, weight
    for a, yi, value in zip(logits.tolist(), y.tolist(), got.tolist(), strict=True):
        p = oracle.softmax(a, t)
        exact = mp.fsum(wc * yc * formula(pc) for wc, yc, pc in zip(w.tolist(), yi, p, strict=True))
        assert abs(value - exact) <= 1e-12 * max(1, abs(exact))  # the project's bar


@each
def test_gradients(name):
    loss = LOSSES[name][0]
    logits, target, soft, weight = batch()
    logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda a: loss(a, target, weight=weight, label_smoothing=0.1), logits)
    assert torch.autograd.gradcheck(lambda a: loss(a, soft), logits)
    assert torch.autograd.gradgradcheck(lambda a: loss(a, target), logits)


# q = 0, t = 1 and alpha = 1, beta = 0 are cross-entropy itself: every one of its manners must come along.
CROSS_ENTROPIES = {
    "generalized": partial(generalized_cross_entropy, q=0.0),
    "t-logistic": partial(t_logistic_loss, t=1.0),
    "tsallis": partial(tsallis_logistic_loss, t1=1.0, t2=1.0),
    "symmetric": partial(symmetric_cross_entropy, alpha=1.0, beta=0.0),
}


@pytest.mark.parametrize("name", CROSS_ENTROPIES)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(5,), (6, 5), (6, 5, 2, 3)])
def test_manners_are_those_of_cross_entropy(name, reduction, smoothing, weighted, shape):
    loss = CROSS_ENTROPIES[name]
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(shape, generator=generator)
    axis = min(1, len(shape) - 1)
    options = {"reduction": reduction, "label_smoothing": smoothing}
    if weighted:
        options["weight"] = torch.rand(5, generator=generator) + 0.1
    target = torch.randint(5, shape[:axis] + shape[axis + 1 :], generator=generator)
    soft = torch.softmax(torch.randn(shape, generator=generator), axis)
    torch.testing.assert_close(loss(logits, target, **options), F.cross_entropy(logits, target, **options))
    torch.testing.assert_close(loss(logits, soft, **options), F.cross_entropy(logits, soft, **options))
    if len(shape) > 1:
        target[0] = -100
        torch.testing.assert_close(loss(logits, target, **options), F.cross_entropy(logits, target, **options))


def test_special_cases():
    logits, target, *_ = batch()
    none = {"reduction": "none"}
    halves = 2 * generalized_cross_entropy(logits, target, 1.0, **none)
    torch.testing.assert_close(mean_absolute_error(logits, target, **none), halves)
    torch.testing.assert_close(
        generalized_cross_entropy(logits, target, 0.7, **none), tsallis_logistic_loss(logits, target, 0.3, 1.0, **none)
    )
    torch.testing.assert_close(
        symmetric_cross_entropy(logits, target, 0.0, 1.0, -2.0, **none), mean_absolute_error(logits, target, **none)
    )
    # Our loss of a hard label has one more term, the same for every label.
    p = tempered_softmax(logits, 1.5)
    torch.testing.assert_close(
        bi_tempered_logistic_loss(logits, target, 0.5, 1.5, **none),
        tsallis_logistic_loss(logits, target, 0.5, 1.5, **none) - (1 - (p**1.5).sum(1)) / 1.5,
    )


@each
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("wrong", [False, True])
def test_stable_for_large_logits_and_masked_classes(name, dtype, wrong):
    loss, t, formula = LOSSES[name]
    logits = torch.tensor([1e4, -1e4, 0.0, -torch.inf], dtype=dtype, requires_grad=True)
    value = loss(logits, torch.tensor(int(wrong)))
    value.backward()
    p = oracle.softmax([1e4, -1e4, 0.0], t)[int(wrong)]
    exact = float(formula(p))
    assert value.dtype == dtype
    assert value.item() == pytest.approx(exact, rel=8 * torch.finfo(dtype).eps, abs=1e-6)
    assert logits.grad.isfinite().all()
    assert logits.grad[3] == 0


@each
def test_a_masked_target_is_bounded_or_infinite_with_a_finite_gradient(name):
    loss, _, formula = LOSSES[name]
    logits = torch.tensor([1.0, 0.0, -torch.inf], dtype=torch.float64, requires_grad=True)
    value = loss(logits, torch.tensor(2))
    value.backward()
    bound = formula(mp.mpf(0))
    assert value.item() == (mp.inf if mp.isinf(bound) else pytest.approx(float(bound), rel=1e-14))
    assert logits.grad.isfinite().all()


BAD_CALLS = {
    "scalar logits": (ValueError, lambda loss, a, y, w: loss(a[0, 0], y)),
    "integer logits": (RuntimeError, lambda loss, a, y, w: loss(a.long(), y)),
    "class out of range": (IndexError, lambda loss, a, y, w: loss(a, y + 9)),
    "target of another shape": (ValueError, lambda loss, a, y, w: loss(a, y[:2])),
    "probabilities that do not sum to 1": (ValueError, lambda loss, a, y, w: loss(a, torch.ones_like(a))),
    "ignore_index with probabilities": (RuntimeError, lambda loss, a, y, w: loss(a, a.softmax(1), ignore_index=0)),
    "reduction": (ValueError, lambda loss, a, y, w: loss(a, y, reduction="average")),
    "smoothing": (RuntimeError, lambda loss, a, y, w: loss(a, y, label_smoothing=1.5)),
    "weight of another shape": (RuntimeError, lambda loss, a, y, w: loss(a, y, weight=w[:2])),
}


@each
@pytest.mark.parametrize("bad", BAD_CALLS)
def test_bad_input_gets_the_error_of_our_loss(name, bad):
    error, call = BAD_CALLS[bad]
    logits, target, _, weight = batch()
    with pytest.raises(error) as ours:
        call(partial(bi_tempered_logistic_loss, t1=0.8, t2=1.2), logits, target, weight)
    with pytest.raises(error, match=f"^{re.escape(str(ours.value))}$"):
        call(LOSSES[name][0], logits, target, weight)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (partial(tsallis_logistic_loss, t1=1.5, t2=1.2), "t1 must not exceed t2, got t1 = 1.5 and t2 = 1.2"),
        (partial(t_logistic_loss, t=0.5), "t must be at least 1, below which"),
        (partial(generalized_cross_entropy, q=1.5), "q must be in [0, 1], got 1.5"),
        (partial(symmetric_cross_entropy, alpha=-1, beta=1), "alpha must be a finite number >= 0, got -1"),
        (partial(symmetric_cross_entropy, alpha=1, beta=float("nan")), "beta must be a finite number >= 0, got nan"),
        (partial(symmetric_cross_entropy, alpha=1, beta=1, log_zero=4), "log_zero must be a finite number <= 0, got 4"),
    ],
)
def test_bad_parameters(call, message):
    logits, target, *_ = batch()
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        call(logits, target)
