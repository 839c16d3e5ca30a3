"""bitempered.numpy against the 50-digit oracle and bitempered.torch, and what bad input gets."""

import math

import mpmath as mp
import numpy as np
import oracle
import pytest
import torch
from cases import INDEX, LOGITS, PAIRS, SOFT, TEMPERATURES, TOLERANCE, WEIGHT, error, exact_losses
from rescale_cases import RESCALED, rescaled_losses

import bitempered.numpy as bt
import bitempered.torch as bt_torch

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("t1", "t2"), PAIRS)
def test_loss_and_gradient_equal_the_oracle(dtype, t1, t2):
    logits, soft, weight = LOGITS.astype(dtype), SOFT.astype(dtype), WEIGHT.astype(dtype)
    smooth = 0.875 * np.eye(6)[INDEX] + 0.125 / 6
    cases = [
        (INDEX, np.eye(6)[INDEX], {}),
        (soft, soft, {}),
        (INDEX, smooth, {"label_smoothing": 0.125, "weight": weight}),
    ]
    for target, y, options in cases:
        losses, gradient = bt.loss_and_grad(logits, target, t1, t2, **options)
        assert losses.dtype == gradient.dtype == dtype
        values, gradients = exact_losses(logits, y, t1, t2, WEIGHT.tolist() if options else None)
        assert error(losses, values) <= TOLERANCE[dtype]
        assert error(gradient, gradients) <= TOLERANCE[dtype]
        np.testing.assert_array_equal(bt.bi_tempered_logistic_loss(logits, target, t1, t2, **options), losses)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("t", TEMPERATURES)
def test_softmax_and_scalar_functions_equal_the_oracle(dtype, t):
    tolerance = TOLERANCE[dtype]
    logits = LOGITS.astype(dtype)
    exact = [p for a in logits.tolist() for p in oracle.softmax(a, t)]
    assert error(bt.tempered_softmax(logits, t), exact) <= tolerance
    logs = np.ravel(bt.tempered_log_softmax(logits, t))
    assert [x == -math.inf for x in logs] == [p == 0 for p in exact]
    assert error(logs[logs > -math.inf], [mp.log(p) for p in exact if p > 0]) <= tolerance
    # lambda = max(a) + (e^(s m) - 1) / s magnifies a rounding error of m by s m.
    partition = [oracle.normalizer(a, t) for a in logits.tolist()]
    assert error(bt.log_partition(logits, t), partition) <= tolerance * max(1, (t - 1) * 2.2)
    column = logits[:, 0] / 8
    assert error(bt.tempered_sigmoid(column, t), [oracle.softmax([0, a], t)[1] for a in column.tolist()]) <= tolerance
    x = np.array([1e-5, 0.3, 1.0, 50.0], dtype)
    # x^(1-t) magnifies the rounding of log x by abs(1 - t) abs(log x), at most 12 abs(1 - t) here.
    assert error(bt.log_t(x, t), [oracle.log_t(v, t) for v in x.tolist()]) <= tolerance * max(1, 12 * abs(1 - t))
    x = np.array([-100.0, -2.0, 0.0, 0.2], dtype)
    assert error(bt.exp_t(x, t), [oracle.exp_t(v, t) for v in x.tolist()]) <= 4 * tolerance


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize(("t1", "t2"), PAIRS)
def test_agrees_with_torch(dtype, t1, t2):
    # Two roundings to the same dtype of numbers that agree to 3e-6: one unit in the last place.
    tolerance = {np.float16: 1e-3, np.float32: 3e-6, np.float64: 1e-13}[dtype]
    logits = LOGITS.astype(dtype)
    logits[1, 2] = -np.inf
    for target, options in [(INDEX, {"weight": WEIGHT.astype(dtype)}), (SOFT, {"label_smoothing": 0.1}), (SOFT, {})]:
        leaf = torch.from_numpy(logits).requires_grad_()
        tensors = {k: torch.from_numpy(v) if k == "weight" else v for k, v in options.items()}
        want = bt_torch.bi_tempered_logistic_loss(leaf, torch.from_numpy(target), t1, t2, reduction="none", **tensors)
        losses, gradient = bt.loss_and_grad(logits, target, t1, t2, **options)
        assert losses.dtype == gradient.dtype == dtype
        np.testing.assert_allclose(losses, want.detach().numpy(), rtol=tolerance, atol=tolerance)
        (by_torch,) = torch.autograd.grad(want[want.isfinite()].sum(), leaf)
        np.testing.assert_allclose(gradient[want.isfinite().numpy()], by_torch[want.isfinite()].numpy(), atol=tolerance)
    target = np.array([0.0, 0.25, 1.0, 0.5], dtype)
    a, w = LOGITS[:, 1].astype(dtype), np.array([1.0, 2.0, 0.0, 3.0], dtype)
    want = bt_torch.bi_tempered_binary_logistic_loss(
        *map(torch.from_numpy, (a, target)),
        t1,
        t2,
        weight=torch.from_numpy(w),
        pos_weight=torch.tensor(3.0, dtype=torch.from_numpy(w).dtype),
        reduction="none",
    )
    got = bt.bi_tempered_binary_logistic_loss(a, target, t1, t2, weight=w, pos_weight=dtype(3))
    assert got.dtype == dtype
    np.testing.assert_allclose(got, want.numpy(), rtol=tolerance, atol=tolerance)


