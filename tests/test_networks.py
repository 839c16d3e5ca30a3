"""The networks against PyTorch's own layers, and the GPU's convolutions, in Triton's interpreter, against them."""

import math
import sys
import types
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from bitempered.experiments import convolutions, networks
from bitempered.experiments.networks import Block, resnet34

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")


def random(seed=0):
    return torch.Generator().manual_seed(seed)


def stacked(network, *seeds):
    members = [network.initial(random(seed)) for seed in seeds]
    return {name: torch.stack([member[name] for member in members]) for name in members[0]}


def count(model):
    return sum(weights.numel() for weights in model.parameters())


def test_illustration_is_a_10_5_net_per_seed():
    model = networks.Illustration([0, 1, 0])
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
    model = networks.Illustration([0, 1])
    model(torch.ones(2, 3, 2))[0].sum().backward()
    for weights in model.parameters():
        assert weights.grad[0].any()
        assert not weights.grad[1].any()


# The networks, member by member, in PyTorch's own layers


def filters(w, taps):
    """From (taps * taps * inputs, outputs) to what nn.Conv2d has."""
    return w.view(taps, taps, -1, w.shape[1]).permute(3, 2, 0, 1)


def cnn(weights, member):
    """The paper's network for MNIST with one member's weights."""
    w = {name: tensor[member] for name, tensor in weights.items()}
    model = nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(),
        nn.MaxPool2d(2), nn.Linear(3136, 1024), nn.ReLU(), nn.Linear(1024, 10),
    )  # fmt: skip
    values = [
        filters(w["filter0"][:25], 5), w["filter0"][25], filters(w["filter1"], 5), w["filter1.bias"],
        w["dense0"].T, w["dense0.bias"][0], w["dense1"].T, w["dense1.bias"][0],
    ]  # fmt: skip
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), values, strict=True):
            parameter.copy_(value)
    # Pixels first, channels last, as the dense layer's weights have them.
    return lambda x: model[6:](model[:6](x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1).flatten(1))


def residual(weights, member, channels):
    """A residual net with one member's weights, in plain functions."""
    w = {name: tensor[member] for name, tensor in weights.items()}

    def apply(x):
        x = x.permute(0, 3, 1, 2)
        x = nn.functional.conv2d(x, filters(w["filter0"][:27], 3), w["filter0"][27], padding=1).relu()
        at = 0
        for (inputs, outputs), scale in zip(pairwise(channels), w["scales"], strict=True):
            h, stride = x, outputs // inputs
            for rows, step in ((9 * inputs, stride), (9 * outputs, 1)):
                filter_ = filters(w["blocks"][at : at + rows * outputs].view(rows, outputs), 3)
                bias = w["blocks"][at + rows * outputs : at + rows * outputs + outputs]
                h = nn.functional.conv2d(h.relu(), filter_, bias, stride=step, padding=1)
                at += rows * outputs + outputs
            shortcut = torch.zeros_like(h)
            shortcut[:, :inputs] = x[:, :, ::stride, ::stride]
            x = (shortcut + scale * h).relu()
        assert at == len(w["blocks"])
        return x.mean(dim=(2, 3)) @ w["dense0"] + w["dense0.bias"]

    return apply


def test_mlp_is_three_dense_layers():
    network = networks.mlp(7, 3, width=5)
    weights = stacked(network, 0, 1)
    x = torch.randn(4, 7, generator=random())
    for member, logits in enumerate(network.apply(weights, x, None)):
        w = [(weights[f"dense{i}"][member], weights[f"dense{i}.bias"][member]) for i in range(3)]
        hidden = (x @ w[0][0] + w[0][1]).relu()
        hidden = (hidden @ w[1][0] + w[1][1]).relu()
        torch.testing.assert_close(logits, hidden @ w[2][0] + w[2][1])


def test_mnist_cnn_is_the_paper_s():
    network = networks.mnist_cnn()
    weights = stacked(network, 0, 1)
    x = torch.randn(3, 28, 28, 1, generator=random())
    logits = network.apply(weights, x, None)
    assert logits.shape == (2, 3, 10)
    for member in range(2):
        torch.testing.assert_close(logits[member], cnn(weights, member)(x), rtol=1e-4, atol=1e-5)


