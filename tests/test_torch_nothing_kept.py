"""A mean over nothing is NaN and has no gradient, as torch's: one batch of padding must not ruin the weights."""

import pytest
import torch
from torch.nn.functional import cross_entropy

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

SHAPES = [(5,), (3, 5), (2, 5, 4), (0, 5)]
T = (0.8, 1.2)


def all_ignored(shape):
    return torch.full(shape[:1] + shape[2:] if len(shape) > 1 else (), -100)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("kernel", ["core", None])
def test_all_targets_ignored(shape, dtype, smoothing, kernel):
    logits = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(0)).requires_grad_()
    target = all_ignored(shape)
    with kernels.use(kernel or ("cpu" if len(shape) == 2 and dtype == torch.float32 else "core")):
        loss = bi_tempered_logistic_loss(logits, target, *T, label_smoothing=smoothing)
        loss.backward()
    assert loss.isnan()
    assert cross_entropy(logits.detach(), target).isnan()
    assert torch.equal(logits.grad, torch.zeros_like(logits))


@pytest.mark.parametrize("kernel", ["core", "cpu"])
def test_weights_that_are_all_zero(kernel):
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with kernels.use(kernel):
        loss = bi_tempered_logistic_loss(logits, torch.tensor([0, 1, 4]), *T, weight=torch.zeros(5))
        loss.backward()
    assert loss.isnan()
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_under_transforms_and_for_the_second_derivative():
    logits, target = torch.randn(3, 5, dtype=torch.float64), all_ignored((3, 5))

    def f(x):
        return bi_tempered_logistic_loss(x, target, *T)

    assert torch.equal(torch.func.grad(f)(logits), torch.zeros_like(logits))
    assert torch.equal(torch.func.hessian(f)(logits), torch.zeros(3, 5, 3, 5, dtype=torch.float64))
    both = torch.func.vmap(torch.func.grad(f))(torch.stack([logits, logits]))
    assert torch.equal(both, torch.zeros_like(both))
    single = logits.float().requires_grad_()  # the kernel's loss, whose second derivative is core's
    (first,) = torch.autograd.grad(f(single), single, create_graph=True)
    assert torch.equal(first, torch.zeros_like(single))
    (second,) = torch.autograd.grad(first.sum(), single)
    assert torch.equal(second, torch.zeros_like(single))


def test_compiled():
    logits = torch.randn(3, 5, 2).requires_grad_()
    compiled = torch.compile(lambda x, y: bi_tempered_logistic_loss(x, y, *T), fullgraph=True, backend="aot_eager")
    compiled(logits, all_ignored((3, 5, 2))).backward()
    assert torch.equal(logits.grad, torch.zeros_like(logits))


@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize("probabilities", [False, True])
def test_linear(rows, probabilities):
    hidden, weight = torch.randn(rows, 4).requires_grad_(), torch.randn(5, 4).requires_grad_()
    bias = torch.zeros(5).requires_grad_()
    if probabilities and rows:
        pytest.skip("every row of class probabilities counts")
    target = torch.full((rows, 5), 0.2) if probabilities else all_ignored((rows, 5))
    loss = linear_bi_tempered_logistic_loss(hidden, weight, target, *T, bias=bias)
    loss.backward()
    assert loss.isnan()
    for x in (hidden, weight, bias):
        assert torch.equal(x.grad, torch.zeros_like(x))


@pytest.mark.parametrize("loss", [baselines.mean_absolute_error, lambda x, y: baselines.t_logistic_loss(x, y, 1.5)])
def test_baselines(loss):
    logits = torch.randn(3, 5).requires_grad_()
    loss(logits, all_ignored((3, 5))).backward()
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_no_binary_target():
    logits = torch.empty(0).requires_grad_()
    loss = bi_tempered_binary_logistic_loss(logits, torch.empty(0), *T)
    loss.backward()
    assert loss.isnan()
    assert logits.grad.shape == (0,)


