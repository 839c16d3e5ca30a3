"""The losses that experiments compare, by name. To add one, add an entry to `LOSSES`."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from bitempered.core import scales
from bitempered.experiments.files import Row, value
from bitempered.schedules import Legs, anneal
from bitempered.torch import baselines, bi_tempered_logistic_loss

__all__ = ["LOSSES", "Loss", "LossSettings"]


class LossEntry(NamedTuple):
    function: Callable[..., Tensor]
    numbers: tuple[str, ...]  # the names of its numbers, as the function has them
    colour: str  # in all figures


LOSSES = {
    # torch's own, not ours at t1 = t2 = 1: it is what people use today.
    "logistic": LossEntry(cross_entropy, (), "tab:orange"),
    "bi-tempered": LossEntry(bi_tempered_logistic_loss, ("t1", "t2"), "tab:blue"),
    "tsallis": LossEntry(baselines.tsallis_logistic_loss, ("t1", "t2"), "tab:purple"),
    "t-logistic": LossEntry(baselines.t_logistic_loss, ("t",), "tab:pink"),
    "gce": LossEntry(baselines.generalized_cross_entropy, ("q",), "tab:green"),
    "sce": LossEntry(baselines.symmetric_cross_entropy, ("alpha", "beta"), "tab:red"),
    "mae": LossEntry(baselines.mean_absolute_error, (), "tab:brown"),
}


@dataclass(frozen=True)
class Loss:
    """A loss and its numbers, such as the temperatures.

    With a `schedule`, a pair of epochs, the temperatures move from (1, 1) to `numbers` between the two, and `at` gives
    the loss of an epoch. Between the two it may hold an epoch and the temperatures to pass through then. `rescale` is
    that of the library; as "logits", the loss is divided by the factor of the logits instead, so that only their scale
    changes: K^(1 - t2) L(K^(t2 - 1) logits). `smoothing` is that of the labels.

    >>> Loss("bi-tempered", (0.5, 4.0))(torch.zeros(2, 10), torch.tensor([0, 3])).shape
    torch.Size([2])
    >>> Loss("bi-tempered", (0.5, 4.0), schedule=(0, 10)).at(5).numbers
    (0.75, 2.5)
    >>> Loss("bi-tempered", (0.5, 4.0), schedule=(0, 4, 0.5, 2.0, 8)).at(6).numbers
    (0.5, 3.0)
    """

    name: str
    numbers: tuple[float, ...] = ()
    schedule: tuple[float, ...] | None = None
    rescale: bool | str = False  # or "logits"
    smoothing: float = 0.0

    def __post_init__(self) -> None:
        if self.name not in LOSSES:
            raise ValueError(f"unknown loss {self.name!r}; choose from: {', '.join(LOSSES)}")
        names = LOSSES[self.name].numbers
        if len(self.numbers) != len(names):
            form = ":".join([self.name, *names])
            raise ValueError(f"{self.name} is written {form}, got the numbers {list(self.numbers)}")
        if self.name != "bi-tempered" and (self.schedule or self.rescale):
            raise ValueError(f"rescale and schedule are for the bi-tempered loss, got {self.name}; leave them out")
        if self.schedule is not None and len(self.schedule) % 3 != 2:
            given = "..".join(f"{number:g}" for number in self.schedule) or "no numbers"
            raise ValueError(f"schedule must be BEGIN..FINISH or BEGIN..EPOCH..T1..T2..FINISH, got {given}")
        if self.rescale not in (False, True, "logits"):
            raise ValueError(f'rescale must be False, True or "logits", got {self.rescale!r}')
        if not 0 <= self.smoothing <= 1:
            raise ValueError(f"label_smoothing must be between 0 and 1, got {self.smoothing}")
        # Finds bad numbers before any work.
        self.at(0)(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64))

    @classmethod
    def parse(cls, text: str) -> "Loss":
        """Parse a loss as written on the command line: its name, its numbers, then `anneal` and `smoothing`.

        >>> Loss.parse("bi-tempered:0.5:4").numbers
        (0.5, 4.0)
        >>> Loss.parse("bi-tempered:0.5:4:anneal=15..75:smoothing=0.1").schedule
        (15.0, 75.0)
        >>> Loss.parse("bi-tempered:0.5:4:anneal=15..30..0.7..2..75").schedule
        (15.0, 30.0, 0.7, 2.0, 75.0)
        """
        name, *parts = text.split(":")
        numbers = [part for part in parts if "=" not in part]
        named = dict(part.split("=", 1) for part in parts if "=" in part)
        try:
            if unknown := named.keys() - {"anneal", "smoothing"}:
                raise ValueError(f"unknown option {min(unknown)!r}; choose from: anneal=BEGIN..FINISH, smoothing=PART")
            schedule = tuple(map(float, named["anneal"].split(".."))) if "anneal" in named else None
            smoothing = float(named.get("smoothing", 0))
            return cls(name, tuple(float(number) for number in numbers), schedule, smoothing=smoothing)
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"cannot use the loss {text!r}: {error}") from None

    @property
    def text(self) -> str:
        """The loss as `parse` takes it.

        >>> Loss("bi-tempered", (0.5, 4.0), (15, 75), smoothing=0.1).text
        'bi-tempered:0.5:4:anneal=15..75:smoothing=0.1'
        """
        parts = [self.name, *(f"{number:.15g}" for number in self.numbers)]
        if self.schedule:
            parts.append("anneal=" + "..".join(f"{epoch:.15g}" for epoch in self.schedule))
        if self.smoothing:
            parts.append(f"smoothing={self.smoothing:.15g}")
        return ":".join(parts)

    @classmethod
    def of(cls, row: Row) -> "Loss":
        """Return the loss of a row of results."""
        schedule = value(row, "schedule")
        numbers, rescale, smoothing = tuple(row["numbers"]), value(row, "rescale"), value(row, "smoothing")
        return _made(row["loss"], numbers, schedule and tuple(schedule), rescale, smoothing)

    def row(self) -> Row:
        """Return what a row says of the loss.

        >>> loss = Loss("bi-tempered", (0.5, 4.0), schedule=(0, 10))
        >>> Loss.of(loss.row()) == loss
        True
        """
        return {
            "loss": self.name, "numbers": list(self.numbers), "schedule": self.schedule and list(self.schedule),
            "rescale": self.rescale, "smoothing": self.smoothing,
        }  # fmt: skip

    def __str__(self) -> str:
        numbers = f" ({', '.join(f'{number:g}' for number in self.numbers)})" if self.numbers else ""
        rescaled = {False: "", True: ", rescaled", "logits": ", logits rescaled"}[self.rescale]
        smoothed = f", smoothing {self.smoothing:g}" if self.smoothing else ""
        return f"{self.name}{numbers}{', annealed' if self.schedule else ''}{rescaled}{smoothed}"

    def at(self, epoch: float) -> "Loss":
        """The loss of an epoch, counted from 0."""
        if self.schedule is None:
            return self
        return replace(self, numbers=self._temperatures(epoch), schedule=None)

    def _temperatures(self, epoch: float) -> tuple[float, float]:
        pairs = pairwise(self._stops())
        legs = [anneal(start, end, begin=begin, finish=finish) for (begin, start), (finish, end) in pairs]
        return Legs(tuple(legs))(epoch)

    def _stops(self) -> list[tuple[float, tuple[float, float]]]:
        """The epochs where the temperatures begin, change their pace and end, and the temperatures there."""
        assert self.schedule is not None
        t1, t2 = self.numbers
        begin, *between, finish = self.schedule
        places = [(epoch, (a, b)) for epoch, a, b in zip(between[::3], between[1::3], between[2::3], strict=True)]
        return [(begin, (1.0, 1.0)), *places, (finish, (t1, t2))]

    @property
    def passes(self) -> str:
        """What the schedule passes through, for a sentence that says where it begins and ends.

        >>> Loss("bi-tempered", (0.5, 4.0), schedule=(0, 4, 0.5, 2.0, 8)).passes
        ', through (0.5, 2) in epoch 4'
        """
        return through(self._stops()[1:-1]) if self.schedule else ""

    @property
    def path(self) -> str:
        """How the temperatures move, without the epochs in which they stand still at first or at the end.

        >>> Loss("bi-tempered", (0.5, 4.0), schedule=(0, 4, 0.5, 2.0, 8)).path
        'from (1, 1) over epochs 0 to 8, through (0.5, 2) in epoch 4'
        >>> Loss("bi-tempered", (0.5, 4.0), schedule=(0, 0, 0.8, 1.2, 6, 0.8, 1.2, 8)).path
        'from (0.8, 1.2) over epochs 6 to 8'
        >>> Loss("bi-tempered", (0.5, 4.0), schedule=(0, 4, 0.5, 4.0, 8)).path
        'from (1, 1) over epochs 0 to 4'
        >>> Loss("bi-tempered", (0.5, 4.0), schedule=(5, 5, 0.8, 1.2, 8)).path
        'from (1, 1) over epochs 5 to 8, through (0.8, 1.2) in epoch 5'
        """
        stops = self._stops()
        while len(stops) > 2 and (stops[1][0] <= 0 or stops[0][1] == stops[1][1]):
            del stops[0]
        while len(stops) > 2 and stops[-2][1] == stops[-1][1]:
            del stops[-1]
        (begin, (t1, t2)), *between, (finish, _) = stops
        return f"from ({t1:g}, {t2:g}) over epochs {begin:g} to {finish:g}{through(between)}"

    def __call__(self, logits: Tensor, target: Tensor, temperatures: Tensor | None = None) -> Tensor:
        """The loss of each row of logits `(n, classes)`; with `temperatures` (2), of these instead of its numbers."""
        if self.schedule is not None and temperatures is None:
            raise ValueError(f"{self} changes its temperatures from epoch to epoch; call at(epoch) first")
        entry = LOSSES[self.name]
        numbers = self.numbers if temperatures is None else temperatures.unbind()
        options: dict[str, Any] = dict(zip(entry.numbers, numbers, strict=True))
        if self.smoothing:
            options["label_smoothing"] = self.smoothing
        if self.rescale:
            options["rescale"] = True
        losses = entry.function(logits, target, **options, reduction="none")
        if self.rescale == "logits":
            inner, outer = scales(logits.shape[-1], *numbers)
            losses = losses / (inner * outer)
        return losses


def through(stops: list[tuple[float, tuple[float, float]]]) -> str:
    places = ", ".join(f"({t1:g}, {t2:g}) in epoch {epoch:g}" for epoch, (t1, t2) in stops)
    return f", through {places}" if places else ""


_made = cache(Loss)  # a loss evaluates itself when it is made, and there are many rows


@dataclass(frozen=True)
class LossSettings:
    """A loss with its learning rate and weight decay."""

    loss: Loss
    rate: float
    decay: float

    @classmethod
    def of(cls, settings: dict[str, Any], epochs: int) -> "LossSettings":
        """Round the settings of a search to the printed digits, so that what is printed is what was trained."""
        smoothing = round(settings["smoothing"], 3)
        if "t1" in settings:
            schedule = settings["schedule"]
            if schedule is not None:
                schedule = tuple(round(fraction * epochs, 1) for fraction in schedule)
            numbers = (round(settings["t1"], 3), round(settings["t2"], 3))
            loss = Loss("bi-tempered", numbers, schedule, smoothing=smoothing)
        else:
            loss = Loss("logistic", smoothing=smoothing)
        return cls(loss, float(f"{settings['rate']:.3g}"), float(f"{settings['decay']:.2g}"))
