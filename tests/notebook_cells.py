"""The code cells of a notebook, run in order in one scope, with what they print and draw. Needs no Jupyter.

python tests/notebook_cells.py docs/find_wrong_rows.ipynb       runs the notebook, and writes its outputs
"""

import base64
import io
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def run(notebook: dict[str, Any]) -> list[tuple[dict[str, Any], str, list[bytes]]]:
    """Each code cell with what it printed and the pictures that it showed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    scope: dict[str, Any] = {"__name__": "notebook"}
    done = []
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        pictures: list[bytes] = []

        def show(pictures: list[bytes] = pictures) -> None:
            picture = io.BytesIO()
            plt.gcf().savefig(picture, format="png", dpi=90)
            pictures.append(picture.getvalue())
            plt.close()

        with redirect_stdout(io.StringIO()) as printed, mock.patch.object(plt, "show", show):
            exec(compile("".join(cell["source"]), "<notebook>", "exec"), scope)
        done.append((cell, printed.getvalue(), pictures))
    return done


def write(path: Path) -> None:
    notebook = read(path)
    for number, (cell, printed, pictures) in enumerate(run(notebook), start=1):
        cell["execution_count"] = number
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": printed.splitlines(True)}] * bool(
            printed
        )
        for picture in pictures:
            data = {"image/png": base64.b64encode(picture).decode(), "text/plain": ["<Figure>"]}
            cell["outputs"].append({"data": data, "metadata": {}, "output_type": "display_data"})
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        write(Path(name))
