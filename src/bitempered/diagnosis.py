"""What is wrong with a classifier that has not learnt: the sentence that a fit or a run warns with."""

from typing import Any

import numpy as np

__all__ = ["learning_problem"]


def learning_problem(
    labels: Any, predicted: Any, num_classes: int, *, names: Any = None, weight: Any = None
) -> str | None:
    """Say that predictions are no better than one constant answer, or that classes were given up; None if neither.

    `labels` and `predicted` are class numbers below `num_classes`. A class counts as given up if it is never predicted
    although it has at least 10 labels and a quarter of an even share. With a `weight` for each label, classes with less
    than a quarter of an even share of the weight are left out altogether. The sentence has the `names` of the classes,
    or their numbers.

    >>> learning_problem([0, 1, 2, 2], [2, 2, 2, 2], 3)
    'every row is predicted as class 2'
    >>> learning_problem([0, 1, 2, 2], [2, 2, 2, 2], 3, names=["cat", "dog", "owl"])
    'every row is predicted as class owl'
    """
    names = range(num_classes) if names is None else names
    labels, predicted = np.asarray(labels), np.asarray(predicted)
    if weight is not None:
        share = np.bincount(labels, weight / weight.max(), minlength=num_classes)
        common = (share >= share.sum() / (4 * num_classes))[labels]
        labels, predicted = labels[common], predicted[common]
    counts, guesses = (np.bincount(x, minlength=num_classes) for x in (labels, predicted))
    if not len(labels) or counts.max() == len(labels):
        return None
    if guesses.max() == len(predicted):
        return f"every row is predicted as class {names[guesses.argmax()]}"
    right = np.count_nonzero(labels == predicted)
    if right <= counts.max():
        return (
            f"{right / len(labels):.1%} of the labels are predicted, no more than by always answering class"
            f" {names[counts.argmax()]}"
        )
    lost = np.flatnonzero((guesses == 0) & (counts >= max(10, len(labels) / (4 * num_classes))))
    if not len(lost):
        return None
    named = ", ".join(str(names[c]) for c in lost[:5]) + (f" and {len(lost) - 5} more" if len(lost) > 5 else "")
    return f"{'class' if len(lost) == 1 else 'classes'} {named} {'is' if len(lost) == 1 else 'are'} never predicted"
