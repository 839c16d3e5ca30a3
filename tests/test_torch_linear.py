"""The loss of a linear layer's logits: the numbers of the layer and the loss one after the other, in less memory."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from bitempered.torch import (
    LinearBiTemperedLogisticLoss,
    bi_tempered_logistic_loss,
    linear_bi_tempered_logistic_loss,
)

ROWS, FEATURES, CLASSES = 600, 3, 11  # three chunks, the last one short: chunks have 256 rows at least


def make(dtype=torch.float64, bias=True):
    generator = torch.Generator().manual_seed(0)
    layer = [
        torch.randn(ROWS, FEATURES, generator=generator, dtype=torch.float64),
        torch.randn(CLASSES, FEATURES, generator=generator, dtype=torch.float64),
    ]
    if bias:
        layer.append(torch.randn(CLASSES, generator=generator, dtype=torch.float64))
    target = torch.randint(CLASSES, (ROWS,), generator=generator)
    target[::5] = -100
    return [x.to(dtype).requires_grad_() for x in layer], target


def composed(layer, target, t1, t2, softcap=None, class_weight=None, **options):
    logits = F.linear(*layer)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return bi_tempered_logistic_loss(logits, target, t1, t2, weight=class_weight, **options)


def fused(layer, target, t1, t2, **options):
    hidden, weight, *bias = layer
    return linear_bi_tempered_logistic_loss(hidden, weight, target, t1, t2, bias=bias[0] if bias else None, **options)


@pytest.mark.parametrize(("t1", "t2"), [(0.8, 1.2), (0.5, 0.8), (1.0, 1.0)])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"label_smoothing": 0.1, "class_weight": torch.arange(1.0, CLASSES + 1, dtype=torch.float64)},
        {"softcap": 1.5, "ignore_index": 2},
        {"probabilities": True},
    ],
    ids=["plain", "smoothed and weighted", "capped", "probabilities"],
)
def test_loss_and_gradients(t1, t2, reduction, bias, options):
    options = dict(options)
    layer, target = make(bias=bias)
    if options.pop("probabilities", False):
        target = torch.softmax(torch.randn(ROWS, CLASSES, generator=torch.Generator().manual_seed(1)), 1).double()
    elif "ignore_index" in options:
        target = target.clamp_min(0)
    loss = fused(layer, target, t1, t2, reduction=reduction, **options)
    want = composed(layer, target, t1, t2, reduction=reduction, **options)
    torch.testing.assert_close(loss, want, rtol=1e-13, atol=1e-14)
    g = torch.rand(want.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for got, exact in zip(torch.autograd.grad(loss, layer, g), torch.autograd.grad(want, layer, g), strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-12, atol=1e-13)  # sums in another order


def test_any_leading_dimensions():
    (hidden, weight, bias), target = make()
    for shape in ((20, 30), (2, 300, 1)):
        loss = fused((hidden.view(*shape, FEATURES), weight, bias), target.view(shape), 0.8, 1.2, reduction="none")
        assert loss.shape == shape
        torch.testing.assert_close(loss.flatten(), composed((hidden, weight, bias), target, 0.8, 1.2, reduction="none"))
    one = fused((hidden[1], weight, bias), target[1], 0.8, 1.2)
    torch.testing.assert_close(one, composed((hidden[1], weight, bias), target[1], 0.8, 1.2))


def test_the_module_passes_its_options_on():
    layer, target = make()
    options = {"reduction": "sum", "label_smoothing": 0.2, "ignore_index": -100, "softcap": 2.0}
    class_weight = torch.rand(CLASSES, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    module = LinearBiTemperedLogisticLoss(0.8, 1.2, class_weight=class_weight, **options)
    got = module(layer[0], layer[1], target, bias=layer[2])
    torch.testing.assert_close(got, composed(layer, target, 0.8, 1.2, class_weight=class_weight, **options))
    assert "class_weight" in module.state_dict()


def test_backward_again():
    layer, target = make()
    for reduction in ("mean", "none"):
        loss = fused(layer, target, 0.8, 1.2, reduction=reduction).sum()
        first = torch.autograd.grad(loss, layer, retain_graph=True)
        again = torch.autograd.grad(3 * loss, layer)
        for a, b in zip(first, again, strict=True):
            torch.testing.assert_close(3 * a, b, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_class_weights_changed_before_backward_raise(reduction):
    layer, target = make()
    class_weight = torch.rand(CLASSES, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    loss = fused(layer, target, 0.8, 1.2, class_weight=class_weight, reduction=reduction).sum()
    if reduction == "mean":  # forward has computed the first gradients
        torch.autograd.grad(loss, layer, retain_graph=True)
    class_weight *= 2
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, layer)


def test_autocast_leaves_float64_alone():
    layer, target = make()
    want = fused(layer, target, 0.8, 1.2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = fused(layer, target, 0.8, 1.2)
        assert loss.dtype == composed(layer, target, 0.8, 1.2).dtype == torch.float64
        assert torch.equal(loss, want)
        with pytest.raises(RuntimeError, match="weight must be of the device and dtype of hidden"):
            fused((layer[0], layer[1].float(), layer[2]), target, 0.8, 1.2)


def test_shared_and_frozen_weights():
    (_, weight, _), target = make()
    tokens = torch.arange(ROWS) % CLASSES
    loss = linear_bi_tempered_logistic_loss(F.embedding(tokens, weight), weight, target, 0.8, 1.2)
    want = composed((F.embedding(tokens, weight), weight), target, 0.8, 1.2)
    torch.testing.assert_close(*(torch.autograd.grad(x, weight)[0] for x in (loss, want)), rtol=1e-12, atol=1e-14)
    hidden = F.embedding(tokens, weight).detach().requires_grad_()
    frozen = linear_bi_tempered_logistic_loss(hidden, weight.detach(), target, 0.8, 1.2)
    want = composed((hidden, weight.detach()), target, 0.8, 1.2)
    torch.testing.assert_close(*(torch.autograd.grad(x, hidden)[0] for x in (frozen, want)), rtol=1e-12, atol=1e-14)


class LargestOutput(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.numel = max(self.numel, out.untyped_storage().nbytes() // out.element_size())  # a view may be larger
        return out


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_tensor_is_as_large_as_the_logits(reduction):
    layer, target = make()
    with LargestOutput() as seen:
        fused(layer, target, 0.8, 1.2, reduction=reduction).sum().backward()
    assert seen.numel <= 256 * CLASSES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_half_precision_and_autocast_sum_in_float32(dtype):
    layer, target = make(dtype=dtype)
    exact = [x.detach().double().requires_grad_() for x in layer]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = fused(layer, target, 0.8, 1.2)
    want = composed(exact, target, 0.8, 1.2)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(want.item(), rel=1e-2)  # bfloat16 logits
    for x, y in zip(torch.autograd.grad(loss, layer), torch.autograd.grad(want, exact), strict=True):
        assert x.dtype == dtype
        assert (x - y).norm() <= 2e-2 * y.norm()
    assert fused(layer, target, 0.8, 1.2).dtype == dtype


def test_compile():
    layer, target = make()
    compiled = torch.compile(
        lambda x: fused((2 * x, *layer[1:]), target, 0.8, 1.2), backend="aot_eager", fullgraph=True
    )
    (gradient,) = torch.autograd.grad(compiled(layer[0]), layer[0])
    (want,) = torch.autograd.grad(fused((2 * layer[0], *layer[1:]), target, 0.8, 1.2), layer[0])
    torch.testing.assert_close(gradient, want)


def test_nothing_to_do():
    (hidden, weight, bias), target = make()
    empty = hidden[:0], weight, bias
    assert fused(empty, target[:0], 0.8, 1.2).isnan()
    assert fused(empty, target[:0], 0.8, 1.2, reduction="sum") == 0
    assert fused(empty, target[:0], 0.8, 1.2, reduction="none").shape == (0,)
    assert all(x.eq(0).all() for x in torch.autograd.grad(fused(empty, target[:0], 0.8, 1.2, reduction="sum"), empty))
    with torch.no_grad():
        assert not fused((hidden, weight, bias), target, 0.8, 1.2).requires_grad


def test_derivatives_it_does_not_have_raise():
    layer, target = make()
    with pytest.raises(RuntimeError, match="has first derivatives only"):
        torch.autograd.grad(fused(layer, target, 0.8, 1.2), layer[0], create_graph=True)
    plain = [x.detach() for x in layer]
    for transform in (torch.func.grad, torch.func.jacfwd):
        with pytest.raises(RuntimeError, match=r"not by torch\.func: use bi_tempered_logistic_loss"):
            transform(lambda x: fused((x, *plain[1:]), target, 0.8, 1.2))(plain[0])
    with pytest.raises(RuntimeError, match=r"not by torch\.func: use bi_tempered_logistic_loss"):
        torch.func.vmap(lambda x, y: fused((x, *plain[1:]), y, 0.8, 1.2))(plain[0], target)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"hidden": torch.zeros(4, 2)}, ValueError, r"got \(4, 2\) and \(5, 3\)"),
        ({"weight": torch.zeros(0, 3)}, ValueError, "at least one class"),
        ({"weight": torch.zeros(5, 3).double()}, RuntimeError, "weight must be of the device and dtype of hidden"),
        ({"weight": [[1.0]]}, TypeError, "weight must be a torch.Tensor, got list"),
        ({"hidden": torch.zeros(4, 3).long()}, RuntimeError, "hidden must hold floating-point numbers"),
        ({"bias": torch.zeros(4)}, ValueError, r"bias must be of shape \(5,\), got \(4,\)"),
        ({"target": torch.zeros(3).long()}, ValueError, r"of shape \(4,\) or .* \(4, 5\), got .* \(3,\)"),
        ({"target": torch.zeros(4)}, ValueError, r"class indices \(integers\) .*, got torch.float32 of shape \(4,\)"),
        (
            {"target": torch.zeros(4, 5).long()},
            ValueError,
            r"probabilities \(floats\) .*, got torch.int64 of shape \(4, 5\)",
        ),
        ({"target": [0]}, TypeError, "target must be a torch.Tensor, got list"),
        ({"target": torch.full((4,), 5)}, IndexError, "class indices from 0 to 4"),
        ({"target": torch.full((4, 5), 0.2, requires_grad=True)}, RuntimeError, "target cannot require a gradient"),
        ({"softcap": 0.0}, ValueError, "softcap must be greater than 0, got 0.0"),
        ({"softcap": "high"}, TypeError, "softcap must be a number, got str"),
        ({"t1": 2.5}, ValueError, r"t1 must be in \[0, 2\), got 2.5"),
        ({"reduction": "max"}, ValueError, "reduction must be"),
        ({"class_weight": torch.zeros(4)}, RuntimeError, "^class_weight must have one entry for each of the 5 classes"),
        ({"class_weight": torch.ones(5).requires_grad_()}, RuntimeError, "^class_weight cannot require a gradient"),
        ({"class_weight": -torch.ones(5)}, ValueError, "^class_weight must not be negative"),
        ({"label_smoothing": 2.0}, RuntimeError, "label_smoothing must be between 0 and 1"),
    ],
    ids=itertools.count(),
)
def test_bad_input(change, error, message):
    good = {
        "hidden": torch.zeros(4, 3), "weight": torch.zeros(5, 3), "target": torch.zeros(4).long(), "t1": 0.8, "t2": 3.0,
    }  # fmt: skip
    assert linear_bi_tempered_logistic_loss(**good).isfinite()
    with pytest.raises(error, match=message):
        linear_bi_tempered_logistic_loss(**{**good, **change})