def test_mnist_cnn_drops_out_a_quarter_of_its_1024_units_in_training():
    network = networks.mnist_cnn()
    seen = []

    def drop(hidden, rate):
        seen.append((hidden.shape, rate))
        return hidden

    network.apply(stacked(network, 0), torch.zeros(2, 28, 28, 1), drop)
    assert seen == [((1, 2, 1024), 0.25)]


def test_resnet_is_residual():
    network = networks.resnet56(5, blocks=1)
    weights = stacked(network, 0, 1)
    for tensor in weights.values():  # the blocks begin at zero: give them something to say
        tensor += 0.1 * torch.randn(tensor.shape, generator=random())
    x = torch.randn(2, 32, 32, 3, generator=random())
    logits = network.apply(weights, x, None)
    for member in range(2):
        expected = residual(weights, member, (16, 16, 32, 64))(x)
        torch.testing.assert_close(logits[member], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("width", "millions"), [(16, 0.86), (64, 13.6)])  # He's; as wide as Hardt and Ma's
def test_resnet56_has_56_layers_and_their_weights(width, millions):
    weights = networks.resnet56(100, width=width).initial(random())
    # 9 blocks of one width; one that doubles it and 8 more, twice; every convolution 3 x 3 with biases.
    a, b, c = width, 2 * width, 4 * width
    sizes = 18 * [(a, a)] + [(a, b)] + 17 * [(b, b)] + [(b, c)] + 17 * [(c, c)]
    assert 1 + len(sizes) + 1 == 56
    assert sum(tensor.numel() for tensor in weights.values()) == pytest.approx(1e6 * millions, rel=0.01)
    assert len(weights["blocks"]) == sum(9 * inputs * outputs + outputs for inputs, outputs in sizes)


def test_resnet56_begins_as_the_identity():
    network = networks.resnet56(10)
    weights = stacked(network, 0)
    x = torch.randn(1, 1, 8, 8, 16, generator=random()).relu()
    channels = (16,) * 10 + (32,) * 9 + (64,) * 9
    y = networks.trunk(x, networks.scaled(weights["blocks"], weights["scales"], channels), channels)
    # The shortcuts keep every fourth pixel and add empty channels; ReLU changes nothing that is positive.
    torch.testing.assert_close(y[..., :16], x[:, :, ::4, ::4], rtol=0, atol=0)
    assert not y[..., 16:].any()


@pytest.mark.parametrize("network", [networks.mlp(3, 2, width=4), networks.mnist_cnn(), networks.resnet56(10)])
def test_weights_are_fixed_by_the_generator(network):
    state = torch.get_rng_state()
    first, same, other = (network.initial(random(seed)) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)
    assert all(tensor.dtype == torch.float32 for tensor in first.values())


# The GPU's convolutions


def assert_same(fast, slow, inputs, mask_of=None):
    """Values and derivatives in every input that has one."""
    leaves = [x for x in inputs if torch.is_tensor(x) and x.requires_grad]
    y, expected = fast(*inputs), slow(*inputs)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    g = torch.randn(y.shape, generator=random(5))
    grads, expected_grads = (torch.autograd.grad(out, leaves, g) for out in (y, expected))
    for leaf, grad, expected_grad in zip(leaves, grads, expected_grads, strict=True):
        if leaf is mask_of:  # its ReLU's derivative is in it already
            expected_grad = torch.where(leaf > 0, expected_grad, 0)
        torch.testing.assert_close(grad, expected_grad, rtol=1e-4, atol=1e-3)


def leaf(*shape, scale=1.0):
    return (scale * torch.randn(shape, generator=random(len(shape)))).requires_grad_()


@pytest.mark.parametrize("size", [5, 8])  # one that tiles do not divide, one that they do
def test_convolution_of_each_member_s_own_images(size):
    inputs = (leaf(2, 3, size, size, 16), leaf(2, 25 * 16, 32, scale=0.05), leaf(2, 32), 5)
    assert_same(convolutions.convolve, networks.convolve, inputs)


