"""Temperatures as tensors: gradients of both orders, a value per example, dtypes, compilation, and bad values."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, jacfwd, jacrev, vmap

from bitempered import kernels, schedules
from bitempered.torch import (
    BiTemperedBinaryLogisticLoss,
    BiTemperedLogisticLoss,
    LinearBiTemperedLogisticLoss,
    bi_tempered_binary_logistic_loss,
    bi_tempered_logistic_loss,
    linear_bi_tempered_logistic_loss,
    log_partition,
    tempered_log_softmax,
    tempered_sigmoid,
    tempered_softmax,
)

# A finite support, each at 1, next to 1, the paper's, above 2. Not both at 1: differences need t1 + 1e-6 <= t2, and
# tests/test_core_temperatures.py has no such need.
T1 = [0.3, 0.2, 1.0, 1 - 1e-4, 0.8, 0.5]
T2 = [0.6, 1.0, 1.5, 1 + 1e-4, 1.2, 4.0]
N, C = len(T1), 4


def make(dtype=torch.float64, shape=(N, C)):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return logits, torch.randint(shape[1], (shape[0], *shape[2:]), generator=generator)


def pair(dtype=torch.float64):
    return torch.tensor(T1, dtype=dtype), torch.tensor(T2, dtype=dtype)


def leaves(*tensors):
    return [x.clone().requires_grad_() for x in tensors]


def scalars(*numbers):
    return [torch.tensor(t, dtype=torch.float64, requires_grad=True) for t in numbers]


def both_orders(f, *inputs):
    inputs = leaves(*inputs)
    assert gradcheck(f, inputs, check_forward_ad=True)
    assert gradgradcheck(f, inputs, check_fwd_over_rev=True, fast_mode=True)


@pytest.mark.parametrize("kind", ["indices", "weighted"])
def test_gradients_of_the_loss(kind):
    logits, target = make()
    options = {
        "indices": {},
        "weighted": {"weight": torch.arange(1.0, C + 1).double(), "label_smoothing": 0.1},
    }[kind]
    both_orders(
        lambda a, t1, t2: bi_tempered_logistic_loss(a, target, t1, t2, reduction="none", **options), logits, *pair()
    )


def test_gradients_of_the_rescaled_loss():
    logits, target = make()
    logits[:, 0] = -math.inf  # masked: no derivative, and none that is NaN in t2
    target[0], logits[0] = -100, math.nan  # ignored: likewise
    t1, t2 = leaves(*pair())

    def f(t1, t2):
        return bi_tempered_logistic_loss(logits, target.clamp_min(1) - 101 * (target < 0), t1, t2, rescale=True)

    assert gradcheck(f, (t1, t2))
    assert gradgradcheck(f, (t1, t2))


def test_gradients_of_the_binary_loss():
    logits, _ = make(shape=(N, 2))
    target, (t1, t2) = torch.rand(N, generator=torch.Generator().manual_seed(1)).double(), pair()
    both_orders(
        lambda a, t1, t2: bi_tempered_binary_logistic_loss(a, target, t1, t2, reduction="none"), logits[:, 0], t1, t2
    )
    inputs = leaves(logits[:, 0], t1, t2)
    assert gradcheck(lambda a, t1, t2: bi_tempered_binary_logistic_loss(a, target, t1, t2, rescale=True), inputs)


@pytest.mark.parametrize("function", [log_partition, tempered_log_softmax])
def test_gradients_of_the_softmax(function):
    logits, _ = make()
    both_orders(lambda a, t: function(a, t), 0.3 * logits, pair()[1])  # 0.3: a full support


def test_gradients_of_the_linear_loss():
    logits, target = make()
    hidden, weight = logits[:, :3], make(shape=(C, 3))[0]
    for reduction in ("mean", "none"):
        inputs = leaves(hidden, weight, *pair())
        assert gradcheck(
            lambda h, w, t1, t2, reduction=reduction: linear_bi_tempered_logistic_loss(
                h, w, target, t1, t2, reduction=reduction, rescale=True
            ),
            inputs,
        )
    scalar = scalars(0.8, 1.2)
    got = torch.autograd.grad(linear_bi_tempered_logistic_loss(hidden, weight, target, *scalar), scalar)
    want = torch.autograd.grad(bi_tempered_logistic_loss(F.linear(hidden, weight), target, *scalar), scalar)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


def test_one_value_per_example_equals_a_loop():
    logits, target = make()
    t1, t2 = leaves(*pair())
    options = {"weight": torch.arange(1.0, C + 1).double(), "rescale": True}
    losses = bi_tempered_logistic_loss(logits, target, t1, t2, reduction="none", **options)
    gradients = torch.autograd.grad(losses.sum(), (t1, t2))
    for i in range(N):
        # To rounding: the loop takes core's shortcuts for numbers.
        alone = bi_tempered_logistic_loss(logits[i], target[i], T1[i], T2[i], reduction="none", **options)
        assert losses[i].item() == pytest.approx(alone.item(), rel=1e-13, abs=1e-15)
        one = scalars(T1[i], T2[i])
        by_one = torch.autograd.grad(
            bi_tempered_logistic_loss(logits[i], target[i], *one, reduction="sum", **options), one
        )
        for together, single in zip(gradients, by_one, strict=True):
            assert together[i].item() == pytest.approx(single.item(), rel=1e-12, abs=1e-14)
    softmax = tempered_softmax(logits.T, t2, dim=0)
    torch.testing.assert_close(softmax[:, 0], tempered_softmax(logits[0], T2[0]), rtol=1e-13, atol=0)
    torch.testing.assert_close(tempered_sigmoid(logits[:, 0], t2)[5], tempered_sigmoid(logits[5, 0], T2[5]))


@pytest.mark.parametrize("shape", [(), (1,), (4,), (N, 1), (N, 4)])
def test_the_class_axis_is_inserted(shape):
    """Logits (N, C, 4): shapes that broadcast to (N, 4)."""
    logits, target = make(shape=(N, C, 4))
    t1 = 0.2 + 0.6 * torch.rand(shape, generator=torch.Generator().manual_seed(3)).double()
    t2 = torch.tensor(1.3, dtype=torch.float64)
    t1, t2 = leaves(t1, t2)
    losses = bi_tempered_logistic_loss(logits, target, t1, t2, reduction="none")
    numbers = t1.detach().expand(N, 4)
    want = [
        [bi_tempered_logistic_loss(logits[i, :, j], target[i, j], numbers[i, j].item(), 1.3) for j in range(4)]
        for i in range(N)
    ]
    torch.testing.assert_close(losses, torch.tensor(want, dtype=torch.float64), rtol=1e-12, atol=1e-14)
    gradients = torch.autograd.grad(losses.mean(), (t1, t2))
    assert [g.shape for g in gradients] == [shape, ()]


def test_a_number_and_a_tensor():
    logits, target = make()
    want = bi_tempered_logistic_loss(logits, target, 0.8, 1.2)
    t1, t2 = scalars(0.8, 1.2)
    expected = torch.autograd.grad(bi_tempered_logistic_loss(logits, target, t1, t2), (t1, t2))
    for given, which in (((t1, 1.2), 0), ((0.8, t2), 1)):
        loss = bi_tempered_logistic_loss(logits, target, *given)
        torch.testing.assert_close(loss, want, rtol=1e-13, atol=0)
        (gradient,) = torch.autograd.grad(loss, given[which])
        torch.testing.assert_close(gradient, expected[which], rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_dtypes(dtype):
    """It computes as for float32 logits; the gradient of a temperature has the temperature's dtype and shape."""
    logits, target = make(dtype)
    t1, t2 = leaves(torch.tensor([0.8], dtype=torch.float64), torch.tensor(1.25, dtype=torch.float16))
    loss = bi_tempered_logistic_loss(logits, target, t1, t2)
    assert loss.dtype == dtype
    got = torch.autograd.grad(loss, (t1, t2))
    assert [(g.dtype, g.shape) for g in got] == [(torch.float64, (1,)), (torch.float16, ())]
    exact = scalars(0.8, 1.25)
    want = torch.autograd.grad(bi_tempered_logistic_loss(logits.double(), target, *exact), exact)
    assert got[0].item() == pytest.approx(want[0].item(), rel=2e-5)
    assert got[1].item() == pytest.approx(want[1].item(), rel=2e-3)  # float16


