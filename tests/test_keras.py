"""bitempered.keras on each backend against the 50-digit oracle, and in the manners of Keras.

A process has one backend: PyTorch in this one, TensorFlow and JAX in one subprocess each (keras_checks.py).
"""

import functools
import importlib.util
import json
import math
import os
import subprocess
import sys

import mpmath as mp
import numpy as np
import oracle
import pytest
import torch

os.environ["KERAS_BACKEND"] = "torch"
keras = pytest.importorskip("keras", minversion="3.5")
import keras_checks
from cases import INDEX, LOGITS, SOFT, error, exact_losses
from rescale_cases import rescaled_losses

import bitempered.keras as bt
import bitempered.numpy as bt_numpy
import bitempered.torch as bt_torch

# Keras asks NumPy for copies in a way that PyTorch's tensors do not know yet.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

NEAR_ONE = [1 - 1e-6, 1 + 1e-6]
# Both sides of 1, one across it, a heavy tail, next to 1.
PAIRS = [(0.0, 0.0), (0.5, 0.8), (0.2, 1.0), (1.0, 1.0), (0.8, 1.2), (1.3, 1.6), (0.5, 4.0)]
PAIRS += [(t, t) for t in NEAR_ONE] + [(0.8, t) for t in NEAR_ONE]
CURVED = [(0.5, 0.8), (1.0, 1.0), (0.8, 1.2)]  # finite support, the ordinary softmax, a heavy tail
DIRECTION = np.random.default_rng(0).normal(size=LOGITS.shape)


def everything(backend):
    # On JAX each pair is compiled anew; test_jax.py has the other temperatures there, and the other backends have them
    # here.
    pairs = CURVED if backend == "jax" else PAIRS
    inputs = {"logits": LOGITS, "index": INDEX, "soft": SOFT, "direction": DIRECTION}
    inputs = {name: array.tolist() for name, array in inputs.items()} | {"pairs": pairs, "curved": CURVED}
    inputs = json.loads(json.dumps(inputs))
    if backend == keras.backend.backend():
        return pairs, keras_checks.everything(inputs)
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    done = run([keras_checks.__file__], KERAS_BACKEND=backend, JAX_ENABLE_X64="1", input=json.dumps(inputs))
    assert done.returncode == 0, done.stderr
    return pairs, json.loads(done.stdout)


def run(arguments, input=None, **variables):
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"} | variables
    return subprocess.run([sys.executable, *arguments], input=input, capture_output=True, text=True, env=environment)


@functools.cache
def expected(kind, t1, t2):
    """What `keras_checks.numbers` gives for one kind of target: from the oracle, or from what has it as its own."""
    if kind == "variable":
        return expected("index", t1, t2)
    if kind in ("index", "soft"):
        target = SOFT if kind == "soft" else np.eye(6)[INDEX]
        second = along_direction(target, t1, t2) if kind == "index" and (t1, t2) in CURVED else None
        return *exact_losses(LOGITS, target, t1, t2), second
    if kind == "rescaled":
        return *rescaled_losses(LOGITS, np.eye(6)[INDEX], t1, t2), None
    if kind == "binary":
        logits, target = np.stack([0 * LOGITS[:, 0], LOGITS[:, 0]], 1), np.stack([1 - SOFT[:, 0], SOFT[:, 0]], 1)
        losses, gradient = bt_numpy.loss_and_grad(logits, target, t1, t2, label_smoothing=0.125)
        return losses, gradient[:, 1], None
    logits = {
        "float32": np.float64(np.float32(LOGITS)),
        "masked": np.where(np.arange(6) == 2, -np.inf, LOGITS),
        "smooth": LOGITS,
    }[kind]
    smoothing = 0.125 if kind == "smooth" else 0.0
    losses, gradient = bt_numpy.loss_and_grad(logits, INDEX, t1, t2, label_smoothing=smoothing)
    return losses, gradient.ravel(), None


