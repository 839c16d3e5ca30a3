"""`schedules.default` for 2 to 100 classes: does it keep a perceptron from memorising wrong labels?

    python benchmarks/classes.py              (needs the extra experiments; some minutes on one core)
    python benchmarks/classes.py --render     writes the page again, from the rows

All tasks are made of scikit-learn's digits. Up to ten classes: the digit modulo their number. More: two digits side by
side, the numbers from 0 on. The perceptron of `bitempered compare` trains to the end with cross-entropy, with the
schedule, and with its first leg alone, at the rates that people use. Goes on from benchmarks/classes.jsonl, which gets
one row per run, and writes the page benchmarks/classes.md.
"""

import argparse
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits

from bitempered import noise, schedules
from bitempered.experiments.data import Part, Split, fingerprint
from bitempered.experiments.files import read_rows, write_atomically, write_rows
from bitempered.experiments.losses import Loss
from bitempered.experiments.recipes.compare import default_recipe
from bitempered.experiments.recipes.shared import ADAM_RATE
from bitempered.experiments.report import MOMENTS, grid, last_and_chosen, made_by_commits, seeds_in_words
from bitempered.experiments.runs import provenance, today
from bitempered.experiments.train import Member, Training, train

ROWS = Path(__file__).with_suffix(".jsonl")
CLASSES = (2, 3, 10, 26, 100)
NOISE = (0.0, 0.4)
RATES = {"sgd": 0.05, "adam": ADAM_RATE}
NAMES = {"sgd": "SGD", "adam": "Adam"}
SEEDS = range(3)
STEPS, BATCH, WIDTH = 1500, 125, 64
IMAGES = (500, 500)  # to train and to validate; the rest are test images
PAIRS = (20, 5, 10)  # rows of each class in the three parts, with more than ten classes

Row = dict[str, Any]


def task(classes: int, seed: int) -> Split:
    """Return a task with so many classes. Its three parts share no image."""
    rng = np.random.default_rng(seed)
    pixels, digits = load_digits(return_X_y=True)
    pixels, digits = (pixels / 16).astype(np.float32), digits.astype(np.int64)
    parts = []
    for images, rows in zip(np.split(rng.permutation(len(digits)), np.cumsum(IMAGES)), PAIRS, strict=True):
        if classes <= 10:
            parts.append((pixels[images], digits[images] % classes))
        else:
            parts.append(pairs(pixels[images], digits[images], np.repeat(np.arange(classes), rows), rng))
    return Split(*parts, num_classes=classes)


def pairs(pixels: np.ndarray, digits: np.ndarray, numbers: np.ndarray, rng: np.random.Generator) -> Part:
    """Write each number below 100 as two images, drawn at random."""
    by_digit = [np.flatnonzero(digits == digit) for digit in range(10)]
    tens, units = (np.array([rng.choice(by_digit[digit]) for digit in column]) for column in np.divmod(numbers, 10))
    return np.hstack((pixels[tens], pixels[units])), numbers


def contenders(classes: int, epochs: int) -> list[Loss]:
    """Cross-entropy, the first leg of the default schedule, and both legs."""
    leg = schedules.default(classes, epochs).legs[0]
    return [
        Loss("logistic"), Loss("bi-tempered", leg.end, (leg.begin, leg.finish)), default_recipe(classes, epochs)
    ]  # fmt: skip


