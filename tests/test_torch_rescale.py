"""rescale: K^(1-t1) L(K^(t2-1) a), in every function and module; probabilities; and LearnableTemperatures."""

import math

import mpmath as mp
import numpy as np
import oracle
import pytest
import torch
import torch.nn.functional as F
from cases import error, value_and_gradient

from bitempered import kernels
from bitempered.torch import (
    BiTemperedBinaryLogisticLoss,
    BiTemperedLogisticLoss,
    LearnableTemperatures,
    LinearBiTemperedLogisticLoss,
    bi_tempered_binary_logistic_loss,
    bi_tempered_logistic_loss,
    linear_bi_tempered_logistic_loss,
    tempered_sigmoid,
    tempered_softmax,
)

PAIRS = [(0.5, 0.8), (1.0, 1.0), (0.8, 1.2), (0.3, 4.0)]
GENERATOR = np.random.default_rng(0)
LOGITS = GENERATOR.normal(size=(4, 5))
INDEX = np.array([0, 3, 4, 1])


def exact(logits, y, t1, t2):
    """Losses and gradients of K^(1-t1) L(K^(t2-1) a) in 50 digits."""
    classes, t1, t2 = mp.mpf(len(logits[0])), mp.mpf(t1), mp.mpf(t2)
    scale, factor = classes ** (t2 - 1), classes ** (1 - t1)
    losses, gradients = [], []
    for a, q in zip(logits, y, strict=True):
        loss, gradient = oracle.loss_and_gradient([scale * mp.mpf(x) for x in a], q, t1, t2)
        losses.append(factor * loss)
        gradients += [factor * scale * g for g in gradient]
    return losses, gradients


@pytest.mark.parametrize(("t1", "t2"), PAIRS)
def test_the_loss_equals_the_oracle(t1, t2):
    losses, gradients = exact(LOGITS.tolist(), np.eye(5)[INDEX].tolist(), t1, t2)
    target = torch.tensor(INDEX)
    for given in ((t1, t2), (torch.tensor(t1, dtype=torch.float64), torch.tensor(t2, dtype=torch.float64))):
        got = value_and_gradient(
            lambda a, given=given: bi_tempered_logistic_loss(a, target, *given, reduction="none", rescale=True),
            torch.tensor(LOGITS),
        )
        assert error(got[0], losses) < 1e-12
        assert error(got[1], gradients) < 1e-12
    module = BiTemperedLogisticLoss(t1, t2, reduction="sum", rescale=True)
    got = value_and_gradient(
        lambda a: module(a, target), torch.tensor(LOGITS, dtype=torch.float32)
    )  # by the C kernel where there is one
    assert error(got[0], [mp.fsum(losses)]) < 1e-5
    assert error(got[1], gradients) < 1e-5


@pytest.mark.parametrize(("t1", "t2"), PAIRS)
def test_the_binary_loss_equals_the_oracle(t1, t2):
    a, y = LOGITS[0].tolist(), [0.0, 1.0, 0.3, 0.9, 0.0]
    losses, gradients = exact([[0.0, x] for x in a], [[1 - p, p] for p in y], t1, t2)
    module = BiTemperedBinaryLogisticLoss(t1, t2, reduction="none", rescale=True)
    got = value_and_gradient(lambda x: module(x, torch.tensor(y, dtype=torch.float64)), torch.tensor(LOGITS[0]))
    assert error(got[0], losses) < 1e-12
    assert error(got[1], gradients[1::2]) < 1e-12


