"""What `bitempered reproduce` gives to a recipe, and what it gets back."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # it imports torch
    from bitempered.experiments.runs import Progress

__all__ = ["SEARCH_SEED", "Options", "Plan", "check_seeds"]

SEARCH_SEED = 100  # the first of a search; results use none from here on


def check_seeds(seeds: int) -> None:
    """Refuse a number of seeds, counted from 0, that is not positive or reaches those of a search."""
    if seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {seeds}")
    if seeds > SEARCH_SEED:
        raise ValueError(f"seeds must be at most {SEARCH_SEED}, got {seeds}")


@dataclass(frozen=True)
class Options:
    """The options given to `bitempered reproduce`; None where the recipe decides."""

    device: str
    dataset: str | None = None
    network: str | None = None
    quick: bool = False
    seeds: int | None = None
    data_dir: Path | None = None


@dataclass(frozen=True)
class Plan:
    """The work of `bitempered reproduce`."""

    name: str  # of its folder in results; `recipes.plan` adds -quick
    make: Callable[[Path, "Progress"], Any]  # fills a folder; returns what to print, or None
    files: str  # the files it makes, in words
    together: bool = False  # the processes of torchrun train each network together; else they share the folder's jobs
