"""Large nets on CIFAR-100, several runs side by side on one GPU, as the papers on noisy labels train them.

Each run is a CUDA graph on its own stream, so that runs use each other's idle time. An epoch leaves out the images that
do not fill a batch (80 of 50,000), and a GPU computes in bfloat16. A stopped run continues from its last checkpoint.
"""

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bitempered import noise
from bitempered.experiments.augmentation import move
from bitempered.experiments.checkpoints import Checkpoint, Due
from bitempered.experiments.data import divide, fingerprint
from bitempered.experiments.datasets import CIFAR100N, read_parts
from bitempered.experiments.losses import Loss
from bitempered.experiments.networks import SINGLE_NETWORKS
from bitempered.experiments.runs import Job, Progress, Row, Tell, identity, make, plain
from bitempered.experiments.train import staircase

__all__ = ["PROTOCOL_KEYS", "Cifar100", "Protocol", "Setting", "run"]

CLASSES = 100
NOISE = ("symmetric", "human")
MEAN, DEVIATION = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)  # of CIFAR-100's pixels, red, green, blue


@dataclass(frozen=True)
class Protocol:
    """The training that all losses share."""

    name: str
    noise_model: str
    epochs: int
    weight_decay: float
    stairs: tuple[float, ...] = ()  # fractions of the run after which the rate falls to a tenth; without any, a cosine
    rotation: float = 0.0  # degrees, at most
    clip: float | None = None  # largest norm of the gradient, before weight decay is added
    rate: float = 0.1
    batch_size: int = 128
    momentum: float = 0.9
    network: str = "resnet34"
    width: int = 64
    measure_every: int = 1  # epochs; the last is always measured

    def __post_init__(self) -> None:
        if self.noise_model not in NOISE:
            raise ValueError(f"unknown noise model {self.noise_model!r}; choose from: {', '.join(NOISE)}")
        if self.network not in SINGLE_NETWORKS:
            raise ValueError(f"unknown network {self.network!r}; choose from: {', '.join(SINGLE_NETWORKS)}")

    def rate_factor(self, epoch: int) -> float:
        """The factor of the learning rate in an epoch, counted from 0."""
        if self.stairs:
            return staircase(epoch, self.epochs, self.stairs)
        return (1 + math.cos(math.pi * epoch / self.epochs)) / 2


# The keys of a row that a protocol sets, though a setting may have its own rate and decay.
PROTOCOL_NAMES = {"name": "protocol", "rate": "learning_rate"}
PROTOCOL_KEYS = tuple(PROTOCOL_NAMES.get(field.name, field.name) for field in fields(Protocol))


@dataclass(frozen=True)
class Setting:
    """One run: a loss, its noise and its seed.

    `held_out` images are not trained on; their noisy labels choose the epoch.
    `rate` and `weight_decay` are the protocol's unless they are given.
    """

    loss: Loss
    noise: float  # fraction of wrong labels; only recorded for human labels
    seed: int
    held_out: int = 0
    rate: float | None = None
    weight_decay: float | None = None


@dataclass(frozen=True)
class Cifar100:
    """CIFAR-100 as published, images (n, 3, 32, 32) uint8 with their labels, and human labels if requested."""

    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]
    human: np.ndarray | None = None

    @classmethod
    def read(cls, data_dir: Path | None, human: bool) -> "Cifar100":
        """Read the images from `data_dir` or download them; human labels must be in `data_dir`."""
        if human:
            CIFAR100N.path(data_dir)  # fail before a useless download
        train, test = read_parts("cifar100", data_dir)
        return cls(train, test, CIFAR100N.read(train[1], data_dir) if human else None)


