"""The Triton kernels' arithmetic, run by Triton's interpreter on the CPU, against core in float64.

The interpreter has NumPy's exp2 and log2: what those of a GPU add, tests_gpu/test_triton_cuda.py sees.
"""

import itertools
import os
from dataclasses import replace

import mpmath as mp
import oracle
import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"  # read where a kernel is defined, so before the imports below
from triton.runtime import interpreter

from bitempered import kernels
from bitempered.kernels.options import LossOptions
from bitempered.kernels.triton import losses, scaling, tiles
from bitempered.torch import (
    bi_tempered_logistic_loss,
    linear_bi_tempered_logistic_loss,
    log_partition,
    tempered_log_softmax,
    tempered_softmax,
)

# The interpreter computes with NumPy, which warns of the infinities that the kernels select away.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")

T1 = [0.0, 0.8, 1.3]  # every pair of the paper's is in tests_gpu/test_triton_cuda.py: the interpreter is slow
T2 = [0.0, 0.5, 1 - 1e-6, 1.0, 1 + 1e-6, 1.05, 1.2, 4.0, 100.0]
PAIRS = [(t1, t2) for t1, t2 in itertools.product(T1, T2) if t1 <= t2] + [
    (0.5, 0.5),
    (1.0, 1.0),
    (1.0, 1.2),
    (0.5, 4.0),
    (1.05, 1.05),  # equal and above 1: a loss linear in the logits
    (1.5, 1.5),
]


def make(classes, rows=3):
    """Rows of standard deviation 1, 10 and 100; the first of each labelled with its largest class."""
    generator = torch.Generator().manual_seed(classes)
    scale = torch.tensor([1.0, 10.0, 100.0]).repeat_interleave(rows)
    logits = scale[:, None] * torch.randn(3 * rows, classes, generator=generator)
    target = torch.randint(classes, (3 * rows,), generator=generator)
    target[::rows] = logits.argmax(1)[::rows]
    return logits, target


def run(logits, target, t1, t2, g=None, **options):
    leaf = logits.detach().requires_grad_()
    loss = bi_tempered_logistic_loss(leaf, target, t1, t2, **options)
    return loss.detach(), torch.autograd.grad(loss, leaf, torch.ones_like(loss) if g is None else g)[0]


def exact(logits, target, t1, t2, g=None, **options):
    wide = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    with kernels.use("core"):
        y = target.double() if target.is_floating_point() else target
        return run(logits.double(), y, t1, t2, None if g is None else g.double(), **wide)


def check(logits, target, t1, t2):
    losses, gradient = run(logits, target, t1, t2, reduction="none")
    want, want_gradient = exact(logits, target, t1, t2, reduction="none")
    assert ((losses - want).abs() / want.clamp_min(1)).max() <= 1e-6
    # core in float64 has an error of its own, which the gradient of a confident row comes down to.
    error = (gradient - want_gradient).norm(dim=1)
    assert (error <= 5e-6 * want_gradient.norm(dim=1) + 1e-14).all()


@pytest.mark.usefixtures("by_triton")
@pytest.mark.parametrize(("t1", "t2"), PAIRS)
def test_loss_and_gradient_of_short_rows(t1, t2):
    check(*make(10), t1, t2)


# Above t2 = 2 s u overflows, e^(-s m) underflows, or both; at 4 and 20 with t1 = 1 or 0 a root serves.
@pytest.mark.filterwarnings("ignore:overflow encountered in reduce")
@pytest.mark.usefixtures("by_triton")
@pytest.mark.parametrize(("t1", "t2"), [(0.8, 1.5), (0.8, 2.5), (0.0, 4.0), (1.0, 20.0), (0.5, 100.0)])
@pytest.mark.parametrize("large", [1e35, 3e38])
def test_logits_as_large_as_float32_has(t1, t2, large):
    logits = torch.tensor([[large, 0.0, 0.0, 0.0], [0.0, -1.0, -(large**0.5), -large], [-large, -torch.inf, 0.0, 0.0]])
    target = torch.tensor([1, 3, 0])
    check(logits, target, t1, t2)
    check(logits, torch.tensor([[0.25, 0.25, 0.5, 0.0], [0.0, 0.25, 0.25, 0.5], [1.0, 0.0, 0.0, 0.0]]), t1, t2)
    with kernels.use("core"):
        want = tempered_log_softmax(logits.double(), t2)
    torch.testing.assert_close(tempered_log_softmax(logits, t2).double(), want, rtol=1e-6, atol=3e-7)
    torch.testing.assert_close(tempered_softmax(logits, t2).double(), want.exp(), rtol=1e-5, atol=3e-7)


