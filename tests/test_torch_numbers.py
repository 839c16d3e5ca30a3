"""Never NaN: extreme logits and temperatures, half precision, autocast, masked classes; and the loss's properties."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from bitempered.torch import (
    bi_tempered_binary_logistic_loss,
    bi_tempered_logistic_loss,
    log_partition,
    tempered_log_softmax,
    tempered_sigmoid,
    tempered_softmax,
)

# Every legal pair of these, up to the largest t2 that is promised; (0.2, 1), (0.5, 4) and (0, 10) are among them.
T1 = [0.0, 0.2, 0.5, 0.8, 1 - 1e-7, 1.0, 1 + 1e-7, 1.5, 1.99]
T2 = [0.0, 0.2, 0.5, 0.8, 1 - 1e-7, 1.0, 1 + 1e-7, 1.2, 1.5, 1.99, 2.0, 4.0, 10.0, 30.0, 100.0]
PAIRS = [(t1, t2) for t1, t2 in itertools.product(T1, T2) if t1 <= t2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("classes", [2, 10, 1000])
def test_finite_for_every_finite_logit(dtype, classes):
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(4, classes, generator=generator)
    rows = [0 * normal]  # a zero-initialised head
    rows += [scale * normal for scale in (1e-4, 1.0, 30.0, 1000.0)]
    rows += [torch.where(normal > 1, 1e4, -1e4), torch.where(normal > normal.amax(1, keepdim=True) - 0.1, 1e4, 0.0)]
    logits = torch.cat(rows).clamp(-1e4, 1e4).to(dtype).requires_grad_()
    easy, hard = logits.detach().argmax(1), logits.detach().argmin(1)
    soft = torch.full(logits.shape, 1 / classes, dtype=torch.float64).to(dtype)
    for t1, t2 in PAIRS:
        if dtype == torch.float16 and t1 > 1.5:
            continue  # the loss itself passes 65,504
        for target in (easy, hard, soft):
            loss = bi_tempered_logistic_loss(logits, target, t1, t2, reduction="none")
            (gradient,) = torch.autograd.grad(loss.sum(), logits)
            assert loss.dtype == gradient.dtype == dtype
            assert torch.isfinite(loss).all(), (t1, t2)
            assert torch.isfinite(gradient).all(), (t1, t2)
            assert (loss >= 0).all(), (t1, t2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_binary_is_finite_for_every_finite_logit(dtype):
    logits = torch.tensor([0.0, 1e-4, 1.0, 30.0, 1e4]).to(dtype)
    logits = torch.cat((-logits, logits)).requires_grad_()
    for t1, t2 in PAIRS:
        for y in (0.0, 0.5, 1.0):
            loss = bi_tempered_binary_logistic_loss(logits, torch.full_like(logits, y), t1, t2, reduction="none")
            (gradient,) = torch.autograd.grad(loss.sum(), logits)
            assert torch.isfinite(loss).all(), (t1, t2, y)
            assert torch.isfinite(gradient).all(), (t1, t2, y)


@pytest.mark.parametrize("t", T2)
def test_softmax_is_finite_and_sums_to_one(t):
    logits = torch.tensor([[1e4, -1e4, 0.0], [0.0, 0.0, 0.0], [3e38, -3e38, 0.0]], requires_grad=True)
    p = tempered_softmax(logits, t)
    assert torch.isfinite(p).all()
    torch.testing.assert_close(p.sum(1), torch.ones(3), rtol=0, atol=1e-6)
    assert torch.isfinite(torch.autograd.grad(p[:, 0].sum(), logits)[0]).all()


@pytest.mark.parametrize(("t1", "t2"), [(0.5, 0.8), (1.0, 1.0), (0.8, 1.2), (0.5, 4.0)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_computes_in_float32(dtype, t1, t2):
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(16, 50, generator=generator)).to(dtype)
    target = torch.randint(50, (16,), generator=generator)
    half, full = logits.clone().requires_grad_(), logits.float().requires_grad_()
    for reduction in ("none", "mean"):
        got = bi_tempered_logistic_loss(half, target, t1, t2, reduction=reduction)
        want = bi_tempered_logistic_loss(full, target, t1, t2, reduction=reduction)
        assert torch.equal(got, want.to(dtype))
    got, want = torch.autograd.grad(got, half)[0], torch.autograd.grad(want, full)[0]
    # The cotangent 1 / N is exact in both; one rounding to half remains.
    torch.testing.assert_close(got, want.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-7)
    for function in (tempered_softmax, tempered_log_softmax, log_partition):
        assert torch.equal(function(logits, t2), function(logits.float(), t2).to(dtype))
    assert torch.equal(tempered_sigmoid(logits, t2), tempered_sigmoid(logits.float(), t2).to(dtype))


def test_autocast_gives_float32_as_cross_entropy_does():
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 5)
    x, y = torch.randn(16, 8), torch.randint(5, (16,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(x)
        loss = bi_tempered_logistic_loss(logits, y, 0.8, 1.2)
        probabilities = tempered_softmax(logits, 1.2)
        assert logits.dtype == torch.bfloat16
        assert loss.dtype == F.cross_entropy(logits, y).dtype == torch.float32
        assert bi_tempered_binary_logistic_loss(logits, logits.sigmoid(), 0.8, 1.2).dtype == torch.float32
        assert probabilities.dtype == torch.float32
        assert bi_tempered_logistic_loss(logits.double(), y, 0.8, 1.2).dtype == torch.float64
    loss.backward()
    assert torch.isfinite(model.weight.grad).all()
    torch.testing.assert_close(loss, bi_tempered_logistic_loss(logits.float(), y, 0.8, 1.2))


def test_grad_scaler():
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    x, y = torch.randn(16, 8), torch.randint(5, (16,))
    before = model.weight.detach().clone()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = bi_tempered_logistic_loss(model(x), y, 0.8, 1.2)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**16  # no overflow was found
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize(
    ("t1", "t2"), [(0.5, 0.8), (0.2, 1.0), (1.0, 1.0), (0.8, 1.2), (0.5, 4.0), (0.5, 100.0), (1.3, 1.6)]
)
def test_masked_classes(t1, t2):
    generator = torch.Generator().manual_seed(0)
    kept = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    masked = torch.cat((kept[:, :2], torch.full((3, 1), -torch.inf), kept[:, 2:]), 1).requires_grad_()
    keep = [0, 1, 3, 4]
    p = tempered_softmax(masked, t2)
    assert torch.equal(p[:, 2], torch.zeros(3))
    torch.testing.assert_close(p[:, keep], tempered_softmax(kept, t2), rtol=1e-14, atol=0)
    target = torch.tensor([0, 3, 4])
    loss = bi_tempered_logistic_loss(masked, target, t1, t2)
    leaf = kept.clone().requires_grad_()
    want = bi_tempered_logistic_loss(leaf, torch.tensor([0, 2, 3]), t1, t2)
    torch.testing.assert_close(loss, want, rtol=1e-13, atol=0)
    (gradient,) = torch.autograd.grad(loss, masked, create_graph=True)
    assert torch.equal(gradient[:, 2], torch.zeros(3))
    torch.testing.assert_close(gradient[:, keep], torch.autograd.grad(want, leaf)[0], rtol=1e-12, atol=1e-15)
    assert torch.isfinite(torch.autograd.grad(gradient.square().sum(), masked)[0]).all()


@pytest.mark.parametrize(
    ("t1", "t2"), [(0.0, 0.0), (0.2, 1.0), (0.8, 1.2), (0.5, 4.0), (1.0, 1.0), (1.0, 1.2), (1.3, 1.6)]
)
def test_a_masked_target(t1, t2):
    logits = torch.tensor([0.3, -torch.inf, 1.0], dtype=torch.float64, requires_grad=True)
    loss = bi_tempered_logistic_loss(logits, torch.tensor(1), t1, t2)
    if t1 >= 1:
        assert loss == torch.inf
    else:
        p = tempered_softmax(logits, t2)
        bound = 1 / (1 - t1) - (1 - (p ** (2 - t1)).sum()) / (2 - t1)
        torch.testing.assert_close(loss, bound, rtol=1e-14, atol=0)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert torch.isfinite(gradient).all()
    if t1 == t2 == 1:
        leaf = logits.detach().clone().requires_grad_()
        torch.testing.assert_close(gradient, torch.autograd.grad(F.cross_entropy(leaf, torch.tensor(1)), leaf)[0])


def test_an_infinite_binary_loss_of_weight_0_counts_0():
    logits = torch.tensor([-torch.inf, 1.0], requires_grad=True)
    loss = bi_tempered_binary_logistic_loss(
        logits, torch.ones(2), 1.0, 1.2, weight=torch.tensor([0.0, 1.0]), reduction="none"
    )
    assert loss[0] == 0
    assert loss[1].isfinite()
    assert torch.autograd.grad(loss.sum(), logits)[0].isfinite().all()


@pytest.mark.parametrize("t", [0.0, 0.5, 1.0, 1.2, 4.0, 100.0])
@pytest.mark.parametrize("bad", [[torch.inf, 0.0], [torch.nan, 0.0], [-torch.inf, -torch.inf], [torch.nan, -torch.inf]])
def test_what_has_no_answer_is_nan(t, bad):
    logits = torch.tensor([bad, [1.0, 2.0]])
    for function in (tempered_softmax, tempered_log_softmax):
        out = function(logits, t)
        assert out[0].isnan().all()
        assert out[1].isfinite().all() or t == 0.0
    assert log_partition(logits, t)[0].isnan()
    loss = bi_tempered_logistic_loss(logits, torch.tensor([1, 1]), min(t, 0.5), t, reduction="none")
    assert loss.isnan().tolist() == [True, False]


def test_zero_exactly_at_the_target_and_never_negative():
    # Many rows of few classes: rounding alone takes the sum below 0 in one of thousands.
    logits = 3 * torch.randn(20000, 3, generator=torch.Generator().manual_seed(0))
    for t1, t2 in [(0.0, 0.5), (0.2, 1.0), (0.8, 1.2), (1.0, 1.0), (0.5, 4.0), (1.3, 1.6)]:
        target = tempered_softmax(logits, t2)
        loss = bi_tempered_logistic_loss(logits, target, t1, t2, reduction="none")
        assert (loss >= 0).all()
        assert (loss < 1e-12).all()  # the square of float32's rounding, not the rounding itself
        sure = logits.sort(1).values + torch.tensor([0.0, 0.0, 16.0])
        assert (bi_tempered_logistic_loss(sure, torch.full((20000,), 2), t1, t2, reduction="none") >= 0).all()
    sure = torch.tensor([[0.0, 1e4]])
    assert bi_tempered_logistic_loss(sure, torch.tensor([1]), 1.0, 1.0) == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_continuous_in_both_temperatures_through_one(dtype):
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(20, 10, generator=generator, dtype=dtype)
    for target in (torch.randint(10, (20,), generator=generator), torch.softmax(logits.flip(1), 1)):
        at_one = bi_tempered_logistic_loss(logits, target, 1.0, 1.0, reduction="none")
        for distance in (1e-3, 1e-5, 1e-7, 1e-9):
            near = bi_tempered_logistic_loss(logits, target, 1 - distance, 1 + distance, reduction="none")
            # Each temperature moves a loss L = log(1 / p) by about L^2 / 2 times the distance; the largest bounds all.
            rounding = 100 * torch.finfo(dtype).eps
            assert (near - at_one).abs().max() <= distance * (1 + 1.1 * at_one.max() ** 2) + rounding
