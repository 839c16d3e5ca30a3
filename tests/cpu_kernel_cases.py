"""What the tests of the CPU kernel share: batches, the kernel's numbers, those of core in float64, and their bars."""

import shutil

import pytest
import torch

from bitempered import kernels
from bitempered.kernels import cpu
from bitempered.torch import bi_tempered_logistic_loss

if shutil.which(cpu.compiler()[0]) is None:  # .ci/run installs one; a compiler that fails is no reason
    pytest.skip(f"there is no C compiler here: {cpu.library()}", allow_module_level=True)

# A finite support, its borders, across 1, at 1, heavy tails, t1 above 1, t1 = t2 on both sides.
FEW_PAIRS = [(0.0, 0.0), (0.5, 0.5), (0.5, 0.8), (0.2, 1.0), (1.0, 1.0), (0.8, 1.2), (0.5, 4.0), (1.3, 1.6), (1.2, 1.2)]


def make(rows, classes, std=1.0, seed=0):
    """Half the labels are the largest logit, whose gradients are small where the row is sure."""
    generator = torch.Generator().manual_seed(seed)
    logits = std * torch.randn(rows, classes, generator=generator)
    target = torch.randint(classes, (rows,), generator=generator)
    target[::2] = logits[::2].argmax(1)
    return logits, target


def run(logits, target, t1, t2, g=None, *, kernel="cpu", **options):
    """Loss and gradient of sum(g loss)."""
    leaf = logits.detach().clone().requires_grad_() if logits.is_contiguous() else logits.detach().requires_grad_()
    with kernels.use(kernel):
        loss = bi_tempered_logistic_loss(leaf, target, t1, t2, **options)
    g = torch.ones_like(loss) if g is None else g.to(loss.dtype)
    return loss.detach(), torch.autograd.grad(loss, leaf, g)[0]


def exact(logits, target, t1, t2, g=None, *, weight=None, **options):
    """The same by core in float64."""
    weight = None if weight is None else weight.double()
    return run(logits.double(), target, t1, t2, g, kernel="core", weight=weight, **options)


def assert_agree(got, want, *, cancelled=0.0):
    """The bars: 2e-6 of max(1, loss), and 1e-5 of the norm of each row of the gradient.

    Below a norm of 1e-9 core in float64 is no better. `cancelled` allows for rows whose gradient is a difference of
    numbers near 1: a float32 rounding of those is its error.
    """
    (loss, gradient), (want_loss, want_gradient) = got, want
    assert torch.equal(loss.isnan(), want_loss.isnan())
    assert torch.equal(loss.isinf(), want_loss.isinf())
    finite = want_loss.isfinite()
    assert ((loss - want_loss).abs() / want_loss.clamp_min(1))[finite].max().item() <= 2e-6
    assert torch.equal(gradient.isnan(), want_gradient.isnan())
    error = (gradient - want_gradient).nan_to_num().norm(dim=1)
    bar = 1e-5 * want_gradient.nan_to_num().norm(dim=1).clamp_min(1e-9) + cancelled
    assert (error / bar).max().item() <= 1