NEGATIVE, UNUSED = torch.tensor([1.0, -0.5, 1.0]), [float("nan"), float("inf")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_negative_weights(dtype):
    logits, target, weight = torch.zeros(2, 3, dtype=dtype), torch.tensor([0, 2]), NEGATIVE.to(dtype)
    for call in (
        lambda: bi_tempered_logistic_loss(logits, target, *T, weight=weight),
        lambda: bi_tempered_logistic_loss(logits, torch.full_like(logits, 1 / 3), *T, weight=weight),
        lambda: linear_bi_tempered_logistic_loss(logits, torch.eye(3, dtype=dtype), target, *T, class_weight=weight),
        lambda: baselines.mean_absolute_error(logits, target, weight=weight),
        lambda: bi_tempered_binary_logistic_loss(logits, logits, *T, pos_weight=weight),
        lambda: bi_tempered_binary_logistic_loss(logits, logits, *T, weight=weight),
        lambda: BiTemperedLogisticLoss(*T, weight=weight),
        lambda: LinearBiTemperedLogisticLoss(*T, class_weight=weight),
        lambda: BiTemperedBinaryLogisticLoss(*T, weight=weight),
        lambda: BiTemperedBinaryLogisticLoss(*T, pos_weight=weight),
    ):
        with pytest.raises(ValueError, match=r"weight must not be negative, got values from -0\.5 to 1"):
            call()


BAD_OPTIONS = [
    ({"ignore_index": 1.5}, TypeError, "ignore_index"),
    ({"label_smoothing": 1.5}, RuntimeError, "label_smoothing"),
    ({"label_smoothing": "0.1"}, RuntimeError, "label_smoothing"),
    ({"reduction": "average"}, ValueError, "reduction"),
]


@pytest.mark.parametrize(("options", "error", "name"), BAD_OPTIONS)
@pytest.mark.parametrize("module", [BiTemperedLogisticLoss, LinearBiTemperedLogisticLoss])
def test_modules_check_their_options_when_made(module, options, error, name):
    with pytest.raises(error, match=name):
        module(*T, **options)


WEIGHTS = {
    BiTemperedLogisticLoss: ["weight"],
    LinearBiTemperedLogisticLoss: ["class_weight"],
    BiTemperedBinaryLogisticLoss: ["weight", "pos_weight"],
}


@pytest.mark.parametrize("module", WEIGHTS)
def test_modules_check_their_weights_when_made(module):
    for name in WEIGHTS[module]:
        with pytest.raises(TypeError, match=f"{name} must be a torch.Tensor, got list"):
            module(*T, **{name: [1.0, 2.0]})
        with pytest.raises(RuntimeError, match=f"{name} must be float16"):
            module(*T, **{name: torch.ones(3, dtype=torch.int64)})
        with pytest.raises(RuntimeError, match=f"{name} cannot require a gradient"):
            module(*T, **{name: torch.ones(3, requires_grad=True)})
    if module is not BiTemperedBinaryLogisticLoss:
        with pytest.raises(RuntimeError, match="one entry for each class"):
            module(*T, **{name: torch.ones(2, 3)})
    with pytest.raises(ValueError, match="reduction"):
        module(*T, reduction="average")


def test_the_linear_module_checks_its_cap_when_made():
    with pytest.raises(ValueError, match="softcap must be greater than 0, got 0"):
        LinearBiTemperedLogisticLoss(*T, softcap=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", UNUSED)
@pytest.mark.parametrize("probabilities", [False, True])
def test_weights_of_classes_that_no_target_has_do_not_matter(value, dtype, probabilities):
    logits = torch.randn(2, 3, dtype=dtype, generator=torch.Generator().manual_seed(0))
    target = torch.tensor([0, 2])
    if probabilities:
        target = torch.tensor([[0.5, 0.0, 0.5], [1.0, 0.0, 0.0]], dtype=dtype)
    found = []
    for weight in ([2.0, value, 3.0], [2.0, 1.0, 3.0]):
        x = logits.clone().requires_grad_()
        loss = bi_tempered_logistic_loss(x, target, *T, weight=torch.tensor(weight, dtype=dtype))
        found.append((loss, *torch.autograd.grad(loss, x)))
    for odd, plain in zip(*found, strict=True):
        assert torch.equal(odd, plain)