def along_direction(target, t1, t2):
    """The derivative of the exact gradient along DIRECTION, by a difference that 50 digits make exact enough."""
    step, second = mp.mpf(10) ** -15, []
    for a, d, y in zip(LOGITS.tolist(), DIRECTION.tolist(), target.tolist(), strict=True):
        ahead, back = (
            oracle.loss_and_gradient([mp.mpf(x) + h * v for x, v in zip(a, d, strict=True)], y, t1, t2)[1]
            for h in (step, -step)
        )
        second += [(p - q) / (2 * step) for p, q in zip(ahead, back, strict=True)]
    return second


@functools.cache
def trained_here():
    return keras_checks.keras_digits.train(bt.BiTemperedLogisticLoss(t1=0.2, t2=1.2), epochs=3)[0]


@pytest.mark.parametrize(
    "backend", ["tensorflow", *(pytest.param(name, marks=pytest.mark.slow) for name in ("jax", "torch"))]
)
def test_backend(backend):
    pairs, results = everything(backend)
    assert set(results["imported"]) <= {"bitempered"}  # nothing that Keras had not imported

    for pair, numbers in zip(pairs, results["numbers"], strict=True):
        for kind, values in numbers.items():
            for got, want in zip(values, expected(kind, *pair), strict=True):
                assert (got is None) == (want is None)
                if want is not None:
                    assert error(got, want) <= (3e-6 if kind == "float32" else 1e-12), (kind, pair)

    plain, *bad = results["compiled"]  # where bad values give NaN
    assert error(plain, expected("index", 0.8, 1.2)[0]) <= 3e-6
    assert bad[0][:3] == plain[:3]
    for row in bad:
        assert [math.isnan(value) for value in row] == [False, False, False, True]

    manners = results["manners"]
    losses = expected("smooth", 0.8, 1.2)[0]
    loss = bt.BiTemperedLogisticLoss(0.8, 1.2, label_smoothing=0.125, name="robust", dtype="float64")
    assert manners["config"] == ["BiTemperedLogisticLoss", loss.get_config()]
    assert manners["compiled"] == [True, False]
    # Keras' own mean is one in float32 on PyTorch, whatever the dtype.
    assert error(manners["loaded"], [sum(losses) / 4]) <= 3e-6
    assert error(manners["weighted"], [sum(i * value for i, value in enumerate(losses)) / 4]) <= 3e-6
    assert error(manners["masked"], [sum(losses[1:]) / 3]) <= 3e-6

    for dtype in ("float16", "bfloat16"):
        logits, value, of_dtype = results["half"][dtype]
        assert of_dtype == "float32"
        assert error(value, [sum(exact_losses(np.array(logits), np.eye(6)[INDEX], 0.8, 1.2)[0]) / 4]) <= 3e-6
    first, *_, last = results["half"]["mixed"]
    assert last < first

    changing, constant = results["schedule"]
    history, warned, config, traces = changing
    assert not warned
    assert (config["t1"], config["t2"], config["rescale"]) == (0.5, 4.0, True)
    assert error(history["t1"] + history["t2"], [1, 0.8, 0.5, 1, 1.5, 4]) <= 1e-7
    wanted = [rescaled_losses(LOGITS, np.eye(6)[INDEX], *pair)[0] for pair in [(1.0, 1.0), (0.8, 1.5), (0.5, 4.0)]]
    assert error(history["loss"], [sum(losses) / 4 for losses in wanted]) <= 3e-6
    history, warned, _, traces_without = constant
    if backend == "torch":  # not compiled: what is set takes effect
        assert error(history["loss"], [sum(losses) / 4 for losses in wanted]) <= 3e-6
        assert not warned
    else:
        assert traces == traces_without  # a change compiles nothing anew
        assert len(warned) == 4
        assert "give model.compile the metric `loss.temperatures`" in warned[0]

    (used, warned), (used_in_sync, warned_in_sync) = results["by_batch"]
    assert error(used_in_sync, [1 + i / 10 for i in range(len(used))]) <= 1e-7
    assert len(used) == 4
    assert not warned_in_sync
    if backend == "jax":
        assert error(used, [1, 1, 1.2, 1.2]) <= 1e-7  # what the first batch of an epoch sets is taken
        assert len(warned) == 2
        assert "call self.model.jax_state_sync() first" in warned[0]
    else:
        assert used == used_in_sync
        assert not warned

    assert "no gradient in y_true: pass keras.ops.stop_gradient" in results["refusal"]
    with_label, without = results["padded"]
    assert with_label == without
    assert np.isfinite(with_label).all()
    assert results["empty"] == [[], []]
    np.testing.assert_allclose(*results["one_hot"], rtol=1e-6)

    losses, accuracy = results["example"]
    np.testing.assert_allclose(losses, trained_here(), rtol=1e-5)  # one training, rounded differently
    assert accuracy > 0.5  # of ten classes: by chance 0.1