def run(
    protocol: Protocol,
    settings: tuple[Setting, ...],
    images: Cifar100,
    folder: Path,
    progress: Progress,
    *,
    device: str = "cuda",
    at_once: int = 3,
) -> list[Row]:
    """Train every setting whose row `folder` lacks; return the rows of all, seed by seed.

    Up to `at_once` settings of a seed train side by side. `runs.make` describes the folder; its rows are in
    protocol-NAME.jsonl.
    """
    name = f"protocol-{protocol.name}"

    def job(settings: list[Setting]) -> Job:
        runs = [StreamedRun(protocol, setting, images, torch.device(device)) for setting in settings]

        def train_runs(places: list[int], checkpoints: list[Checkpoint], tell: Tell) -> tuple[list[Row], list[Row]]:
            fleet = [runs[place] for place in places]
            took = {"fleet": len(fleet), "fleet_seconds": round(train(fleet, checkpoints, tell), 1)}
            return [{**run.summary(), **took} for run in fleet], [{"epochs_measured": run.metrics} for run in fleet]

        # Fleets of a seed share a name, and so a lock: another process may divide the same runs into other fleets.
        seed = settings[0].seed
        return Job(f"{name}-seed{seed}", [run.identity() for run in runs], train_runs, protocol.epochs, separate=True)

    seeds = dict.fromkeys(setting.seed for setting in settings)
    parts = [[setting for setting in dict.fromkeys(settings) if setting.seed == seed] for seed in seeds]
    fleets = [part[i : i + at_once] for part in parts for i in range(0, len(part), at_once)]
    return make([partial(job, fleet) for fleet in fleets], folder, name, progress, device=device)


def train(fleet: list["StreamedRun"], checkpoints: list[Checkpoint], tell: Tell) -> float:
    """Train runs side by side to the end; return the seconds it took, including those before an interruption."""
    for item, checkpoint in zip(fleet, checkpoints, strict=True):
        item.start(checkpoint)
    due, started = Due(), time.perf_counter()
    before = max(item.seconds for item in fleet)
    while any(item.epoch < item.protocol.epochs for item in fleet):
        busy = [item for item in fleet if item.epoch < item.protocol.epochs]
        for item in busy:
            item.begin_epoch()
        for step in range(max(item.steps for item in busy)):
            for item in busy:
                if step < item.steps:
                    item.step()
        for item in busy:
            item.end_epoch()
            item.seconds = before + time.perf_counter() - started
        shown = "; ".join(f"{item.setting.loss} {item.metrics[-1]['test']:.1%}" for item in busy if item.metrics)
        done = f"epoch {busy[0].epoch} of {busy[0].protocol.epochs}, {busy[0].seconds:.0f} s"
        tell(busy[0].epoch, f"{done}, test: {shown}" if shown else done)
        if due():
            for item, checkpoint in zip(fleet, checkpoints, strict=True):
                checkpoint.save(item.state())
    return before + time.perf_counter() - started