@pytest.mark.filterwarnings("ignore:overflow encountered in reduce")
@pytest.mark.usefixtures("by_triton", "chunks")
@pytest.mark.parametrize("t2", [2.5, 20.0])
def test_large_logits_in_rows_in_chunks(t2):
    logits, target = make(150)
    logits[:3] *= 1e35
    logits[3:5] *= 1e36
    logits[0, 100] = 3e38
    check(logits, target, 0.8, t2)


@pytest.mark.usefixtures("by_triton", "chunks")
@pytest.mark.parametrize(("t1", "t2"), [(0.5, 0.8), (0.2, 1.0), (0.9, 1.05), (0.8, 1.2), (1.3, 1.3)])
def test_loss_and_gradient_of_rows_in_chunks(t1, t2):
    logits, target = make(300)
    logits[4, 100:250] = -torch.inf  # masked where the sample is taken
    logits[5, 299], logits[8, 7] = 500.0, 3000.0  # far above what the sample shows
    target[4] = 7
    check(logits, target, t1, t2)


@pytest.mark.usefixtures("by_triton", "chunks")
def test_two_classes_above_the_sample_share_the_mass():
    """Then powers of their probabilities cancel to a thirtieth."""
    generator = torch.Generator().manual_seed(0)
    logits = 0.3 * torch.randn(48, 256, generator=generator) - 40
    logits[:, 130] = 0.0  # the largest where the sample is taken
    logits[:, 5] = torch.linspace(3.0, 8.0, 48)
    logits[:, 6] = logits[:, 5] - 2.2
    check(logits, torch.full((48,), 200), 0.8, 1.0)


def check_digits(logits, label, t1, t2, tolerance=1e-5):
    """Of one row, against mpmath: in float64 core has lost the gradient of a class with nearly all of the mass."""
    _, gradient = run(logits, torch.tensor([label]), t1, t2)
    y = [float(i == label) for i in range(logits.shape[1])]
    _, want = oracle.loss_and_gradient(logits[0].tolist(), y, t1, t2)
    norm = mp.sqrt(mp.fsum(x**2 for x in want))
    assert norm > 0
    error = mp.sqrt(mp.fsum((mp.mpf(a) - b) ** 2 for a, b in zip(gradient[0].tolist(), want, strict=True)))
    assert error <= tolerance * norm


@pytest.mark.usefixtures("by_triton")
@pytest.mark.parametrize(("t1", "t2"), [(0.8, 1.2), (0.5, 1.05), (0.5, 4.0)])
def test_small_gradients_keep_their_digits(t1, t2):
    for label in (0, 1, 3):
        check_digits(torch.tensor([[60.0, 20.0, 0.0, -3.0]]), label, t1, t2)


@pytest.mark.usefixtures("by_triton", "chunks")
@pytest.mark.parametrize(("t1", "t2", "top"), [(0.8, 1.2, 30.0), (0.5, 1.05, 12.0), (0.5, 4.0, 4e4), (0.5, 1.0, 9.0)])
def test_one_class_of_a_long_row_has_nearly_all_of_the_mass(t1, t2, top):
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(1))
    logits[0, 77] = top
    for label in (77, 3):
        check_digits(logits, label, t1, t2)


# The label, and one other class just inside the support.
NEAR_THE_EDGE = [(0.5, 0.5, 1.9966), (0.5, 0.8, 4.65), (0.5, 0.9, 7.2)]