def test_the_example_as_a_script(capsys):
    keras_checks.keras_digits.main(epochs=1)
    names = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert names[0] == "sparse_categorical_crossentropy"
    assert names[1].startswith("bi_tempered_logistic_loss")


@pytest.mark.parametrize(("t1", "t2"), [(0.5, 0.8), (1.0, 1.0), (0.8, 1.2)])
def test_agrees_with_the_torch_adapter(t1, t2):
    """Every shape of target, the class axis elsewhere, and the gradient of Keras' mean."""
    rng = np.random.default_rng(1)
    a = torch.tensor(rng.normal(size=(4, 6, 3)), requires_grad=True)
    index = torch.tensor(rng.integers(6, size=(4, 3)))
    soft = torch.tensor(rng.dirichlet(np.ones(6), size=(4, 3)))
    last = a.movedim(1, -1)
    loss = bt.BiTemperedLogisticLoss(t1, t2, label_smoothing=0.1, reduction="sum", dtype="float64")
    channels = bt.BiTemperedLogisticLoss(t1, t2, label_smoothing=0.1, axis=1, reduction="sum", dtype="float64")
    one_hot = torch.nn.functional.one_hot(index, 6)
    for target, ways in [
        (index, [(loss, index, last), (loss, index[..., None], last), (loss, one_hot, last), (channels, index, a)]),
        (soft.movedim(-1, 1), [(loss, soft, last), (channels, soft.movedim(-1, 1), a)]),
    ]:
        want = bt_torch.bi_tempered_logistic_loss(a, target, t1, t2, label_smoothing=0.1, reduction="sum")
        (gradient,) = torch.autograd.grad(want, a)
        for way, y_true, y_pred in ways:
            got = way(y_true, y_pred)
            torch.testing.assert_close(got, want, rtol=1e-13, atol=0)
            torch.testing.assert_close(torch.autograd.grad(got, a, retain_graph=True)[0], gradient)
    probability = torch.tensor(rng.random((4, 3)))
    binary = bt.BiTemperedBinaryLogisticLoss(t1, t2, label_smoothing=0.1, reduction=None, dtype="float64")
    want = bt_torch.bi_tempered_binary_logistic_loss(a[:, 0], 0.9 * probability + 0.05, t1, t2, reduction="none")
    torch.testing.assert_close(binary(probability, a[:, 0]), want.mean(-1), rtol=1e-13, atol=0)
    torch.testing.assert_close(binary(probability[:, 0], a[:, 0, :1]), want[:, 0], rtol=1e-13, atol=0)


def test_cross_entropy_at_temperatures_of_1():
    logits = np.float32(LOGITS)
    got = bt.BiTemperedLogisticLoss(1.0, 1.0)(INDEX, logits)
    torch.testing.assert_close(got, keras.losses.SparseCategoricalCrossentropy(from_logits=True)(INDEX, logits))
    target = np.float32(np.eye(6)[INDEX])
    got = bt.BiTemperedBinaryLogisticLoss(1.0, 1.0)(target, logits)
    torch.testing.assert_close(got, keras.losses.BinaryCrossentropy(from_logits=True)(target, logits))


@pytest.mark.parametrize("loss", [bt.BiTemperedLogisticLoss, bt.BiTemperedBinaryLogisticLoss])
def test_config_round_trip(loss):
    options = {"label_smoothing": 0.1, "reduction": None, "name": "robust", "dtype": "float64", "rescale": True}
    options |= {"axis": 1} if loss is bt.BiTemperedLogisticLoss else {}
    first = loss(0.5, 2, **options)
    again = keras.losses.deserialize(keras.losses.serialize(first))
    assert type(again) is loss
    assert again.get_config() == first.get_config() == {"t1": 0.5, "t2": 2.0, "from_logits": True} | options


