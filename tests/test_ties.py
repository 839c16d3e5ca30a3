"""Equal largest logits, as half precision has many: what is left of their gradients, against mpmath."""

import os

import mpmath as mp
import oracle
import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"  # read where a kernel is defined, so before the imports below
from bitempered import kernels
from bitempered.torch import bi_tempered_logistic_loss

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")

# Of a tail as `rescale` makes it from 100,000 classes: the largest have all of the mass but 1e-4, and of a gradient
# that is a difference of terms near 1 about 1e-18 is left.
GAPS = [0.0, 0.0, 0.0, 6.4e13, 2.1e14, 4.0e15, 7.0e15, 8.0e15]


def logits_with(ties):
    return [x for i, x in enumerate(GAPS) if x or i < ties]


def targets(count):
    """A class far from the largest ones, smoothed or not, and one of them."""
    one_hot = torch.eye(count, dtype=torch.float64)
    yield "indices", torch.tensor([count - 2]), one_hot[count - 2], {}
    yield "smoothed", torch.tensor([count - 2]), 0.9 * one_hot[count - 2] + 0.1 / count, {"label_smoothing": 0.1}
    yield "probabilities", one_hot[[count - 2]], one_hot[count - 2], {}
    yield "largest", torch.tensor([1]), one_hot[1], {}


def check(dtype, tolerance, ties):
    logits = [-x for x in logits_with(ties)]
    a = torch.tensor([logits], dtype=dtype)
    for name, target, y, options in targets(len(logits)):
        leaf = a.clone().requires_grad_()
        target = target.to(dtype) if target.is_floating_point() else target
        loss = bi_tempered_logistic_loss(leaf, target, 0.5, 4.0, **options)
        gradient = torch.autograd.grad(loss, leaf)[0][0].tolist()
        _, want = oracle.loss_and_gradient(a[0].tolist(), y.tolist(), 0.5, 4.0)
        norm = mp.sqrt(mp.fsum(x**2 for x in want))
        error = mp.sqrt(mp.fsum((mp.mpf(x) - w) ** 2 for x, w in zip(gradient, want, strict=True)))
        assert error <= tolerance * norm, name


@pytest.mark.parametrize("ties", [1, 2, 3])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=str)
def test_core(dtype, tolerance, ties):
    with kernels.use("core"):
        check(dtype, tolerance, ties)


@pytest.mark.usefixtures("by_triton")
@pytest.mark.parametrize("ties", [1, 2, 3])
def test_triton(ties):
    check(torch.float32, 1e-5, ties)


@pytest.mark.usefixtures("by_triton", "chunks")
def test_triton_in_chunks():
    check(torch.float32, 1e-5, 2)
