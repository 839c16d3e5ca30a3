"""A mean over no example (an empty batch, all ignored, weights of 0) is NaN as torch's, and its gradient is 0.

One batch of padding must not end a training run: in every dtype and shape, by every implementation and transform.
"""

import contextlib
import shutil

import pytest
import torch
import torch.nn.functional as F

from bitempered import kernels
from bitempered.kernels import cpu
from bitempered.torch import (
    baselines,
    bi_tempered_binary_logistic_loss,
    bi_tempered_logistic_loss,
    linear_bi_tempered_logistic_loss,
)

T = (0.8, 1.2)
SHAPES = [(5,), (4, 5), (2, 5, 3), (2, 5, 3, 2)]  # one example, a batch, a sequence, an image
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
WEIGHT = torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0])  # of the classes 0 and 1 that are then the targets


def make(shape=(4, 5), dtype=torch.float32):
    axis = min(1, len(shape) - 1)
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    return logits, torch.full(shape[:axis] + shape[axis + 1 :], -100)


def assert_nothing(loss, *inputs):
    """NaN, and a gradient of 0 with and without a graph of it."""
    assert loss.isnan()
    for create_graph in (True, False):
        for gradient in torch.autograd.grad(loss, inputs, create_graph=create_graph, retain_graph=True):
            assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.fixture(params=["chosen", "core"])
def kernel(request):
    with contextlib.nullcontext() if request.param == "chosen" else kernels.use(request.param):
        yield request.param


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_all_ignored(shape, dtype, smoothing):
    logits, ignored = make(shape, dtype)
    assert_nothing(bi_tempered_logistic_loss(logits, ignored, *T, label_smoothing=smoothing), logits)
    assert_nothing(F.cross_entropy(logits, ignored, label_smoothing=smoothing), logits)  # as torch has it


@pytest.mark.usefixtures("kernel")
def test_ignore_index_may_be_a_class():
    logits, _ = make()
    target = torch.tensor([2, 2, 2, 2])
    assert_nothing(bi_tempered_logistic_loss(logits, target, *T, ignore_index=2), logits)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_all_weights_in_use_are_zero(dtype, smoothing):
    logits, _ = make(dtype=dtype)
    target = torch.tensor([0, 1, 0, 1])
    assert_nothing(bi_tempered_logistic_loss(logits, target, *T, weight=WEIGHT, label_smoothing=smoothing), logits)
    loss = bi_tempered_logistic_loss(logits, target, *T, weight=torch.zeros(5), label_smoothing=smoothing)
    assert_nothing(loss, logits)


@pytest.mark.usefixtures("kernel")
def test_probabilities_and_binary_losses():
    logits, _ = make((0, 5))
    assert_nothing(bi_tempered_logistic_loss(logits, torch.zeros(0, 5), *T), logits)
    assert_nothing(bi_tempered_logistic_loss(logits, torch.zeros(0, dtype=torch.long), *T), logits)
    # As torch's: N does not count weights.
    logits, _ = make()
    loss = bi_tempered_logistic_loss(logits, torch.full((4, 5), 0.2), *T, weight=torch.zeros(5))
    assert loss == 0
    assert torch.equal(torch.autograd.grad(loss, logits)[0], torch.zeros(4, 5))


def test_binary_losses_of_no_element():
    logits = torch.zeros(0, 5, requires_grad=True)
    assert_nothing(bi_tempered_binary_logistic_loss(logits, torch.zeros(0, 5), *T), logits)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("rows", [0, 4])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_linear_loss(rows, smoothing):
    generator = torch.Generator().manual_seed(0)
    layer = [torch.randn(shape, generator=generator, requires_grad=True) for shape in ((rows, 3), (5, 3), (5,))]
    hidden, weight, bias = layer
    targets = [torch.full((rows,), -100), *([torch.zeros(0, 5)] if rows == 0 else [])]
    for target in targets:
        loss = linear_bi_tempered_logistic_loss(hidden, weight, target, *T, bias=bias, label_smoothing=smoothing)
        assert loss.isnan()
        for gradient in torch.autograd.grad(loss, layer):
            assert torch.equal(gradient, torch.zeros_like(gradient))
        assert_nothing(F.cross_entropy(F.linear(*layer), target, label_smoothing=smoothing), *layer)


