"""bitempered.torch on a CUDA device: the numbers of the CPU, no synchronisation, asserts on the device."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from bitempered import kernels
from bitempered.schedules import default
from bitempered.torch import (
    BiTemperedLogisticLoss,
    bi_tempered_binary_logistic_loss,
    bi_tempered_logistic_loss,
    log_partition,
    tempered_log_softmax,
    tempered_sigmoid,
    tempered_softmax,
)

PAIRS = [(0.0, 0.0), (0.5, 0.8), (0.2, 1.0), (1.0, 1.0), (0.8, 1.2), (0.5, 4.0), (0.0, 10.0), (1.3, 1.6)]


def make(rows=64, classes=1000, scale=5.0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    logits = (scale * torch.randn(rows, classes, generator=generator, dtype=torch.float64)).to(dtype)
    target = torch.randint(classes, (rows,), generator=generator)
    soft = torch.softmax(torch.randn(rows, classes, generator=generator), 1)
    weight = torch.rand(classes, generator=generator) + 0.5
    return logits, target, soft, weight


@pytest.mark.parametrize(("t1", "t2"), PAIRS)
@pytest.mark.parametrize("kind", ["indices", "probabilities", "binary"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_numbers_of_the_cpu_in_float64(t1, t2, kind, dtype):
    if t2 == 0 and dtype in (torch.float16, torch.bfloat16):
        t2 = 0.2  # at t2 = 0 derivatives jump at the support's edge, where half precision's grid puts many classes
    logits, target, soft, weight = make(dtype=dtype)

    def run(x, device):
        if kind == "binary":
            losses = bi_tempered_binary_logistic_loss(x, soft.to(device), t1, t2, reduction="none")
        else:
            y = target if kind == "indices" else soft
            losses = bi_tempered_logistic_loss(
                x, y.to(device), t1, t2, weight=weight.to(device), label_smoothing=0.1, reduction="none"
            )
        return losses.detach(), torch.autograd.grad(losses.sum(), x)[0]

    got = run(logits.cuda().requires_grad_(), "cuda")
    want = run(logits.double().requires_grad_(), "cpu")
    # Half precision rounds only the results. float32: the project's bar, relative to max(1, value).
    tolerance = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    for a, b in zip(got, want, strict=True):
        assert a.dtype == dtype
        assert ((a.cpu().double() - b).abs() / b.abs().clamp_min(1)).max() <= tolerance


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_synchronisation():
    logits, target, soft, weight = (x.cuda() for x in make())
    logits.requires_grad_()
    loss, plain = BiTemperedLogisticLoss(0.8, 1.2, weight=weight, label_smoothing=0.1), BiTemperedLogisticLoss(0.8, 1.2)
    for f in (loss, plain):
        f(logits, target).backward()  # warm-up: the first call loads kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for y in (target, soft):
            loss(logits, y).backward()
        plain(logits, target).backward()
        bi_tempered_binary_logistic_loss(logits, soft, 0.8, 1.2).backward()
        for function in (tempered_softmax, tempered_log_softmax, log_partition):
            function(logits, 1.2).sum().backward()
        tempered_sigmoid(logits, 0.5).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert logits.grad.isfinite().all()


def test_cuda_graph():
    logits, target, _, _ = (x.cuda() for x in make())
    static = logits.clone().requires_grad_()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            static.grad = None
            bi_tempered_logistic_loss(static, target, 0.8, 1.2).backward()
    torch.cuda.current_stream().wait_stream(stream)
    static.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = bi_tempered_logistic_loss(static, target, 0.8, 1.2)
        loss.backward()
    fresh = torch.randn_like(logits)
    with torch.no_grad():
        static.copy_(fresh)
    graph.replay()
    eager = fresh.clone().requires_grad_()
    want = bi_tempered_logistic_loss(eager, target, 0.8, 1.2)
    want.backward()
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(static.grad, eager.grad)


def schedule_losses(logits, target, soft, temperatures):
    """What a schedule by tensors calls: the class loss by index and by probabilities, and the binary one."""
    t1, t2 = temperatures
    return (
        bi_tempered_logistic_loss(logits, target, t1, t2, rescale=True)
        + bi_tempered_logistic_loss(logits, soft, t1, t2, label_smoothing=0.1)
        + bi_tempered_binary_logistic_loss(logits, soft, t1, t2)
    )


@pytest.mark.parametrize("per_example", [False, True])
def test_temperatures_as_tensors_have_the_numbers_of_the_cpu(per_example):
    logits, target, _, _ = make(rows=16, classes=50)
    generator = torch.Generator().manual_seed(1)
    shape = (16,) if per_example else ()

    def run(device, dtype):
        x = logits.to(device, dtype).requires_grad_()
        t1 = (0.9 * torch.rand(shape, generator=generator.manual_seed(1))).to(device, dtype).requires_grad_()
        t2 = (1 + torch.rand(shape, generator=generator)).to(device, dtype).requires_grad_()
        loss = bi_tempered_logistic_loss(x, target.to(device), t1, t2, rescale=True)
        return [loss.detach(), *torch.autograd.grad(loss, (x, t1, t2))]

    for got, want in zip(run("cuda", torch.float32), run("cpu", torch.float64), strict=True):
        assert ((got.cpu().double() - want).abs() / want.abs().clamp_min(1)).max() <= 1e-5


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_schedule_does_not_synchronise():
    logits, target, soft, _ = (x.cuda() for x in make(rows=16, classes=50))
    logits.requires_grad_()
    schedule = default(50, 100)
    temperatures = torch.tensor([schedule(step) for step in range(100)], device="cuda")
    for numbers in ((1.0, 1.0), (0.9, 1.1), temperatures[0].unbind()):  # warm-up
        schedule_losses(logits, target, soft, numbers).backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(0, 100, 9):
            schedule_losses(logits, target, soft, temperatures[step].unbind()).backward()
            schedule_losses(logits, target, soft, schedule(step)).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert logits.grad.isfinite().all()


def test_a_schedule_inside_a_cuda_graph():
    logits, target, soft, _ = (x.cuda() for x in make(rows=16, classes=50))
    logits.requires_grad_()
    schedule, now = default(50, 100), torch.ones(2, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            logits.grad = None
            schedule_losses(logits, target, soft, now.unbind()).backward()
    torch.cuda.current_stream().wait_stream(stream)
    logits.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = schedule_losses(logits, target, soft, now.unbind())
        loss.backward()
    for step in (0, 30, 100):
        now.copy_(torch.tensor(schedule(step)))
        graph.replay()
        eager = logits.detach().clone().requires_grad_()
        want = schedule_losses(eager, target, soft, torch.tensor(schedule(step), device="cuda").unbind())
        want.backward()
        torch.testing.assert_close(loss, want)
        torch.testing.assert_close(logits.grad, eager.grad)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_whole_schedule_replays_one_graph_without_synchronising():
    """The temperatures of all steps lie on the device; the graph counts and looks them up."""
    logits, target, soft, _ = make(rows=16, classes=50)
    steps, rate = 40, 0.02  # at 0.5 the descent is chaotic: rounding grows
    schedule = default(50, steps)
    x, y, p = (part.cuda() for part in (logits, target, soft))
    x.requires_grad_()
    table = torch.tensor([schedule(step) for step in range(steps)], device="cuda")
    count = torch.zeros(1, dtype=torch.int64, device="cuda")

    def step():
        now = table.index_select(0, count)[0].unbind()
        (gradient,) = torch.autograd.grad(schedule_losses(x, y, p, now), x)
        with torch.no_grad():
            x.sub_(rate * gradient)
            count.add_(1)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    with torch.no_grad():
        x.copy_(logits)
        count.zero_()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(steps):
            graph.replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert count.item() == steps
    want = logits.double()  # the same descent on the CPU, by numbers
    for now in map(schedule, range(steps)):
        leaf = want.requires_grad_()
        (gradient,) = torch.autograd.grad(schedule_losses(leaf, target, soft.double(), now), leaf)
        want = (leaf - rate * gradient).detach()
    assert (want - logits).abs().max() > 0.1  # it has moved
    # Each of forty steps rounds logits of up to 20, by 1e-6; float32 on a CPU ends up 1.2e-5 away.
    torch.testing.assert_close(x.detach().cpu().double(), want, rtol=0, atol=1e-4)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")  # torch.compile begins with such a one
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])  # the latter by CUDA graphs, with memory of their own
def test_compile(mode):
    logits, target, _, _ = (x.cuda() for x in make())
    logits.requires_grad_()
    compiled = torch.compile(lambda x: bi_tempered_logistic_loss(x, target, 0.8, 1.2), fullgraph=True, mode=mode)
    want = torch.autograd.grad(bi_tempered_logistic_loss(logits, target, 0.8, 1.2), logits)[0]
    for _ in range(4):  # warms up, records, replays
        got = torch.autograd.grad(compiled(logits), logits)[0]
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-8)


def test_autocast():
    model = torch.nn.Linear(32, 10).cuda()
    x, y = torch.randn(16, 32, device="cuda"), torch.randint(10, (16,), device="cuda")
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("cuda", dtype=dtype):
            logits = model(x)
            loss = bi_tempered_logistic_loss(logits, y, 0.8, 1.2)
        assert logits.dtype == dtype
        assert loss.dtype == F.cross_entropy(logits.float(), y).dtype == torch.float32
        loss.backward()
        assert model.weight.grad.isfinite().all()


@pytest.mark.parametrize(
    "call",
    [
        "bi_tempered_logistic_loss(torch.zeros(2, 3).cuda(), torch.tensor([0, 3]).cuda(), 0.8, 1.2)",
        "bi_tempered_logistic_loss(torch.zeros(2, 3).cuda(), torch.full((2, 3), 0.5).cuda(), 0.8, 1.2)",
        "bi_tempered_binary_logistic_loss(torch.zeros(2).cuda(), torch.full((2,), 1.5).cuda(), 0.8, 1.2)",
        *(
            f"bi_tempered_logistic_loss(torch.zeros(2, 3).cuda().to({dtype}), torch.tensor([0, 1]).cuda(), 0.8, 1.2,"
            f" weight=torch.tensor([1.0, -1.0, 1.0]).cuda(), label_smoothing={smoothing})"
            for dtype, smoothing in ((torch.float32, 0.0), (torch.float32, 0.1), (torch.float64, 0.0))
        ),
    ],
)
def test_bad_values_assert_on_the_device(call):
    code = f"import torch\nfrom bitempered.torch import *\n{call}\ntorch.cuda.synchronize()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode != 0
    assert "device-side assert" in done.stderr


def test_second_derivatives_vmap_and_jvp_go_through_core():
    logits, target, _, _ = (x.cuda() for x in make(8, 10))
    leaf = logits.clone().requires_grad_()

    def second(x):
        (gradient,) = torch.autograd.grad(bi_tempered_logistic_loss(x, target, 0.8, 1.2), x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), x)[0]

    got = second(leaf)
    with kernels.use("core"):
        torch.testing.assert_close(got, second(leaf), rtol=1e-4, atol=1e-7)
    per_row = torch.func.vmap(torch.func.grad(lambda a, y: bi_tempered_logistic_loss(a, y, 0.8, 1.2)))(logits, target)
    (want,) = torch.autograd.grad(bi_tempered_logistic_loss(leaf, target, 0.8, 1.2, reduction="sum"), leaf)
    torch.testing.assert_close(per_row, want, rtol=1e-4, atol=1e-7)
    tangent = torch.randn_like(logits)
    _, directional = torch.func.jvp(
        lambda a: bi_tempered_logistic_loss(a, target, 0.8, 1.2, reduction="sum"), (logits,), (tangent,)
    )
    torch.testing.assert_close(directional, (want * tangent).sum(), rtol=1e-4, atol=1e-6)
