"""Values and gradients of bitempered.torch against the 50-digit oracle."""

import mpmath as mp
import oracle
import pytest
import torch
from cases import NEAR_ONE, error, value_and_gradient
from hypothesis import given, settings
from hypothesis import strategies as st

from bitempered.torch import (
    bi_tempered_binary_logistic_loss,
    bi_tempered_logistic_loss,
    exp_t,
    log_partition,
    log_t,
    tempered_log_softmax,
    tempered_sigmoid,
    tempered_softmax,
)

# The bar of the project, relative to max(1, abs(value)).
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6}

# Both sides of 1 and 1 itself, crowded towards it; what the paper and its users train with; the ends.
T_SOFTMAX = [0.0, 0.5, 0.8, 1.0, 1.05, 1.2, 1.5, 2.0, 4.0, 10.0, 100.0]


def check_loss(logits, target, y, t1, t2, *, weight=None, label_smoothing=0.0):
    options = {"weight": weight, "label_smoothing": label_smoothing, "reduction": "none"}
    loss, gradient = value_and_gradient(bi_tempered_logistic_loss, logits, target, t1, t2, **options)
    value, exact = oracle.loss_and_gradient(logits.tolist(), y, t1, t2, None if weight is None else weight.tolist())
    tolerance = TOLERANCE[logits.dtype]
    assert error(loss, [value]) <= tolerance
    assert error(gradient, exact) <= tolerance


temperature = st.one_of(
    st.sampled_from(T_SOFTMAX + NEAR_ONE),
    st.floats(0, 4),
    st.floats(-16, -1).map(lambda e: 1 + 10**e),
    st.floats(-16, -1).map(lambda e: 1 - 10**e),
    st.floats(4, 100),
)