def test_padding_at_masked_positions_does_not_matter():
    """Every shape of target; the masked steps of both sequences hold what no target may."""
    rng = np.random.default_rng(2)
    logits, index, soft = rng.normal(size=(2, 4, 6)), rng.integers(6, size=(2, 4)), rng.dirichlet(np.ones(6), (2, 4))
    kept = np.array([[True, True, True, False], [True, False, False, False]])
    padded_index, padded_soft = np.where(kept, index, -1), np.where(kept[..., None], soft, -1.0)
    single = rng.normal(size=(2, 4, 1))
    for loss, bad, good, a in [
        (CLASSES, padded_index, index, logits),
        (CLASSES, padded_index[..., None], index[..., None], logits),
        (CLASSES, padded_soft, soft, logits),
        (bt.BiTemperedLogisticLoss(0.8, 1.2, axis=1), *(x.swapaxes(1, 2) for x in (padded_soft, soft, logits))),
        (BINARY, padded_soft, soft, logits),
        (BINARY, padded_soft[..., :1], soft[..., :1], single),
        (BINARY, padded_soft[..., 0], soft[..., 0], single),
    ]:
        y_pred = torch.tensor(a, requires_grad=True)
        y_pred._keras_mask = torch.tensor(kept)
        got = loss(bad, y_pred)
        each = type(loss).from_config(loss.get_config() | {"reduction": None})(good, a)
        torch.testing.assert_close(got, each[torch.tensor(kept)].mean())
        (gradient,) = torch.autograd.grad(got, y_pred)
        assert ((gradient if loss.axis == -1 else gradient.mT)[~kept] == 0).all()
        with pytest.raises((IndexError, ValueError), match="y_true must hold"):
            loss(bad, a)


def test_temperatures_can_be_set_one_after_the_other_and_are_checked_when_used():
    for use_variables in (False, True):
        loss = bt.BiTemperedLogisticLoss(0.5, 0.8)
        if use_variables:
            loss.temperatures  # noqa: B018
        loss.t1, loss.t2 = 1.1, 1.4  # t1 passes the old t2 on its way
        want = bt_numpy.bi_tempered_logistic_loss(LOGITS, INDEX, 1.1, 1.4).mean()
        assert float(loss(INDEX, LOGITS)) == pytest.approx(want, rel=1e-5)
        loss.t1 = 1.5
        with pytest.raises(ValueError, match=r"t1 must not exceed t2, got t1 = 1\.5 and t2 = 1\.4"):
            loss(INDEX, LOGITS)
        with pytest.raises(ValueError, match="t2 must be a finite number >= 0, got nan"):
            loss.t2 = math.nan
    large = bt.BiTemperedLogisticLoss(0.5, 50.0, rescale=True)
    with pytest.raises(ValueError, match="more than 1e30 for 6 classes and t2 = 50"):
        large(INDEX, LOGITS)


def test_the_metric_of_temperatures_round_trips():
    loss = bt.BiTemperedLogisticLoss(0.5, 2.0, name="robust", dtype="float64")
    loss.t2 = 1.25
    again = keras.metrics.deserialize(keras.metrics.serialize(loss.temperatures))
    again.update_state(INDEX, LOGITS)
    again.reset_state()
    assert {name: float(value) for name, value in again.result().items()} == {"t1": 0.5, "t2": 1.25}


def test_class_indices_survive_half_precision():
    logits = np.random.default_rng(0).normal(size=(2, 300))  # bfloat16 knows no 257
    want = bt.BiTemperedLogisticLoss(0.8, 1.2)([257, 299], logits)
    assert bt.BiTemperedLogisticLoss(0.8, 1.2, dtype="bfloat16")([257, 299], logits) == want


