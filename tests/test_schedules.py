"""Schedules of temperatures: where they begin, where they end, and what lies between."""

import math
import pickle
from itertools import pairwise

import numpy as np
import pytest

from bitempered.checks import check_temperatures
from bitempered.schedules import anneal, default


def test_a_line_between_two_steps():
    schedule = anneal((1, 1), (0.2, 1.5), begin=10, finish=50)
    assert [schedule(step) for step in (-3, 0, 10)] == [(1, 1)] * 3
    assert schedule(20) == pytest.approx((0.8, 1.125), rel=1e-15)
    assert schedule(30) == pytest.approx((0.6, 1.25), rel=1e-15)
    assert [schedule(step) for step in (50, 51, 1e9)] == [(0.2, 1.5)] * 3  # exactly, not up to rounding


def test_half_a_cosine_starts_and_ends_slowly():
    schedule = anneal((1, 1), (0, 2), begin=0, finish=1, shape="cosine")
    for step in (0.1, 0.25, 0.5, 0.9):
        assert schedule(step) == pytest.approx(
            (math.cos(math.pi * step / 2) ** 2, 1 + math.sin(math.pi * step / 2) ** 2)
        )
    assert schedule(0) == (1, 1)
    assert schedule(1) == (0, 2)


def test_begin_equal_to_finish_is_a_jump():
    schedule = anneal((1, 1), (0.5, 4), begin=7, finish=7)
    assert schedule(6.999) == (1, 1)
    assert schedule(7) == (0.5, 4)


@pytest.mark.parametrize("shape", ["linear", "cosine"])
@pytest.mark.parametrize("pairs", [((1, 1), (0, 0)), ((0.3, 0.3), (1.9999, 1.9999)), ((0.1, 0.1), (0.7, 0.7))])
def test_every_pair_on_the_way_can_be_used(shape, pairs):
    """Rounding must not push t1 over t2 where they are equal at both ends."""
    schedule = anneal(*pairs, begin=0, finish=997, shape=shape)
    for step in range(1000):
        t1, t2 = schedule(step)
        assert 0 <= t1 <= t2
        check_temperatures(t1, t2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"start": (1, 0.5)}, "t1 must not exceed t2"),
        ({"end": (2, 3)}, r"t1 must be in \[0, 2\)"),
        ({"end": (0.5, math.inf)}, "t2 must be a finite number"),
        ({"begin": 5, "finish": 4}, "begin must not be after finish, got begin = 5 and finish = 4"),
        ({"begin": math.nan}, "begin must be a finite number"),
        ({"shape": "square"}, "shape must be one of linear, cosine, got 'square'"),
    ],
)
def test_bad_schedules_are_refused_when_made(changes, message):
    values = {"start": (1, 1), "end": (0.5, 2), "begin": 0, "finish": 1} | changes
    with pytest.raises(ValueError, match=message):
        anneal(values.pop("start"), values.pop("end"), **values)


@pytest.mark.parametrize("schedule", [anneal((1, 1), (0.5, 2), begin=0, finish=9), default(10, 9)])
def test_a_step_that_is_not_a_number_is_refused(schedule):
    with pytest.raises(ValueError, match="step must be a number, got nan"):
        schedule(math.nan)


def test_a_schedule_can_be_pickled():
    schedule = anneal((1, 1), (0.2, 1.5), begin=10, finish=50, shape="cosine")
    again = pickle.loads(pickle.dumps(schedule))
    assert again == schedule
    assert [again(step) for step in range(60)] == [schedule(step) for step in range(60)]


def test_a_numpy_step_gives_python_numbers():
    for step in (np.int64(3), np.float32(3.0)):
        assert [type(t) for t in anneal((1, 1), (0, 2), begin=0, finish=10)(step)] == [float, float]


def test_rounding_never_puts_t1_above_t2():
    step = sum([0.1] * 100)  # a little less than 10
    t1, t2 = anneal((0.6, 0.8), (0.2, 0.2), begin=0, finish=10, shape="cosine")(step)
    assert t1 <= t2


@pytest.mark.parametrize("arguments", [(0, 10), (-3, 10), (float("nan"), 10), (10, -100)])
def test_the_default_refuses_what_is_no_count(arguments):
    with pytest.raises(ValueError, match="must be a finite number >="):
        default(*arguments)


@pytest.mark.parametrize("pair", [(1,), 1, (1, 1, 1)])
def test_a_schedule_goes_between_pairs(pair):
    with pytest.raises(TypeError, match=r"end must be a pair of temperatures \(t1, t2\)"):
        anneal((1, 1), pair, begin=0, finish=1)


def test_the_default_goes_on_to_the_end_of_the_run():
    """No step is like the one before from 5 % on; with many classes the second leg is flat."""
    schedule = default(10, 100)
    pairs = [schedule(step) for step in range(101)]
    assert pairs[:6] == [(1, 1)] * 6
    assert pairs[40] == pytest.approx((0, 1.75))
    assert pairs[70] == pytest.approx((0, 2.0))
    assert pairs[100] == schedule(1e9) == (0, 2.25)
    assert all(before[1] < after[1] for before, after in pairwise(pairs[5:]))
    assert {default(100, 100)(step) for step in range(56, 101)} == {(0, 1.38)}


@pytest.mark.parametrize("classes", [1, 2, 3, 10, 25, 26, 60, 100, 101, 50_257])
def test_the_default_never_turns_back(classes):
    for steps in (0, 1, 7, 1000):
        schedule = default(classes, steps)
        pairs = [schedule(step) for step in range(steps + 2)]
        assert all(a[0] >= b[0] - 1e-15 and a[1] <= b[1] + 1e-15 for a, b in pairwise(pairs))
        for pair in pairs:
            check_temperatures(*pair)


def test_legs_can_be_pickled():
    schedule = default(10, 100)
    again = pickle.loads(pickle.dumps(schedule))
    assert again == schedule
    assert again(60) == schedule(60)


@pytest.mark.parametrize("count", [np.uint8(10), np.float32(10), np.int64(10), 10.0])
def test_the_default_takes_any_kind_of_number(count):
    """An unsigned integer would wrap around below 25 classes."""
    assert default(count, 100) == default(10, 100)
    assert default(10, count * 10) == default(10, 100)
