"""Derivatives: of both orders, in every mode, through every transform, and what backward keeps in memory."""

import math
from itertools import product

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

from bitempered.torch import (
    BiTemperedLogisticLoss,
    bi_tempered_binary_logistic_loss,
    bi_tempered_logistic_loss,
    exp_t,
    log_partition,
    log_t,
    tempered_log_softmax,
    tempered_sigmoid,
    tempered_softmax,
)

# Where two exact ways to a derivative are compared in float64, tolerances allow each some tens of roundings (1e-13),
# and a hundred times that for second derivatives, whose terms cancel.
PAIRS = [(0.0, 0.0), (0.5, 0.5), (0.5, 0.8), (0.2, 1.0), (1.0, 1.0), (0.8, 1.2), (0.5, 4.0), (1.3, 1.6)]
T = [0.0, 0.5, 1 - 1e-6, 1.0, 1 + 1e-6, 1.2, 4.0]


def make(rows=3, classes=5, scale=1.0, seed=0):
    """Logits whose finite supports (t < 1) have no edge within the finite differences' reach: gaps are generic."""
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(rows, classes, generator=generator, dtype=torch.float64)
    return logits.requires_grad_(), torch.randint(classes, (rows,), generator=generator)


@pytest.mark.parametrize(("t1", "t2"), PAIRS)
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"weight": torch.arange(1.0, 6).double()}], ids=str)
def test_loss(t1, t2, options):
    logits, target = make()

    def f(x):
        return bi_tempered_logistic_loss(x, target, t1, t2, reduction="none", **options)

    assert gradcheck(f, logits, check_forward_ad=True)
    assert gradgradcheck(f, logits, check_fwd_over_rev=True)


@pytest.mark.parametrize(("t1", "t2"), PAIRS)
def test_binary_loss(t1, t2):
    logits = torch.tensor([-1.3, -0.2, 0.4, 0.7], dtype=torch.float64, requires_grad=True)
    target = torch.tensor([0.0, 1.0, 0.3, 0.0], dtype=torch.float64)
    pos_weight = torch.tensor(2.0, dtype=torch.float64)

    def f(x):
        return bi_tempered_binary_logistic_loss(x, target, t1, t2, pos_weight=pos_weight, reduction="none")

    assert gradcheck(f, logits, check_forward_ad=True)
    assert gradgradcheck(f, logits, check_fwd_over_rev=True)


@pytest.mark.parametrize("t", T)
@pytest.mark.parametrize("function", [tempered_softmax, log_partition])
def test_softmax(function, t):
    logits, _ = make()
    assert gradcheck(lambda x: function(x, t), logits, check_forward_ad=True)
    assert gradgradcheck(lambda x: function(x, t), logits, check_fwd_over_rev=True)


@pytest.mark.parametrize("t", T)
def test_log_softmax(t):
    logits, _ = make(scale=0.1)  # small enough for a full support at t = 0.5 and above
    inside = tempered_log_softmax(logits, t).detach() > -torch.inf
    assert inside.all() or t == 0.0

    def f(x):
        return tempered_log_softmax(x, t)[inside]

    assert gradcheck(f, logits, check_forward_ad=True)
    assert gradgradcheck(f, logits, check_fwd_over_rev=True)


@pytest.mark.parametrize("t", T)
def test_scalar_functions(t):
    x = torch.tensor([0.2, 0.9, 1.0, 1.7], dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x: log_t(x, t), x, check_forward_ad=True)
    assert gradgradcheck(lambda x: log_t(x, t), x)
    z = torch.tensor([-0.8, -0.1, 0.0, 0.25], dtype=torch.float64, requires_grad=True)
    for function in (exp_t, tempered_sigmoid):
        assert gradcheck(lambda z, function=function: function(z, t), z, check_forward_ad=True)
        assert gradgradcheck(lambda z, function=function: function(z, t), z)


@pytest.mark.parametrize(("t", "slope"), [(0.0, 1.0), (0.5, torch.inf)])
def test_log_t_has_its_slope_at_zero(t, slope):
    x = torch.zeros((), requires_grad=True)
    value = log_t(x, t)
    assert value.item() == pytest.approx(-1 / (1 - t))
    assert torch.autograd.grad(value, x)[0] == slope


