"""Training many small networks at once, for `cells`: the same loop for every loss, network and device.

A fleet is a set of members that share a network, its initial weights, the images, the order of the batches and the
dropped units; each has its own loss, wrong labels and learning rate. Their weights are stacked, so that twelve small
networks fill a GPU that each alone would leave idle. There a whole step, from gathering the batch to the new weights,
is one CUDA graph in bfloat16 over float32 weights.

A run returns a row of metrics per epoch. With a `checkpoint` it can be killed at any moment: the next call continues
from the last saved epoch, and on a CPU gives the same numbers bit for bit.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bitempered.diagnosis import learning_problem
from bitempered.experiments.augmentation import shift_and_mirror
from bitempered.experiments.checkpoints import Checkpoint, Due
from bitempered.experiments.data import Split
from bitempered.experiments.losses import Loss
from bitempered.experiments.networks import NETWORKS
from bitempered.experiments.optimizers import MOMENTUM, OPTIMIZERS

__all__ = ["METRICS", "Member", "Training", "rate_factors", "staircase", "train"]

MEASURED_ROWS = 5_000  # training rows whose accuracy is measured after each epoch

WIDTH = 256
MOST_EPOCHS = 100_000  # the rate of every step is kept in memory
METRICS = ("training_loss", "validation", "test", "clean", "noisy")  # of each member after each epoch
Metrics = list[dict[str, Any]]  # by epoch; each value is a number, or a list with one per member


@dataclass(frozen=True)
class Training:
    """The settings that all members of a fleet share."""

    network: str  # one of NETWORKS
    optimizer: str
    epochs: int
    batch_size: int = 128
    steps: int | None = None  # the run ends after this many, if its epochs have more
    stairs: tuple[float, ...] = ()  # fractions of the run after which the rate falls to a tenth
    warmup: int = 0  # steps in which the rate rises from 0
    momentum: float = MOMENTUM  # of SGD; other optimizers have their own
    weight_decay: float = 0.0
    clip: float | None = None  # largest norm of a member's gradient
    augment: bool = False  # images are mirrored and moved by up to 4 pixels at random
    width: int = WIDTH  # of the perceptron; other networks have their own

    def __post_init__(self) -> None:
        if self.network not in NETWORKS:
            raise ValueError(f"unknown network {self.network!r}; choose from: {', '.join(NETWORKS)}")
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"unknown optimizer {self.optimizer!r}; choose from: {', '.join(OPTIMIZERS)}")
        for name in ("epochs", "batch_size", "width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.epochs > MOST_EPOCHS:
            raise ValueError(f"epochs must be at most {MOST_EPOCHS:,}, got {self.epochs}")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay must be a finite number >= 0, got {self.weight_decay}")
        if self.width != WIDTH and not NETWORKS[self.network].has_width:
            raise ValueError(f"{self.network} has a width of its own; leave out the width, got {self.width}")
        if self.augment and NETWORKS[self.network].flat:
            raise ValueError(f"augment moves images, and {self.network} takes rows; set augment=False")
        if self.momentum != MOMENTUM and self.optimizer != "sgd":
            raise ValueError(f"momentum is for sgd; leave it out for {self.optimizer}, got {self.momentum}")

    def length(self, rows: int) -> int:
        """Return the number of epochs for this many training rows; the last may be cut short."""
        per_epoch = max(rows, 1) // min(self.batch_size, max(rows, 1))
        return self.epochs if self.steps is None else min(self.epochs, -(-self.steps // per_epoch))


@dataclass(frozen=True)
class Member:
    """One run of a fleet: its loss, its learning rate, its labels for training and validation."""

    loss: Loss
    rate: float
    train: np.ndarray = field(repr=False)
    validation: np.ndarray = field(repr=False)


def train(
    training: Training,
    members: list[Member],
    split: Split,
    *,
    seed: int,
    device: str = "cpu",
    checkpoint: Checkpoint | None = None,
    on_epoch: Callable[[int, dict[str, Any]], None] = lambda epoch, metrics: None,
) -> Metrics:
    """Train the members together and return, for each epoch, a list of each metric, by member.

    `training_loss` is the mean over the epoch's batches, null where it is not finite; `validation` the accuracy on the
    member's own (noisy) validation labels, and `problem` what `learning_problem` says of them; `test` the accuracy on
    the split's test labels; `clean` and `noisy` the accuracy on the first 5,000 training rows, against the split's
    labels and against the member's. `on_epoch(epoch, metrics)` is called after each epoch, counted from 1.
    """
    fleet = Fleet(training, members, split, seed, torch.device(device))
    metrics = fleet.metrics
    if checkpoint is not None:
        checkpoint.load(fleet.restore, fleet.device)
    due, started = Due(), time.perf_counter() - sum(row["seconds"] for row in metrics[-1:])
    while fleet.done < fleet.steps:
        row = fleet.epoch(len(metrics) + 1)
        metrics.append({**row, "seconds": round(time.perf_counter() - started, 3)})
        on_epoch(len(metrics), metrics[-1])
        if checkpoint is not None and (due() or fleet.done == fleet.steps):
            checkpoint.save(fleet.state())
    return metrics


class Fleet:
    """The members on one device: their weights, data, and everything that a step changes."""

    def __init__(
        self, training: Training, members: list[Member], split: Split, seed: int, device: torch.device
    ) -> None:
        self.training, self.members, self.split, self.seed, self.device = training, members, split, seed, device
        architecture = NETWORKS[training.network]
        options = {"width": training.width} if architecture.has_width else {}
        self.network = architecture.make(split.train[0].shape[1:], split.num_classes, **options)
        self.half = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.generator = torch.Generator(device)
        losses = [member.loss for member in members]
        groups = {loss: [i for i, other in enumerate(losses) if other == loss] for loss in dict.fromkeys(losses)}
        self.groups = {loss: torch.tensor(places, device=device) for loss, places in groups.items()}
        self.inverse = torch.cat(list(self.groups.values())).argsort()
        self.current = [loss.at(0) for loss in self.groups]

        parts = (split.train, split.validation, split.test)
        self.images, *self.others = (torch.from_numpy(features).to(device) for features, _ in parts)
        self.scale = Scaler(self.images, flat=architecture.flat)
        if self.images.dim() == 4 and not architecture.flat:
            self.images, *self.others = (x.permute(0, 2, 3, 1).contiguous() for x in (self.images, *self.others))
        labels = [torch.from_numpy(np.stack([getattr(m, name) for m in members])) for name in ("train", "validation")]
        self.labels, self.validation = (y.to(device) for y in labels)
        self.clean, self.test = (torch.from_numpy(part[1]).to(device) for part in (split.train, split.test))

        one = self.network.initial(torch.Generator().manual_seed(seed))
        self.weights = [w.expand(len(members), *w.shape).clone().to(device) for w in one.values()]
        self.names = list(one)
        # The forward pass reads these: the weights themselves, or their copies in half precision.
        self.leaves = [(w if w.dtype == self.half else w.to(self.half)).detach().requires_grad_() for w in self.weights]
        kept = OPTIMIZERS[training.optimizer].kept
        self.slots = [[torch.zeros_like(w) for w in self.weights] for _ in range(kept)]
        self.count = torch.zeros((), dtype=torch.int64, device=device)  # of steps, on the device

        self.batch = min(training.batch_size, len(self.images))
        self.per_epoch = len(self.images) // self.batch
        self.steps = training.epochs * self.per_epoch
        if training.steps is not None:
            self.steps = min(self.steps, training.steps)
        self.done = 0
        self.metrics: Metrics = []
        self.order = torch.zeros(self.per_epoch * self.batch, dtype=torch.int64, device=device)
        self.position = torch.arange(self.batch, device=device)
        self.rates = torch.tensor([m.rate for m in members], device=device)
        self.factors = rate_factors(self.steps, training.stairs, training.warmup).to(device)
        self.losses = torch.zeros(len(members), device=device)
        self.update = partial(update, training)
        if device.type == "cuda":
            self.update = torch.compile(self.update, dynamic=False)  # type: ignore[assignment]
        self.replay: Callable[[], None] | None = None

    def step(self) -> None:
        """Train on one batch: forward, backward, new weights."""
        rows = self.order[self.position]
        x = self.scale(self.images[rows], self.half)
        if self.training.augment:
            x = shift_and_mirror(x, self.generator)
        weights = dict(zip(self.names, self.leaves, strict=True))
        logits = self.network.apply(weights, x, self.drop).float()
        losses = self.loss(logits, self.labels[:, rows]).mean(dim=1)
        grads = torch.autograd.grad(losses.sum(), self.leaves)
        with torch.no_grad():
            rate = self.rates * self.factors.index_select(0, self.count.view(1))
            self.update(self.weights, self.leaves, list(grads), self.slots, rate, self.count)
            self.count += 1
            self.position += self.batch
            self.losses += losses

    def drop(self, hidden: Tensor, rate: float) -> Tensor:
        """Drop the same units of every member, so that no member depends on the others."""
        kept = torch.rand(hidden.shape[1:], generator=self.generator, device=self.device) >= rate
        return hidden * (kept / (1 - rate)).to(hidden.dtype)

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the losses `(members, n)`, with one call for all members that share a loss."""
        found = [
            loss(logits[places].flatten(0, 1), target[places].flatten()).view(len(places), -1)
            for loss, places in zip(self.current, self.groups.values(), strict=True)
        ]
        return torch.cat(found)[self.inverse]

    def epoch(self, number: int) -> dict[str, Any]:
        """Train for one epoch, or for the rest of the run, and measure."""
        steps = min(self.per_epoch, self.steps - self.done)
        # Each epoch has its own seed: a checkpoint need not store random state.
        order = torch.randperm(len(self.images), generator=torch.Generator().manual_seed(self.seed_for(number, 0)))
        self.order.copy_(order[: len(self.order)])
        self.position.copy_(torch.arange(self.batch))
        self.generator.manual_seed(self.seed_for(number, 1))
        self.losses.zero_()
        current = [loss.at(number - 1) for loss in self.groups]
        if current != self.current:
            self.current, self.replay = current, None  # a graph keeps the temperatures it was recorded with
        if self.device.type == "cuda" and self.replay is None:
            self.replay = self.capture()
        for _ in range(steps):
            (self.replay or self.step)()
        self.done += steps
        return {"epoch": number, "step": self.done, **self.measure(steps)}

    def seed_for(self, number: int, use: int) -> int:
        """A seed for one use in one epoch."""
        return int(np.random.SeedSequence((self.seed, number, use)).generate_state(1)[0])

    def capture(self) -> Callable[[], None]:
        """Record a step as a CUDA graph. The steps that warm it up are undone."""
        state = [*self.weights, *self.leaves, *chain(*self.slots), self.count, self.position, self.losses]
        before = [tensor.detach().clone() for tensor in state]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.generator)
        seed = self.generator.initial_seed()
        with torch.cuda.graph(graph):
            self.step()
        with torch.no_grad():
            for tensor, old in zip(state, before, strict=True):
                tensor.copy_(old)
        self.generator.manual_seed(seed)
        return graph.replay

    @torch.no_grad()
    def measure(self, steps: int) -> dict[str, Any]:
        validation, test = (self.predict(part) for part in self.others)
        shown = self.predict(self.images[:MEASURED_ROWS])
        means = (self.losses / steps).tolist()
        names = None if self.split.names is None else [f"{name:.40}" for name in self.split.names]
        return {
            "training_loss": [round(value, 6) if math.isfinite(value) else None for value in means],
            "validation": fraction(validation == self.validation),
            "test": fraction(test == self.test),
            "clean": fraction(shown == self.clean[:MEASURED_ROWS]),
            "noisy": fraction(shown == self.labels[:, :MEASURED_ROWS]),
            "problem": [
                learning_problem(labels, predicted, self.split.num_classes, names=names)
                for labels, predicted in zip(self.validation.cpu().numpy(), validation.cpu().numpy(), strict=True)
            ],
        }

    def predict(self, features: Tensor) -> Tensor:
        """The class with the largest logit, `(members, n)`: the same for softmax and for every tempered softmax."""
        weights = dict(zip(self.names, self.leaves, strict=True))
        parts = [self.network.apply(weights, self.scale(part, self.half), None) for part in features.split(1000)]
        return torch.cat([logits.argmax(dim=2) for logits in parts], dim=1)

    def changed(self) -> list[Tensor]:
        """Return all tensors that steps change, except the leaves, which are copies of the weights."""
        return [*self.weights, *chain(*self.slots), self.count]

    def state(self) -> dict[str, Any]:
        """Return the contents of a checkpoint."""
        return {"state": self.changed(), "metrics": self.metrics}

    @torch.no_grad()
    def restore(self, kept: dict[str, Any]) -> None:
        """Continue from what `state` returned; raise an exception if it is something else."""
        for tensor, old in zip(self.changed(), kept["state"], strict=True):
            if (tensor.shape, tensor.dtype) != (old.shape, old.dtype):  # copy_ would broadcast and convert it
                raise ValueError("a tensor of another shape or dtype")
            tensor.copy_(old)
        check_metrics(kept["metrics"], len(self.members))
        self.metrics[:] = kept["metrics"]
        self.done = int(self.count)
        if self.done != min(len(self.metrics) * self.per_epoch, self.steps):
            raise ValueError("a number of steps that does not match its epochs")
        for weight, leaf in zip(self.weights, self.leaves, strict=True):
            leaf.copy_(weight)


