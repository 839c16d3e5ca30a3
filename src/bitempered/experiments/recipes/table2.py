"""The recipe behind `bitempered reproduce table2`: ResNets on ImageNet, the logistic and the bi-tempered loss.

The paper states the temperatures, 180 epochs, batches of 4,096, SGD with momentum, and a staircase of learning rates.
The rest is the usual recipe for batches of that size: a rate of 0.1 for every 256 images, reached over five epochs,
falling to a tenth after 1/3, 2/3 and 8/9 of the run, and weight decay of 1e-4.

Reference: Amid, Warmuth, Anil, Koren, section 5.2; Goyal et al., Accurate, Large Minibatch SGD, 2017.
"""

import time
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from statistics import median, quantiles

import torch
from rich.table import Table

from bitempered.experiments.checkpoints import Checkpoint
from bitempered.experiments.files import read_rows
from bitempered.experiments.imagenet import ImagenetRun, ImagenetTraining, Learner, read_folder
from bitempered.experiments.losses import Loss
from bitempered.experiments.recipes.plans import Options, Plan
from bitempered.experiments.report import Pages, grid, made_by, newest, rich_table, spread, titled, write
from bitempered.experiments.runs import Job, Progress, Row, Tell, identity, make, measure_once, provenance
from bitempered.experiments.team import current

__all__ = ["TABLE2", "Table2", "plan", "quick", "render", "reproduce"]

CLASSES = 1000  # of ImageNet
VARYING = ("loss", "numbers", "seed")  # among the runs of a table
PAPER = {
    "resnet18": {"logistic": "71.333 ± 0.069", "bi-tempered": "71.618 ± 0.163"},
    "resnet50": {"logistic": "76.332 ± 0.105", "bi-tempered": "76.748 ± 0.164"},
}


@dataclass(frozen=True)
class Table2:
    """The runs of one network, and the step that is timed."""

    training: ImagenetTraining
    losses: tuple[Loss, ...] = (Loss("logistic"), Loss("bi-tempered", (0.9, 1.05)))
    images: int | None = None  # the most in each of training and validation: the first of each class, at least one
    seeds: tuple[int, ...] = (0, 1, 2)
    timed: tuple[int, int] = (256, 224)  # images in the step that is timed, and their size
    turns: int = 20  # how often each loss is timed


# ImageNet's 1,281,167 images are 312 batches, so five epochs are 1,560 steps.
TABLE2 = {
    name: Table2(
        ImagenetTraining(
            name, epochs=180, batch_size=4096, micro_batch=256, rate=1.6, stairs=(1 / 3, 2 / 3, 8 / 9), warmup=1_560,
            weight_decay=1e-4,
        )
    )
    for name in PAPER
}  # fmt: skip


def quick(recipe: Table2, device: str) -> Table2:
    """Return a recipe for any folder and machine: up to 2,000 small images, two epochs. It shows no effect.

    On a GPU the timed step keeps its full size.
    """
    training = replace(recipe.training, epochs=2, batch_size=64, micro_batch=16, rate=0.025, size=64, warmup=0)
    small = replace(recipe, training=training, images=2_000, seeds=(0,))
    return small if device == "cuda" else replace(small, timed=(16, 64), turns=5)


def plan(what: str, options: Options) -> Plan:
    network = options.network or "resnet18"
    if network not in TABLE2:
        raise ValueError(f"table 2 has no network {network!r}; choose from: {', '.join(TABLE2)}")
    recipe = quick(TABLE2[network], options.device) if options.quick else TABLE2[network]
    if options.seeds is not None:
        recipe = replace(recipe, seeds=tuple(range(options.seeds)))

    def fill(folder: Path, progress: Progress) -> Table:
        rows, speed = reproduce(recipe, folder, progress, device=options.device, data_dir=options.data_dir)
        return table(recipe, rows, speed)

    files = "table2.md, table2.jsonl, curves.jsonl, speed.jsonl (delete it to time again)"
    return Plan(f"table2-{network}", fill, files, together=True)


