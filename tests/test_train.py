"""The training loop: its optimisers, that members do not know of each other, and that a killed run loses nothing."""

import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from experiment_cases import without

from bitempered import noise
from bitempered.experiments import augmentation, checkpoints
from bitempered.experiments import train as loop
from bitempered.experiments.checkpoints import BadCheckpoint, Checkpoint, pack, unpack
from bitempered.experiments.data import Split
from bitempered.experiments.datasets import read
from bitempered.experiments.files import read_rows
from bitempered.experiments.losses import LOSSES, Loss
from bitempered.experiments.networks import NETWORKS
from bitempered.experiments.train import Fleet, Member, Training, train
from bitempered.torch import bi_tempered_logistic_loss

TINY = Training("mlp", "adam", epochs=3, batch_size=100, width=8)
LOGISTIC, TEMPERED = Loss("logistic"), Loss("bi-tempered", (0.5, 2.0))
ANNEALED = replace(TEMPERED, schedule=(0, 2))  # half-way in the second of three epochs


@pytest.fixture(scope="module")
def digits():
    return read("digits").split(0)


def member(split, loss=LOGISTIC, rate=1e-2, level=0.2):
    rng = np.random.default_rng(0)
    labels = [noise.symmetric(y, level, rng=rng, num_classes=10) for _, y in (split.train, split.validation)]
    return Member(loss, rate, *labels)


def without_time(metrics):
    return without(metrics, "seconds")


# What a step does


REFERENCES = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=1e-2, rho=0.95, eps=1e-8, weight_decay=0.01),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=0.01),
}


