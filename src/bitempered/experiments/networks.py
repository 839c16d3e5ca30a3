"""The registered networks, by name, and those of figure 2, table 2, `convnet` and the protocols.

To add one to `compare`, write a function that returns a `Network` and add an entry to `NETWORKS`.

A `Network` trains many members at once. It draws the weights of one member and runs all members on a batch:
`apply(weights, x, drop)` takes weights stacked along a new first dimension and one batch that the members share,
features `(n, d)` or images `(n, h, w, c)`, to logits `(members, n, classes)`. Members are independent: training twelve
together only makes them faster (see `train`). On a GPU the layers are those of `convolutions`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = [
    "NETWORKS",
    "SINGLE_NETWORKS",
    "Architecture",
    "HardtMa",
    "Illustration",
    "Network",
    "convnet",
    "imagenet_resnet",
    "mlp",
    "mnist_cnn",
    "resnet34",
    "resnet56",
]

Weights = dict[str, Tensor]
Drop = Callable[[Tensor, float], Tensor]  # drops hidden units at a rate, in training only
PATCH = 32  # numbers that `patches` returns for each pixel


@dataclass(frozen=True)
class Network:
    """`initial(generator)` draws one member's weights, float32, by name; `apply` is described above."""

    initial: Callable[[torch.Generator], Weights]
    apply: Callable[[Weights, Tensor, Drop | None], Tensor]


def mlp(inputs: int, classes: int, *, width: int) -> Network:
    """A perceptron with two hidden layers of `width` units.

    At width 256 it has 85,000 weights for the 500 training rows of digits. With a large rate or many epochs it can
    memorise every wrong label, which a robust loss has to resist.
    """
    sizes = (inputs, width, width, classes)

    def initial(generator: torch.Generator) -> Weights:
        weights: Weights = {}
        for layer, (rows, columns) in enumerate(pairwise(sizes)):
            weights |= _dense(f"dense{layer}", rows, columns, generator)
        return weights

    def apply(weights: Weights, x: Tensor, drop: Drop | None) -> Tensor:
        hidden = x.expand(len(weights["dense0"]), -1, -1)
        for layer in range(3):
            hidden = _linear(weights, f"dense{layer}", hidden.relu() if layer else hidden)
        return hidden

    return Network(initial, apply)


def mnist_cnn(classes: int = 10) -> Network:
    """The paper's network for MNIST: 5 x 5 convolutions of 32 and 64, max-pooling by 2 after each, 1024, 10.

    Padding keeps the size, so that 7 x 7 x 64 numbers reach the dense layers; one quarter of the 1,024
    units drop out in training (the paper keeps 0.75 and does not say where). Images are `(n, 28, 28, 1)`.

    Reference: Amid, Warmuth, Anil, Koren, section 5.1.
    """

    def initial(generator: torch.Generator) -> Weights:
        return {
            "filter0": _first_filter(5, 1, 32, 1 / 25**0.5, generator),
            "filter1": _uniform((25 * 32, 64), 1 / (25 * 32) ** 0.5, generator),
            "filter1.bias": _uniform((64,), 1 / (25 * 32) ** 0.5, generator),
            **_dense("dense0", 7 * 7 * 64, 1024, generator),
            **_dense("dense1", 1024, classes, generator),
        }

    def apply(weights: Weights, x: Tensor, drop: Drop | None) -> Tensor:
        hidden = relu_pool(convolve(patches(x, 5), weights["filter0"], None, 1))
        hidden = relu_pool(convolve(hidden, weights["filter1"], weights["filter1.bias"], 5))
        hidden = _linear(weights, "dense0", hidden.flatten(2)).relu()
        return _linear(weights, "dense1", drop(hidden, 0.25) if drop else hidden)

    return Network(initial, apply)