@pytest.mark.usefixtures("by_triton", "chunks")
@pytest.mark.parametrize(("t1", "t2", "gap"), NEAR_THE_EDGE)
def test_the_label_of_a_long_row_has_all_but_the_edge(t1, t2, gap):
    logits = torch.full((1, 300), -50.0)
    logits[0, 7], logits[0, 290] = 0.0, -gap
    check_digits(logits, 7, t1, t2, 2e-5)


@pytest.mark.usefixtures("by_triton")
@pytest.mark.parametrize(("t1", "t2", "gap"), NEAR_THE_EDGE)
def test_the_label_of_a_short_row_has_all_but_the_edge(t1, t2, gap):
    check_digits(torch.tensor([[0.0, -gap, -50.0]]), 0, t1, t2, 2e-5)


@pytest.mark.usefixtures("by_triton")
@pytest.mark.parametrize("kind", ["indices", "smoothed", "probabilities"])
@pytest.mark.parametrize(
    ("shape", "reduction", "t1", "t2"),
    [
        ((5, 10), "mean", 0.8, 1.2),
        ((7,), "sum", 1.0, 1.0),
        ((2, 5, 3, 2), "none", 0.5, 0.8),
        ((2, 70, 3), "mean", 1.3, 1.7),
    ],
    ids=str,
)
def test_every_option_and_shape(monkeypatch, kind, shape, reduction, t1, t2):
    monkeypatch.setattr(scaling, "_SMALL_GRADIENT", 0)  # backward by its kernel, too
    generator = torch.Generator().manual_seed(0)
    axis = min(1, len(shape) - 1)
    logits = 3 * torch.randn(shape, generator=generator)
    weight = torch.rand(shape[axis], generator=generator) + 0.5
    if kind == "probabilities":
        target = torch.softmax(torch.randn(shape, generator=generator), axis)
    else:
        target = torch.randint(shape[axis], shape[:axis] + shape[axis + 1 :], generator=generator)
        if target.dim():
            target.view(-1)[1] = -100
    options = {"weight": weight, "reduction": reduction, "label_smoothing": 0.1 if kind == "smoothed" else 0.0}
    rows = shape[:axis] + shape[axis + 1 :]
    g = torch.rand(rows if reduction == "none" else (), generator=generator)
    loss, gradient = run(logits, target, t1, t2, g, **options)
    want, want_gradient = exact(logits, target, t1, t2, g, **options)
    torch.testing.assert_close(loss.double(), want, rtol=2e-6, atol=2e-6)
    assert (gradient - want_gradient).norm() <= 5e-6 * want_gradient.norm()


@pytest.mark.usefixtures("by_triton")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_strided_rows_and_half_precision(dtype):
    logits, target = make(10, rows=1)
    wide = torch.cat((logits, torch.full((3, 6), torch.nan)), 1).to(dtype)[:, :10]
    losses, gradient = run(wide, target, 0.8, 1.2, reduction="none")
    want, want_gradient = exact(wide, target, 0.8, 1.2, reduction="none")
    assert losses.dtype == gradient.dtype == dtype
    eps = torch.finfo(dtype).eps  # a whole one: the interpreter truncates
    torch.testing.assert_close(losses.double(), want, rtol=eps, atol=1e-6)
    torch.testing.assert_close(gradient.double(), want_gradient, rtol=eps, atol=1e-6)


@pytest.mark.usefixtures("by_triton")
def test_classes_that_are_more_than_two_to_the_31_numbers_away(monkeypatch, tmp_path):
    tile = {"ROWS": 4, "COLUMNS": 32, "VECTOR": 1, "SINGLE": False, "num_warps": 4}
    monkeypatch.setattr(tiles, "choose_tile", lambda *_: tile)
    classes, stride = 40, 2**26
    path = tmp_path / "far"
    path.touch()
    os.truncate(path, 2 * classes * stride)  # takes no room but for what is written
    far = torch.from_file(str(path), shared=True, size=classes * stride, dtype=torch.bfloat16)
    far = far.as_strided((4, classes), (1, stride))
    far.copy_(torch.randn(4, classes, generator=torch.Generator().manual_seed(0)))
    logits, target = far.clone(), torch.tensor([39, 3, 33, 35])
    losses.chunk_loss(far, target, None, LossOptions(t1=0.8, t2=1.0, axis=1, reduction="sum"), with_gradient=True)
    _, want = exact(logits, target, 0.8, 1.0, reduction="sum")
    assert (far - want).norm() <= 1e-2 * want.norm()