@pytest.mark.parametrize("loss", [LOGISTIC, TEMPERED])
@pytest.mark.parametrize("optimizer", REFERENCES)
def test_steps_are_those_of_torch_s_optimizers(optimizer, loss, digits):
    training = replace(TINY, optimizer=optimizer, weight_decay=0.01)
    one = member(digits, loss)
    fleet = Fleet(training, [member(digits, TEMPERED, rate=1.0), one], digits, 0, torch.device("cpu"))
    weights = [w[1].clone().requires_grad_() for w in fleet.weights]
    reference = REFERENCES[optimizer](weights)
    rows = torch.randperm(500, generator=torch.Generator().manual_seed(1))
    fleet.order.copy_(rows)
    x, y = torch.from_numpy(digits.train[0]), torch.from_numpy(one.train)
    for batch in rows.split(100):
        fleet.step()
        reference.zero_grad()
        w0, b0, w1, b1, w2, b2 = weights
        logits = ((x[batch] @ w0 + b0).relu() @ w1 + b1).relu() @ w2 + b2
        loss(logits, y[batch]).mean().backward()
        reference.step()
    for ours, expected in zip(fleet.weights, weights, strict=True):
        # AdaDelta and Adam divide by roots of small squares, which magnifies rounding.
        torch.testing.assert_close(ours[1], expected.detach(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("rescale", [False, True, "logits"])
def test_temperatures_follow_their_schedule_epoch_by_epoch(rescale, digits):
    """Against torch's SGD with the formula of the loss, its temperatures written out for each epoch."""
    one = member(digits, replace(ANNEALED, rescale=rescale))
    training = replace(TINY, optimizer="sgd")
    fleet = Fleet(training, [member(digits), one, member(digits, TEMPERED)], digits, 0, torch.device("cpu"))
    weights = [w[1].clone().requires_grad_() for w in fleet.weights]
    reference = torch.optim.SGD(weights, lr=1e-2, momentum=0.9)
    x, y = torch.from_numpy(digits.train[0]), torch.from_numpy(one.train)
    for number, (t1, t2) in enumerate([(1.0, 1.0), (0.75, 1.5), (0.5, 2.0)], start=1):
        fleet.epoch(number)
        for batch in fleet.order.split(100):
            w0, b0, w1, b1, w2, b2 = weights
            logits = ((x[batch] @ w0 + b0).relu() @ w1 + b1).relu() @ w2 + b2
            up = 10 ** (t2 - 1)
            before, after = {False: (1, 1), True: (up, 10 ** (1 - t1)), "logits": (up, 1 / up)}[rescale]
            reference.zero_grad()
            (after * bi_tempered_logistic_loss(before * logits, y[batch], t1, t2)).backward()
            reference.step()
        for ours, expected in zip(fleet.weights, weights, strict=True):
            # Sums in another order, over fifteen steps.
            torch.testing.assert_close(ours[1], expected.detach(), rtol=1e-3, atol=1e-5)


def test_a_recorded_step_is_forgotten_when_the_temperatures_change(digits):
    """A CUDA graph keeps the temperatures that it was recorded with."""
    fleet = Fleet(TINY, [member(digits), member(digits, ANNEALED)], digits, 0, torch.device("cpu"))
    replayed = []
    for number in (1, 2, 3, 4):  # at (1, 1), on the way, at the end, and still there
        fleet.steps += fleet.per_epoch
        fleet.factors = torch.ones(fleet.steps)
        fleet.replay = lambda number=number: replayed.append(number)
        fleet.epoch(number)
    assert sorted(set(replayed)) == [1, 4]


def test_a_schedule_that_is_over_is_a_constant_loss(digits):
    members = [member(digits, TEMPERED), member(digits, replace(TEMPERED, schedule=(0, 0)))]
    for row in train(TINY, members, digits, seed=0):
        assert row["training_loss"][0] == row["training_loss"][1]
        assert row["test"][0] == row["test"][1]


def test_clipping_is_by_the_norm_of_a_member_s_whole_gradient():
    training = replace(TINY, optimizer="sgd", momentum=0.0, clip=1.0)
    weights = [torch.zeros(2, 3), torch.zeros(2, 4)]
    grads = [torch.tensor([[3.0, 0, 0], [0.1, 0, 0]]), torch.tensor([[4.0, 0, 0, 0], [0.2, 0, 0, 0]])]
    slots = [[torch.zeros_like(w) for w in weights]]
    loop.update(training, weights, weights, grads, slots, torch.ones(2), torch.tensor(0))
    torch.testing.assert_close(weights[0], torch.tensor([[-0.6, 0, 0], [-0.1, 0, 0]]))
    torch.testing.assert_close(weights[1], torch.tensor([[-0.8, 0, 0, 0], [-0.2, 0, 0, 0]]))


def test_rates_rise_then_fall_by_stairs():
    factors = loop.rate_factors(16, stairs=(0.5, 0.75), warmup=4)
    expected = [0.25, 0.5, 0.75] + [1.0] * 5 + [0.1] * 4 + [0.01] * 4
    torch.testing.assert_close(factors, torch.tensor(expected))


def test_images_are_standardised_by_channel():
    images = torch.randint(0, 256, (50, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    seen = loop.Scaler(images, flat=False)(images.permute(0, 2, 3, 1), torch.float32)
    torch.testing.assert_close(seen.mean(dim=(0, 1, 2)), torch.zeros(3), rtol=0, atol=1e-5)
    torch.testing.assert_close(seen.std(dim=(0, 1, 2)), torch.ones(3), rtol=1e-4, atol=0)
    flat = loop.Scaler(images, flat=True)(images, torch.float32)
    torch.testing.assert_close(flat.view(50, 3, 4, 4), seen.permute(0, 3, 1, 2))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"network": "mlp", "augment": True}, "augment moves images, and mlp takes rows"),
        ({"optimizer": "adam", "momentum": 0.5}, "momentum is for sgd; leave it out for adam, got 0.5"),
        ({"optimizer": "adadelta", "momentum": 0.0}, "momentum is for sgd; leave it out for adadelta, got 0.0"),
    ],
)
def test_settings_that_would_do_nothing_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        replace(TINY, **values)


def test_augmentation_moves_and_mirrors():
    x = torch.arange(1.0, 101).view(1, 10, 10, 1).expand(200, -1, -1, -1)
    seen = augmentation.shift_and_mirror(x, torch.Generator().manual_seed(0))
    padded = torch.nn.functional.pad(x[0, :, :, 0], (4, 4, 4, 4))
    views = {}
    for dy in range(9):
        for dx in range(9):
            view = padded[dy : dy + 10, dx : dx + 10]
            views[view.numpy().tobytes()] = (dy, dx, False)
            views[view.flip(1).numpy().tobytes()] = (dy, dx, True)
    drawn = [views[image[:, :, 0].numpy().tobytes()] for image in seen]  # a KeyError if it is none of them
    assert {dy for dy, _, _ in drawn} == {dx for _, dx, _ in drawn} == set(range(9))
    assert 70 < sum(mirrored for _, _, mirrored in drawn) < 130  # of 200, four standard deviations


def test_dropout_is_the_same_for_every_member(digits):
    fleet = Fleet(TINY, [member(digits)], digits, 0, torch.device("cpu"))
    fleet.generator.manual_seed(0)
    kept = fleet.drop(torch.ones(3, 40, 100), 0.25)
    assert torch.equal(kept[0], kept[1])
    assert kept.unique().tolist() == [0.0, pytest.approx(4 / 3)]
    assert (kept == 0).float().mean().item() == pytest.approx(0.25, abs=0.03)  # of 4,000, four standard deviations


