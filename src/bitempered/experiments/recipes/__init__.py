"""One file for each figure or table: its values, and what is special about it."""

from importlib import import_module
from pathlib import Path

from bitempered.experiments.files import BadRows
from bitempered.experiments.report import Pages

__all__ = ["KINDS", "choose", "folders", "render"]

# What can be rendered, and the recipe that does so. The rows of `kind` are in kind.jsonl; figure3 is made with table1.
KINDS = {
    "compare": "compare",
    "figure2": "figure2",
    "figure3": "table1",
    "table1": "table1",
    "table2": "table2",
    "protocol-a": "protocols",
    "protocol-b": "protocols",
}


def folders(root: Path, *kinds: str) -> list[Path]:
    """The folders in `root` that hold rows, of these kinds or of any."""
    return sorted({path.parent for kind in kinds or KINDS for path in root.glob(f"*/{kind}.jsonl")})


def choose(what: str, root: Path) -> list[Path]:
    """The folders that a word means: a path, the name of a folder in `root`, or a kind."""
    for folder in (Path(what), root / what):
        if folder.is_dir() and folders(folder.parent) and folder in folders(folder.parent):
            return [folder]
    return folders(root, "table1" if what == "figure3" else what) if what in KINDS else []


def render(folder: Path) -> Pages:
    """Make the pages, tables and figures of a folder again from its rows."""
    pages: Pages = {}
    for kind, recipe in KINDS.items():
        path = folder / f"{kind}.jsonl"
        if not path.exists():
            continue
        try:
            pages |= import_module(f"bitempered.experiments.recipes.{recipe}").render(path)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise BadRows(
                f"{path} does not hold the rows of a finished {kind}: {type(error).__name__} {error}"
            ) from error
    return pages