class StreamedRun:
    """One training run. Nothing is on the device before `start`."""

    def __init__(self, protocol: Protocol, setting: Setting, images: Cifar100, device: torch.device) -> None:
        self.protocol, self.setting, self.device = protocol, setting, device
        self.epoch, self.seconds = 0, 0.0
        self.base_rate = protocol.rate if setting.rate is None else setting.rate
        self.weight_decay = protocol.weight_decay if setting.weight_decay is None else setting.weight_decay
        self.metrics: list[Row] = []
        clean, rng = images.train[1], np.random.default_rng(setting.seed)
        if protocol.noise_model == "human":
            if images.human is None:
                raise ValueError(f"protocol {protocol.name} needs human labels; read the images with human=True")
            labels = images.human
        else:
            labels = noise.symmetric(clean, setting.noise, rng=rng, num_classes=CLASSES)
        rows, aside = np.arange(len(clean)), np.arange(0)
        if setting.held_out:
            (rows, _), (aside, _) = divide("cifar100", rows, clean, setting.held_out, setting.seed)
        self.pixels, self.clean, self.noisy = images.train[0][rows], clean[rows], labels[rows]
        self.validation = images.train[0][aside], labels[aside]
        self.test = images.test
        self.data = fingerprint(self.pixels, self.noisy, *self.validation, *self.test)
        self.steps = len(self.pixels) // protocol.batch_size
        if not self.steps:
            raise ValueError(f"{len(self.pixels)} training images do not fill a batch of {protocol.batch_size}")

    def identity(self) -> Row:
        """Return everything that the numbers depend on, by the keys of a row."""
        protocol = {PROTOCOL_NAMES.get(name, name): value for name, value in plain(self.protocol).items()}
        setting = {
            "dataset": "cifar100", **protocol, "learning_rate": self.base_rate, "weight_decay": self.weight_decay,
            "noise": self.setting.noise,
            **self.setting.loss.row(), "seed": self.setting.seed, "held_out": self.setting.held_out,
        }  # fmt: skip
        return identity(setting, self.data)

    def start(self, checkpoint: Checkpoint) -> None:
        """Move everything to the device, continue from any checkpoint, and record a step as a graph."""
        cuda = self.device.type == "cuda"
        layout = torch.channels_last if cuda else torch.contiguous_format
        self.network = SINGLE_NETWORKS[self.protocol.network](CLASSES, self.setting.seed, self.protocol.width)
        self.network.to(self.device, memory_format=layout)  # type: ignore[call-overload]
        self.forward = torch.compile(self.network) if cuda else self.network
        self.rate = torch.zeros((), device=self.device)
        self.optimizer = torch.optim.SGD(
            self.network.parameters(), lr=self.rate, momentum=self.protocol.momentum, fused=True,
            weight_decay=self.weight_decay,
        )  # fmt: skip
        self.scale = 1 / (255 * torch.tensor(DEVIATION, device=self.device))
        self.shift = torch.tensor(MEAN, device=self.device) * 255
        self.images, self.test_images, self.validation_images = (
            torch.from_numpy(x).to(self.device).permute(0, 2, 3, 1).contiguous()
            for x in (self.pixels, self.test[0], self.validation[0])
        )
        self.labels = torch.from_numpy(np.stack([self.noisy, self.clean])).to(self.device)  # noisy, true
        kept = self.steps * self.protocol.batch_size
        self.epoch_images = torch.zeros_like(self.images[:kept])
        self.epoch_labels = torch.zeros_like(self.labels[:, :kept])
        self.place = torch.arange(self.protocol.batch_size, device=self.device)
        # Of the loss, of correct answers by noisy and by true labels, of the logits' standard deviation.
        self.sums = torch.zeros(4, device=self.device)
        self.generator = torch.Generator(self.device)
        self.stream = torch.cuda.Stream() if cuda else None
        self.graph: torch.cuda.CUDAGraph | None = None
        for weight in self.network.parameters():  # graphs and checkpoints need it before the first step
            self.optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
        checkpoint.load(self.restore, self.device)
        # A graph reads the temperatures of a schedule from memory, where `begin_epoch` changes them.
        self.temperatures = torch.ones(2, device=self.device) if self.setting.loss.schedule else None
        if cuda:
            torch.backends.cudnn.benchmark = True  # the shapes never change
            self.record()

    def one_step(self) -> None:
        """Train on one batch: forward, backward, new weights."""
        x, (target, clean) = self.epoch_images[self.place], self.epoch_labels[:, self.place]
        logits = self.logits(self.forward, x)
        losses = self.setting.loss(logits, target, self.temperatures)
        self.optimizer.zero_grad()
        losses.mean().backward()
        if self.protocol.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.network.parameters(), self.protocol.clip, foreach=True)
        self.optimizer.step()
        with torch.no_grad():
            guess = logits.argmax(dim=1)
            right = [(guess == labels).sum() for labels in (target, clean)]
            self.sums += torch.stack([losses.sum(), *right, logits.std(dim=1).sum()])
            self.place += self.protocol.batch_size

    def logits(self, network: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return the logits of images (n, 32, 32, 3) as published."""
        if not getattr(self.network, "takes_pixels", False):
            x = (x - self.shift) * self.scale
        x = x.permute(0, 3, 1, 2)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            return network(x).float()

    def record(self) -> None:
        """Record a step as a graph. The steps that warm it up are undone."""
        assert self.stream is not None
        self.network.train()
        network, momentum = copy.deepcopy((self.network.state_dict(), self.momentum()))
        self.place.copy_(torch.arange(self.protocol.batch_size))
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for _ in range(3):
                self.one_step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            self.one_step()
        self.network.load_state_dict(network)
        self.set_momentum(momentum)
        torch.cuda.synchronize()
        self.graph = graph

    def begin_epoch(self) -> None:
        """Draw the order of the images, and shift, mirror and rotate them."""
        self.network.train()
        if self.temperatures is not None:
            self.temperatures.copy_(torch.tensor(self.setting.loss.at(self.epoch).numbers))
        seed = int(np.random.SeedSequence((self.setting.seed, self.epoch)).generate_state(1)[0])
        self.generator.manual_seed(seed)
        order = torch.randperm(len(self.images), generator=self.generator, device=self.device)[: len(self.epoch_images)]
        self.epoch_labels.copy_(self.labels[:, order])
        for part, rows in zip(self.epoch_images.split(5_000), order.split(5_000), strict=True):
            part.copy_(move(self.images[rows], self.protocol.rotation, self.generator))
        self.place.copy_(torch.arange(self.protocol.batch_size))
        self.sums.zero_()
        self.rate.fill_(self.base_rate * self.protocol.rate_factor(self.epoch))
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())

    def step(self) -> None:
        """Train on one batch, by the recorded graph if there is one."""
        if self.graph is None or self.stream is None:
            self.one_step()
            return
        with torch.cuda.stream(self.stream):
            self.graph.replay()

    def end_epoch(self) -> None:
        """Measure if it is time to. Training metrics are means over the epoch's batches."""
        self.epoch += 1
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
        if self.epoch % self.protocol.measure_every and self.epoch < self.protocol.epochs:
            return
        loss, noisy, clean, deviation = (self.sums / len(self.epoch_images)).tolist()
        row = {
            "epoch": self.epoch, "training_loss": round(loss, 5) if math.isfinite(loss) else None,
            "logit_deviation": round(deviation, 3) if math.isfinite(deviation) else None,
            "noisy": round(noisy, 5), "clean": round(clean, 5), "test": self.accuracy(self.test_images, self.test[1]),
        }  # fmt: skip
        if self.setting.held_out:
            row["validation"] = self.accuracy(self.validation_images, self.validation[1])
        self.metrics.append(row)

    @torch.no_grad()
    def accuracy(self, images: Tensor, labels: np.ndarray) -> float:
        """The fraction of images whose largest logit is that of their label."""
        self.network.eval()
        guesses = [self.logits(self.network, part).argmax(dim=1).cpu() for part in images.split(1_000)]
        return round(float((torch.cat(guesses).numpy() == labels).mean()), 5)

    def summary(self) -> Row:
        """The last epoch, the best test epoch, and the one that noisy held-out labels choose, if any are held out."""
        last = self.metrics[-1]
        best = max(self.metrics, key=lambda row: row["test"])
        chosen = max(self.metrics, key=lambda row: row["validation"]) if self.setting.held_out else {}
        return {
            "test_last": last["test"], "test_chosen": chosen.get("test"), "chosen_epoch": chosen.get("epoch"),
            "validation_last": last.get("validation"), "validation_chosen": chosen.get("validation"),
            "test_best": best["test"], "best_epoch": best["epoch"], "noisy_last": last["noisy"],
            "clean_last": last["clean"],
        }  # fmt: skip

    def momentum(self) -> list[Tensor]:
        return [self.optimizer.state[weight]["momentum_buffer"] for weight in self.network.parameters()]

    def set_momentum(self, values: list[Tensor]) -> None:
        for buffer, value in zip(self.momentum(), values, strict=True):
            buffer.copy_(value)

    def state(self) -> Row:
        """Return the contents of a checkpoint."""
        return {
            "epoch": self.epoch, "seconds": self.seconds, "metrics": self.metrics,
            "network": self.network.state_dict(), "momentum": self.momentum(),
        }  # fmt: skip

    def restore(self, kept: Row) -> None:
        """Continue from what `state` returned."""
        self.network.load_state_dict(kept["network"])
        self.set_momentum(kept["momentum"])
        self.epoch, self.seconds, self.metrics = kept["epoch"], kept["seconds"], kept["metrics"]
