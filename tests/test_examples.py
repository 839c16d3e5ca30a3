"""The recipes of examples/ run as they stand, and each does what it says with the loss of its framework."""

import importlib
import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import bitempered.numpy
from bitempered.torch import bi_tempered_logistic_loss

T1, T2 = 0.8, 1.2  # those of every recipe

# All of it is float32, where one operation rounds by 6e-8. Probabilities of the same logits differ by few roundings;
# losses and weights come from matrix products, which two frameworks, or batches of other sizes, sum in other orders.
LOSS = {"rel": 1e-5}
WEIGHTS = {"rtol": 1e-5, "atol": 1e-6}
PROBABILITIES = {"rtol": 0, "atol": 1e-6}

# What the frameworks say about themselves, torch, or a machine without a GPU.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator is found:UserWarning"),
    pytest.mark.filterwarnings("ignore:The '.*dataloader' does not have many workers:UserWarning"),
]


@pytest.fixture
def recipe(monkeypatch):
    """Imports a script of examples/ by its name, or skips where its framework is not installed."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "examples"))

    def load(name, framework):
        pytest.importorskip(framework, reason=f"{name} needs {framework}")
        return importlib.import_module(name)

    return load


# 60 % of the training labels are right. To be right more often than that, a model has to see through the noise;
# each of these does after few epochs: 84 to 91 %.
BETTER_THAN_ITS_LABELS = 0.75


def test_skorch(recipe):
    example = recipe("skorch_digits", "skorch")
    assert example.main(epochs=5) > BETTER_THAN_ITS_LABELS
    untrained = example.classifier(epochs=1).initialize()
    x = 9 * np.random.default_rng(0).normal(size=(5, 64)).astype(np.float32)
    logits = untrained.forward(x).numpy()
    np.testing.assert_allclose(
        untrained.predict_proba(x), bitempered.numpy.tempered_softmax(logits, T2), **PROBABILITIES
    )


@pytest.mark.usefixtures("_torchvision")
def test_lightning(recipe):
    example = recipe("lightning_digits", "lightning")
    assert example.main(epochs=5) > BETTER_THAN_ITS_LABELS
    model = example.Classifier()
    x, y = torch.randn(5, 64), torch.arange(5)
    logits = model.network(x).detach().numpy()
    losses = bitempered.numpy.bi_tempered_logistic_loss(logits, y.numpy(), T1, T2)
    assert model.criterion(model.network(x), y).item() == pytest.approx(losses.mean(), **LOSS)
    probabilities = model.predict_step([x], 0).detach()
    np.testing.assert_allclose(probabilities, bitempered.numpy.tempered_softmax(logits, T2), **PROBABILITIES)


@pytest.mark.usefixtures("_torchvision")
def test_huggingface_trainer(recipe):
    example = recipe("huggingface_trainer", "transformers")
    assert example.main(epochs=6) > BETTER_THAN_ITS_LABELS


@pytest.mark.usefixtures("_torchvision")
def test_huggingface_accumulates_gradients_of_one_mean(recipe, tmp_path):
    """Steps over uneven batches, some labels ignored, equal those of a plain loop that has all rows at once."""
    example = recipe("huggingface_trainer", "transformers")
    from transformers import Trainer, TrainingArguments
    from transformers.modeling_outputs import ImageClassifierOutput

    class Linear(nn.Linear):
        def forward(self, x, labels=None):  # a Trainer drops what the model does not name
            return ImageClassifierOutput(logits=super().forward(x))

    torch.manual_seed(0)
    x, y = torch.randn(30, 8), torch.randint(4, (30,))
    y[::7] = -100
    model, plain = Linear(8, 4), nn.Linear(8, 4)
    plain.load_state_dict(model.state_dict())
    arguments = TrainingArguments(
        str(tmp_path),
        num_train_epochs=3,
        per_device_train_batch_size=8,  # 8 + 8 + 8 + 6 rows are one step
        gradient_accumulation_steps=4,
        optim="sgd",
        lr_scheduler_type="constant",
        learning_rate=0.5,
        max_grad_norm=0,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    rows = [{"x": a, "labels": label} for a, label in zip(x, y, strict=True)]
    Trainer(model, arguments, train_dataset=rows, compute_loss_func=example.bi_tempered).train()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        bi_tempered_logistic_loss(plain(x), y, T1, T2).backward()
        optimizer.step()
    torch.testing.assert_close(model.weight, plain.weight, **WEIGHTS)
    outputs = model(x)
    torch.testing.assert_close(example.bi_tempered(outputs, y), bi_tempered_logistic_loss(outputs.logits, y, T1, T2))


def test_mixed_targets_mix_the_gradients():
    """The divergence is linear in the target but for a term without logits."""
    torch.manual_seed(0)
    logits = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    labels, share = torch.tensor([0, 1, 2, 3, 1, 0]), 0.3
    one_hot = torch.eye(4, dtype=torch.float64)[labels]
    mixed = share * one_hot + (1 - share) * one_hot.flip(0)
    gradients = [
        torch.autograd.grad(bi_tempered_logistic_loss(logits, target, T1, T2), logits)[0]
        for target in (mixed, labels, labels.flip(0))
    ]
    torch.testing.assert_close(gradients[0], share * gradients[1] + (1 - share) * gradients[2], rtol=1e-12, atol=1e-15)


@pytest.mark.usefixtures("_torchvision")
def test_timm(recipe):
    example = recipe("timm_mixup", "timm")
    from timm.data.mixup import mixup_target

    assert example.main(epochs=5) > BETTER_THAN_ITS_LABELS
    # Its targets are those of the test above, so that mixing and the loss mean the same by them.
    labels = torch.tensor([0, 1, 2, 3])
    by_hand = 0.3 * nn.functional.one_hot(labels, 5) + 0.7 * nn.functional.one_hot(labels.flip(0), 5)
    torch.testing.assert_close(mixup_target(labels, 5, lam=0.3), by_hand)


def test_flax(recipe):
    example = recipe("flax_digits", "flax")
    assert example.main(epochs=5) > BETTER_THAN_ITS_LABELS
    model = example.nnx.Linear(8, 4, rngs=example.nnx.Rngs(0))
    optimizer = example.nnx.Optimizer(model, example.optax.sgd(0.5), wrt=example.nnx.Param)
    x, y = np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32), np.arange(6) % 4
    plain = nn.Linear(8, 4)
    with torch.no_grad():
        plain.weight.copy_(torch.tensor(np.array(model.kernel[...])).T)
        plain.bias.copy_(torch.tensor(np.array(model.bias[...])))
    want = bi_tempered_logistic_loss(plain(torch.from_numpy(x)), torch.from_numpy(y), T1, T2)
    (gradient,) = torch.autograd.grad(want, plain.weight)
    assert example.step(model, optimizer, x, y) == pytest.approx(want.item(), **LOSS)
    np.testing.assert_allclose(model.kernel[...].T, (plain.weight - 0.5 * gradient).detach(), **WEIGHTS)


def test_onnx(recipe, tmp_path):
    pytest.importorskip("onnxscript", reason="torch.onnx needs onnxscript")
    accuracy, difference = recipe("onnx_export", "onnxruntime").main(tmp_path)
    assert accuracy > BETTER_THAN_ITS_LABELS
    assert difference < 1e-5  # as test_onnx.py has it


def test_learn_temperatures(recipe, capsys):
    example = recipe("learn_temperatures", "sklearn")
    results = example.main()
    assert all(accuracy > BETTER_THAN_ITS_LABELS for *_, accuracy in results.values())
    assert results["constant"][:2] == pytest.approx((T1, T2))
    t1, t2, accuracy = results["learnt"]
    assert abs(t1 - T1) > 0.01  # they moved
    assert abs(t2 - T2) > 0.001
    assert f"t1 = {t1:.2f}  t2 = {t2:.2f}  accuracy on clean test labels {accuracy:.1%}" in capsys.readouterr().out
    assert example.train(T1, T2, 1, True) == example.train(T1, T2, 1, True)