@pytest.mark.usefixtures("by_triton")
@pytest.mark.parametrize("bad", [[torch.inf, 0.0], [0.0, torch.inf], [torch.nan, 0.0], [-torch.inf, -torch.inf]])
@pytest.mark.parametrize("t2", [0.5, 1.0, 1.2])
def test_what_has_no_answer_is_nan_and_stays_in_its_row(bad, t2):
    logits, target = torch.tensor([bad, [1.0, 2.0]]), torch.tensor([1, 1])
    for y in (target, torch.nn.functional.one_hot(target).float()):
        losses, gradient = run(logits, y, 0.5, t2, reduction="none")
        assert losses.isnan().tolist() == [True, False]
        assert gradient[0].isnan().all()
        assert gradient[1].isfinite().all()


@pytest.mark.usefixtures("by_triton")
@pytest.mark.parametrize(("t", "gap"), [(0.0, 1.0), (0.5, 2.0)])  # gaps of 1 / (1 - t)
def test_at_the_edge_of_the_support(t, gap):
    logits, target = torch.tensor([[gap, 0.0]]), torch.tensor([1])
    _, gradient = run(logits, target, t, t)
    torch.testing.assert_close(gradient.double(), exact(logits, target, t, t)[1], rtol=0, atol=1e-6)


@pytest.mark.usefixtures("by_triton")
@pytest.mark.parametrize(("t1", "t2"), [(1.0, 1.0), (0.8, 1.0), (1.05, 1.05), (1.3, 1.37)])
@pytest.mark.parametrize("masked", [-torch.inf, -6e4])
@pytest.mark.parametrize(("dtype", "weight", "g"), [(torch.float32, 512.0, 1.0), (torch.float16, 1.0, 1024.0)])
def test_masked_classes_have_no_gradient_under_a_large_factor(t1, t2, masked, dtype, weight, g):
    logits, target = torch.tensor([[9.0, 0.0, masked, 1.0, 2.0]], dtype=dtype), torch.tensor([1])
    options = {"weight": torch.full((5,), weight), "reduction": "sum"}
    _, gradient = run(logits, target, t1, t2, torch.tensor(g, dtype=dtype), **options)
    _, want = exact(logits, target, t1, t2, torch.tensor(g), **options)
    if masked == -torch.inf:
        assert gradient[0, 2] == 0
    assert (gradient - want).norm() <= (1e-5 if dtype == torch.float32 else 1e-3) * want.norm()


@pytest.mark.usefixtures("by_triton")
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_mean_of_nothing_has_no_gradient(smoothing):
    logits, _ = make(10)
    weight = torch.ones(10)
    weight[2] = 0
    for target, options in ((torch.full((9,), -100), {}), (torch.full((9,), 2), {"weight": weight})):
        loss, gradient = run(logits, target, 0.8, 1.2, label_smoothing=smoothing, **options)
        assert loss.isnan()
        assert torch.equal(gradient, torch.zeros(9, 10))


@pytest.mark.usefixtures("by_triton")
@pytest.mark.parametrize("odd", [torch.nan, torch.inf])
def test_odd_weights_of_classes_that_no_target_has(odd):
    logits, target = make(10)
    target[target == 3] = 4
    logits[1, 3] = 1000.0
    weight = torch.ones(10)
    want = run(logits, target, 0.8, 1.2, weight=weight)
    weight[3] = odd
    got = run(logits, target, 0.8, 1.2, weight=weight)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