def run(classes: int, optimizer: str, seed: int) -> list[Row]:
    split = task(classes, seed)
    epochs = STEPS // (len(split.train[1]) // BATCH)
    cells = [(loss, level) for loss in contenders(classes, epochs) for level in NOISE]
    noisy = {}
    for level in NOISE:
        rng = np.random.default_rng(seed)
        noisy[level] = [
            noise.symmetric(labels, level, rng=rng, num_classes=classes)
            for labels in (split.train[1], split.validation[1])
        ]
    members = [Member(loss, RATES[optimizer], *noisy[level]) for loss, level in cells]
    metrics = train(Training("mlp", optimizer, epochs, BATCH, width=WIDTH), members, split, seed=seed)
    rows = []
    for place, (loss, level) in enumerate(cells):
        chosen = max(metrics, key=lambda row: row["validation"][place])  # on noisy labels; the first if tied
        rows.append(
            {
                "classes": classes, "optimizer": optimizer, "learning_rate": RATES[optimizer], "noise": level,
                **loss.row(), "seed": seed, "epochs": epochs, "batch_size": BATCH,
                "data": fingerprint(*split.train, *split.validation, *split.test),
                "train_last": metrics[-1]["noisy"][place], "test_last": metrics[-1]["test"][place],
                "chosen_epoch": chosen["epoch"], "test_chosen": chosen["test"][place],
                "problem": metrics[-1]["problem"][place],
            }
        )  # fmt: skip
    return rows


def page(rows: list[Row]) -> str:
    lines = []
    for classes, optimizer, level in product(CLASSES, RATES, NOISE):
        here = [r for r in rows if (r["classes"], r["optimizer"], r["noise"]) == (classes, optimizer, level)]
        by_length: dict[int, list[Row]] = {}  # of the schedule: none, one leg, two
        for row in here:
            by_length.setdefault(len(row["schedule"] or ()), []).append(row)
        if by_length:
            logistic, first, both = (by_length[length] for length in sorted(by_length))
            ends = [f"{group[0]['numbers'][1]:g}: {accuracies(group)}" for group in (first, both)]
            setting = [f"{classes}", NAMES[optimizer], f"{level:.0%}"]
            lines.append([*setting, accuracies(logistic), *ends, gain(logistic, both)])
    head = [
        "classes",
        "optimiser",
        "noise",
        "cross-entropy",
        "first leg alone, to (0, t2)",
        "default schedule, on to (0, t2)",
        "gain of the default",
    ]
    return f"""# Does the default schedule suit other numbers of classes?

Accuracy on clean test labels in %, last / chosen epoch. The chosen epoch is the best on validation labels, which are as
noisy as the training labels. The gain is that of `schedules.default` over cross-entropy.

{grid(head, lines, ["---:", "---", *["---:"] * 5])}

\\* a run gave up a class, or did not learn.

Mean ± sample standard deviation over {seeds_in_words(rows)}, each with its own split of digits: the digit modulo the
number of classes, {IMAGES[0]} rows to train; for more than ten classes two digits side by side, {PAIRS[0]} rows of each
number to train. A perceptron with two hidden layers of {WIDTH} units; batches of {BATCH}, {STEPS:,} steps; SGD
{RATES["sgd"]:g} with momentum, Adam {RATES["adam"]:g}.

{made_by_commits(rows)}, by `python benchmarks/classes.py`.
"""


def accuracies(rows: list[Row]) -> str:
    return last_and_chosen(rows, deviations=True) + " *" * any(row["problem"] for row in rows)


def gain(base: list[Row], ours: list[Row]) -> str:
    return " / ".join(f"{100 * (mean(r[at] for r in ours) - mean(r[at] for r in base)):+.1f}" for at in MOMENTS)


def measure() -> list[Row]:
    torch.set_num_threads(1)
    made_on = provenance() | {"date": today()}
    rows = read_rows(ROWS)
    for seed in SEEDS:
        for classes in CLASSES:
            for optimizer in RATES:
                if not any((r["classes"], r["optimizer"], r["seed"]) == (classes, optimizer, seed) for r in rows):
                    rows += [row | made_on for row in run(classes, optimizer, seed)]
                    write_rows(ROWS, rows)
                    print(f"{classes} classes, {NAMES[optimizer]}, seed {seed}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--render", action="store_true", help="write the page from the rows, without training")
    rows = read_rows(ROWS) if parser.parse_args().render else measure()
    write_atomically(ROWS.with_suffix(".md"), page(rows).encode())


if __name__ == "__main__":
    main()
