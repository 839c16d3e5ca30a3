"""The Triton kernels inside torch.compile, in the interpreter: one operator, or two with many classes."""

import os

import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"  # read where a kernel is defined, so before the imports below

import bitempered.kernels.operators  # registers them
from bitempered.kernels.triton import losses
from bitempered.torch import bi_tempered_logistic_loss

# The interpreter computes with NumPy, which warns of the infinities that the kernels select away.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
OPERATORS = torch.ops.bitempered


def make(shape, probabilities, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(shape, generator=generator)
    logits[0, 1] = 60.0  # nearly all of the mass
    if probabilities:
        return logits.to(dtype), torch.softmax(torch.randn(shape, generator=generator), 1)
    target = torch.randint(shape[1], shape[:1] + shape[2:], generator=generator)
    target[-1] = -100
    return logits.to(dtype), target


def compiled(f, logits, *others):
    """The value and gradient of a compiled function, and the operators in its graph."""
    seen = []

    def backend(graph, _):
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    torch.compiler.reset()
    leaf = logits.detach().clone().requires_grad_()
    torch.compile(f, fullgraph=True, backend=backend)(leaf, *others)
    torch.compiler.reset()
    value = torch.compile(f, fullgraph=True, backend="aot_eager")(leaf, *others)
    return value.detach(), torch.autograd.grad(value.sum(), leaf)[0], seen


CASES = {
    "plain": ((5, 12), False, {}),
    "per example, images": ((2, 5, 3, 4), False, {"reduction": "none"}),
    "smoothed, weighted": ((5, 12), False, {"label_smoothing": 0.1, "weight": torch.linspace(0, 2, 12)}),
    "probabilities, rescaled": ((5, 12), True, {"rescale": True}),
}


@pytest.mark.usefixtures("by_triton")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("plain", torch.float32)]
    + [pytest.param(name, torch.float32, marks=pytest.mark.slow) for name in list(CASES)[1:]]
    + [pytest.param(name, torch.float16, marks=pytest.mark.slow) for name in ("plain", "probabilities, rescaled")],
)
@pytest.mark.parametrize("many_classes", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_loss_is_one_operator(monkeypatch, name, dtype, many_classes):
    shape, probabilities, options = CASES[name]
    if many_classes:
        monkeypatch.setattr(bitempered.kernels.operators, "_MANY_CLASSES", 1)
    logits, target = make(shape, probabilities, dtype)

    def f(a, y):
        return 3 * bi_tempered_logistic_loss(2 * a, y, 0.8, 1.2, **options)

    leaf = logits.clone().requires_grad_()
    want = f(leaf, target)
    (exact,) = torch.autograd.grad(want.sum(), leaf)
    solved = []
    compute = losses._compute
    monkeypatch.setattr(losses, "_compute", lambda *given, **more: solved.append(1) or compute(*given, **more))
    value, gradient, seen = compiled(f, logits, target)
    assert seen.count("bitempered.loss.default") == 1
    again = dtype == torch.float16 and not many_classes
    assert len(solved) == 2 + again  # one for each call of `compiled`: backward solves in float16 alone
    close = {"rtol": 1e-5, "atol": 1e-7} if dtype == torch.float32 else {"rtol": 4e-3, "atol": 1e-5}
    torch.testing.assert_close(value, want.detach(), **close)
    torch.testing.assert_close(gradient, exact, **close)


@pytest.mark.slow  # compiles several times
@pytest.mark.usefixtures("by_triton")
def test_temperatures_that_change_compile_once():
    logits, target = make((5, 12), False)
    compilations = []

    def backend(graph, _):
        compilations.append(graph)
        return graph

    def f(a, y, t1, t2):
        return bi_tempered_logistic_loss(a, y, t1, t2)

    torch.compiler.reset()
    step = torch.compile(f, fullgraph=True, backend=backend)
    for t1, t2 in ((0.5, 0.8), (0.8, 1.2), (1.0, 1.0), (0.2, 3.0)):
        given = torch.tensor(t1), torch.tensor(t2)
        torch.testing.assert_close(step(logits, target, *given), f(logits, target, t1, t2), rtol=2e-6, atol=2e-6)
    assert len(compilations) == 1


@pytest.mark.slow  # it compiles each several times
@pytest.mark.parametrize("probabilities", [False, True])
@pytest.mark.parametrize("many_classes", [False, True])
def test_what_an_operator_must_keep_to(monkeypatch, probabilities, many_classes):
    """Shapes, strides, mutations and derivatives, as torch itself checks them."""
    if many_classes:
        monkeypatch.setattr(bitempered.kernels.operators, "_MANY_CLASSES", 1)
    logits, target = make((5, 12), probabilities)
    options = (None, 1.2, 1, 0.0, -100, "none", True, "triton")
    given = (target, torch.linspace(0.5, 1, 12), torch.linspace(0.1, 0.9, 5), None)
    leaf = logits.clone().requires_grad_()
    torch.library.opcheck(OPERATORS.loss.default, (leaf, *given, *options, torch.float32, True))
    _, kept = OPERATORS.loss.default(logits, *given, *options, torch.float32, True)
    state = kept if many_classes else None
    torch.library.opcheck(OPERATORS.loss_gradient.default, (torch.ones(5), state, logits, *given, *options))
