"""The recipe behind `bitempered reproduce table2`: ResNets on ImageNet, the logistic and the bi-tempered loss.

The paper states the temperatures, 180 epochs, batches of 4,096, SGD with momentum, and a staircase of learning rates.
What it does not state is the usual recipe for batches of that size: a rate of 0.1 for every 256 images, reached over
five epochs, falling to a tenth after 1/3, 2/3 and 8/9 of the run; decay of 1e-4 on filters and matrices only; crops
of 8 to 100 % of a training image, half of them mirrored; of a validation image its centre. A batch is made of
micro-batches whose gradients are added, so batch normalisation sees one micro-batch at a time.

All that is random follows from the seed, the epoch and the image: a run that was stopped goes on from the last epoch
that it finished, and on a CPU comes to the same numbers bit for bit.

Reference: Amid, Warmuth, Anil, Koren, section 5.2; Goyal et al., Accurate, Large Minibatch SGD, 2017.
"""

import hashlib
import io
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import mean, median, quantiles, stdev

import numpy as np
import torch
from PIL import Image
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from bitempered.experiments import models
from bitempered.experiments.compare import Progress, Row, checkpoint_file, find, tell_of_others
from bitempered.experiments.files import append_rows, lock, read_rows, write_atomically
from bitempered.experiments.losses import Loss
from bitempered.experiments.origin import provenance, today
from bitempered.experiments.sources import DataError
from bitempered.experiments.train import BadCheckpoint, Training, rate_factors

__all__ = ["RECIPES", "Table2", "markdown", "quick", "reproduce", "table"]

CLASSES = 1000  # of ImageNet
SUFFIXES = (".jpeg", ".jpg", ".png")
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's pixels, red, green, blue
PAPER = {
    "resnet18": {"logistic": "71.333 ± 0.069", "bi-tempered": "71.618 ± 0.163"},
    "resnet50": {"logistic": "76.332 ± 0.105", "bi-tempered": "76.748 ± 0.164"},
}
Box = tuple[float, float, float, float]  # left, top, right, bottom


@dataclass(frozen=True)
class Table2:
    """What is trained for one network, and what is timed."""

    training: Training
    rate: float = 1.6
    losses: tuple[Loss, ...] = (Loss("logistic"), Loss("bi-tempered", (0.9, 1.05)))
    micro_batch: int = 256
    size: int = 224  # of the images that the network sees
    images: int | None = None  # at most so many in training and in validation: the first of each class, at least one
    seeds: tuple[int, ...] = (0, 1, 2)
    timed: tuple[int, int] = (256, 224)  # images in the step that is timed, and their size
    turns: int = 20  # that each loss is timed

    def setting(self, loss: Loss, seed: int, data: "Data") -> Row:
        """What a run depends on, in the words of its row."""
        training = self.training
        return {
            "network": training.network, "loss": loss.name, "numbers": list(loss.numbers), "seed": seed,
            "learning_rate": self.rate, "epochs": training.epochs, "batch_size": training.batch_size,
            "micro_batch": self.micro_batch, "stairs": list(training.stairs), "warmup": training.warmup,
            "momentum": training.momentum, "weight_decay": training.weight_decay, "size": self.size,
            "classes": data.classes, "train_images": len(data.train.names),
            "validation_images": len(data.validation.names), "data": data.digest,
        }  # fmt: skip


# ImageNet's 1,281,167 images are 312 batches, so that five epochs are 1,560 steps.
RECIPES = {
    name: Table2(
        Training(
            name, "sgd", epochs=180, batch_size=4096, stairs=(1 / 3, 2 / 3, 8 / 9), warmup=1_560, weight_decay=1e-4
        )
    )
    for name in PAPER
}


def quick(recipe: Table2, device: str) -> Table2:
    """A recipe for any folder and machine: up to 2,000 small images, two epochs. It shows no effect.

    On a GPU the step that is timed keeps its full size.
    """
    training = replace(recipe.training, epochs=2, batch_size=64, warmup=0)
    small = replace(recipe, training=training, rate=0.025, micro_batch=16, size=64, images=2_000, seeds=(0,))
    return small if device == "cuda" else replace(small, timed=(16, 64), turns=5)


# Images