def test_convolution_of_mnist_s_second_layer():
    # 588 pixels: more than the first tiles of the eight parts that the sum for the weight's gradient is split into.
    inputs = (leaf(1, 3, 14, 14, 32), leaf(1, 25 * 32, 64, scale=0.05), leaf(1, 64), 5)
    assert_same(convolutions.convolve, networks.convolve, inputs)


def test_convolution_of_shared_patches():
    x = networks.patches(torch.randn(3, 6, 6, 1, generator=random()), 5)
    assert_same(convolutions.convolve, networks.convolve, (x, leaf(2, 32, 16), None, 1))


def test_relu_and_pooling():
    assert_same(convolutions.relu_pool, networks.relu_pool, (leaf(2, 3, 4, 6, 8),))


# Of each width that has tiles of its own; in the wide ones more pixels than one part of a weight's gradient takes.
@pytest.mark.parametrize(
    ("members", "size", "channels"),
    [(2, 6, (16, 16, 32)), (1, 8, (64, 64)), pytest.param(1, 12, (128, 256), marks=pytest.mark.slow)],
)
def test_residual_blocks(members, size, channels):
    x = leaf(members, 2, size, size, channels[0]).detach().relu().requires_grad_()
    count = sum(convolutions.block_size(inputs, outputs) for inputs, outputs in pairwise(channels))
    weights = leaf(members, count, scale=0.4 / channels[0] ** 0.5)
    assert_same(convolutions.trunk, networks.trunk, (x, weights, channels), mask_of=x)


# ImageNet


def test_imagenet_networks_come_from_torchvision(monkeypatch):
    # A stand-in, since torchvision need not be installed: what is asked of it, and nothing more.
    made = types.SimpleNamespace(resnet18=lambda num_classes: ("resnet18", num_classes))
    monkeypatch.setitem(sys.modules, "torchvision", types.SimpleNamespace(models=made))
    assert networks.imagenet_resnet("resnet18", classes=7) == ("resnet18", 7)


def test_imagenet_networks_say_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(ImportError, match=r"resnet50 needs the torchvision .* pip install torchvision"):
        networks.imagenet_resnet("resnet50")
    with pytest.raises(ValueError, match="unknown network 'vgg'; choose from: resnet18, resnet50"):
        networks.imagenet_resnet("vgg")


# ResNet-34


def test_the_network_has_the_published_size():
    """Counted by layer: first convolution and norm, blocks of two convolutions and norms, shortcuts, linear layer."""
    expected = 3 * 9 * 64 + 2 * 64
    inputs = 64
    for outputs, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for _ in range(blocks):
            expected += 9 * inputs * outputs + 9 * outputs * outputs + 4 * outputs
            expected += inputs * outputs + 2 * outputs if inputs != outputs else 0
            inputs = outputs
    expected += 512 * 100 + 100
    assert expected == sum(weight.numel() for weight in resnet34(100, seed=0).parameters()) == 21_328_292


def test_the_network_s_output_and_its_first_weights():
    network = resnet34(7, seed=0, width=4)
    assert network(torch.zeros(2, 3, 32, 32)).shape == (2, 7)
    sizes = []
    for layer in network:
        layer.register_forward_hook(lambda layer, x, y: sizes.append(tuple(y.shape[1:])))
    network(torch.zeros(2, 3, 32, 32))
    # Convolution, norm, ReLU; 3, 4, 6, 3 blocks, of which the first of each stage but the first halves the image.
    stages = [(4, 32, 32)] * 6 + [(8, 16, 16)] * 4 + [(16, 8, 8)] * 6 + [(32, 4, 4)] * 3
    assert sizes == [*stages, (32, 1, 1), (32,), (7,)]
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            bound = math.sqrt(6 / (layer.in_channels * layer.kernel_size[0] ** 2))
        elif isinstance(layer, nn.Linear):
            bound = math.sqrt(6 / (32 + 7))
            assert (layer.bias == 0).all()
        else:
            continue
        assert 0.8 * bound < layer.weight.abs().max() <= bound
    same, other = resnet34(7, seed=0, width=4), resnet34(7, seed=1, width=4)
    for mine, again, another in zip(network.parameters(), same.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, again)
        assert not torch.equal(mine, another) or mine.dim() == 1  # norms begin at 1 and 0, the bias at 0


