"""The recipe behind `bitempered reproduce convnet`: the default schedule on a net and data that it was not found on.

A convolutional net with batch normalisation learns Fashion-MNIST and CIFAR-100, with SGD and weight decay, and with
Adam; Fashion-MNIST also with SGD alone. It trains to the end. The schedule was chosen with perceptrons on digits and
MNIST, without decay; nothing is chosen here but the rate of one cross-entropy, by noisy validation labels.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean

import numpy as np
import torch
from matplotlib.figure import Figure
from rich.table import Table
from torch import Tensor

from bitempered import noise
from bitempered.experiments import report
from bitempered.experiments.checkpoints import Checkpoint, Due
from bitempered.experiments.data import Dataset, Part, fingerprint
from bitempered.experiments.datasets import DATASETS, read
from bitempered.experiments.files import read_rows
from bitempered.experiments.losses import Loss
from bitempered.experiments.networks import convnet
from bitempered.experiments.recipes.compare import default_recipe
from bitempered.experiments.recipes.defaults import GCE, LOGISTIC, NAMES, RATES, SLOWER
from bitempered.experiments.recipes.plans import Options, Plan
from bitempered.experiments.recipes.shared import best
from bitempered.experiments.report import MOMENTS, Pages
from bitempered.experiments.runs import Job, Progress, Row, Tell, identity, make, one_thread

__all__ = ["plan", "render"]

LEVELS = (0.0, 0.4)
EPOCHS, BATCH, MOMENTUM = 30, 128, 0.9
CONSTANT = Loss("bi-tempered", (0.8, 1.2))
BEST_RATE, DEFAULT = "logistic, best rate", "default schedule"
HEAD = ["data", "training", "noise", str(LOGISTIC), str(GCE), str(CONSTANT), DEFAULT, "difference", BEST_RATE]
TRAININGS = (("sgd", 0.0), ("sgd", 5e-4), ("adam", 0.0))  # optimisers, and their weight decay


@dataclass(frozen=True)
class Use:
    """A data set and what is done with it."""

    dataset: str
    title: str
    rows: int  # to train on
    seeds: int
    trainings: tuple[tuple[str, float], ...] = TRAININGS

    @property
    def classes(self) -> int:
        return DATASETS[self.dataset].num_classes


# A run on CIFAR-100 takes six minutes of a core, one on Fashion-MNIST one and a half.
USES = (Use("fashion-mnist", "Fashion-MNIST", 10_000, 3), Use("cifar100", "CIFAR-100", 45_000, 1, TRAININGS[1:]))
VARYING = (
    "dataset",
    "rows",
    "optimizer",
    "weight_decay",
    "noise",
    "loss",
    "numbers",
    "schedule",
    "learning_rate",
    "seed",
)
FIXED = ("noise_model", "network", "epochs", "batch_size", "momentum")


@dataclass(frozen=True)
class Setting:
    """One run."""

    dataset: str
    optimizer: str
    weight_decay: float
    loss: Loss
    rate: float
    noise: float
    seed: int
    epochs: int
    rows: int  # to train on

    def row(self) -> Row:
        return {
            "dataset": self.dataset, "noise_model": "symmetric", "noise": self.noise, **self.loss.row(),
            "learning_rate": self.rate, "seed": self.seed, "rows": self.rows, "network": "convnet",
            "optimizer": self.optimizer, "weight_decay": self.weight_decay, "epochs": self.epochs,
            "batch_size": BATCH, "momentum": MOMENTUM,
        }  # fmt: skip


def plan(what: str, options: Options) -> Plan:
    """With --quick: one data set, one seed, a few images and two epochs, which shows no effect."""
    uses, epochs = ([replace(USES[0], rows=256, seeds=1)], 2) if options.quick else (USES, EPOCHS)
    settings = [
        Setting(use.dataset, optimizer, decay, loss, rate, level, seed, epochs, use.rows)
        for use in uses
        for seed, (optimizer, decay), level in product(range(options.seeds or use.seeds), use.trainings, LEVELS)
        for loss, rate in contenders(use.classes, optimizer, epochs)
    ]

    def fill(folder: Path, progress: Progress) -> Table:
        data = {use.dataset: read(use.dataset, options.data_dir) for use in uses}
        with one_thread(options.device == "cpu"):  # so small a net gains more from a second process in the folder
            made = make(
                [partial(job, setting, data[setting.dataset], options.device) for setting in settings], folder, what,
                progress, device=options.device,
            )  # fmt: skip
        report.write(folder, render(folder / f"{what}.jsonl"))
        return report.rich_table(title(made), HEAD, lines(made, deviations=False))

    return Plan(what, fill, f"{what}.md, {what}.png, curves.jsonl, {what}.jsonl (delete it to train again)")


def contenders(classes: int, optimizer: str, epochs: int) -> list[tuple[Loss, float]]:
    """Return the losses with their learning rates: all at the usual one, cross-entropy at smaller ones too."""
    usual = [(loss, RATES[optimizer]) for loss in (LOGISTIC, GCE, CONSTANT, default_recipe(classes, epochs))]
    return usual + [(LOGISTIC, rate) for rate in SLOWER[optimizer]]


def job(setting: Setting, data: Dataset, device: str) -> Job:
    split, rng = data.split(setting.seed), np.random.default_rng(setting.seed)
    first = slice(setting.rows)
    noisy = partial(noise.symmetric, rate=setting.noise, rng=rng, num_classes=data.num_classes)
    training, validation = ((images[first], noisy(labels[first])) for images, labels in (split.train, split.validation))
    parts = training, validation, (split.test[0][first], split.test[1][first])
    run = identity(setting.row(), f"{data.digest}-{fingerprint(*training, *validation)}")

    def train_one(places: list[int], checkpoints: list[Checkpoint], tell: Tell) -> tuple[list[Row], list[Row]]:
        def on_epoch(metrics: list[Row]) -> None:
            training = in_words(setting.optimizer, setting.weight_decay)
            where = f"seed {setting.seed}, {training}, {setting.noise:.0%} noise, {setting.loss}"
            tell(len(metrics), f"{where}: epoch {len(metrics)}, validation accuracy {metrics[-1]['validation']:.1%}")

        metrics = train(setting, parts, data.num_classes, torch.device(device), checkpoints[0], on_epoch)
        last, chosen = metrics[-1], max(metrics, key=lambda row: row["validation"])  # the first if tied
        results = {
            "train_last": last["train"], "validation_last": last["validation"], "test_last": last["test"],
            "chosen_epoch": 1 + metrics.index(chosen), "validation_chosen": chosen["validation"],
            "test_chosen": chosen["test"],
        }  # fmt: skip
        return [results], [{name: [row[name] for row in metrics] for name in last}]

    way = f"{setting.dataset}-{setting.optimizer}-decay{setting.weight_decay:g}-noise{setting.noise:g}"
    loss = "-".join([setting.loss.name, *(f"{x:g}" for x in (*setting.loss.numbers, *(setting.loss.schedule or ())))])
    # A lock and checkpoints of its own for each run.
    return Job(f"seed{setting.seed}-{way}-{loss}-rate{setting.rate:g}", [run], train_one, setting.epochs)


def train(
    setting: Setting,
    parts: tuple[Part, Part, Part],
    classes: int,
    device: torch.device,
    checkpoint: Checkpoint,
    on_epoch: Callable[[list[Row]], None],
) -> list[Row]:
    """Train to the end; return each epoch's accuracies, in training as the mean over its batches."""
    network = convnet(parts[0][0].shape[1:], classes, setting.seed)
    network.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    weights = list(network.parameters())
    optimizer = (
        torch.optim.Adam(weights, lr=setting.rate, weight_decay=setting.weight_decay)
        if setting.optimizer == "adam"
        else torch.optim.SGD(weights, lr=setting.rate, momentum=MOMENTUM, weight_decay=setting.weight_decay)
    )
    (x, y), validation, test = ([torch.from_numpy(array).to(device) for array in part] for part in parts)
    centre, spread = x.float().mean(), x.float().std()
    metrics: list[Row] = []

    def logits(images: Tensor) -> Tensor:
        return network(((images.float() - centre) / spread).to(memory_format=torch.channels_last))

    def accuracy(images: Tensor, labels: Tensor) -> float:
        with torch.no_grad():
            guesses = torch.cat([logits(part).argmax(dim=1) for part in images.split(250)])
        return round(float((guesses == labels).float().mean()), 5)

    def restore(saved: Row) -> None:
        network.load_state_dict(saved["network"])
        optimizer.load_state_dict(saved["optimizer"])
        metrics[:] = saved["metrics"]

    checkpoint.load(restore, device)
    due, batch = Due(), min(BATCH, len(x))
    kept = len(x) // batch * batch  # images that fill a batch
    while len(metrics) < setting.epochs:
        loss = setting.loss.at(len(metrics))
        seed = int(np.random.SeedSequence((setting.seed, len(metrics))).generate_state(1)[0])
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)).to(device)
        right = torch.zeros((), device=device)
        network.train()
        for rows in order[:kept].split(batch):
            answers, target = logits(x[rows]), y[rows]
            optimizer.zero_grad()
            loss(answers, target).mean().backward()
            optimizer.step()
            right += (answers.argmax(dim=1) == target).sum()
        network.eval()
        seen = round(float(right) / kept, 5)
        metrics.append({"train": seen, "validation": accuracy(*validation), "test": accuracy(*test)})
        on_epoch(metrics)
        if due():
            checkpoint.save({"network": network.state_dict(), "optimizer": optimizer.state_dict(), "metrics": metrics})
    return metrics