@dataclass(frozen=True, eq=False)
class Images(Dataset[tuple[Tensor, Tensor] | DataError]):
    """The image files of a part. An item is a micro-batch: images `(n, size, size, 3)` uint8 and labels `(n,)`."""

    folder: Path
    names: np.ndarray = field(repr=False)  # as bytes: one buffer, which the workers share, unlike a million strings
    labels: np.ndarray = field(repr=False)
    size: int
    draw: tuple[int, int] | None = None  # seed and epoch of the crops; without it, the centres

    def __getitem__(self, rows: list[int]) -> tuple[Tensor, Tensor] | DataError:
        try:
            pixels = np.stack([self.read(row) for row in rows])
        except DataError as error:
            return error  # raised in a worker it would arrive as the text of a traceback
        return torch.from_numpy(pixels), torch.from_numpy(self.labels[rows])

    def read(self, row: int) -> np.ndarray:
        path = self.folder / os.fsdecode(self.names[row])
        rng = None if self.draw is None else np.random.default_rng((1, *self.draw, row))
        try:
            with Image.open(path) as image:
                box = centre_box(*image.size) if rng is None else random_box(*image.size, rng=rng)
                seen = image.convert("RGB").resize((self.size, self.size), Image.Resampling.BILINEAR, box=box)
        except Exception as error:  # PIL raises whatever its readers do
            raise DataError(f"{path} is not an image that can be read ({error}); replace or delete it") from error
        pixels = np.asarray(seen)
        return pixels if rng is None or rng.random() < 0.5 else pixels[:, ::-1]


def centre_box(width: int, height: int) -> Box:
    """The square in the centre, 7/8 of the shorter side: what resizing that to 256 and cutting out 224 keeps."""
    side = 0.875 * min(width, height)
    return centred(width, height, side, side)


def centred(width: int, height: int, w: float, h: float) -> Box:
    return (width - w) / 2, (height - h) / 2, (width + w) / 2, (height + h) / 2


def random_box(width: int, height: int, *, rng: np.random.Generator) -> Box:
    """8 to 100 % of the area, from 3:4 to 4:3, anywhere; where ten draws do not fit, the most that does, centred."""
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
    """Both parts, how many classes there are, and a hash of names and sizes: to read all files would take too long."""

    train: Images
    validation: Images
    classes: int
    digest: str


def read_folder(data_dir: Path | None, size: int, images: int | None) -> Data:
    """List the images of train/CLASS and val/CLASS; classes are numbered in the order of their names.

    Of at most `images` in each part (None: all) every class gets the same share, its first ones, and at least one.
    """
    if data_dir is None:
        raise DataError(
            "ImageNet is not downloaded: name with --data-dir a folder that has train/CLASS/*.JPEG and "
            "val/CLASS/*.JPEG (from image-net.org, which asks for a registration)"
        )
    try:
        found = {part: list_images(data_dir / part) for part in ("train", "val")}
    except OSError as error:
        raise DataError(f"cannot read {data_dir}: {error}") from error
    train, val = found.values()
    if train.keys() != val.keys():
        only = {"train": train.keys() - val.keys(), "val": val.keys() - train.keys()}
        listed = "; ".join(f"only in {part}: {some(names)}" for part, names in only.items() if names)
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
        parts.append(Images(data_dir / part, names, np.array([label for _, label in named]), size))
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


def some(names: set[str]) -> str:
    """The first three of some names, and how many more there are."""
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(sorted(names)[:3]) + rest