@pytest.mark.parametrize("t", [0.0, 0.5, 1.0, 1.5])
def test_log_t_has_its_slope_far_from_one(t):
    for dtype, rtol in ((torch.float32, 1e-6), (torch.float64, 1e-13)):
        x = torch.tensor([1e-12, 1e-6, 1e-3, 0.3, 3.0, 1e6, torch.inf], dtype=dtype, requires_grad=True)
        (slope,) = torch.autograd.grad(log_t(x, t).sum(), x)
        torch.testing.assert_close(slope, x.detach() ** -t, rtol=rtol, atol=0.0)


def test_scalar_functions_compile():
    def f(x):
        return log_t(x, 0.5) + exp_t(x, 1.2)

    x = torch.tensor([1e-6, 0.5, 3.0])
    assert torch.equal(torch.compile(f, backend="eager", fullgraph=True)(x), f(x))


@pytest.mark.parametrize("t", [1.5, 2.0, 10.0])
def test_exp_t_rises_infinitely_where_it_is_infinite(t):
    x = torch.tensor([1 / (t - 1), 5.0, 1e30], requires_grad=True)
    value = exp_t(x, t)
    assert (value == torch.inf).all()
    assert (torch.autograd.grad(value.sum(), x)[0] == torch.inf).all()


@pytest.mark.parametrize(("t1", "t2"), [(0.5, 0.8), (1.0, 1.0), (0.8, 1.2), (1.3, 1.6)])
@pytest.mark.parametrize("weight", [None, torch.arange(1.0, 6).double()], ids=["plain", "weighted"])
def test_gradient_in_probability_targets(t1, t2, weight):
    # Not projected to the simplex: the check moves each probability alone, within the tolerance on the sum.
    logits, _ = make(scale=0.2)
    target = torch.softmax(torch.randn(3, 5, generator=torch.Generator().manual_seed(1)).double(), 1).requires_grad_()

    def f(x, y):
        return bi_tempered_logistic_loss(x, y, t1, t2, weight=weight, label_smoothing=0.1)

    assert gradcheck(f, (logits, target), check_forward_ad=True)
    assert gradgradcheck(f, (logits, target))


def test_gradient_in_binary_targets():
    logits = torch.tensor([-1.3, 0.4], dtype=torch.float64, requires_grad=True)
    target = torch.tensor([0.2, 0.6], dtype=torch.float64, requires_grad=True)
    pos_weight = torch.tensor(2.0, dtype=torch.float64)
    assert gradcheck(
        lambda x, y: bi_tempered_binary_logistic_loss(x, y, 0.8, 1.2, pos_weight=pos_weight),
        (logits, target),
        check_forward_ad=True,
    )


@pytest.mark.parametrize(("t1", "t2"), PAIRS)
def test_ties_in_the_maximum(t1, t2):
    logits = torch.zeros(2, 4, dtype=torch.float64, requires_grad=True)  # a zero-initialised head
    target = torch.tensor([0, 3])
    assert gradcheck(lambda x: bi_tempered_logistic_loss(x, target, t1, t2), logits, check_forward_ad=True)
    assert gradgradcheck(lambda x: bi_tempered_logistic_loss(x, target, t1, t2), logits)