# What a run gives


def test_a_member_does_not_depend_on_the_others(digits):
    one, other = member(digits, LOGISTIC), member(digits, TEMPERED, level=0.4)
    together = train(TINY, [other, one, other, member(digits, ANNEALED)], digits, seed=3)
    alone = train(TINY, [one], digits, seed=3)
    for row, expected in zip(together, alone, strict=True):
        assert row["training_loss"][1] == pytest.approx(expected["training_loss"][0], abs=2e-6)
        for name in ("validation", "test", "clean", "noisy"):
            assert row[name][1] == pytest.approx(expected[name][0], abs=1.1 / 500)  # one close decision
        assert row["test"][0] == row["test"][2]


def test_metrics_are_what_they_say(digits):
    """Against predictions of the last weights, made by hand."""
    one = member(digits, level=0.4)
    fleet = Fleet(TINY, [one], digits, 0, torch.device("cpu"))
    row = fleet.epoch(1)

    def predict(x):
        w0, b0, w1, b1, w2, b2 = (w[0] for w in fleet.weights)
        return (((torch.from_numpy(x) @ w0 + b0).relu() @ w1 + b1).relu() @ w2 + b2).argmax(dim=1).numpy()

    for name, x, y in [
        ("clean", digits.train[0], digits.train[1]),
        ("noisy", digits.train[0], one.train),
        ("validation", digits.validation[0], one.validation),
        ("test", *digits.test),
    ]:
        assert row[name] == [pytest.approx((predict(x) == y).mean(), abs=1e-6)]


def test_a_run_that_does_not_learn_says_so(digits):
    """A step that throws the weights far away leaves one answer for every row."""
    members = [member(digits), member(digits, rate=1e30), member(digits)]
    last = train(replace(TINY, epochs=10), members, digits, seed=0)[-1]
    assert last["problem"] == [None, "every row is predicted as class 0", None]


def test_a_run_stops_after_its_steps(digits):
    training = replace(TINY, epochs=10, steps=7)
    metrics = train(training, [member(digits)], digits, seed=0)
    assert [row["step"] for row in metrics] == [5, 7]
    assert training.length(len(digits.train[0])) == 2
    assert replace(training, steps=None).length(len(digits.train[0])) == 10


def test_a_loss_that_is_not_finite_is_null(digits):
    metrics = train(replace(TINY, optimizer="sgd", epochs=1), [member(digits, rate=1e30)], digits, seed=0)
    assert metrics[0]["training_loss"] == [None]


@pytest.mark.parametrize(("network", "rate"), [("mnist_cnn", 1e-3), ("resnet56", 1e-2)])
def test_image_networks_learn(network, rate):
    """Two classes that differ in brightness; a few steps tell them apart."""
    rng = np.random.default_rng(0)
    shape = (1, 28, 28) if network == "mnist_cnn" else (3, 32, 32)

    def part(n):
        labels = np.arange(n) % 2
        return (rng.integers(0, 100, (n, *shape)) + 100 * labels[:, None, None, None]).astype(np.uint8), labels

    split = Split(part(16), part(8), part(8), 10)
    training = Training(network, "adam", epochs=4, batch_size=8)
    (x, y), (_, validation) = split.train, split.validation
    assert x.shape[1:] == shape
    metrics = train(training, [Member(LOGISTIC, rate, y, validation)], split, seed=0)
    assert metrics[-1]["training_loss"][0] < 0.6 * metrics[0]["training_loss"][0]


# Killed and resumed


def test_a_run_that_stops_goes_on_bit_for_bit(digits, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "SAVE_SECONDS", 0)
    members = [member(digits), member(digits, TEMPERED), member(digits, ANNEALED)]
    whole = train(TINY, members, digits, seed=1)

    def stop(epoch, metrics):
        if epoch == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(TINY, members, digits, seed=1, checkpoint=Checkpoint(tmp_path / "run", ""), on_epoch=stop)
    epochs = []
    again = train(
        TINY,
        members,
        digits,
        seed=1,
        checkpoint=Checkpoint(tmp_path / "run", ""),
        on_epoch=lambda epoch, _: epochs.append(epoch),
    )
    assert epochs == [3]
    assert without_time(again) == without_time(whole)


