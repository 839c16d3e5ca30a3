"""What a page asks for, read from JSON and checked: nothing else reaches the training."""

from dataclasses import dataclass
from typing import Any

from bitempered.checks import check_temperatures

__all__ = ["DATA", "EDGE", "LONGEST_TEXT", "MOST_POINTS", "NOISE", "Settings", "read_point", "shown"]

DATA = ("ring", "moons", "spirals", "three", "own")
NOISE = ("none", "small-margin", "large-margin", "random")
EDGE = 1.25  # the pictures show the square from -EDGE to EDGE
CLASSES = 3  # of own points, at most
MOST_POINTS = 1000
LONGEST_TEXT = 65536  # bytes of a message, room for that many points

Point = tuple[float, float, int]  # x, y, class


@dataclass(frozen=True)
class Settings:
    """A problem and a pair of temperatures. `level` is the fraction of wrong labels; `points` are the user's own."""

    data: str = "ring"
    noise: str = "random"
    level: float = 0.3
    t1: float = 0.2
    t2: float = 4.0
    schedule: bool = False
    seed: int = 0
    points: tuple[Point, ...] = ()

    @classmethod
    def read(cls, given: Any) -> "Settings":
        """Check the settings of a page, `given` as JSON has them; what is missing gets its default.

        >>> Settings.read({"t1": 0.5, "noise": "none"})
        Settings(data='ring', noise='none', level=0.3, t1=0.5, t2=4.0, schedule=False, seed=0, points=())
        """
        if not isinstance(given, dict):
            raise ValueError(f"settings must be an object, got {shown(given)}")
        names = list(cls.__dataclass_fields__)
        if unknown := [name for name in given if name not in names]:
            raise ValueError(f"unknown setting {shown(unknown[0])}; choose from: {', '.join(names)}")
        values = {name: given.get(name, getattr(cls, name)) for name in names}
        t1, t2 = check_temperatures(number(values["t1"], "t1", 0, 1), number(values["t2"], "t2", 0.5, 5))
        if not isinstance(values["schedule"], bool):
            raise ValueError(f"schedule must be true or false, got {shown(values['schedule'])}")
        seed = number(values["seed"], "seed", 0, 999_999)
        if seed != int(seed):
            raise ValueError(f"seed must be a whole number, got {shown(seed)}")
        return cls(
            data=one_of(values["data"], "data", DATA),
            noise=one_of(values["noise"], "noise", NOISE),
            level=number(values["level"], "level", 0, 0.5),
            t1=t1,
            t2=t2,
            schedule=values["schedule"],
            seed=int(seed),
            points=read_points(values["points"]) if values["data"] == "own" else (),
        )


def read_points(given: Any) -> tuple[Point, ...]:
    if not isinstance(given, list | tuple) or len(given) > MOST_POINTS:
        count = f"{len(given)} of them" if isinstance(given, list) else shown(given)
        raise ValueError(f"points must be a list of at most {MOST_POINTS} points, got {count}")
    points = []
    for point in given:
        if not isinstance(point, list) or len(point) != 3:
            raise ValueError(f"a point must be [x, y, class], got {shown(point)}")
        label = number(point[2], "the class of a point", 0, CLASSES - 1)
        if label != int(label):
            raise ValueError(f"the class of a point must be a whole number, got {shown(label)}")
        points.append((*read_point(point[:2]), int(label)))
    if len({label for _, _, label in points}) < 2:
        raise ValueError("place points of at least two classes: a net needs something to tell apart")
    return tuple(points)


def read_point(given: Any) -> tuple[float, float]:
    """Check a place in the pictures.

    >>> read_point([0.5, -1])
    (0.5, -1.0)
    """
    if not isinstance(given, list) or len(given) != 2:
        raise ValueError(f"a place must be [x, y], got {shown(given)}")
    return number(given[0], "x", -EDGE, EDGE), number(given[1], "y", -EDGE, EDGE)


def number(value: Any, name: str, least: float, most: float) -> float:
    # A bool is an int in Python, NaN fails both comparisons, and no integer is too large for them.
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ValueError(f"{name} must be a number from {least:g} to {most:g}, got {shown(value)}")
    return float(value)


def one_of(value: Any, name: str, allowed: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {shown(value)}")
    return value


def shown(value: Any) -> str:
    """Return what was given in a few words, however long it is."""
    if isinstance(value, int) and abs(value) > 10**20:
        return "a huge number"
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of length {len(value)}"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
