"""What tests of `bitempered reproduce table2` share: folders of small images, and a small network."""

import numpy as np
import pytest
import torch
from experiment_cases import invoke
from PIL import Image
from torch import nn

from bitempered.experiments import imagenet, networks
from bitempered.experiments.imagenet import ImagenetTraining
from bitempered.experiments.recipes.table2 import Table2

IGNORED_WARNINGS = [  # what Python and torch say of workers, on machines with many threads and with one core
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]
CPU = torch.device("cpu")
TINY = Table2(
    ImagenetTraining("resnet18", 3, 32, micro_batch=12, rate=0.1, size=16, stairs=(0.5,), weight_decay=1e-2),
    seeds=(0, 1), timed=(4, 16), turns=3,
)  # fmt: skip
COLOURS = np.random.default_rng(7).integers(40, 216, (10, 3))


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


def make_folder(folder):
    """Images of ten classes to train on and to test with, and what is none of them."""
    make_images(folder / "train", 16)
    make_images(folder / "val", 6)
    (folder / "train" / ".hidden").mkdir()
    (folder / "train" / "n0000" / "notes.txt").write_text("no image")
    return folder


class Net(nn.Module):
    """Small, with batch normalisation like the real ones."""

    def __init__(self, classes, normalised=True):
        super().__init__()
        self.filter = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(16) if normalised else nn.Identity()
        self.dense = nn.Linear(16, classes)

    def forward(self, x):
        assert x.shape[1] == 3
        assert x.is_contiguous(memory_format=torch.channels_last)
        return self.dense(self.norm(self.filter(x)).relu().mean(dim=(2, 3)))


def reproduce(folder, out, *options):
    return invoke("reproduce", "table2", "--device", "cpu", "--data-dir", folder, "--out", out, *options)


# Fixtures, for test modules that give them these names


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("imagenet"))


@pytest.fixture(scope="module")
def data(folder):
    return imagenet.read_folder(folder, 16, None)


@pytest.fixture(autouse=True)
def small_network(monkeypatch):
    monkeypatch.setattr(networks, "imagenet_resnet", lambda name, *, classes: Net(classes))


FIXTURES = folder, data, small_network