def reproduce(
    recipe: Table2, folder: Path, progress: Progress, *, device: str, data_dir: Path | None
) -> tuple[list[Row], Row]:
    """Time a step with each loss, train, and write table2.md; return the rows of the runs and that of the steps.

    `runs.make` describes the folder; its rows are in table2.jsonl, the times in speed.jsonl.
    """
    data = read_folder(data_dir, recipe.training.size, recipe.images)
    if device == "cuda":
        torch.backends.cudnn.benchmark = True
    progress(0, 1, "timing a step with each loss")
    # Time also depends on the machine and on torch.
    machine = {name: value for name, value in provenance(device).items() if name != "commit"}
    team = current()

    def timed() -> Row:
        return measure_once(
            folder, "speed", identity(timing(recipe) | machine, "random pixels"),
            lambda: measure_speed(recipe, torch.device(device)), device=device,
            on_wait=partial(progress, 0, 1, "waiting for another process, which is timing a step with each loss"),
        )  # fmt: skip

    speed = team.share(timed)
    runs = [(seed, loss) for seed in recipe.seeds for loss in recipe.losses]

    def job(seed: int, loss: Loss) -> Job:
        def train(places: list[int], checkpoints: list[Checkpoint], tell: Tell) -> tuple[list[Row], list[Row]]:
            metrics = ImagenetRun(recipe.training, loss, seed, data, torch.device(device)).train(checkpoints[0], tell)
            best = max(metrics, key=lambda epoch: epoch["top1"])
            row = {
                "top1_last": metrics[-1]["top1"], "top1_best": best["top1"], "best_epoch": best["epoch"],
                "seconds": metrics[-1]["seconds"], "processes": team.size,
            }  # fmt: skip
            curve = {name: [epoch[name] for epoch in metrics] for name in ("training_loss", "top1", "seconds")}
            return [row], [curve]

        run = recipe.training.identity(loss, seed, data)
        return Job(f"{loss.name}-seed{seed}", [run], train, recipe.training.steps(data))

    rows = make([partial(job, *run) for run in runs], folder, "table2", progress, device=device)
    if team.first:
        write(folder, {"table2.md": markdown(recipe, rows, speed).encode()})
    return rows, speed


def render(path: Path) -> Pages:
    """Render the page of a file of rows again, with the last timed step beside it."""
    names = {field.name: "learning_rate" if field.name == "rate" else field.name for field in fields(ImagenetTraining)}
    rows = newest(read_rows(path), VARYING, names.values())
    training = ImagenetTraining(**{field: rows[0][name] for field, name in names.items()})
    losses = tuple(dict.fromkeys(map(Loss.of, rows)))
    recipe = Table2(training, losses, seeds=tuple(sorted({row["seed"] for row in rows})))
    return {"table2.md": markdown(recipe, rows, read_rows(path.with_name("speed.jsonl"))[-1]).encode()}


# What the loss costs


def timing(recipe: Table2) -> Row:
    """Return what the time of a step depends on, by the keys of its row."""
    images, size = recipe.timed
    losses = [str(loss) for loss in recipe.losses]
    return {
        "network": recipe.training.network, "losses": losses, "images": images, "size": size, "classes": CLASSES,
        "turns": recipe.turns,
    }  # fmt: skip


def measure_speed(recipe: Table2, device: torch.device) -> Row:
    """Time a step (forward, loss, backward, new weights) with each loss by turns, on one batch that stays in place.

    `steps_per_second` has the median for each loss. `added` is the time that the second loss adds to a step,
    relative to the step of the first: the median over the turns, and the quartiles.
    """
    count, size = recipe.timed
    learner = Learner(recipe.training, CLASSES, 0, device)
    learner.network.train()
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (count, size, size, 3), dtype=torch.uint8, generator=generator).to(device)
    labels = torch.randint(0, CLASSES, (count,), generator=generator).to(device)
    steps = 5 if device.type == "cuda" else 1  # steps between two waits for the device
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
    """Return the time after the device has finished its work."""
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
            result[-1].append(spread([row[column] for row in rows if row["loss"] == loss.name], 3))
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
    title = f"{rows[0]['train_images']:,} training images, {epochs} epochs, n = {seeds}"
    return rich_table(titled(title, rows), header, rest)


def markdown(recipe: Table2, rows: list[Row], speed: Row) -> str:
    """The table as a page that says how it was made."""
    header, *rest = lines(recipe, rows, speed)
    made = made_by(rows[0], "\n")
    first, training = rows[0], recipe.training
    return f"""# {titled(f"Table 2, {training.network}", rows)}

{grid(header, rest)}

Accuracy on {first["validation_images"]:,} validation images, mean ± sample standard deviation, n = {len(recipe.seeds)}
(the paper does not state its n). The best epoch is chosen on these same images. Trained on {first["train_images"]:,}
images of {first["classes"]:,} classes, cropped to {training.size} x {training.size}, for {training.epochs} epochs in
batches of up to {training.batch_size:,}, made of micro-batches of {training.micro_batch}; SGD with momentum
{training.momentum:g}, learning rate {training.rate:g}, weight decay {training.weight_decay:g}.

A step is forward, loss, backward and new weights on {speed["images"]} random images of {speed["size"]} x
{speed["size"]}, {speed["classes"]:,} classes, already on the device: medians of {speed["turns"]} turns, alternating
between the losses. The last line is the time that the second loss adds, relative to a step with the first: median (and
quartiles).

{made}, in {sum(row["seconds"] for row in rows):.0f} s of training and validation.
"""
