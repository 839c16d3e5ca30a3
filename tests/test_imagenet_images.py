"""ImageNet's folders: which images are read, how they are cropped, and one line for a folder that is something else."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from imagenet_cases import CPU, FIXTURES, IGNORED_WARNINGS, make_images, reproduce
from PIL import Image

from bitempered.experiments import imagenet
from bitempered.experiments.imagenet import ImageFiles
from bitempered.experiments.sources import DataError

pytestmark = IGNORED_WARNINGS
folder, data, small_network = FIXTURES


# Images


def test_classes_are_numbered_by_name_in_both_parts(data):
    assert data.classes == 10
    assert [len(data.train.names), len(data.validation.names)] == [160, 60]
    for images in (data.train, data.validation):
        assert (np.diff(images.labels) >= 0).all()
        for name, label in zip(images.names, images.labels, strict=True):
            assert name.decode().startswith(f"n{label:04}/")
            assert (images.folder / name.decode()).is_file()


def test_validation_images_are_resized_then_cut_in_the_centre(tmp_path):
    """Against PIL's own two steps, on a smooth image, where they differ by rounding alone."""
    y, x = np.mgrid[0:300, 0:400]
    smooth = np.stack([x * 255 / 400, y * 255 / 300, (x + y) * 255 / 700], axis=2).astype(np.uint8)
    Image.fromarray(smooth).save(tmp_path / "a.png")
    pixels, labels = ImageFiles(tmp_path, np.array([b"a.png"]), np.array([3]), 224)[[0]]
    resized = Image.fromarray(smooth).resize((341, 256), Image.Resampling.BILINEAR)
    expected = np.asarray(resized.crop((58, 16, 58 + 224, 16 + 224)))
    assert pixels.dtype == torch.uint8
    assert np.abs(pixels[0].numpy().astype(int) - expected).max() <= 2
    assert labels.tolist() == [3]


@pytest.mark.parametrize(("width", "height"), [(400, 400), (500, 375), (60, 200)])
def test_random_crops_lie_inside_in_their_sizes_and_shapes(width, height):
    rng = np.random.default_rng(0)
    boxes = np.array([imagenet.random_box(width, height, rng=rng) for _ in range(2000)])
    left, top, right, bottom = boxes.T
    assert (boxes >= 0).all()
    assert (right <= width).all()
    assert (bottom <= height).all()
    w, h = right - left, bottom - top
    shares, ratios = w * h / (width * height), w / h
    assert shares.min() == pytest.approx(0.08, rel=0.05)  # sides are whole pixels
    assert ratios.min() > 0.73
    assert ratios.max() < 1.36
    if width == height:  # where every draw of less than 3/4 fits, so that what is left of those is uniform
        small = shares < 0.75
        assert shares.max() > 0.9
        assert shares[small].mean() == pytest.approx((0.08 + 0.75) / 2, abs=0.02)  # four standard errors
        assert np.log(ratios[small]).mean() == pytest.approx(0, abs=0.018)
        assert np.log(ratios[small]).std() == pytest.approx(np.log(16 / 9) / 12**0.5, rel=0.05)
        assert (left.min(), top.min(), right.max(), bottom.max()) == (0, 0, width, height)


def test_an_image_that_no_crop_fits_gives_the_most_of_its_centre():
    rng = np.random.default_rng(0)
    assert imagenet.random_box(1000, 3, rng=rng) == (498, 0, 502, 3)
    assert imagenet.random_box(3, 1000, rng=rng) == (0, 498, 3, 502)


def test_half_of_the_training_images_are_mirrored(tmp_path):
    """An image that is darker on the left is so in every crop that is not mirrored."""
    ramp = np.repeat(np.arange(0, 256, 4, dtype=np.uint8)[None, :, None], 64, axis=0).repeat(3, axis=2)
    Image.fromarray(ramp).save(tmp_path / "a.png")
    images = ImageFiles(tmp_path, np.array([b"a.png"] * 200), np.zeros(200, dtype=np.int64), 8, draw=(0, 1))
    pixels = images[list(range(200))][0].int()
    left, right = pixels[:, 0, 0, 0], pixels[:, 0, -1, 0]
    assert (left != right).all()
    assert 70 < (left > right).sum().item() < 130  # four standard deviations


