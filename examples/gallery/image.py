"""Images: a small convolutional net on handwritten digits, 40 % of the training labels wrong.

python examples/gallery/image.py figure.png        (pip install torch scikit-learn matplotlib)
"""

import sys

import curves
import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

from bitempered.noise import symmetric
from bitempered.schedules import default
from bitempered.torch import BiTemperedLogisticLoss

images, digits = load_digits(return_X_y=True)
images = (images / 16).reshape(-1, 1, 8, 8).astype(np.float32)
x, x_test, clean, y_test = map(torch.as_tensor, train_test_split(images, digits, test_size=500, random_state=0))
y = torch.as_tensor(symmetric(clean.numpy(), 0.4, rng=np.random.default_rng(0), num_classes=10))


def train(criterion, schedule, epochs):
    """Return the net and its accuracy on clean test labels after each epoch."""
    torch.manual_seed(0)
    convolutions = nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()
    net = nn.Sequential(*convolutions, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 10))
    optimizer, accuracies = torch.optim.Adam(net.parameters(), lr=3e-3), []
    for epoch in range(epochs):
        criterion.t1, criterion.t2 = schedule(epoch)  # which cross-entropy does not look at
        for batch in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            criterion(net(x[batch]), y[batch]).backward()
            optimizer.step()
        accuracies.append((net(x_test).argmax(1) == y_test).float().mean().item())
    return net, accuracies


def main(figure=None, epochs=60):
    losses = {"cross-entropy": nn.CrossEntropyLoss(), "bi-tempered": BiTemperedLogisticLoss()}
    runs = {name: train(loss, default(10, epochs), epochs) for name, loss in losses.items()}
    canvas, panels = plt.subplot_mosaic("AAAABCD\nAAAAEFG", figsize=(10, 3.6), layout="constrained")
    accuracies = {name: by_epoch for name, (_, by_epoch) in runs.items()}
    last = curves.draw(panels["A"], accuracies, "digits, 40 % of the training labels wrong")
    for letter, i in zip("BCDEFG", (y != clean).nonzero().flatten(), strict=False):
        said = [net(x[i : i + 1]).argmax().item() for net, _ in runs.values()]
        panels[letter].imshow(x[i, 0].numpy(), cmap="gray_r")
        panels[letter].set_title(f"label {y[i]}\nCE {said[0]}, ours {said[1]}", fontsize=9)
        panels[letter].set_axis_off()
    curves.save(canvas, figure)
    return last


if __name__ == "__main__":
    main(*sys.argv[1:])