def render(path: Path) -> Pages:
    """Render the page and the figure again from a file of rows."""
    rows = report.newest(read_rows(path), VARYING, FIXED)
    curves = report.newest(read_rows(path.with_name("curves.jsonl")), VARYING, FIXED)
    return {f"{path.stem}.md": markdown(path.stem, rows).encode(), f"{path.stem}.png": report.png(figure(rows, curves))}


def in_words(optimizer: str, decay: float) -> str:
    return f"{NAMES[optimizer]} {RATES[optimizer]:g}{f', decay {decay:g}' if decay else ''}"


def by_contender(rows: list[Row], dataset: str, training: tuple[str, float], level: float) -> dict[str, list[Row]]:
    """Return the rows of each contender, cross-entropy last again at its best rate; nothing without rows."""
    optimizer, decay = training
    wanted = {"dataset": dataset, "optimizer": optimizer, "weight_decay": decay, "noise": level}
    here = [row for row in rows if all(row[name] == value for name, value in wanted.items())]
    if not here:
        return {}
    usual = [row for row in here if row["learning_rate"] == RATES[optimizer]]
    rates: dict[float, list[Row]] = {}
    for row in here:
        if row["loss"] == LOGISTIC.name:
            rates.setdefault(row["learning_rate"], []).append(row)
    return {
        str(LOGISTIC): rates[RATES[optimizer]],
        str(GCE): [row for row in usual if row["loss"] == GCE.name],
        str(CONSTANT): [row for row in usual if Loss.of(row) == CONSTANT],
        DEFAULT: [row for row in usual if row["schedule"]],
        BEST_RATE: rates[best(rates, "validation_last")],
    }