def check_metrics(metrics: Metrics, members: int) -> None:
    """Raise an exception if these are not the metrics of a run."""
    for number, row in enumerate(metrics, start=1):
        accuracies = [row[name] for name in METRICS[1:]]
        lists = (row["training_loss"], row["problem"], *accuracies)
        if row["epoch"] != number or {len(values) for values in lists} != {members}:
            raise ValueError("metrics of another run")
        if not all(isinstance(value, float) for value in (row["seconds"], *chain(*accuracies))):
            raise ValueError("metrics that are not numbers")


class Scaler:
    """Scales rows for a network: bytes are standardised by channel, floats are left alone."""

    def __init__(self, images: Tensor, *, flat: bool) -> None:
        self.flat = flat
        self.mean: Tensor | None = None
        if images.dtype == torch.uint8:
            # By channel, over the training images; in pieces, since float32 takes four times the memory.
            pixels = images.transpose(0, 1).flatten(1)
            self.mean = torch.stack([channel.float().mean() for channel in pixels])
            self.scale = torch.stack([1 / channel.float().std() for channel in pixels])

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        if self.mean is None:
            return x.to(dtype)
        if self.flat:
            return ((x.flatten(2).float() - self.mean[:, None]) * self.scale[:, None]).flatten(1).to(dtype)
        return ((x.float() - self.mean) * self.scale).to(dtype)


