"""Rows of few classes, one to a thread of the Triton kernels, in the interpreter: against core in float64."""

import os

import mpmath as mp
import oracle
import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"  # read where a kernel is defined, so before the imports below

from bitempered import kernels
from bitempered.kernels.triton import losses, tiles
from bitempered.torch import bi_tempered_logistic_loss, functional, tempered_softmax

# The interpreter computes with NumPy, which warns of the infinities that the kernels select away.
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
    pytest.mark.filterwarnings("ignore:overflow encountered in reduce"),
    pytest.mark.usefixtures("by_triton", "few"),
]

PAIRS = [
    *((0.0, 0.5), (0.5, 0.5), (0.8, 1 - 1e-6), (0.2, 1.0), (1.0, 1.0), (1.0, 1 + 1e-6), (0.9, 1.05), (0.8, 1.2)),
    *((1.3, 1.3), (1.3, 1.5), (0.5, 4.0), (0.8, 100.0)),
]


@pytest.fixture
def few(monkeypatch):
    tiles.choose_tile.cache_clear()
    monkeypatch.setattr(tiles, "_MANY_ROWS", 0)
    yield
    tiles.choose_tile.cache_clear()


def make(shape, kind="indices"):
    """Logits of standard deviations 1, 10 and 100 by row or image, and every third label the largest class."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(shape, generator=generator)
    logits *= torch.tensor([1.0, 10.0, 100.0]).repeat(shape[0])[: shape[0]].view(-1, *[1] * (len(shape) - 1))
    if kind == "probabilities":
        return logits, torch.softmax(torch.randn(shape, generator=generator), 1)
    target = torch.randint(shape[1], shape[:1] + shape[2:], generator=generator)
    target.view(-1)[::3] = logits.argmax(1).view(-1)[::3]
    return logits, target


def value_and_gradient(logits, target, t1, t2, *, exact=False, **options):
    dtype = torch.float64 if exact else logits.dtype
    leaf = logits.detach().to(dtype).requires_grad_()
    target = target.to(dtype) if target.is_floating_point() else target
    options = {name: x.to(dtype) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    t1, t2 = (t.to(dtype) if isinstance(t, torch.Tensor) else t for t in (t1, t2))
    if exact:
        with kernels.use("core"):
            loss = bi_tempered_logistic_loss(leaf, target, t1, t2, **options)
    else:
        loss = bi_tempered_logistic_loss(leaf, target, t1, t2, **options)
    g = torch.linspace(0.5, 1.5, loss.numel()).view(loss.shape).to(dtype)
    return loss.detach().double(), torch.autograd.grad(loss, leaf, g)[0].double()


def check(logits, target, t1, t2, **options):
    assert tiles.tile_for(logits.shape[1], 1, (logits, (0, 1, 1)))["COLUMNS"] == 1
    loss, gradient = value_and_gradient(logits, target, t1, t2, **options)
    want, exactly = value_and_gradient(logits, target, t1, t2, exact=True, **options)
    assert ((loss - want).abs() / want.clamp_min(1)).max() <= 2e-6
    error, norm = (gradient - exactly).norm(dim=1), exactly.norm(dim=1)
    assert (error <= 1e-5 * norm + 1e-14 * max(1.0, exactly.abs().max().item())).all()


@pytest.mark.parametrize(("t1", "t2"), PAIRS)
def test_loss_and_gradient(t1, t2):
    for shape in ((9, 10), (3, 6, 2, 4), (9, 2)):
        check(*make(shape), t1, t2, reduction="none")


@pytest.mark.slow  # several programs for each of several options
@pytest.mark.parametrize("kind", ["indices", "probabilities"])
@pytest.mark.parametrize(("t1", "t2"), [(0.5, 0.8), (0.8, 1.2), (0.5, 4.0)])
def test_options(t1, t2, kind):
    logits, target = make((3, 7, 2, 33), kind)  # more positions than one program takes
    options = {"weight": torch.linspace(0, 2, 7), "rescale": True}
    check(logits, target, t1, t2, **options)
    check(logits.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2), target, t1, t2, **options)
    if kind == "indices":
        target[1] = -100
        check(logits, target, t1, t2, label_smoothing=0.1)
    temperatures = torch.full((3, 2, 33), t1), torch.linspace(0.9, 3.0, 33)
    check(logits, target, *temperatures)


@pytest.mark.parametrize("kind", ["indices", "probabilities"])
def test_weights_and_rescale(kind):
    check(*make((3, 5, 4), kind), 0.8, 1.2, weight=torch.linspace(0, 2, 5), rescale=True)


def test_one_temperature_in_memory(monkeypatch):
    monkeypatch.setattr(functional, "number_if_known", lambda t: t)
    check(*make((9, 10)), torch.tensor(0.8), torch.tensor(1.2))


def test_masked_huge_and_missing_logits():
    inf = torch.inf
    logits = torch.tensor([[3e38, 0.0, -3e38], [-inf, 1.0, 0.5], [1e35, 2e35, -inf], [2.0, 2.0, 2.0], [0.0, 9.0, 9.0]])
    for target in (torch.tensor([1, 0, 1, 2, 1]), torch.tensor([0, 1, 2, 0, 0])):
        check(logits, target, 0.5, 1.2, reduction="none")
    bad = torch.tensor([[inf, 0.0], [0.0, torch.nan], [-inf, -inf], [1.0, 2.0]])
    for target in (torch.tensor([1, 1, 1, 1]), torch.tensor([[0.5, 0.5]]).repeat(4, 1)):
        for t2 in (0.5, 1.0, 1.2):
            loss, gradient = value_and_gradient(bad, target, 0.5, t2, reduction="none")
            assert loss.isnan().tolist() == [True, True, True, False]
            assert gradient[:3].isnan().all()
            assert gradient[3].isfinite().all()


@pytest.mark.parametrize(("t1", "t2"), [(0.8, 1.2), (0.5, 1.05), (0.5, 4.0)])
def test_small_gradients_keep_their_digits(t1, t2):
    """Against mpmath: in float64 core has lost the gradient of a class with nearly all of the mass."""
    logits = torch.tensor([[60.0, 20.0, 0.0, -3.0]])
    for label in (0, 1, 3):
        _, gradient = value_and_gradient(logits, torch.tensor([label]), t1, t2, reduction="sum")
        g = 0.5  # of the only loss
        _, want = oracle.loss_and_gradient(logits[0].tolist(), [float(i == label) for i in range(4)], t1, t2)
        norm = mp.sqrt(mp.fsum(x**2 for x in want))
        error = mp.sqrt(mp.fsum((mp.mpf(a) / g - b) ** 2 for a, b in zip(gradient[0].tolist(), want, strict=True)))
        assert error <= 1e-5 * norm


@pytest.mark.parametrize("t", [0.5, 1.0, 1.2, 4.0])
def test_softmax(t):
    logits = make((2, 5, 9))[0].requires_grad_()
    wide = logits.detach().double().requires_grad_()
    p = tempered_softmax(logits, t, 1)
    with kernels.use("core"):
        want = tempered_softmax(wide, t, 1)
    torch.testing.assert_close(p.detach().double(), want.detach(), rtol=1e-5, atol=1e-6)
    g = torch.linspace(0, 1, 90).view(2, 5, 9)
    got = torch.autograd.grad(p, logits, g)[0].double()
    torch.testing.assert_close(got, torch.autograd.grad(want, wide, g.double())[0], rtol=1e-4, atol=1e-5)


def test_many_targets_are_counted_in_parts(monkeypatch):
    for name, value in (("_COUNTED_BY_EACH", 8), ("_COUNTED_BY_ONE", 8), ("_COUNT", 32)):
        monkeypatch.setattr(losses, name, value)
    generator = torch.Generator().manual_seed(0)
    logits, target = torch.randn(150, 3, generator=generator), torch.randint(3, (150,), generator=generator)
    target[::5] = -100
    check(logits, target, 0.8, 1.2)
    check(logits, target, 0.8, 1.2, weight=torch.tensor([0.5, 1.0, 2.0]))


@pytest.mark.parametrize("tiles_of_one", [True, False])
def test_two_classes_that_are_almost_equal_share_the_mass_of_a_wrong_row(monkeypatch, tiles_of_one):
    """Their gradients are what is left of terms that are a hundred times as large."""
    if not tiles_of_one:
        monkeypatch.setattr(tiles, "_MANY_ROWS", 2**14)
        tiles.choose_tile.cache_clear()
    logits = torch.randn(64, 10, generator=torch.Generator().manual_seed(0))
    top = logits.amax(1) + 1
    logits[:, 3] = top
    logits[:, 7] = top - torch.logspace(-6, -3, 64)
    target = logits.argmin(1)
    loss, gradient = value_and_gradient(logits, target, 0.5, 4.0, rescale=True, reduction="none")
    want, exactly = value_and_gradient(logits, target, 0.5, 4.0, exact=True, rescale=True, reduction="none")
    assert ((loss - want).abs() / want.clamp_min(1)).max() <= 2e-6
    assert ((gradient - exactly).norm(dim=1) <= 1e-5 * exactly.norm(dim=1)).all()
