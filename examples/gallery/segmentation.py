"""Segmentation, logits (N, C, H, W): a map from a few labelled pixels, 30 % of them wrong; the others are ignored.

python examples/gallery/segmentation.py figure.png        (pip install torch matplotlib)
"""

import sys

import curves
import torch
from torch import nn

from bitempered.schedules import default
from bitempered.torch import BiTemperedLogisticLoss

SIZE, NOTHING = 64, 255


def data():
    """Places (1, 128, H, W), the labels that someone gave (1, H, W), and the right ones: a wood, a lake, a road."""
    random = torch.Generator().manual_seed(0)
    x, y = torch.meshgrid(*[torch.linspace(-1, 1, SIZE)] * 2, indexing="xy")
    truth = ((x + y / 2 > 0.45) & (y < 0.6)).long()[None]
    truth[0][(x + 0.35) ** 2 + (y + 0.2) ** 2 < 0.16] = 2
    truth[0][(y - 0.55 - 0.2 * torch.sin(4 * x)).abs() < 0.1] = 3
    wrong, unseen = torch.rand(2, 1, SIZE, SIZE, generator=random) < torch.tensor([0.3, 0.6]).view(2, 1, 1, 1)
    labels = (truth + wrong * torch.randint(1, 4, truth.shape, generator=random)) % 4
    labels[unseen] = NOTHING
    waves = torch.stack([x, y]).flatten(1).T @ (3 * torch.randn(2, 64, generator=random))
    return torch.cat([waves.sin(), waves.cos()], 1).T.reshape(1, 128, SIZE, SIZE), labels, truth


def train(criterion, steps, places, labels):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(128, 128, 1), nn.ReLU(), nn.Conv2d(128, 128, 1), nn.ReLU(), nn.Conv2d(128, 4, 1))
    optimizer, schedule = torch.optim.Adam(net.parameters(), lr=1e-3), default(4, steps)
    for step in range(steps):
        criterion.t1, criterion.t2 = schedule(step)  # which cross-entropy does not look at
        optimizer.zero_grad()
        criterion(net(places), labels).backward()
        optimizer.step()
    return net(places).argmax(1)


def main(figure=None, steps=300):
    places, labels, truth = data()
    shown, right = {"the map": truth, "its labels": labels}, {}
    for name, loss in {"cross-entropy": nn.CrossEntropyLoss, "bi-tempered": BiTemperedLogisticLoss}.items():
        said = train(loss(ignore_index=NOTHING), steps, places, labels)
        right[name] = (said == truth).float().mean().item()
        shown[f"{name}: {right[name]:.1%} right"] = said
        print(f"{name}: {right[name]:.1%} of the pixels right")
    curves.maps({title: classes[0] for title, classes in shown.items()}, NOTHING, figure)
    return right


if __name__ == "__main__":
    main(*sys.argv[1:])