def lines(rows: list[Row], deviations: bool) -> list[list[str]]:
    """Return the lines under `HEAD`, with or without standard deviations."""
    accuracies = partial(report.last_and_chosen, deviations=deviations)
    table_lines = []
    for use, training, level in product(USES, TRAININGS, LEVELS):
        if contenders := by_contender(rows, use.dataset, training, level):
            *groups, slower = contenders.values()
            gains = [mean(row[at] for row in groups[-1]) - mean(row[at] for row in groups[0]) for at in MOMENTS]
            table_lines.append(
                [
                    use.title, in_words(*training), f"{level:.0%}", *map(accuracies, groups),
                    " / ".join(f"{100 * gain:+.1f}" for gain in gains),
                    f"{slower[0]['learning_rate']:g}: {accuracies(slower)}",
                ]
            )  # fmt: skip
    return table_lines


def title(rows: list[Row]) -> str:
    text = report.titled("The default schedule on a convolutional net with batch norm", rows)
    return f"{text}: accuracy on clean test labels, %, last / chosen epoch"


def markdown(name: str, rows: list[Row]) -> str:
    first = rows[0]
    schedules = [schedule(row) for row in {row["dataset"]: row for row in rows if row["schedule"]}.values()]
    return f"""# {title(rows)}

{report.grid(HEAD, lines(rows, deviations=True), ["---", "---", *["---:"] * (len(HEAD) - 2)])}

± is the sample standard deviation. The chosen epoch is the best on validation labels, which are as noisy as
the training labels. The difference is that of the default schedule and the logistic loss. The default schedule moves
the temperatures
{"; ".join(schedules)}.
It trains at the rate of the logistic loss. It was chosen with perceptrons on digits and MNIST, without weight decay;
nothing was chosen here. The last column is the logistic loss at the one of {1 + len(SLOWER["sgd"])} rates whose last
epoch is best on the noisy validation labels.

Three convolutions with batch normalisation, and two dense layers. {first["epochs"]} epochs in batches of
{first["batch_size"]}, a constant rate, no augmentation; SGD has momentum {first["momentum"]:g}.
{" ".join(images(rows))}

{report.made_by_commits(rows)}.

![Accuracy by epoch with wrong labels]({name}.png)
"""