def resnet56(classes: int, *, width: int = 16, blocks: int = 9) -> Network:
    """A residual net of 56 layers without batch normalisation, for images `(n, 32, 32, 3)`.

    A 3 x 3 convolution of `width` channels, three groups of nine blocks of `width`, twice and four times as many, the
    mean over positions, a dense layer. At width 16 this is He's ResNet-56; at width 64 its groups are as wide as those
    of Hardt and Ma's net. On a GPU the width must be a power of 2, at least 16. A block is two 3 x 3 convolutions
    beside the identity; where the size halves, the identity keeps every other pixel and new channels are zero, so
    shortcuts have no weights. Without batch normalisation every block must begin near the identity: Hardt and Ma draw
    small random weights for that. Here, as in SkipInit, weights are He's, and a factor in front of each block begins at
    0, so that the block is exactly the identity.

    Reference: Hardt and Ma, Identity Matters in Deep Learning, 2017; He et al., Deep Residual Learning, 2016 (the
    layout); De and Smith, Batch Normalization Biases Residual Blocks Towards the Identity Function, 2020 (SkipInit).
    """
    channels = (width,) * (blocks + 1) + (2 * width,) * blocks + (4 * width,) * blocks

    def initial(generator: torch.Generator) -> Weights:
        flat = []
        for inputs, outputs in pairwise(channels):
            for size in (inputs, outputs):
                flat.append((2 / (9 * size)) ** 0.5 * torch.randn(9 * size * outputs, generator=generator))
                flat.append(torch.zeros(outputs))
        return {
            "filter0": _first_filter(3, 3, width, None, generator),
            "blocks": torch.cat(flat),
            "scales": torch.zeros(3 * blocks),
            "dense0": torch.zeros(4 * width, classes),
            "dense0.bias": torch.zeros(1, classes),
        }

    def apply(weights: Weights, x: Tensor, drop: Drop | None) -> Tensor:
        hidden = convolve(patches(x, 3), weights["filter0"], None, 1).relu()
        hidden = trunk(hidden, scaled(weights["blocks"], weights["scales"], channels), channels)
        return _linear(weights, "dense0", hidden.mean(dim=(2, 3)))

    return Network(initial, apply)


@dataclass(frozen=True)
class Architecture:
    """A registered network: `make(shape, classes)` builds it for rows of a shape."""

    make: Callable[..., Network]
    image: tuple[int, ...] | None = None  # channels, height and width; None: it takes rows of any shape, as vectors
    has_width: bool = False  # whether `make` also takes `width`

    @property
    def flat(self) -> bool:
        return self.image is None


NETWORKS = {
    "mlp": Architecture(lambda shape, classes, width: mlp(math.prod(shape), classes, width=width), has_width=True),
    "mnist_cnn": Architecture(lambda shape, classes: mnist_cnn(classes), (1, 28, 28)),
    "resnet56": Architecture(lambda shape, classes: resnet56(classes), (3, 32, 32)),
    "resnet56-wide": Architecture(lambda shape, classes: resnet56(classes, width=64), (3, 32, 32)),
}


def _uniform(shape: tuple[int, ...], bound: float, generator: torch.Generator) -> Tensor:
    return (2 * torch.rand(shape, generator=generator) - 1) * bound


def _dense(name: str, rows: int, columns: int, generator: torch.Generator) -> Weights:
    """Weight `(rows, columns)` and bias `(1, columns)`, within the bounds of nn.Linear's initialisation."""
    drawn = _uniform((rows + 1, columns), rows**-0.5, generator)
    return {name: drawn[:-1], f"{name}.bias": drawn[-1:]}


def _first_filter(taps: int, inputs: int, outputs: int, bound: float | None, generator: torch.Generator) -> Tensor:
    """A filter and its bias for `patches`: uniform within `bound`, or He's normal with no bias; 0 where patches are."""
    size = taps * taps * inputs
    weight = torch.zeros(PATCH, outputs)
    if bound is None:
        weight[:size] = (2 / size) ** 0.5 * torch.randn(size, outputs, generator=generator)
    else:
        weight[: size + 1] = _uniform((size + 1, outputs), bound, generator)
    return weight


def _linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    return torch.baddbmm(weights[f"{name}.bias"], x, weights[name])


