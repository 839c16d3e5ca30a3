"""The Triton kernels as compiled for a GPU: their numbers against core in float64, and how they behave in training."""

import itertools
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress

import pytest
import torch
from memory import added_bytes

from bitempered import kernels
from bitempered.torch import (
    bi_tempered_logistic_loss,
    device_linear,
    linear_bi_tempered_logistic_loss,
    log_partition,
    tempered_log_softmax,
    tempered_softmax,
)

T1 = [0.0, 0.5, 0.8, 1.0]
T2 = [0.0, 0.5, 1 - 1e-6, 1.0, 1 + 1e-6, 1.05, 1.2, 2.0, 4.0]
PAIRS = [(t1, t2) for t1, t2 in itertools.product(T1, T2) if t1 <= t2]
PAIRS += [(1.05, 1.05), (1.3, 1.37), (1.9, 1.95)]  # above t1 = 1 some powers are computed otherwise
CLASSES = [2, 10, 1000, 32000, 128256]  # smallest, MNIST, ImageNet, vocabularies: up to 8,192 in registers


def make(classes, rows=16, dtype=torch.float32):
    """Rows of standard deviation 1, 10 and 100, every third labelled with its largest class."""
    generator = torch.Generator("cuda").manual_seed(classes)
    scale = torch.tensor([1.0, 10.0, 100.0], device="cuda").repeat_interleave(rows)
    logits = scale[:, None] * torch.randn(3 * rows, classes, generator=generator, device="cuda")
    target = torch.randint(classes, (3 * rows,), generator=generator, device="cuda")
    target[::3] = logits.argmax(1)[::3]
    return logits.to(dtype), target


def losses_and_gradient(logits, target, t1, t2):
    leaf = logits.detach().requires_grad_()
    losses = bi_tempered_logistic_loss(leaf, target, t1, t2, reduction="none")
    return losses.detach(), torch.autograd.grad(losses.sum(), leaf)[0]


