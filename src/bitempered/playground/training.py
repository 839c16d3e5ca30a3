"""Two nets that differ in nothing but their loss, trained step by step, and what a page draws of them."""

import base64
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bitempered import schedules
from bitempered.playground import problems
from bitempered.playground.settings import Settings
from bitempered.torch import (
    bi_tempered_binary_logistic_loss,
    bi_tempered_logistic_loss,
    tempered_sigmoid,
    tempered_softmax,
)

__all__ = ["STEPS", "STEPS_PER_FRAME", "Duel", "curves"]

WIDTH, RATE, MOMENTUM = 24, 0.9, 0.9
STEPS, STEPS_PER_FRAME = 1200, 15
REACH = 6.0  # the curves show activations from -REACH to REACH

Json = dict[str, Any]


class Duel:
    """A logistic and a bi-tempered net: the same points, labels, first weights, optimiser and learning rate."""

    def __init__(self, settings: Settings) -> None:
        self.problem = problems.make(settings)
        self.points = torch.from_numpy(self.problem.points)
        self.given = torch.from_numpy(self.problem.given)
        self.cells = torch.from_numpy(problems.square())
        self.test_points = torch.from_numpy(self.problem.test_points)
        self.test_labels = torch.from_numpy(self.problem.test_labels)
        self.nets = [new_net(self.problem.classes, settings.seed) for _ in range(2)]
        self.optimizers = [torch.optim.SGD(net.parameters(), lr=RATE, momentum=MOMENTUM) for net in self.nets]
        end = settings.t1, settings.t2
        start = (1.0, 1.0) if settings.schedule else end
        self.schedule = replace(schedules.default(2, STEPS).legs[0], start=start, end=end)
        self.step = 0
        self.drawn: tuple[float, float] | None = None  # the temperatures of the curves that the page has

    @property
    def done(self) -> bool:
        return self.step >= STEPS

    @property
    def temperatures(self) -> list[tuple[float, float]]:
        return [(1.0, 1.0), self.schedule(self.step)]

    def advance(self, steps: int, probe: tuple[float, float] | None) -> Json:
        """Take that many steps, or those that are left, and return what to draw, with what the nets say at `probe`."""
        for _ in range(min(steps, STEPS - self.step)):
            for net, optimizer, (t1, t2) in zip(self.nets, self.optimizers, self.temperatures, strict=True):
                optimizer.zero_grad()
                bi_tempered_logistic_loss(net(self.points), self.given, t1, t2).backward()
                optimizer.step()
            self.step += 1
        t1, t2 = self.temperatures[1]
        frame: Json = {"step": self.step, "done": self.done, "t1": t1, "t2": t2}
        with torch.no_grad():
            pairs = list(zip(self.nets, self.temperatures, strict=True))
            frame["sides"] = [self.side(net, *pair) for net, pair in pairs]
            if probe is not None:
                frame["probe"] = {"at": probe, "sides": [says(net, probe, t2) for net, (_, t2) in pairs]}
            if self.drawn != (t1, t2):
                frame["curves"] = curves(t1, t2)
                self.drawn = t1, t2
        return frame

    def side(self, net: nn.Module, t1: float, t2: float) -> Json:
        """A net's training loss, its accuracies on clean and on given labels, and its probabilities by cell."""
        logits = net(self.points)
        return {
            "loss": rounded(bi_tempered_logistic_loss(logits, self.given, t1, t2)[None])[0],
            "given": accuracy(logits, self.given),
            "clean": accuracy(net(self.test_points), self.test_labels),
            "surface": in_bytes(tempered_softmax(net(self.cells), t2).T.nan_to_num()),
        }

    def start(self) -> Json:
        """The problem, for the page to draw."""
        shown = zip(self.problem.points.tolist(), self.problem.clean.tolist(), self.problem.given.tolist(), strict=True)
        truth = self.problem.truth
        return {
            "points": [[round(x, 3), round(y, 3), clean, given] for (x, y), clean, given in shown],
            "wrong": int((self.problem.clean != self.problem.given).sum()),
            "classes": self.problem.classes,
            "truth": None if truth is None else in_bytes(torch.from_numpy(truth)),
            "grid": problems.GRID,
            "steps": STEPS,
        }


def new_net(classes: int, seed: int) -> nn.Sequential:
    net = nn.Sequential(
        nn.Linear(2, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, classes)
    )  # fmt: skip
    # A generator of its own: sessions train in several threads, and the global one belongs to all of them.
    generator = torch.Generator().manual_seed(seed)
    for layer in net:
        if isinstance(layer, nn.Linear):
            bound = 1 / math.sqrt(layer.in_features)
            nn.init.uniform_(layer.weight, -bound, bound, generator=generator)
            nn.init.uniform_(layer.bias, -bound, bound, generator=generator)
    return net


def says(net: nn.Module, place: tuple[float, float], t2: float) -> Json:
    logits = net(torch.tensor([place], dtype=torch.float32))[0]
    return {"activations": rounded(logits), "probabilities": rounded(tempered_softmax(logits, t2))}


def curves(t1: float, t2: float) -> Json:
    """Loss and transfer function of two classes by the activation, at these temperatures and at (1, 1)."""
    a = torch.linspace(-REACH, REACH, 97)
    right = torch.ones_like(a)
    pairs = [(1.0, 1.0), (t1, t2)]
    return {
        "activation": rounded(a),
        "loss": [rounded(bi_tempered_binary_logistic_loss(a, right, *pair, reduction="none")) for pair in pairs],
        "transfer": [rounded(tempered_sigmoid(a, t)) for _, t in pairs],
        "bound": 1 / (1 - t1) if t1 < 1 else None,  # the most that a wrong label can cost
    }


def accuracy(logits: Tensor, labels: Tensor) -> float:
    return (logits.argmax(dim=1) == labels).float().mean().item()


def rounded(values: Tensor) -> list[float | None]:
    """Numbers for JSON, which has no NaN and no infinity."""
    return [round(value, 4) if math.isfinite(value) else None for value in values.tolist()]


def in_bytes(parts: Tensor) -> str:
    """Numbers from 0 to 1, a byte each, for JSON."""
    return base64.b64encode((255 * parts).round().to(torch.uint8).contiguous().numpy().tobytes()).decode()