@pytest.mark.parametrize(("t1", "t2"), PAIRS)
def test_function_transforms(t1, t2):
    logits, target = make(rows=4)
    logits = logits.detach()

    def one(a, y):
        return bi_tempered_logistic_loss(a, y, t1, t2)

    leaf = logits.clone().requires_grad_()
    (expected,) = torch.autograd.grad(bi_tempered_logistic_loss(leaf, target, t1, t2, reduction="sum"), leaf)
    torch.testing.assert_close(vmap(grad(one))(logits, target), expected, rtol=1e-13, atol=1e-14)

    weight = torch.tensor([1.0, 0.5, 2.0, 0.0, 3.0], dtype=torch.float64)
    options = {"weight": weight, "ignore_index": int(target[0]), "label_smoothing": 0.1}
    each = [
        torch.autograd.grad(bi_tempered_logistic_loss(a, y, t1, t2, **options), a)[0]
        for a, y in zip([row.clone().requires_grad_() for row in logits], target, strict=True)
    ]
    of_mean = vmap(grad(lambda a, y: bi_tempered_logistic_loss(a, y, t1, t2, **options)))(logits, target)
    torch.testing.assert_close(of_mean, torch.stack(each), rtol=1e-13, atol=1e-14)

    tangent = torch.randn(4, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    _, directional = jvp(lambda a: vmap(one)(a, target), (logits,), (tangent,))
    torch.testing.assert_close(directional, (expected * tangent).sum(1), rtol=1e-12, atol=1e-13)

    curvature = hessian(one)(logits[0], target[0])
    assert curvature.shape == (5, 5)
    torch.testing.assert_close(curvature, curvature.T, rtol=1e-10, atol=1e-12)
    twice = jacrev(jacrev(one))(logits[0], target[0])
    torch.testing.assert_close(curvature, twice, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(vmap(hessian(one))(logits, target)[0], curvature, rtol=1e-12, atol=1e-13)
    forward = jacfwd(lambda a: tempered_softmax(a, t2))(logits)
    reverse = jacrev(lambda a: tempered_softmax(a, t2))(logits)
    torch.testing.assert_close(forward, reverse, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("t1", "t2"), [(1.0, 1.0), (1.0, 1.2), (1.5, 1.5), (0.8, 1.2), (0.0, 1.0)])
def test_zeros_of_a_target_that_nothing_changes_do_no_harm(t1, t2):
    """The gradient there is infinite for t1 >= 1, and 0 times it counts as 0. The same holds for second derivatives."""
    a, share = torch.tensor([1.0, 0.5, -3.0], dtype=torch.float64), torch.tensor(0.3, dtype=torch.float64)
    weight, temperatures = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64), (t1, torch.tensor(t1))

    def mixed(s, t1, weight):
        return bi_tempered_logistic_loss(a, torch.stack((s, 1 - s, 0 * s)), t1, t2, weight=weight)

    def gradient(s, *options):
        s = s.detach().requires_grad_()
        return s, *torch.autograd.grad(mixed(s, *options), s, create_graph=True)

    for options in product(temperatures, (None, weight)):
        slope = (mixed(share + 1e-6, *options) - mixed(share - 1e-6, *options)) / 2e-6
        s, first = gradient(share, *options)
        torch.testing.assert_close(first.detach(), slope, rtol=1e-7, atol=0)
        bent = (gradient(share + 1e-6, *options)[1] - gradient(share - 1e-6, *options)[1]) / 2e-6
        torch.testing.assert_close(torch.autograd.grad(first, s)[0], bent.detach(), rtol=1e-7, atol=0)


@pytest.mark.parametrize("t2", [0.8, 1.0, 1.2])
def test_second_derivatives_where_a_zero_of_a_target_moves(t2):
    """At t1 = 0, where they are finite. Above, the slope of log_t1 at 0 is infinite, and so must be the result."""
    a = torch.tensor([1.0, 0.5, -3.0], dtype=torch.float64)

    def first(s, t1):
        target = torch.stack((0.7 + 0 * s, 0.3 - s, s))
        return torch.autograd.grad(bi_tempered_logistic_loss(a, target, t1, t2), s, create_graph=True)[0]

    zero, step = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (0.0, 1e-6))
    (second,) = torch.autograd.grad(first(zero, 0.0), zero)
    torch.testing.assert_close(second, ((first(step, 0.0) - first(zero, 0.0)) / step).detach(), rtol=1e-6, atol=0)
    assert torch.autograd.grad(first(zero, 0.5), zero)[0] > 1e29
    for t1 in (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (0.0, 0.5)):
        (by_t1,) = torch.autograd.grad(first(zero, t1), t1)
        target = torch.stack((0.7 + 0 * zero, 0.3 - zero, zero))
        slope = torch.autograd.grad(bi_tempered_logistic_loss(a, target, t1, t2), t1, create_graph=True)
        torch.testing.assert_close(torch.autograd.grad(*slope, zero)[0], by_t1)