def test_crops_follow_from_seed_epoch_and_image_alone(data):
    def read(draw, rows):
        return replace(data.train, draw=draw)[rows][0]

    first = read((0, 1), [5, 6])
    assert torch.equal(read((0, 1), [6, 9])[0], first[1])
    for draw in ((0, 2), (1, 1)):
        assert not torch.equal(read(draw, [5, 6]), first)
    assert torch.equal(data.train[[5, 6]][0], data.train[[5, 6]][0])


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # of JAX, where another test imported it
def test_workers_read_the_same_images(data, monkeypatch):
    rows = [[0, 5, 9], [1], [2, 3]]
    images = replace(data.train, draw=(0, 1))
    alone = list(imagenet.batches(images, rows, CPU))
    monkeypatch.setattr(imagenet, "workers", lambda device: 2)
    for batch, expected in zip(imagenet.batches(images, rows, CPU), alone, strict=True):
        for tensor, other in zip(batch, expected, strict=True):
            assert torch.equal(tensor, other)


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # of JAX, where another test imported it
@pytest.mark.parametrize("workers", [0, 1])
def test_an_image_that_cannot_be_read_is_named(workers, tmp_path, monkeypatch):
    monkeypatch.setattr(imagenet, "workers", lambda device: workers)
    make_images(tmp_path / "train", 2)
    make_images(tmp_path / "val", 1)
    broken = tmp_path / "train" / "n0003" / "1.JPEG"
    broken.write_bytes(broken.read_bytes()[:300])  # its header is whole, its pixels are not
    done = reproduce(tmp_path, tmp_path / "out", "--quick")
    assert done.exit_code == 1
    assert f"{broken} is not an image that can be read (" in done.stderr
    assert done.stderr.endswith("replace or delete it\n")
    assert done.stderr.count("\n") == 1


# Folders


def folders(root, *names):
    for name in names:
        (root / name).mkdir(parents=True)
        (root / name / "a.JPEG").touch()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "there is no folder {}/train; --data-dir must have train/CLASS/*.JPEG and val/CLASS/*.JPEG"),
        (["train/a"], "there is no folder {}/val; --data-dir must have"),
        (["train/a", "val"], "{}/val has no class folders: images must be in val/CLASS/*.JPEG (the validation images"),
        (["train/a", "train/b", "val/b", "val/c"], "the same class folders; only in train: a; only in val: c"),
        (["train/a", "train/b", "val/b"], "{}: train and val must have the same class folders; only in train: a\n"),
        ([f"train/{i}" for i in range(6)] + ["val/1"], "only in train: 0, 2, 3 and 2 more\n"),
    ],
)
def test_folders_of_another_layout_are_refused(names, message, tmp_path):
    root = tmp_path / "data"
    root.mkdir()
    folders(root, *names)
    done = reproduce(root, tmp_path / "out", "--quick")
    assert done.exit_code == 1
    assert done.stderr.startswith("bitempered: ")
    assert message.format(root) in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_class_without_images_is_refused(tmp_path):
    folders(tmp_path, "train/a", "train/b", "val/a", "val/b")
    (tmp_path / "val" / "b" / "a.JPEG").rename(tmp_path / "val" / "b" / "a.txt")
    with pytest.raises(DataError, match=r"val.b has no images"):
        imagenet.read_folder(tmp_path, 16, None)


@pytest.mark.parametrize(
    ("images", "train", "validation"),
    [
        (None, 5, 3),
        (100, 5, 3),  # more than there are
        (12, 4, 3),  # more than validation has
        (8, 2, 2),  # not a multiple of the classes
        (6, 2, 2),
        (2, 1, 1),  # fewer than classes
    ],
)
def test_images_are_shared_among_the_classes(images, train, validation, tmp_path):
    """Three classes, of five images in training and of three in validation."""
    for part, number in (("train", 5), ("val", 3)):
        for name in "abc":
            (tmp_path / part / name).mkdir(parents=True)
            for i in range(number):
                (tmp_path / part / name / f"{i}.JPEG").touch()
    data = imagenet.read_folder(tmp_path, 16, images)
    assert data.classes == 3
    for part, used in ((data.train, train), (data.validation, validation)):
        assert part.names.tolist() == [f"{name}/{i}.JPEG".encode() for name in "abc" for i in range(used)]
        assert part.labels.tolist() == [label for label in range(3) for _ in range(used)]
    everything = imagenet.read_folder(tmp_path, 16, None)
    assert (data.digest == everything.digest) == ((train, validation) == (5, 3))


def test_a_folder_must_be_named():
    with pytest.raises(DataError, match=r"ImageNet must be downloaded by hand, .* with --data-dir, name a folder"):
        imagenet.read_folder(None, 16, None)
