"""`bitempered reproduce table2` on small images and a small network: its data, its steps, its files, and resumption."""

import os
import statistics
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from experiment_cases import assert_rendered, silent, without
from imagenet_cases import CPU, FIXTURES, IGNORED_WARNINGS, TINY, Net, make_images, reproduce

from bitempered.experiments import imagenet, networks
from bitempered.experiments.checkpoints import BadCheckpoint, Checkpoint, pack, unpack
from bitempered.experiments.files import read_rows
from bitempered.experiments.imagenet import ImageFiles, ImagenetRun
from bitempered.experiments.recipes import table2
from bitempered.experiments.runs import RESULTS

pytestmark = IGNORED_WARNINGS
folder, data, small_network = FIXTURES
TRAINING = TINY.training
LOGISTIC, TEMPERED = TINY.losses


def without_time(rows):
    return without(rows, "seconds")


# Steps


def test_the_full_recipe_is_the_paper_s():
    for name, recipe in table2.TABLE2.items():
        training = recipe.training
        assert (training.network, training.epochs, training.batch_size) == (name, 180, 4096)
        assert [str(loss) for loss in recipe.losses] == ["logistic", "bi-tempered (0.9, 1.05)"]


def test_rates_rise_for_five_epochs_then_fall_by_stairs():
    """With as many images as ImageNet has; they need not be there."""
    names = np.zeros(1_281_167, dtype="S1")
    images = ImageFiles(Path(), names, np.zeros(1), 16)
    run = ImagenetRun(table2.TABLE2["resnet18"].training, LOGISTIC, 0, imagenet.Data(images, images, 10, ""), CPU)
    assert run.per_epoch == 312
    rates = run.rates.view(180, 312)
    assert rates[0, 0].item() == pytest.approx(1.6 / 1560)
    assert rates[2, 155].item() == pytest.approx(0.8)  # half-way up
    for first, last, rate in [(6, 60, 1.6), (61, 120, 0.16), (121, 160, 0.016), (161, 180, 0.0016)]:
        np.testing.assert_allclose(rates[first - 1 : last], rate, rtol=1e-6)


@pytest.mark.parametrize("loss", TINY.losses)
def test_micro_batches_add_up_to_sgd_on_whole_batches(loss, data, monkeypatch):
    """Against SGD with momentum, written out, on all 32 images at once: 12 + 12 + 8 do the same."""
    monkeypatch.setattr(networks, "imagenet_resnet", lambda name, *, classes: Net(classes, normalised=False))
    run = ImagenetRun(TRAINING, loss, 3, data, CPU)
    assert len(run.rates) == 3 * 5
    reference = Net(10, normalised=False)
    reference.load_state_dict(run.learner.network.state_dict())
    weights = list(reference.parameters())
    velocity = [torch.zeros_like(w) for w in weights]
    seen = []
    real = imagenet.batches
    monkeypatch.setattr(imagenet, "batches", lambda *a: (seen.append(batch) or batch for batch in real(*a)))
    losses = [run.epoch(number, silent) for number in (1, 2)]
    assert [len(labels) for _, labels in seen] == [12, 12, 8] * 10

    rates = [0.1] * 8 + [0.01] * 7  # a tenth from half of 15 steps on
    found = []
    for step in range(10):
        pixels, labels = (torch.cat(parts) for parts in zip(*seen[3 * step : 3 * step + 3], strict=True))
        mean, deviation = (torch.tensor(c).view(3, 1, 1) for c in (imagenet.MEAN, imagenet.DEVIATION))
        x = ((pixels.permute(0, 3, 1, 2) / 255 - mean) / deviation).contiguous(memory_format=torch.channels_last)
        value = loss(reference(x), labels).mean()
        found.append(value.item())
        grads = torch.autograd.grad(value, weights)
        with torch.no_grad():
            for w, v, g in zip(weights, velocity, grads, strict=True):
                v.mul_(0.9).add_(g + (1e-2 * w if w.dim() > 1 else 0))  # biases do not decay
                w.sub_(rates[step] * v)
    for ours, expected in zip(run.learner.network.parameters(), weights, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)  # sums in another order, ten times
    assert losses == pytest.approx([np.mean(found[:5]), np.mean(found[5:])], rel=1e-4)


