"""What tests of the experiments share."""

from dataclasses import replace

import numpy as np
from PIL import Image
from typer.testing import CliRunner

from bitempered import cli
from bitempered.experiments import recipes
from bitempered.experiments.datasets import DATASETS, default_training
from bitempered.experiments.recipes.compare import comparison

TINY = replace(comparison(levels=(0.0, 0.4), seeds=2), training=replace(default_training("digits"), epochs=2, width=16))
TINY_OPTIONS = ["compare", "--noise", "0.4,0", "--seeds", "2", "--epochs", "1"]
COLOURS = np.random.default_rng(7).integers(40, 216, (10, 3))


def silent(*_):
    """Progress that nobody sees."""


def invoke(*options):
    """Run the command `bitempered` in this process."""
    return CliRunner().invoke(cli.app, [str(option) for option in options])


def without(rows, *names):
    """The rows without what may differ between two runs of one recipe."""
    return [{name: value for name, value in row.items() if name not in names} for row in rows]


def results(rows):
    return without(rows, "fleet", "fleet_seconds")


def assert_rendered(folder, *names):
    """The files are what the rows beside them give."""
    pages = recipes.render(folder)
    assert set(names) == set(pages)
    for name in names:
        assert (folder / name).read_bytes() == pages[name], name


def change_dataset(monkeypatch, name, **values):
    monkeypatch.setitem(DATASETS, name, replace(DATASETS[name], **values))


def make_images(folder, per_class):
    """Noise around a colour of each class, in many shapes: wide, high, grey, CMYK, PNG."""
    rng = np.random.default_rng(per_class)
    for label, colour in enumerate(COLOURS):
        (folder / f"n{label:04}").mkdir(parents=True)
        for i in range(per_class):
            height, width = rng.integers(18, 40, 2)
            pixels = np.clip(colour + rng.normal(0, 20, (height, width, 3)), 0, 255).astype(np.uint8)
            image = Image.fromarray(pixels)
            if i == 1:
                image = image.convert("CMYK")
            image.save(folder / f"n{label:04}" / f"{i}.JPEG", format="PNG" if i == 2 else "JPEG")