@st.composite
def problems(draw):
    t2 = draw(temperature)
    t1 = draw(temperature.filter(lambda t: t < 2).map(lambda t: min(t, t2)).filter(lambda t: t < 2))
    classes = draw(st.integers(2, 12))
    scale = draw(st.sampled_from([0.0, 1e-3, 0.3, 1.0, 5.0, 30.0, 300.0]))
    seed = draw(st.integers(0, 2**20))
    return t1, t2, classes, scale, seed


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["hard", "smoothed", "soft", "weighted"])
@settings(max_examples=60)
@given(problem=problems())
def test_loss_and_gradient_equal_the_oracle(dtype, kind, problem):
    t1, t2, classes, scale, seed = problem
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(classes, generator=generator, dtype=dtype)
    index = torch.randint(classes, (), generator=generator)
    y = [mp.mpf(int(i == index)) for i in range(classes)]
    if kind == "hard":
        check_loss(logits, index, y, t1, t2)
    elif kind == "smoothed":
        e = 0.125  # exact in binary, so that the oracle's target is the same
        check_loss(logits, index, [(1 - e) * yi + mp.mpf(e) / classes for yi in y], t1, t2, label_smoothing=e)
    elif kind == "weighted":
        e = 0.125
        weight = torch.rand(classes, generator=generator, dtype=dtype) + 0.1
        y = [(1 - e) * yi + mp.mpf(e) / classes for yi in y]
        check_loss(logits, index, y, t1, t2, weight=weight, label_smoothing=e)
    else:
        soft = torch.rand(classes, generator=generator, dtype=dtype)
        soft = torch.where(torch.rand(classes, generator=generator) < 0.3, 0.0, soft)
        soft[0] = 1.0
        soft = soft / soft.sum()
        check_loss(logits, soft, soft.tolist(), t1, t2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(("t1", "t2"), [(t, t) for t in NEAR_ONE] + [(0.8, t) for t in NEAR_ONE if t > 0.8])
def test_next_to_one(dtype, t1, t2):
    logits = torch.tensor([2.0, -1.0, 0.5, 7.0, -20.0], dtype=dtype)
    for index in range(5):
        check_loss(logits, torch.tensor(index), [mp.mpf(int(i == index)) for i in range(5)], t1, t2)


@pytest.mark.parametrize(("t1", "t2"), [(0.5, 4.0), (0.0, 10.0), (1.5, 30.0), (1.99, 100.0)])
def test_small_gradients_are_right_in_relation_to_themselves(t1, t2):
    """For large t2 - t1 all gradients are small, and the bar relative to max(1, value) sees none of them."""
    logits = torch.tensor([2.0, -1.0, 0.5, 7.0], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(bi_tempered_logistic_loss(logits, torch.tensor(1), t1, t2), logits)
    _, exact = oracle.loss_and_gradient(logits.tolist(), [0, 1, 0, 0], t1, t2)
    largest = max(abs(g) for g in exact)
    assert largest < 0.1
    # The power t2 - t1 magnifies the rounding of log p, about 1e-16, that many times.
    assert max(abs(mp.mpf(g) - e) for g, e in zip(gradient.tolist(), exact, strict=True)) <= 1e-13 * largest


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("t", T_SOFTMAX + NEAR_ONE)
@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0, 1000.0])  # a zero-initialised head, usual, confident, absurd
def test_softmax_and_partition(dtype, t, scale):
    logits = scale * torch.randn(9, generator=torch.Generator().manual_seed(1), dtype=dtype)
    p = oracle.softmax(logits.tolist(), t)
    tolerance = TOLERANCE[dtype]
    assert error(tempered_softmax(logits, t), p) <= tolerance
    logs = tempered_log_softmax(logits, t)
    outside = torch.tensor([x == 0 for x in p])
    assert torch.equal(logs == -torch.inf, outside)
    assert error(logs[~outside], [mp.log(x) for x in p if x > 0]) <= tolerance
    exact = oracle.normalizer(logits.tolist(), t)
    if exact < torch.finfo(dtype).max:
        # lambda = max(a) + (e^(s m) - 1) / s magnifies a rounding error of m by s m.
        assert error(log_partition(logits, t), [exact]) <= tolerance * max(1, (t - 1) * 2.2)
    else:
        assert log_partition(logits, t) == torch.inf


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("t", T_SOFTMAX + NEAR_ONE)
def test_log_t_and_exp_t(dtype, t):
    x = torch.tensor([0.0, 1e-5, 0.3, 1.0, 2.0, 50.0], dtype=dtype)
    exact = [oracle.log_t(v, t) for v in x.tolist()]
    finite = torch.tensor([mp.isfinite(v) and abs(v) < torch.finfo(dtype).max for v in exact])
    got = log_t(x, t)
    assert (got[~finite] == -torch.inf).all()
    # x^(1-t) magnifies the rounding of log x by abs(1 - t) abs(log x), at most 12 abs(1 - t) here.
    tolerance = TOLERANCE[dtype] * max(1, 12 * abs(1 - t))
    assert error(got[finite], [v for v, ok in zip(exact, finite, strict=True) if ok]) <= tolerance

    z = torch.tensor([-100.0, -2.0, -0.5, 0.0, 0.4, 3.0], dtype=dtype)
    exact = [oracle.exp_t(v, t) for v in z.tolist()]
    finite = torch.tensor([bool(mp.isfinite(v)) for v in exact])
    got = exp_t(z, t)
    assert (got[~finite] == torch.inf).all()
    # exp magnifies the rounding of its argument, up to log 97 = 4.6 here, as many times.
    assert error(got[finite], [v for v, ok in zip(exact, finite, strict=True) if ok]) <= 4 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("t1", "t2"), [(0.2, 1.0), (0.5, 4.0), (0.0, 0.0), (0.5, 0.7), (0.8, 1.2), (1.0, 1.0), (1.3, 1.6)]
)
def test_binary(dtype, t1, t2):
    logits = torch.tensor([-30.0, -2.0, -0.1, 0.0, 0.7, 4.0, 100.0], dtype=dtype)
    target = torch.tensor([0.0, 0.25, 1.0, 0.5, 0.0, 0.75, 0.0], dtype=dtype)
    pos_weight = torch.tensor(3.0, dtype=dtype)
    options = {"pos_weight": pos_weight, "reduction": "none"}
    loss, gradient = value_and_gradient(bi_tempered_binary_logistic_loss, logits, target, t1, t2, **options)
    exact = [
        oracle.loss_and_gradient([0, a], [1 - mp.mpf(y), y], t1, t2, [1, 3])
        for a, y in zip(logits.tolist(), target.tolist(), strict=True)
    ]
    assert error(loss, [value for value, _ in exact]) <= TOLERANCE[dtype]
    assert error(gradient, [g[1] for _, g in exact]) <= TOLERANCE[dtype]
    assert (
        error(tempered_sigmoid(logits, t2), [oracle.softmax([0, a], t2)[1] for a in logits.tolist()])
        <= (TOLERANCE[dtype])
    )
