"""The loss of a linear layer by the Triton kernels, run by Triton's interpreter on the CPU, against core in float64."""

import itertools
import os
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

os.environ["TRITON_INTERPRET"] = "1"  # read where a kernel is defined, so before the imports below

from bitempered import kernels
from bitempered.kernels.options import LossOptions
from bitempered.kernels.triton import scaling
from bitempered.torch import bi_tempered_logistic_loss, device_linear, linear_bi_tempered_logistic_loss
from bitempered.torch.layer_inputs import Inputs, LayerOptions

# The interpreter computes with NumPy, which warns of the infinities that the kernels select away.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")


@pytest.fixture
def few(monkeypatch):
    """Chunks of at most 3 rows, or of 128 classes."""
    monkeypatch.setattr(device_linear, "rows_per_chunk", lambda *_: 3)
    monkeypatch.setattr(device_linear, "block_size", lambda *_: 128)


@pytest.fixture(params=[False, True])
def keep(monkeypatch, request):
    """Whether the logits of as many rows as there are features are kept, or of none."""
    monkeypatch.setattr(device_linear, "_LEAST_CLASSES", 0 if request.param else 2**30)
    return request.param


def make_layer(classes, bias=True, features=3):
    """Rows of every kind: the first confident, rightly and wrongly, the last two ignored and of a class of weight 0."""
    generator = torch.Generator().manual_seed(classes)
    hidden = torch.randn(8, features, generator=generator)
    weight = 2 * torch.randn(classes, features, generator=generator)
    hidden[:2] *= 30
    layer = [hidden, weight] + [torch.randn(classes, generator=generator)] * bias
    target = torch.arange(8) * (classes - 1) // 7  # in every chunk
    target[0], target[6] = torch.nn.functional.linear(*layer)[0].argmax(), -100
    class_weight = torch.rand(classes, generator=generator) + 0.5
    class_weight[target[7]] = 0
    return layer, target, class_weight


def run_layer(layer, target, t1, t2, g=None, needs=(True, True, True), **options):
    leaves = [x.detach().requires_grad_(need) for x, need in zip(layer, needs, strict=False)]
    loss = linear_bi_tempered_logistic_loss(*leaves[:2], target, t1, t2, bias=(*leaves, None)[2], **options)
    needed = [x for x in leaves if x.requires_grad]
    return loss.detach(), torch.autograd.grad(loss, needed, torch.ones_like(loss) if g is None else g)


def exact_layer(layer, target, t1, t2, g=None, class_weight=None, **options):
    wide = [x.double().requires_grad_() for x in layer]
    weight = None if class_weight is None else class_weight.double()
    with kernels.use("core"):
        logits = torch.nn.functional.linear(*wide)
        loss = bi_tempered_logistic_loss(logits, target, t1, t2, weight=weight, **options)
    return loss.detach(), torch.autograd.grad(loss, wide, torch.ones_like(loss) if g is None else g.double())


def check_layer(got, want):
    torch.testing.assert_close(got[0].double(), want[0], rtol=2e-6, atol=2e-6)
    for gradient, exactly in zip(got[1], want[1], strict=True):
        assert (gradient - exactly).norm() <= 1e-5 * exactly.norm()


@pytest.mark.usefixtures("by_triton", "chunks", "few", "keep")
@pytest.mark.parametrize(
    ("t1", "t2", "reduction", "bias"),
    [
        (0.8, 1.2, "mean", True),
        (0.5, 4.0, "none", False),
        (1.0, 1.0, "sum", True),
        (0.5, 0.5, "mean", False),
        (0.2, 1.0, "none", True),
    ],
)
def test_linear_layer(t1, t2, reduction, bias):
    layer, target, class_weight = make_layer(300, bias)
    options = {"class_weight": class_weight, "reduction": reduction}
    g = torch.rand(8 if reduction == "none" else (), generator=torch.Generator().manual_seed(1))
    got = run_layer(layer, target, t1, t2, g, **options)
    check_layer(got, exact_layer(layer, target, t1, t2, g, **options))
    with torch.no_grad():
        alone = linear_bi_tempered_logistic_loss(*layer[:2], target, t1, t2, bias=(*layer, None)[2], **options)
    torch.testing.assert_close(alone, got[0])
    loss, gradients = run_layer(layer, torch.full_like(target, -100), t1, t2, **options)
    torch.testing.assert_close(loss, torch.full_like(loss, torch.nan if reduction == "mean" else 0.0), equal_nan=True)
    assert all(x.eq(0).all() for x in gradients)