def test_axis_and_shapes():
    logits = RNG.normal(size=(2, 5, 3))
    target = RNG.integers(5, size=(2, 3))
    losses, gradient = bt.loss_and_grad(logits, target, 0.8, 1.2, axis=1)
    moved = bt.loss_and_grad(np.moveaxis(logits, 1, -1), target, 0.8, 1.2)
    assert losses.shape == (2, 3)
    np.testing.assert_allclose(losses, moved[0], rtol=1e-14)
    np.testing.assert_allclose(np.moveaxis(gradient, 1, -1), moved[1], rtol=1e-13, atol=1e-15)
    np.testing.assert_allclose(bt.tempered_softmax(logits, 1.2, axis=0).sum(0), 1, rtol=1e-14)
    assert bt.log_partition(logits, 1.2, axis=1).shape == (2, 3)
    assert bt.bi_tempered_logistic_loss(logits[0, :, 0], 2, 0.8, 1.2).shape == ()
    assert bt.bi_tempered_logistic_loss(np.zeros((0, 5)), np.zeros(0, int), 0.8, 1.2).shape == (0,)
    for integer in (np.uint8, np.int16, np.uint64):
        np.testing.assert_array_equal(bt.loss_and_grad(logits, target.astype(integer), 0.8, 1.2, axis=1)[0], losses)


def test_infinite_and_nan_logits():
    """-inf masks a class; +inf, NaN and a row of -inf give NaN. No warning: they are errors in this suite."""
    logits = np.array([[1.0, -np.inf, 0.0], [1.0, np.inf, 0.0], [1.0, np.nan, 0.0], [-np.inf] * 3])
    for t in (0.5, 1.0, 1.5):
        p = bt.tempered_softmax(logits, t)
        np.testing.assert_allclose(p[0], np.insert(bt.tempered_softmax([1.0, 0.0], t), 1, 0.0))
        assert np.isnan(p[1:]).all()
        losses, gradient = bt.loss_and_grad(logits, [0, 0, 0, 0], t, t)
        assert np.isnan(losses[1:]).all()
        assert np.isfinite(losses[0])
        assert gradient[0, 1] == 0
        masked_target = bt.bi_tempered_logistic_loss(logits[0], 1, t, t)
        assert np.isfinite(masked_target) == (t < 1)
    assert bt.log_partition(np.zeros(1000, np.float32), 100.0) == np.inf
    assert bt.bi_tempered_logistic_loss(np.float16([-6e4, 6e4]), 0, 1.5, 1.5) == np.inf  # beyond float16


def test_no_weight_no_loss():
    losses, gradient = bt.loss_and_grad(LOGITS, INDEX, 0.8, 1.2, weight=np.zeros(6))
    assert not losses.any()
    assert not gradient.any()