@pytest.mark.usefixtures("by_triton")
def test_weights_of_zero_ignored_rows_and_empty_batches():
    logits, target = make(10, rows=1)
    logits[0, 0] = torch.nan  # and yet 0
    losses, gradient = run(logits, torch.full_like(target, -100), 0.8, 1.2, reduction="none")
    assert losses.eq(0).all()
    assert gradient.eq(0).all()
    losses, gradient = run(logits, target, 0.8, 1.2, reduction="none", weight=torch.zeros(10))
    assert losses.eq(0).all()
    assert gradient.eq(0).all()
    for reduction, want in (("mean", torch.nan), ("sum", 0.0)):
        loss = bi_tempered_logistic_loss(logits[:0], target[:0], 0.8, 1.2, reduction=reduction)
        torch.testing.assert_close(loss, torch.tensor(want), equal_nan=True)


@pytest.mark.usefixtures("by_triton")
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("by_each", "by_one"), [(4096, 65536), (8, 65536), (8, 8)])
def test_a_mean_counts_its_targets_in_each_of_three_ways(monkeypatch, by_each, by_one, weighted):
    monkeypatch.setattr(losses, "_COUNTED_BY_EACH", by_each)
    monkeypatch.setattr(losses, "_COUNTED_BY_ONE", by_one)
    logits = torch.randn(20, 6, generator=torch.Generator().manual_seed(2))
    target = torch.arange(20) % 6
    target[[3, 7, 19]] = 4
    weight = torch.tensor([0.0, 1.0, 2.0, 0.5, 3.0, 1.5]) if weighted else None
    for ignored in (4, -100):
        loss, gradient = run(logits, target, 0.8, 1.2, weight=weight, ignore_index=ignored)
        want, want_gradient = exact(logits, target, 0.8, 1.2, weight=weight, ignore_index=ignored)
        torch.testing.assert_close(loss.double(), want, rtol=1e-6, atol=0)
        torch.testing.assert_close(gradient.double(), want_gradient, rtol=0, atol=1e-7)


@pytest.mark.usefixtures("by_triton")
@pytest.mark.parametrize("function", [tempered_softmax, tempered_log_softmax, log_partition])
@pytest.mark.parametrize(("shape", "dim", "t"), [((4, 10), 1, 0.5), ((2, 5, 3), 1, 1.2), ((3, 2), 0, 1.0)])
def test_softmax(function, shape, dim, t):
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
    wide = logits.detach().double().requires_grad_()
    out = function(logits, t, dim)
    with kernels.use("core"):
        want = function(wide, t, dim)
    torch.testing.assert_close(out.double(), want, rtol=2e-6, atol=2e-6)
    g = torch.rand(out.shape, generator=torch.Generator().manual_seed(1))
    (gradient,) = torch.autograd.grad(out, logits, g)
    (want_gradient,) = torch.autograd.grad(want, wide, g.double())
    # next to the edge of a support the slope of log p, and so the error, has no bound
    torch.testing.assert_close(gradient.double(), want_gradient, rtol=2e-5, atol=2e-6)


