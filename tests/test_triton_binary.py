"""The Triton kernel of the binary loss and the tempered sigmoid, in the interpreter: the oracle, core, broadcasts."""

import itertools
import math
import os
from dataclasses import replace

import numpy as np
import oracle
import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"  # read where a kernel is defined, so before the imports below
from triton.runtime import interpreter

from bitempered import kernels
from bitempered.kernels.triton import binary, scaling
from bitempered.torch import bi_tempered_binary_logistic_loss, functional, tempered_sigmoid

# The interpreter computes with NumPy, which warns of the infinities that the kernels select away.
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:numpy"),
    pytest.mark.usefixtures("by_triton"),
]

# A finite support, across 1, next to 1, at 1, heavy tails, t1 above 1, t1 = t2 on both sides.
PAIRS = [
    *((0.0, 0.0), (0.5, 0.5), (0.5, 0.8), (0.2, 1.0), (1.0, 1.0), (0.8, 1.2), (0.5, 4.0), (1.3, 1.6), (1.2, 1.2)),
    *((0.9, 1 - 1e-6), (1 - 1e-6, 1 + 1e-6), (1.0, 2.0), (1.9, 1.9), (0.0, 100.0)),
]


@pytest.fixture(autouse=True)
def _in_memory(monkeypatch):
    """On a CPU a tensor that holds one number is that number, but not on the device that the kernels are for."""
    monkeypatch.setattr(functional, "number_if_known", lambda t: t)


def run(logits, target, t1, t2, g=None, **options):
    leaf = logits.detach().requires_grad_()
    loss = bi_tempered_binary_logistic_loss(leaf, target, t1, t2, **options)
    return loss.detach(), torch.autograd.grad(loss, leaf, torch.ones_like(loss) if g is None else g.to(loss.dtype))[0]


def exact(logits, target, t1, t2, g=None, **options):
    wide = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    t1, t2 = (t.double() if isinstance(t, torch.Tensor) else t for t in (t1, t2))
    with kernels.use("core"):
        return run(logits.double(), target.double(), t1, t2, g, **wide)


