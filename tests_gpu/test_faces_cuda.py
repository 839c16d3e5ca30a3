"""The faces of the loss on a GPU, by its compiled kernels: against core in float64, in memory, compiled, in graphs."""

import pytest
import torch
from memory import added_bytes

from bitempered import kernels
from bitempered.torch import (
    bi_tempered_binary_logistic_loss,
    bi_tempered_logistic_loss,
    linear_bi_tempered_logistic_loss,
    tempered_sigmoid,
    tempered_softmax,
)

PAIRS = [(0.5, 0.8), (1.0, 1.0), (0.8, 1.2), (1.3, 1.3), (0.5, 4.0)]
FAST_PAIRS = [(0.8, 1.2), (0.5, 4.0)]


def generator():
    return torch.Generator("cuda").manual_seed(0)


def make(kind, shape, dtype=torch.float32):
    """Logits, a target of this kind, and the options that belong to it."""
    random = generator()
    logits = 2 * torch.randn(shape, generator=random, device="cuda")
    if kind == "probabilities":
        target = torch.softmax(torch.randn(shape, generator=random, device="cuda"), 1)
        return logits.to(dtype), target.to(dtype), {}
    target = torch.randint(shape[1], shape[:1] + shape[2:], generator=random, device="cuda")
    target.view(-1)[::7] = -100
    return logits.to(dtype), target, {"label_smoothing": 0.1} if kind == "smoothed" else {}


