"""The CPU kernel for the tempered softmax, its logarithm and lambda_t: the oracle, core in float64, derivatives."""

import itertools
import math

import numpy as np
import oracle
import pytest
import torch
from cpu_kernel_cases import FEW_PAIRS, make

from bitempered import kernels
from bitempered.torch import log_partition, tempered_log_softmax, tempered_softmax

FUNCTIONS = {"probabilities": tempered_softmax, "logarithms": tempered_log_softmax, "partition": log_partition}
TEMPERATURES = [0.0, 0.5, 0.8, 1 - 1e-6, 1.0, 1 + 1e-6, 1.2, 2.0, 4.0]


def run(what, logits, t, dim=1, *, kernel="cpu"):
    """The result, and the gradient of its sum with fixed factors."""
    leaf = logits.detach().requires_grad_()
    with kernels.use(kernel):
        out = FUNCTIONS[what](leaf, t, dim)
    g = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out.dtype)
    return out.detach(), torch.autograd.grad(out, leaf, g)[0]


def exact(what, logits, t, dim=1):
    return run(what, logits.double(), t, dim, kernel="core")


@pytest.mark.parametrize("what", FUNCTIONS)
@pytest.mark.parametrize("t", [0.0, 0.5, 0.75])
@pytest.mark.parametrize("beyond", [1e-40, 3e-39, 1e-38])
def test_gradients_are_finite_a_hair_inside_a_support(what, t, beyond):
    """The second logit's distance from the edge is so small that one over it is infinite in float32."""
    _, gradient = run(what, torch.tensor([[1 / (1 - t), beyond, -50.0]]), t)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("what", FUNCTIONS)
@pytest.mark.parametrize("t", TEMPERATURES)
def test_values_and_gradients(what, t):
    for (rows, classes), std in itertools.product([(17, 5), (9, 600)], (0.1, 3.0, 50.0)):
        logits, _ = make(rows, classes, std)
        for dtype in (torch.float32, torch.float64):
            # Next to the edge of a finite support a logarithm, and more so its derivative, magnifies rounding.
            edge = 1.0 if what != "logarithms" or t >= 1 else 1e4
            close, closer = (1e-5, 2e-6) if dtype == torch.float32 else (1e-12, 1e-13)
            got, want = run(what, logits.to(dtype), t), exact(what, logits, t)
            torch.testing.assert_close(got[0].double(), want[0], rtol=closer * edge, atol=closer * edge)
            torch.testing.assert_close(got[1].double(), want[1], rtol=close * edge, atol=close * edge / 10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_oracle_agrees(dtype):
    rng = np.random.default_rng(0)
    bar = 1e-6 if dtype == torch.float32 else 1e-14
    for _ in range(40):
        t = float(rng.choice([*TEMPERATURES, 10.0, 100.0, rng.uniform(0, 4)]))
        logits = torch.tensor(rng.choice([1e-3, 1.0, 10.0, 1e4]) * rng.normal(size=6), dtype=dtype)
        with kernels.use("cpu"):
            p = tempered_softmax(logits, t, 0)
        for value, want in zip(p.tolist(), oracle.softmax(logits.tolist(), t), strict=True):
            assert abs(value - want) <= bar


@pytest.mark.parametrize("shape", [(6,), (2, 3, 5), (2, 7, 3, 4), (1, 600, 3), (0, 4), (3, 1), (4, 5, 0)], ids=str)
def test_every_layout_and_dimension(shape):
    logits = 3 * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    layouts = [logits] if len(shape) < 2 else [
        logits, logits.transpose(0, -1).contiguous().transpose(0, -1), torch.stack((logits, logits), -1)[..., 0],
    ]  # fmt: skip
    for x, dim, what in itertools.product(layouts, range(len(shape)), FUNCTIONS):
        if shape[dim] == 0:
            continue
        got, want = run(what, x, 1.2, dim), exact(what, logits, 1.2, dim)
        torch.testing.assert_close(got[0].double(), want[0], rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(got[1].double(), want[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("what", FUNCTIONS)
def test_masked_classes_and_what_has_no_answer(what):
    inf, nan = math.inf, math.nan
    logits = torch.tensor(
        [
            [1.0, -inf, 0.5, 2.0],
            [-inf, -inf, 3.0, -inf],
            [3e38, -3e38, 0.0, 1.0],
            [inf, 0.0, 0.0, 0.0],
            [nan, 0.0, 1.0, 2.0],
            [-inf, -inf, -inf, -inf],
        ]
    )
    for (_, t), wide, dtype in itertools.product(FEW_PAIRS, (False, True), (torch.float32, torch.float64)):
        x = torch.cat((logits, torch.full((6, 600), -inf)), 1) if wide else logits
        got, want = run(what, x.to(dtype), t), exact(what, x, t)
        result = want[0].to(dtype).double()  # lambda_t may overflow
        torch.testing.assert_close(got[0].double(), result, rtol=2e-6, atol=2e-6, equal_nan=True)
        torch.testing.assert_close(got[1][:3].double(), want[1][:3], rtol=1e-5, atol=1e-6)
        assert got[1][3:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("what", FUNCTIONS)
def test_half_precision_is_float32_rounded_once(what, dtype):
    logits = make(20, 9, 3.0)[0].to(dtype)
    for t in (0.8, 1.0, 1.2):
        out, gradient = run(what, logits, t)
        wide, _ = run(what, logits.float(), t)
        assert out.dtype == gradient.dtype == dtype
        assert torch.equal(out, wide.to(dtype))
        g = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
        leaf = logits.float().requires_grad_()
        with kernels.use("cpu"):
            (want,) = torch.autograd.grad(FUNCTIONS[what](leaf, t, 1), leaf, g.float())
        assert torch.equal(gradient, want.to(dtype))
        with torch.autocast("cpu", dtype=torch.bfloat16), kernels.use("cpu"):
            assert FUNCTIONS[what](logits, t, 1).dtype == torch.float32


@pytest.mark.parametrize("what", FUNCTIONS)
def test_derivatives(what):
    logits = make(4, 5, 1.0)[0].double()
    for t in (0.9, 1.0, 1.2, 4.0):

        def f(x, t=t):
            return FUNCTIONS[what](x, t, 1)

        with kernels.use("cpu"):
            torch.autograd.gradcheck(f, logits.clone().requires_grad_())
        results = []
        for name in ("cpu", "core"):
            leaf = logits.clone().requires_grad_()
            with kernels.use(name):
                (first,) = torch.autograd.grad(f(leaf).square().sum(), leaf, create_graph=True)
            results.append((first.detach(), torch.autograd.grad(first.square().sum(), leaf)[0]))
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    assert torch.func.vmap(lambda a: FUNCTIONS[what](a, 1.2, 0))(logits).isfinite().all()


def test_threads_change_nothing():
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append([x for what in FUNCTIONS for x in run(what, make(999, 19)[0], 1.2)])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(map(torch.equal, other, results[0]))
