import numpy as np
import pytest

from bitempered.diagnosis import learning_problem

EVEN = np.repeat(np.arange(4), 25)
TWENTY = np.repeat(np.arange(20), 10)


@pytest.mark.parametrize(
    ("labels", "predicted", "message"),
    [
        (EVEN, EVEN, None),
        (EVEN, np.where(EVEN == 3, 2, EVEN), "class 3 is never predicted"),
        (EVEN, np.where(EVEN >= 2, 0, EVEN), "classes 2, 3 are never predicted"),
        (EVEN, np.full(100, 1), "every row is predicted as class 1"),
        (EVEN, (EVEN + 1) % 4, "0.0% of the labels are predicted, no more than by always answering class 0"),
        (np.zeros(9, int), np.zeros(9, int), None),  # one class alone: nothing to learn
        (np.array([], int), np.array([], int), None),
        (np.r_[EVEN, np.full(9, 4)], np.r_[EVEN, np.zeros(9, int)], None),  # too few labels to say
        (TWENTY, TWENTY % 10, "classes 10, 11, 12, 13, 14 and 5 more are never predicted"),
    ],
)
def test_what_is_wrong_is_said(labels, predicted, message):
    assert learning_problem(labels, predicted, 20) == message


@pytest.mark.parametrize(
    ("predicted", "message"),
    [
        (np.full(100, 1), "every row is predicted as class dog"),
        ((EVEN + 1) % 4, "0.0% of the labels are predicted, no more than by always answering class cat"),
        (np.where(EVEN >= 2, 0, EVEN), "classes owl, 7 are never predicted"),
    ],
)
def test_classes_have_their_names(predicted, message):
    names = np.array(["cat", "dog", "owl", 7], dtype=object)
    assert learning_problem(EVEN, predicted, 4, names=names) == message


def test_classes_of_little_weight_may_be_given_up():
    predicted, weight = np.where(EVEN == 3, 2, EVEN), np.ones(100)
    assert learning_problem(EVEN, predicted, 4, weight=weight) == "class 3 is never predicted"
    weight[EVEN == 3] = 0.2  # 5 of 80, a quarter of an even share
    assert learning_problem(EVEN, predicted, 4, weight=weight) == "class 3 is never predicted"
    weight[EVEN == 3] = 0.19
    assert learning_problem(EVEN, predicted, 4, weight=weight) is None
