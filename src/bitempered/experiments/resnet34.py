"""The ResNet-34 of the noisy-label literature: a 3 x 3 first convolution, batch normalisation, images of 32 x 32."""

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["resnet34"]


class Block(nn.Module):
    """Two 3 x 3 convolutions and a shortcut, which is a 1 x 1 convolution where the shape changes."""

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
    """Stages of 3, 4, 6 and 3 blocks with `width` to 8 `width` channels; 21.3 million weights at 64.

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