def value_and_gradient(f, logits, target, t1, t2, *, exact=False, **options):
    """A value and the gradient of a weighted sum of its entries: by Triton, or exactly by core in float64.

    Of a softmax the weights are random: if they hardly differ, the gradient is what is left of almost equal terms, of
    which torch.softmax loses as many digits. Core gets the target as it is: it computes in float64 by the logits, and
    how far from 1 probabilities may sum goes by the target's own dtype.
    """
    dtype = torch.float64 if exact else logits.dtype
    leaf = logits.detach().to(dtype).requires_grad_()
    t1, t2 = (t.to(dtype) if isinstance(t, torch.Tensor) and exact else t for t in (t1, t2))
    options = {name: x.to(dtype) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    with kernels.use("core" if exact else "triton"):
        value = f(leaf, target, t1, t2, **options)
    if value.dim() == 0:
        g = torch.ones_like(value)
    elif value.shape == logits.shape:
        g = torch.rand(value.shape, generator=generator(), device="cuda").to(dtype)
    else:
        g = torch.linspace(0.5, 1.5, value.numel(), device="cuda").view(value.shape).to(dtype)
    return value.detach().double(), torch.autograd.grad(value, leaf, g)[0].double()


def check(f, logits, target, t1, t2, bar=1e-5, **options):
    got = value_and_gradient(f, logits, target, t1, t2, **options)
    want = value_and_gradient(f, logits, target, t1, t2, exact=True, **options)
    rounding = 4e-3 if logits.dtype != torch.float32 else 3e-6
    torch.testing.assert_close(got[0], want[0], rtol=rounding, atol=rounding)
    assert (got[1] - want[1]).norm() <= (4e-3 if logits.dtype != torch.float32 else bar) * want[1].norm()


KINDS = ["indices", "smoothed", "probabilities"]
SHAPES = [(64, 1000), (40, 20000), (3, 21, 40, 50)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rescale_and_temperatures_in_memory(shape, kind):
    logits, target, options = make(kind, shape)
    rows = shape[:1] + shape[2:]
    for t1, t2 in PAIRS:
        check(bi_tempered_logistic_loss, logits, target, t1, t2, 5e-5, rescale=True, **options)
        first, second = (torch.full(rows, t, device="cuda") for t in (t1, t2))
        check(bi_tempered_logistic_loss, logits, target, first, second, reduction="none", **options)
        first, second = torch.tensor(t1, device="cuda"), torch.tensor(t2, device="cuda")
        check(bi_tempered_logistic_loss, logits, target, first, second, 5e-5, rescale=True, **options)


def test_a_schedule_runs_inside_a_graph():
    logits, target, _ = make("indices", (512, 1000))
    leaf, t1, t2 = logits.requires_grad_(), torch.tensor(1.0, device="cuda"), torch.tensor(1.0, device="cuda")

    def step():
        loss = bi_tempered_logistic_loss(leaf, target, t1, t2)
        return loss.detach(), torch.autograd.grad(loss, leaf)[0]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss, gradient = step()
    for now in PAIRS:
        t1.fill_(now[0])
        t2.fill_(now[1])
        graph.replay()
        want, exact = value_and_gradient(bi_tempered_logistic_loss, leaf, target, *now, exact=True)
        torch.testing.assert_close(loss.double(), want, rtol=3e-6, atol=3e-6)
        assert (gradient - exact).norm() <= 1e-5 * exact.norm()


# Every kind, layout and dtype once: each case compiles a graph of its own, and the kernels have tests of their own.
COMPILED = [
    ("indices", SHAPES[0], torch.float16),
    ("indices", SHAPES[1], torch.float32),
    ("smoothed", SHAPES[2], torch.bfloat16),
    ("probabilities", SHAPES[0], torch.float32),
    ("probabilities", SHAPES[2], torch.bfloat16),
]


@pytest.mark.parametrize(("kind", "shape", "dtype"), COMPILED, ids=str)
def test_compiled(kind, shape, dtype):
    logits, target, options = make(kind, shape, dtype)
    leaf = logits.requires_grad_()

    def f(a, y):
        return 2 * bi_tempered_logistic_loss(3 * a, y, 0.8, 1.2, **options)

    torch.compiler.reset()
    value, want = torch.compile(f, fullgraph=True)(leaf, target), f(leaf, target)
    rounding = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(value, want, rtol=rounding, atol=rounding)
    got, exact = (torch.autograd.grad(x, leaf)[0].double() for x in (value, want))
    assert (got - exact).norm() <= rounding * exact.norm() + 1e-12


@pytest.mark.filterwarnings("ignore:.*Profiler clears events at the end of each cycle:UserWarning")
def test_compiled_solves_once_in_the_memory_of_the_gradient():
    logits, target, _ = make("indices", (4096, 32000))
    leaf = logits.requires_grad_()
    step = torch.compile(lambda a, y: bi_tempered_logistic_loss(a, y, 0.8, 1.2), fullgraph=True)
    step(leaf, target).backward()  # compiles
    leaf.grad = None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        assert added_bytes(lambda: step(leaf, target).backward()) <= 1.05 * leaf.nbytes
        torch.cuda.synchronize()
    launched = [event.key for event in profile.key_averages() if "kernel" in event.key]
    assert sum("label_gradient" in name for name in launched) == 1
    assert sum(name.startswith("loss_kernel") for name in launched) == 1


def test_softmax_with_temperatures_in_memory():
    logits, _, _ = make("indices", (64, 1000))
    t = torch.linspace(0.9, 3, 64, device="cuda")

    def f(a, _, t, __):
        return tempered_softmax(a, t)

    check(f, logits, logits, t, t)


@pytest.mark.parametrize("pair", FAST_PAIRS, ids=str)
def test_linear_layer_rescaled(pair):
    random = generator()
    hidden = torch.randn(300, 64, generator=random, device="cuda", requires_grad=True)
    weight = (torch.randn(5000, 64, generator=random, device="cuda") / 8).requires_grad_()
    target = torch.randint(5000, (300,), generator=random, device="cuda")
    with kernels.use("triton"):
        loss = linear_bi_tempered_logistic_loss(hidden, weight, target, *pair, rescale=True)
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    with kernels.use("core"):
        want = bi_tempered_logistic_loss(wide[0] @ wide[1].t(), target, *pair, rescale=True)
    torch.testing.assert_close(loss.double(), want, rtol=2e-5, atol=0)
    got, exact = torch.autograd.grad(loss, (hidden, weight)), torch.autograd.grad(want, wide)
    for x, y in zip(got, exact, strict=True):
        assert (x - y).norm() <= 1e-4 * y.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_many_rows_of_few_classes(kind, dtype):
    """A thread for each row, in images and in rows; and the same classes as neighbours in memory."""
    for shape in ((20000, 10), (2, 19, 128, 256), (2, 19, 1, 16400)):
        logits, target, options = make(kind, shape, dtype)
        layouts = [logits]
        if len(shape) == 4:
            layouts.append(logits.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2))
        for t1, t2 in PAIRS:
            for x in layouts:
                check(bi_tempered_logistic_loss, x, target, t1, t2, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(100_000, 10), (2, 19, 256, 512), (4096, 1000), (65536, 1000)], ids=str)
