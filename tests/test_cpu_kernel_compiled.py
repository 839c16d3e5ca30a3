"""The CPU kernel inside torch.compile: an operator, which torch.compile calls and does not take apart."""

import pytest
import torch
from cpu_kernel_cases import make
from torch.autograd import forward_ad

import bitempered.kernels.operators  # noqa: F401 (registers them)
from bitempered import kernels
from bitempered.torch import bi_tempered_binary_logistic_loss, bi_tempered_logistic_loss, tempered_softmax

OPERATORS = torch.ops.bitempered


def graphs_of(f, *inputs):
    """The value and gradient of a compiled function, and the operators in its graphs."""
    seen = []

    def backend(graph, _):
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    torch.compiler.reset()
    leaf = inputs[0].detach().clone().requires_grad_()
    torch.compile(f, fullgraph=True, backend=backend)(leaf, *inputs[1:])
    torch.compiler.reset()
    value = torch.compile(f, fullgraph=True, backend="aot_eager")(leaf, *inputs[1:])
    return value.detach(), torch.autograd.grad(value.sum(), leaf)[0], seen


CASES = {
    "plain": {},
    "per example": {"reduction": "none"},
    "smoothed, weighted": {"label_smoothing": 0.1, "weight": torch.arange(1.0, 6.0)},
    "rescaled": {"rescale": True},
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("plain", torch.float32)]
    + [pytest.param(name, torch.float32, marks=pytest.mark.slow) for name in list(CASES)[1:]]
    + [pytest.param(name, torch.float16, marks=pytest.mark.slow) for name in list(CASES)[:2]],
)
def test_the_loss_is_one_operator(name, dtype):
    logits, labels = make(6, 5)
    logits = logits.to(dtype)
    image = logits.view(1, 2, 3, 5).movedim(-1, 1)
    for x, y in ((logits, labels), (logits, torch.softmax(logits.float(), 1)), (image, labels.view(1, 2, 3))):

        def f(a, y):
            return bi_tempered_logistic_loss(2 * a, y, 0.8, 1.2, **CASES[name])

        value, gradient, seen = graphs_of(f, x, y)
        assert seen.count("bitempered.loss.default") == 1
        leaf = x.clone().requires_grad_()
        want = f(leaf, y)
        close = {"rtol": 1e-6, "atol": 1e-7} if dtype != torch.float16 else {"rtol": 2e-3, "atol": 1e-6}
        torch.testing.assert_close(value, want.detach(), **close)
        torch.testing.assert_close(gradient, torch.autograd.grad(want.sum(), leaf)[0], **close)


