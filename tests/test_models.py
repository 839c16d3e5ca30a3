"""The experiments' networks: their sizes, their seeds, and that the deep one trains without batch normalisation."""

import sys
import types

import pytest
import torch

from bitempered.experiments import models


def count(model):
    return sum(weights.numel() for weights in model.parameters())


def test_illustration_is_a_10_5_net_per_seed():
    model = models.Illustration([0, 1, 0])
    assert count(model) == 3 * ((2 * 10 + 10) + (10 * 5 + 5) + (5 * 2 + 2))
    points = torch.randn(1, 7, 2, generator=torch.Generator().manual_seed(0)).expand(3, -1, -1)
    logits = model(points)
    assert logits.shape == (3, 7, 2)
    torch.testing.assert_close(logits[0], logits[2], rtol=0, atol=0)
    assert (logits[0] != logits[1]).all()
    (w1, w2, w3), (b1, b2, b3) = ([p[1] for p in layers] for layers in (model.weights, model.biases))
    expected = torch.tanh(torch.tanh(points[1] @ w1 + b1) @ w2 + b2) @ w3 + b3
    torch.testing.assert_close(logits[1], expected)


def test_illustration_s_copies_do_not_mix():
    model = models.Illustration([0, 1])
    model(torch.ones(2, 3, 2))[0].sum().backward()
    for weights in model.parameters():
        assert weights.grad[0].any()
        assert not weights.grad[1].any()


# 5 x 5 filters with biases, then 7 * 7 * 64 to 1024 to 10.
CNN = (25 * 32 + 32) + (25 * 32 * 64 + 64) + (3136 * 1024 + 1024) + (1024 * 10 + 10)
# The stem; 9 blocks of 16; one that doubles and 8 more, twice; the dense layer; every convolution 3 x 3 with biases.
RESNET = (
    (9 * 3 * 16 + 16)
    + 18 * (9 * 16 * 16 + 16)
    + (9 * 16 * 32 + 32)
    + 17 * (9 * 32 * 32 + 32)
    + (9 * 32 * 64 + 64)
    + 17 * (9 * 64 * 64 + 64)
    + (64 * 100 + 100)
)


@pytest.mark.parametrize(
    ("make", "shape", "classes", "size"),
    [
        (models.mnist_cnn, (1, 28, 28), 10, CNN),
        (lambda seed: models.resnet56(100, seed=seed), (3, 32, 32), 100, RESNET),
    ],
)
def test_image_networks(make, shape, classes, size):
    state = torch.get_rng_state()
    first, same, other = make(seed=0), make(seed=0), make(seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert count(first) == size
    assert first(torch.zeros(2, *shape)).shape == (2, classes)
    pairs = list(zip(first.parameters(), same.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert any(not torch.equal(a, c) for a, _, c in pairs)


def test_resnet56_has_56_layers_and_no_batch_normalisation():
    model = models.resnet56(100, seed=0)
    layers = [m for m in model.modules() if isinstance(m, torch.nn.Conv2d | torch.nn.Linear)]
    assert len(layers) == 56
    assert not any("Norm" in type(m).__name__ for m in model.modules())


def test_resnet56_begins_as_the_identity_and_learns():
    model = models.resnet56(10, seed=0)
    x = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    y = torch.arange(8) % 4
    stem = torch.relu(model.stem(x))
    # The shortcuts keep every fourth pixel and add empty channels; ReLU changes nothing that is positive.
    torch.testing.assert_close(model.blocks(stem)[:, :16], stem[:, :, ::4, ::4], rtol=0, atol=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
    assert losses[0] == pytest.approx(torch.log(torch.tensor(10.0)).item())
    assert losses[-1] < losses[0] - 0.5


def test_mnist_cnn_drops_out_a_quarter_in_training_only():
    model = models.mnist_cnn(seed=0)
    assert [m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)] == [0.25]
    x = torch.rand(2, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    model.eval()
    torch.testing.assert_close(model(x), model(x), rtol=0, atol=0)


def test_imagenet_networks_come_from_torchvision(monkeypatch):
    # A stand-in, since torchvision need not be installed: what is asked of it, and nothing more.
    made = types.SimpleNamespace(resnet18=lambda num_classes: ("resnet18", num_classes))
    monkeypatch.setitem(sys.modules, "torchvision", types.SimpleNamespace(models=made))
    assert models.imagenet_resnet("resnet18", classes=7) == ("resnet18", 7)


def test_imagenet_networks_say_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(ImportError, match=r"resnet50 needs the torchvision .* pip install torchvision"):
        models.imagenet_resnet("resnet50")
    with pytest.raises(ValueError, match="unknown network 'vgg'; there is: resnet18, resnet50"):
        models.imagenet_resnet("vgg")