OPTIONS = {
    "t1": ({"t1": 2.0, "t2": 3.0}, ValueError, r"t1 must be in \[0, 2\), got 2.0"),
    "t2": ({"t2": math.inf}, ValueError, "t2 must be a finite number >= 0, got inf"),
    "t1 above t2": ({"t1": 1.3}, ValueError, "t1 must not exceed t2, got t1 = 1.3 and t2 = 1.2"),
    "probabilities": ({"from_logits": False}, ValueError, "must be True, got False: probabilities are not supported"),
    "not a bool": ({"from_logits": 1}, ValueError, "from_logits must be True, got 1: .* leave out the activation"),
    "smoothing": ({"label_smoothing": 1.5}, ValueError, "label_smoothing must be between 0 and 1, got 1.5"),
    "reduction": ({"reduction": "average"}, ValueError, "reduction=average"),
    "rescale": ({"rescale": 1}, TypeError, "rescale must be True or False, got 1"),
}


@pytest.mark.parametrize("loss", [bt.BiTemperedLogisticLoss, bt.BiTemperedBinaryLogisticLoss])
@pytest.mark.parametrize("case", OPTIONS)
def test_bad_options(loss, case):
    options, exception, message = OPTIONS[case]
    with pytest.raises(exception, match=message):
        loss(**({"t1": 0.8, "t2": 1.2} | options))


CLASSES, BINARY = bt.BiTemperedLogisticLoss(0.8, 1.2), bt.BiTemperedBinaryLogisticLoss(0.8, 1.2)
TARGETS = {
    "index": (CLASSES, [0, 6, 2, 1], IndexError, "class indices from 0 to 5, got values from 0 to 6"),
    "negative index": (CLASSES, [0, -1, 2, 1], IndexError, "class indices from 0 to 5, got values from -1 to 2"),
    "fraction": (CLASSES, [0, 0.5, 2, 1], IndexError, "class indices from 0 to 5, got values from 0 to 2"),
    "nan index": (CLASSES, [0, math.nan, 2, 1], IndexError, "class indices from 0 to 5"),
    "negative": (CLASSES, SOFT - 0.5, ValueError, r"probabilities in \[0, 1\] .* got values from -0.5"),
    "sum": (CLASSES, 1.1 * SOFT, ValueError, "sum to 1 within 0.01 .* with sums from 1.1"),
    "nan": (CLASSES, math.nan * SOFT, ValueError, "must hold probabilities"),
    "length": (CLASSES, [0, 1], ValueError, r"indices of shape \(4,\) or .* of shape \(4, 6\), got shape \(2,\)"),
    "classes": (CLASSES, SOFT[:, :5], ValueError, r"got shape \(4, 5\)"),
    "axis": (bt.BiTemperedLogisticLoss(0.8, 1.2, axis=2), INDEX, ValueError, r"axis must be in \[-2, 1\]"),
    "above 1": (BINARY, SOFT + 1, ValueError, r"probabilities in \[0, 1\], got values from 1"),
    "binary shape": (BINARY, SOFT[:, :4], ValueError, r"the shape of y_pred, .* \(4, 6\), got \(4, 4\)"),
}


@pytest.mark.parametrize("case", TARGETS)
def test_bad_targets(case):
    loss, target, exception, message = TARGETS[case]
    with pytest.raises(exception, match=message):
        loss(np.asarray(target), LOGITS)


def test_unknown_shapes_of_a_graph():
    """TensorFlow's graphs have lengths that are None: those of examples may be, those of classes may not."""
    assert bt._check_classes((None,), (None, 6), -1) == (1, True)
    assert bt._check_classes((None, 1), (4, 6), -1) == (1, True)
    assert bt._check_classes((4, 6), (None, 6), -1) == (1, False)
    with pytest.raises(ValueError, match=r"known number of classes, got shape \(4, None\) with axis 1"):
        bt._check_classes((4,), (4, None), -1)
    with pytest.raises(ValueError, match=r"got shape \(4, None\)"):  # indices or probabilities?
        bt._check_classes((4, None), (4, 6), -1)


@pytest.mark.parametrize(
    ("missing", "line"),
    [
        ("keras", 'bitempered.keras needs Keras 3: pip install "keras>=3.5"'),
        ("torch", "Keras needs its backend: pip install torch, or set KERAS_BACKEND to tensorflow, jax or torch"),
    ],
)
def test_what_is_missing_is_named(missing, line):
    done = run(["-c", f"import sys; sys.modules['{missing}'] = None; import bitempered.keras"])
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1] == f"ModuleNotFoundError: {line}"
