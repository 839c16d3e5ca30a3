"""The Triton kernels' arithmetic, run by Triton's interpreter on the CPU, against core in float64."""

import itertools
import os

import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"  # read where a kernel is defined, so before the import below
from bitempered import kernels
from bitempered.kernels import triton
from bitempered.torch import bi_tempered_logistic_loss

# The interpreter computes with NumPy, which warns of the infinities that the kernels select away.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")

T1 = [0.0, 0.5, 0.8, 1.0, 1.3]
T2 = [0.0, 0.5, 1 - 1e-6, 1.0, 1 + 1e-6, 1.05, 1.2, 2.0, 4.0, 100.0]


def make(classes, scale, rows=5):
    generator = torch.Generator().manual_seed(classes)
    logits = scale * torch.randn(rows, classes, generator=generator)
    target = torch.randint(classes, (rows,), generator=generator)
    weight = torch.rand(classes, generator=generator) + 0.5
    g = torch.rand(rows, generator=generator)
    if classes > 3:
        logits[1, 2], target[1] = -torch.inf, 0
    target[3] = -100
    return logits, target, weight, g


def exact(logits, target, weight, g, t1, t2):
    leaf = logits.double().requires_grad_()
    weight = None if weight is None else weight.double()
    losses = bi_tempered_logistic_loss(leaf, target, t1, t2, weight=weight, reduction="none")
    return losses.detach(), torch.autograd.grad(losses, leaf, g.double())[0]


@pytest.mark.parametrize(("t1", "t2"), [(t1, t2) for t1, t2 in itertools.product(T1, T2) if t1 <= t2])
def test_loss_and_gradient(t1, t2):
    # 2: the smallest; 10: many rows a program, and columns to spare; 300: fewer rows than programs hold
    for classes, scale in ((2, 3.0), (10, 0.0), (10, 100.0), (300, 3.0)):
        logits, target, weight, g = make(classes, scale)
        loss, m = triton.forward(logits, target, weight, t1, t2, -100)
        gradient = triton.backward(logits, target, weight, m, g, t1, t2, -100)
        want, want_gradient = exact(logits, target, weight, g, t1, t2)
        # The project's bar for float32, relative to max(1, abs(value)).
        assert ((loss - want).abs() / want.clamp_min(1)).max() <= 3e-6
        assert (gradient - want_gradient).abs().max() <= 3e-6


def test_strided_rows_half_precision_and_no_weights():
    logits, target, _, g = make(10, 3.0)
    wide = torch.cat((logits, torch.full((5, 6), torch.nan)), 1).bfloat16()[:, :10]
    loss, m = triton.forward(wide, target, None, 0.8, 1.2, -100)
    gradient = triton.backward(wide, target, None, m, g, 0.8, 1.2, -100)
    want, want_gradient = exact(wide, target, None, g, 0.8, 1.2)
    torch.testing.assert_close(loss.double(), want, rtol=3e-6, atol=3e-6)
    assert gradient.dtype == torch.bfloat16
    torch.testing.assert_close(gradient.double(), want_gradient, rtol=2.0**-7, atol=1e-6)  # the interpreter truncates


@pytest.mark.parametrize("bad", [[torch.inf, 0.0], [torch.nan, 0.0], [-torch.inf, -torch.inf]])
@pytest.mark.parametrize("t2", [0.5, 1.0, 1.2])
def test_what_has_no_answer_is_nan_and_stays_in_its_row(bad, t2):
    logits = torch.tensor([bad, [1.0, 2.0]])
    target = torch.tensor([1, 1])
    loss, m = triton.forward(logits, target, None, 0.5, t2, -100)
    assert loss.isnan().tolist() == [True, False]
    gradient = triton.backward(logits, target, None, m, torch.ones(2), 0.5, t2, -100)
    assert gradient[0].isnan().all()
    assert gradient[1].isfinite().all()


@pytest.mark.parametrize(("t", "gap"), [(0.0, 1.0), (0.5, 2.0)])  # gaps of 1 / (1 - t)
def test_at_the_edge_of_the_support(t, gap):
    logits, target, g = torch.tensor([[gap, 0.0]]), torch.tensor([1]), torch.ones(1)
    _, m = triton.forward(logits, target, None, t, t, -100)
    gradient = triton.backward(logits, target, None, m, g, t, t, -100)
    torch.testing.assert_close(gradient.double(), exact(logits, target, None, g, t, t)[1], rtol=0, atol=1e-6)


def test_what_is_forced_and_cannot_be_done_raises():
    logits, target, _, _ = make(10, 1.0)
    with kernels.use("triton"), pytest.raises(RuntimeError, match="it needs logits on a CUDA device, got cpu"):
        bi_tempered_logistic_loss(logits, target, 0.8, 1.2)
    with pytest.raises(ValueError, match="there is no kernel 'cuda'; there is: core, triton"), kernels.use("cuda"):
        pass
    with kernels.use("core"):
        assert kernels.choose(logits, target, 1, 0.0) == "core"
