"""The networks that the experiments train."""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Illustration", "ResNet56", "imagenet_resnet", "mlp", "mnist_cnn", "resnet56"]


def mlp(inputs: int, classes: int, *, width: int, seed: int) -> nn.Module:
    """Return a perceptron with two hidden layers of `width` units, its weights fixed by `seed`.

    At width 256 it has 85,000 weights for the 500 training rows of digits: enough to memorise
    every wrong label, given a large rate or many epochs, which is what a robust loss has to resist.
    """
    # torch's initialisers draw from the global generator: leave the caller's where it was.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(inputs, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, classes),
        )


class Illustration(nn.Module):
    """The net of the paper's figure 2, ten and five tanh units, several copies of it side by side.

    Copy i has the weights that `seeds[i]` fixes and sees only its own points, so that one product of
    stacked matrices does the work of many small ones. The paper does not name the activation: tanh gives
    the smooth boundaries of its figure, ReLU polygons.

    Shapes: points `(copies, n, 2)` to logits `(copies, n, 2)`.

    Reference: Amid, Warmuth, Anil, Koren, section 1.2.
    """

    def __init__(self, seeds: list[int]) -> None:
        super().__init__()
        sizes = (2, 10, 5, 2)
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        for inputs, outputs in pairwise(sizes):
            # The bound of nn.Linear's initialisation.
            draws = [(2 * torch.rand(inputs + 1, outputs, generator=g) - 1) / inputs**0.5 for g in generators]
            self.weights.append(torch.stack([draw[:-1] for draw in draws]))
            self.biases.append(torch.stack([draw[-1:] for draw in draws]))

    def forward(self, points: Tensor) -> Tensor:
        hidden = points
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            hidden = torch.baddbmm(bias, hidden if layer == 0 else hidden.tanh(), weight)
        return hidden


def mnist_cnn(*, seed: int) -> nn.Module:
    """Return the paper's network for MNIST: 5 x 5 convolutions of 32 and 64, max-pooling by 2 after each, 1024, 10.

    Padding keeps the size, so that 7 x 7 x 64 numbers reach the dense layers; one quarter of the 1,024
    units drop out in training (the paper keeps 0.75 and does not say where).

    Shapes: images `(n, 1, 28, 28)` to logits `(n, 10)`.

    Reference: Amid, Warmuth, Anil, Koren, section 5.1.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 32, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(7 * 7 * 64, 1024),
            nn.ReLU(),
            nn.Dropout(0.25),
            nn.Linear(1024, 10),
        )


class Block(nn.Module):
    """Two 3 x 3 convolutions beside the identity; where the size halves, the identity keeps every other pixel.

    New channels of the identity are zero, so that the shortcut has no weights.
    """

    def __init__(self, inputs: int, outputs: int, blocks: int) -> None:
        super().__init__()
        self.stride, self.new = outputs // inputs, outputs - inputs
        self.first = nn.Conv2d(inputs, outputs, 3, stride=self.stride, padding=1)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1)
        nn.init.kaiming_normal_(self.first.weight, nonlinearity="relu")
        with torch.no_grad():
            self.first.weight *= blocks**-0.5
        nn.init.zeros_(self.second.weight)
        for layer in (self.first, self.second):
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        identity = x[:, :, :: self.stride, :: self.stride]
        identity = functional.pad(identity, (0, 0, 0, 0, 0, self.new))
        return functional.relu(identity + self.second(functional.relu(self.first(x))))


class ResNet56(nn.Module):
    """A residual net of 56 layers without batch normalisation, for 32 x 32 images.

    A 3 x 3 convolution of 16, three groups of nine blocks of 16, 32 and 64 channels, the mean over
    positions, a dense layer. Without batch normalisation the initialisation is what makes it trainable:
    Hardt and Ma draw small random weights so that every block begins near the identity. Here, as in Fixup,
    the last convolution of each block and the dense layer begin at zero and the first one is scaled by
    1 / sqrt(27), for 27 blocks, so that at the start every block is the identity exactly and one step
    changes the output by an amount that does not grow with depth.

    Shapes: images `(n, 3, 32, 32)` to logits `(n, classes)`.

    Reference: Hardt and Ma, Identity Matters in Deep Learning, 2017; He et al., Deep Residual Learning,
    2016 (the layout); Zhang, Dauphin and Ma, Fixup Initialization, 2019.
    """

    def __init__(self, classes: int) -> None:
        super().__init__()
        channels = [16] * 10 + [32] * 9 + [64] * 9
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        nn.init.kaiming_normal_(self.stem.weight, nonlinearity="relu")
        pairs = list(pairwise(channels))
        self.blocks = nn.Sequential(*(Block(inputs, outputs, len(pairs)) for inputs, outputs in pairs))
        self.head = nn.Linear(64, classes)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(functional.relu(self.stem(x))).mean(dim=(2, 3)))


def resnet56(classes: int, *, seed: int) -> nn.Module:
    """Return a `ResNet56`, its weights fixed by `seed`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ResNet56(classes)


def imagenet_resnet(name: str, *, classes: int = 1000) -> nn.Module:
    """Return torchvision's "resnet18" or "resnet50", untrained, for the paper's table 2."""
    if name not in ("resnet18", "resnet50"):
        raise ValueError(f"unknown network {name!r}; there is: resnet18, resnet50")
    try:
        from torchvision import models
    except (ImportError, RuntimeError) as error:
        # A torchvision built for another torch raises RuntimeError.
        raise ImportError(
            f"{name} needs the torchvision that belongs to your torch ({error}): pip install torchvision"
        ) from error
    return getattr(models, name)(num_classes=classes)
