"""Many classes: 2,000 of them, 40 % of the training labels wrong, and the loss fused with the last layer.

So many classes are learnt slowly: the temperatures are those of the default schedule, but they move later.
python examples/gallery/many_classes.py figure.png        (pip install torch matplotlib)
"""

import sys

import curves
import numpy as np
import torch
from torch import nn

from bitempered.noise import symmetric
from bitempered.schedules import anneal, default
from bitempered.torch import LinearBiTemperedLogisticLoss


def draw(classes, each, seed):
    """Points around a centre for each class, and their classes."""
    centres = torch.randn(classes, 32, generator=torch.Generator().manual_seed(0))
    y = torch.arange(classes).repeat(each)
    around = torch.randn(len(y), 32, generator=torch.Generator().manual_seed(seed))
    return torch.tanh(centres[y] + around / 2), y


def cross_entropy(hidden, weight, target, bias):
    return nn.functional.cross_entropy(nn.functional.linear(hidden, weight, bias), target)


def train(loss, schedule, classes, epochs, x, y, x_test, y_test):
    """Return the accuracy on clean test labels after each epoch."""
    torch.manual_seed(0)
    body, head = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 64)), nn.Linear(64, classes)
    optimizer, accuracies = torch.optim.Adam([*body.parameters(), *head.parameters()], lr=3e-3), []
    for epoch in range(epochs):
        loss.t1, loss.t2 = schedule(epoch)  # which cross-entropy does not look at
        for batch in torch.randperm(len(x)).split(1024):
            optimizer.zero_grad()
            loss(body(x[batch]), head.weight, y[batch], head.bias).backward()  # ours never holds all logits
            optimizer.step()
        accuracies.append((head(body(x_test)).argmax(1) == y_test).float().mean().item())
    return accuracies


def main(figure=None, classes=2000, epochs=20):
    (x, y), test = draw(classes, 10, seed=1), draw(classes, 1, seed=2)
    y = torch.as_tensor(symmetric(y.numpy(), 0.4, rng=np.random.default_rng(0), num_classes=classes))
    schedule = anneal((1.0, 1.0), default(classes, epochs)(epochs), begin=0.3 * epochs, finish=0.6 * epochs)
    losses = {"cross-entropy": cross_entropy, "bi-tempered": LinearBiTemperedLogisticLoss()}
    runs = {name: train(loss, schedule, classes, epochs, x, y, *test) for name, loss in losses.items()}
    return curves.figure(runs, f"{classes:,} classes, 40 % wrong labels", figure)


if __name__ == "__main__":
    main(*sys.argv[1:])
