"""The recipe behind `bitempered compare`: the logistic loss against the bi-tempered one."""

import platform
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from bitempered import __version__, noise
from bitempered.checks import check_temperatures
from bitempered.experiments.data import check_dataset, load
from bitempered.experiments.files import read_rows, write_rows
from bitempered.experiments.models import mlp
from bitempered.experiments.train import train
from bitempered.torch import bi_tempered_logistic_loss

__all__ = ["LOSSES", "Comparison", "run"]

LOSSES = ("logistic", "bi-tempered")
Progress = Callable[[int, int, str], None]  # epochs done, epochs in all, what is running


@dataclass(frozen=True)
class Comparison:
    """Train both losses on noisy labels with the same model, optimiser and number of epochs.

    The noise corrupts training and validation labels alike, as it would outside a laboratory;
    the test labels are clean. For one seed both losses get the same rows, the same wrong labels,
    the same initial weights and the same batches.

    Rates and temperatures were searched on noisy validation labels, with seeds that are no part of
    the results: benchmarks/search_compare.py has the grid, and its rows lie beside it. Each loss has
    the rate that is best at the chosen epoch. The temperatures are, among the pairs that are within
    the search's noise (a few tenths) of the best at that epoch, the best at the last one. So the
    bi-tempered loss had nine times the logistic one's search. Rates are not chosen at the last
    epoch, where the smallest wins for either loss: it stops before it memorises.
    """

    dataset: str = "digits"
    noise: tuple[float, ...] = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
    t1: float = 0.2
    t2: float = 1.2
    seeds: int = 5
    epochs: int = 150
    batch_size: int = 125
    width: int = 256
    logistic_rate: float = 3e-4
    bi_tempered_rate: float = 3e-4

    def __post_init__(self) -> None:
        check_dataset(self.dataset)
        if not self.noise or not all(0 <= rate <= 1 for rate in self.noise):
            raise ValueError(f"noise levels must be in [0, 1], got {list(self.noise)}")
        # Sorted and each once: the order in which levels are given is no part of the recipe.
        object.__setattr__(self, "noise", tuple(sorted({float(rate) for rate in self.noise})))
        check_temperatures(self.t1, self.t2)
        for name in ("seeds", "epochs", "batch_size", "width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    def settings(self) -> list[dict[str, Any]]:
        """Return what each run depends on, one dictionary per noise level, seed and loss."""
        return [
            {
                "dataset": self.dataset,
                "noise": level,
                "loss": name,
                # The logistic runs do not depend on the temperatures and serve every pair.
                "t1": 1.0 if name == "logistic" else self.t1,
                "t2": 1.0 if name == "logistic" else self.t2,
                "seed": seed,
                "epochs": self.epochs,
                "batch_size": self.batch_size,
                "width": self.width,
                "learning_rate": getattr(self, name.replace("-", "_") + "_rate"),
            }
            for level in self.noise
            for seed in range(self.seeds)
            for name in LOSSES
        ]


def run(recipe: Comparison, rows_file: Path, progress: Progress) -> list[dict[str, Any]]:
    """Make every run of the recipe and return their rows, in the order of `recipe.settings()`.

    `rows_file` is rewritten after each run, so an interruption loses at most the run under way;
    runs already in it, with the same settings, commit, versions and device, are not made again
    (all uncommitted changes on top of a commit count as one).
    """
    settings, origin = recipe.settings(), provenance()
    kept = read_rows(rows_file)
    # Before any training, so that a folder that cannot be written is reported at once.
    write_rows(rows_file, kept)
    rows: list[dict[str, Any]] = []
    total = len(settings) * recipe.epochs
    threads = torch.get_num_threads()
    # Layers this small gain nothing from a second thread (and lose much where cores are shared),
    # and one thread adds in one order: the same numbers on any number of cores.
    torch.set_num_threads(1)
    try:
        for setting in settings:
            row = find(kept, {**setting, **origin})
            if row is None:
                row = run_one(setting, origin, len(rows) * recipe.epochs, total, progress)
                kept.append(row)
                write_rows(rows_file, kept)
            rows.append(row)
            progress(len(rows) * recipe.epochs, total, describe(setting))
    finally:
        torch.set_num_threads(threads)
    return rows


def run_one(
    setting: dict[str, Any], origin: dict[str, str], done: int, total: int, progress: Progress
) -> dict[str, Any]:
    """Train one model from its settings alone and return its row."""
    started = time.perf_counter()
    seed, t1, t2 = setting["seed"], setting["t1"], setting["t2"]
    split = load(setting["dataset"], seed)
    rng = np.random.default_rng(seed)

    def corrupt(labels: np.ndarray) -> np.ndarray:
        return noise.symmetric(labels, setting["noise"], rng=rng, num_classes=split.num_classes)

    def bi_tempered(logits: Tensor, target: Tensor) -> Tensor:
        return bi_tempered_logistic_loss(logits, target, t1, t2)

    (train_x, train_y), (validation_x, validation_y) = split.train, split.validation
    outcome = train(
        mlp(train_x.shape[1], split.num_classes, width=setting["width"], seed=seed),
        # torch's own cross-entropy, not ours at t1 = t2 = 1: the peer people have today.
        cross_entropy if setting["loss"] == "logistic" else bi_tempered,
        ((train_x, corrupt(train_y)), (validation_x, corrupt(validation_y)), split.test),
        epochs=setting["epochs"],
        batch_size=setting["batch_size"],
        learning_rate=setting["learning_rate"],
        seed=seed,
        on_epoch=lambda epoch, accuracy: progress(
            done + epoch, total, f"{describe(setting)}, noisy validation {accuracy:.1%}"
        ),
    )
    seconds = round(time.perf_counter() - started, 3)
    return {**setting, **asdict(outcome), **origin, "seconds": seconds}


def describe(setting: dict[str, Any]) -> str:
    return f"noise {setting['noise']:.0%}, {setting['loss']}, seed {setting['seed']}"


def find(rows: list[dict[str, Any]], wanted: dict[str, Any]) -> dict[str, Any] | None:
    """Return the first row that has every wanted value."""
    return next((row for row in rows if wanted.items() <= row.items()), None)


def provenance() -> dict[str, str]:
    """Say which code made a row, on what."""
    return {
        "commit": commit(),
        "device": f"cpu {platform.machine()}",
        "bitempered": __version__,
        "torch": torch.__version__,
    }


def commit() -> str:
    """Return the commit of this source tree, "unknown" outside a git checkout of it."""
    here = Path(__file__)
    try:
        # An installed copy may lie inside somebody else's repository: ask whether git tracks it.
        for command in (["ls-files", "--error-unmatch", here.name], ["describe", "--always", "--dirty", "--abbrev=40"]):
            done = subprocess.run(["git", *command], cwd=here.parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