def make(n, std):
    generator = torch.Generator().manual_seed(0)
    logits = std * torch.randn(n, generator=generator)
    logits[: n // 9] = 0.0
    target = torch.rand(n, generator=generator)
    target[::3], target[1::3] = 0.0, 1.0
    return logits, target


def check(got, want, bar=1e-5):
    torch.testing.assert_close(got[0].double(), want[0], rtol=2e-6, atol=2e-6, equal_nan=True)
    # The gradient of a soft target is a difference of numbers up to the weight.
    torch.testing.assert_close(got[1].double(), want[1], rtol=bar, atol=4e-7, equal_nan=True)


@pytest.mark.parametrize(("t1", "t2"), PAIRS)
def test_loss_and_gradient(t1, t2):
    for std in (1e-3, 1.0, 10.0, 1e4):
        logits, target = make(301, std)
        pos_weight = torch.linspace(0, 3, 301)
        for y, options in ((target, {}), (target, {"pos_weight": pos_weight}), (target.round(), {"rescale": True})):
            got = run(logits, y, t1, t2, reduction="none", **options)
            # At t2 = 100 a rounding of m counts a hundred times.
            check(got, exact(logits, y, t1, t2, reduction="none", **options), 2e-5 if t2 == 100 else 1e-5)


def test_the_oracle_agrees():
    """Labels have no difference that cancels: every digit of a small gradient counts."""
    rng = np.random.default_rng(0)
    for _ in range(60):
        t2 = float(rng.choice([0.0, 0.5, 0.8, 1.0, 1.05, 1.2, 2.0, 4.0, rng.uniform(0, 4)]))
        t1 = min(float(rng.choice([0.0, 0.5, 0.8, 1.0, 1.3, rng.uniform(0, 1.9)])), t2)
        a = torch.tensor(rng.choice([1e-3, 1.0, 10.0, 100.0]) * rng.normal(), dtype=torch.float32)
        y, w = float(rng.choice([0.0, 1.0, 0.25])), float(rng.choice([1.0, 3.0]))
        got = run(a, torch.tensor(y), t1, t2, reduction="none", pos_weight=torch.tensor(w))
        loss, gradient = oracle.loss_and_gradient([0.0, a.item()], [1 - y, y], t1, t2, [1.0, w])
        assert abs(got[0].item() - loss) <= 2e-6 * max(1, loss)
        cancelled = 1e-36 if y in (0, 1) and t2 >= 1 else 4e-7
        assert abs(got[1].item() - gradient[1]) <= 1e-5 * abs(gradient[1]) + cancelled


@pytest.mark.parametrize("t", [0.0, 0.5, 0.999, 1.0, 1.05, 1.2, 1.25, 1.26, 2.0, 4.0, 10.0, 100.0])
def test_the_sigmoid(t):
    logits = torch.cat((make(200, 1.0)[0], torch.tensor([-1e4, -40.0, 40.0, 1e4, -1e30, 3e37])))
    for given in (t, torch.full_like(logits, t)):
        leaf = logits.clone().requires_grad_()
        p = tempered_sigmoid(leaf, given)
        (slope,) = torch.autograd.grad(p.sum(), leaf)
        wide = logits.double()
        small = (-wide.abs()).requires_grad_()  # the same derivative, of the smaller probability: nothing cancels
        with kernels.use("core"):
            want = tempered_sigmoid(wide, t)
            (want_slope,) = torch.autograd.grad(tempered_sigmoid(small, t).sum(), small)
        # Below t = 1 a probability next to the edge of the support is a difference of rounded numbers.
        edge = 2e-7 if t < 1 else 1e-37
        torch.testing.assert_close(p.detach().double(), want, rtol=2e-5, atol=edge)
        # At t = 0 the slope jumps at the edge, which float32 may find elsewhere.
        away = ((wide.abs() - 1).abs() > 1e-6) | (t > 0)
        torch.testing.assert_close(slope.double()[away], want_slope[away], rtol=1e-4, atol=2e-6 if t < 1 else 1e-37)
        for a, value in zip(logits[30:40].tolist(), p[30:40].tolist(), strict=True):
            assert abs(value - oracle.softmax([0.0, a], t)[1]) <= 5e-7


def test_infinite_and_missing_logits():
    inf, nan = math.inf, math.nan
    for t1, t2 in PAIRS[:9]:
        logits = torch.tensor([-inf, -inf, -inf, inf, nan, 3e37, -3e37, 0.0])
        target = torch.tensor([0.0, 1.0, 0.5, 1.0, 1.0, 0.0, 0.0, 0.5])
        got, want = (f(logits, target, t1, t2, reduction="none") for f in (run, exact))
        # A loss of 1e37 is e^85, whose exponent is rounded.
        torch.testing.assert_close(got[0].double(), want[0], rtol=5e-6, atol=2e-6, equal_nan=True)
        finite = want[0].isfinite()
        torch.testing.assert_close(got[1].double()[finite], want[1][finite], rtol=1e-5, atol=4e-7)
        assert got[1][want[0].isnan()].isnan().all()
        p = tempered_sigmoid(logits, t2)
        assert p.isnan().tolist() == [False] * 3 + [True] * 2 + [False] * 3
        assert p[0] == 0


@pytest.mark.parametrize("shape", [(), (1,), (0,), (7,), (5, 4), (3, 1, 4), (2, 3, 2, 5)], ids=str)
def test_broadcasts_layouts_and_reductions(shape):
    generator = torch.Generator().manual_seed(0)
    logits, target = torch.randn(shape, generator=generator), torch.rand(shape, generator=generator)
    layouts = [logits]
    if len(shape) > 1:
        layouts += [logits.transpose(0, -1).contiguous().transpose(0, -1), torch.stack((logits, logits), -1)[..., 0]]
        layouts += [logits[:1].expand(shape)]
    smaller = [(), shape[-1:], shape[:-1] + (1,) * (len(shape) > 0)]
    if len(shape) == 4:
        smaller.append((2, 1, 2, 1))  # four ways through memory, which is one more than the kernel takes
    for x, wide in itertools.product(layouts, smaller):
        weight, pos_weight = torch.rand(wide, generator=generator), 2 * torch.rand(wide, generator=generator)
        for options in (
            {"weight": weight, "reduction": "none"},
            {"weight": pos_weight, "pos_weight": weight, "reduction": "mean", "rescale": True},
        ):
            got, want = run(x, target, 0.8, 1.2, **options), exact(x, target, 0.8, 1.2, **options)
            assert got[0].shape == want[0].shape
            check(got, want)
            assert got[1].stride() == torch.empty_like(x).stride()
        t1, t2 = 0.5 * torch.rand(wide, generator=generator), 0.5 + 2 * torch.rand(wide, generator=generator)
        check(run(x, target, t1, t2, reduction="sum"), exact(x, target, t1, t2, reduction="sum"))


def test_temperatures_of_each_element():
    pairs = torch.tensor(PAIRS)
    logits, target = make(14 * 9, 3.0)
    t1, t2 = (pairs[torch.arange(14 * 9) % 14, i] for i in (0, 1))
    for options in ({}, {"rescale": True}, {"reduction": "none"}):
        got, want = (f(logits, target, t1, t2, **options) for f in (run, exact))
        torch.testing.assert_close(got[0].double(), want[0], rtol=3e-6, atol=3e-6)
        torch.testing.assert_close(got[1].double(), want[1], rtol=2e-5, atol=4e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_float32_rounded_once(dtype):
    logits, target = (x.to(dtype) for x in make(100, 3.0))
    for t1, t2 in ((0.8, 1.2), (0.5, 0.8)):
        got, want = (run(x, target, t1, t2, reduction="none") for x in (logits, logits.float()))
        for one, other in zip(got, want, strict=True):
            assert one.dtype == dtype
            # The interpreter cuts off what does not fit into bfloat16; a GPU rounds.
            unit = 2.0**-7 if dtype == torch.bfloat16 else 0.0
            torch.testing.assert_close(one, other.to(dtype), rtol=unit, atol=0)
        scaled = run(logits, target, t1, t2, torch.tensor(2.0**12))[1]
        torch.testing.assert_close(scaled.float(), 2.0**12 / 100 * want[1], rtol=1e-2, atol=1e-6)
    for kind in (torch.bool, torch.int64, torch.uint8, torch.int16):
        hard = (target > 0.5).to(kind)
        want = run(logits, hard.to(dtype), 0.8, 1.2)
        assert all(map(torch.equal, run(logits, hard, 0.8, 1.2), want))


def test_derivatives(monkeypatch):
    logits, target = make(12, 2.0)
    options = {"weight": torch.linspace(0, 2, 12), "pos_weight": torch.linspace(0.5, 2, 12)}
    for t1, t2 in ((0.8, 1.2), (torch.full((12,), 0.8), torch.full((12,), 1.2))):
        for small in (0, 2**23):  # backward by its kernel, and by torch
            monkeypatch.setattr(scaling, "_SMALL_GRADIENT", small)
            leaf = logits.clone().requires_grad_()
            loss = bi_tempered_binary_logistic_loss(leaf, target, t1, t2, **options)
            (kept,) = torch.autograd.grad(2 * loss, leaf, retain_graph=True)
            (again,) = torch.autograd.grad(2 * loss, leaf, retain_graph=True)
            torch.testing.assert_close(kept, again, rtol=1e-6, atol=0)
            (first,) = torch.autograd.grad(2 * loss, leaf, create_graph=True)
            torch.testing.assert_close(first, kept, rtol=1e-5, atol=1e-7)
            (second,) = torch.autograd.grad(first.sum(), leaf)
            p = tempered_sigmoid(leaf, t2)
            (slope,) = torch.autograd.grad(p.sum(), leaf, create_graph=True)
            (bend,) = torch.autograd.grad(slope.sum(), leaf)
            wide = logits.double().requires_grad_()
            with kernels.use("core"):
                want = 2 * bi_tempered_binary_logistic_loss(wide, target.double(), 0.8, 1.2, **options)
                (want_first,) = torch.autograd.grad(want, wide, create_graph=True)
                (want_second,) = torch.autograd.grad(want_first.sum(), wide)
                (want_slope,) = torch.autograd.grad(tempered_sigmoid(wide, 1.2).sum(), wide, create_graph=True)
                (want_bend,) = torch.autograd.grad(want_slope.sum(), wide)
            torch.testing.assert_close(second.double(), want_second, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(bend.double(), want_bend, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("name", "bad"), [("target", 1.5), ("weight", -1.0), ("pos_weight", -1.0)])
def test_bad_values_assert(monkeypatch, name, bad):
    builder = interpreter.interpreter_builder  # asserts in debug mode only, which a launch on a device asks for
    monkeypatch.setattr(builder, "options", replace(builder.options, debug=True, sanitize_overflow=False))
    given = {"target": torch.tensor([0.0, 1.0]), name: torch.tensor([1.0, bad])}
    with pytest.raises(Exception, match=f"{name} must"):
        bi_tempered_binary_logistic_loss(torch.zeros(2), given.pop("target"), 0.8, 1.2, **given)


def test_elements_in_several_programs(monkeypatch):
    monkeypatch.setattr(binary, "_BLOCK", 64)
    logits, target = make(300, 3.0)
    weight = torch.rand(3, 1, generator=torch.Generator().manual_seed(0))
    logits, target = logits.view(3, 100), target.view(3, 100)
    for reduction in ("none", "sum", "mean"):
        check(*(f(logits, target, 0.8, 1.2, weight=weight, reduction=reduction) for f in (run, exact)))


def test_the_compiled_loss_is_one_operator():
    logits, target = make(12, 2.0)
    seen = []

    def backend(graph, _):
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    def f(a, y):
        return bi_tempered_binary_logistic_loss(2 * a, y, 0.8, 1.2, pos_weight=torch.tensor(2.0))

    torch.compiler.reset()
    leaf = logits.clone().requires_grad_()
    value = torch.compile(f, fullgraph=True, backend=backend)(leaf, target)
    assert seen.count("bitempered.binary_loss.default") == 1
    torch.testing.assert_close(torch.autograd.grad(value, leaf)[0], torch.autograd.grad(f(leaf, target), leaf)[0])