CASES = {
    "t1": ({"t1": 2.0, "t2": 3.0}, ValueError, r"t1 must be in \[0, 2\), got 2.0"),
    "t2": ({"t2": math.nan}, ValueError, "t2 must be a finite number >= 0, got nan"),
    "t1 above t2": ({"t1": 1.2, "t2": 0.8}, ValueError, "t1 must not exceed t2, got t1 = 1.2 and t2 = 0.8"),
    "t1 text": ({"t1": "0.8"}, TypeError, "t1 must be a number, got str"),
    "index": ({"target": [0, 6, 2, 1]}, IndexError, "class indices from 0 to 5, got values from 0 to 6"),
    "negative index": ({"target": [0, -1, 2, 1]}, IndexError, "class indices from 0 to 5, got values from -1 to 2"),
    "negative": ({"target": SOFT - 0.5}, ValueError, r"probabilities in \[0, 1\] .* got values from -0.5"),
    "sum": ({"target": 1.01 * SOFT}, ValueError, "sum to 1 within 0.001 .* sums from 1.01"),
    "nan": ({"target": math.nan * SOFT}, ValueError, "must hold probabilities"),
    "shape": ({"target": [0, 1]}, ValueError, r"shape \(4,\) or .* of shape \(4, 6\), got int64 of shape \(2,\)"),
    "float index": ({"target": [0.0, 1.0, 2.0, 3.0]}, ValueError, r"indices \(integers\) .* got float64 of shape \(4,"),
    "bool": ({"target": INDEX > 0}, ValueError, "got bool"),
    "smoothing": ({"label_smoothing": 1.5}, ValueError, "label_smoothing must be between 0 and 1, got 1.5"),
    "smoothing text": ({"label_smoothing": "0.1"}, ValueError, "between 0 and 1, got '0.1'"),
    "weight": ({"weight": np.ones(5)}, ValueError, r"each of the 6 classes, got shape \(5,\)"),
    "weight dtype": ({"weight": np.ones(6, int)}, TypeError, "weight must be float16, .* got int64"),
    "negative weight": ({"weight": -WEIGHT}, ValueError, "weight must not be negative, got -4"),
    "logits dtype": ({"logits": LOGITS.astype(int)}, TypeError, "logits must be float16, .* got int64; convert it"),
    "scalar": ({"logits": 1.0, "target": 0}, ValueError, r"class axis of at least one class, got shape \(\)"),
    "no class": ({"logits": np.zeros((4, 0))}, ValueError, r"at least one class, got shape \(4, 0\)"),
    "axis": ({"axis": 2}, ValueError, r"axis must be in \[-2, 1\] for this shape, got 2"),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input(case):
    options, exception, message = CASES[case]
    with pytest.raises(exception, match=message):
        bt.bi_tempered_logistic_loss(**({"logits": LOGITS, "target": INDEX, "t1": 0.8, "t2": 1.2} | options))


BINARY_CASES = {
    "above 1": ({"target": SOFT + 1}, ValueError, r"probabilities in \[0, 1\], got values from 1"),
    "nan": ({"target": math.nan * SOFT}, ValueError, r"probabilities in \[0, 1\]"),
    "shape": ({"target": SOFT[:, :4]}, ValueError, r"the shape of logits, \(4, 6\), got \(4, 4\)"),
    "complex": ({"target": SOFT * 1j}, TypeError, "real numbers or booleans, got complex128"),
    "weight": ({"weight": np.ones(4)}, ValueError, r"weight must broadcast to .* \(4, 6\), got \(4,\)"),
    "pos_weight": ({"pos_weight": np.ones((2, 4, 6))}, ValueError, r"pos_weight must broadcast .* got \(2, 4, 6\)"),
    "negative": ({"pos_weight": -np.ones(6)}, ValueError, "pos_weight must not be negative"),
}


@pytest.mark.parametrize("case", BINARY_CASES)
def test_bad_binary_input(case):
    options, exception, message = BINARY_CASES[case]
    with pytest.raises(exception, match=message):
        bt.bi_tempered_binary_logistic_loss(**({"logits": LOGITS, "target": SOFT, "t1": 0.8, "t2": 1.2} | options))


def test_binary_targets_may_be_integers_or_booleans():
    logits, target = np.array([1.0, -2.0, 3.0]), np.array([True, False, False])
    want = bt.bi_tempered_binary_logistic_loss(logits, target.astype(float), 0.8, 1.2)
    np.testing.assert_array_equal(bt.bi_tempered_binary_logistic_loss(logits, target, 0.8, 1.2), want)
    np.testing.assert_array_equal(bt.bi_tempered_binary_logistic_loss(logits, target.astype(int), 0.8, 1.2), want)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("t1", "t2"), RESCALED)
