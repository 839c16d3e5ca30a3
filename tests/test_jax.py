"""bitempered.jax against the 50-digit oracle and bitempered.torch, and its derivatives against finite differences."""

import math
import os
import subprocess
import sys
from functools import partial

import numpy as np
import oracle
import pytest
import torch

jax = pytest.importorskip("jax")  # no release that we support runs on Python 3.10
jnp = jax.numpy
from cases import INDEX, LOGITS, PAIRS, SOFT, TEMPERATURES, TOLERANCE, WEIGHT, error, exact_losses

import bitempered.jax as bt
import bitempered.torch as bt_torch
from bitempered import core


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


# Numbers compile anew for each temperature, arrays once for all: the first where the two ways of core differ.
NUMBERS = [(0.5, 0.8), (1.0, 1.0), (0.8, 1.2)]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_loss_and_gradient_equal_the_oracle(dtype):
    logits, weight = LOGITS.astype(dtype), WEIGHT.astype(dtype)
    smooth = 0.875 * np.eye(6)[INDEX] + 0.125 / 6

    def both(a, t1, t2):
        def losses(a):
            hard = bt.bi_tempered_logistic_loss(a, INDEX, t1, t2)
            return hard, bt.bi_tempered_logistic_loss(a, INDEX, t1, t2, label_smoothing=0.125, weight=weight)

        (hard, soft), pullback = jax.vjp(losses, a)
        ones, zeros = jnp.ones_like(hard), jnp.zeros_like(hard)
        return hard, soft, pullback((ones, zeros))[0], pullback((zeros, ones))[0]

    traced = jax.jit(both)
    for pair in PAIRS:
        t1, t2 = (float(dtype(t)) for t in pair)  # what the array holds
        values, gradients = exact_losses(logits, np.eye(6)[INDEX], t1, t2)
        smooth_values, smooth_gradients = exact_losses(logits, smooth, t1, t2, WEIGHT.tolist())
        exact = values, smooth_values, gradients, smooth_gradients
        ways = [traced(logits, t1, t2)]
        if pair in NUMBERS:
            ways.append(jax.jit(both, static_argnums=(1, 2))(logits, t1, t2))
        for way in ways:
            for got, want in zip(way, exact, strict=True):
                assert got.dtype == dtype
                assert error(got, want) <= TOLERANCE[dtype]


