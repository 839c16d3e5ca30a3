"""One training loop, the same for every loss."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bitempered.experiments.data import Part

__all__ = ["Outcome", "train"]

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Outcome:
    """Accuracies in [0, 1] of one run, at its last epoch and at its chosen one.

    The chosen epoch is the first with the highest validation accuracy; the test rows have no say.
    """

    train_last: float
    validation_last: float
    test_last: float
    chosen_epoch: int
    validation_chosen: float
    test_chosen: float


def train(
    model: nn.Module,
    loss: Loss,
    parts: tuple[Part, Part, Part],
    *,
    epochs: int,
    batch_size: int,
    learning_rate: float,
    seed: int,
    on_epoch: Callable[[int, float], None],
) -> Outcome:
    """Train `model` with Adam on the first of `parts`, choose an epoch on the second, test on the third.

    `on_epoch(epoch, validation_accuracy)` is called after each epoch, counted from 1; `seed`
    fixes the order of the batches.
    """
    (x, y), validation, test = ((torch.from_numpy(features), torch.from_numpy(labels)) for features, labels in parts)
    order = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate, fused=True)
    chosen_epoch, validation_chosen, test_chosen = 0, -1.0, 0.0
    for epoch in range(1, epochs + 1):
        for rows in torch.randperm(len(x), generator=order).split(batch_size):
            optimizer.zero_grad()
            loss(model(x[rows]), y[rows]).backward()
            optimizer.step()
        validation_last = accuracy(model, *validation)
        if validation_last > validation_chosen:
            chosen_epoch, validation_chosen = epoch, validation_last
            test_chosen = accuracy(model, *test)
        on_epoch(epoch, validation_last)
    return Outcome(
        train_last=accuracy(model, x, y),
        validation_last=validation_last,
        test_last=accuracy(model, *test),
        chosen_epoch=chosen_epoch,
        validation_chosen=validation_chosen,
        test_chosen=test_chosen,
    )


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the fraction of rows whose largest logit is the label's.

    Tempered softmax and softmax have the same argmax, so this serves every loss.
    """
    return (model(x).argmax(dim=1) == y).sum().item() / len(y)