@pytest.mark.usefixtures("by_triton")
def test_backward_again_second_derivatives_and_batches_of_cotangents():
    logits, target = make(10, rows=1)
    leaf = logits.clone().requires_grad_()
    loss = bi_tempered_logistic_loss(leaf, target, 0.8, 1.2)
    loss.backward(retain_graph=True)
    once = leaf.grad.clone()
    loss.backward(retain_graph=True)  # adds to what may be the very tensor that the first backward gave away
    (3 * loss).backward(retain_graph=True)
    torch.testing.assert_close(leaf.grad, 5 * once)
    (batched,) = torch.autograd.grad(loss, leaf, torch.tensor([1.0, 2.0]), is_grads_batched=True, retain_graph=True)
    torch.testing.assert_close(batched, torch.stack((once, 2 * once)), rtol=1e-5, atol=1e-8)

    def second(x):
        values = bi_tempered_logistic_loss(x, target, 0.8, 1.2) + tempered_softmax(x, 1.2).square().sum()
        (first,) = torch.autograd.grad(values, x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    with kernels.use("core"):
        want = second(logits.double().requires_grad_())
    torch.testing.assert_close(second(leaf).double(), want, rtol=1e-4, atol=1e-7)


@pytest.mark.usefixtures("by_triton")
def test_compile_calls_the_kernel():
    logits, target = make(10, rows=1)
    operators = []

    def backend(graph, inputs):
        operators.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    def f(x):
        return bi_tempered_logistic_loss(2 * x, target, 0.8, 1.2, reduction="none").sum()

    leaf = logits.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(torch.compile(f, fullgraph=True, backend=backend)(leaf), leaf)
    assert "bitempered.loss.default" in operators
    torch.testing.assert_close(gradient, torch.autograd.grad(f(leaf), leaf)[0])


@pytest.fixture
def asserting(monkeypatch):
    """The interpreter also skips asserts, except in debug mode, which the launch of a compiled kernel asks for."""
    builder = interpreter.interpreter_builder
    monkeypatch.setattr(builder, "options", replace(builder.options, debug=True, sanitize_overflow=False))


@pytest.mark.usefixtures("by_triton", "asserting")
@pytest.mark.parametrize("target", [[0, 3], [0, -1]])
def test_an_index_out_of_range_asserts(target):
    with pytest.raises(Exception, match="target must hold class indices or ignore_index"):
        bi_tempered_logistic_loss(torch.zeros(2, 3), torch.tensor(target), 0.8, 1.2)


@pytest.mark.usefixtures("by_triton", "asserting")
@pytest.mark.parametrize("target", [[0.5, 0.6], [1.5, -0.5]])
def test_probabilities_that_are_none_assert(target):
    with pytest.raises(Exception, match="target must hold probabilities"):
        bi_tempered_logistic_loss(torch.zeros(1, 2), torch.tensor([target]), 0.8, 1.2)


def test_what_is_forced_and_cannot_be_done_raises():
    logits, target = make(10)
    with kernels.use("triton"), pytest.raises(RuntimeError, match="it needs logits on a CUDA device, got cpu"):
        bi_tempered_logistic_loss(logits, target, 0.8, 1.2)
    with kernels.use("triton"), pytest.raises(RuntimeError, match="it needs logits on a CUDA device, got cpu"):
        tempered_softmax(logits, 1.2)
    with kernels.use("triton"), pytest.raises(RuntimeError, match="it needs logits on a CUDA device, got cpu"):
        linear_bi_tempered_logistic_loss(logits, logits, target, 0.8, 1.2)
    with pytest.raises(ValueError, match="unknown kernel 'cuda': choose from core, triton, cpu"), kernels.use("cuda"):
        pass
    with kernels.use("core"):
        assert kernels.choose(logits, target) == "core"


@pytest.mark.usefixtures("by_triton")
def test_layouts_whose_positions_cannot_be_merged():
    logits = torch.randn(2, 5, 3, 4, generator=torch.Generator().manual_seed(0)).transpose(2, 3)
    target = torch.arange(24).view(2, 4, 3) % 5
    loss, gradient = run(logits, target, 0.8, 1.2)
    want, want_gradient = exact(logits, target, 0.8, 1.2)
    torch.testing.assert_close(loss.double(), want, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient.double(), want_gradient, rtol=1e-5, atol=1e-8)
    leaf = torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(1)).transpose(0, 1).requires_grad_()
    g = torch.arange(30.0).view(2, 3, 5)
    (gradient,) = torch.autograd.grad(tempered_softmax(leaf, 1.2), leaf, g)
    wide = leaf.detach().double().requires_grad_()
    with kernels.use("core"):
        (want_gradient,) = torch.autograd.grad(tempered_softmax(wide, 1.2), wide, g.double())
    torch.testing.assert_close(gradient.double(), want_gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("by_triton")
def test_a_loss_scale_reaches_float16_before_it_rounds():
    """A mean over 80 rows of 64 classes at (0.5, 4): gradients below the smallest of float16, until they are scaled."""
    logits = torch.randn(80, 64, generator=torch.Generator().manual_seed(0)).half()
    target = torch.arange(80) % 64
    g = torch.tensor(2.0**15)
    _, gradient = run(logits, target, 0.5, 4.0, g.half())
    _, want = exact(logits, target, 0.5, 4.0, g)
    assert (want / g).abs().max() < 2.0**-24
    assert (gradient.double() - want).norm() <= 1e-3 * want.norm()
