"""The CPU kernel for every dtype, memory layout and kind of target, against core in float64."""

import functools
import itertools
import math

import mpmath as mp
import oracle
import pytest
import torch
from cpu_kernel_cases import FEW_PAIRS, exact, make, run

from bitempered import kernels
from bitempered.torch import (
    bi_tempered_binary_logistic_loss,
    bi_tempered_logistic_loss,
    log_partition,
    tempered_sigmoid,
    tempered_softmax,
)

HALVES = [torch.bfloat16, torch.float16]
PAIRS = [*FEW_PAIRS, (0.5, 1.0), (1.0, 4.0), (1.4, 1.5), (1 - 1e-6, 1 + 1e-6), (1.9, 2.0)]


def soft_target(logits, seed=1):
    """Per row: a one-hot target, a mixture of two classes, a spread one, or one near what is predicted."""
    generator = torch.Generator().manual_seed(seed)
    rows, classes = logits.shape
    target = torch.softmax(3 * torch.randn(rows, classes, generator=generator), 1)
    target[::4] = torch.nn.functional.one_hot(torch.randint(classes, (len(target[::4]),), generator=generator), classes)
    target[1::4] = 0.0
    target[1::4, 0] = 0.7
    target[1::4, -1] += 0.3
    target[2::4] = torch.softmax(logits[2::4].nan_to_num(neginf=-40), 1)
    return target / target.sum(1, keepdim=True)