@pytest.mark.slow
def test_sigkill_at_a_random_moment_loses_nothing(tmp_path):
    """The command line's own run, killed three times, ends with the rows of one that was not."""
    code = """
import sys
from bitempered import cli
from bitempered.experiments import checkpoints
checkpoints.SAVE_SECONDS = 0
options = ["--losses", "logistic,bi-tempered:0.2:1.2", "--rates", "0.001,0.0003", "--noise", "0.4", "--seeds", "2"]
sys.argv = ["bitempered", "compare", *options, "--epochs", "20", "--out", sys.argv[1]]
cli.main()
"""
    wait = np.random.default_rng().uniform(0.05, 0.6, 3)  # after the first checkpoint is there
    print("killed after", wait)

    def start(folder):
        return subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.DEVNULL)

    killed, whole = tmp_path / "killed", tmp_path / "whole"
    for delay in wait:
        process = start(killed)
        end = time.monotonic() + 60
        while not list(killed.glob("**/*.checkpoint")) and process.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
    for folder in (killed, whole):
        assert start(folder).wait(timeout=120) == 0
    for name in ("compare.jsonl", "curves.jsonl", "search/search.jsonl", "search/curves.jsonl"):
        rows, expected = (read_rows(folder / name) for folder in (killed, whole))
        for row in (*rows, *expected):
            row.pop("fleet_seconds", None)
        assert rows == expected
        assert rows
    assert not list(killed.glob("**/*.checkpoint"))


def test_a_checkpoint_of_another_run_is_refused(digits, tmp_path):
    ours, path = Checkpoint.of(tmp_path, "run", [{"seed": 0}]), tmp_path / "run"
    train(TINY, [member(digits)], digits, seed=0, checkpoint=ours)
    other = Checkpoint.of(tmp_path, "run", [{"seed": 1}])
    assert other.path != ours.path
    ours.path.rename(other.path)
    with pytest.raises(BadCheckpoint, match=f"{path}.* belongs to another run; delete it, or choose another folder"):
        train(TINY, [member(digits)], digits, seed=1, checkpoint=other)


def spoil(name, kept):
    state, metrics = kept["state"], kept["metrics"]
    if name == "shape":
        state[0] = torch.zeros(3, 3)
    elif name == "a shape that could be stretched":
        state[0] = torch.zeros(1)
    elif name == "dtype":
        state[0] = state[0].double()
    elif name == "no tensor":
        state[0] = "weights"
    elif name == "too few tensors":
        state.pop()
    elif name == "no list":
        kept["state"] = None
    elif name == "steps":
        state[-1] = torch.tensor(10**6)
    elif name == "epochs":
        metrics.pop()
    elif name == "members":
        metrics[0]["test"] = []
    elif name == "an accuracy that is text":
        metrics[0]["validation"] = ["high"]
    elif name == "too few problems":
        metrics[0]["problem"] = []
    elif name == "no metrics":
        kept["metrics"] = [None, 1, "2"]
    elif name == "no time":
        del metrics[-1]["seconds"]
    else:
        raise AssertionError(name)


@pytest.mark.parametrize(
    "name",
    [
        "shape", "a shape that could be stretched", "dtype", "no tensor", "too few tensors", "no list", "steps",
        "epochs", "members", "an accuracy that is text", "too few problems", "no metrics",
        "no time",
    ],
)  # fmt: skip
def test_a_checkpoint_of_this_run_with_something_else_in_it_is_refused(name, digits, tmp_path):
    path = tmp_path / "run"
    train(TINY, [member(digits)], digits, seed=0, checkpoint=Checkpoint(path, ""))
    kept = unpack(path.read_bytes(), torch.device("cpu"))
    spoil(name, kept)
    path.write_bytes(pack(kept))
    with pytest.raises(BadCheckpoint, match="is not a checkpoint, or is damaged; delete it to train again"):
        train(TINY, [member(digits)], digits, seed=0, checkpoint=Checkpoint(path, ""))


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04 half"])
def test_a_damaged_checkpoint_is_refused(content, digits, tmp_path):
    path = tmp_path / "run"
    path.write_bytes(content)
    with pytest.raises(BadCheckpoint, match="is not a checkpoint, or is damaged"):
        train(TINY, [member(digits)], digits, seed=0, checkpoint=Checkpoint(path, ""))
    assert path.read_bytes() == content


