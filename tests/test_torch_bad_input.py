"""What bad input gets: the exception types of cross_entropy, and messages that name what came and what is allowed."""

import math

import pytest
import torch
import torch.nn.functional as F

from bitempered.torch import (
    BiTemperedBinaryLogisticLoss,
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

LOGITS = torch.zeros(3, 5)
TARGET = torch.tensor([0, 1, 2])
SOFT = torch.full((3, 5), 0.2)


@pytest.mark.parametrize(
    ("t1", "t2", "message"),
    [
        (-0.1, 1.0, "t1 must be a finite number >= 0, got -0.1"),
        (math.nan, 1.0, "t1 must be a finite number >= 0, got nan"),
        (0.5, math.inf, "t2 must be a finite number >= 0, got inf"),
        (0.5, math.nan, "t2 must be a finite number >= 0, got nan"),
        (2.0, 3.0, r"t1 must be in \[0, 2\), got 2.0"),
        (1.2, 0.8, "t1 must not exceed t2, got t1 = 1.2 and t2 = 0.8"),
    ],
)
def test_temperatures(t1, t2, message):
    with pytest.raises(ValueError, match=message):
        bi_tempered_logistic_loss(LOGITS, TARGET, t1, t2)
    with pytest.raises(ValueError, match=message):
        bi_tempered_binary_logistic_loss(LOGITS, SOFT, t1, t2)
    for module in (BiTemperedLogisticLoss, BiTemperedBinaryLogisticLoss):
        with pytest.raises(ValueError, match=message):
            module(t1, t2)


@pytest.mark.parametrize(
    "function", [log_t, exp_t, log_partition, tempered_softmax, tempered_log_softmax, tempered_sigmoid]
)
def test_one_temperature(function):
    with pytest.raises(ValueError, match="t must be a finite number >= 0, got -1"):
        function(LOGITS, -1)
    with pytest.raises(TypeError, match="t must be a number, got str"):
        function(LOGITS, "1.2")
    with pytest.raises(RuntimeError, match=r"must be float16, bfloat16, float32 or float64, got torch.int64"):
        function(TARGET, 1.2)
    with pytest.raises(TypeError, match=r"must be a torch.Tensor, got list"):
        function([1.0], 1.2)


# (options, exception, message); each exception is the one that cross_entropy raises, as the next test asserts.
CLASSES_CASES = {
    "index too large": (
        {"target": torch.tensor([0, 5, 2])},
        IndexError,
        r"from 0 to 4 or ignore_index \(-100\), got .* to 5",
    ),
    "index negative": ({"target": torch.tensor([0, -1, 2])}, IndexError, "from 0 to 4 .* got values from -1"),
    "smoothing": ({"label_smoothing": 1.5}, RuntimeError, "label_smoothing must be between 0 and 1, got 1.5"),
    "reduction": ({"reduction": "avg"}, ValueError, "reduction must be .* got 'avg'"),
    "ignore_index": ({"target": SOFT, "ignore_index": 1}, RuntimeError, "ignore_index is for class indices, got 1"),
    "batch": (
        {"target": torch.tensor([0, 1])},
        ValueError,
        r"shape \(3,\) or .* of shape \(3, 5\), got torch.int64 of shape \(2,\)",
    ),
    "float indices": (
        {"target": torch.tensor([0.0, 1.0, 2.0])},
        RuntimeError,
        r"class indices \(integers\) .* got torch.float32",
    ),
    "int probabilities": (
        {"target": torch.ones(3, 5, dtype=torch.long)},
        RuntimeError,
        r"probabilities \(floats\) .* got torch.int64",
    ),
    "bool target": ({"target": torch.ones(3, dtype=torch.bool)}, RuntimeError, "got torch.bool"),
    "weight shape": ({"weight": torch.ones(4)}, RuntimeError, r"each of the 5 classes, got shape \(4,\)"),
    "weight dtype": (
        {"weight": torch.ones(5, dtype=torch.long)},
        RuntimeError,
        "weight must be float16.* got torch.int64",
    ),
    "weight gradient": (
        {"weight": torch.ones(5, requires_grad=True)},
        RuntimeError,
        "weight cannot require a gradient",
    ),
    "target not a tensor": ({"target": [0, 1, 2]}, TypeError, r"target must be a torch.Tensor, got list"),
}


@pytest.mark.parametrize("case", CLASSES_CASES)
def test_classes(case):
    options, exception, message = CLASSES_CASES[case]
    options = {"logits": LOGITS, "target": TARGET} | options
    with pytest.raises(exception, match=message):
        bi_tempered_logistic_loss(**options, t1=0.8, t2=1.2)
    options["input"] = options.pop("logits")
    with pytest.raises(exception):
        F.cross_entropy(**options)


# Where cross_entropy says nothing or something else.
MORE_CLASSES_CASES = {
    "smoothing below 0": ({"label_smoothing": -0.5}, RuntimeError, "label_smoothing must be between 0 and 1, got -0.5"),
    "smoothing nan": ({"label_smoothing": math.nan}, RuntimeError, "label_smoothing must be between 0 and 1, got nan"),
    "negative probability": (
        {"target": SOFT - 0.5 * torch.eye(5)[:3]},
        ValueError,
        "probabilities in .* got values from -0.3",
    ),
    "sum": ({"target": 1.01 * SOFT}, ValueError, "sum to 1 within 0.001 .* sums from 1.01"),
    "half sum": ({"target": (1.05 * SOFT).half()}, ValueError, "sum to 1 within 0.01"),
    "nan probability": ({"target": math.nan * SOFT}, ValueError, "must hold probabilities"),
    "probability shape": (
        {"target": torch.full((3, 4), 0.25)},
        ValueError,
        r"\(3, 5\), got torch.float32 of shape \(3, 4\)",
    ),
    "integer logits": ({"logits": LOGITS.long()}, RuntimeError, "logits must be float16.* got torch.int64"),
    "scalar logits": ({"logits": torch.tensor(1.0), "target": torch.tensor(0)}, ValueError, "class dimension"),
    "no classes": ({"logits": torch.zeros(3, 0)}, ValueError, r"at least one class, got shape \(3, 0\)"),
    "smoothing type": ({"label_smoothing": "a"}, RuntimeError, "label_smoothing must be between 0 and 1, got 'a'"),
    "ignore_index type": ({"ignore_index": None}, TypeError, "ignore_index must be an int, got NoneType"),
    "device": ({"target": TARGET.to("meta")}, RuntimeError, "target is on meta and logits on cpu"),
    "unbatched shape": ({"logits": LOGITS[0]}, ValueError, r"shape \(\) or .* of shape \(5,\), got .* \(3,\)"),
    "image shape": ({"logits": torch.zeros(3, 5, 2, 2)}, ValueError, r"shape \(3, 2, 2\) .* of shape \(3,\)"),
}


@pytest.mark.parametrize("case", MORE_CLASSES_CASES)
def test_more_classes(case):
    options, exception, message = MORE_CLASSES_CASES[case]
    with pytest.raises(exception, match=message):
        bi_tempered_logistic_loss(**({"logits": LOGITS, "target": TARGET} | options), t1=0.8, t2=1.2)


BINARY_CASES = {
    "above 1": ({"target": SOFT + 1}, ValueError, r"probabilities in \[0, 1\], got values from 1.2 to 1.2"),
    "below 0": ({"target": SOFT - 1}, ValueError, r"probabilities in \[0, 1\], got values from -0.8"),
    "nan": ({"target": math.nan * SOFT}, ValueError, r"probabilities in \[0, 1\]"),
    "shape": ({"target": SOFT[:, :4]}, ValueError, r"the shape of logits, \(3, 5\), got \(3, 4\)"),
    "weight": ({"weight": torch.ones(4)}, RuntimeError, r"weight must broadcast to .* \(3, 5\), got \(4,\)"),
    "pos_weight": ({"pos_weight": torch.ones(2, 3, 5)}, RuntimeError, r"pos_weight must broadcast .* got \(2, 3, 5\)"),
    "pos_weight gradient": (
        {"pos_weight": torch.ones(5, requires_grad=True)},
        RuntimeError,
        "cannot require a gradient",
    ),
    "reduction": ({"reduction": "avg"}, ValueError, "reduction must be .* got 'avg'"),
    "logits": ({"logits": LOGITS.long()}, RuntimeError, "logits must be float16"),
}


@pytest.mark.parametrize("case", BINARY_CASES)
def test_binary(case):
    options, exception, message = BINARY_CASES[case]
    with pytest.raises(exception, match=message):
        bi_tempered_binary_logistic_loss(**({"logits": LOGITS, "target": SOFT} | options), t1=0.8, t2=1.2)


def test_binary_targets_may_be_integers_or_booleans():
    logits, target = torch.tensor([1.0, -2.0, 3.0]), torch.tensor([True, False, False])
    want = bi_tempered_binary_logistic_loss(logits, target.float(), 0.8, 1.2)
    assert torch.equal(bi_tempered_binary_logistic_loss(logits, target, 0.8, 1.2), want)
    assert torch.equal(bi_tempered_binary_logistic_loss(logits, target.long(), 0.8, 1.2), want)


def test_dim_out_of_range():
    with pytest.raises(IndexError, match=r"dim must be in \[-2, 1\] for this shape, got 2"):
        tempered_softmax(LOGITS, 1.2, dim=2)


def test_values_go_unchecked_where_they_cannot_be_looked_at():
    """Under vmap the rows with a good target keep their loss, and nothing raises: as documented."""
    bad = torch.tensor([0, 7, 2])
    losses = torch.func.vmap(lambda a, y: bi_tempered_logistic_loss(a, y, 0.8, 1.2))(LOGITS, bad)
    want = bi_tempered_logistic_loss(LOGITS, TARGET, 0.8, 1.2, reduction="none")
    torch.testing.assert_close(losses[[0, 2]], want[[0, 2]])  # one by core, the other by a kernel


def test_invalid_temperatures_give_nan_where_they_cannot_be_looked_at():
    """Compiled code takes a number that changes as a tensor, and 0 or a plausible loss would come out."""
    pairs = [(0.5, 1.2, True), (1.5, 1.2, False), (-1.0, 1.2, False), (2.5, 3.0, False), (0.5, math.inf, False)]
    t1, t2, valid = (torch.tensor(column) for column in zip(*pairs, strict=True))
    losses = torch.func.vmap(lambda *t: bi_tempered_logistic_loss(LOGITS, TARGET, *t))(t1, t2)
    assert losses.isnan().tolist() == (~valid).tolist()
    binary = torch.func.vmap(lambda *t: bi_tempered_binary_logistic_loss(LOGITS, SOFT, *t))(t1, t2)
    assert binary.isnan().tolist() == (~valid).tolist()
    slopes = torch.func.vmap(torch.func.grad(lambda t: bi_tempered_logistic_loss(LOGITS + SOFT, TARGET, t, 1.2)))(
        t1[:2]
    )
    assert slopes.isnan().tolist() == [False, True]
    sums = torch.func.vmap(lambda t: tempered_softmax(LOGITS, t).sum())(torch.tensor([1.2, -1.0, math.inf]))
    assert sums.isnan().tolist() == [False, True, True]

    criterion = BiTemperedLogisticLoss()
    compiled = torch.compile(criterion, fullgraph=True, backend="aot_eager")
    for criterion.t1, criterion.t2, expected in [(0.8, 1.2, True), (0.7, 1.3, True), *pairs[:-1]]:
        assert compiled(LOGITS, TARGET).isfinite().item() == expected


def test_within_the_tolerance_on_sums_nothing_raises():
    assert bi_tempered_logistic_loss(LOGITS, SOFT * 1.0009, 0.8, 1.2).isfinite()
    assert bi_tempered_logistic_loss(LOGITS, (SOFT * 1.009).half(), 0.8, 1.2).isfinite()


def test_what_equals_an_allowed_value_but_is_none_is_refused_after_it_too():
    bi_tempered_logistic_loss(LOGITS, TARGET, 0.5, 1.2, ignore_index=-100)
    with pytest.raises(TypeError, match="ignore_index must be an int, got float"):
        bi_tempered_logistic_loss(LOGITS, TARGET, 0.5, 1.2, ignore_index=-100.0)