def test_each_epoch_sees_each_image_at_most_once_in_another_order(data, monkeypatch):
    asked = []
    monkeypatch.setattr(ImageFiles, "read", lambda self, row: asked.append(row) or np.zeros((16, 16, 3), np.uint8))
    run = ImagenetRun(replace(TRAINING, batch_size=50), LOGISTIC, 0, data, CPU)
    for number in (1, 2):
        run.epoch(number, silent)
    assert len(asked) == 300  # three batches of 50 of 160 images
    first, second = asked[:150], asked[150:]
    assert len(set(first)) == len(set(second)) == 150
    assert first != second


def test_both_losses_begin_from_the_same_weights(data):
    networks = [
        ImagenetRun(TRAINING, loss, seed, data, CPU).learner.network for loss, seed in ((LOGISTIC, 0), (TEMPERED, 0))
    ]
    other = ImagenetRun(TRAINING, LOGISTIC, 1, data, CPU).learner.network
    for a, b in zip(*(network.parameters() for network in networks), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(networks[0].dense.weight, other.dense.weight)


def test_accuracy_is_the_share_of_right_validation_images(data, tmp_path):
    """After training, against predictions made by hand, one image at a time; and it has learned the colours."""
    run = ImagenetRun(replace(TRAINING, epochs=8, rate=0.5), TEMPERED, 0, data, CPU)
    metrics = run.train(Checkpoint(tmp_path / "run", ""), silent)
    right = 0
    run.learner.network.eval()
    for row, label in enumerate(data.validation.labels):
        pixels = torch.tensor(data.validation.read(row)).permute(2, 0, 1)[None] / 255
        mean, deviation = (torch.tensor(c).view(3, 1, 1) for c in (imagenet.MEAN, imagenet.DEVIATION))
        x = ((pixels - mean) / deviation).contiguous(memory_format=torch.channels_last)
        right += int(run.learner.network(x).argmax()) == label
    assert metrics[-1]["top1"] == pytest.approx(right / 60, abs=1e-6)
    assert metrics[-1]["top1"] > 0.5  # a tenth by chance
    assert metrics[-1]["training_loss"] < 0.7 * metrics[0]["training_loss"]


def test_a_loss_that_is_not_finite_is_null(data, tmp_path):
    metrics = ImagenetRun(replace(TRAINING, rate=1e30), LOGISTIC, 0, data, CPU).train(
        Checkpoint(tmp_path / "run", ""), silent
    )
    assert metrics[-1]["training_loss"] is None


# Speed


def test_the_loss_s_share_is_of_the_step_with_the_logistic_loss(monkeypatch):
    """With a clock that a step of either loss moves by a known time, and a machine that slows down all the while."""
    clock, slower = [0.0], count()
    asked = []

    def add(self, loss, pixels, labels, of):
        assert pixels.shape == (4, 16, 16, 3)
        assert labels.shape == (of,) == (4,)
        asked.append(loss)
        clock[0] += (0.5 if loss == LOGISTIC else 0.505) * (1 + 1e-4 * (next(slower) // 2))

    monkeypatch.setattr(imagenet.Learner, "add", add)
    monkeypatch.setattr(imagenet.Learner, "update", lambda self, rate: None)
    monkeypatch.setattr(table2.time, "perf_counter", lambda: clock[0])
    speed = table2.measure_speed(replace(TINY, turns=10), CPU)
    assert speed["added"] == pytest.approx(0.01, abs=1e-9)
    assert speed["added_quartiles"] == pytest.approx([0.01, 0.01], abs=1e-9)
    assert speed["steps_per_second"] == pytest.approx([2.0, 2 / 1.01], rel=2e-3)
    assert len(asked) == 2 * 13
    assert {tuple(asked[i : i + 2]) for i in range(0, 26, 2)} == {(LOGISTIC, TEMPERED), (TEMPERED, LOGISTIC)}


# The command


def test_table2_end_to_end(folder, tmp_path, monkeypatch):
    tiny = replace(TINY, training=replace(TRAINING, network="resnet50"))
    monkeypatch.setitem(table2.TABLE2, "resnet50", tiny)
    out = tmp_path / "new" / "folder"
    done = reproduce(folder, out, "--network", "resnet50", "--seeds", "2")
    assert done.exit_code == 0, done.output
    assert sorted(p.name for p in out.iterdir()) == ["curves.jsonl", "speed.jsonl", "table2.jsonl", "table2.md"]
    rows, curves, (speed,) = (read_rows(out / f"{name}.jsonl") for name in ("table2", "curves", "speed"))
    cells = [(seed, loss) for seed in (0, 1) for loss in ("logistic", "bi-tempered")]
    assert [(row["seed"], row["loss"]) for row in rows] == [(row["seed"], row["loss"]) for row in curves] == cells
    for row, curve in zip(rows, curves, strict=True):
        assert len(curve["top1"]) == len(curve["training_loss"]) == 3
        assert row["top1_last"] == curve["top1"][-1]
        assert row["top1_best"] == max(curve["top1"]) == curve["top1"][row["best_epoch"] - 1]
        assert row["numbers"] == ([] if row["loss"] == "logistic" else [0.9, 1.05])
        assert row["torch"] == curve["torch"] == speed["torch"] == torch.__version__
        assert (row["classes"], row["train_images"], row["validation_images"]) == (10, 160, 60)
        assert row["commit"]
    assert all(value > 0 for value in speed["steps_per_second"])
    assert speed["results"] == RESULTS
    assert speed["data"]

    page = (out / "table2.md").read_text()
    for place, loss in enumerate(("logistic", "bi-tempered")):
        values = [100 * row["top1_last"] for row in rows if row["loss"] == loss]
        expected = f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}"
        line = next(line for line in page.splitlines() if line.startswith("| top-1 accuracy, last epoch"))
        assert line.split(" | ")[place + 1].removesuffix(" |") == expected
        assert expected in done.stdout
    assert "| 76.332 ± 0.105 | 76.748 ± 0.164 |" in page
    assert f"| {speed['steps_per_second'][0]:.4g} | {speed['steps_per_second'][1]:.4g} |" in page
    assert f"{speed['added']:.2%} (" in page
    assert_rendered(out, "table2.md")

    monkeypatch.setattr(ImagenetRun, "epoch", None)  # nothing is trained again
    monkeypatch.setattr(table2, "measure_speed", None)  # nor timed
    again = reproduce(folder, out, "--network", "resnet50", "--seeds", "2")
    assert again.exit_code == 0, again.output
    assert (out / "table2.md").read_text() == page
    assert read_rows(out / "table2.jsonl") == rows


def test_quick_takes_up_to_2000_images(folder, tmp_path):
    """Of ten classes up to 200 each: all that are here."""
    done = reproduce(folder, tmp_path, "--quick")
    assert done.exit_code == 0, done.output
    for row in read_rows(tmp_path / "table2.jsonl"):
        assert (row["train_images"], row["validation_images"], row["epochs"], row["size"]) == (160, 60, 2, 64)
    assert "±" not in next(line for line in done.stdout.splitlines() if "last epoch" in line)
    full = table2.TABLE2["resnet50"]
    assert table2.quick(full, "cpu").images == table2.quick(full, "cuda").images == 2_000
    assert table2.quick(full, "cuda").timed == full.timed == (256, 224)


def test_a_run_uses_the_images_of_its_recipe(folder, tmp_path):
    recipe = replace(TINY, training=replace(TRAINING, epochs=1), images=25, seeds=(0,))
    rows, _ = table2.reproduce(recipe, tmp_path, silent, device="cpu", data_dir=folder)
    assert [(row["train_images"], row["validation_images"]) for row in rows] == [(20, 20)] * 2


def test_a_stopped_run_goes_on_bit_for_bit(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(table2.TABLE2, "resnet18", TINY)
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert reproduce(folder, whole, "--seeds", 1).exit_code == 0

    # Two runs of three epochs: stop in the last one, first after its steps, then among them.
    measured, step = count(1), count(1)
    real, real_update = ImagenetRun.accuracy, imagenet.Learner.update

    def accuracy(self):
        if next(measured) == 6:
            raise KeyboardInterrupt
        return real(self)

    def update(self, rate):
        if next(step) == 3:  # of that epoch: the steps that are timed have been
            raise KeyboardInterrupt
        real_update(self, rate)

    monkeypatch.setattr(ImagenetRun, "accuracy", accuracy)
    done = reproduce(folder, stopped, "--seeds", 1)
    assert done.exit_code == 130
    assert "--resume" in done.stderr
    assert str(stopped) in done.stderr
    assert done.stderr.count("\n") == 1
    (checkpoint,) = stopped.glob("bi-tempered-seed0-*.checkpoint")
    assert len(read_rows(stopped / "table2.jsonl")) == 1

    refused = reproduce(folder, stopped)
    assert refused.exit_code == 1
    assert f"--resume, or delete {checkpoint}\n" in refused.stderr
    assert refused.stderr.count("\n") == 1

    monkeypatch.setattr(ImagenetRun, "accuracy", real)
    monkeypatch.setattr(imagenet.Learner, "update", update)
    assert reproduce(folder, stopped, "--seeds", 1, "--resume").exit_code == 130
    monkeypatch.setattr(imagenet.Learner, "update", real_update)
    epochs = []
    real_epoch = ImagenetRun.epoch
    monkeypatch.setattr(ImagenetRun, "epoch", lambda self, *a: epochs.append((self.loss, a[0])) or real_epoch(self, *a))
    done = reproduce(folder, stopped, "--seeds", 1, "--resume")
    assert done.exit_code == 0, done.output
    assert epochs == [(TEMPERED, 3)]
    for name in ("table2.jsonl", "curves.jsonl"):
        rows, expected = (without_time(read_rows(path / name)) for path in (stopped, whole))
        assert rows == expected
        assert len(rows) == 2
    assert not list(stopped.glob("*.checkpoint"))


def test_weights_after_resumption_are_the_same_bit_for_bit(data, tmp_path):
    whole, stopped = ImagenetRun(TRAINING, TEMPERED, 0, data, CPU), ImagenetRun(TRAINING, TEMPERED, 0, data, CPU)
    whole.train(Checkpoint(tmp_path / "whole", ""), silent)

    def stop(step, text):
        if step == 12:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped.train(Checkpoint(tmp_path / "stopped", ""), stop)
    resumed = ImagenetRun(TRAINING, TEMPERED, 0, data, CPU)
    resumed.train(Checkpoint(tmp_path / "stopped", ""), silent)
    assert without_time(resumed.metrics) == without_time(whole.metrics)
    states = [run.learner.network.state_dict() for run in (whole, resumed)]
    for name, value in states[0].items():
        assert torch.equal(states[1][name], value), name


def test_checkpoints_of_other_runs_and_damaged_ones_are_refused(folder, data, tmp_path, monkeypatch):
    monkeypatch.setitem(table2.TABLE2, "resnet18", TINY)
    path = Checkpoint.of(tmp_path, "logistic-seed0", [TRAINING.identity(LOGISTIC, 0, data)]).path
    other = replace(TRAINING, rate=0.2)
    state = ImagenetRun(other, LOGISTIC, 0, data, CPU).state()
    Checkpoint(path, Checkpoint.of(tmp_path, "", [other.identity(LOGISTIC, 0, data)]).identity).save(state)
    done = reproduce(folder, tmp_path, "--resume")
    assert done.exit_code == 1
    assert f"{path} belongs to another run" in done.stderr
    assert done.stderr.count("\n") == 1
    for content in (b"", b"PK\x03\x04 half"):
        path.write_bytes(content)
        done = reproduce(folder, tmp_path, "--resume")
        assert done.exit_code == 1
        assert f"{path} is not a checkpoint, or is damaged" in done.stderr
        assert path.read_bytes() == content


@pytest.mark.parametrize("what", ["network", "momentum", "missing", "metrics"])
def test_a_checkpoint_of_this_run_with_something_else_in_it_is_refused(what, data, tmp_path):
    training, path = replace(TRAINING, epochs=1), tmp_path / "run"
    ImagenetRun(training, LOGISTIC, 0, data, CPU).train(Checkpoint(path, ""), silent)
    Checkpoint(path, "").load(ImagenetRun(training, LOGISTIC, 0, data, CPU).restore, CPU)
    kept = unpack(path.read_bytes(), torch.device("cpu"))
    if what == "network":
        kept["network"] = {name: value[:1] if value.dim() else value for name, value in kept["network"].items()}
    elif what == "momentum":
        kept["momentum"][0]["momentum_buffer"] = torch.zeros(1)
    elif what == "missing":
        kept["momentum"] = {}
    else:
        kept["metrics"] = [{"epoch": 1, "top1": "high", "seconds": 1.0}]
    path.write_bytes(pack(kept))
    with pytest.raises(BadCheckpoint, match="is not a checkpoint, or is damaged; delete it to train again"):
        Checkpoint(path, "").load(ImagenetRun(training, LOGISTIC, 0, data, CPU).restore, CPU)


class Mischief:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_checkpoints_execute_nothing(data, tmp_path):
    path, trace = tmp_path / "run", tmp_path / "trace"
    path.write_bytes(pack({"identity": Mischief(trace)}))
    with pytest.raises(BadCheckpoint, match="is not a checkpoint"):
        Checkpoint(path, "").load(ImagenetRun(TRAINING, LOGISTIC, 0, data, CPU).restore, CPU)
    assert not trace.exists()


def test_other_files_in_the_same_number_are_other_data(folder, tmp_path, monkeypatch):
    """Rows of one folder are not taken for those of another."""
    monkeypatch.setitem(table2.TABLE2, "resnet18", replace(TINY, training=replace(TRAINING, epochs=1)))
    other = tmp_path / "other"
    make_images(other / "train", 16)
    make_images(other / "val", 6)
    (other / "val" / "n0002" / "3.JPEG").rename(other / "val" / "n0002" / "three.JPEG")
    for root in (folder, other):
        assert reproduce(root, tmp_path / "out", "--seeds", "1").exit_code == 0
    assert len(read_rows(tmp_path / "out" / "table2.jsonl")) == 4
    with (other / "val" / "n0002" / "three.JPEG").open("ab") as file:
        file.write(b"more")  # the same names
    assert reproduce(other, tmp_path / "out", "--seeds", "1").exit_code == 0
    assert len(read_rows(tmp_path / "out" / "table2.jsonl")) == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--network", "vgg"], "table 2 has no network 'vgg'; choose from: resnet18, resnet50"),
        (["--seeds", "0"], "seeds must be at least 1, got 0"),
    ],
)
def test_bad_options_are_refused(options, message, folder, tmp_path):
    done = reproduce(folder, tmp_path / "out", *options)
    assert done.exit_code == 2
    assert done.stderr == f"bitempered: {message}\n"
    assert not (tmp_path / "out").exists()


def test_without_torchvision_the_message_says_what_to_install(folder, tmp_path, monkeypatch):
    monkeypatch.undo()  # the real networks
    monkeypatch.setitem(sys.modules, "torchvision", None)
    done = reproduce(folder, tmp_path, "--quick")
    assert done.exit_code == 1
    assert "resnet18 needs the torchvision" in done.stderr
    assert done.stderr.endswith("pip install torchvision\n")