@pytest.mark.parametrize("t1", [0.8, 1.0, 1.3])
def test_mixed_derivatives_with_a_masked_class_in_either_order(t1):
    a = torch.tensor([1.0, 0.5, -math.inf], dtype=torch.float64, requires_grad=True)
    share = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    loss = bi_tempered_logistic_loss(a, torch.stack((share, 1 - share, 0 * share)), t1, 1.5)
    (by_share,) = torch.autograd.grad(loss, share, create_graph=True)
    (by_logits,) = torch.autograd.grad(loss, a, create_graph=True)
    mixed = [torch.autograd.grad(one, share, retain_graph=True)[0] for one in by_logits]
    torch.testing.assert_close(torch.autograd.grad(by_share, a)[0], torch.stack(mixed))
    assert mixed[0] < -0.5


def test_what_forward_mode_cannot_do_raises():
    """Where torch would return zeros in silence."""
    logits, target = make(rows=1)
    logits, target = logits.detach()[0], target[0]
    for f in (lambda a: bi_tempered_logistic_loss(a, target, 0.8, 1.2), lambda a: tempered_softmax(a, 1.2)):
        with pytest.raises(RuntimeError, match="forward mode over forward mode is not supported"):
            jacfwd(jacfwd(f))(logits)
    weight = torch.ones(5, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="no derivative in its class weights"):
        jacfwd(lambda w: bi_tempered_logistic_loss(logits, target, 0.8, 1.2, weight=w))(weight)


@pytest.mark.parametrize("function", [log_t, exp_t])
def test_a_compiled_function_takes_other_temperatures(function):
    torch.compiler.reset()
    compiled = torch.compile(lambda x, t: function(x, t), fullgraph=True, backend="eager")
    for t in (0.5, 0.7, 1.5, 1.0, 2.0):
        got, want = (torch.linspace(0.1, 0.4, 4, dtype=torch.float64).requires_grad_() for _ in range(2))
        values = compiled(got, t), function(want, t)
        torch.testing.assert_close(*values, rtol=1e-12, atol=0)
        slopes = [torch.autograd.grad(value.sum(), x)[0] for value, x in zip(values, (got, want), strict=True)]
        torch.testing.assert_close(*slopes, rtol=1e-12, atol=0)
    for t in (-0.5, math.nan, math.inf):
        with pytest.raises(ValueError, match="t must be a finite number >= 0"):
            function(got, t)


@pytest.mark.parametrize(("t1", "t2"), [(0.5, 0.8), (1.0, 1.0), (0.8, 1.2)])
@pytest.mark.parametrize("kind", ["indices", "probabilities", "binary"])
def test_compile_fullgraph(t1, t2, kind):
    logits, target = make(rows=4)
    soft = torch.softmax(logits.detach() ** 2, 1)
    weight = torch.arange(1.0, 6).double()

    def f(x):
        if kind == "binary":
            return bi_tempered_binary_logistic_loss(x, soft, t1, t2, pos_weight=weight)
        y = target if kind == "indices" else soft
        return bi_tempered_logistic_loss(x, y, t1, t2, weight=weight, label_smoothing=0.1)

    torch.compiler.reset()
    # The graph and its backward are what is ours; inductor's code is made once, in the next test.
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    leaf = logits.detach().clone().requires_grad_()
    value = compiled(leaf)
    torch.testing.assert_close(value, f(logits), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(
        torch.autograd.grad(value, leaf)[0], torch.autograd.grad(f(logits), logits)[0], rtol=1e-12, atol=1e-13
    )


def test_compile_a_training_step_with_the_module():
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 5)
    criterion = BiTemperedLogisticLoss(0.8, 1.2)
    x, y = torch.randn(16, 8), torch.randint(5, (16,))

    def step(x, y):
        return criterion(model(x), y)

    torch.compiler.reset()
    eager = torch.autograd.grad(step(x, y), list(model.parameters()))
    compiled = torch.autograd.grad(torch.compile(step, fullgraph=True)(x, y), list(model.parameters()))
    for a, b in zip(compiled, eager, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)  # float32, another order of operations