def test_a_checkpoint_with_any_wrong_bytes_is_refused(digits, tmp_path):
    """torch itself reads some of them, with tensors in each other's place or with wrong numbers in them."""
    path, rng = tmp_path / "run", np.random.default_rng(0)
    train(replace(TINY, epochs=1), [member(digits)], digits, seed=0, checkpoint=Checkpoint(path, ""))
    fleet, whole = Fleet(replace(TINY, epochs=1), [member(digits)], digits, 0, torch.device("cpu")), path.read_bytes()
    directory = whole.index(b"PK\x01\x02")  # of the archive
    for first in [0] * 50 + [directory] * 50:
        content = bytearray(whole)
        content[int(rng.integers(first, len(whole)))] ^= int(rng.integers(1, 256))
        path.write_bytes(content)
        with pytest.raises(BadCheckpoint):
            Checkpoint(path, "").load(fleet.restore, fleet.device)


# Names


@pytest.mark.parametrize(
    "text", ["logistic", "bi-tempered:0.5:4", "tsallis:0.5:2", "t-logistic:1.5", "gce:0.7", "sce:1:0.5", "mae"]
)
def test_every_loss_has_a_value_for_each_row(text):
    loss = Loss.parse(text)
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    values = loss(logits, torch.tensor([0, 1, 2, 0]))
    function, names, _ = LOSSES[loss.name]
    expected = [function(row, torch.tensor(y), *loss.numbers) for row, y in zip(logits, [0, 1, 2, 0], strict=True)]
    torch.testing.assert_close(values, torch.stack(expected))
    assert len(names) == text.count(":")


@pytest.mark.parametrize(("t1", "t2"), [(0.8, 1.2), (0.2, 2.0), (1.0, 1.0)])
def test_a_rescaled_loss_starts_as_cross_entropy(t1, t2):
    logits, target = torch.zeros(3, 7, dtype=torch.float64, requires_grad=True), torch.tensor([0, 3, 6])
    gradients = [
        torch.autograd.grad(loss(logits, target).sum(), logits)[0]
        for loss in (LOGISTIC, Loss("bi-tempered", (t1, t2), rescale=True))
    ]
    torch.testing.assert_close(*gradients)


def test_names_of_losses_tell_them_apart():
    variants = [TEMPERED, ANNEALED, replace(TEMPERED, rescale=True), replace(ANNEALED, rescale="logits")]
    assert [str(loss) for loss in variants] == [
        "bi-tempered (0.5, 2)",
        "bi-tempered (0.5, 2), annealed",
        "bi-tempered (0.5, 2), rescaled",
        "bi-tempered (0.5, 2), annealed, logits rescaled",
    ]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Loss("gce", (0.7,), rescale=True), "rescale and schedule are for the bi-tempered loss, got gce"),
        (lambda: Loss("bi-tempered", (0.5, 2.0), rescale="loss"), 'rescale must be False, True or "logits", got'),
        (lambda: Loss("logistic", schedule=(0, 1)), "rescale and schedule are for the bi-tempered loss, got logistic"),
        (lambda: replace(ANNEALED, schedule=(3, 2)), "begin must not be after finish"),
        (lambda: ANNEALED(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64)), r"call at\(epoch\) first"),
    ],
)
def test_a_schedule_is_for_one_loss_and_by_epoch(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hinge", "unknown loss 'hinge'; choose from: logistic, bi-tempered"),
        ("bi-tempered", r"bi-tempered is written bi-tempered:t1:t2, got the numbers \[\]"),
        ("logistic:1", r"logistic is written logistic, got the numbers \[1.0\]"),
        ("gce:much", "cannot use the loss 'gce:much'"),
        ("bi-tempered:1.5:1.2", "t1 must not exceed t2"),
        ("gce:2", "q must be"),
    ],
)
def test_bad_losses_are_refused_before_any_work(text, message):
    with pytest.raises(ValueError, match=message):
        Loss.parse(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimizer": "lion"}, "unknown optimizer 'lion'; choose from: adam, adadelta, sgd"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"network": "mnist_cnn"}, "mnist_cnn has a width of its own; leave out the width, got 8"),
    ],
)
def test_bad_settings_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(TINY, **change)


@pytest.mark.parametrize(("name", "channels"), [("resnet56", 64), ("resnet56-wide", 256)])
def test_the_wide_network_is_four_times_as_wide(digits, name, channels):
    network = NETWORKS[name].make((3, 32, 32), digits.num_classes)
    assert network.initial(torch.Generator().manual_seed(0))["dense0"].shape == (channels, digits.num_classes)


def test_a_network_that_is_not_there_is_refused(digits):
    with pytest.raises(ValueError, match="unknown network 'vgg'; choose from: mlp, "):
        train(replace(TINY, network="vgg"), [member(digits)], digits, seed=0)