def images(rows: list[Row]) -> list[str]:
    """Return a sentence on each data set: its training images and seeds."""
    sentences = []
    for use in USES:
        if here := [row for row in rows if row["dataset"] == use.dataset]:
            sentences.append(f"{use.title}: {here[0]['rows']:,} training images, {report.seeds_in_words(here)}.")
    return sentences


def schedule(ours: Row) -> str:
    """Return the data set of a row, and the path of its temperatures."""
    use = next(use for use in USES if use.dataset == ours["dataset"])
    loss = Loss.of(ours)
    t1, t2 = loss.numbers
    return f"to ({t1:g}, {t2:g}) {loss.path} ({use.title})"


def figure(rows: list[Row], curves: list[Row]) -> Figure:
    """Draw accuracy by epoch at the highest noise level, a line of panels for each data set."""
    losses = [("logistic", False), ("gce", False), ("bi-tempered", False), ("bi-tempered", True), ("logistic", False)]
    uses = [use for use in USES if any(row["dataset"] == use.dataset for row in rows)]
    canvas = Figure(figsize=(12, 4 * len(uses)), dpi=150, layout="constrained")
    for use, panels in zip(uses, canvas.subplots(len(uses), len(TRAININGS), sharey="row", squeeze=False), strict=True):
        for axes, training in zip(panels, TRAININGS, strict=True):
            groups = by_contender(rows, use.dataset, training, LEVELS[-1])
            if not groups:
                axes.remove()
                continue
            for (name, group), look in zip(groups.items(), report.looks(losses), strict=True):
                label = f"{name}, {group[0]['learning_rate']:g}" if name == BEST_RATE else name
                drawn = [curve["test"] for row in group for curve in curves if key(curve) == key(row)]
                report.draw_curves(axes, drawn, look, label)
            axes.set_title(f"{use.title}, {in_words(*training)}", fontsize="medium")
            axes.set_xlabel("epoch")
            axes.grid(alpha=0.3)
            axes.legend(fontsize="small")
            axes.tick_params(labelleft=True)
            axes.set_ylabel("accuracy on clean test labels (%)")
    bands = "mean and ±1 standard deviation if there are several seeds"
    canvas.suptitle(f"{LEVELS[-1]:.0%} wrong labels: {bands}", fontsize="medium")
    return canvas


def key(row: Row) -> list[object]:
    return [row[name] for name in VARYING]
