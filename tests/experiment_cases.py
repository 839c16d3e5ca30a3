"""What tests of the experiments share."""

import gzip
import struct
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from bitempered import cli
from bitempered.experiments import cells, recipes
from bitempered.experiments.cells import Cell, Comparison
from bitempered.experiments.datasets import DATASETS, default_training
from bitempered.experiments.losses import Loss

LOSSES = (Loss("logistic"), Loss("bi-tempered", (0.2, 1.2)))


def comparison(dataset="digits", losses=LOSSES, levels=(0.0, 0.4), seeds=2, epochs=1, rate=3e-4, **options):
    """A comparison with nothing left to search."""
    training = replace(default_training(dataset), epochs=epochs, steps=None)
    compared = tuple(Cell(loss, level, rate) for level in levels for loss in losses)
    return Comparison(dataset, training, compared, tuple(range(seeds)), **options)


TINY = replace(comparison(), training=replace(default_training("digits"), epochs=2, width=16))
NO_SEARCH = ["--losses", "logistic,bi-tempered:0.2:1.2", "--rates", "0.0003"]
TINY_OPTIONS = ["compare", "--noise", "0.4,0", "--seeds", "2", "--epochs", "1", *NO_SEARCH]


def silent(*_):
    """Progress that nobody sees."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The rows of `TINY`, and their folder; for test modules that give it this name."""
    folder = tmp_path_factory.mktemp("tiny")
    return cells.run(TINY, folder, silent), folder


def invoke(*options):
    """Run the command `bitempered` in this process."""
    return CliRunner().invoke(cli.app, [str(option) for option in options])


def error_lines(result):
    """What a command wrote to stderr, but for progress."""
    return [line for line in result.stderr.splitlines() if not line[:4].strip().endswith("%")]


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


def one_line(error):
    """Whether an error that pytest.raises caught fits on one line."""
    return "\n" not in str(error.value)


def packed(content):
    """Compressed, without the time, which would give the tests' parameters another name in each process."""
    return gzip.compress(content, mtime=0)


def idx(array):
    """A file in MNIST's format."""
    header = struct.pack(">BBBB", 0, 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.tobytes()


def write_images(folder, *, train, test):
    """Write so many training and test images in MNIST's files: noise, and a bright pixel that gives the label away."""
    rng = np.random.default_rng(0)
    for name, n in (("train", train), ("t10k", test)):
        labels = (np.arange(n) % 10).astype(np.uint8)
        images = rng.integers(0, 60, (n, 28, 28)).astype(np.uint8)
        images[np.arange(n), 2 * labels + 3] = 250
        for kind, values in (("images-idx3", images), ("labels-idx1", labels)):
            (folder / f"{name}-{kind}-ubyte.gz").write_bytes(packed(idx(values)))


def change_dataset(monkeypatch, name, **values):
    monkeypatch.setitem(DATASETS, name, replace(DATASETS[name], **values))
