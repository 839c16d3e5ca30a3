"""The optimisers of `train`, by name, with the learning rates to search. To add one, write a step and add an entry."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

__all__ = ["MOMENTUM", "OPTIMIZERS"]

MOMENTUM = 0.9

# Takes the gradient, the numbers kept for each weight, the momentum and the number of steps before; changes what is
# kept, and returns the change of the weights at a learning rate of 1.
Step = Callable[[Tensor, list[Tensor], float, Tensor], Tensor]


@dataclass(frozen=True)
class OptimizerEntry:
    """An optimiser: its step, how to write it in PyTorch, and its usual learning rates."""

    step: Step
    kept: int  # how many numbers it keeps per weight
    rates: tuple[float, ...]  # what `compare` tries
    searched: tuple[float, float, str]  # where `tune` searches
    first: tuple[float, ...]  # what `tune` begins with
    python: str  # its constructor in torch.optim, with `{rate}` and `{momentum}`


def adam(grad: Tensor, kept: list[Tensor], momentum: float, count: Tensor) -> Tensor:
    """Adam as published: 0.9, 0.999, 1e-8."""
    first, second = kept
    m, v = 0.9 * first + 0.1 * grad, 0.999 * second + 0.001 * grad * grad
    change = m / (1 - 0.9 ** (count + 1)) / ((v / (1 - 0.999 ** (count + 1))).sqrt() + 1e-8)
    first.copy_(m)
    second.copy_(v)
    return change


def adadelta(grad: Tensor, kept: list[Tensor], momentum: float, count: Tensor) -> Tensor:
    """AdaDelta with TensorFlow's constants, as in the paper: 0.95, 1e-8."""
    first, second = kept
    m = 0.95 * first + 0.05 * grad * grad
    change: Tensor = (second + 1e-8).sqrt() / (m + 1e-8).sqrt() * grad
    v = 0.95 * second + 0.05 * change * change
    first.copy_(m)
    second.copy_(v)
    return change


def sgd(grad: Tensor, kept: list[Tensor], momentum: float, count: Tensor) -> Tensor:
    """SGD with heavy-ball momentum."""
    (velocity,) = kept
    change = momentum * velocity + grad
    velocity.copy_(change)
    return change


OPTIMIZERS = {
    "adam": OptimizerEntry(
        adam, 2, (1e-4, 5e-4, 2e-3, 1e-2), (3e-5, 1e-2, "log"), (1e-3, 3e-4, 1e-4),
        "Adam(model.parameters(), lr={rate:g}",
    ),
    "adadelta": OptimizerEntry(
        adadelta, 2, (0.1, 0.5, 2.0, 10.0), (0.03, 10.0, "log"), (1.0, 0.3, 0.1),
        "Adadelta(model.parameters(), lr={rate:g}, rho=0.95, eps=1e-8",
    ),
    "sgd": OptimizerEntry(
        sgd, 1, (0.01, 0.03, 0.1, 0.3), (1e-3, 0.3, "log"), (0.05, 0.015, 0.005),
        "SGD(model.parameters(), lr={rate:g}, momentum={momentum:g}",
    ),
}  # fmt: skip