def compile_one(case):
    function, *arguments = case
    with suppress(Exception):  # the test itself will say so
        function(*arguments)


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    """One process would compile for minutes what, compiled by many, it finds on disk. Workers of xdist are many."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    cases = [
        *((check_float32, *pair, (10, 1000, 32000)) for pair in PAIRS),
        *((check_options, *case) for case in itertools.product(SHAPES, KINDS)),
        *((check_softmax, *case) for case in itertools.product(FUNCTIONS, SOFTMAX_T)),
        *((check_half_precision, *case) for case in itertools.product(HALVES, FAST_PAIRS)),
        *((check_linear, *case, keep) for case in LINEAR_CASES for keep in (False, True)),
    ]
    with ProcessPoolExecutor(14, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_one, cases))


@pytest.mark.parametrize(("t1", "t2"), PAIRS)
def test_loss_and_gradient_in_float32(t1, t2):
    check_float32(t1, t2, CLASSES)


def check_float32(t1, t2, many):
    for classes in many:
        logits, target = make(classes)
        with kernels.use("triton"):
            losses, gradient = losses_and_gradient(logits, target, t1, t2)
        with kernels.use("core"):
            want, exact = losses_and_gradient(logits.double(), target, t1, t2)
        assert ((losses - want).abs() / want.clamp_min(1)).max() <= 2e-6, classes
        # core in float64 has an error of its own, which the gradient of a confident row comes down to.
        off = (gradient - exact).norm(dim=1) > 1e-5 * exact.norm(dim=1) + 1e-14
        # Where derivatives jump at the support's edge, float32 and float64 may differ in the class there.
        jumps = t2 == 0 or t1 == t2 < 1
        assert off.double().mean() <= (0.05 if jumps else 0), classes


# Above t2 = 2 s u overflows, e^(-s m) underflows, or both; some of these take roots.
@pytest.mark.parametrize(("t1", "t2"), [(0.8, 1.5), (0.8, 2.5), (0.0, 4.0), (0.5, 4.0), (1.0, 20.0), (0.5, 100.0)])
@pytest.mark.parametrize("classes", [10, 1000, 32000])
def test_logits_as_large_as_float32_has(t1, t2, classes):
    logits, target = make(classes)
    logits *= torch.tensor([1e36, 1e35, 1e30], device="cuda").repeat_interleave(16)[:, None]
    logits = logits.clamp(-1.5e38, 1.5e38)
    with kernels.use("triton"):
        losses, gradient = losses_and_gradient(logits, target, t1, t2)
        log_p = tempered_log_softmax(logits, t2)
    with kernels.use("core"):
        want, exact = losses_and_gradient(logits.double(), target, t1, t2)
        want_log_p = tempered_log_softmax(logits.double(), t2)
    assert ((losses - want).abs() / want.clamp_min(1)).max() <= 2e-6
    assert ((gradient - exact).norm(dim=1) <= 1e-5 * exact.norm(dim=1) + 1e-14).all()
    torch.testing.assert_close(log_p.double(), want_log_p, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("rows", [9, 5000, 70000])  # counted in every program, by one of their own, by torch
def test_a_mean_of_nothing_has_no_gradient(smoothing, rows):
    logits = torch.randn(rows, 10, device="cuda", requires_grad=True)
    weight = torch.ones(10, device="cuda")
    weight[2] = 0
    for value, options in ((-100, {}), (2, {"weight": weight})):
        target = torch.full((rows,), value, device="cuda")
        with kernels.use("triton"):
            loss = bi_tempered_logistic_loss(logits, target, 0.8, 1.2, label_smoothing=smoothing, **options)
        assert loss.isnan()
        assert torch.autograd.grad(loss, logits)[0].eq(0).all()


HALVES = [torch.bfloat16, torch.float16]
FAST_PAIRS = [(0.8, 1.2), (0.5, 4.0)]  # powers by multiplication: from a square root, from a sixth root


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("pair", FAST_PAIRS, ids=str)
def test_half_precision_rounds_only_the_results(dtype, pair):
    check_half_precision(dtype, pair)


def check_half_precision(dtype, pair):
    for classes in (1000, 32000):
        logits, target = make(classes, dtype=dtype)
        losses, gradient = losses_and_gradient(logits, target, *pair)
        with kernels.use("core"):
            want, exact = losses_and_gradient(logits.double(), target, *pair)
        assert losses.dtype == gradient.dtype == dtype
        rounding, spacing = torch.finfo(dtype).eps / 2, torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        assert ((losses - want).abs() <= 1.01 * rounding * want + 2e-6).all()
        error = (gradient - exact).norm(dim=1)
        assert (error <= 1.01 * rounding * exact.norm(dim=1) + 1e-14 + spacing * classes**0.5).all()


SHAPES = [(64, 50257), (40, 8192), (3, 21, 5, 7), (2, 150, 64)]  # rows not aligned; in registers; strided classes
KINDS = ["indices", "smoothed", "probabilities"]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_option_and_shape(shape, kind):
    check_options(shape, kind)


def check_options(shape, kind):
    generator = torch.Generator("cuda").manual_seed(0)
    classes = shape[1]
    logits = 3 * torch.randn(shape, generator=generator, device="cuda")
    weight = torch.rand(classes, generator=generator, device="cuda") + 0.5
    if kind == "probabilities":
        target = torch.softmax(torch.randn(shape, generator=generator, device="cuda"), 1)
    else:
        target = torch.randint(classes, shape[:1] + shape[2:], generator=generator, device="cuda")
        target.view(-1)[::4] = -100
    for reduction in ("mean", "none"):
        results = []
        for name, x in (("triton", logits.clone()), ("core", logits.double())):
            leaf = x.requires_grad_()
            y = target.to(x.dtype) if target.is_floating_point() else target
            with kernels.use(name):
                loss = bi_tempered_logistic_loss(
                    leaf,
                    y,
                    0.8,
                    1.2,
                    weight=weight.to(x.dtype),
                    reduction=reduction,
                    label_smoothing=0.1 if kind == "smoothed" else 0.0,
                )
            g = torch.rand(loss.shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda").to(x.dtype)
            results.append((loss.detach(), torch.autograd.grad(loss, leaf, g)[0]))
        (loss, gradient), (want, exact) = results
        torch.testing.assert_close(loss.double(), want, rtol=3e-6, atol=3e-6)
        assert (gradient - exact).norm() <= 1e-5 * exact.norm()


def test_strided_and_unaligned_views():
    wide = 3 * torch.randn(64, 1001, device="cuda")
    target = torch.randint(1000, (64,), device="cuda")
    for view in (wide[:, :1000], wide[:, 1:], wide[::2, :1000], wide[:, :1000].t().contiguous().t()):
        losses, gradient = losses_and_gradient(view, target[: len(view)], 0.8, 1.2)
        want, exact = losses_and_gradient(view.contiguous(), target[: len(view)], 0.8, 1.2)
        torch.testing.assert_close(losses, want, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(gradient, exact, rtol=1e-5, atol=1e-8)


def test_more_than_two_to_the_31_logits_at_the_price_of_one_copy():
    rows, classes = 70000, 32000
    logits = torch.randn(rows, classes, device="cuda", dtype=torch.bfloat16).requires_grad_()
    target = torch.randint(classes, (rows,), device="cuda")
    added = added_bytes(lambda: bi_tempered_logistic_loss(logits, target, 0.8, 1.2, reduction="sum").backward())
    assert added <= 1.05 * logits.nbytes
    _, last = losses_and_gradient(logits[-16:], target[-16:], 0.8, 1.2)
    assert torch.equal(logits.grad[-16:], last)


def test_classes_that_are_more_than_two_to_the_31_numbers_away():
    classes, positions = 64, 2**26
    logits = torch.randn(1, classes, positions, device="cuda", dtype=torch.bfloat16).requires_grad_()
    target = torch.randint(classes, (1, positions), device="cuda")
    (gradient,) = torch.autograd.grad(bi_tempered_logistic_loss(logits, target, 0.8, 1.2, reduction="sum"), logits)
    for few in (slice(0, 64), slice(positions - 64, positions)):
        part = logits[0, :, few].t().contiguous()
        _, want = losses_and_gradient(part, target[0, few], 0.8, 1.2)
        torch.testing.assert_close(gradient[0, :, few].t(), want, rtol=1e-2, atol=1e-6)


FUNCTIONS = [tempered_softmax, tempered_log_softmax, log_partition]
SOFTMAX_T = [0.5, 1.2]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("t", SOFTMAX_T)
def test_softmax(function, t):
    check_softmax(function, t)


def check_softmax(function, t):
    generator = torch.Generator("cuda").manual_seed(0)
    for shape, dim in (((32, 1000), 1), ((4, 21, 30), 1), ((16, 32000), 1)):
        logits = 3 * torch.randn(shape, generator=generator, device="cuda")
        results = []
        for name, x in (("triton", logits.clone()), ("core", logits.double())):
            leaf = x.requires_grad_()
            with kernels.use(name):
                out = function(leaf, t, dim)
            g = torch.rand(out.shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda").to(x.dtype)
            results.append((out.detach(), torch.autograd.grad(out, leaf, g)[0]))
        (out, gradient), (want, exact) = results
        both = (out > -torch.inf) & (want > -torch.inf)
        assert both.double().mean() >= 0.999 * (want > -torch.inf).double().mean()
        # Next to the edge of a support, log p and its slope are as steep as they like.
        steep = t < 1 and function is tempered_log_softmax
        assert ((out - want)[both].abs() / want[both].abs().clamp_min(1)).max() <= (1e-2 if steep else 5e-6)
        assert (gradient - exact).norm() <= (5e-2 if steep else 1e-5) * exact.norm()


def test_backward_again_and_with_other_cotangents():
    logits, target = make(1000)
    leaf = logits.clone().requires_grad_()
    loss = bi_tempered_logistic_loss(leaf, target, 0.8, 1.2)
    loss.backward(retain_graph=True)
    once = leaf.grad.clone()
    loss.backward(retain_graph=True)  # adds to what may be the very tensor that the first backward gave away
    (3 * loss).backward(retain_graph=True)
    torch.testing.assert_close(leaf.grad, 5 * once)
    (batched,) = torch.autograd.grad(loss, leaf, torch.tensor([1.0, 2.0], device="cuda"), is_grads_batched=True)
    torch.testing.assert_close(batched, torch.stack((once, 2 * once)), rtol=1e-4, atol=1e-7)  # by core, in float32


def test_compile_calls_the_kernel():
    logits, target = make(1000)
    operators = []

    def backend(graph, inputs):
        operators.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    def f(x):
        return bi_tempered_logistic_loss(2 * x, target, 0.8, 1.2)

    leaf = logits.clone().requires_grad_()
    (want,) = torch.autograd.grad(f(leaf), leaf)
    torch.compile(f, fullgraph=True, backend=backend)(leaf)
    assert "bitempered.loss.default" in operators
    torch._dynamo.reset()
    (gradient,) = torch.autograd.grad(torch.compile(f, fullgraph=True)(leaf), leaf)
    torch.testing.assert_close(gradient, want, rtol=1e-5, atol=1e-9)


def test_what_is_forced_and_cannot_be_done_raises():
    logits, target = make(10)
    with kernels.use("triton"), pytest.raises(RuntimeError, match="it computes in float32, got float64 logits"):
        bi_tempered_logistic_loss(logits.double(), target, 0.8, 1.2)


LINEAR_CASES = [
    *itertools.product([torch.float32, torch.bfloat16], [(0.8, 1.2), (0.5, 4.0), (1.0, 1.0), (0.5, 0.8)]),
    *itertools.product([torch.float16], [(0.8, 1.2), (1.0, 1.0), (0.5, 0.8)]),  # at t2 = 4 a gradient is 1e-17: 0 there
]


def make_layer(rows, features, classes, dtype):
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(rows, features, generator=generator, device="cuda").to(dtype)
    weight = (3 * torch.randn(classes, features, generator=generator, device="cuda") / features**0.5).to(dtype)
    target = torch.randint(classes, (rows,), generator=generator, device="cuda")
    target[::3] = (hidden @ weight.t()).argmax(1)[::3]
    target[::5] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), target


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(("dtype", "pair"), LINEAR_CASES, ids=str)
def test_linear_layer(dtype, pair, keep):
    check_linear(dtype, pair, keep)


def check_linear(dtype, pair, keep):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_linear, "_LEAST_CLASSES", 0 if keep else 2**30)
        for rows in (300, 64):  # more than are kept, and no more
            check_layer(rows, dtype, pair)


def check_layer(rows, dtype, pair):
    hidden, weight, target = make_layer(rows, 64, 9000, dtype)
    leaves = [hidden, weight, torch.randn(9000, device="cuda").to(dtype).requires_grad_()]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    for reduction in ("mean", "none"):
        with kernels.use("triton"):
            loss = linear_bi_tempered_logistic_loss(*leaves[:2], target, *pair, bias=leaves[2], reduction=reduction)
        with kernels.use("core"):
            logits = torch.nn.functional.linear(*wide)
            want = bi_tempered_logistic_loss(logits, target, *pair, reduction=reduction)
        g = torch.rand(loss.shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda")
        # Logits of up to 16 are rounded, to 0.03 in bfloat16; in float32 they are sums of 64 products.
        accuracy = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
        assert (loss - want).norm() <= accuracy * want.norm()
        got, exact = torch.autograd.grad(loss, leaves, g.to(loss.dtype)), torch.autograd.grad(want, wide, g.double())
        for x, y in zip(got, exact, strict=True):
            assert (x - y).norm() <= accuracy * y.norm()


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_linear_layer_in_the_memory_of_its_gradients_and_a_chunk_and_without_synchronisation(monkeypatch, keep):
    monkeypatch.setattr(device_linear, "_LEAST_CLASSES", 0 if keep else 2**30)
    hidden, weight, target = make_layer(2048, 1024, 32000, torch.bfloat16)
    linear_bi_tempered_logistic_loss(hidden, weight, target, 0.8, 1.2).backward()  # compiles
    hidden.grad = weight.grad = None

    def step():
        try:
            torch.cuda.set_sync_debug_mode("error")
            linear_bi_tempered_logistic_loss(hidden, weight, target, 0.8, 1.2).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    assert added_bytes(step) <= 1.03 * 2 * (weight.numel() + 2 * hidden.numel())


def test_calls_that_resemble_each_other():
    """Launches are remembered: what differs between calls must make a difference, and nothing else."""
    wide = 3 * torch.randn(64, 1001, device="cuda")
    target = torch.randint(10, (128,), device="cuda")
    cases = [(logits, labels) for logits in (wide[:, :1000], wide[:, 1:]) for labels in (target[:64], target[::2])]
    cases += [(logits[:32].contiguous(), labels[:32].contiguous()) for logits, labels in cases]
    cases += [(logits.bfloat16(), labels) for logits, labels in cases[:2]]
    many = torch.randint(10, (70_000,), device="cuda")  # counted by the loss's programs, by one of their own, by torch
    cases += [(torch.randn(rows, 10, device="cuda"), many[:rows]) for rows in (4096, 5000, 65_536, 70_000)]
    options = [
        {"t1": 0.8, "t2": 1.2},
        {"t1": 0.5, "t2": 4.0},
        {"t1": 0.8, "t2": 1.2, "reduction": "sum"},
        {"t1": 0.8, "t2": 1.2, "reduction": "none"},
        {"t1": 0.8, "t2": 1.2, "ignore_index": 3},
    ]
    for (logits, labels), given in itertools.product(cases, options):
        for _ in range(3):
            results = []
            for name, x in (("triton", logits.detach()), ("core", logits.detach().double())):
                leaf = x.requires_grad_()
                with kernels.use(name):
                    loss = bi_tempered_logistic_loss(leaf, labels, **given)
                    with torch.no_grad():
                        torch.testing.assert_close(bi_tempered_logistic_loss(leaf, labels, **given), loss.detach())
                results.append((loss.detach().double(), torch.autograd.grad(loss.sum(), leaf)[0].double()))
            (loss, gradient), (want, exact) = results
            rounding = 1e-2 if logits.dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(loss, want, rtol=rounding, atol=0)
            assert (gradient - exact).norm() <= rounding * exact.norm()
