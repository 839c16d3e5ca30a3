"""The Triton kernels with `rescale` and with temperatures in memory, in the interpreter, against core in float64."""

import os
from contextlib import nullcontext

import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"  # read where a kernel is defined, so before the imports below

from bitempered import kernels
from bitempered.torch import (
    bi_tempered_logistic_loss,
    device_linear,
    functional,
    linear,
    linear_bi_tempered_logistic_loss,
    log_partition,
    tempered_log_softmax,
    tempered_softmax,
)

# The interpreter computes with NumPy, which warns of the infinities that the kernels select away.
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
    pytest.mark.usefixtures("by_triton"),
]


@pytest.fixture(autouse=True)
def _in_memory(monkeypatch):
    """On a CPU a tensor that holds one number is that number, but not on the device that the kernels are for."""
    monkeypatch.setattr(functional, "number_if_known", lambda t: t)


# Below, at and next to t2 = 1, above, above 2; equal ones; t1 above 1.
PAIRS = [
    (0.5, 0.5),
    (0.5, 0.8),
    (0.2, 1.0),
    (1.0, 1.0),
    (1.0, 1 + 1e-6),
    (0.8, 1.2),
    (1.3, 1.3),
    (0.5, 4.0),
    (0.0, 9.0),
]
KINDS = ["indices", "smoothed", "probabilities"]


def make(kind, shape):
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(shape, generator=generator)
    logits[0, 1] += 40.0  # of nearly all the mass
    logits[1, 2] = -torch.inf
    if kind == "probabilities":
        return logits, torch.softmax(torch.randn(shape, generator=generator), 1), {}
    target = torch.randint(3, shape[1], shape[:1] + shape[2:], generator=generator)
    target[0], target[-1] = 1, -100
    return logits, target, {"label_smoothing": 0.1} if kind == "smoothed" else {}


def value_and_gradient(f, logits, target, t1, t2, *, exact=False, **options):
    """A function of logits and the gradient of a weighted sum of its values; `exact` means by core in float64."""
    dtype = torch.float64 if exact else logits.dtype
    leaf = logits.detach().to(dtype).requires_grad_()
    target = target.to(dtype) if target.is_floating_point() else target
    t1, t2 = (t.to(dtype) if isinstance(t, torch.Tensor) else t for t in (t1, t2))
    with kernels.use("core") if exact else nullcontext():
        value = f(leaf, target, t1, t2, **options)
    g = torch.linspace(0.5, 1.5, value.numel()).view(value.shape).to(dtype)
    return value.detach().double(), torch.autograd.grad(value, leaf, g)[0].double()


def check(logits, target, t1, t2, **options):
    loss, gradient = value_and_gradient(bi_tempered_logistic_loss, logits, target, t1, t2, **options)
    want, exactly = value_and_gradient(bi_tempered_logistic_loss, logits, target, t1, t2, exact=True, **options)
    torch.testing.assert_close(loss, want, rtol=2e-6, atol=2e-6 * max(1.0, want.abs().max().item()))
    error, norm = (gradient - exactly).norm(dim=1), exactly.norm(dim=1)
    assert (error <= 1e-5 * norm + 1e-12 * norm.max()).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("t1", "t2"), PAIRS)
def test_rescale(t1, t2, kind):
    logits, target, options = make(kind, (5, 12))
    for reduction in ("none", "mean"):
        check(logits, target, t1, t2, rescale=True, reduction=reduction, **options)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize(("t1", "t2"), [(0.5, 0.8), (0.8, 1.2), (1.3, 1.3), (0.5, 2.5)])
def test_rescale_of_long_rows(t1, t2):
    for kind in ("indices", "probabilities"):
        logits, target, options = make(kind, (5, 200))
        check(logits, target, t1, t2, rescale=True, reduction="none", **options)


