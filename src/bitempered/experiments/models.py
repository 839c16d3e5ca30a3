"""The networks that the experiments train."""

import torch
from torch import nn

__all__ = ["mlp"]


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
