"""The protocols of the noisy-label literature: their images, rates, network, steps, and what chooses an epoch."""

import math
import weakref
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from experiment_cases import assert_rendered, invoke, without
from PIL import Image
from torch import nn
from torch.nn.functional import cross_entropy

from bitempered import cli, noise
from bitempered.experiments import augmentation, checkpoints, streams
from bitempered.experiments.checkpoints import BadCheckpoint, Checkpoint, pack, unpack
from bitempered.experiments.files import read_rows
from bitempered.experiments.losses import Loss
from bitempered.experiments.recipes import protocols
from bitempered.experiments.recipes.protocols import PROTOCOLS
from bitempered.experiments.sources import DataError
from bitempered.experiments.streams import Cifar100, Setting, StreamedRun
from bitempered.torch import bi_tempered_logistic_loss

CPU = torch.device("cpu")
LOGISTIC, TEMPERED = Loss("logistic"), Loss("bi-tempered", (0.5, 2.0))
# With fewer than 8 channels torch 2.13 ends in a double free where a CPU has AVX2 and no AVX-512 (oneDNN).
TINY_A = replace(PROTOCOLS["a"], epochs=3, batch_size=8, width=8, measure_every=1)
TINY_B = replace(PROTOCOLS["b"], epochs=3, batch_size=8, width=8)


def part(n, seed):
    """Images of four classes that differ in brightness."""
    labels = np.arange(n) % 4
    pixels = np.random.default_rng(seed).integers(0, 150, (n, 3, 32, 32)) + 25 * labels[:, None, None, None]
    return pixels.astype(np.uint8), labels


def numbered(n):
    """Image i has the one colour i + 1, which survives every move; its label is i % 4."""
    colours = np.arange(1, n + 1, dtype=np.uint8)
    return np.tile(colours[:, None, None, None], (1, 3, 32, 32)), np.arange(n) % 4


IMAGES = Cifar100(part(24, 0), part(16, 1))


@pytest.fixture
def small(monkeypatch):
    """A linear layer on twelve means in place of the ResNet: as much as most of these tests need."""

    def network(classes, seed, width):
        linear = nn.Linear(12, classes)
        nn.init.normal_(linear.weight, generator=torch.Generator().manual_seed(seed))
        nn.init.zeros_(linear.bias)
        return nn.Sequential(nn.AvgPool2d(16), nn.Flatten(), linear)

    monkeypatch.setitem(streams.SINGLE_NETWORKS, "resnet34", network)


def run(folder, *settings, protocol=TINY_A, images=IMAGES, **options):
    """The rows, and what progress was told."""
    told = []

    def progress(done, total, text):
        told.append(text)

    return streams.run(protocol, settings, images, folder, progress, device="cpu", **options), told


def checkpoint(folder, item):
    return Checkpoint.of(folder, f"protocol-a-seed{item.setting.seed}", [item.identity()])


def without_time(rows):
    return without(rows, "date", "fleet_seconds")


# Images


@pytest.mark.parametrize("rotation", [0, 20])
def test_images_move_as_pillow_moves_them(rotation):
    """A crop of the padded image, then mirrored, then turned to the nearest pixel."""
    images = np.random.default_rng(0).integers(0, 256, (200, 32, 32, 3), dtype=np.uint8)
    moved = augmentation.move(torch.from_numpy(images), rotation, torch.Generator().manual_seed(0)).numpy()
    draws = torch.rand((4, len(images)), generator=torch.Generator().manual_seed(0)).double().numpy()
    down, right = np.floor(9 * draws[:2]).astype(int)
    mirrored, angles = draws[2] < 0.5, (2 * draws[3] - 1) * rotation
    assert set(down) == set(right) == set(range(9))
    assert 70 < mirrored.sum() < 130  # of 200, four standard deviations
    assert angles.min() < -0.9 * rotation or rotation == 0
    assert angles.max() > 0.9 * rotation or rotation == 0
    y, x = np.mgrid[:32, :32] - 15.5
    different = []
    for i, seen in enumerate(moved):
        padded = np.pad(images[i], ((4, 4), (4, 4), (0, 0)))
        expected = Image.fromarray(padded[down[i] : down[i] + 32, right[i] : right[i] + 32])
        if mirrored[i]:
            expected = expected.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        expected = np.asarray(expected.rotate(-angles[i], Image.Resampling.NEAREST))
        different.append((seen != expected).any(axis=2))
        # Pillow's coordinates are multiples of 2^-16, added up along 32 pixels; ours are rounded to float32. So one
        # that falls on the edge between two pixels may go either way, and no other.
        cos, sin = np.cos(np.radians(angles[i])), np.sin(np.radians(angles[i]))
        row, column = cos * y - sin * x, sin * y + cos * x
        edge = np.minimum(abs(row - row.round()), abs(column - column.round()))
        assert (edge[different[-1]] < 32 * 2**-16).all()
    # Of all pixels 0.01 % were so; of one image up to 0.6 %, where an angle puts several on edges at once. Without a
    # rotation coordinates are half integers, far from an edge.
    assert np.mean(different) <= (0.0005 if rotation else 0)