@pytest.mark.parametrize(
    ("dtype", "reduction"),
    [(torch.float32, "mean"), pytest.param(torch.float16, "none", marks=pytest.mark.slow)],
)
def test_the_binary_loss_is_one_operator(dtype, reduction):
    logits, target = torch.linspace(-3, 3, 12).view(3, 4).to(dtype), torch.linspace(0, 1, 12).view(3, 4).to(dtype)

    def f(a, y):
        options = {"weight": torch.ones(4), "pos_weight": torch.full((3, 1), 2.0), "reduction": reduction}
        return bi_tempered_binary_logistic_loss(a, y, 0.8, 1.2, **options)

    value, gradient, seen = graphs_of(f, logits, target)
    assert seen.count("bitempered.binary_loss.default") == 1
    leaf = logits.clone().requires_grad_()
    want = f(leaf, target)
    torch.testing.assert_close(value, want.detach(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(gradient, torch.autograd.grad(want.sum(), leaf)[0], rtol=2e-3, atol=1e-6)


@pytest.mark.slow  # it compiles each several times
def test_what_an_operator_must_keep_to():
    """Shapes, strides, mutations and derivatives, as torch itself checks them."""
    logits, target = make(6, 5)
    leaf = logits.requires_grad_()
    options = (0.8, 1.2, 1, 0.1, -100, "none", False, "cpu")
    none = (None, None)  # tensors of temperatures
    torch.library.opcheck(OPERATORS.loss.default, (leaf, target, None, *none, *options, torch.float32, True))
    given = (logits.detach(), target, None, *none)
    torch.library.opcheck(OPERATORS.loss.default, (*given, *options, torch.float32, False))
    torch.library.opcheck(OPERATORS.loss_gradient.default, (torch.ones(6), None, *given, *options))
    options = (0.8, 1.2, None, 0.0, -100, "mean", True, "cpu")
    soft = torch.softmax(logits.detach(), 1)
    given = (leaf, soft, None, None, *none)
    torch.library.opcheck(OPERATORS.binary_loss.default, (*given, *options, torch.float32, True))
    given = (torch.ones(()), None, leaf.detach(), soft, None, None, *none)
    torch.library.opcheck(OPERATORS.binary_loss_gradient.default, (*given, *options))


def test_without_a_library_it_compiles_core(monkeypatch):
    logits, target = make(6, 5)
    monkeypatch.setattr(kernels.cpu, "library", lambda: kernels.cpu.Unavailable("no compiler"))
    value, gradient, seen = graphs_of(lambda a, y: bi_tempered_logistic_loss(a, y, 0.8, 1.2), logits, target)
    assert not [name for name in seen if "bitempered" in name]
    torch.testing.assert_close(value, bi_tempered_logistic_loss(logits, target, 0.8, 1.2))
    assert gradient.isfinite().all()


def test_what_stays_with_core():
    """A softmax, which the compiler can fuse; and an exported program, which runs without this package."""
    logits, target = make(6, 5)
    _, _, seen = graphs_of(lambda a: tempered_softmax(a, 1.2), logits)
    assert not [name for name in seen if "bitempered" in name]

    class Step(torch.nn.Module):
        def forward(self, a, y):
            return bi_tempered_logistic_loss(a, y, 0.8, 1.2)

    for strict in (False, True):
        program = torch.export.export(Step(), (logits, target), strict=strict)
        assert not [node for node in program.graph.nodes if "bitempered" in str(node.target)]


@pytest.mark.slow  # compiles C++
def test_inductor():
    logits, target = make(30, 50)
    leaf = logits.requires_grad_()

    def f(a, y):
        return bi_tempered_logistic_loss(3 * a, y, 0.8, 1.2)

    torch.compiler.reset()
    value, want = torch.compile(f, fullgraph=True)(leaf, target), f(leaf, target)
    torch.testing.assert_close(value, want)
    torch.testing.assert_close(*(torch.autograd.grad(x, leaf)[0] for x in (value, want)))


@pytest.mark.parametrize("binary", [False, True])
def test_second_derivatives_are_refused(binary):
    """The stored gradient is a constant to autograd: it would give wrong ones."""
    (x, y), loss = make(4, 5), bi_tempered_logistic_loss
    if binary:
        y, loss = (x > 0).float(), bi_tempered_binary_logistic_loss
    x.requires_grad_()
    torch.compiler.reset()
    value = torch.compile(lambda a: loss(a, y, 0.8, 1.2), backend="eager")(x)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(value, x, create_graph=True)


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_forward_mode_is_not_lost(backend):
    """The operators have no forward mode, and would drop the tangent of logits that need no gradient."""
    generator = torch.Generator().manual_seed(0)
    logits, tangent = (torch.randn(4, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    target = torch.randint(5, (4,), generator=generator)
    losses = [
        lambda a: bi_tempered_logistic_loss(a, target, 0.5, 1.3),
        lambda a: bi_tempered_binary_logistic_loss(a, (logits > 0).double(), 0.5, 1.3),
    ]
    for loss in losses:
        torch.compiler.reset()
        step = torch.compile(loss, backend=backend)
        step(logits)  # a graph without forward mode must not serve for it
        with forward_ad.dual_level():
            got = forward_ad.unpack_dual(step(forward_ad.make_dual(logits, tangent))).tangent
        difference = (loss(logits + 1e-6 * tangent) - loss(logits - 1e-6 * tangent)) / 2e-6
        torch.testing.assert_close(got, difference, rtol=1e-7, atol=1e-9)  # eps / 1e-6
