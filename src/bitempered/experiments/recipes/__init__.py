"""One file for each figure or table, with its values and its special code. To add one, add a file and an entry here.

A recipe's module has `plan(what, options)` if it can be reproduced, and `render(path)` if its rows can be rendered.
"""

from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitempered.experiments.files import BadRows
from bitempered.experiments.recipes.plans import Options, Plan, check_seeds

if TYPE_CHECKING:  # the command line's help needs this module, and neither matplotlib nor torch
    from bitempered.experiments.report import Pages

__all__ = ["RECIPES", "REPRODUCED", "ROWS", "Options", "Plan", "check_seeds", "choose", "folders", "plan", "render"]


@dataclass(frozen=True)
class RecipeEntry:
    """A figure or table: its module, the name of its rows, and its place in the help and the options of `reproduce`."""

    module: str
    rows: str | None = None
    about: str | None = None  # None: it has another command
    options: frozenset[str] = frozenset()  # apart from --out


ALL = frozenset({"quick", "resume", "seeds", "data_dir", "device", "network"})
PROTOCOL = frozenset({"resume", "seeds", "data_dir"})
PROTOCOL_ABOUT = "as papers on noisy labels compare them; needs a GPU, hours of it for A."
RECIPES = {
    "compare": RecipeEntry("compare", "compare"),
    "figure1": RecipeEntry(
        "figure1", about="log_t, exp_t, and the loss of two classes for several temperatures."
    ),
    "figure2": RecipeEntry(
        "figure2", "figure2", "a small net on noisy labels in the plane; under a minute on a CPU.",
        frozenset({"quick", "seeds"}),
    ),
    "defaults": RecipeEntry(
        "defaults", "defaults",
        "the default schedule against cross-entropy on digits and MNIST, SGD and Adam; about an hour on a CPU.",
        frozenset({"quick", "resume", "seeds", "data_dir", "device"}),
    ),
    "convnet": RecipeEntry(
        "convnet", "convnet",
        "the default schedule on two image data sets, with a net that has batch normalisation; hours on a CPU.",
        frozenset({"quick", "resume", "seeds", "data_dir", "device"}),
    ),
    "convnet-searched": RecipeEntry(
        "convnet_searched", "convnet-searched",
        "a searched schedule and generalized cross-entropy on CIFAR-100, with the same net; hours on a CPU.",
        frozenset({"resume", "data_dir", "device"}),
    ),
    "other-noise": RecipeEntry(
        "other_noise", "other-noise",
        "the default schedule under noise that is not symmetric, on digits, MNIST and two small tables; an "
        "hour on a CPU.",
        frozenset({"quick", "resume", "seeds", "data_dir"}),
    ),
    "tuned": RecipeEntry(
        "tuned", "tuned",
        "searched settings against the default schedule and cross-entropy; needs the tune extra, an hour on a CPU.",
        frozenset({"quick", "resume", "seeds", "data_dir"}),
    ),
    "table1": RecipeEntry(
        "table1", "table1",
        "both losses on MNIST or CIFAR-100 at several noise levels, after a search; half an hour on a GPU.",
        ALL | {"dataset"},
    ),
    "figure3": RecipeEntry("table1", "table1", "accuracy by epoch in the runs of table1.", ALL | {"dataset"}),
    "last-epoch": RecipeEntry(
        "last_epoch", "last-epoch",
        "the paper's MNIST trained to the end, settings chosen by the last epoch; half an hour on a GPU.",
        frozenset({"quick", "resume", "seeds", "data_dir", "device"}),
    ),
    "table2": RecipeEntry(
        "table2", "table2",
        "both losses on ImageNet, and the time the loss adds to a step; needs torchvision, and a GPU for days.", ALL,
    ),
    "protocol-a": RecipeEntry(
        "protocols", "protocol-a", f"losses on CIFAR-100 with symmetric noise, {PROTOCOL_ABOUT}", PROTOCOL
    ),
    "protocol-b": RecipeEntry(
        "protocols", "protocol-b", f"losses on CIFAR-100 with human labels, {PROTOCOL_ABOUT}", PROTOCOL
    ),
    "protocol-hardt-ma": RecipeEntry(
        "hardt_ma", "protocol-hardt-ma",
        "both losses on CIFAR-100 with the net and training that the paper names; needs a GPU for an hour.", PROTOCOL,
    ),
    "cpu": RecipeEntry("bench", "cpu"),
    "gpu": RecipeEntry("bench", "gpu"),
}  # fmt: skip
REPRODUCED = {name: entry for name, entry in RECIPES.items() if entry.about is not None}
ROWS = {name: entry.rows for name, entry in RECIPES.items() if entry.rows is not None}


def load(module: str) -> Any:
    return import_module(f"{__name__}.{module}")


def plan(what: str, options: Options) -> Plan:
    """Return the plan of a figure or table; a ValueError says which option is wrong."""
    planned: Plan = load(RECIPES[what].module).plan(what, options)
    return replace(planned, name=f"{planned.name}-quick") if options.quick else planned


def folders(root: Path, *kinds: str) -> list[Path]:
    """Return the folders in `root` that hold rows of these kinds, by default of any."""
    return sorted({path.parent for kind in kinds or ROWS for path in root.glob(f"*/{ROWS[kind]}.jsonl")})


def choose(what: str, *roots: Path) -> list[Path]:
    """Return the folders that a word names: a path, a folder in one of the roots, or a kind."""
    for folder in (Path(what), *(root / what for root in roots)):
        if any((folder / f"{rows}.jsonl").exists() for rows in ROWS.values()):
            return [folder]
    return [folder for root in roots for folder in folders(root, what)] if what in ROWS else []


def render(folder: Path) -> "Pages":
    """Render the pages, tables and figures of a folder again from its rows."""
    pages: Pages = {}
    for kind, module in {entry.rows: entry.module for entry in RECIPES.values() if entry.rows is not None}.items():
        path = folder / f"{kind}.jsonl"
        if not path.exists():
            continue
        try:
            pages |= load(module).render(path)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__} {error}"
            raise BadRows(f"{path} does not hold the rows of a finished {kind}: {reason}") from error
    return pages
