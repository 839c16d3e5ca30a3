"""Search the rates and temperatures of `bitempered compare`, on noisy validation labels alone.

    python benchmarks/search_compare.py

Goes on from benchmarks/search_compare.jsonl and writes one row per run there, without test accuracies, so that
nothing can be chosen on them; then prints, for each pair of temperatures, the best rate and its accuracies.
"""

import tempfile
from itertools import product
from pathlib import Path
from statistics import mean

from bitempered.experiments.cells import Cell, Comparison, run
from bitempered.experiments.datasets import default_training
from bitempered.experiments.files import read_rows, write_rows
from bitempered.experiments.losses import Loss
from bitempered.experiments.runs import find

ROWS = Path(__file__).with_suffix(".jsonl")
NOISE = (0.0, 0.2, 0.4)
SEEDS = (100, 101)  # none of those that `compare` reports
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
LOSSES = [Loss("logistic"), *(Loss("bi-tempered", pair) for pair in product((0.2, 0.5, 0.8), (1.2, 2.0, 4.0)))]


def main() -> None:
    rows = read_rows(ROWS)
    for seed, noise, loss in product(SEEDS, NOISE, LOSSES):
        cells = tuple(Cell(loss, noise, rate) for rate in RATES)
        recipe = Comparison("digits", default_training("digits"), cells, (seed,))
        if any(find(rows, recipe.setting(cell, seed)) is None for cell in cells):
            with tempfile.TemporaryDirectory() as folder:
                made = run(recipe, Path(folder), lambda *_: None)
            rows += [{name: value for name, value in row.items() if not name.startswith("test_")} for row in made]
            write_rows(ROWS, rows)
        print(f"\r{len(rows)} of {len(SEEDS) * len(NOISE) * len(LOSSES) * len(RATES)} runs", end="", flush=True)
    print(f"\n\nnoisy validation accuracy, %, means over noise {NOISE} and seeds {SEEDS}")
    print("loss                   | best rate | chosen epoch | last epoch | chosen epoch at each rate")
    for loss in LOSSES:
        chosen, last = (
            {
                rate: 100 * mean(
                    row[column] for row in rows
                    if (row["loss"], tuple(row["numbers"]), row["learning_rate"]) == (loss.name, loss.numbers, rate)
                )
                for rate in RATES
            }
            for column in ("validation_chosen", "validation_last")
        )  # fmt: skip
        best = max(RATES, key=chosen.__getitem__)
        curve = "  ".join(f"{rate:g}: {value:.1f}" for rate, value in chosen.items())
        print(f"{loss!s:22} | {best:9g} | {chosen[best]:12.1f} | {last[best]:10.1f} | {curve}")


if __name__ == "__main__":
    main()
