"""The notebook runs as committed, and prints what it shows."""

import re
from pathlib import Path

import pytest
from notebook_cells import read, run
from page_blocks import NUMBER

ROOT = Path(__file__).parent.parent
NOTEBOOK = read(ROOT / "docs" / "find_wrong_rows.ipynb")
POINTS = 6  # a percentage is of some hundred rows, after training, which other rounding moves


def shown(cell):
    """What a committed cell printed, and how many pictures it has."""
    printed = "".join("".join(output.get("text", [])) for output in cell["outputs"])
    return printed, sum("image/png" in output.get("data", {}) for output in cell["outputs"])


def test_it_is_committed_with_its_outputs():
    cells = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert all(cell["outputs"] for cell in cells)
    assert not re.search(r"Traceback|Warning|/home/|/tmp/", str(NOTEBOOK))
    assert len({cell["id"] for cell in NOTEBOOK["cells"]}) == len(NOTEBOOK["cells"])


@pytest.mark.slow
def test_it_prints_and_draws_what_it_shows():
    pytest.importorskip("matplotlib")
    for cell, printed, pictures in run(NOTEBOOK):
        was, count = shown(cell)
        assert len(pictures) == count
        assert NUMBER.sub("0", printed) == NUMBER.sub("0", was)
        for now, before in zip(NUMBER.findall(printed), NUMBER.findall(was), strict=True):
            assert abs(float(now.rstrip("%")) - float(before.rstrip("%"))) <= (POINTS if "%" in now else 0)