def test_function_transforms():
    logits, target = make()
    t1, t2 = leaves(*pair())
    want = torch.autograd.grad(bi_tempered_logistic_loss(logits, target, t1, t2, reduction="sum"), (t1, t2))
    by_example = vmap(grad(bi_tempered_logistic_loss, argnums=(2, 3)))(logits, target, t1.detach(), t2.detach())
    torch.testing.assert_close(by_example, want, rtol=1e-12, atol=1e-14)

    def f(t):
        return bi_tempered_logistic_loss(logits, target, t[0], t[1])

    t = torch.tensor([0.8, 1.2], dtype=torch.float64)
    torch.testing.assert_close(jacfwd(f)(t), jacrev(f)(t), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(jacfwd(jacrev(f))(t), jacrev(jacrev(f))(t), rtol=1e-9, atol=1e-11)
    with pytest.raises(RuntimeError, match="forward mode over forward mode"):
        jacfwd(jacfwd(f))(t)
    linear = F.linear(logits, torch.eye(C, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="first derivatives by backward"):
        grad(lambda t: linear_bi_tempered_logistic_loss(linear, torch.eye(C).double(), target, t, 1.2))(t[0])


BAD = [
    (torch.tensor(-0.1), 1.2, ValueError, "got t1 = -0.1 and t2 = 1.2"),
    (torch.tensor([0.5, 2.0]), 3.0, ValueError, "got t1 = values from 0.5 to 2 and t2 = 3"),
    (torch.tensor(0.8), torch.tensor(0.7), ValueError, "got t1 = 0.8 and t2 = 0.7"),
    (0.8, torch.tensor(math.inf), ValueError, "got t1 = 0.8 and t2 = inf"),
    (torch.tensor(math.nan), 1.2, ValueError, "got t1 = nan"),
    (torch.tensor(1), 1.2, TypeError, "t1 must be a number or a floating-point tensor, got torch.int64"),
    (0.8, torch.tensor([True]), TypeError, "t2 must be a number or a floating-point tensor, got torch.bool"),
    (0.8, torch.full((3,), 1.2), ValueError, r"t2 must .* unreduced loss, \(2,\), got shape \(3,\)"),
    (0.8, torch.full((2, 1), 1.2), ValueError, r"unreduced loss, \(2,\), got shape \(2, 1\)"),
    (torch.tensor(0.8), -1.0, ValueError, "t2 must be a finite number >= 0"),
    (torch.tensor(0.8, device="meta"), 1.2, RuntimeError, "t1 is on meta and logits on cpu"),
    # In float32, in which these logits compute, t1 is 2.
    (torch.tensor(2 - 1e-9, dtype=torch.float64), 3.0, ValueError, "got t1 = 2 "),
]  # fmt: skip


@pytest.mark.parametrize(("t1", "t2", "error", "message"), BAD, ids=range(len(BAD)))
def test_bad_temperatures(t1, t2, error, message):
    logits, index, y = torch.zeros(2, 3), torch.tensor([0, 1]), torch.zeros(2)
    with pytest.raises(error, match=message):
        bi_tempered_logistic_loss(logits, index, t1, t2)
    with pytest.raises(error, match=message):
        bi_tempered_binary_logistic_loss(y, y, t1, t2)
    with pytest.raises(error, match=message):
        linear_bi_tempered_logistic_loss(logits, torch.eye(3), index, t1, t2)


def test_bad_temperatures_of_softmax_and_modules():
    with pytest.raises(ValueError, match="t must be finite and >= 0, got -1"):
        tempered_softmax(torch.zeros(2, 3), torch.tensor(-1.0))
    with pytest.raises(TypeError, match="t must be a number or a floating-point tensor"):
        log_partition(torch.zeros(2, 3), torch.tensor(1))
    with pytest.raises(ValueError, match=r"\(2,\), got shape \(3,\)"):
        tempered_log_softmax(torch.zeros(2, 3), torch.ones(3))
    for module in (BiTemperedLogisticLoss, BiTemperedBinaryLogisticLoss, LinearBiTemperedLogisticLoss):
        with pytest.raises(ValueError, match=r"got t1 = 1\.5 and t2 = 1\.2"):
            module(torch.tensor(1.5))
        with pytest.raises(TypeError, match=r"got torch\.int64"):
            module(t2=torch.tensor(2))
        with pytest.raises(ValueError, match="t1 must not exceed t2"):
            module(1.5, 1.2)


def test_a_forced_kernel_refuses_tensors_that_are_not_one_number():
    logits, target = make(torch.float32)
    rows = torch.linspace(0.7, 0.8, len(logits))
    for t1, t2 in ((rows, 1.2), (0.8, 1 + rows), (torch.tensor(0.8, requires_grad=True), 1.2)):
        with kernels.use("cpu"), pytest.raises(RuntimeError, match="takes temperatures that are numbers, got a tensor"):
            bi_tempered_logistic_loss(logits, target, t1, t2)
        with kernels.use("core"):
            assert bi_tempered_logistic_loss(logits, target, t1, t2).isfinite()
    with kernels.use("cpu"), pytest.raises(RuntimeError, match="takes temperatures that are numbers"):
        tempered_softmax(logits, 1 + rows)


def test_a_tensor_that_is_one_number_is_that_number_to_the_kernels():
    logits, target = make(torch.float32)
    t1, t2 = torch.tensor(0.75), torch.tensor([1.25])
    for one, other in (
        (bi_tempered_logistic_loss(logits, target, t1, t2), bi_tempered_logistic_loss(logits, target, 0.75, 1.25)),
        (tempered_softmax(logits, t2), tempered_softmax(logits, 1.25)),
    ):
        assert torch.equal(one, other)


class Count:
    """A backend that counts compilations, and whose graphs return 0 at once."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return lambda *_: (torch.zeros(()),)


def schedule(steps=1000):
    return [(1 - 0.8 * i / (steps - 1), 1 + 3 * i / (steps - 1)) for i in range(steps)]


@pytest.mark.parametrize(
    ("what", "of", "most"),
    [
        ("function", torch.tensor, 1),
        ("function", float, 2),
        ("module", torch.tensor, 1),
        ("compiled module", float, 2),
        ("binary", float, 2),
        ("softmax", float, 2),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_a_schedule_compiles_once_with_tensors_and_twice_with_numbers(what, of, most):
    logits, target = make(torch.float32)
    soft, criterion = torch.softmax(logits, 1), BiTemperedLogisticLoss(rescale=True)
    functions = {
        "function": lambda a, t1, t2: bi_tempered_logistic_loss(a, target, t1, t2),
        "binary": lambda a, t1, t2: bi_tempered_binary_logistic_loss(a, soft, t1, t2, rescale=True),
        "softmax": lambda a, t1, t2: tempered_softmax(a, t2).sum(),
        "module": lambda a: criterion(a, target),
        "compiled module": criterion,
    }
    backend = Count()
    torch.compiler.reset()
    compiled = torch.compile(functions[what], fullgraph=True, backend=backend)
    for t1, t2 in schedule(1000 if what == "function" else 20):
        if "module" in what:
            criterion.t1, criterion.t2 = of(t1), of(t2)
            compiled(logits, target) if what == "compiled module" else compiled(logits)
        else:
            compiled(logits, of(t1), of(t2))
    assert backend.graphs == most
    if what == "function":
        compiled(logits, of(1.0), of(1.0))
        assert backend.graphs <= most + (of is float)


def test_a_schedule_inside_a_compiled_function():
    logits, target = make(torch.float32)

    def f(a, step):
        return bi_tempered_logistic_loss(a, target, *schedules.default(5, 8)(step))

    torch.compiler.reset()
    compiled = torch.compile(f, fullgraph=True, backend="eager")
    for step in (0, 1, 2.5, 4, 7, 8):
        torch.testing.assert_close(compiled(logits, step), f(logits, step), rtol=1e-5, atol=1e-6)


# "eager" runs the graphs that Dynamo made of forward and backward, which is what is ours.
@pytest.mark.parametrize(
    ("of", "backend"),
    [
        pytest.param(torch.tensor, "eager", id="tensors"),
        pytest.param(float, "eager", id="numbers"),
        pytest.param(torch.tensor, "aot_eager", id="tensors ahead of time", marks=pytest.mark.slow),
        pytest.param(float, "aot_eager", id="numbers ahead of time", marks=pytest.mark.slow),
    ],
)
def test_compiled_steps_of_a_schedule_are_right(of, backend):
    """Of the binary loss, whose graph is the smallest; tensors have their gradients."""
    logits = make(torch.float32)[0][:, 0]
    target = torch.linspace(0, 1, N)

    def f(a, t1, t2):
        return bi_tempered_binary_logistic_loss(a, target, t1, t2, rescale=True)

    torch.compiler.reset()
    compiled = torch.compile(f, fullgraph=True, backend=backend)
    for t1, t2 in schedule(4)[1:] if of is float else schedule(2):
        first, second = (leaves(logits, torch.tensor(t1), torch.tensor(t2)) for _ in range(2))
        if of is float:
            got, want = compiled(first[0], t1, t2), f(second[0], t1, t2)
            first, second = first[:1], second[:1]
        else:
            got, want = compiled(*first), f(*second)
        torch.testing.assert_close(got, want, rtol=2e-6, atol=1e-6)
        by_compiled, by_eager = torch.autograd.grad(got, first), torch.autograd.grad(want, second)
        torch.testing.assert_close(by_compiled, by_eager, rtol=1e-5, atol=1e-6)
