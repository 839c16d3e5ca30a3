"""Does a weight decay mean the same with tempered losses? SGD on digits, with three strengths of decay.

    python benchmarks/decay.py              (needs the extra experiments; a minute on one core)
    python benchmarks/decay.py --render     writes the page again, from the rows

At equal probabilities the gradient is K^-(t2 - t1) times that of cross-entropy, and a decay that is added to it weighs
so much more. `rescale` takes the factor away. Writes benchmarks/decay.jsonl, one row per run, and benchmarks/decay.md.
"""

from pathlib import Path
from typing import Any

import torch

from bitempered.experiments.cells import Cell, Comparison, corrupt, read_data
from bitempered.experiments.losses import Loss
from bitempered.experiments.recipes.compare import default_recipe
from bitempered.experiments.report import grid, last_and_chosen, made_by, measure_or_render, seeds_in_words
from bitempered.experiments.runs import provenance, today
from bitempered.experiments.train import Member, Training, train

ROWS = Path(__file__).with_suffix(".jsonl")
DECAYS = (0.0, 5e-4, 5e-3)
NOISE = (0.0, 0.4)
SEEDS = range(3)
EPOCHS, BATCH, WIDTH, RATE = 150, 125, 64, 0.05
MODELS = {
    "cross-entropy": Loss("logistic"),
    "default schedule": default_recipe(10, EPOCHS),
    "(0.5, 2)": Loss("bi-tempered", (0.5, 2.0)),
    "(0.5, 2), rescaled": Loss("bi-tempered", (0.5, 2.0), rescale=True),
}

Row = dict[str, Any]


def run(decay: float, seed: int) -> list[Row]:
    """Train all models at all noise levels, side by side."""
    names = [(name, level) for name in MODELS for level in NOISE]
    cells = tuple(Cell(MODELS[name], level, RATE) for name, level in names)
    training = Training("mlp", "sgd", EPOCHS, BATCH, weight_decay=decay, width=WIDTH)
    comparison = Comparison("digits", training, cells, (seed,))
    split = read_data(comparison, None).split(seed)
    labels = {level: corrupt(comparison, split, level, seed) for level in NOISE}
    metrics = train(training, [Member(c.loss, RATE, *labels[c.noise]) for c in cells], split, seed=seed)
    rows = []
    for place, (name, level) in enumerate(names):
        chosen = max(metrics, key=lambda row: row["validation"][place])  # on noisy labels; the first if tied
        rows.append(
            {
                "model": name, "noise": level, "weight_decay": decay, "learning_rate": RATE, "seed": seed,
                "test_last": metrics[-1]["test"][place], "test_chosen": chosen["test"][place],
                "problem": metrics[-1]["problem"][place],
            }
        )  # fmt: skip
    return rows


def page(rows: list[Row]) -> str:
    def cell(name: str, level: float, decay: float) -> str:
        here = [r for r in rows if (r["model"], r["noise"], r["weight_decay"]) == (name, level, decay)]
        return last_and_chosen(here, deviations=True) + " *" * any(row["problem"] for row in here)

    lines = [
        [f"{level:.0%}", name, *(cell(name, level, decay) for decay in DECAYS)] for level in NOISE for name in MODELS
    ]
    return f"""# Does a weight decay mean the same with tempered losses?

Accuracy on clean test labels of digits in %, last / chosen epoch. The chosen epoch is the best on validation labels,
which are as noisy as the training labels.

{grid(["noise", "loss", *(f"decay {decay:g}" for decay in DECAYS)], lines, ["---:", "---", *["---:"] * len(DECAYS)])}

\\* a run gave up a class, or did not learn.

Mean ± sample standard deviation over {seeds_in_words(rows)}. SGD {RATE:g} with momentum, its decay added to the
gradient; a perceptron with two hidden layers of {WIDTH} units, {EPOCHS} epochs in batches of {BATCH}.

{made_by(rows[0])}, by `python benchmarks/decay.py`.
"""


def measure() -> list[Row]:
    torch.set_num_threads(1)
    made_on = provenance() | {"date": today()}
    return [row | made_on for decay in DECAYS for seed in SEEDS for row in run(decay, seed)]


def main() -> None:
    measure_or_render(ROWS, measure, page)


if __name__ == "__main__":
    main()