def staircase(at: int, length: int, stairs: tuple[float, ...]) -> float:
    """Return the factor of the learning rate: a tenth after each of these fractions of a run.

    >>> [staircase(epoch, 4, (0.5, 0.75)) for epoch in range(4)]
    [1.0, 1.0, 0.1, 0.01]
    """
    return 10.0 ** -sum(at >= fraction * length for fraction in stairs)


def rate_factors(steps: int, stairs: tuple[float, ...], warmup: int) -> Tensor:
    """Return the factor of the learning rate at each step: it rises for `warmup` steps, and falls by the stairs."""
    falls = torch.tensor([staircase(step, steps, stairs) for step in range(steps)], dtype=torch.float64)
    rise = ((torch.arange(steps) + 1) / max(warmup, 1)).clamp(max=1)
    return (rise * falls).float()


def update(
    training: Training,
    weights: list[Tensor],
    leaves: list[Tensor],
    grads: list[Tensor],
    slots: list[list[Tensor]],
    rate: Tensor,
    count: Tensor,
) -> None:
    """Change all weights of all members, one rate for each member.

    Weight decay is added to the gradient; clipping is by the norm of a member's whole gradient.
    """
    grads = [g.float() for g in grads]
    if training.weight_decay:
        grads = [g + training.weight_decay * w for g, w in zip(grads, weights, strict=True)]
    if training.clip is not None:
        norm = sum(g.flatten(1).square().sum(dim=1) for g in grads).sqrt()  # type: ignore[union-attr]
        factor = training.clip / norm.clamp(min=training.clip)
        grads = [g * along(factor, g) for g in grads]
    step = OPTIMIZERS[training.optimizer].step
    for i, (w, leaf, g) in enumerate(zip(weights, leaves, grads, strict=True)):
        change = step(g, [slot[i] for slot in slots], training.momentum, count)
        new_weight = w - along(rate, w) * change
        w.copy_(new_weight)
        leaf.detach().copy_(new_weight)


def along(x: Tensor, like: Tensor) -> Tensor:
    """Reshape one number for each member, `(members,)`, so that it broadcasts to `like`."""
    return x.view(-1, *[1] * (like.dim() - 1))


def fraction(right: Tensor) -> list[float]:
    return [round(value, 6) for value in right.float().mean(dim=1).tolist()]