@pytest.mark.parametrize("t", [0.5, 1.0, 1.2])
def test_export(t):
    class Classifier(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(8, 5)

        def forward(self, x):
            return tempered_softmax(self.linear(x), t)

    torch.manual_seed(0)
    model = Classifier().eval()
    x = torch.randn(6, 8)
    batch = torch.export.Dim("batch")
    program = torch.export.export(model, (x,), dynamic_shapes=({0: batch},))
    wider = torch.randn(9, 8)
    torch.testing.assert_close(program.module()(wider), model(wider), rtol=1e-6, atol=1e-7)


def saved_bytes(f, ignoring):
    """Bytes of the distinct storages that autograd keeps for backward, besides those of the tensors in `ignoring`."""
    known = {x.untyped_storage().data_ptr() for x in ignoring}
    kept = {}

    def pack(x):
        if x.untyped_storage().data_ptr() not in known:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = f()
    assert out.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["indices", "probabilities"])
def test_backward_keeps_per_row_scalars(dtype, kind):
    rows, classes = 64, 1000
    logits = torch.randn(rows, classes, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    target = torch.arange(rows) if kind == "indices" else torch.softmax(logits.detach().double(), 1)
    kept = saved_bytes(lambda: bi_tempered_logistic_loss(logits, target, 0.8, 1.2), [logits, target])
    assert kept <= 4 * rows * 8  # m and a few scalars: far below one tensor of the logits' shape
    softmax = saved_bytes(lambda: tempered_log_softmax(logits, 1.2), [logits])
    assert softmax <= rows * classes * max(4, logits.element_size())  # its own output, in the dtype it computes in


def test_binary_backward_keeps_one_number_per_logit():
    logits = torch.randn(4096, generator=torch.Generator().manual_seed(0), requires_grad=True)
    target = torch.rand(4096, generator=torch.Generator().manual_seed(1))
    kept = saved_bytes(lambda: bi_tempered_binary_logistic_loss(logits, target, 0.8, 1.2), [logits, target])
    assert kept <= 4096 * 4 + 64


@pytest.mark.parametrize(("t", "gap"), [(0.0, 1.0), (0.5, 2.0), (0.75, 4.0)])  # gaps of 1 / (1 - t)
def test_at_the_edge_of_the_support_the_derivative_is_the_one_from_inside(t, gap):
    """Exactly at the edge p is 0, and the gradient is the limit of those a little inside; outside it is 0."""

    def gradient(distance):
        logits = torch.tensor([gap, distance], dtype=torch.float64, requires_grad=True)
        loss = bi_tempered_logistic_loss(logits, torch.tensor(1), t, t)
        return tempered_softmax(logits, t)[1].item(), torch.autograd.grad(loss, logits)[0]

    p_inside, inside = gradient(1e-9)
    p_edge, edge = gradient(0.0)
    p_outside, outside = gradient(-1e-9)
    assert p_inside > 0
    assert p_edge == p_outside == 0
    assert torch.equal(outside, torch.zeros(2, dtype=torch.float64))
    # p^t, which the derivative moves with, is (1e-9)^(t / (1 - t)): 1e-9 at t = 0.5, less above.
    torch.testing.assert_close(edge, inside, rtol=1e-7, atol=1e-8)


def test_a_target_outside_the_support_gets_no_gradient():
    """t1 = t2 < 1: a target outside the finite support gets no gradient, probabilities outside are exactly 0."""
    logits = torch.tensor([10.0, 0.0, 9.9], dtype=torch.float64, requires_grad=True)
    p = tempered_softmax(logits, 0.5)
    assert p[1] == 0
    assert tempered_log_softmax(logits, 0.5)[1] == -torch.inf
    loss = bi_tempered_logistic_loss(logits, torch.tensor(1), 0.5, 0.5)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert gradient[1] == 0
    assert torch.isfinite(loss)
    assert torch.isfinite(gradient).all()
