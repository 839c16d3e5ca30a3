"""Odd weights do not matter for classes that no target has, give what torch gives in use, and raise if negative."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import value_and_gradient

import bitempered.numpy as bt_numpy
from bitempered import kernels
from bitempered.torch import (
    BiTemperedBinaryLogisticLoss,
    BiTemperedLogisticLoss,
    LinearBiTemperedLogisticLoss,
    baselines,
    bi_tempered_binary_logistic_loss,
    bi_tempered_logistic_loss,
    linear_bi_tempered_logistic_loss,
)

LOGITS = torch.tensor([[2.0, 0.5, -1.0, 0.0], [0.0, 1.0, 0.5, 3.0], [0.3, 0.2, 4.0, 0.0]])
TARGET = torch.tensor([0, 1, 0])  # the largest logit of the last row is that of the odd class 2
PROBABILITIES = torch.tensor([[0.5, 0.2, 0.2, 0.1]] * 3)
SPARSE = torch.tensor([[0.5, 0.5, 0.0, 0.0]] * 3)
ODD = [math.nan, math.inf]
REDUCTIONS = ["none", "sum", "mean"]


def odd_weights(odd, at):
    weight = torch.tensor([1.0, 2.0, 3.0, 0.5])
    weight[at] = odd
    return weight


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_of_a_class_that_no_target_has(odd, reduction, dtype):
    logits = LOGITS.to(dtype)
    plain, weight = odd_weights(3.0, 2), odd_weights(odd, 2)
    with kernels.use("core"):
        want = value_and_gradient(
            bi_tempered_logistic_loss, logits, TARGET, 0.8, 1.2, weight=plain, reduction=reduction
        )
        got = value_and_gradient(
            bi_tempered_logistic_loss, logits, TARGET, 0.8, 1.2, weight=weight, reduction=reduction
        )
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    losses, gradient = bt_numpy.loss_and_grad(logits.numpy(), TARGET.numpy(), 0.8, 1.2, weight=weight.numpy())
    if reduction == "none":
        np.testing.assert_allclose(losses, want[0], rtol=2e-6)
        np.testing.assert_allclose(gradient, want[1], rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("odd", ODD)
def test_of_a_class_that_no_target_has_everywhere_else(odd):
    plain, weight = odd_weights(3.0, 2), odd_weights(odd, 2)
    want = bi_tempered_logistic_loss(LOGITS, TARGET, 0.8, 1.2, weight=plain)
    assert (
        torch.func.grad(lambda a: bi_tempered_logistic_loss(a, TARGET, 0.8, 1.2, weight=weight))(LOGITS)
        .isfinite()
        .all()
    )
    hidden, layer = torch.eye(3), LOGITS.t().contiguous()
    with kernels.use("core"):
        got = linear_bi_tempered_logistic_loss(hidden, layer, TARGET, 0.8, 1.2, class_weight=weight)
    torch.testing.assert_close(got, want)
    mae = baselines.mean_absolute_error
    assert torch.equal(mae(LOGITS, TARGET, weight=weight), mae(LOGITS, TARGET, weight=plain))
    jax = pytest.importorskip("jax")
    bt_jax = pytest.importorskip("bitempered.jax")

    def by_jax(weight):
        return jax.value_and_grad(
            lambda a: bt_jax.bi_tempered_logistic_loss(a, TARGET.numpy(), 0.8, 1.2, weight=weight.numpy()).sum()
        )(LOGITS.numpy())

    for x, y in zip(by_jax(weight), by_jax(plain), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(
    ("target", "smoothing"), [(TARGET, 0.0), (TARGET, 0.1), (PROBABILITIES, 0.0), (SPARSE, 0.0)], ids=str
)
@pytest.mark.parametrize("at", [0, 2])  # a class that targets have, and one that only smoothing gives a share
def test_in_use_they_are_not_finite_where_torch_is_not(odd, reduction, target, smoothing, at):
    options = {"weight": odd_weights(odd, at), "reduction": reduction, "label_smoothing": smoothing}
    with kernels.use("core"):
        got, gradient = value_and_gradient(bi_tempered_logistic_loss, LOGITS, target, 1.0, 1.0, **options)
    want, want_gradient = value_and_gradient(F.cross_entropy, LOGITS, target, **options)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.isinf(), want.isinf())
    assert torch.equal(gradient.isfinite().all(1), want_gradient.isfinite().all(1))
    losses, _ = bt_numpy.loss_and_grad(
        LOGITS.numpy(), target.numpy(), 1.0, 1.0, weight=options["weight"].numpy(), label_smoothing=smoothing
    )
    if reduction == "none":
        np.testing.assert_array_equal(np.isfinite(losses), want.isfinite())


NEGATIVE = torch.tensor([1.0, 1.0, 1.0, -0.5])


# Beside a NaN too, which hides the smallest number.
@pytest.mark.parametrize("weight", [NEGATIVE, torch.tensor([1.0, math.nan, 1.0, -0.5])], ids=["plain", "nan"])
@pytest.mark.parametrize("target", [TARGET, PROBABILITIES], ids=["indices", "probabilities"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_negative_class_weights(weight, target, dtype):
    logits, message = LOGITS.to(dtype), "weight must not be negative, got -0.5"
    for _ in range(2):  # the second call knows the shapes
        with pytest.raises(ValueError, match=message):
            bi_tempered_logistic_loss(logits, target, 0.8, 1.2, weight=weight)
    with kernels.use("core"), pytest.raises(ValueError, match=message):
        bi_tempered_logistic_loss(logits, target, 0.8, 1.2, weight=weight)
    with pytest.raises(ValueError, match=message):
        torch.func.grad(lambda a: bi_tempered_logistic_loss(a, target, 0.8, 1.2, weight=weight))(logits)
    with pytest.raises(ValueError, match=message):
        linear_bi_tempered_logistic_loss(torch.eye(3), LOGITS.t().contiguous(), target, 0.8, 1.2, class_weight=weight)
    with pytest.raises(ValueError, match=message):
        baselines.generalized_cross_entropy(logits, target, q=0.7, weight=weight)
    with pytest.raises(ValueError, match=message):
        bt_numpy.bi_tempered_logistic_loss(logits.numpy(), target.numpy(), 0.8, 1.2, weight=weight.numpy())
    with pytest.raises(ValueError, match=message):
        BiTemperedLogisticLoss(0.8, 1.2, weight=weight)
    with pytest.raises(ValueError, match=f"class_{message}"):
        LinearBiTemperedLogisticLoss(0.8, 1.2, class_weight=weight)


@pytest.mark.parametrize("name", ["weight", "pos_weight"])
def test_negative_binary_weights(name):
    message = f"^{name} must not be negative, got -0.5"
    with pytest.raises(ValueError, match=message):
        bi_tempered_binary_logistic_loss(LOGITS, PROBABILITIES, 0.8, 1.2, **{name: NEGATIVE})
    with pytest.raises(ValueError, match=message):
        BiTemperedBinaryLogisticLoss(0.8, 1.2, **{name: NEGATIVE})
    with pytest.raises(ValueError, match=message):
        bt_numpy.bi_tempered_binary_logistic_loss(
            LOGITS.numpy(), PROBABILITIES.numpy(), 0.8, 1.2, **{name: NEGATIVE.numpy()}
        )
    bt_jax = pytest.importorskip("bitempered.jax")
    losses = bt_jax.bi_tempered_binary_logistic_loss(
        LOGITS.numpy(), PROBABILITIES.numpy(), 0.8, 1.2, **{name: NEGATIVE.numpy()}
    )
    assert np.isnan(np.asarray(losses)).tolist() == [[False, False, False, True]] * 3


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("name", ["weight", "pos_weight"])
def test_odd_binary_weights_are_as_torchs(odd, name):
    options = {name: odd_weights(odd, 1), "reduction": "none"}
    for target in (PROBABILITIES, torch.tensor([[0.0, 0.0, 1.0, 0.0]] * 3)):
        got = bi_tempered_binary_logistic_loss(LOGITS, target, 1.0, 1.0, **options)
        want = F.binary_cross_entropy_with_logits(LOGITS, target, **options)
        assert torch.equal(got.isfinite(), want.isfinite())
        losses = bt_numpy.bi_tempered_binary_logistic_loss(
            LOGITS.numpy(), target.numpy(), 1.0, 1.0, **{name: options[name].numpy()}
        )
        np.testing.assert_array_equal(np.isfinite(losses), want.isfinite())


def test_negative_weights_go_unchecked_where_they_cannot_be_looked_at():
    torch.func.vmap(lambda w: bi_tempered_logistic_loss(LOGITS, TARGET, 0.8, 1.2, weight=w))(NEGATIVE.repeat(2, 1))
    meta = LOGITS.to("meta")
    assert bi_tempered_logistic_loss(meta, TARGET.to("meta"), 0.8, 1.2, weight=NEGATIVE.to("meta")).shape == ()


# What is wrong whatever the logits raises when the module is made, as the function would raise it.
OPTIONS = {
    "smoothing": ({"label_smoothing": 1.5}, RuntimeError, "label_smoothing must be between 0 and 1, got 1.5"),
    "smoothing type": ({"label_smoothing": "a"}, RuntimeError, "label_smoothing must be between 0 and 1, got 'a'"),
    "ignore_index": ({"ignore_index": 1.5}, TypeError, "ignore_index must be an int, got float"),
    "reduction": ({"reduction": "avg"}, ValueError, "reduction must be .* got 'avg'"),
    "weight type": ({"weight": [1.0, 2.0]}, TypeError, r"weight must be a torch.Tensor, got list"),
    "weight dtype": ({"weight": torch.ones(4).long()}, RuntimeError, "weight must be float16.* got torch.int64"),
    "weight shape": ({"weight": torch.ones(2, 4)}, RuntimeError, r"weight must .* got .*\(2, 4\)"),
    "weight gradient": (
        {"weight": torch.ones(4, requires_grad=True)},
        RuntimeError,
        "weight cannot require a gradient",
    ),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_modules_check_all_options_when_made(case):
    options, exception, message = OPTIONS[case]
    with pytest.raises(exception, match=message):
        bi_tempered_logistic_loss(LOGITS, TARGET, 0.8, 1.2, **options)
    with pytest.raises(exception, match=message):
        BiTemperedLogisticLoss(0.8, 1.2, **options)
    of_linear = {"class_weight" if name == "weight" else name: value for name, value in options.items()}
    with pytest.raises(exception, match=message):
        LinearBiTemperedLogisticLoss(0.8, 1.2, **of_linear)
    if case in ("reduction", "weight type", "weight dtype", "weight gradient"):
        with pytest.raises(exception, match=message):
            BiTemperedBinaryLogisticLoss(0.8, 1.2, **options)
        if "weight" in options:
            with pytest.raises(exception, match=f"pos_{message}"):
                BiTemperedBinaryLogisticLoss(0.8, 1.2, pos_weight=options["weight"])


@pytest.mark.parametrize("softcap", [0.0, -1.0, math.inf])
def test_the_linear_module_checks_its_softcap(softcap):
    with pytest.raises(ValueError, match="softcap must be"):
        LinearBiTemperedLogisticLoss(0.8, 1.2, softcap=softcap)
