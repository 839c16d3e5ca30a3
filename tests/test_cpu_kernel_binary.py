"""The CPU kernel for the binary loss and the tempered sigmoid: the oracle, core in float64, broadcasts, derivatives."""

import itertools
import math

import mpmath as mp
import numpy as np
import oracle
import pytest
import torch
from cpu_kernel_cases import FEW_PAIRS

from bitempered import kernels
from bitempered.torch import bi_tempered_binary_logistic_loss, tempered_sigmoid, tempered_softmax

PAIRS = [*FEW_PAIRS, (0.9, 1 - 1e-6), (1 - 1e-6, 1 + 1e-6), (1.0, 2.0), (1.9, 1.9), (0.0, 100.0)]


def run(logits, target, t1, t2, g=None, *, kernel="cpu", **options):
    leaf = logits.detach().requires_grad_()
    with kernels.use(kernel):
        loss = bi_tempered_binary_logistic_loss(leaf, target, t1, t2, **options)
    return loss.detach(), torch.autograd.grad(loss, leaf, torch.ones_like(loss) if g is None else g.to(loss.dtype))[0]


def exact(logits, target, t1, t2, g=None, **options):
    wide = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    return run(logits.double(), target.double(), t1, t2, g, kernel="core", **wide)


def make(n, std, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    logits = (std * torch.randn(n, generator=generator)).to(dtype)
    logits[: n // 9] = 0.0
    target = torch.rand(n, generator=generator).to(dtype)
    target[::3], target[1::3] = 0.0, 1.0
    return logits, target


@pytest.mark.parametrize(("t1", "t2"), PAIRS)
def test_loss_and_gradient(t1, t2):
    for std, dtype in itertools.product((1e-3, 1.0, 10.0, 1e4), (torch.float32, torch.float64)):
        logits, target = make(301, std, dtype)
        pos_weight = torch.linspace(0, 3, 301, dtype=dtype)
        for options in ({}, {"pos_weight": pos_weight}):
            got = run(logits, target, t1, t2, reduction="none", **options)
            want = exact(logits, target, t1, t2, reduction="none", **options)
            # The gradient of a soft target is a difference of numbers up to the weight.
            loss, gradient, cancelled = (2e-6, 1e-5, 4e-7) if dtype == torch.float32 else (1e-12, 1e-10, 1e-14)
            torch.testing.assert_close(got[0].double(), want[0], rtol=loss, atol=loss)
            torch.testing.assert_close(got[1].double(), want[1], rtol=gradient, atol=cancelled)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_oracle_agrees(dtype):
    """Labels have no difference that cancels: every digit of a small gradient counts."""
    rng = np.random.default_rng(0)
    loss_bar, bar = (2e-6, 1e-5) if dtype == torch.float32 else (1e-13, 1e-12)
    for _ in range(60):
        t2 = float(
            rng.choice([0.0, 0.5, 0.8, 1.0, 1.05, 1.2, 2.0, 4.0, rng.uniform(0, 4), 1 + 10 ** rng.uniform(-9, -3)])
        )
        t1 = min(float(rng.choice([0.0, 0.5, 0.8, 1.0, 1.3, rng.uniform(0, 1.9)])), t2)
        a = torch.tensor(rng.choice([1e-3, 1.0, 10.0, 100.0]) * rng.normal(), dtype=dtype)
        y, w = float(rng.choice([0.0, 1.0, 0.25])), float(rng.choice([1.0, 3.0]))
        got = run(a, torch.tensor(y, dtype=dtype), t1, t2, reduction="none", pos_weight=torch.tensor(w, dtype=dtype))
        loss, gradient = oracle.loss_and_gradient([0.0, a.item()], [1 - y, y], t1, t2, [1.0, w])
        assert abs(got[0].item() - loss) <= loss_bar * max(1, loss)
        if y in (0, 1) and t2 >= 1:
            assert abs(got[1].item() - gradient[1]) <= bar * abs(gradient[1]) + 1e-36
        else:
            assert abs(got[1].item() - gradient[1]) <= bar * abs(gradient[1]) + bar / 30


@pytest.mark.parametrize("t", [0.0, 0.5, 0.999, 1.0, 1.05, 1.2, 1.25, 1.26, 2.0, 4.0, 10.0, 100.0])
def test_the_sigmoid(t):
    for dtype in (torch.float32, torch.float64):
        logits = torch.cat((make(200, 1.0, dtype)[0], torch.tensor([-1e4, -40.0, 40.0, 1e4, -1e30, 3e37], dtype=dtype)))
        leaf = logits.clone().requires_grad_()
        with kernels.use("cpu"):
            p = tempered_sigmoid(leaf, t)
        (slope,) = torch.autograd.grad(p.sum(), leaf)
        wide = logits.double().requires_grad_()
        with kernels.use("core"):
            want = tempered_sigmoid(wide, t)
        small = (
            -wide.detach().abs()
        ).requires_grad_()  # the same derivative, of the smaller probability: nothing cancels
        with kernels.use("core"):
            (want_slope,) = torch.autograd.grad(tempered_sigmoid(small, t).sum(), small)
        bar = 1e-5 if dtype == torch.float32 else 1e-12
        torch.testing.assert_close(p.detach().double(), want.detach(), rtol=bar, atol=1e-37)
        torch.testing.assert_close(slope.double(), want_slope, rtol=10 * bar, atol=1e-37)
        for a, value in zip(logits[:12].tolist(), p[:12].tolist(), strict=True):
            assert abs(value - oracle.softmax([0.0, a], t)[1]) <= bar / 30
        with kernels.use("cpu"):
            assert torch.equal(tempered_sigmoid(logits, t), p)
            torch.autograd.gradcheck(lambda x: tempered_sigmoid(x, t), wide[20:60].detach().requires_grad_())


def test_infinite_and_missing_logits():
    inf, nan = math.inf, math.nan
    for (t1, t2), dtype in itertools.product(FEW_PAIRS, (torch.float32, torch.float64)):
        logits = torch.tensor([-inf, -inf, -inf, inf, nan, 3e38, -3e38, 0.0], dtype=dtype)
        target = torch.tensor([0.0, 1.0, 0.5, 1.0, 1.0, 0.0, 0.0, 0.5], dtype=dtype)
        got = run(logits, target, t1, t2, reduction="none")
        want = exact(logits, target, t1, t2, reduction="none")
        torch.testing.assert_close(got[0].double(), want[0], rtol=2e-6, atol=2e-6, equal_nan=True)
        finite = want[0].isfinite()
        torch.testing.assert_close(got[1].double()[finite], want[1][finite], rtol=1e-5, atol=3e-7)
        assert got[1][want[0].isnan()].isnan().all()
        with kernels.use("cpu"):
            p = tempered_sigmoid(logits, t2)
        assert p.isnan().tolist() == [False] * 3 + [True] * 2 + [False] * 3
        assert p[0] == 0


SHAPES = [(), (1,), (0,), (7,), (5, 4), (3, 1, 4), (2, 3, 4, 5), (40, 17)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_broadcasts_layouts_and_reductions(shape):
    generator = torch.Generator().manual_seed(0)
    logits, target = torch.randn(shape, generator=generator), torch.rand(shape, generator=generator)
    layouts = [logits]
    if len(shape) > 1:
        layouts += [logits.transpose(0, -1).contiguous().transpose(0, -1), torch.stack((logits, logits), -1)[..., 0]]
        layouts += [torch.cat((logits, logits), 0)[: shape[0]], logits[:1].expand(shape)]
    smaller = [(), shape[-1:], (1,) * len(shape), shape[:-1] + (1,) * (len(shape) > 0), shape]
    for x, wide in itertools.product(layouts, smaller):
        weight, pos_weight = torch.rand(wide, generator=generator), 2 * torch.rand(wide, generator=generator)
        for options in (
            {"weight": weight, "reduction": "none"},
            {"pos_weight": pos_weight, "reduction": "sum"},
            {"weight": pos_weight, "pos_weight": weight, "reduction": "mean"},
        ):
            got, want = run(x, target, 0.8, 1.2, **options), exact(x, target, 0.8, 1.2, **options)
            assert got[0].shape == want[0].shape
            assert got[1].shape == want[1].shape
            torch.testing.assert_close(got[0].double(), want[0], rtol=2e-6, atol=2e-5, equal_nan=True)
            torch.testing.assert_close(got[1].double(), want[1], rtol=1e-5, atol=4e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_float32_rounded_once(dtype):
    logits, target = make(100, 3.0, dtype)
    for t1, t2 in ((0.8, 1.2), (0.5, 0.8)):
        got, want = (run(x, target, t1, t2, reduction="none") for x in (logits, logits.float()))
        for one, other in zip(got, want, strict=True):
            assert one.dtype == dtype
            assert torch.equal(one, other.to(dtype))
        scaled = run(logits, target, t1, t2, torch.tensor(2.0**12))[1]
        torch.testing.assert_close(scaled.float(), 2.0**12 / 100 * want[1], rtol=1e-2, atol=1e-6)
    for kind in (torch.bool, torch.int64, torch.uint8):
        hard = (target > 0.5).to(kind)
        want = run(logits, hard.to(dtype), 0.8, 1.2)
        assert all(map(torch.equal, run(logits, hard, 0.8, 1.2), want))


def test_derivatives():
    logits, target = (x.double() for x in make(12, 2.0))
    weight, pos_weight = torch.linspace(0, 2, 12).double(), torch.linspace(0.5, 2, 12).double()
    tangent = torch.linspace(-1, 1, 12).double()
    for (t1, t2), (reduction, rescale) in itertools.product(FEW_PAIRS[2:], (("none", True), ("mean", False))):
        options = {"weight": weight, "pos_weight": pos_weight, "reduction": reduction, "rescale": rescale}

        def f(x, t1=t1, t2=t2, options=options):
            return bi_tempered_binary_logistic_loss(x, target, t1, t2, **options)

        away = logits + 0.01  # from the edge of a support
        with kernels.use("cpu"):
            torch.autograd.gradcheck(f, away.clone().requires_grad_())
        results = []
        for name in ("cpu", "core"):
            leaf = away.clone().requires_grad_()
            with kernels.use(name):
                loss = f(leaf).sum()
                (kept,) = torch.autograd.grad(loss, leaf, retain_graph=True)
                (again,) = torch.autograd.grad(loss, leaf, retain_graph=True)
                torch.testing.assert_close(kept, again)
                (first,) = torch.autograd.grad(loss, leaf, create_graph=True)
            results.append((loss.detach(), first.detach(), torch.autograd.grad(first, leaf, tangent)[0]))
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(torch.func.grad(lambda x: f(x).sum())(away), results[0][1], rtol=1e-9, atol=1e-12)


def test_second_derivatives_of_the_sigmoid():
    logits = make(12, 2.0, torch.float64)[0]
    for t in (0.8, 1.0, 1.2, 4.0):
        results = []
        for name in ("cpu", "core"):
            leaf = logits.clone().requires_grad_()
            with kernels.use(name):
                (first,) = torch.autograd.grad(tempered_sigmoid(leaf, t).square().sum(), leaf, create_graph=True)
            results.append((first.detach(), torch.autograd.grad(first.sum(), leaf)[0]))
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_threads_and_memory():
    logits, target = make(100_000, 2.0)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(run(logits, target, 0.8, 1.2))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(*pair) for other in results[1:] for pair in zip(other, results[0], strict=True))
    leaf = logits.repeat(8).requires_grad_()
    target = target.repeat(8)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        bi_tempered_binary_logistic_loss(leaf, target, 0.8, 1.2).backward()
    held = itertools.accumulate(event.nbytes() for event in profile.profiler.kineto_results.events() if event.nbytes())
    assert max(held) <= 1.05 * leaf.nbytes


def test_what_it_refuses():
    logits, target = make(6, 1.0)
    for reason, (x, y) in {
        "targets that need no gradient": (logits, target.clone().requires_grad_()),
        "8 dimensions": (logits.view(6, *[1] * 8), target.view(6, *[1] * 8)),
    }.items():
        assert kernels.choose(x, y, binary=True) == "core"
        with kernels.use("cpu"), pytest.raises(RuntimeError, match=f"cannot compute this binary loss: .*{reason}"):
            bi_tempered_binary_logistic_loss(x, y, 0.8, 1.2)
    with kernels.use("triton"), pytest.raises(RuntimeError, match="triton kernel cannot compute this binary loss"):
        bi_tempered_binary_logistic_loss(logits, target, 0.8, 1.2)
    with kernels.use("cpu"), pytest.raises(RuntimeError, match=r"cannot compute this sigmoid: .*torch\.func"):
        torch.func.grad(lambda x: tempered_sigmoid(x, 1.2).sum())(logits)


def test_tensors_stored_with_the_other_sign():
    """The imaginary part of a conjugate is a view whose numbers in memory have the other sign."""
    x, p = torch.linspace(-3, 3, 12).view(3, 4), torch.linspace(0.1, 0.9, 12).view(3, 4)
    turned = torch.complex(p, -p).conj().imag
    assert turned.is_neg()
    assert torch.equal(turned, p)
    for options in ({"target": turned}, {"target": p, "weight": turned}, {"target": p, "pos_weight": turned}):
        plain = {name: value.clone() for name, value in options.items()}
        torch.testing.assert_close(
            bi_tempered_binary_logistic_loss(x, t1=0.8, t2=1.2, **options),
            bi_tempered_binary_logistic_loss(x, t1=0.8, t2=1.2, **plain),
        )
    x = x.clone().requires_grad_()
    gradients = [torch.autograd.grad(tempered_softmax(x, 1.3), x, g)[0] for g in (turned, p)]
    torch.testing.assert_close(*gradients)


# sigmoid(-20) and what rounds away beside 1 in float32 and float64; float32's subnormals; the smallest float64
TINY = [2e-9, 1e-8, 1e-17, 1e-31, 1e-39, 1e-45, 5e-324]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("t1", "t2"), [(1.0, 1.0), (0.8, 1.2), (0.5, 0.8), (1.2, 1.3), (1.9, 1.9)])
def test_targets_that_round_to_a_label(t1, t2, dtype):
    """Alone in their vector: a soft neighbour would have all of it computed as soft."""
    bar = 2e-6 if dtype == torch.float32 else 1e-12
    for tiny, a, mirrored in itertools.product(TINY, (-5.0, -0.5, 10.0), (False, True)):
        y = torch.tensor([1 - tiny if mirrored else tiny], dtype=dtype)
        loss, gradient = run(torch.tensor([a], dtype=dtype), y, t1, t2, reduction="none")
        exactly = mp.mpf(y.item())
        want, (_, slope) = oracle.loss_and_gradient([0.0, a], [1 - exactly, exactly], t1, t2)
        assert loss.item() == pytest.approx(float(want), rel=bar, abs=bar)
        assert gradient.item() == pytest.approx(float(slope), rel=5 * bar, abs=bar)


@pytest.mark.parametrize("pos_weight", [1e-39, 1e-20, 1e-8, 1e8, 1e20])
@pytest.mark.parametrize("y", [1.0, 0.5, 1e-9])
def test_weights_that_leave_one_class_alone(pos_weight, y):
    for a in (-5.0, 0.5):
        weight, target = torch.tensor(pos_weight), torch.tensor([y])
        loss, gradient = run(torch.tensor([a]), target, 0.8, 1.2, pos_weight=weight, reduction="none")
        exactly, w = mp.mpf(target.item()), mp.mpf(weight.item())
        want, (_, slope) = oracle.loss_and_gradient([0.0, a], [1 - exactly, exactly], 0.8, 1.2, [1, w])
        size = float((1 - exactly) + w * exactly)  # the weight of the example; 1e-44 is for subnormals
        assert loss.item() == pytest.approx(float(want), rel=2e-6, abs=2e-6 * size + 1e-44)
        assert gradient.item() == pytest.approx(float(slope), rel=1e-5, abs=2e-6 * size + 1e-44)