def workers(device: torch.device) -> int:
    """How many processes read images: none for a CPU, which is slower at training than at reading."""
    if device.type != "cuda":
        return 0
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def batches(images: Images, rows: list[list[int]], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Read the rows list by list, ahead of what is asked for, and bring them to the device."""
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

    def __init__(self, training: Training, classes: int, seed: int, device: torch.device) -> None:
        self.device = device
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network = models.imagenet_resnet(training.network, classes=classes)
        self.network = network.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        weights = list(self.network.parameters())
        groups = [
            {"params": [w for w in weights if w.dim() > 1], "weight_decay": training.weight_decay},
            {"params": [w for w in weights if w.dim() <= 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.SGD(groups, lr=0.0, momentum=training.momentum)
        self.mean, self.deviation = (255 * torch.tensor(c, device=device).view(3, 1, 1) for c in (MEAN, DEVIATION))

    def logits(self, pixels: Tensor) -> Tensor:
        x = (pixels.permute(0, 3, 1, 2) - self.mean) / self.deviation  # which is channels-last, as the network is
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda"):
            logits: Tensor = self.network(x)
        return logits.float()

    def add(self, loss: Loss, pixels: Tensor, labels: Tensor, of: int) -> Tensor:
        """Add the gradient of a micro-batch to that of its batch `of` so many images; return its part of the mean."""
        value = loss(self.logits(pixels), labels).sum() / of
        value.backward()
        return value.detach()

    def update(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()


class Run:
    """One loss and one seed: epochs, metrics, checkpoints."""

    def __init__(self, recipe: Table2, loss: Loss, seed: int, data: Data, device: torch.device) -> None:
        self.recipe, self.loss, self.seed, self.data, self.device = recipe, loss, seed, data, device
        self.learner = Learner(recipe.training, data.classes, seed, device)
        self.metrics: list[Row] = []
        self.batch = min(recipe.training.batch_size, len(data.train.names))
        self.per_epoch = len(data.train.names) // self.batch
        self.rates = rate_factors(recipe.training, recipe.training.epochs * self.per_epoch).double() * recipe.rate

    def train(self, checkpoint: Path, on_step: Callable[[int, str], None]) -> list[Row]:
        """Train to the end, from the checkpoint if there is one; return the metrics of each epoch."""
        if checkpoint.exists():
            self.load(checkpoint)
        started = time.perf_counter() - sum(row["seconds"] for row in self.metrics[-1:])
        while (number := len(self.metrics) + 1) <= self.recipe.training.epochs:
            loss = self.epoch(number, on_step)
            self.metrics.append(
                {
                    "epoch": number,
                    "training_loss": round(loss, 6) if math.isfinite(loss) else None,
                    "top1": self.accuracy(),
                    "seconds": round(time.perf_counter() - started, 3),
                }
            )
            self.save(checkpoint)
            on_step(number * self.per_epoch, self.says())
        return self.metrics

    def says(self) -> str:
        done = f": top-1 {self.metrics[-1]['top1']:.1%} after epoch {len(self.metrics)}" if self.metrics else ""
        return f"seed {self.seed}, {self.loss}{done}"

    def epoch(self, number: int, on_step: Callable[[int, str], None]) -> float:
        """Train for one epoch; return the mean loss."""
        images = replace(self.data.train, draw=(self.seed, number))
        order = torch.from_numpy(np.random.default_rng((0, self.seed, number)).permutation(len(images.names)))
        rows = order[: self.per_epoch * self.batch].split(self.batch)
        reader = batches(images, [part.tolist() for batch in rows for part in self.split(batch)], self.device)
        self.learner.network.train()
        total = torch.zeros((), device=self.device)
        for step, batch in enumerate(rows, start=(number - 1) * self.per_epoch):
            for _ in self.split(batch):
                total += self.learner.add(self.loss, *next(reader), of=self.batch)
            self.learner.update(self.rates[step].item())
            on_step(step + 1, self.says())
        return total.item() / self.per_epoch

    def split(self, rows: Tensor) -> tuple[Tensor, ...]:
        return rows.split(self.recipe.micro_batch)

    @torch.no_grad()
    def accuracy(self) -> float:
        """The fraction of validation images whose largest logit is that of their class."""
        images = self.data.validation
        rows = [part.tolist() for part in self.split(torch.arange(len(images.names)))]
        self.learner.network.eval()
        right = torch.zeros((), dtype=torch.int64, device=self.device)
        for pixels, labels in batches(images, rows, self.device):
            right += (self.learner.logits(pixels).argmax(dim=1) == labels).sum()
        return round(right.item() / len(images.names), 6)

    @cached_property
    def identity(self) -> str:
        """What a checkpoint must agree with."""
        return repr({**self.recipe.setting(self.loss, self.seed, self.data), **provenance(self.device.type)})

    def save(self, path: Path) -> None:
        content = io.BytesIO()
        state = {
            "identity": self.identity, "metrics": self.metrics, "network": self.learner.network.state_dict(),
            "momentum": self.learner.optimizer.state_dict()["state"],
        }  # fmt: skip
        torch.save(state, content)
        write_atomically(path, content.getvalue())

    def load(self, path: Path) -> None:
        network, optimizer = self.learner.network, self.learner.optimizer
        content = io.BytesIO(path.read_bytes())
        try:
            kept = torch.load(content, map_location=self.device, weights_only=True)
            if kept["identity"] != self.identity:
                raise BadCheckpoint(f"{path} is of another run than this; delete it, or choose another folder")
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
        except BadCheckpoint:
            raise
        except Exception as error:  # torch.load raises whatever its readers do
            raise BadCheckpoint(f"{path} is not a checkpoint, or a damaged one; delete it to train again") from error


def reproduce(
    recipe: Table2, folder: Path, progress: Progress, *, device: str, data_dir: Path | None
) -> tuple[list[Row], Row]:
    """Time a step with each loss, train, and write table2.md; return the rows of the runs and that of the steps.

    `folder` gets speed.jsonl, table2.jsonl with a row for each run, curves.jsonl, beside each its metrics by epoch,
    and a checkpoint of the run that is being trained. Rows already there with the same settings, files, commit,
    versions and device are used.
    """
    data = read_folder(data_dir, recipe.size, recipe.images)
    if device == "cuda":
        torch.backends.cudnn.benchmark = True
    folder.mkdir(parents=True, exist_ok=True)
    origin = provenance(device)
    speed_file, rows_file, curves_file = (folder / f"{name}.jsonl" for name in ("speed", "table2", "curves"))
    progress(0, 1, "timing a step with each loss")
    with lock(folder, "speed", wait=True):
        wanted = {**timing(recipe), **origin}
        speed = find(read_rows(speed_file), wanted)
        if speed is None:
            speed = {**wanted, "date": today(), **measure_speed(recipe, torch.device(device))}
            append_rows(speed_file, [speed])

    done: dict[int, Row] = {}
    plan = [(seed, loss) for seed in recipe.seeds for loss in recipe.losses]
    queue = [(place, False) for place in range(len(plan))]
    for place, wait in queue:  # which grows by the runs that other processes are making
        seed, loss = plan[place]
        wanted, name = {**recipe.setting(loss, seed, data), **origin}, f"{loss.name}-seed{seed}"
        with lock(folder, name, wait=wait) as held:
            row = find(read_rows(rows_file), wanted)
            if row is None and not held:
                queue.append((place, True))
                continue
            checkpoint = checkpoint_file(folder, name, [wanted])
            if row is None:
                drawn = read_rows(curves_file)
                tell_of_others(folder, name, [checkpoint])
                run = Run(recipe, loss, seed, data, torch.device(device))
                steps = len(run.rates)

                def on_step(step: int, text: str, steps: int = steps) -> None:
                    progress(len(done) * steps + step, len(plan) * steps, text)

                metrics = run.train(checkpoint, on_step)
                best = max(metrics, key=lambda epoch: epoch["top1"])
                row = {
                    **wanted, "top1_last": metrics[-1]["top1"], "top1_best": best["top1"], "best_epoch": best["epoch"],
                    "date": today(), "seconds": metrics[-1]["seconds"],
                }  # fmt: skip
                by_epoch = {name: [epoch[name] for epoch in metrics] for name in ("training_loss", "top1", "seconds")}
                if find(drawn, wanted) is None:
                    append_rows(curves_file, [{**wanted, **by_epoch}])
                append_rows(rows_file, [row])
            if held:
                checkpoint.unlink(missing_ok=True)
        done[place] = row
    rows = [done[place] for place in range(len(plan))]
    write_atomically(folder / "table2.md", markdown(recipe, rows, speed).encode())
    return rows, speed


# What the loss costs


def timing(recipe: Table2) -> Row:
    """What the time of a step depends on, in the words of its row."""
    images, size = recipe.timed
    losses = [str(loss) for loss in recipe.losses]
    return {
        "network": recipe.training.network, "losses": losses, "images": images, "size": size, "classes": CLASSES,
        "turns": recipe.turns,
    }  # fmt: skip


def measure_speed(recipe: Table2, device: torch.device) -> Row:
    """Time a step (forward, loss, backward, new weights) with each loss by turns, on one batch that stays in place.

    `steps_per_second` has the median for each loss, `added` what the second loss adds to the step of the first, as a
    share of it: the median over the turns, and the quartiles.
    """
    count, size = recipe.timed
    learner = Learner(recipe.training, CLASSES, 0, device)
    learner.network.train()
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (count, size, size, 3), dtype=torch.uint8, generator=generator).to(device)
    labels = torch.randint(0, CLASSES, (count,), generator=generator).to(device)
    steps = 5 if device.type == "cuda" else 1  # between two waits for the device
    seconds: dict[Loss, list[float]] = {loss: [] for loss in recipe.losses}
    for turn in range(-3, recipe.turns):  # three to warm up
        for loss in recipe.losses[:: 1 if turn % 2 else -1]:
            start = wait(device)
            for _ in range(steps):
                learner.add(loss, pixels, labels, of=count)
                learner.update(1e-3)
            if turn >= 0:
                seconds[loss].append((wait(device) - start) / steps)
    first, second = seconds.values()
    added = [b / a - 1 for a, b in zip(first, second, strict=True)]
    low, _, high = quantiles(added)
    return {
        "steps_per_second": [round(1 / median(times), 4) for times in seconds.values()],
        "added": round(median(added), 5),
        "added_quartiles": [round(low, 5), round(high, 5)],
    }


def wait(device: torch.device) -> float:
    """The time when the device has done all that it was asked to."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


# Reports


def lines(recipe: Table2, rows: list[Row], speed: Row) -> list[list[str]]:
    """The table's header and lines: ours, the paper's, and the speed."""
    result = [[recipe.training.network, *map(str, recipe.losses)]]
    for column, name in (("top1_last", "last epoch"), ("top1_best", "best epoch")):
        result.append([f"top-1 accuracy, {name}, %"])
        for loss in recipe.losses:
            values = [100 * row[column] for row in rows if row["loss"] == loss.name]
            spread = f" ± {stdev(values):.3f}" if len(values) > 1 else ""
            result[-1].append(f"{mean(values):.3f}{spread}")
    paper = PAPER[recipe.training.network]
    result.append(["top-1 accuracy, paper, %", *(paper[loss.name] for loss in recipe.losses)])
    result.append(["steps per second", *(f"{value:.4g}" for value in speed["steps_per_second"])])
    low, high = speed["added_quartiles"]
    result.append(["added to the step", "", f"{speed['added']:.2%} ({low:.2%} to {high:.2%})"])
    return result


def table(recipe: Table2, rows: list[Row], speed: Row) -> Table:
    """The table for a terminal."""
    header, *rest = lines(recipe, rows, speed)
    seeds, epochs = len(recipe.seeds), recipe.training.epochs
    result = Table(title=f"{rows[0]['train_images']:,} training images, {epochs} epochs, n = {seeds}")
    for name in header:
        result.add_column(name, justify="right")
    for line in rest:
        result.add_row(*line)
    return result


def markdown(recipe: Table2, rows: list[Row], speed: Row) -> str:
    """The table as a page that says how it was made."""
    header, *rest = lines(recipe, rows, speed)
    grid = "\n".join(f"| {' | '.join(line)} |" for line in [header, ["---:"] * len(header), *rest])
    first, training = rows[0], recipe.training
    return f"""# Table 2, {training.network}

{grid}

Accuracy on {first["validation_images"]:,} validation images, mean ± sample standard deviation, n = {len(recipe.seeds)}
(the paper does not state its n). The best epoch is chosen on these same images. Trained on {first["train_images"]:,}
images of {first["classes"]:,} classes, cropped to {recipe.size} x {recipe.size}, for {training.epochs} epochs in
batches of up to {training.batch_size:,}, made of micro-batches of {recipe.micro_batch}; SGD with momentum
{training.momentum:g}, learning rate {recipe.rate:g}, weight decay {training.weight_decay:g}.

A step is forward, loss, backward and new weights on {speed["images"]} random images of {speed["size"]} x
{speed["size"]}, {speed["classes"]:,} classes, already on the device: medians of {speed["turns"]} turns, taken by
turns with each loss. What the second loss adds is a share of the step with the first: median (and quartiles).

Made by bitempered {first["bitempered"]} (commit {first["commit"]}) with torch {first["torch"]} on {first["device"]},
{first["date"]}, in {sum(row["seconds"] for row in rows):.0f} s of training and validation.
"""
