"""Learn the temperatures on a small clean validation set, while training on digits of which 40 % are labelled wrong.

A training step with temperatures (t1, t2) leads to new weights, and these to a loss on clean examples. Its gradient in
the temperatures says how they should have been: a one-step meta-gradient. The accuracies are those of one seed and 500
test digits: a point more or less says nothing, and temperatures near (0.8, 1.2) are as good here as those learnt.

pip install torch scikit-learn
"""

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.func import functional_call

from bitempered.noise import symmetric
from bitempered.torch import LearnableTemperatures, bi_tempered_logistic_loss

RATE, CLEAN = 0.3, 100  # of the network's SGD; clean examples


def data() -> list[Tensor]:
    """Pixels and labels: for training (noisy), for the temperatures (few, clean), and for the test (clean)."""
    pixels, labels = load_digits(return_X_y=True)
    x, x_test, y, y_test = train_test_split(pixels / 16, labels, test_size=500, random_state=0)
    noisy = symmetric(y[CLEAN:], 0.4, rng=np.random.default_rng(0), num_classes=10)
    arrays = x[CLEAN:], noisy, x[:CLEAN], y[:CLEAN], x_test, y_test
    return [torch.as_tensor(a, dtype=torch.float32 if a.ndim == 2 else torch.int64) for a in arrays]


def train(t1: float, t2: float, epochs: int, learn: bool) -> tuple[float, float, float]:
    """Return the last temperatures and the test accuracy."""
    x, y, x_clean, y_clean, x_test, y_test = data()
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    temperatures = LearnableTemperatures(t1, t2)
    optimizer = torch.optim.Adam(temperatures.parameters(), lr=0.02)
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(128):
            weights = dict(network.named_parameters())
            now = temperatures() if learn else (t1, t2)
            loss = bi_tempered_logistic_loss(network(x[batch]), y[batch], *now, rescale=True)
            gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=learn)
            after = {name: w - RATE * g for (name, w), g in zip(weights.items(), gradients, strict=True)}
            if learn:  # cross-entropy: a yardstick that does not move with the temperatures
                optimizer.zero_grad()
                clean = F.cross_entropy(functional_call(network, after, (x_clean,)), y_clean)
                clean.backward(inputs=list(temperatures.parameters()))
                optimizer.step()
            network.load_state_dict(after)
    accuracy = (network(x_test).argmax(1) == y_test).float().mean()
    return *(torch.as_tensor(t).item() for t in now), accuracy.item()


def main(epochs: int = 10) -> dict[str, tuple[float, float, float]]:
    runs = {"cross-entropy": (1.0, 1.0, False), "constant": (0.8, 1.2, False), "learnt": (0.8, 1.2, True)}
    results = {name: train(t1, t2, epochs, learn) for name, (t1, t2, learn) in runs.items()}
    for name, (t1, t2, accuracy) in results.items():
        print(f"{name:13}  t1 = {t1:.2f}  t2 = {t2:.2f}  accuracy on clean test labels {accuracy:.1%}")
    return results


if __name__ == "__main__":
    main()
