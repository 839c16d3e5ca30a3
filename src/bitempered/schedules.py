"""Temperatures that change while a model trains. Needs no framework.

>>> schedule = anneal((1, 1), (0.5, 1.5), begin=10, finish=20)
>>> [schedule(epoch) for epoch in (0, 15, 30)]
[(1.0, 1.0), (0.75, 1.25), (0.5, 1.5)]
"""

import math
from collections.abc import Callable

from bitempered.checks import check_number, check_temperatures

__all__ = ["anneal", "default"]

Pair = tuple[float, float]
SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda x: x,
    "cosine": lambda x: (1 - math.cos(math.pi * x)) / 2,
}


def anneal(start: Pair, end: Pair, *, begin: float, finish: float, shape: str = "linear") -> Callable[[float], Pair]:
    """Return a function from a step (or an epoch) to (t1, t2): `start` up to `begin`, `end` from `finish` on.

    In between, both temperatures move together, along a line or (`shape="cosine"`) along half a cosine, which starts
    and ends slowly. Any unit of time will do, if `begin` and `finish` use the same.
    """
    (t1_start, t2_start), (t1_end, t2_end) = check_temperatures(*start), check_temperatures(*end)
    begin, finish = check_number(begin, "begin"), check_number(finish, "finish")
    if begin > finish:
        raise ValueError(f"begin must not be after finish, got begin = {begin:g} and finish = {finish:g}")
    if shape not in SHAPES:
        raise ValueError(f"shape must be one of {', '.join(SHAPES)}, got {shape!r}")

    def schedule(step: float) -> Pair:
        if step >= finish:
            return t1_end, t2_end
        part = SHAPES[shape](max(0.0, step - begin) / (finish - begin)) if step > begin else 0.0
        return t1_start + part * (t1_end - t1_start), t2_start + part * (t2_end - t2_start)

    return schedule


def default(classes: int, steps: float) -> Callable[[float], Pair]:
    """The schedule to try first, for a run of `steps` steps (or epochs): cross-entropy at first, robust later.

    >>> default(10, 100)(0), default(10, 100)(100)
    ((1.0, 1.0), (0.2, 2.0))
    """
    return anneal((1.0, 1.0), (0.2, 2.0), begin=0.05 * steps, finish=0.3 * steps)