def tensors(shape):
    """Temperatures of every kind, in turn, for losses of this shape."""
    pairs = torch.tensor(PAIRS)
    n = torch.Size(shape).numel()
    return (pairs[torch.arange(n) % len(PAIRS), i].view(shape) for i in (0, 1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("shape", "rescale"), [((18, 12), False), ((2, 7, 3, 6), False), ((18, 12), True)])
def test_temperatures_of_each_example(shape, rescale, kind):
    logits, target, options = make(kind, shape)
    t1, t2 = tensors(shape[:1] + shape[2:])
    for reduction in ("none", "mean"):
        check(logits, target, t1, t2, reduction=reduction, rescale=rescale, **options)
    check(logits, target, 0.0, t2, rescale=rescale, **options)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("kind", ["indices", "probabilities"])
def test_temperatures_of_each_of_some_long_rows(kind):
    logits, target, options = make(kind, (9, 200))
    check(logits, target, *tensors((9,)), reduction="none", **options)


@pytest.mark.parametrize("kind", ["indices", "probabilities"])
@pytest.mark.parametrize(("t1", "t2"), PAIRS)
def test_one_temperature_in_memory_is_that_number(t1, t2, kind):
    logits, target, options = make(kind, (5, 12))
    # A number of float32, since the kernel reads that: 1 + 1e-6 is another one.
    first, second = torch.tensor(t1), torch.tensor(t2)
    got = value_and_gradient(bi_tempered_logistic_loss, logits, target, first, second, **options)
    want = value_and_gradient(bi_tempered_logistic_loss, logits, target, first.item(), second.item(), **options)
    torch.testing.assert_close(got[0], want[0], rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-6 * want[1].abs().max().item())


@pytest.mark.parametrize("function", [tempered_softmax, tempered_log_softmax, log_partition])
def test_softmax_with_temperatures_in_memory(function):
    logits, _, _ = make("indices", (2, 7, 9))
    logits = logits[:, 3:]
    t = torch.tensor([0.8, 1.0, 1.05, 1.2, 2.0, 4.0, 0.9, 1.0, 1.5])
    for given in (t, torch.tensor(1.3)):
        got, want = (
            value_and_gradient(lambda a, _, t, __: function(a, t, 1), logits, logits, given, given, exact=exact)
            for exact in (False, True)
        )
        torch.testing.assert_close(got[0], want[0], rtol=5e-6, atol=5e-6)
        # Next to the edge of a support the slope of log p, and so the error, has no bound.
        torch.testing.assert_close(got[1], want[1], rtol=1e-4, atol=1e-4)


def test_derivatives_that_core_computes():
    """Second derivatives, and first ones in the temperatures."""
    logits, target, _ = make("indices", (9, 6))
    logits = logits.clamp_min(-20)
    for rescale in (False, True):

        def second(x, t1, t2, rescale=rescale):
            value = bi_tempered_logistic_loss(x, target, t1, t2, rescale=rescale)
            (first,) = torch.autograd.grad(value, x, create_graph=True)
            return torch.autograd.grad(first.square().sum(), x)[0]

        t1, t2 = torch.linspace(0.1, 1.2, 9), torch.linspace(1.3, 2.0, 9)
        with kernels.use("core"):
            want = second(logits.double().requires_grad_(), t1.double(), t2.double())
        got = second(logits.clone().requires_grad_(), t1, t2).double()
        assert (got - want).norm() <= 1e-3 * want.norm()
    moving = t2.clone().requires_grad_()
    assert torch.autograd.grad(bi_tempered_logistic_loss(logits, target, t1, moving), moving)[0].isfinite().all()


def test_a_schedule_changes_a_temperature_in_place():
    """It must not do so between forward and a backward that needs the old one."""
    logits, target, _ = make("indices", (5, 12))
    leaf, t2 = logits.half().requires_grad_(), torch.tensor(1.2)
    loss = bi_tempered_logistic_loss(leaf, target, 0.8, t2)
    t2.fill_(1.1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    ("t1", "t2"), [(0.8, 1.2), (0.5, 0.8), (1.0, 1.0), (torch.linspace(0.2, 0.9, 6), torch.linspace(2.0, 0.9, 6))]
)
def test_linear_layer_rescaled(monkeypatch, t1, t2):
    monkeypatch.setattr(device_linear, "rows_per_chunk", lambda *_: 3)
    monkeypatch.setattr(device_linear, "block_size", lambda *_: 128)
    generator = torch.Generator().manual_seed(0)
    layer = [torch.randn(6, 3, generator=generator), torch.randn(200, 3, generator=generator)]
    target = torch.tensor([0, 40, -100, 199, 127, 128])
    leaves, wide = [x.clone().requires_grad_() for x in layer], [x.double().requires_grad_() for x in layer]
    monkeypatch.setattr(linear, "_chunks", None)
    loss = linear_bi_tempered_logistic_loss(*leaves, target, t1, t2, rescale=True)
    t1, t2 = (t.double() if isinstance(t, torch.Tensor) else t for t in (t1, t2))
    with kernels.use("core"):
        want = bi_tempered_logistic_loss(wide[0] @ wide[1].t(), target, t1, t2, rescale=True)
    torch.testing.assert_close(loss.detach().double(), want.detach(), rtol=5e-6, atol=0)
    for x, y in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(want, wide), strict=True):
        assert (x - y).norm() <= 5e-5 * y.norm()