def test_rescaled_loss_and_gradient_equal_the_oracle(dtype, t1, t2):
    logits, weight = LOGITS.astype(dtype), WEIGHT.astype(dtype)
    # y_hat^(t2-t1) magnifies the rounding of log y_hat, which without `rescale` hides in a gradient next to 0.
    tolerance = TOLERANCE[dtype] * max(1, 2 * (t2 - t1))
    smooth = 0.875 * np.eye(6)[INDEX] + 0.125 / 6
    for y, options in ((np.eye(6)[INDEX], {}), (smooth, {"label_smoothing": 0.125, "weight": weight})):
        losses, gradient = bt.loss_and_grad(logits, INDEX, t1, t2, rescale=True, **options)
        values, gradients = rescaled_losses(logits, y, t1, t2, WEIGHT.tolist() if options else None)
        assert losses.dtype == gradient.dtype == dtype
        assert error(losses, values) <= TOLERANCE[dtype]
        assert error(gradient, gradients) <= tolerance
        np.testing.assert_array_equal(
            bt.bi_tempered_logistic_loss(logits, INDEX, t1, t2, rescale=True, **options), losses
        )
    a, y = logits[:, 1], SOFT[:, 1].astype(dtype)
    pairs = np.stack((0 * a, a), 1), np.stack((1 - y, y), 1)
    exact, _ = rescaled_losses(*pairs, t1, t2)
    got = bt.bi_tempered_binary_logistic_loss(a, y, t1, t2, rescale=True)
    assert got.dtype == dtype
    assert error(got, exact) <= TOLERANCE[dtype]


@pytest.mark.parametrize("classes", [2, 10, 1000])
@pytest.mark.parametrize(("t1", "t2"), RESCALED)
def test_rescaled_learning_starts_as_with_cross_entropy(classes, t1, t2):
    _, gradient = bt.loss_and_grad(np.zeros((1, classes)), [1], t1, t2, rescale=True)
    np.testing.assert_allclose(gradient[0], 1 / classes - np.eye(classes)[1], rtol=1e-12)


def test_half_precision_is_rescaled_in_float32():
    logits = np.float16([[300.0, 0.0, -300.0, 10.0]])  # times 4^3 they overflow float16
    got, gradient = bt.loss_and_grad(logits, [3], 0.5, 4.0, rescale=True)
    want, by_float = bt.loss_and_grad(logits.astype(np.float32), [3], 0.5, 4.0, rescale=True)
    np.testing.assert_array_equal(got, want.astype(np.float16))
    np.testing.assert_array_equal(gradient, by_float.astype(np.float16))


def test_a_masked_class_counts_and_too_large_a_factor_is_refused():
    masked = np.array([1.0, -np.inf, 0.0])
    got = bt.bi_tempered_logistic_loss(masked, 0, 0.5, 2.0, rescale=True)
    want = math.sqrt(3) * bt.bi_tempered_logistic_loss(3 * masked[::2], 0, 0.5, 2.0)
    np.testing.assert_allclose(got, want, rtol=1e-14)
    for f in (bt.bi_tempered_logistic_loss, bt.loss_and_grad):
        with pytest.raises(ValueError, match="more than 1e30 for 6 classes and t2 = 50: choose a smaller t2"):
            f(LOGITS, INDEX, 0.5, 50.0, rescale=True)
        with pytest.raises(TypeError, match="rescale must be True or False, got 1"):
            f(LOGITS, INDEX, 0.5, 50.0, rescale=1)
    with pytest.raises(ValueError, match="more than 1e30 for 2 classes and t2 = 102"):
        bt.bi_tempered_binary_logistic_loss(LOGITS, SOFT, 0.5, 102.0, rescale=True)
