"""ResNets on ImageNet's folders: reading the images, and one run of training.

A batch is made of micro-batches whose gradients are added, so batch normalisation sees one micro-batch at a time. The
processes of a team share out the micro-batches and add their gradients: the numbers are those of one process, except
for the order of sums.

Training images are cropped to 8 to 100 % of their area, and half are mirrored; validation images are cropped to their
centre. All randomness follows from the seed, the epoch and the image: a stopped run continues from the last epoch it
finished, and on a CPU gives the same numbers bit for bit.
"""

import hashlib
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from bitempered.experiments import networks
from bitempered.experiments.checkpoints import Checkpoint
from bitempered.experiments.losses import Loss
from bitempered.experiments.runs import Row, Tell, identity
from bitempered.experiments.sources import DataError, first_names
from bitempered.experiments.team import Team, current, neighbours
from bitempered.experiments.train import rate_factors

__all__ = ["Data", "ImageFiles", "ImagenetRun", "ImagenetTraining", "Learner", "read_folder"]

SUFFIXES = (".jpeg", ".jpg", ".png")
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's pixels, red, green, blue
Box = tuple[float, float, float, float]  # left, top, right, bottom


@dataclass(frozen=True)
class ImagenetTraining:
    """The settings of a run: SGD with momentum, decay on filters and matrices only."""

    network: str  # "resnet18" or "resnet50"
    epochs: int
    batch_size: int
    micro_batch: int
    rate: float
    size: int = 224  # of the images that the network sees
    stairs: tuple[float, ...] = ()  # fractions of the run after which the rate falls to a tenth
    warmup: int = 0  # steps in which the rate rises from 0
    momentum: float = 0.9
    weight_decay: float = 0.0

    def identity(self, loss: Loss, seed: int, data: "Data") -> Row:
        """Return what a run depends on, by the keys of its row."""
        setting = {
            "network": self.network, **loss.row(), "seed": seed, "learning_rate": self.rate, "epochs": self.epochs,
            "batch_size": self.batch_size, "micro_batch": self.micro_batch, "stairs": list(self.stairs),
            "warmup": self.warmup, "momentum": self.momentum, "weight_decay": self.weight_decay, "size": self.size,
            "classes": data.classes, "train_images": len(data.train.names),
            "validation_images": len(data.validation.names),
        }  # fmt: skip
        return identity(setting, data.digest)

    def steps(self, data: "Data") -> int:
        """Return the number of steps of a run, which leaves out the images that do not fill a batch."""
        images = len(data.train.names)
        return self.epochs * (images // min(self.batch_size, images))


# Images


@dataclass(frozen=True, eq=False)
class ImageFiles(Dataset[tuple[Tensor, Tensor] | DataError]):
    """The image files of a part. An item is a micro-batch: images `(n, size, size, 3)` uint8 and labels `(n,)`."""

    folder: Path
    names: np.ndarray = field(repr=False)  # bytes: the workers share one buffer, unlike a million strings
    labels: np.ndarray = field(repr=False)
    size: int
    draw: tuple[int, int] | None = None  # seed and epoch of the crops; without it, the centres

    def __getitem__(self, rows: list[int]) -> tuple[Tensor, Tensor] | DataError:
        try:
            pixels = np.stack([self.read(row) for row in rows])
        except DataError as error:
            return error  # if a worker raised it, it would arrive as the text of a traceback
        return torch.from_numpy(pixels), torch.from_numpy(self.labels[rows])

    def read(self, row: int) -> np.ndarray:
        path = self.folder / os.fsdecode(self.names[row])
        rng = None if self.draw is None else np.random.default_rng((1, *self.draw, row))
        try:
            with Image.open(path) as image:
                box = centre_box(*image.size) if rng is None else random_box(*image.size, rng=rng)
                seen = image.convert("RGB").resize((self.size, self.size), Image.Resampling.BILINEAR, box=box)
        except Exception as error:  # PIL's readers can raise anything
            raise DataError(f"{path} is not an image that can be read ({error}); replace or delete it") from error
        pixels = np.asarray(seen)
        return pixels if rng is None or rng.random() < 0.5 else pixels[:, ::-1]


def centre_box(width: int, height: int) -> Box:
    """Return the square in the centre, 7/8 of the shorter side, as if resized to 256 and cropped to 224."""
    side = 0.875 * min(width, height)
    return centred(width, height, side, side)


def centred(width: int, height: int, w: float, h: float) -> Box:
    return (width - w) / 2, (height - h) / 2, (width + w) / 2, (height + h) / 2


def random_box(width: int, height: int, *, rng: np.random.Generator) -> Box:
    """Draw a box of 8 to 100 % of the area, from 3:4 to 4:3; if ten draws do not fit, the largest box in the centre."""
    for _ in range(10):
        area = width * height * rng.uniform(0.08, 1)
        ratio = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(rng.integers(width - w + 1)), int(rng.integers(height - h + 1))
            return left, top, left + w, top + h
    return centred(width, height, min(width, height * 4 / 3), min(height, width * 4 / 3))


@dataclass(frozen=True)
class Data:
    """Training and validation images, the number of classes, and a hash of names and sizes (pixels take too long)."""

    train: ImageFiles
    validation: ImageFiles
    classes: int
    digest: str


def read_folder(data_dir: Path | None, size: int, images: int | None) -> Data:
    """List the images of train/CLASS and val/CLASS; classes are numbered in the order of their names.

    With a limit of `images` for each part, every class gives the same number of images, its first, and at least one.
    """
    if data_dir is None:
        raise DataError(
            "ImageNet must be downloaded by hand, from image-net.org after registration: with --data-dir, name a "
            "folder that has train/CLASS/*.JPEG and val/CLASS/*.JPEG"
        )
    try:
        found = {part: list_images(data_dir / part) for part in ("train", "val")}
    except OSError as error:
        raise DataError(f"cannot read {data_dir}: {error}") from error
    train, val = found.values()
    if train.keys() != val.keys():
        only = {"train": train.keys() - val.keys(), "val": val.keys() - train.keys()}
        listed = "; ".join(f"only in {part}: {first_names(sorted(names), 3)}" for part, names in only.items() if names)
        raise DataError(f"{data_dir}: train and val must have the same class folders; {listed}")
    share = None if images is None else max(1, images // len(train))
    parts, digest = [], hashlib.sha256()
    for part, classes in found.items():
        named = [(f"{name}/{file}", label) for label, name in enumerate(classes) for file in classes[name][:share]]
        names = np.array([os.fsencode(name) for name, _ in named])
        try:
            for name in names:
                length = os.stat(os.path.join(os.fsencode(data_dir / part), name)).st_size
                digest.update(b"%s/%s %d\n" % (part.encode(), name, length))
        except OSError as error:
            raise DataError(f"cannot read {data_dir}: {error}") from error
        parts.append(ImageFiles(data_dir / part, names, np.array([label for _, label in named]), size))
    return Data(parts[0], parts[1], len(train), digest.hexdigest()[:16])


def list_images(folder: Path) -> dict[str, list[str]]:
    """The names of images by the names of classes, both in order."""
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}; --data-dir must have train/CLASS/*.JPEG and val/CLASS/*.JPEG")
    with os.scandir(folder) as entries:
        classes = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    if not classes:
        raise DataError(
            f"{folder} has no class folders: images must be in {folder.name}/CLASS/*.JPEG "
            "(the validation images of image-net.org come in one folder; sort them by class first)"
        )
    found = {}
    for name in classes:
        files = [f for f in os.listdir(folder / name) if f.lower().endswith(SUFFIXES) and not f.startswith(".")]
        if not files:
            raise DataError(f"{folder / name} has no images: there must be files that end in .JPEG, .jpg or .png")
        found[name] = sorted(files)
    return found


def workers(device: torch.device) -> int:
    """Return how many processes read images: none for a CPU, which trains more slowly than it reads."""
    if device.type != "cuda":
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // neighbours())


def batches(images: ImageFiles, rows: list[list[int]], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Read the rows list by list, ahead of time, and move them to the device."""
    loader = DataLoader(
        images, batch_size=None, sampler=rows, num_workers=min(workers(device), len(rows)),
        pin_memory=device.type == "cuda",
    )  # fmt: skip
    for batch in loader:
        if isinstance(batch, DataError):
            raise batch
        pixels, labels = batch
        yield pixels.to(device, non_blocking=True), labels.to(device, non_blocking=True)


# Training


class Learner:
    """A network and its optimiser on one device; in bfloat16 over float32 weights on a GPU."""

    def __init__(self, training: ImagenetTraining, classes: int, seed: int, device: torch.device) -> None:
        self.device = device
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network = networks.imagenet_resnet(training.network, classes=classes)
        self.network = network.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        weights = list(self.network.parameters())
        groups = [
            {"params": [w for w in weights if w.dim() > 1], "weight_decay": training.weight_decay},
            {"params": [w for w in weights if w.dim() <= 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.SGD(groups, lr=0.0, momentum=training.momentum)
        self.norms: list[Any] = [x for x in self.network.modules() if isinstance(x, nn.BatchNorm2d)]
        self.mean, self.deviation = (255 * torch.tensor(c, device=device).view(3, 1, 1) for c in (MEAN, DEVIATION))

    def logits(self, pixels: Tensor) -> Tensor:
        x = (pixels.permute(0, 3, 1, 2) - self.mean) / self.deviation  # which is channels-last, as the network is
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda"):
            logits: Tensor = self.network(x)
        return logits if logits.dtype == torch.float64 else logits.float()

    def add(self, loss: Loss, pixels: Tensor, labels: Tensor, of: int) -> Tensor:
        """Add the gradient of a micro-batch to that of its batch of `of` images; return its share of the mean."""
        value = loss(self.logits(pixels), labels).sum() / of
        value.backward()
        return value.detach()

    def remember(self) -> Tensor:
        """Return the running statistics, for `gather`."""
        return torch.cat([x.flatten() for norm in self.norms for x in statistics(norm)] or [self.mean.new_empty(0)])

    def gather(self, team: Team, counts: list[int], before: Tensor, loss: Tensor) -> Tensor:
        """Add the gradients of all processes, given each one's number of micro-batches; return the sum of their losses.

        Each micro-batch moved the running statistics r to (1 - f) r + f x. What a process has added since `before`
        shrinks by a factor of 1 - f for every later micro-batch. So r ends up as if one process had seen all
        micro-batches in the order of ranks.
        """
        own, later, every = counts[team.rank], sum(counts[team.rank + 1 :]), sum(counts)
        kept = [torch.full((2 * norm.num_features,), 1 - norm.momentum) for norm in self.norms]
        keep = torch.cat(kept).to(before) if kept else before
        added = (self.remember() - keep**own * before) * keep**later
        weights = [w for group in self.optimizer.param_groups for w in group["params"]]
        for w in weights:
            w.grad = torch.zeros_like(w) if w.grad is None else w.grad
        tensors = [*(w.grad for w in weights), added, loss]
        total = team.add(torch.cat([x.flatten() for x in tensors]))
        *gradients, added, loss = total.split([x.numel() for x in tensors])
        for w, gradient in zip(weights, gradients, strict=True):
            w.grad.copy_(gradient.view_as(w))
        running = [x for norm in self.norms for x in statistics(norm)]
        for x, value in zip(running, (keep**every * before + added).split([x.numel() for x in running]), strict=True):
            x.copy_(value)
        for norm in self.norms:
            norm.num_batches_tracked += every - own
        return loss[0]

    def update(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()


def statistics(norm: Any) -> tuple[Tensor, Tensor]:
    return norm.running_mean, norm.running_var


class ImagenetRun:
    """One loss and one seed: epochs, metrics, checkpoints."""

    def __init__(self, training: ImagenetTraining, loss: Loss, seed: int, data: Data, device: torch.device) -> None:
        self.training, self.loss, self.seed, self.data, self.device = training, loss, seed, data, device
        self.learner = Learner(training, data.classes, seed, device)
        self.team = current()
        self.metrics: list[Row] = []
        self.batch = min(training.batch_size, len(data.train.names))
        self.per_epoch = training.steps(data) // training.epochs
        self.rates = rate_factors(training.steps(data), training.stairs, training.warmup).double() * training.rate

    def train(self, checkpoint: Checkpoint, on_step: Tell) -> list[Row]:
        """Train to the end, from the checkpoint if there is one; return the metrics of each epoch."""
        checkpoint.load(self.restore, self.device)
        started = time.perf_counter() - sum(row["seconds"] for row in self.metrics[-1:])
        while (number := len(self.metrics) + 1) <= self.training.epochs:
            loss = self.epoch(number, on_step)
            self.metrics.append(
                {
                    "epoch": number,
                    "training_loss": round(loss, 6) if math.isfinite(loss) else None,
                    "top1": self.accuracy(),
                    "seconds": round(time.perf_counter() - started, 3),
                }
            )
            checkpoint.save(self.state())
            on_step(number * self.per_epoch, self.status())
        return self.metrics

    def status(self) -> str:
        done = f": top-1 {self.metrics[-1]['top1']:.1%} after epoch {len(self.metrics)}" if self.metrics else ""
        return f"seed {self.seed}, {self.loss}{done}"

    def epoch(self, number: int, on_step: Tell) -> float:
        """Train for one epoch; return the mean loss."""
        images = replace(self.data.train, draw=(self.seed, number))
        order = torch.from_numpy(np.random.default_rng((0, self.seed, number)).permutation(len(images.names)))
        rows = order[: self.per_epoch * self.batch].split(self.batch)
        parts = [[part.tolist() for part in self.split(batch)] for batch in rows]
        reader = batches(images, [part for batch in parts for part in self.team.part(batch)], self.device)
        self.learner.network.train()
        total = torch.zeros((), device=self.device)
        for step, batch in enumerate(parts, start=(number - 1) * self.per_epoch):
            before, value = self.learner.remember(), torch.zeros((), device=self.device)
            for _ in self.team.part(batch):
                value = value + self.learner.add(self.loss, *next(reader), of=self.batch)
            if self.team.together:
                counts = [len(replace(self.team, rank=rank).part(batch)) for rank in range(self.team.size)]
                value = self.learner.gather(self.team, counts, before, value)
            total += value
            self.learner.update(self.rates[step].item())
            on_step(step + 1, self.status())
        return total.item() / self.per_epoch

    def split(self, rows: Tensor) -> tuple[Tensor, ...]:
        return rows.split(self.training.micro_batch)

    @torch.no_grad()
    def accuracy(self) -> float:
        """The fraction of validation images whose largest logit is that of their class."""
        images = self.data.validation
        rows = self.team.part([part.tolist() for part in self.split(torch.arange(len(images.names)))])
        self.learner.network.eval()
        right = torch.zeros((), dtype=torch.int64, device=self.device)
        for pixels, labels in batches(images, rows, self.device):
            right += (self.learner.logits(pixels).argmax(dim=1) == labels).sum()
        return round(self.team.add(right).item() / len(images.names), 6)

    def state(self) -> Row:
        """Return the contents of a checkpoint."""
        momentum = self.learner.optimizer.state_dict()["state"]
        return {"metrics": self.metrics, "network": self.learner.network.state_dict(), "momentum": momentum}

    def restore(self, kept: Row) -> None:
        """Continue from what `state` returned; raise an exception if it is something else."""
        network, optimizer = self.learner.network, self.learner.optimizer
        network.load_state_dict(kept["network"])
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": kept["momentum"], "param_groups": groups})
        for weight in network.parameters():
            if optimizer.state[weight]["momentum_buffer"].shape != weight.shape:
                raise ValueError("momentum of another shape")
        for number, row in enumerate(kept["metrics"], start=1):
            if row["epoch"] != number or not all(isinstance(row[name], float) for name in ("top1", "seconds")):
                raise ValueError("metrics of another run")
        self.metrics = [*kept["metrics"]]