@pytest.mark.parametrize(("t1", "t2"), PAIRS)
def test_the_linear_loss_is_that_of_its_logits(t1, t2):
    hidden, weight, bias = (
        torch.tensor(GENERATOR.normal(size=s), requires_grad=True) for s in ((300, 3), (5, 3), (5,))
    )
    target = torch.arange(300) % 5
    module = LinearBiTemperedLogisticLoss(t1, t2, softcap=3.0, rescale=True)
    logits = 3 * torch.tanh(F.linear(hidden, weight, bias) / 3)
    got, want = module(hidden, weight, target, bias), bi_tempered_logistic_loss(logits, target, t1, t2, rescale=True)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
    leaves = hidden, weight, bias
    torch.testing.assert_close(
        torch.autograd.grad(got, leaves), torch.autograd.grad(want, leaves), rtol=1e-11, atol=1e-13
    )
    p = module.probabilities(hidden, weight, bias)
    torch.testing.assert_close(p, tempered_softmax(5 ** (t2 - 1) * logits, t2), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_scales_in_float32(dtype):
    """K^(t2-1) is 1e6 here, and 12 times that overflows float16.

    One logit is far above the others: `rescale` multiplies what rounding leaves of a gradient of 1e-7 by 2e6.
    """
    classes, t1, t2 = 100, 0.8, 4.0
    logits = np.random.default_rng(0).uniform(-12, 8, size=(3, classes))
    logits[:, 50] = 12
    logits = torch.tensor(logits).to(dtype)
    target = torch.tensor([0, 7, 99])

    def f(a):
        return bi_tempered_logistic_loss(a, target, t1, t2, reduction="none", rescale=True)

    got, want = value_and_gradient(f, logits), value_and_gradient(f, logits.double())
    for x, y in zip(got, want, strict=True):
        assert x.dtype == dtype
        assert ((x - y).abs() <= torch.finfo(dtype).eps * y.abs() + 2e-6).all()  # one rounding of the result
    p = BiTemperedLogisticLoss(t1, t2, rescale=True).probabilities(logits)
    assert p.dtype == dtype
    torch.testing.assert_close(p.double(), tempered_softmax(1e6 * logits.double(), t2), rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("of", [float, torch.tensor])
def test_masked_and_ignored(of):
    """K counts masked classes too. An ignored row of NaN reaches no gradient."""
    logits = torch.tensor([[1.0, -math.inf, 0.5, 0.0], [math.nan] * 4])
    target, t1, t2 = torch.tensor([2, -100]), of(0.8), of(1.2)
    loss, gradient = value_and_gradient(lambda a: bi_tempered_logistic_loss(a, target, t1, t2, rescale=True), logits)
    want = 4**0.2 * bi_tempered_logistic_loss(4**0.2 * logits[:1, [0, 2, 3]], torch.tensor([1]), 0.8, 1.2)
    torch.testing.assert_close(loss, want, rtol=1e-6, atol=0)
    assert gradient[1].eq(0).all()
    assert gradient[0, 1] == 0
    assert gradient[0].isfinite().all()


def test_probabilities():
    logits = torch.tensor(GENERATOR.normal(size=(3, 4, 2)))
    plain, rescaled = BiTemperedLogisticLoss(0.5, 1.5), BiTemperedLogisticLoss(0.5, 1.5, rescale=True)
    assert torch.equal(plain.probabilities(logits), tempered_softmax(logits, 1.5, dim=1))
    torch.testing.assert_close(rescaled.probabilities(logits), tempered_softmax(2 * logits, 1.5, dim=1))
    torch.testing.assert_close(rescaled.probabilities(logits[0, :, 0]), tempered_softmax(2 * logits[0, :, 0], 1.5))
    rescaled.t2 = torch.tensor([[1.5, 2.0]] * 3, dtype=torch.float64)
    p = rescaled.probabilities(logits)
    torch.testing.assert_close(p[:, :, 1], tempered_softmax(4 * logits[:, :, 1], 2.0))
    binary = BiTemperedBinaryLogisticLoss(0.5, 2.0)
    assert torch.equal(binary.probabilities(logits), tempered_sigmoid(logits, 2.0))
    binary.rescale = True
    torch.testing.assert_close(binary.probabilities(logits), tempered_sigmoid(2 * logits, 2.0))
    with pytest.raises(ValueError, match="a class dimension of at least one class"):
        plain.probabilities(torch.tensor(1.0))


def test_modules_store_and_show():
    for module in (BiTemperedLogisticLoss, BiTemperedBinaryLogisticLoss, LinearBiTemperedLogisticLoss):
        criterion = module()
        assert (criterion.t1, criterion.t2) == (0.8, 1.2)
        assert repr(criterion) == f"{module.__name__}(t1=0.8, t2=1.2)"
        assert repr(module(rescale=True)) == f"{module.__name__}(t1=0.8, t2=1.2, rescale=True)"
        assert list(criterion.state_dict()) == []
        with pytest.raises(TypeError, match="rescale must be True or False, got 1"):
            module(rescale=1)
    criterion, logits, target = BiTemperedLogisticLoss(), torch.tensor(LOGITS), torch.tensor(INDEX)
    criterion.t1 = 1.1  # not yet a bad pair: the other may follow
    criterion.t2 = 1.6
    assert torch.equal(criterion(logits, target), bi_tempered_logistic_loss(logits, target, 1.1, 1.6))
    criterion.t2 = 1.0
    with pytest.raises(ValueError, match="t1 must not exceed t2"):
        criterion(logits, target)
    criterion.t1 = torch.nn.Parameter(torch.tensor(0.5))
    criterion(logits, target).backward()
    assert criterion.t1.grad != 0


def test_bad_rescale():
    logits, target = torch.zeros(2, 1000), torch.tensor([0, 1])
    for given, kind, message in ((None, TypeError, "got None"), (1, TypeError, "got 1"), (True, ValueError, "1e30")):
        with pytest.raises(kind, match=message):
            bi_tempered_logistic_loss(logits, target, 0.8, 20.0, rescale=given)
        with pytest.raises(kind, match=message):
            linear_bi_tempered_logistic_loss(logits[:, :2], torch.zeros(1000, 2), target, 0.8, 20.0, rescale=given)
        with pytest.raises(kind, match=message):
            bi_tempered_binary_logistic_loss(logits, logits, 0.8, 200.0, rescale=given)
    with kernels.use("core"):
        assert bi_tempered_logistic_loss(logits, target, 0.8, 20.0).isfinite()


def test_bad_rescale_by_a_tensor():
    logits, target = torch.zeros(2, 1000), torch.tensor([0, 1])
    for t2 in (torch.tensor(20.0), torch.tensor([1.2, 20.0]), torch.tensor(20.0, requires_grad=True)):
        for call in (
            lambda t2=t2: bi_tempered_logistic_loss(logits, target, 0.8, t2, rescale=True),
            lambda t2=t2: linear_bi_tempered_logistic_loss(
                logits[:, :2], torch.zeros(1000, 2), target, 0.8, t2, rescale=True
            ),
            lambda t2=t2: BiTemperedLogisticLoss(0.8, t2, rescale=True).probabilities(logits),
            lambda t2=t2: bi_tempered_binary_logistic_loss(logits[0, :2], target, 0.8, 10 * t2, rescale=True),
        ):
            with pytest.raises(ValueError, match="more than 1e30"):
                call()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("rate", [0.3, 100.0])
def test_learnable_temperatures_stay_strictly_within_bounds(dtype, rate):
    temperatures = LearnableTemperatures().to(dtype)
    optimizer = torch.optim.Adam(temperatures.parameters(), lr=rate)
    generator = torch.Generator().manual_seed(0)
    steps = 10_000
    signs = torch.randn(steps, 2, generator=generator)
    signs[: steps // 2] += 3 * torch.tensor([1.0, -1.0])  # first pushed to one end, then at random
    seen = torch.empty(steps, 2, dtype=dtype)
    for i in range(steps):
        for parameter, sign in zip(temperatures.parameters(), signs[i], strict=True):
            parameter.grad = sign.to(dtype)
        optimizer.step()
        with torch.no_grad():
            seen[i] = torch.stack(temperatures())
    assert ((seen[:, 0] > 0) & (seen[:, 0] < 1) & (seen[:, 1] > 1) & (seen[:, 1] < 4)).all()
    assert seen.isfinite().all()
    assert seen[:, 0].min() < 0.1
    assert seen[:, 1].max() > 3.9


def test_learnable_temperatures_start_where_told_and_learn():
    for t1, t2 in ((0.8, 1.2), (0.001, 3.9), (0.5, 2.5)):
        temperatures = LearnableTemperatures(t1, t2).double()
        assert [t.item() for t in temperatures()] == pytest.approx([t1, t2], abs=1e-6)
    at_bounds = LearnableTemperatures(1, 1)()  # a thousandth inside
    assert [t.item() for t in at_bounds] == pytest.approx([0.999, 1.003], abs=1e-5)
    temperatures = LearnableTemperatures(0.5, 2.0)
    loss = bi_tempered_logistic_loss(torch.tensor(LOGITS), torch.tensor(INDEX), *temperatures())
    loss.backward()
    assert temperatures.raw_t1.grad > 0  # the loss grows with t1
    assert temperatures.raw_t2.grad != 0
    half = LearnableTemperatures(1, 1).to(torch.bfloat16)
    with torch.no_grad():
        half.raw_t2.fill_(1e30)
    assert half()[0] < 1 < half()[1] < 4
    double = LearnableTemperatures(1.9, 2.1, (0, 2), (2, 4)).double()  # float32 losses round them
    with torch.no_grad():
        double.raw_t1.fill_(1e6)
    assert bi_tempered_logistic_loss(torch.tensor(LOGITS).float(), torch.tensor(INDEX), *double()).isfinite()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"t1": 1.5}, r"t1 must be within its bounds, 0 and 1, got 1.5"),
        ({"t2": 0.9}, r"t2 must be within its bounds, 1 and 4, got 0.9"),
        ({"t1_bounds": (0, 1.5)}, r"t1_bounds must not reach above t2_bounds.* got \(0, 1.5\) and \(1, 4\)"),
        ({"t1_bounds": (1, 0)}, r"t1_bounds must be \(low, high\), at least 0.001 apart, got \(1, 0\)"),
        ({"t1_bounds": (-1, 1)}, r"the lower bound of t1 must be a finite number >= 0, got -1"),
        ({"t2_bounds": (1, math.inf)}, r"the upper bound of t2 must be a finite number"),
        ({"t1_bounds": (0, 2.5), "t2_bounds": (3, 4), "t2": 3}, r"t1_bounds must be within \[0, 2\]"),
    ],
)
def test_bad_bounds(arguments, message):
    with pytest.raises(ValueError, match=message):
        LearnableTemperatures(**arguments)


@pytest.mark.parametrize("kernel", ["core", "cpu"])
@pytest.mark.parametrize(("classes", "t1", "t2"), [(10, 0.8, 1.2), (1000, 0.5, 2.0), (100, 0.5, 0.8)])
@pytest.mark.parametrize("offset", [100.0, 1e4])
def test_what_logits_have_in_common_costs_no_digits(classes, t1, t2, offset, kernel):
    """Multiplied before the largest is subtracted, offset and all, logits would lose up to a tenth of the gradient."""
    logits = torch.randn(4, classes, generator=torch.Generator().manual_seed(0)) + offset
    results = []
    for name, leaf in ((kernel, logits.clone()), ("core", logits.double())):
        with kernels.use(name):
            loss = bi_tempered_logistic_loss(leaf.requires_grad_(), torch.arange(4), t1, t2, rescale=True)
        results.append((loss.detach().double(), torch.autograd.grad(loss, leaf)[0].double()))
    (loss, gradient), (want, slope) = results
    torch.testing.assert_close(loss, want, rtol=1e-6, atol=0)
    assert (gradient - slope).abs().max() < 1e-5 * slope.abs().max()