def test_memory_of_the_gradient(shape, kind):
    logits, target, options = make(kind, shape, torch.bfloat16)
    leaf = logits.requires_grad_()
    bi_tempered_logistic_loss(leaf, target, 0.8, 1.2, **options).backward()  # compiles
    leaf.grad = None
    added = added_bytes(lambda: bi_tempered_logistic_loss(leaf, target, 0.8, 1.2, **options).backward())
    assert added <= 1.05 * leaf.nbytes


def make_binary(shape, dtype=torch.float32, soft=False):
    random = generator()
    logits = 3 * torch.randn(shape, generator=random, device="cuda")
    target = torch.rand(shape, generator=random, device="cuda")
    return logits.to(dtype), (target if soft else target.round()).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("soft", [False, True])
def test_binary_loss(soft, dtype):
    logits, target = make_binary((64, 1000), dtype, soft)
    weights = {"pos_weight": torch.linspace(0.5, 3, 1000, device="cuda"), "weight": torch.ones(64, 1, device="cuda")}
    for t1, t2 in PAIRS:
        for options in ({}, weights, {"reduction": "none", "rescale": True}):
            check(bi_tempered_binary_logistic_loss, logits, target, t1, t2, 2e-5, **options)
        first, second = torch.tensor(t1, device="cuda"), torch.full((64, 1), t2, device="cuda")
        check(bi_tempered_binary_logistic_loss, logits, target, first, second, 2e-5, **weights)
    transposed = logits.t().contiguous().t()
    check(bi_tempered_binary_logistic_loss, transposed, target, 0.8, 1.2, 2e-5, **weights)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature:UserWarning")
def test_binary_loss_in_the_memory_of_the_gradient_and_without_synchronisation():
    logits, target = make_binary((4096, 1000), torch.bfloat16)
    leaf = logits.requires_grad_()
    bi_tempered_binary_logistic_loss(leaf, target, 0.8, 1.2).backward()  # compiles
    leaf.grad = None

    def step():
        try:
            torch.cuda.set_sync_debug_mode("error")
            bi_tempered_binary_logistic_loss(leaf, target, 0.8, 1.2).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    assert added_bytes(step) <= 1.05 * leaf.nbytes


def test_binary_loss_compiled():
    logits, target = make_binary((64, 1000))

    def f(a, y):
        return bi_tempered_binary_logistic_loss(3 * a, y, 0.8, 1.2)

    torch.compiler.reset()
    leaf = logits.requires_grad_()
    value, want = torch.compile(f, fullgraph=True)(leaf, target), f(leaf, target)
    torch.testing.assert_close(value, want)
    torch.testing.assert_close(*(torch.autograd.grad(x, leaf)[0] for x in (value, want)))


@pytest.mark.parametrize("t", [0.5, 1.0, 1.2, 4.0])
def test_sigmoid(t):
    logits, _ = make_binary((64, 1000))

    def f(a, _, t, __):
        return tempered_sigmoid(a, t)

    for given in (t, torch.tensor(t, device="cuda")):
        check(f, logits, logits, given, given, 2e-5)