@pytest.fixture
def seen(monkeypatch):
    """The shapes of the logits whose loss was computed: those in blocks have three axes."""
    triton, shapes = device_linear.implementation("triton"), []

    class Spy:
        def __getattr__(self, name):
            return getattr(triton, name)

        def chunk_loss(self, logits, *arguments, **options):
            shapes.append(tuple(logits.shape))
            return triton.chunk_loss(logits, *arguments, **options)

    monkeypatch.setattr(device_linear, "implementation", lambda _: Spy())
    return shapes


@pytest.mark.usefixtures("by_triton", "few", "keep")
@pytest.mark.parametrize("keep", [True], indirect=True)
@pytest.mark.parametrize(
    ("features", "classes", "options"),
    [
        (5, 300, {"reduction": "mean", "rescale": True}),  # more rows than features: some are not kept
        (8, 256, {"reduction": "none", "ignore_index": 3}),  # as many; blocks without a remainder
        (11, 301, {"reduction": "sum"}),  # fewer; rows that are not multiples of a vector
        (5, 100, {"reduction": "none"}),  # one block, wider than its classes
    ],
)
@pytest.mark.parametrize("in_memory", [False, True])
def test_rows_kept_in_blocks_of_classes(features, classes, options, in_memory, seen):
    layer, target, class_weight = make_layer(classes, features=features)
    t1, t2, g = 0.8, 1.2, torch.rand(8, generator=torch.Generator().manual_seed(1))
    if in_memory:
        t1, t2 = torch.linspace(0.2, 1.0, 8), torch.linspace(1.0, 2.5, 8)
    g = g if options["reduction"] == "none" else g[0]
    options = {"class_weight": class_weight, "ignore_index": -100, **options}
    target[6] = options["ignore_index"]
    got = run_layer(layer, target, t1, t2, g, **options)
    kept = min(8, features)  # a loss per row is computed twice, for "none" without gradients first
    assert seen[-1 - (kept < 8) :] == [(8 - kept, classes)] * (kept < 8) + [(-(-classes // 128), kept, 128)]
    check_layer(got, exact_layer(layer, target, t1, t2, g, **options))
    weight_gradient = got[1][1]
    assert weight_gradient.is_contiguous()
    assert weight_gradient.untyped_storage().nbytes() < 4 * features * (classes + 128)  # less than a block more


@pytest.mark.usefixtures("by_triton", "chunks", "few", "keep")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_in_half_precision(dtype):
    layer, target, _ = make_layer(300, features=5)
    layer = [x.to(dtype) for x in layer]
    loss, gradients = run_layer(layer, target, 0.8, 1.2)
    want, exactly = exact_layer(layer, target, 0.8, 1.2)
    # Each is rounded: the logits, their gradient, and the product.
    half_ulp = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(loss.double(), want, rtol=4 * half_ulp, atol=0)
    for got, right in zip(gradients, exactly, strict=True):
        assert got.dtype == dtype
        assert (got - right).norm() <= 2 * half_ulp * right.norm()


def test_a_sum_over_blocks_is_rounded_once():
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randn(40, 6, 16, generator=generator).bfloat16()
    weight = torch.randn(40 * 16 - 5, 7, generator=generator).bfloat16()
    out = torch.empty(6, 7, dtype=torch.bfloat16)
    device_linear._sum_products(blocks, weight, 4, out)
    want = sum(a[:, : len(b)].double() @ b.double() for a, b in zip(blocks, weight.split(16), strict=True)) / 4
    assert ((out - want).abs() <= 1.01 * 2**-8 * want.abs()).all()  # half a unit, and little in float32


class PeakMemory(TorchDispatchMode):
    """The most bytes that storages made inside take at once. Works on the device "meta", where they take none."""

    def __init__(self, *inputs):
        super().__init__()
        self.users, self.now, self.peak = {x.untyped_storage()._cdata: {0} for x in inputs}, 0, 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        made = function(*arguments, **(options or {}))
        for x in made if isinstance(made, (tuple, list)) else [made]:
            storage = x.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in self.users:
                self.users[key] = set()
                self.now += size
                self.peak = max(self.peak, self.now)
            if self.users[key] != {0} and id(x) not in self.users[key]:
                self.users[key].add(id(x))
                weakref.finalize(x, self.release, key, id(x), size)
        return made

    def release(self, key, user, size):
        self.users[key].remove(user)
        if not self.users[key]:
            del self.users[key]
            self.now -= size


class WithoutKernels:
    def chunk_loss(self, logits, target, *_, state, **options):
        assert state is None or state.shape == (8, len(target))
        return torch.empty((), device=logits.device)

    def class_gradients_(self, logits, target, state, options, *, first):
        assert state.shape == (8, len(target))
        assert len(logits) == len(target)


def peak_of_the_benchmark(monkeypatch):
    monkeypatch.setattr(device_linear, "implementation", lambda _: WithoutKernels())
    hidden = torch.empty(8192, 4096, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(128256, 4096, dtype=torch.bfloat16, device="meta")
    target = torch.empty(8192, dtype=torch.int64, device="meta")
    inputs = Inputs(hidden, weight, None, None, None, target)
    options = LayerOptions(LossOptions(0.8, 1.2, 1), None, None)
    with PeakMemory(hidden, weight, target) as memory:
        _, gradients = device_linear.device_chunks(inputs, options, needs=(True, True, False, False, False))
    assert [x.shape for x in gradients[:2]] == [hidden.shape, weight.shape]
    return memory.peak


def test_peak_memory_is_below_that_of_liger(monkeypatch, keep):
    # 8,192 rows of 4,096 features and 128,256 classes in bfloat16, on an H200 (benchmarks/gpu.jsonl, 2026).
    liger, chunks_of_4096 = 1_183_490_048, 1_185_155_584
    assert peak_of_the_benchmark(monkeypatch) < liger
    if not keep:  # the count is right: the same with chunks of 4,096 classes, as then measured
        monkeypatch.setattr(device_linear, "block_size", lambda *_: 4096)
        assert peak_of_the_benchmark(monkeypatch) == pytest.approx(chunks_of_4096, abs=2**16)


@pytest.mark.usefixtures("by_triton", "few", "keep")
def test_linear_layer_that_needs_only_some_gradients():
    layer, target, _ = make_layer(20)
    loss, gradients = exact_layer(layer, target, 0.8, 1.2)
    for needs in itertools.product([False, True], repeat=3):
        if any(needs):
            kept = [x for x, need in zip(gradients, needs, strict=True) if need]
            check_layer(run_layer(layer, target, 0.8, 1.2, needs=needs), (loss, kept))
    columns = layer[1].t().contiguous().t()  # a weight that is the transpose of another
    check_layer(run_layer([layer[0], columns, layer[2]], target, 0.8, 1.2), (loss, gradients))


@pytest.mark.usefixtures("by_triton", "few", "keep")
def test_linear_layer_shared_weight_and_backward_again(monkeypatch):
    monkeypatch.setattr(scaling, "_SMALL_GRADIENT", 0)  # backward by its kernel, too
    (_, weight), target, _ = make_layer(20, bias=False)

    def gradients(x, loss_of):
        loss = loss_of(torch.nn.functional.embedding(torch.arange(8), x), x)
        (first,) = torch.autograd.grad(loss, x, retain_graph=True)
        return first, torch.autograd.grad(3 * loss, x)[0]

    got = gradients(
        weight.clone().requires_grad_(), lambda h, w: linear_bi_tempered_logistic_loss(h, w, target, 0.8, 1.2)
    )
    with kernels.use("core"):
        want = gradients(
            weight.double().requires_grad_(), lambda h, w: bi_tempered_logistic_loss(h @ w.t(), target, 0.8, 1.2)
        )
    for x, y in zip(got, want, strict=True):
        assert (x - y).norm() <= 1e-5 * y.norm()


@pytest.mark.usefixtures("by_triton", "chunks", "few")
@pytest.mark.parametrize(("t1", "t2"), [(0.8, 1.2), (0.5, 4.0), (1.0, 1.0), (0.5, 0.8), (0.2, 1.0)])
@pytest.mark.parametrize("to", [-torch.inf, torch.inf])
def test_a_logit_computed_again_may_be_its_neighbour(monkeypatch, t1, t2, to):
    # The hidden layer is the identity: then the weight's gradient is that of the logits, which are the weight.
    logits = 2 * torch.randn(8, 300, generator=torch.Generator().manual_seed(0))
    logits[0, 7], logits[1, 200] = 60.0, 60.0  # confident, rightly and wrongly
    logits[2, [5, 150]] = 60.0  # two classes with half of the mass each, one of them the label
    logits[3, 5], logits[3, 150] = 12.0, 11.9375  # neighbours
    logits[4] *= 10
    logits[5] = 9984.0  # where neighbours are 64 away
    target = torch.tensor([7, 3, 5, 5, 9, 299, 128, 255])
    layer = [torch.eye(8).bfloat16(), logits.t().bfloat16()]
    linear_layer, changed = device_linear._linear, []

    def neighbours(hidden, weight, bias, buffer):
        out = linear_layer(hidden, weight, bias, buffer)
        if len(weight) < 300:
            moved = torch.nextafter(out, torch.full_like(out, to))
            changed.append((moved != out).all())
            out.copy_(moved)
        return out

    monkeypatch.setattr(device_linear, "_linear", neighbours)
    _, (_, by_weight) = run_layer(layer, target, t1, t2, reduction="sum")
    _, (_, want) = exact_layer(layer, target, t1, t2, reduction="sum")
    assert changed == [True, True, True]
    # Rounding to bfloat16 where one class has the mass. Elsewhere a logit of size 16 (60) has neighbours 0.06 (0.25)
    # away, and so much moves a gradient of r or r^2. Core has an error of its own, too.
    allowed = torch.tensor([1e-2, 1e-2, 0.3, 0.3, 0.3, torch.inf if to < 0 else 1e-2, 0.3, 0.3])
    assert ((by_weight - want).norm(dim=0) <= allowed * want.norm(dim=0) + 1e-14).all()


@pytest.mark.usefixtures("by_triton")
def test_a_mean_in_float16_does_not_vanish():
    # A gradient of 1e-5 / 64 in the logits would be rounded to a multiple of 6e-8.
    layer = [torch.ones(64, 1).half(), torch.tensor([[0.0], [0.0], [-11.0], [-11.5]]).half()]
    target = torch.arange(64) % 2
    _, (_, by_weight) = run_layer(layer, target, 1.0, 1.0)
    _, (_, want) = exact_layer(layer, target, 1.0, 1.0)
    torch.testing.assert_close(by_weight[2:].double(), want[2:], rtol=2e-2, atol=0)


@pytest.mark.usefixtures("by_triton", "few")
@pytest.mark.parametrize("options", [{"label_smoothing": 0.1}, {"softcap": 2.0}])
def test_linear_layer_with_other_options(options):
    layer, target, _ = make_layer(20)
    with kernels.use("core"):
        want = run_layer([x.double() for x in layer], target, 0.8, 1.2, **options)
    check_layer(run_layer(layer, target, 0.8, 1.2, **options), want)
