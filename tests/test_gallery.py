"""The scripts of examples/gallery run in a small configuration: both losses learn, and a figure is drawn."""

import importlib
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "examples" / "gallery"
LOSSES = ["cross-entropy", "bi-tempered"]
# The small configuration, and what a net that has not learnt would get: the share of the largest class.
SMALL = {
    "image": ({"epochs": 1}, 0.12),
    "table": ({"levels": (0.1,), "seeds": 1, "epochs": 15}, 0.63),
    "text": ({"epochs": 4}, 0.25),
    "segmentation": ({"steps": 60}, 0.55),
    "many_classes": ({"classes": 50, "epochs": 12}, 0.02),
}


def test_all_scripts_are_here_and_short():
    scripts = {path.stem for path in FOLDER.glob("*.py")} - {"curves"}
    assert scripts == set(SMALL)
    page = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    for name in scripts:
        assert len((FOLDER / f"{name}.py").read_text(encoding="utf-8").splitlines()) < 60
        assert f"../examples/gallery/{name}.py" in page
        assert f"figures/gallery-{name}.png" in page
        assert (ROOT / "docs" / "figures" / f"gallery-{name}.png").stat().st_size > 10_000


@pytest.mark.parametrize("name", SMALL)
def test_both_losses_learn_and_the_figure_is_drawn(name, monkeypatch, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.syspath_prepend(str(FOLDER))
    options, chance = SMALL[name]
    try:
        found = importlib.import_module(name).main(tmp_path / "figure.png", **options)
    finally:
        for module in (name, "curves"):
            sys.modules.pop(module, None)
    assert list(found) == LOSSES
    printed = capsys.readouterr().out
    for loss, right in found.items():
        (right,) = right if isinstance(right, list) else [right]
        assert chance < right <= 1
        assert re.search(rf"{loss}: {right:.1%} ", printed)
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
