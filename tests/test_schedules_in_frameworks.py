"""The lines that bitempered.schedules shows for each framework, run as they stand, train as a loop by hand does."""

import os
import textwrap

import numpy as np
import pytest
import torch
from torch import nn

import bitempered.numpy as bt_numpy
from bitempered import schedules
from bitempered.torch import BiTemperedLogisticLoss, bi_tempered_logistic_loss

os.environ["KERAS_BACKEND"] = "torch"

# What the frameworks say about themselves, torch, or a machine without a GPU.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator is found:UserWarning"),
    pytest.mark.filterwarnings("ignore:The '.*dataloader' does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

STEPS, RATE = 5, 2.0
SCHEDULE = schedules.anneal((1, 1), (0.5, 2), begin=1, finish=4)
X = torch.randn(12, 8, generator=torch.Generator().manual_seed(0))
Y = torch.arange(12) % 4


def shown(marker, **names):
    """Run the example that has `marker` with the given names, and return the class or the variable it makes."""
    blocks = textwrap.dedent(schedules.__doc__).split("\n\n")
    (block,) = [b for b in blocks if b.startswith("    ") and marker in b]
    names |= {"schedule": SCHEDULE}
    exec(textwrap.dedent(block), names)
    return names


def linear():
    torch.manual_seed(0)
    return nn.Linear(8, 4)


def by_hand():
    """The weights after STEPS steps of gradient descent on all rows."""
    model = linear()
    for step in range(STEPS):
        loss = bi_tempered_logistic_loss(model(X), Y, *SCHEDULE(step))
        for p, gradient in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
            p.data -= RATE * gradient
    return model.weight.detach()


def test_a_constant_schedule_would_train_otherwise():
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        bi_tempered_logistic_loss(model(X), Y, 1.0, 1.0).backward()
        optimizer.step()
    assert (model.weight - by_hand()).abs().max() > 0.05


def test_torch():
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    shown(
        "criterion(model(x), y).backward()",
        model=model,
        optimizer=optimizer,
        criterion=BiTemperedLogisticLoss(1.0, 1.0),
        batches=[(X, Y)] * STEPS,
    )
    torch.testing.assert_close(model.weight, by_hand(), rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("_torchvision")
def test_lightning():
    lightning = pytest.importorskip("lightning")
    callback = shown("lightning.Callback", lightning=lightning)["Anneal"]

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.network, self.criterion = linear(), BiTemperedLogisticLoss(1.0, 1.0)

        def training_step(self, batch, _):
            return self.criterion(self.network(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=RATE)

    module, rows = Module(), torch.utils.data.TensorDataset(X, Y)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "accelerator": "cpu", "log_every_n_steps": 1}
    trainer = lightning.Trainer(max_epochs=STEPS, callbacks=[callback()], **quiet)
    trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=12))
    torch.testing.assert_close(module.network.weight, by_hand(), rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("_torchvision")
def test_huggingface(tmp_path):
    transformers = pytest.importorskip("transformers")
    criterion = BiTemperedLogisticLoss(1.0, 1.0)
    callback = shown("transformers.TrainerCallback", transformers=transformers, criterion=criterion)["Anneal"]

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = linear()

        def forward(self, x, labels=None):  # a Trainer drops what the model does not name
            return {"logits": self.network(x)}

    model = Model()
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        num_train_epochs=STEPS,
        per_device_train_batch_size=12,
        optim="sgd",
        lr_scheduler_type="constant",
        learning_rate=RATE,
        max_grad_norm=0,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = transformers.Trainer(
        model,
        arguments,
        train_dataset=[{"x": x, "labels": y} for x, y in zip(X, Y, strict=True)],
        compute_loss_func=lambda outputs, labels, num_items_in_batch=None: criterion(outputs["logits"], labels),
        callbacks=[callback()],
    )
    trainer.train()
    torch.testing.assert_close(model.network.weight, by_hand(), rtol=1e-5, atol=1e-6)


def test_keras():
    keras = pytest.importorskip("keras", minversion="3.5")
    import bitempered.keras as bt_keras

    loss = bt_keras.BiTemperedLogisticLoss(1.0, 1.0)
    callback = shown("keras.callbacks.Callback", keras=keras, loss=loss)["Anneal"]
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    start = linear()
    model.layers[0].set_weights([start.weight.detach().T.numpy(), start.bias.detach().numpy()])
    model.compile(keras.optimizers.SGD(RATE), loss, metrics=[loss.temperatures])
    history = model.fit(X.numpy(), Y.numpy(), batch_size=12, epochs=STEPS, verbose=0, callbacks=[callback()]).history
    torch.testing.assert_close(torch.tensor(model.get_weights()[0].T), by_hand(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(history["t2"], [SCHEDULE(epoch)[1] for epoch in range(STEPS)], rtol=1e-6)


def test_jax():
    jax = pytest.importorskip("jax")
    import bitempered.jax as bt_jax

    traces = []

    @jax.jit
    def update(params, x, y, t1, t2):
        traces.append(None)

        def loss(params):
            return bt_jax.bi_tempered_logistic_loss(x @ params["w"] + params["b"], y, t1, t2).mean()

        return jax.tree.map(lambda p, g: p - RATE * g, params, jax.grad(loss)(params))

    start = linear()
    params = {"w": start.weight.detach().T.numpy(), "b": start.bias.detach().numpy()}
    batches = [(X.numpy(), Y.numpy())] * STEPS
    params = shown("params = update", update=update, params=params, batches=batches)["params"]
    torch.testing.assert_close(torch.tensor(np.array(params["w"]).T), by_hand(), rtol=1e-5, atol=1e-6)
    assert len(traces) == 1


def test_the_default_schedule_starts_as_cross_entropy_and_ends_robust():
    schedule = schedules.default(10, 100)
    assert schedule(0) == (1, 1)
    assert bt_numpy.bi_tempered_logistic_loss(np.array([0.0, 1e9]), 0, *schedule(100)) < 2  # bounded