def assert_same_in_float64(got, want):
    """What float64 rounding may do to numbers that are summed and cancelled in two orders."""
    torch.testing.assert_close(got[0], want[0], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(got[1], want[1], rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("soft", [False, True], ids=["indices", "probabilities"])
@pytest.mark.parametrize("std", [0.1, 3.0, 50.0])
def test_float64(soft, std):
    for classes in (2, 7, 600):
        logits, target = make(17, classes, std, seed=classes)
        logits = logits.double() + 1e-9 * torch.randn(
            17, classes, dtype=torch.float64
        )  # what float32 has no digits for
        target = soft_target(logits).double() if soft else target
        for t1, t2 in PAIRS:
            options = {"reduction": "none", "label_smoothing": 0.1 if t1 == 0.8 else 0.0}
            assert_same_in_float64(run(logits, target, t1, t2, **options), exact(logits, target, t1, t2, **options))


def test_float64_beyond_the_range_of_float32():
    logits = torch.tensor([[1e200, -1e200, 0.0], [1e39, 0.0, 1e38], [0.0, -math.inf, -1e300]], dtype=torch.float64)
    for (t1, t2), label in itertools.product([(0.8, 1.2), (0.5, 4.0), (0.0, 0.5), (1.0, 1.0)], range(3)):
        target = torch.full((3,), label)
        got = run(logits, target, t1, t2, reduction="none")
        assert_same_in_float64(got, exact(logits, target, t1, t2, reduction="none"))


def test_gradients_are_those_of_finite_differences():
    logits, target = make(5, 6, 2.0)
    logits, soft = logits.double(), soft_target(logits).double()
    image, labels = logits.view(1, 2, 3, 5).movedim(-1, 1).requires_grad_(), target.new_tensor([[[0, 1, 2], [2, 4, 0]]])
    with kernels.use("cpu"):
        for t1, t2 in ((0.8, 1.2), (0.3, 0.9), (1.0, 1.0), (0.5, 4.0), (1.2, 1.3)):
            for y, smoothing in ((target, 0.0), (target, 0.2), (soft, 0.0), (soft, 0.2)):
                torch.autograd.gradcheck(
                    lambda x, y=y, e=smoothing, t1=t1, t2=t2: bi_tempered_logistic_loss(
                        x, y, t1, t2, label_smoothing=e
                    ),
                    logits.clone().requires_grad_(),
                )
            torch.autograd.gradcheck(lambda x, t1=t1, t2=t2: bi_tempered_logistic_loss(x, labels, t1, t2), image)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("soft", [False, True], ids=["indices", "probabilities"])
def test_half_precision_is_float32_rounded_once(dtype, soft):
    for classes, (t1, t2) in itertools.product((3, 10, 600), [(0.8, 1.2), (0.5, 0.8), (1.0, 1.0)]):
        logits, target = make(33, classes, 3.0)
        logits[5, 1], logits[6] = -math.inf, 0.0
        logits = logits.to(dtype)
        target = soft_target(logits.float()).to(dtype) if soft else target
        loss, gradient = run(logits, target, t1, t2, reduction="none")
        want_loss, want = run(logits.float(), target, t1, t2, reduction="none")
        assert loss.dtype == gradient.dtype == dtype
        assert torch.equal(loss, want_loss.to(dtype))
        assert torch.equal(gradient, want.to(dtype))


def test_float16_gradients_survive_a_loss_scale():
    logits, target = make(4096, 4, 2.0)
    logits = logits.half()
    _, gradient = run(logits, target, 0.8, 1.2, torch.tensor(2.0**14))
    _, want = exact(logits, target, 0.8, 1.2, torch.tensor(2.0**14))
    torch.testing.assert_close(gradient.double(), want, rtol=1e-3, atol=1e-7)


def test_every_half_precision_number_is_read_and_written():
    """All 65,536 of each: subnormal, infinite and NaN too. A gradient times g is as good as any number to write."""
    for dtype in HALVES:
        numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
        finite = numbers[numbers.abs() < math.inf]
        logits = torch.stack((finite, torch.zeros_like(finite)), 1)
        target = torch.zeros(len(finite), dtype=torch.long)
        got = run(logits, target, 1.0, 1.0, reduction="none")
        want = run(logits.float(), target, 1.0, 1.0, reduction="none")
        assert torch.equal(got[0], want[0].to(dtype))
        assert torch.equal(got[1], want[1].to(dtype))
        bad = torch.stack((numbers, torch.zeros_like(numbers)), 1)[~(numbers < math.inf)]
        assert run(bad, torch.zeros(len(bad), dtype=torch.long), 0.8, 1.2, reduction="none")[0].isnan().all()


def layouts(x):
    """The same numbers in every order of memory: as is, classes last, positions first, with holes, and repeated."""
    yield x.contiguous()
    yield x.movedim(1, -1).contiguous().movedim(-1, 1)
    yield x.transpose(0, -1).contiguous().transpose(0, -1)
    yield torch.stack((x, x), -1)[..., 0]
    yield torch.cat((x, x), 1)[:, : x.shape[1]]
    yield torch.cat((x, x), 2)[:, :, : x.shape[2]]


@pytest.mark.parametrize("shape", [(2, 3, 5), (3, 5, 4, 5), (2, 7, 33), (1, 600, 3), (2, 2, 3, 2, 2)], ids=str)
@pytest.mark.parametrize("soft", [False, True], ids=["indices", "probabilities"])
def test_every_layout(shape, soft):
    n, classes = math.prod(shape) // shape[1], shape[1]
    rows, labels = make(n, classes, 3.0)
    positions = (shape[0], *shape[2:])
    labels[1] = -100
    logits = rows.view(*positions, classes).movedim(-1, 1)
    target = soft_target(rows).view(*positions, classes).movedim(-1, 1) if soft else labels.view(positions)
    for t1, t2 in ((0.8, 1.2), (0.4, 0.7), (1.0, 1.0)):
        for reduction in ("none", "mean"):
            want = exact(logits, target, t1, t2, reduction=reduction)
            for x, y in zip(layouts(logits), layouts(target) if soft else itertools.repeat(target), strict=False):
                for dtype in (torch.float32, torch.float64):
                    loss, gradient = run(x.to(dtype), y, t1, t2, reduction=reduction)
                    assert gradient.shape == shape
                    torch.testing.assert_close(loss.double(), want[0], rtol=2e-6, atol=2e-6)
                    torch.testing.assert_close(gradient.double(), want[1], rtol=1e-5, atol=3e-7)


def test_logits_of_one_example_and_one_class():
    for shape in ((5,), (1,), (3, 1), (2, 1, 4), (0, 5, 3), (2, 5, 0)):
        axis = min(1, len(shape) - 1)
        logits = torch.linspace(-1, 1, math.prod(shape)).view(shape)
        target = torch.zeros(shape[:axis] + shape[axis + 1 :], dtype=torch.long)
        soft = torch.softmax(logits, axis)
        for y, reduction in itertools.product((target, soft), ("none", "sum", "mean")):
            got, want = (f(logits, y, 0.8, 1.2, reduction=reduction) for f in (run, exact))
            torch.testing.assert_close(got[0].double(), want[0], rtol=2e-6, atol=2e-6, equal_nan=True)
            torch.testing.assert_close(got[1].double(), want[1], rtol=1e-5, atol=3e-7)


@pytest.mark.parametrize(("t1", "t2"), PAIRS)
def test_probabilities(t1, t2):
    for classes, std in itertools.product((2, 5, 600), (0.1, 3.0, 30.0)):
        logits, _ = make(19, classes, std)
        target = soft_target(logits)
        generator = torch.Generator().manual_seed(1)
        for weight, smoothing in ((None, 0.0), (torch.rand(classes, generator=generator), 0.0), (None, 0.2)):
            options = {"weight": weight, "label_smoothing": smoothing}
            for reduction in ("none", "mean"):
                got = run(logits, target, t1, t2, reduction=reduction, **options)
                want = exact(logits, target.double(), t1, t2, reduction=reduction, **options)
                # t1 near 2 weighs a class by up to its probability to the power -1, which magnifies all rounding.
                scale = want[0].abs().clamp_min(1).max().item()
                torch.testing.assert_close(got[0].double(), want[0], rtol=3e-6, atol=2e-6)
                torch.testing.assert_close(got[1].double(), want[1], rtol=1e-5, atol=3e-7 * scale)


def test_a_target_that_is_met_has_no_loss():
    """A loss near 0 is a small number, not a difference of large ones."""
    logits, _ = make(16, 1000, 2.0)
    logits = logits.double()
    for t1, t2 in ((0.8, 1.2), (1.0, 1.0), (0.5, 4.0), (1.3, 1.6)):
        target = tempered_softmax(logits, t2)
        assert run(logits, target, t1, t2, reduction="none")[0].max() < 1e-25
        loss, gradient = run(logits.float(), target.float(), t1, t2, reduction="none")
        assert loss.max() < 1e-10
        assert gradient.abs().max() < 1e-6


def test_one_hot_probabilities_are_class_indices():
    for classes, (t1, t2) in itertools.product((4, 600), FEW_PAIRS):
        logits, labels = make(20, classes, 3.0)
        target = torch.nn.functional.one_hot(labels, classes)
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            got = run(logits, target.to(dtype), t1, t2, reduction="none")
            want = exact(logits, labels, t1, t2, reduction="none")
            torch.testing.assert_close(got[0].double(), want[0], rtol=3e-6, atol=2e-6)
            torch.testing.assert_close(got[1].double(), want[1], rtol=1e-5, atol=3e-7)


@pytest.mark.parametrize(("t1", "t2"), FEW_PAIRS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_masked_classes_with_probabilities(t1, t2, dtype):
    inf, nan = math.inf, math.nan
    logits = torch.tensor(
        [
            [1.0, -inf, 0.5, 2.0],  # a masked class with and without a share of the target
            [1.0, -inf, 0.5, 2.0],
            [-inf, -inf, 3.0, -inf],
            [inf, 0.0, 0.0, 0.0],
            [nan, 0.0, 1.0, 2.0],
            [-inf, -inf, -inf, -inf],
            [200.0, 0.0, -200.0, 100.0],  # probabilities that underflow in float32
        ],
        dtype=dtype,
    )
    target = torch.tensor([[0.5, 0.25, 0.25, 0.0], [0.5, 0.0, 0.5, 0.0]]).repeat(4, 1)[:7].to(dtype)
    for a, y in ((logits, target), (torch.cat((logits, torch.full((7, 600), -inf)), 1),
                                    torch.cat((target, torch.zeros(7, 600)), 1))):  # fmt: skip
        got, want = run(a, y, t1, t2, reduction="none"), exact(a, y, t1, t2, reduction="none")
        torch.testing.assert_close(got[0].double(), want[0], rtol=2e-6, atol=2e-6, equal_nan=True)
        finite = want[0].isfinite()
        torch.testing.assert_close(got[1].double()[finite], want[1][finite], rtol=1e-5, atol=3e-7)
        assert got[1][want[0].isnan()].isnan().all()


@pytest.mark.parametrize("bad", [[0.5, 0.6], [-0.1, 1.1], [math.nan, 1.0], [0.2, 0.2]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_bad_probabilities_raise(bad, dtype):
    for classes in (2, 600):
        logits = torch.zeros(40, classes, dtype=dtype).requires_grad_()
        target = torch.full((40, classes), 1 / classes, dtype=dtype)
        bi_tempered_logistic_loss(logits, target, 0.8, 1.2)
        target[33] = 0
        target[33, :2] = torch.tensor(bad)
        with (
            kernels.use("cpu"),
            pytest.raises(ValueError, match=r"target must hold probabilities in \[0, 1\] that sum"),
        ):
            bi_tempered_logistic_loss(logits, target, 0.8, 1.2)


@pytest.mark.parametrize("shape", [(2000, 10), (60, 1000), (2, 7, 40, 50)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_threads_change_nothing(shape, dtype):
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    targets = torch.softmax(logits.float().flip(0), 1), logits.flip(0).argmax(1)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append([x for y in targets for x in run(logits, y, 0.8, 1.2)])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(map(torch.equal, other, results[0]))


@pytest.mark.parametrize("face", ["segmentation", "probabilities", "bfloat16", "float64", "float16"])
def test_the_gradient_is_what_is_kept_and_nothing_more(face):
    logits, target = torch.randn(512, 1000), torch.randint(1000, (512,))
    if face == "segmentation":
        logits, target = torch.randn(2, 19, 128, 128), torch.randint(19, (2, 128, 128))
    elif face == "probabilities":
        target = torch.softmax(torch.randn(512, 1000), 1)
    else:
        logits = logits.to(getattr(torch, face))
    leaf = logits.requires_grad_()
    with kernels.use("cpu"), torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:  # fmt: skip
        bi_tempered_logistic_loss(leaf, target, 0.8, 1.2).backward()
    held = itertools.accumulate(event.nbytes() for event in profile.profiler.kineto_results.events() if event.nbytes())
    assert max(held) <= 1.05 * leaf.nbytes


def test_second_derivatives_and_later_backwards():
    logits, _ = make(6, 5)
    target = soft_target(logits)
    image, image_target = (x.view(1, 2, 3, 5).movedim(-1, 1) for x in (logits, target))
    for x, y in ((logits, target), (image, image_target)):
        leaf = x.clone().requires_grad_()
        loss = bi_tempered_logistic_loss(leaf, y, 0.8, 1.2, reduction="none")
        g = torch.rand(loss.shape)
        first = torch.autograd.grad(loss, leaf, g, retain_graph=True)[0].clone()
        again = torch.autograd.grad(loss, leaf, g, retain_graph=True)[0]
        torch.testing.assert_close(first, again, rtol=1e-6, atol=1e-8)
        (graph,) = torch.autograd.grad(loss, leaf, g, create_graph=True)
        torch.testing.assert_close(graph, first, rtol=1e-5, atol=1e-7)
        wide = x.double().requires_grad_()
        with kernels.use("core"):
            want = bi_tempered_logistic_loss(wide, y.double(), 0.8, 1.2, reduction="none")
        (want,) = torch.autograd.grad(want, wide, g.double(), create_graph=True)
        (second,), (wanted,) = (torch.autograd.grad(z.square().sum(), v) for z, v in ((graph, leaf), (want, wide)))
        torch.testing.assert_close(second.double(), wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_the_default_device_may_be_another(reduction):
    """Results lie where the logits do: the kernel would write to addresses of the default device."""
    logits, target = make(5, 6, 2.0)
    losses = [
        lambda x: bi_tempered_logistic_loss(x, target, 0.8, 1.2, reduction=reduction),
        lambda x: bi_tempered_binary_logistic_loss(x, logits > 0, 0.8, 1.2, reduction=reduction),
        lambda x: tempered_softmax(x, 1.2),
        lambda x: log_partition(x, 1.2),
        lambda x: tempered_sigmoid(x, 1.2),
    ]
    for loss in losses:
        results = []
        for device in ("cpu", "meta"):
            leaf = logits.clone().requires_grad_()
            with torch.device(device), kernels.use("cpu"):
                value = loss(leaf)
                results.append((value, *torch.autograd.grad(value.sum(), leaf)))
        assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_the_losses_of_rows_are_contiguous():
    """As cross_entropy's are, in dimensions of size 1 too, whatever the strides of the target."""
    target = torch.randint(5, (1, 7, 1), generator=torch.Generator().manual_seed(0)).transpose(1, 2)
    logits = torch.zeros(1, 5, 1, 7)
    with kernels.use("cpu"):
        made = bi_tempered_logistic_loss(logits, target, 0.8, 1.2, reduction="none")
    assert made.stride() == torch.nn.functional.cross_entropy(logits, target, reduction="none").stride()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("upstream", [math.inf, math.nan])
def test_ignored_rows_have_no_gradient_whatever_comes_from_above(upstream, smoothing):
    logits = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    target, g = torch.tensor([0, -100, 1]), torch.tensor([1.0, upstream, 1.0])
    with kernels.use("cpu"):
        losses = bi_tempered_logistic_loss(logits, target, 0.8, 1.2, label_smoothing=smoothing, reduction="none")
    first, second = (torch.autograd.grad(losses, logits, g, retain_graph=True)[0] for _ in range(2))
    torch.testing.assert_close(first, second)
    assert first[1].tolist() == [0, 0, 0, 0]
    assert first[::2].isfinite().all()
    assert (first[::2] != 0).all()


def test_a_loss_of_nothing_times_itself_has_no_gradient():
    logits, ignored = torch.zeros(2, 3, requires_grad=True), torch.tensor([-100, -100])
    for function in (functools.partial(bi_tempered_logistic_loss, t1=0.8, t2=1.2), torch.nn.functional.cross_entropy):
        loss = function(logits, ignored)
        assert loss.isnan()
        assert torch.autograd.grad(loss * loss.detach(), logits)[0].tolist() == [[0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_weights_and_gradients_stored_with_the_other_sign(dtype):
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=dtype, requires_grad=True)
    target, weight = torch.tensor([0, 1, 2, 0]), torch.tensor([1.0, 2.0, 3.0], dtype=dtype)
    g = torch.tensor(2.0, dtype=dtype)
    turned = [torch._neg_view(-x) for x in (weight, g)]
    assert all(x.is_neg() for x in turned)
    gradients = []
    for given, upstream in ((weight, g), turned):
        with kernels.use("cpu"):
            loss = bi_tempered_logistic_loss(logits, target, 0.8, 1.2, weight=given)
            binary = bi_tempered_binary_logistic_loss(logits, logits.detach().sigmoid(), 0.8, 1.2, pos_weight=given)
            whole = tempered_softmax(logits, 1.2).square().sum()
        for value in (loss, binary, whole):
            gradients.append([torch.autograd.grad(value, logits, upstream, retain_graph=True)[0] for _ in range(2)])
    for plain, other in zip(gradients[:3], gradients[3:], strict=True):
        torch.testing.assert_close(plain, other)


@pytest.mark.parametrize(("t", "large"), [(1.5, 1e305), (1.9, 2e304), (1.5, 5e307)])
def test_float64_up_to_its_largest_numbers_at_equal_temperatures(t, large):
    logits = torch.tensor([[0.0, large]], dtype=torch.float64)
    with kernels.use("cpu"):
        loss = bi_tempered_logistic_loss(logits, torch.tensor([0]), t, t)
    with mp.workdps(340):
        want, _ = oracle.loss_and_gradient([0.0, large], [1, 0], t, t)
    assert loss.item() == pytest.approx(float(want), rel=1e-12)


@pytest.mark.parametrize("tiny", [5e-324, 1e-310, 3e-308])
def test_the_smallest_probabilities_of_float64(tiny):
    """Near t1 = 2 even these count."""
    target = torch.tensor([[tiny, 1.0]], dtype=torch.float64)
    with kernels.use("cpu"):
        loss = bi_tempered_logistic_loss(torch.tensor([[0.0, 1.0]], dtype=torch.float64), target, 1.999, 2.0)
    want, _ = oracle.loss_and_gradient([0.0, 1.0], [mp.mpf(tiny), 1], 1.999, 2.0)
    assert loss.item() == pytest.approx(float(want), rel=1e-11)