def convolve_by_hand(x, kernel, stride, padding):
    x = np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    size = (x.shape[2] - kernel.shape[2]) // stride + 1
    out = np.zeros((len(x), len(kernel), size, size))
    for row in range(size):
        for column in range(size):
            window = x[:, :, row * stride :, column * stride :][:, :, : kernel.shape[2], : kernel.shape[3]]
            out[:, :, row, column] = np.tensordot(window, kernel, axes=((1, 2, 3), (1, 2, 3)))
    return out


def normalise(x, state, name):
    mean, variance, weight, bias = (
        state[f"{name}.{key}"][:, None, None] for key in ("running_mean", "running_var", "weight", "bias")
    )
    return (x - mean) / np.sqrt(variance + 1e-5) * weight + bias


@pytest.mark.parametrize(("inputs", "outputs", "stride"), [(3, 3, 1), (3, 5, 1), (3, 6, 2)])
def test_a_block_is_its_formula(inputs, outputs, stride):
    """ReLU(N2 C2 ReLU(N1 C1 x) + shortcut), every norm with statistics of its own."""
    generator = torch.Generator().manual_seed(0)
    block = Block(inputs, outputs, stride).eval()
    for tensor in block.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.1)
    for layer in (block.conv1, block.conv2):
        layer.weight.data -= 0.6  # so that each ReLU cuts something
    x = torch.randn(2, inputs, 8, 8, generator=generator)
    state = {name: value.double().numpy() for name, value in block.state_dict().items()}
    image = x.double().numpy()
    hidden = normalise(convolve_by_hand(image, state["conv1.weight"], stride, 1), state, "norm1")
    assert (hidden < 0).any()
    changed = normalise(convolve_by_hand(np.maximum(hidden, 0), state["conv2.weight"], 1, 1), state, "norm2")
    shortcut = image
    if inputs != outputs or stride != 1:
        shortcut = normalise(convolve_by_hand(image, state["shortcut.0.weight"], stride, 0), state, "shortcut.1")
    assert (changed + shortcut < 0).any()
    with torch.no_grad():
        seen = block(x).double().numpy()
    np.testing.assert_allclose(seen, np.maximum(changed + shortcut, 0), rtol=1e-4, atol=1e-4)  # float32, sums of 54


def test_hardt_and_ma_s_net_begins_as_the_identity_on_standardised_images():
    network = networks.HardtMa(100, seed=0)
    assert sum(weight.numel() for weight in network.parameters()) == 13_538_736  # no biases
    assert "projection" not in dict(network.named_parameters())  # it is not trained
    images = 255 * torch.rand((4, 3, 32, 32), generator=random())
    small = networks.HardtMa(10, seed=0, width=32, blocks=2)
    assert torch.allclose(small(images), small(2 * images + 7), rtol=1e-4, atol=1e-4)  # every image is standardised
    assert small(images).shape == (4, 10)
    black = torch.zeros(1, 3, 32, 32)
    assert torch.equal(small(black), torch.zeros(1, 10))

    with torch.no_grad():  # blocks that add nothing: average pooling, new channels of 0, the mean, the projection
        for block in small.blocks:
            block.conv2.weight.zero_()
        standardised = torch.stack([(image - image.mean()) / image.std(correction=0) for image in images])
        features = small.first(standardised).mean((2, 3))
        expected = features @ small.projection[:8]
        assert torch.allclose(small(images), expected, rtol=1e-4, atol=1e-5)


def test_hardt_and_ma_s_weights_have_their_deviations():
    network = networks.HardtMa(100, seed=0, width=32, blocks=2)
    same, other = (networks.HardtMa(100, seed=seed, width=32, blocks=2) for seed in (0, 1))
    last = network.blocks[-1]
    assert last.conv1.weight.std().item() == pytest.approx(1 / (9 * 128), rel=0.02)
    assert network.first.weight.std().item() == pytest.approx(1 / (3 * 8**0.5), rel=0.15)
    assert torch.equal(last.conv1.weight, same.blocks[-1].conv1.weight)
    assert torch.equal(network.projection, same.projection)
    assert not torch.equal(last.conv1.weight, other.blocks[-1].conv1.weight)
