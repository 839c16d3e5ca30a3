"""At t1 = t2 = 1 the losses are torch's: gradients over the whole option grid, values up to the target's entropy."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from bitempered.torch import (
    BiTemperedBinaryLogisticLoss,
    BiTemperedLogisticLoss,
    bi_tempered_binary_logistic_loss,
    bi_tempered_logistic_loss,
    log_partition,
    tempered_log_softmax,
    tempered_sigmoid,
    tempered_softmax,
)

SHAPES = [(5,), (4, 5), (3, 5, 2), (2, 5, 3, 4)]  # unbatched, batch, sequence, image
REDUCTIONS = ["none", "sum", "mean"]
CLOSE = {"rtol": 1e-12, "atol": 1e-13}  # float64: both sides round


def make(shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(shape, generator=generator, dtype=torch.float64)
    axis = min(1, len(shape) - 1)
    rows = shape[:axis] + shape[axis + 1 :]
    indices = torch.randint(shape[axis], rows, generator=generator)
    soft = torch.softmax(2 * torch.randn(shape, generator=generator, dtype=torch.float64), axis)
    weight = torch.rand(shape[axis], generator=generator, dtype=torch.float64) + 0.2
    return logits, indices, soft, weight, axis


def value_and_gradient(function, logits, *args, **options):
    leaf = logits.clone().requires_grad_()
    value = function(leaf, *args, **options)
    cotangent = torch.linspace(1, 2, value.numel(), dtype=value.dtype).view(value.shape)
    return value.detach(), torch.autograd.grad(value, leaf, cotangent)[0]


def entropy_part(y, weight, axis):
    """W H(q) with q = w y / W: what cross-entropy has beyond the divergence."""
    if weight is not None:
        y = y * weight.view([-1] + [1] * (y.dim() - axis - 1))
    total = y.sum(axis)
    return -torch.special.xlogy(y, y / total.unsqueeze(axis)).sum(axis)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["indices", "ignored", "probabilities"])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.3])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_cross_entropy(shape, kind, weighted, label_smoothing, reduction):
    logits, indices, soft, weight, axis = make(shape)
    options = {"reduction": reduction, "label_smoothing": label_smoothing, "weight": weight if weighted else None}
    target = soft if kind == "probabilities" else indices
    kept = torch.ones(indices.shape, dtype=torch.bool)
    if kind == "ignored":
        options["ignore_index"] = 2
        if indices.dim() == 0:
            indices.fill_(3)  # the one example stays: test_empty_and_all_ignored has the other case
        else:
            indices.view(-1)[0] = 2
        kept = indices != 2
    got, gradient = value_and_gradient(bi_tempered_logistic_loss, logits, target, 1.0, 1.0, **options)
    want, want_gradient = value_and_gradient(F.cross_entropy, logits, target, **options)
    torch.testing.assert_close(gradient, want_gradient, **CLOSE)

    y = soft if kind == "probabilities" else F.one_hot(indices, shape[axis]).movedim(-1, axis).double()
    y = (1 - label_smoothing) * y + label_smoothing / shape[axis]
    entropy = torch.where(kept, entropy_part(y, options["weight"], axis), 0.0)
    if reduction == "sum":
        entropy = entropy.sum()
    elif reduction == "mean" and kind == "probabilities":
        entropy = entropy.mean()
    elif reduction == "mean":
        denominator = (weight[indices] * kept).sum() if weighted else kept.sum()
        entropy = entropy.sum() / denominator
    torch.testing.assert_close(got, want - entropy, **CLOSE)
    if kind != "probabilities" and not label_smoothing:
        torch.testing.assert_close(got, want, **CLOSE)


@pytest.mark.parametrize("shape", [(), (6,), (3, 4)], ids=str)
@pytest.mark.parametrize("hard", [True, False], ids=["hard", "soft"])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("pos_weighted", [False, True], ids=["even", "pos_weight"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_binary_cross_entropy(shape, hard, weighted, pos_weighted, reduction):
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(shape, generator=generator, dtype=torch.float64)
    target = torch.rand(shape, generator=generator, dtype=torch.float64)
    if hard:
        target = target.round()
    weight = torch.rand(shape[-1:], generator=generator, dtype=torch.float64) if weighted else None
    pos_weight = torch.rand(shape[-1:], generator=generator, dtype=torch.float64) + 0.5 if pos_weighted else None
    options = {"weight": weight, "pos_weight": pos_weight, "reduction": reduction}
    got, gradient = value_and_gradient(bi_tempered_binary_logistic_loss, logits, target, 1.0, 1.0, **options)
    want, want_gradient = value_and_gradient(F.binary_cross_entropy_with_logits, logits, target, **options)
    torch.testing.assert_close(gradient, want_gradient, **CLOSE)

    pair = torch.stack((1 - target, target), -1)
    if pos_weight is not None:
        pair = pair * torch.stack((torch.ones_like(pos_weight), pos_weight), -1)
    total = pair.sum(-1, keepdim=True)
    entropy = -torch.special.xlogy(pair, pair / total).sum(-1)
    if weight is not None:
        entropy = entropy * weight
    entropy = {"none": entropy, "sum": entropy.sum(), "mean": entropy.mean()}[reduction]
    torch.testing.assert_close(got, want - entropy, **CLOSE)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_softmax_functions(dim):
    logits = 5 * torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(tempered_softmax(logits, 1.0, dim), logits.softmax(dim), **CLOSE)
    torch.testing.assert_close(tempered_log_softmax(logits, 1.0, dim), logits.log_softmax(dim), **CLOSE)
    torch.testing.assert_close(log_partition(logits, 1.0, dim), logits.logsumexp(dim), **CLOSE)
    torch.testing.assert_close(tempered_sigmoid(logits, 1.0), logits.sigmoid(), **CLOSE)


@pytest.mark.parametrize(("t1", "t2"), [(1.0, 1.0), (0.8, 1.2)])
def test_empty_and_all_ignored(t1, t2):
    empty = torch.zeros(0, 5)
    none = torch.zeros(0, dtype=torch.long)
    ignored = torch.full((3,), -100)
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(0), requires_grad=True)
    assert bi_tempered_logistic_loss(empty, none, t1, t2).isnan()
    assert bi_tempered_logistic_loss(empty, empty, t1, t2).isnan()
    assert bi_tempered_logistic_loss(empty, none, t1, t2, reduction="sum") == 0
    assert bi_tempered_logistic_loss(empty, none, t1, t2, reduction="none").shape == (0,)
    assert bi_tempered_logistic_loss(logits, ignored, t1, t2).isnan()
    assert bi_tempered_logistic_loss(logits[0], ignored[0], t1, t2).isnan()
    loss = bi_tempered_logistic_loss(logits, ignored, t1, t2, reduction="none")
    assert torch.equal(loss, torch.zeros(3))
    assert torch.equal(torch.autograd.grad(loss.sum(), logits)[0], torch.zeros(3, 5))
    assert bi_tempered_binary_logistic_loss(empty, empty, t1, t2).isnan()


def test_an_ignored_or_weightless_row_may_hold_anything():
    logits = torch.tensor([[torch.nan, 0.0], [-torch.inf, 1.0], [1.0, 2.0]], requires_grad=True)
    target = torch.tensor([-100, 0, 1])
    weight = torch.tensor([0.0, 1.0])
    loss = bi_tempered_logistic_loss(logits, target, 1.0, 1.2, weight=weight)
    (gradient,) = torch.autograd.grad(loss, logits)
    alone = logits.detach()[2:].requires_grad_()
    want = bi_tempered_logistic_loss(alone, target[2:], 1.0, 1.2)
    assert torch.equal(loss, want)
    assert torch.equal(gradient[:2], torch.zeros(2, 2))
    torch.testing.assert_close(gradient[2:], torch.autograd.grad(want, alone)[0])


def test_weights_of_another_dtype_are_summed_in_the_dtype_of_the_loss():
    logits, target = torch.zeros(70000, 2), torch.zeros(70000, dtype=torch.long)  # more than float16 can count
    want = bi_tempered_logistic_loss(logits[:1], target[:1], 0.8, 1.2)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        got = bi_tempered_logistic_loss(logits, target, 0.8, 1.2, weight=torch.ones(2, dtype=dtype))
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0)  # float32 sums of 70,000


def test_meta_tensors_have_shapes_and_dtypes():
    logits, target = torch.zeros(3, 5, device="meta"), torch.zeros(3, dtype=torch.long, device="meta")
    assert bi_tempered_logistic_loss(logits, target, 0.8, 1.2).shape == ()
    assert tempered_softmax(logits, 1.2).shape == (3, 5)


@pytest.mark.parametrize(("t1", "t2"), [(0.5, 0.8), (0.8, 1.2), (0.5, 4.0)])
def test_weights_smoothing_and_shapes_away_from_one(t1, t2):
    """What the grid at t = 1 cannot see: every shape and option is the same per-example loss of the same rows."""
    logits, indices, _, weight, _ = make((2, 5, 3, 4))
    options = {"weight": weight, "label_smoothing": 0.2}
    losses = bi_tempered_logistic_loss(logits, indices, t1, t2, reduction="none", **options)
    for n, i, j in itertools.product(range(2), range(3), range(4)):
        one = bi_tempered_logistic_loss(logits[n, :, i, j], indices[n, i, j], t1, t2, reduction="none", **options)
        torch.testing.assert_close(losses[n, i, j], one, **CLOSE)
    mean = bi_tempered_logistic_loss(logits, indices, t1, t2, **options)
    torch.testing.assert_close(mean, losses.sum() / weight[indices].sum(), **CLOSE)
    hard = bi_tempered_logistic_loss(logits, indices, t1, t2, reduction="none", weight=weight)
    plain = bi_tempered_logistic_loss(logits, indices, t1, t2, reduction="none")
    torch.testing.assert_close(hard, weight[indices] * plain, **CLOSE)


@pytest.mark.parametrize("memory", ["transposed", "channels_last", "strided"])
def test_memory_layouts(memory):
    logits, indices, _, _, _ = make((2, 5, 3, 4))
    if memory == "transposed":
        other = logits.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    elif memory == "channels_last":
        other = logits.to(memory_format=torch.channels_last)
    else:
        other = torch.stack((logits, torch.zeros_like(logits)), -1)[..., 0]
    assert other.stride() != logits.stride()
    got, gradient = value_and_gradient(bi_tempered_logistic_loss, other, indices, 0.8, 1.2)
    want, want_gradient = value_and_gradient(bi_tempered_logistic_loss, logits, indices, 0.8, 1.2)
    torch.testing.assert_close(got, want, **CLOSE)
    torch.testing.assert_close(gradient, want_gradient, **CLOSE)


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint16, torch.uint32], ids=str
)
def test_all_integer_dtypes_are_class_indices(dtype):
    logits, indices, _, weight, _ = make((4, 5))
    got = bi_tempered_logistic_loss(logits, indices.to(dtype), 0.8, 1.2, weight=weight)
    assert torch.equal(got, bi_tempered_logistic_loss(logits, indices, 0.8, 1.2, weight=weight))


def test_modules_store_and_call():
    logits, indices, soft, weight, _ = make((4, 5))
    module = BiTemperedLogisticLoss(0.8, 1.2, weight=weight, ignore_index=1, reduction="sum", label_smoothing=0.1)
    want = bi_tempered_logistic_loss(
        logits, indices, 0.8, 1.2, weight=weight, ignore_index=1, reduction="sum", label_smoothing=0.1
    )
    assert torch.equal(module(logits, indices), want)
    assert "weight" in module.state_dict()  # a buffer: it moves with the model
    binary = BiTemperedBinaryLogisticLoss(0.8, 1.2, weight=weight, pos_weight=2 * weight, reduction="sum")
    want = bi_tempered_binary_logistic_loss(
        logits, soft, 0.8, 1.2, weight=weight, pos_weight=2 * weight, reduction="sum"
    )
    assert torch.equal(binary(logits, soft), want)
