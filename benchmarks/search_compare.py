"""Search the rates and temperatures of `bitempered compare`, on noisy validation labels alone.

    python benchmarks/search_compare.py

Goes on from benchmarks/search_compare.jsonl and writes one row per run there, without test accuracies, so that
nothing can be chosen on them; then prints, for each pair of temperatures, the best rate and its accuracies.
"""

from itertools import product
from pathlib import Path
from statistics import mean

import torch

from bitempered.experiments.compare import Comparison, find, provenance, run_one
from bitempered.experiments.files import read_rows, write_rows

ROWS = Path(__file__).with_suffix(".jsonl")
NOISE = (0.0, 0.2, 0.4)
SEEDS = (100, 101)  # none of those that `compare` reports
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
PAIRS = [(1.0, 1.0), *product((0.2, 0.5, 0.8), (1.2, 2.0, 4.0))]


def settings() -> list[dict]:
    recipe = Comparison()
    common = {
        "dataset": recipe.dataset,
        "epochs": recipe.epochs,
        "batch_size": recipe.batch_size,
        "width": recipe.width,
    }
    return [
        {
            **common,
            "loss": "logistic" if (t1, t2) == (1.0, 1.0) else "bi-tempered",
            "t1": t1,
            "t2": t2,
            "learning_rate": rate,
            "noise": noise,
            "seed": seed,
        }
        for (t1, t2), rate, noise, seed in product(PAIRS, RATES, NOISE, SEEDS)
    ]


def main() -> None:
    torch.set_num_threads(1)
    rows, origin = read_rows(ROWS), provenance()
    wanted = settings()
    for number, setting in enumerate(wanted, start=1):
        if find(rows, setting) is None:
            row = run_one(setting, origin, 0, 1, lambda *_: None)
            rows.append({name: value for name, value in row.items() if not name.startswith("test_")})
            write_rows(ROWS, rows)
        print(f"\r{number} of {len(wanted)} runs", end="", flush=True)
    print(f"\n\nnoisy validation accuracy, %, means over noise {NOISE} and seeds {SEEDS}")
    print("   t1   t2 | best rate | chosen epoch | last epoch | chosen epoch at each rate")
    for t1, t2 in PAIRS:
        chosen, last = (
            {
                rate: 100
                * mean(row[column] for row in rows if (row["t1"], row["t2"], row["learning_rate"]) == (t1, t2, rate))
                for rate in RATES
            }
            for column in ("validation_chosen", "validation_last")
        )
        best = max(RATES, key=chosen.__getitem__)
        curve = "  ".join(f"{rate:g}: {value:.1f}" for rate, value in chosen.items())
        print(f"{t1:5g}{t2:5g} | {best:9g} | {chosen[best]:12.1f} | {last[best]:10.1f} | {curve}")


if __name__ == "__main__":
    main()