@pytest.mark.usefixtures("kernel")
def test_the_linear_loss_with_weights_of_zero():
    hidden, weight = torch.ones(4, 3, requires_grad=True), torch.ones(5, 3, requires_grad=True)
    for smoothing in (0.0, 0.1):
        loss = linear_bi_tempered_logistic_loss(
            hidden, weight, torch.tensor([0, 1, 0, 1]), *T, class_weight=WEIGHT, label_smoothing=smoothing
        )
        assert loss.isnan()
        assert all(torch.equal(g, torch.zeros_like(g)) for g in torch.autograd.grad(loss, (hidden, weight)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_transforms(shape):
    logits, ignored = make(shape)
    logits = logits.detach()

    def loss(a):
        return bi_tempered_logistic_loss(a, ignored, *T)

    zero = torch.zeros_like(logits)
    assert torch.equal(torch.func.grad(loss)(logits), zero)
    assert torch.equal(torch.func.jvp(loss, (logits,), (torch.ones_like(logits),))[1], torch.zeros(()))
    for second in (torch.func.hessian, lambda f: torch.func.jacrev(torch.func.jacrev(f))):
        assert torch.equal(second(loss)(logits), torch.zeros(shape + shape))


def test_vmap_keeps_the_gradient_of_the_batch_that_counts():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 4, 5, generator=generator)
    target = torch.stack((torch.full((4,), -100), torch.tensor([0, 1, 2, -100])))
    loss = torch.func.vmap(torch.func.grad_and_value(lambda a, y: bi_tempered_logistic_loss(a, y, *T)))
    gradient, value = loss(logits, target)
    assert value.isnan().tolist() == [True, False]
    assert torch.equal(gradient[0], torch.zeros(4, 5))
    alone = torch.func.grad(lambda a: bi_tempered_logistic_loss(a, target[1], *T))(logits[1])
    torch.testing.assert_close(gradient[1], alone)


def test_compiled():
    @torch.compile(fullgraph=True, backend="aot_eager")
    def losses(logits, ignored, weightless):
        return torch.stack(
            (
                bi_tempered_logistic_loss(logits, ignored, *T),
                bi_tempered_logistic_loss(logits, ignored, *T, label_smoothing=0.1),
                bi_tempered_logistic_loss(logits, weightless, *T, weight=WEIGHT),
                linear_bi_tempered_logistic_loss(torch.ones(4, 4), logits.t(), ignored, *T),
            )
        )

    logits, ignored = make((4, 5))
    values = losses(logits, ignored, torch.tensor([0, 1, 0, 1]))
    assert values.isnan().all()
    assert torch.equal(torch.autograd.grad(values.sum(), logits)[0], torch.zeros(4, 5))


def test_baselines():
    logits, ignored = make()
    assert_nothing(baselines.tsallis_logistic_loss(logits, ignored, *T), logits)
    assert_nothing(baselines.mean_absolute_error(logits, ignored), logits)
    assert_nothing(baselines.symmetric_cross_entropy(logits, ignored, alpha=0.1, beta=1.0), logits)


# A row of NaN or of nothing but -inf, and one with a masked label.
@pytest.mark.parametrize(
    "row", [[torch.nan, 0.0, 0.0], [-torch.inf] * 3, [torch.inf, 0.0, 0.0], [-torch.inf, 0.0, 1.0]]
)
@pytest.mark.parametrize("how", ["ignored", "weightless"])
@pytest.mark.parametrize(("t1", "t2"), [(0.5, 0.5), (1.0, 1.0), (0.8, 1.2), (1.2, 3.0)])
def test_a_row_that_does_not_count_has_no_second_derivative_whatever_it_holds(row, how, t1, t2):
    logits = torch.tensor([row, [0.1, 0.2, 0.3]])
    target = torch.tensor([-100 if how == "ignored" else 0, 1])
    weight = None if how == "ignored" else torch.tensor([0.0, 1.0, 1.0])

    def loss(a):
        return bi_tempered_logistic_loss(a, target, t1, t2, weight=weight)

    def alone(a):
        return bi_tempered_logistic_loss(a, target[1:], t1, t2)

    want = torch.zeros(2, 3, 2, 3)
    want[1:, :, 1:] = torch.func.hessian(alone)(logits[1:])
    for second in (torch.func.hessian, lambda f: torch.func.jacrev(torch.func.jacrev(f))):
        torch.testing.assert_close(second(loss)(logits), want)
    leaf = logits.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    (by_leaf,) = torch.autograd.grad(gradient[1, 0], leaf)
    torch.testing.assert_close(by_leaf, want[1, 0])


def test_the_kernel_that_is_chosen_is_meant():
    logits, ignored = make()
    if shutil.which(cpu.compiler()[0]) is None:  # a compiler that fails is no reason
        pytest.skip("there is no C compiler here")
    assert kernels.choose(logits, ignored) == "cpu"