def patches(x: Tensor, taps: int) -> Tensor:
    """Return what a filter sees at each pixel of images `(n, h, w, c)`, a one for its bias, and zeros: PATCH numbers.

    Members share the images: the first convolution is a product with these patches, which are made once for all.
    """
    n, height, width, channels = x.shape
    padded = functional.pad(x, (0, 0, taps // 2, taps // 2, taps // 2, taps // 2))
    seen = [padded[:, y : y + height, z : z + width] for y in range(taps) for z in range(taps)]
    rest = PATCH - taps * taps * channels - 1
    return torch.cat([*seen, x.new_ones(n, height, width, 1), x.new_zeros(n, height, width, rest)], dim=3)


def convolve(x: Tensor, w: Tensor, b: Tensor | None, taps: int) -> Tensor:
    """Convolve images `([members,] n, h, w, c)` with w `(members, taps * taps * c, outputs)`, adding b.

    The result is `(members, n, h, w, outputs)`: pixels outside of the image count as 0.
    """
    if x.is_cuda:
        from bitempered.experiments import convolutions

        return convolutions.convolve(x, w, b, taps)
    return _convolve_on_cpu(x, w, b, taps, 1)


def _convolve_on_cpu(x: Tensor, w: Tensor, b: Tensor | None, taps: int, stride: int) -> Tensor:
    """As `convolve`, to images `(h / stride, w / stride)`."""
    members, _, outputs = w.shape
    images = x.expand(members, *x.shape[-4:]).permute(0, 1, 4, 2, 3)
    filters = w.view(members, taps, taps, -1, outputs).permute(0, 4, 3, 1, 2)
    biases = [None] * members if b is None else b
    convolved = [
        functional.conv2d(*one, stride=stride, padding=taps // 2) for one in zip(images, filters, biases, strict=True)
    ]
    return torch.stack([one.permute(0, 2, 3, 1) for one in convolved])


def relu_pool(x: Tensor) -> Tensor:
    """The largest of 0 and of 2 x 2 pixels, `(members, n, h, w, c)` to `(members, n, h / 2, w / 2, c)`."""
    if x.is_cuda:
        from bitempered.experiments import convolutions

        return convolutions.relu_pool(x)
    members, n, height, width, channels = x.shape
    return x.reshape(members, n, height // 2, 2, width // 2, 2, channels).amax(dim=(3, 5)).relu()


def scaled(flat: Tensor, scales: Tensor, channels: tuple[int, ...]) -> Tensor:
    """The weights of `trunk` with the last convolution of each block multiplied by its scale, `(members, blocks)`."""
    sizes = [9 * size * outputs + outputs for inputs, outputs in pairwise(channels) for size in (inputs, outputs)]
    parts = list(flat.split(sizes, dim=1))
    for block, scale in enumerate(scales.split(1, dim=1)):
        parts[2 * block + 1] = parts[2 * block + 1] * scale
    return torch.cat(parts, dim=1)


def trunk(x: Tensor, flat: Tensor, channels: tuple[int, ...]) -> Tensor:
    """Residual blocks from each of `channels` to the next; x is the output of a ReLU.

    `flat` `(members, size)` has, block by block, the weights `(9 * inputs, outputs)` and the bias of its first
    convolution, then of its second.
    """
    if x.is_cuda:
        from bitempered.experiments import convolutions

        return convolutions.trunk(x, flat, channels)
    at = 0
    for inputs, outputs in pairwise(channels):
        pairs = []
        for rows in (9 * inputs, 9 * outputs):
            end = at + rows * outputs
            pairs.append((flat[:, at:end].view(-1, rows, outputs), flat[:, end : end + outputs]))
            at = end + outputs
        (w1, b1), (w2, b2) = pairs
        stride = outputs // inputs
        shortcut = functional.pad(x[:, :, ::stride, ::stride], (0, outputs - inputs))
        hidden = _convolve_on_cpu(x, w1, b1, 3, stride).relu()
        x = (shortcut + _convolve_on_cpu(hidden, w2, b2, 3, 1)).relu()
    return x


class Illustration(nn.Module):
    """The net of the paper's figure 2, with layers of ten and five units, in several copies side by side.

    `seeds[i]` draws the weights of copy i, which sees only its own points; one product of stacked matrices replaces
    many small ones. The paper names neither activation nor initial weights. Ours are tanh, which gives the smooth
    boundaries of its figure, and the bounds of nn.Linear; with `relu`, those of the authors' demonstration: ReLU,
    which gives polygons, standard normal weights, and biases of 0.

    Shapes: points `(copies, n, 2)` to logits `(copies, n, 2)`.

    Reference: Amid, Warmuth, Anil, Koren, section 1.2.
    """

    def __init__(self, seeds: list[int], relu: bool = False) -> None:
        super().__init__()
        self.activation = torch.relu if relu else torch.tanh
        sizes = (2, 10, 5, 2)
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        for inputs, outputs in pairwise(sizes):
            if relu:
                draws = [torch.randn(inputs + 1, outputs, generator=g) for g in generators]
                for draw in draws:
                    draw[-1] = 0
            else:
                draws = [(2 * torch.rand(inputs + 1, outputs, generator=g) - 1) / inputs**0.5 for g in generators]
            self.weights.append(torch.stack([draw[:-1] for draw in draws]))
            self.biases.append(torch.stack([draw[-1:] for draw in draws]))

    def forward(self, points: Tensor) -> Tensor:
        hidden = points
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            hidden = torch.baddbmm(bias, hidden if layer == 0 else self.activation(hidden), weight)
        return hidden


def imagenet_resnet(name: str, *, classes: int = 1000) -> nn.Module:
    """Return torchvision's "resnet18" or "resnet50", untrained, for the paper's table 2."""
    if name not in ("resnet18", "resnet50"):
        raise ValueError(f"unknown network {name!r}; choose from: resnet18, resnet50")
    try:
        from torchvision import models
    except (ImportError, RuntimeError) as error:
        # A torchvision built for another torch raises RuntimeError.
        raise ImportError(
            f"{name} needs the torchvision that belongs to your torch ({error}): pip install torchvision"
        ) from error
    return getattr(models, name)(num_classes=classes)


class HardtMaBlock(nn.Module):
    """x + C2(ReLU(C1 x)) with nothing after the sum; where the size changes, x is averaged and padded with channels."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.stride, self.more = stride, outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        shortcut = functional.avg_pool2d(x, self.stride) if self.stride > 1 else x
        return self.conv2(self.conv1(x).relu()) + functional.pad(shortcut, (0, 0, 0, 0, 0, self.more))


class HardtMa(nn.Module):
    """Hardt and Ma's net of 56 layers without batch normalisation, which the paper trains on CIFAR-100.

    It takes pixels from 0 to 255, `(n, 3, 32, 32)`, and standardises each image. A 3 x 3 convolution of width / 4
    channels, three groups of nine blocks of `width`, twice and four times as many, the mean over positions, and a
    projection that is random and stays so. Nothing has a bias. At width 64 it trains 13.5 million weights.

    Initial weights are normal: with deviation 1 / (9 c) in blocks, where c is the number of output channels, so that a
    block begins near the identity, and 1 / (3 sqrt(c)) in the first convolution. The deviation of the projection is not
    known; here it is one over the square root of its inputs.

    Reference: Hardt and Ma, Identity Matters in Deep Learning, 2017, section 4.1.
    """

    takes_pixels = True  # from 0 to 255
    projection: Tensor

    def __init__(self, classes: int, seed: int, width: int = 64, blocks: int = 9) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        channels = (width // 4, *(width * 2**group for group in range(3) for _ in range(blocks)))
        self.first = nn.Conv2d(3, channels[0], 3, padding=1, bias=False)
        strides = [2 if group and not block else 1 for group in range(3) for block in range(blocks)]
        self.blocks = nn.Sequential(
            *(HardtMaBlock(*pair, stride) for pair, stride in zip(pairwise(channels), strides, strict=True))
        )
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                deviation = 1 / (9 * layer.out_channels) if layer is not self.first else 1 / (3 * channels[0] ** 0.5)
                nn.init.normal_(layer.weight, std=deviation, generator=generator)
        size = channels[-1]
        self.register_buffer("projection", torch.randn(size, classes, generator=generator) / size**0.5)

    def forward(self, x: Tensor) -> Tensor:
        pixels = x.float()
        mean, deviation = pixels.mean((1, 2, 3), keepdim=True), pixels.std((1, 2, 3), correction=0, keepdim=True)
        least = pixels[0].numel() ** -0.5  # for an image of one colour
        hidden = self.blocks(self.first((pixels - mean) / deviation.clamp(min=least)))
        return hidden.mean((2, 3)) @ self.projection


class Block(nn.Module):
    """A block of ResNet-34: two 3 x 3 convolutions and a shortcut, a 1 x 1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(hidden)) + self.shortcut(x))


def resnet34(classes: int, seed: int, width: int = 64) -> nn.Module:
    """The ResNet-34 of the noisy-label literature, for images `(n, 3, 32, 32)`, with batch normalisation.

    A 3 x 3 convolution, then stages of 3, 4, 6 and 3 blocks with `width` to 8 `width` channels; at width 64 it has 21.3
    million weights.

    Weights are drawn as in the public code of the active-passive and the active negative losses: He's uniform for
    convolutions, Glorot's for the linear layer. Its bias is 0.

    >>> sum(weight.numel() for weight in resnet34(100, seed=0).parameters())
    21328292
    """
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    inputs = width
    for stage, blocks in enumerate((3, 4, 6, 3)):
        outputs = width * 2**stage
        for block in range(blocks):
            layers.append(Block(inputs, outputs, stride=2 if stage and not block else 1))
            inputs = outputs
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)]
    network = nn.Sequential(*layers)
    generator = torch.Generator().manual_seed(seed)
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu", generator=generator)
        elif isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight, generator=generator)
            nn.init.zeros_(layer.bias)
    return network


def convnet(shape: tuple[int, ...], classes: int, seed: int) -> nn.Module:
    """A small net with batch normalisation for images of a shape (channels, height, width), as people write one.

    Three 3 x 3 convolutions of 16, 32 and 64 channels, each with normalisation, ReLU and max-pooling by 2, a layer of
    256 units, the classes.
    """
    channels, height, width = shape
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise((channels, 16, 32, 64)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        layers += [nn.MaxPool2d(2)]
    layers += [nn.Flatten(), nn.Linear(64 * (height // 8) * (width // 8), 256), nn.ReLU(), nn.Linear(256, classes)]
    network = nn.Sequential(*layers)
    with torch.random.fork_rng(devices=[]):  # PyTorch draws its own initial weights from the global generator
        torch.manual_seed(seed)
        for layer in network.modules():
            if isinstance(layer, nn.Conv2d | nn.Linear):
                layer.reset_parameters()
    return network


# Networks that train one at a time (`streams`): called with classes, seed, width.
SINGLE_NETWORKS: dict[str, Callable[[int, int, int], nn.Module]] = {"resnet34": resnet34, "resnet56-hardt-ma": HardtMa}