def test_softmax_and_scalar_functions_equal_the_oracle():
    x = np.array([1e-5, 0.3, 1.0, 50.0])
    z = np.array([-100.0, -2.0, 0.0, 0.2])

    def everything(t):
        probabilities, logs = bt.tempered_softmax(LOGITS, t), bt.tempered_log_softmax(LOGITS, t)
        partition, sigmoid = bt.log_partition(LOGITS, t), bt.tempered_sigmoid(z, t)
        return probabilities, logs, partition, bt.log_t(x, t), bt.exp_t(z, t), sigmoid

    traced = jax.jit(everything)
    for t in TEMPERATURES:
        exact = [p for a in LOGITS.tolist() for p in oracle.softmax(a, t)]
        partitions = [oracle.normalizer(a, t) for a in LOGITS.tolist()]
        ways = (traced, everything) if t in (0.5, 1.0, 1.2) else (traced,)
        for way in ways:
            p, logs, partition, log_x, exp_z, sigmoid = way(t)
            assert error(p, exact) <= 1e-12
            assert [v == -math.inf for v in np.ravel(logs)] == [v == 0 for v in exact]
            assert error(np.exp(logs), exact) <= 1e-12
            # What the rounding of m and of log x is magnified by: see test_numpy.
            assert error(partition, partitions) <= 1e-12 * max(1, (t - 1) * 2.2)
            assert error(log_x, [oracle.log_t(v, t) for v in x]) <= 1e-12 * max(1, 12 * abs(1 - t))
            assert error(exp_z, [oracle.exp_t(v, t) for v in z]) <= 4e-12
            assert error(sigmoid, [oracle.softmax([0, v], t)[1] for v in z]) <= 1e-12


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_agrees_with_torch(dtype):
    t1, t2 = 0.8, 1.2
    # bfloat16: two roundings of nearly the same number, at most one unit in the last place apart.
    tolerance = {"bfloat16": 8e-3, "float32": 3e-6, "float64": 1e-13}[dtype]
    leaf = torch.from_numpy(LOGITS).to(getattr(torch, dtype)).requires_grad_()
    logits = jnp.asarray(leaf.detach().double().numpy()).astype(dtype)
    for target in (INDEX, SOFT):
        want = bt_torch.bi_tempered_logistic_loss(
            leaf, torch.from_numpy(target), t1, t2, reduction="none", label_smoothing=0.1
        )
        (by_torch,) = torch.autograd.grad(want.sum(), leaf)

        def f(a, target=target):
            losses = bt.bi_tempered_logistic_loss(a, target, t1, t2, label_smoothing=0.1)
            assert losses.dtype == dtype
            return losses.sum(), losses

        gradient, losses = jax.jit(jax.grad(f, has_aux=True))(logits)
        assert gradient.dtype == dtype
        np.testing.assert_allclose(losses.astype(float), want.detach().double(), rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(gradient.astype(float), by_torch.double(), rtol=tolerance, atol=tolerance)
    target = jnp.array([0.0, 0.25, 1.0, 0.5])
    got = bt.bi_tempered_binary_logistic_loss(
        logits[:, 1], target, t1, t2, weight=jnp.arange(4.0), pos_weight=jnp.array(3.0)
    )
    want = bt_torch.bi_tempered_binary_logistic_loss(
        leaf.detach()[:, 1],
        torch.from_numpy(np.array(target)),
        t1,
        t2,
        weight=torch.arange(4.0),
        pos_weight=torch.tensor(3.0),
        reduction="none",
    )
    assert got.dtype == dtype
    np.testing.assert_allclose(got.astype(float), want.double(), rtol=tolerance, atol=tolerance)


def differences(f, x, step=1e-5):
    """Central differences of f in each entry of x, on new last axes."""
    columns = []
    for i in np.ndindex(x.shape):
        ahead, back = x.copy(), x.copy()
        ahead[i] += step
        back[i] -= step
        columns.append((np.asarray(f(ahead)) - np.asarray(f(back))) / (2 * step))
    return np.stack(columns, -1).reshape(*np.shape(columns[0]), *x.shape)


def derivatives(f):
    """f's gradient, and its Hessian forward over reverse and reverse over reverse; the sum of a forward gradient."""

    def all_of_them(a, *temperatures):
        def total(a):
            return f(a, *temperatures).sum()

        gradient = jax.grad(total)
        forward = jax.jvp(total, (a,), (jnp.ones_like(a),))[1]
        return gradient(a), forward, jax.jacfwd(gradient)(a), jax.jacrev(gradient)(a)

    return jax.jit(all_of_them), jax.jit(f)


KEPT = np.array([[True, True, False, True], [True, True, True, True]])
ROWS = np.array([[0.3, -0.9, 0.4, 0.1], [-0.2, 0.5, 1.1, -0.4]])  # generic gaps: no edge of a support within a step

FUNCTIONS = {
    "indices": lambda a, t1, t2: bt.bi_tempered_logistic_loss(a, np.array([1, 2]), t1, t2, weight=np.arange(1.0, 5)),
    "masked": lambda a, t1, t2: bt.bi_tempered_logistic_loss(
        a, np.array([3, 0]), t1, t2, where=KEPT, label_smoothing=0.1
    ),
    "binary": lambda a, t1, t2: bt.bi_tempered_binary_logistic_loss(
        a, np.array([[0.0, 1.0, 0.3, 0.0], [0.5, 1.0, 0.0, 0.9]]), t1, t2, pos_weight=np.float64(2)
    ),
    "softmax": lambda a, t1, t2: bt.tempered_softmax(a, t2, where=KEPT) * np.arange(4.0),
    "log_partition": lambda a, t1, t2: bt.log_partition(a, t2),
    "exp_t": lambda a, t1, t2: bt.exp_t(a / 8, t2),
    "log_t": lambda a, t1, t2: bt.log_t(a + 1.5, t2),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivatives_of_both_orders_equal_finite_differences(name):
    """Traced temperatures: one program for every pair."""
    exact, value = derivatives(FUNCTIONS[name])
    for t1, t2 in PAIRS:
        gradient, forward, hessian, twice = exact(ROWS, t1, t2)
        by_differences = differences(lambda a, t1=t1, t2=t2: value(a, t1, t2).sum(), ROWS)
        np.testing.assert_allclose(gradient, by_differences, rtol=1e-7, atol=1e-8)
        np.testing.assert_allclose(forward, gradient.sum(), rtol=1e-12, atol=1e-13)
        curvature = differences(lambda a, t1=t1, t2=t2: exact(a, t1, t2)[0], ROWS)
        np.testing.assert_allclose(hessian, curvature, rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(twice, hessian, rtol=1e-10, atol=1e-12)


def test_derivatives_under_vmap_equal_finite_differences():
    def loss(a, label, t1, t2):
        return bt.bi_tempered_logistic_loss(a, label, t1, t2, label_smoothing=0.1)

    value, gradient, hessian = (
        jax.jit(jax.vmap(f, in_axes=(0, 0, None, None))) for f in (loss, jax.grad(loss), jax.hessian(loss))
    )
    labels, each = np.array([1, 2]), np.arange(2)
    for pair in NUMBERS:
        # No example depends on another's logits: of all the differences those in its own are left.
        slopes = differences(lambda a, pair=pair: value(a, labels, *pair), ROWS)
        assert not slopes[each, each[::-1]].any()
        np.testing.assert_allclose(gradient(ROWS, labels, *pair), slopes[each, each], rtol=1e-7, atol=1e-8)
        curvatures = differences(lambda a, pair=pair: gradient(a, labels, *pair), ROWS)[each, :, each]
        np.testing.assert_allclose(hessian(ROWS, labels, *pair), curvatures, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("t1", "t2"), NUMBERS)
def test_derivatives_with_numbers_for_temperatures_are_the_same(t1, t2):
    loss = FUNCTIONS["masked"]
    hessian = jax.jit(jax.hessian(lambda a, *t: loss(a, *(t or (t1, t2))).sum()))
    np.testing.assert_allclose(hessian(ROWS), hessian(ROWS, t1, t2), rtol=1e-10, atol=1e-12)


def test_gradient_in_probability_targets():
    def f(y):
        return bt.bi_tempered_logistic_loss(ROWS, y, 0.8, 1.2, weight=np.arange(1.0, 5), label_smoothing=0.1).sum()

    y = np.array([[0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1]])
    np.testing.assert_allclose(jax.grad(f)(y), differences(f, y), rtol=1e-7, atol=1e-8)
    # A zero that nothing differentiates does no harm: 0 log 0 = 0.
    gradient = jax.grad(lambda a: bt.bi_tempered_logistic_loss(a, np.eye(4)[:2], 1.0, 1.0).sum())(ROWS)
    np.testing.assert_allclose(gradient, jax.nn.softmax(ROWS) - np.eye(4)[:2], atol=1e-14)


@pytest.mark.parametrize(("t1", "t2"), [(1.0, 1.0), (1.0, 1.2), (1.5, 1.5), (0.8, 1.2), (0.0, 1.0)])
def test_zeros_of_a_target_that_nothing_changes_do_no_harm(t1, t2):
    """The gradient there is infinite for t1 >= 1, and 0 times it counts as 0."""
    a, one_hot, ones = np.array([1.0, 0.5, -3.0]), np.array([1.0, 0.0, 0.0]), np.ones(3)
    by_weight = jax.grad(lambda w, y: bt.bi_tempered_logistic_loss(a, y, t1, t2, weight=w))
    np.testing.assert_allclose(by_weight(ones, one_hot), by_weight(ones, np.array(0)), rtol=1e-12)
    assert jax.grad(lambda p: bt.bi_tempered_binary_logistic_loss(0.3, 0.0, t1, t2, pos_weight=p))(2.0) == 0

    def mixed(s):
        return bt.bi_tempered_logistic_loss(a, s * one_hot + (1 - s) * np.array([0.0, 1.0, 0.0]), t1, t2)

    slope = (mixed(0.3 + 1e-6) - mixed(0.3 - 1e-6)) / 2e-6
    np.testing.assert_allclose(jax.grad(mixed)(0.3), slope, rtol=1e-7)
    bent = (jax.grad(mixed)(0.3 + 1e-6) - jax.grad(mixed)(0.3 - 1e-6)) / 2e-6
    np.testing.assert_allclose(jax.grad(jax.grad(mixed))(0.3), bent, rtol=1e-7)
    loss, moves = partial(bt.bi_tempered_logistic_loss, t1=t1, t2=t2), np.array([1.0, 2.0, 3.0])
    both, alone = jax.jvp(loss, (a, one_hot), (moves, 0 * a))[1], jax.jvp(lambda a: loss(a, one_hot), (a,), (moves,))[1]
    np.testing.assert_allclose(both, alone, rtol=1e-12)


def test_ties_and_classes_outside_the_support():
    rows = np.array([[0.0, 0.0, 0.0], [10.0, 0.0, 9.9], [1.0, -np.inf, 0.5]])

    def f(a, target, t1, t2):
        return bt.bi_tempered_logistic_loss(a, target, t1, t2).sum()

    traced, fixed = jax.jit(jax.value_and_grad(f)), jax.jit(jax.value_and_grad(f), static_argnums=(2, 3))
    hessian = jax.jit(jax.hessian(f))
    for t1, t2 in [(0.5, 0.5), (0.8, 1.2)]:
        for target in np.array([[0, 1, 0], [2, 2, 1]]):
            leaf = torch.from_numpy(rows).requires_grad_()
            want = bt_torch.bi_tempered_logistic_loss(leaf, torch.from_numpy(target), t1, t2, reduction="sum")
            (want_gradient,) = torch.autograd.grad(want, leaf)
            for way in (traced, fixed):
                value, gradient = way(rows, target, t1, t2)
                np.testing.assert_allclose(value, want.item(), rtol=1e-12)
                np.testing.assert_allclose(gradient, want_gradient, rtol=1e-12, atol=1e-14)
            assert np.isfinite(hessian(rows, target, t1, t2)).all()


def test_temperatures_per_example_under_vmap_and_out_of_range():
    t1, t2 = np.array([0.5, 0.8]), np.array([1.0, 1.2])
    index = np.array([1, 2])
    loss = jax.jit(bt.bi_tempered_logistic_loss)
    together = loss(ROWS, index, t1, t2)
    mapped = jax.vmap(loss)(ROWS, index, t1, t2)
    alone = [loss(ROWS, index, t1[i], t2[i])[i] for i in range(2)]
    np.testing.assert_allclose(together, alone, rtol=1e-13)
    np.testing.assert_allclose(mapped, alone, rtol=1e-13)
    for bad in [(2.0, 3.0), (-0.1, 1.0), (1.0, 0.5), (0.5, np.inf), (np.nan, 1.0)]:
        assert np.isnan(loss(ROWS, index, *bad)).all()


def test_masks():
    """A class that is masked is not there, by `where` or by -inf, with a number or an array as temperature."""
    a = np.array([[0.3, 5.0, -0.9, 0.4]])
    mask = np.array([[True, False, True, True]])
    short = a[:, mask[0]]

    def everything(t):
        by_where, by_logits = bt.tempered_softmax(a, t, where=mask), bt.tempered_softmax(np.where(mask, a, -np.inf), t)
        loss = bt.bi_tempered_logistic_loss(a, np.array([3]), 0.5, t, where=mask, label_smoothing=0.1)
        want = bt.bi_tempered_logistic_loss(short, np.array([2]), 0.5, t, label_smoothing=0.1)
        return by_where, by_logits, bt.tempered_softmax(short, t), loss, want

    traced = jax.jit(everything)
    for by_where, by_logits, p, loss, want in [
        traced(0.5),
        traced(1.0),
        traced(1.2),
        jax.jit(lambda: everything(1.2))(),
    ]:
        np.testing.assert_allclose(by_where, np.insert(p, 1, 0.0, axis=1), rtol=1e-13)
        np.testing.assert_array_equal(by_logits, by_where)
        np.testing.assert_allclose(loss, want, rtol=1e-13)


def test_an_example_left_out_counts_for_nothing():
    padded = np.concatenate([ROWS, np.full((1, 4), np.nan)])

    def f(a):
        return bt.bi_tempered_logistic_loss(
            a, np.array([1, 2, 0]), 0.8, 1.2, where=np.array([True, True, False]), label_smoothing=0.1
        )

    assert f(padded)[2] == 0
    assert np.isfinite(f(padded)).all()
    assert not np.any(jax.grad(lambda a: f(a).sum())(padded)[2])
    assert np.isfinite(jax.jit(jax.hessian(lambda a: f(a).sum()))(padded)).all()


def test_bad_values_give_nan_and_bad_logits_too():
    losses = bt.bi_tempered_logistic_loss(np.zeros((4, 3)), np.array([0, 3, -1, 2]), 0.8, 1.2)
    assert np.isnan(losses).tolist() == [False, True, True, False]
    assert np.isnan(bt.bi_tempered_logistic_loss(np.zeros(3), np.array([1.5, -0.5, 0.0]), 0.8, 1.2))
    assert np.isnan(bt.bi_tempered_binary_logistic_loss(np.zeros(2), np.array([1.5, -0.5]), 0.8, 1.2)).all()
    softmax = jax.jit(bt.tempered_softmax)
    for row in ([np.inf, 0.0], [np.nan, 0.0], [-np.inf, -np.inf]):
        for t in (0.5, 1.2):
            assert np.isnan(softmax(np.array(row), t)).all()


CASES = {
    "t1": ({"t1": 2.0, "t2": 3.0}, ValueError, r"t1 must be in \[0, 2\), got 2.0"),
    "t1 with an array": ({"t1": 2.0, "t2": jnp.array(3.0)}, ValueError, r"t1 must be in \[0, 2\), got 2.0"),
    "t2": ({"t2": math.nan}, ValueError, "t2 must be a finite number >= 0, got nan"),
    "t1 above t2": ({"t1": 1.2, "t2": 0.8}, ValueError, "t1 must not exceed t2"),
    "t text": ({"t2": "1.2"}, TypeError, "t2 must be a number or an array, got str"),
    "shape": ({"target": INDEX[:2]}, ValueError, r"shape \(4,\) or .* of shape \(4, 6\), got int64 of shape \(2,\)"),
    "smoothing": ({"label_smoothing": -0.5}, ValueError, "label_smoothing must be between 0 and 1, got -0.5"),
    "weight": ({"weight": np.ones(5)}, ValueError, r"each of the 6 classes, got shape \(5,\)"),
    "logits dtype": ({"logits": LOGITS.astype(int)}, TypeError, "logits must be float16, .* got int64; convert it"),
    "complex": ({"t1": jnp.array(0.5 + 3j)}, TypeError, "t1 must hold real numbers, got complex"),
    "texts": ({"t2": np.array(["1.2"])}, TypeError, "t2 must hold real numbers, got <U3"),
    "huge": ({"t2": 10**400}, ValueError, "t2 must be a finite number >= 0, got 1000"),
    "rows of t2": ({"t2": np.ones(3)}, ValueError, r"t2 must broadcast to the examples, \(4,\), got shape \(3,\)"),
    "axis in words": ({"axis": "1"}, TypeError, "axis must be an integer, got '1'"),
    "axis": ({"axis": -3}, ValueError, r"axis must be in \[-2, 1\] for this shape, got -3"),
    "where shape": ({"where": np.ones(6, bool)}, ValueError, r"\(4, 6\), or .* examples: \(4,\), got shape \(6,\)"),
    "where": ({"where": np.ones((4, 6))}, TypeError, "where must hold booleans, got float64"),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input(case):
    options, exception, message = CASES[case]
    with pytest.raises(exception, match=message):
        bt.bi_tempered_logistic_loss(**({"logits": LOGITS, "target": INDEX, "t1": 0.8, "t2": 1.2} | options))


def test_a_mask_of_the_softmax_has_the_axes_of_the_logits():
    with pytest.raises(ValueError, match=r"where must have as many axes as logits, 2, got shape \(4,\)"):
        bt.tempered_softmax(LOGITS, 1.2, where=np.ones(4, bool))


def test_large_class_indices_do_not_wrap_around():
    target = np.array([0, 2**32, 2**32 + 1, 2**31, -(2**32)])
    for dtype in (np.int64, np.uint64):
        with jax.enable_x64(False):
            losses = bt.bi_tempered_logistic_loss(np.zeros((5, 3), np.float32), target.astype(dtype), 0.8, 1.2)
        assert np.isnan(losses).tolist() == [False, True, True, True, True]
    with jax.enable_x64(False):
        assert np.isnan(bt.bi_tempered_logistic_loss(np.zeros(3, np.float32), np.int64(2**32), 0.8, 1.2))
        assert np.isnan(bt.bi_tempered_binary_logistic_loss(np.zeros(1, np.float32), target[1:2], 0.8, 1.2)).all()


def test_axis():
    logits = np.random.default_rng(1).normal(size=(2, 5, 3))
    target = np.array([[0, 4, 2], [1, 1, 3]])
    moved = bt.bi_tempered_logistic_loss(np.moveaxis(logits, 1, -1), target, 0.8, 1.2)
    np.testing.assert_allclose(bt.bi_tempered_logistic_loss(logits, target, 0.8, 1.2, axis=1), moved, rtol=1e-13)
    per_example = bt.bi_tempered_logistic_loss(logits, target, 0.8, np.full((2, 1), 1.2), axis=1)
    np.testing.assert_allclose(per_example, moved, rtol=1e-13)
    np.testing.assert_allclose(bt.tempered_softmax(logits, 1.2, axis=1).sum(1), 1, rtol=1e-14)


SHARDED = """
import re
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import bitempered.jax as bt

assert len(jax.devices()) == 4
sharding = NamedSharding(Mesh(np.array(jax.devices()), ("batch",)), PartitionSpec("batch"))
whole = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32), np.arange(8) % 6
parts = jax.device_put(whole, sharding)

def everything(logits, target):
    losses, pullback = jax.vjp(lambda a: bt.bi_tempered_logistic_loss(a, target, 0.8, 1.2), logits)
    return losses, pullback(jnp.ones_like(losses))[0], bt.tempered_softmax(logits, 1.2)

def exchanges(f):
    program = jax.jit(f).lower(*parts).compile().as_text()
    return re.search("all-gather|all-reduce|all-to-all|collective-permute", program)

for got, want in zip(jax.jit(everything)(*parts), everything(*map(jnp.asarray, whole)), strict=True):
    assert got.sharding.is_equivalent_to(sharding, got.ndim), got.sharding
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)
assert not exchanges(everything)
assert exchanges(lambda *batch: everything(*batch)[0].mean())  # as a mean over the batch has to
"""


def test_sharded_batches_keep_their_sharding():
    """Loss, gradient and probabilities of a batch over four devices stay where they are, and no device asks another."""
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", SHARDED], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("traced", [False, True])
def test_what_is_compiled_does_not_grow_with_the_steps_of_the_solver(traced):
    """A loop of XLA's: 8 steps for 2 classes and 12 for a vocabulary are one program, of one size."""

    def lines(classes):
        a, y = jnp.zeros((4, classes)), jnp.zeros(4, int)
        f = jax.value_and_grad(lambda a, *t: bt.bi_tempered_logistic_loss(a, y, *(t or (0.5, 4.0))).mean())
        return jax.jit(f).lower(a, *((0.5, 4.0) if traced else ())).as_text().count("\n")

    assert core.newton_steps(4.0, 2, 1e-16) < core.newton_steps(4.0, 50257, 1e-16)
    assert lines(2) == lines(50257)