# Rates


@pytest.mark.parametrize(
    ("name", "scheduler"),
    [
        ("a", lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200, eta_min=0)),
        ("b", lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[60], gamma=0.1)),
    ],
)
def test_rates_are_those_of_torch_s_schedulers(name, scheduler):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    schedule, expected = scheduler(optimizer), []
    for _ in range(PROTOCOLS[name].epochs):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert len(expected) == {"a": 200, "b": 100}[name]
    # torch multiplies its way from epoch to epoch, and every product rounds.
    protocol = PROTOCOLS[name]
    rates = [protocol.rate * protocol.rate_factor(epoch) for epoch in range(len(expected))]
    assert rates == pytest.approx(expected, rel=1e-9)


# The loss and the step


@pytest.mark.parametrize(("t1", "t2"), [(0.5, 2.0), (0.8, 1.2), (0.2, 4.0)])
def test_a_rescaled_loss_begins_as_cross_entropy(t1, t2):
    rescaled = Loss("bi-tempered", (t1, t2), rescale=True)
    generator = torch.Generator().manual_seed(0)
    target = torch.randint(0, 100, (6,), generator=generator)
    logits = torch.randn(6, 100, generator=generator, dtype=torch.float64) * 100 ** (1 - t2)
    expected = 100 ** (1 - t1) * bi_tempered_logistic_loss(100 ** (t2 - 1) * logits, target, t1, t2, reduction="none")
    torch.testing.assert_close(rescaled(logits, target), expected)
    plain = bi_tempered_logistic_loss(logits, target, t1, t2, reduction="none")
    torch.testing.assert_close(replace(rescaled, rescale=False)(logits, target), plain)
    assert not torch.allclose(plain, expected)

    level = torch.full((6, 100), 0.3, dtype=torch.float64, requires_grad=True)
    (seen,) = torch.autograd.grad(rescaled(level, target).sum(), level)
    (wanted,) = torch.autograd.grad(cross_entropy(level, target, reduction="sum"), level)
    torch.testing.assert_close(seen, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("rescale", [False, True, "logits"])
def test_temperatures_in_memory_replace_the_numbers(rescale):
    logits = torch.randn(6, 100, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    target = torch.arange(6)
    wanted = Loss("bi-tempered", (0.25, 1.5), rescale=rescale)(logits, target)
    scheduled = Loss("bi-tempered", (0.5, 4.0), schedule=(0, 10), rescale=rescale)
    torch.testing.assert_close(scheduled(logits, target, torch.tensor([0.25, 1.5])), wanted)


@pytest.mark.parametrize("text", ["logistic", "gce:0.7", "sce:0.1:1", "tsallis:0.5:2"])
def test_only_the_bi_tempered_loss_is_rescaled(text):
    with pytest.raises(ValueError, match="rescale and schedule are for the bi-tempered loss, got"):
        replace(Loss.parse(text), rescale=True)


def test_a_schedule_moves_the_temperatures_by_epoch(small, tmp_path, monkeypatch):
    used, one_step = [], StreamedRun.one_step

    def look(self):
        used.append((self.epoch, tuple(self.temperatures.tolist())))
        one_step(self)

    monkeypatch.setattr(StreamedRun, "one_step", look)
    setting = Setting(replace(TEMPERED, schedule=(1, 3)), 0.5, seed=0)
    (row,), _ = run(tmp_path, setting, protocol=replace(TINY_A, epochs=4))
    expected = enumerate([(1, 1), (1, 1), (0.75, 1.5), (0.5, 2)])
    assert used == [(epoch, numbers) for epoch, numbers in expected for _ in range(3)]
    assert row["schedule"] == [1, 3]
    assert row["numbers"] == [0.5, 2.0]


@pytest.mark.parametrize("noise_model", ["pair-flip", "symmetric-all", ""])
def test_noise_that_no_run_makes_is_refused(noise_model):
    with pytest.raises(ValueError, match=f"unknown noise model {noise_model!r}; choose from: symmetric, human"):
        replace(TINY_A, noise_model=noise_model)


def test_an_unknown_network_is_refused():
    with pytest.raises(ValueError, match="unknown network 'resnet'; choose from: resnet34, resnet56-hardt-ma"):
        replace(TINY_A, network="resnet")


def test_bad_schedules_are_refused():
    with pytest.raises(ValueError, match="schedule are for the bi-tempered loss, got logistic"):
        replace(LOGISTIC, schedule=(1, 2))
    with pytest.raises(ValueError, match="begin must not be after finish"):
        replace(TEMPERED, schedule=(3, 2))


@pytest.mark.parametrize("clip", [0.5, None])
def test_steps_are_sgd_by_hand(clip, small, tmp_path):
    """The gradient of cross-entropy, its norm cut, then decay, then momentum, then the rate."""
    protocol = replace(TINY_A, clip=clip, weight_decay=0.2, rate=0.05)
    item = StreamedRun(protocol, Setting(LOGISTIC, 0.5, seed=3), IMAGES, CPU)
    item.start(Checkpoint(tmp_path / "none", ""))
    weights = [w.detach().double().numpy().copy() for w in item.network.parameters()]
    item.begin_epoch()
    # Pixels from 0 to 1, standardised by channel, then the means of the four quarters of each channel.
    pixels = item.epoch_images.double().permute(0, 3, 1, 2).numpy() / 255
    mean, deviation = np.array([0.5071, 0.4865, 0.4409]), np.array([0.2673, 0.2564, 0.2762])
    pixels = (pixels - mean[:, None, None]) / deviation[:, None, None]
    x = pixels.reshape(-1, 3, 2, 16, 2, 16).mean(axis=(3, 5)).reshape(-1, 12)
    noisy, clean = item.epoch_labels.numpy()
    assert (noisy != clean).sum() == 12  # half of 24
    velocity, sums = [np.zeros_like(w) for w in weights], np.zeros(4)
    for batch in np.split(np.arange(24), 3):
        item.step()
        logits = x[batch] @ weights[0].T + weights[1]
        odds = np.exp(logits - logits.max(axis=1, keepdims=True))
        error = odds / odds.sum(axis=1, keepdims=True)
        guess = logits.argmax(axis=1)
        right = [(guess == y[batch]).sum() for y in (noisy, clean)]
        sums += [-np.log(error[np.arange(8), noisy[batch]]).sum(), *right, logits.std(axis=1, ddof=1).sum()]
        error[np.arange(8), noisy[batch]] -= 1
        grads = [error.T @ x[batch] / 8, error.mean(axis=0)]
        norm = math.sqrt(sum((g**2).sum() for g in grads))
        assert norm > 0.6  # so that clipping at 0.5 changes something
        for w, v, g in zip(weights, velocity, grads, strict=True):
            v[...] = 0.9 * v + g * min(1, (clip or math.inf) / norm) + 0.2 * w
            w -= 0.05 * v
    for seen, expected in zip(item.network.parameters(), weights, strict=True):
        np.testing.assert_allclose(seen.detach().numpy(), expected, rtol=1e-4, atol=1e-6)  # float32, three steps
    np.testing.assert_allclose(item.sums.numpy(), sums, rtol=1e-5)


# What is trained on, and what chooses


def test_training_sees_its_own_images_and_their_labels_alone(small, tmp_path, monkeypatch):
    images = Cifar100(numbered(40), part(8, 0))
    setting = Setting(LOGISTIC, 0.5, seed=1, held_out=8)
    labels = noise.symmetric(images.train[1], 0.5, rng=np.random.default_rng(1), num_classes=100)
    seen = Counter()

    def look(self, network, x):
        if self.network.training:
            numbers = x.amax(dim=(1, 2, 3)).long() - 1
            seen.update(zip(numbers.tolist(), self.epoch_labels[0, self.place].tolist(), strict=True))
            assert torch.equal(self.epoch_labels[1, self.place], numbers % 4)
        return logits(self, network, x)

    logits = StreamedRun.logits
    monkeypatch.setattr(StreamedRun, "logits", look)
    run(tmp_path, setting, images=images)
    aside = StreamedRun(TINY_A, setting, images, CPU).validation
    held_out = aside[0][:, 0, 0, 0].astype(int) - 1
    assert len(set(held_out)) == 8
    np.testing.assert_array_equal(np.bincount(held_out % 4), [2, 2, 2, 2])  # stratified
    np.testing.assert_array_equal(aside[1], labels[held_out])
    assert seen == {(i, int(labels[i])): 3 for i in range(40) if i not in held_out}  # once in each of 3 epochs


def test_every_epoch_and_every_seed_draws_anew(small, tmp_path):
    drawn = []
    for seed, epoch in [(0, 0), (0, 1), (1, 0), (0, 0)]:
        item = StreamedRun(TINY_A, Setting(LOGISTIC, 0.0, seed=seed), IMAGES, CPU)
        item.start(Checkpoint(tmp_path / "none", ""))
        item.epoch = epoch
        item.begin_epoch()
        drawn.append(item.epoch_images.numpy().tobytes())
    assert len(set(drawn)) == 3
    assert drawn[0] == drawn[3]


@pytest.mark.parametrize("right", ["noisy", "clean"])
def test_held_out_labels_are_noisy_and_test_labels_are_not(right, small, tmp_path):
    """A network that knows all noisy labels, or all clean ones, by heart."""
    images = Cifar100(numbered(16), numbered(16))
    item = StreamedRun(TINY_A, Setting(LOGISTIC, 1.0, seed=0, held_out=8), images, CPU)
    item.start(Checkpoint(tmp_path / "none", ""))
    table = noise.symmetric(images.train[1], 1.0, rng=np.random.default_rng(0), num_classes=100)
    known = torch.from_numpy(table if right == "noisy" else images.train[1])

    class Knowing(nn.Module):
        def forward(self, x):
            numbers = (x[:, 0, 0, 0] * 0.2673 + 0.5071) * 255 - 1
            return torch.eye(100)[known[numbers.round().long()]]

    item.network = Knowing()
    item.end_epoch()
    found = {name: item.metrics[0][name] for name in ("validation", "test")}
    assert found == ({"validation": 1, "test": 0} if right == "noisy" else {"validation": 0, "test": 1})


def test_noisy_held_out_labels_choose_the_epoch_and_test_labels_nothing(small, tmp_path):
    protocol = replace(TINY_A, epochs=6, rate=0.5)
    train, test = part(60, 0), part(40, 1)
    other = test[0], np.random.default_rng(0).permutation(test[1])
    settings = [Setting(LOGISTIC, 0.3, seed=seed, held_out=20) for seed in range(4)]
    rows, _ = run(tmp_path, *settings, protocol=protocol, images=Cifar100(train, test))
    again, told = run(tmp_path, *settings, protocol=protocol, images=Cifar100(train, other))
    assert told
    curves = [row["epochs_measured"] for row in read_rows(tmp_path / "curves.jsonl")]
    for row, curve in zip(rows + again, curves, strict=True):
        validation, accuracy = ([epoch[name] for epoch in curve] for name in ("validation", "test"))
        assert row["chosen_epoch"] == validation.index(max(validation)) + 1
        assert (row["validation_chosen"], row["validation_last"]) == (max(validation), validation[-1])
        assert (row["test_chosen"], row["test_last"]) == (accuracy[row["chosen_epoch"] - 1], accuracy[-1])
        assert (row["test_best"], row["best_epoch"]) == (max(accuracy), accuracy.index(max(accuracy)) + 1)
        assert (row["noisy_last"], row["clean_last"]) == (curve[-1]["noisy"], curve[-1]["clean"])
    for row, permuted in zip(rows, again, strict=True):
        for name in ("chosen_epoch", "validation_chosen", "validation_last", "noisy_last"):
            assert row[name] == permuted[name]
    # All this would hold for nothing if test labels chose the same epochs.
    assert [row["best_epoch"] for row in rows] != [row["best_epoch"] for row in again]
    assert [row["best_epoch"] for row in rows + again] != [row["chosen_epoch"] for row in rows + again]


def test_without_held_out_images_nothing_is_chosen(small, tmp_path):
    (row,), _ = run(tmp_path, Setting(LOGISTIC, 0.2, seed=0))
    chosen = ("test_chosen", "chosen_epoch", "validation_last", "validation_chosen")
    assert [row[name] for name in chosen] == [None] * 4


def test_epochs_are_measured_now_and_then_and_at_the_end(small, tmp_path):
    protocol = replace(TINY_A, epochs=5, measure_every=2)
    _, told = run(tmp_path, Setting(LOGISTIC, 0.2, seed=0), protocol=protocol)
    (curve,) = read_rows(tmp_path / "curves.jsonl")
    assert [row["epoch"] for row in curve["epochs_measured"]] == [2, 4, 5]
    assert ["test: logistic" in line for line in told] == [False, True, True, True, True]


# Interrupted, made before, and refused


def test_a_run_that_stops_goes_on_bit_for_bit(tmp_path, monkeypatch):
    """Also where the interruption came before the second of two checkpoints."""
    monkeypatch.setattr(checkpoints, "SAVE_SECONDS", 0)
    protocol = replace(TINY_A, batch_size=12)
    settings = Setting(LOGISTIC, 0.2, seed=0), Setting(replace(TEMPERED, rescale=True), 0.4, seed=0, held_out=8)
    weights, summary = [], StreamedRun.summary

    def look(self):
        weights.append(torch.cat([value.flatten().double() for value in self.network.state_dict().values()]))
        return summary(self)

    monkeypatch.setattr(StreamedRun, "summary", look)
    whole, _ = run(tmp_path / "whole", *settings, protocol=protocol)

    def stop(done, total, message):
        if message.startswith("epoch 2"):
            raise KeyboardInterrupt

    for folder, epochs in ((tmp_path / "both", 2), (tmp_path / "one", 3)):
        with pytest.raises(KeyboardInterrupt):
            streams.run(protocol, settings, IMAGES, folder, stop, device="cpu")
        first, second = (checkpoint(folder, StreamedRun(protocol, setting, IMAGES, CPU)).path for setting in settings)
        assert set(folder.glob("*.checkpoint")) == {first, second}
        if folder.name == "one":
            second.unlink()
        again, told = run(folder, *settings, protocol=protocol)
        assert len(told) == epochs
        assert without_time(again) == without_time(whole)
        assert torch.equal(torch.cat(weights[-2:]), torch.cat(weights[:2]))  # running means and variances among them
        curves, expected = (read_rows(place / "curves.jsonl") for place in (folder, tmp_path / "whole"))
        assert curves == expected
        assert [len(row["epochs_measured"]) for row in curves] == [3, 3]
        assert not list(folder.glob("*.checkpoint"))


def test_rows_that_are_there_are_not_trained_again(small, tmp_path):
    first, second = Setting(LOGISTIC, 0.2, seed=0), Setting(TEMPERED, 0.2, seed=0)
    (row,), _ = run(tmp_path, first)
    rows, told = run(tmp_path, second, first)
    assert [found["loss"] for found in rows] == ["bi-tempered", "logistic"]
    assert rows[1] == row
    assert len(told) == 3
    assert all("logistic" not in line for line in told)
    assert len(read_rows(tmp_path / "protocol-a.jsonl")) == len(read_rows(tmp_path / "curves.jsonl")) == 2
    assert run(tmp_path, first, second)[1] == []


def test_other_data_is_another_run(small, tmp_path):
    (pixels, labels), (test_pixels, test_labels) = IMAGES.train, IMAGES.test
    changed, changed_test, moved = pixels.copy(), test_labels.copy(), labels.copy()
    changed[5, 0, 0, 0] ^= 1
    changed_test[3] += 1
    moved[[0, 1]] = moved[[1, 0]]
    setting = Setting(LOGISTIC, 0.25, seed=0)
    variants = [
        (setting, IMAGES),
        (replace(setting, noise=0.5), IMAGES),
        (replace(setting, seed=1), IMAGES),
        (replace(setting, held_out=8), IMAGES),
        (setting, Cifar100((changed, labels), IMAGES.test)),
        (setting, Cifar100((pixels, moved), IMAGES.test)),
        (setting, Cifar100(IMAGES.train, (test_pixels, changed_test))),
        (setting, Cifar100(IMAGES.train, (255 - test_pixels, test_labels))),
    ]
    made = [run(tmp_path, which, images=images) for which, images in variants]
    assert [len(told) for _, told in made] == [3] * len(variants)
    assert len({row["data"] for (row,), _ in made}) == len(variants)
    assert all(run(tmp_path, which, images=images)[1] == [] for which, images in variants)


def test_human_labels_are_trained_on(small, tmp_path):
    human = (IMAGES.train[1] + 50) % 100
    other = human.copy()
    other[0] += 1
    setting = Setting(LOGISTIC, 0.402, seed=0)
    made = [run(tmp_path, setting, protocol=TINY_B, images=replace(IMAGES, human=y)) for y in (human, other)]
    assert [len(told) for _, told in made] == [3, 3]
    assert made[0][0][0]["data"] != made[1][0][0]["data"]
    np.testing.assert_array_equal(StreamedRun(TINY_B, setting, replace(IMAGES, human=other), CPU).noisy, other)
    with pytest.raises(ValueError, match="protocol b needs human labels; read the images with human=True"):
        run(tmp_path, setting, protocol=TINY_B)
    with pytest.raises(DataError, match=r"human labels are read from cifar100n\.npz"):
        Cifar100.read(None, human=True)  # downloads nothing


def test_another_protocol_is_another_run(small, tmp_path):
    """Rows without `clip` were made without a cut: neither takes the other's."""
    setting = Setting(LOGISTIC, 0.2, seed=0)
    for protocol in (TINY_A, replace(TINY_A, clip=None), replace(TINY_A, clip=1), replace(TINY_A, rate=0.2)):
        for expected in (3, 0):
            (row,), told = run(tmp_path, setting, protocol=protocol)
            assert len(told) == expected
            assert row["clip"] == protocol.clip
            assert row["learning_rate"] == protocol.rate


def test_a_fleet_s_memory_is_freed_before_the_next(small, tmp_path, monkeypatch):
    started, alive = weakref.WeakSet(), []

    def start(self, checkpoint):
        original(self, checkpoint)
        started.add(self)
        alive.append(len(started))

    original = StreamedRun.start
    monkeypatch.setattr(StreamedRun, "start", start)
    run(tmp_path, *(Setting(LOGISTIC, 0.05 * i, seed=i // 3) for i in range(5)), at_once=2)
    assert alive == [1, 2, 1, 1, 2]  # three of a seed, two of another


def test_too_few_images_for_a_batch_are_refused(tmp_path):
    with pytest.raises(ValueError, match="24 training images do not fill a batch of 25"):
        run(tmp_path, Setting(LOGISTIC, 0.2, seed=0), protocol=replace(TINY_A, batch_size=25))


@pytest.fixture
def saved(small, tmp_path):
    """A run and a checkpoint of it."""
    item = StreamedRun(TINY_A, Setting(LOGISTIC, 0.2, seed=0), IMAGES, CPU)
    where = checkpoint(tmp_path, item)
    item.start(where)
    item.begin_epoch()
    item.step()
    where.save(item.state())
    return item, where.path


def test_a_checkpoint_of_another_run_is_refused(saved, tmp_path):
    item, path = saved
    for setting, images in [
        (replace(item.setting, seed=1), IMAGES),
        (replace(item.setting, loss=TEMPERED), IMAGES),
        (item.setting, Cifar100(IMAGES.train, part(16, 7))),
    ]:
        other = checkpoint(tmp_path, StreamedRun(TINY_A, setting, images, CPU)).path
        assert other != path
        other.write_bytes(path.read_bytes())
        with pytest.raises(BadCheckpoint, match="belongs to another run; delete it, or choose another folder"):
            run(tmp_path, setting, images=images)
        assert other.read_bytes() == path.read_bytes()
    assert not (tmp_path / "protocol-a.jsonl").exists()


@pytest.mark.parametrize("damage", ["empty", "text", "half", "no metrics", "no momentum", "other weights", "code"])
def test_a_damaged_checkpoint_is_refused(damage, saved, tmp_path):
    item, path = saved
    content = path.read_bytes()
    broken = {"empty": b"", "text": b"not a checkpoint", "half": content[: len(content) // 2]}
    if damage in broken:
        path.write_bytes(broken[damage])
    else:
        kept = unpack(path.read_bytes(), torch.device("cpu"))
        if damage == "no metrics":
            del kept["metrics"]
        elif damage == "no momentum":
            kept["momentum"].pop()
        elif damage == "other weights":
            kept["network"]["2.weight"] = torch.zeros(3)
        else:
            kept["metrics"] = print  # what is not data is not read
        path.write_bytes(pack(kept))
    content = path.read_bytes()
    with pytest.raises(BadCheckpoint, match="is not a checkpoint, or is damaged; delete it to train again"):
        run(tmp_path, item.setting)
    assert path.read_bytes() == content


# The command


def test_a_protocol_without_a_gpu_gets_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = invoke("reproduce", "protocol-a", "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert done.stderr == "bitempered: protocol-a needs a GPU, and torch finds no CUDA device\n"
    assert not (tmp_path / "out").exists()


def test_a_protocol_from_the_command_line(small, tmp_path, monkeypatch):
    """On a CPU with the small network: two seeds of one setting, and one that holds images out."""
    out, told = tmp_path / "out", []
    real = protocols.run

    def on_cpu(*given, device):
        return real(*given[:4], lambda *now: told.append(now), device="cpu")

    monkeypatch.setattr(cli, "choose_device", lambda device: "cuda")
    monkeypatch.setattr(protocols, "run", on_cpu)
    monkeypatch.setattr(Cifar100, "read", lambda data_dir, human: IMAGES)
    monkeypatch.setitem(PROTOCOLS, "a", TINY_A)
    monkeypatch.setitem(protocols.SETTINGS, "a", (Setting(LOGISTIC, 0.25, 0), Setting(TEMPERED, 0.25, 0, held_out=8)))
    command = ["reproduce", "protocol-a", "--seeds", "2", "--out", str(out)]
    done = invoke(*command)
    assert done.exit_code == 0, done.output
    names = ["curves.jsonl", "protocol-a.jsonl", "protocol-a.md", "protocol-a.png"]
    assert sorted(path.name for path in out.iterdir()) == names
    rows = read_rows(out / "protocol-a.jsonl")
    assert [(row["seed"], row["loss"]) for row in rows] == [(0, "logistic"), (0, "bi-tempered"), (1, "logistic")]
    assert [now[:2] for now in told] == [(epoch, 6) for epoch in range(1, 7)]  # the runs of a seed at once
    assert "| 25% | logistic |" in (out / "protocol-a.md").read_text()
    assert_rendered(out, "protocol-a.md", "protocol-a.png")

    (out / "protocol-a-0.checkpoint").touch()
    refused = invoke(*command)
    assert refused.exit_code == 1
    assert "a run was stopped: continue it with --resume" in refused.stderr
    assert invoke(*command, "--resume").exit_code == 0
    assert read_rows(out / "protocol-a.jsonl") == rows
