"""Accelerate: a small transformer, trained from scratch on sentences of which 40 % are labelled wrong.

The sentences are drawn from the vocabularies of eight topics, so that nothing is downloaded. A step accumulates the
gradients of several batches, on one process or, under `accelerate launch`, on several. The temperatures follow the
default schedule: cross-entropy at first, robust later.

    pip install torch accelerate
"""

from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from bitempered.noise import symmetric
from bitempered.schedules import default
from bitempered.torch import bi_tempered_logistic_loss, tempered_softmax

TOPICS, WORDS, OWN, LENGTH = 8, 400, 20, 16  # OWN words belong to a topic
ACCUMULATED = 2  # batches in a step


class Transformer(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, TOPICS)

    def forward(self, sentences: Tensor) -> Tensor:
        return self.head(self.layers(self.words(sentences) + self.places).mean(1))


def sentences(count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Words `(count, LENGTH)` and topics: 40 % of the words are among the topic's own, the others among all."""
    topics = rng.integers(TOPICS, size=count)
    rank = rng.random((count, LENGTH)) ** 2  # some words are frequent
    own = WORDS // 2 + topics[:, None] * OWN + (OWN * rank).astype(np.int64)
    return np.where(rng.random((count, LENGTH)) < 0.4, own, (WORDS * rank).astype(np.int64)), topics


def main(epochs: int = 20, seed: int = 0, schedule: Callable[[float], tuple[float, float]] | None = None) -> float:
    rng = np.random.default_rng(seed)
    x, y = sentences(2000, rng)
    x_test, y_test = sentences(1000, rng)
    y = symmetric(y, 0.4, rng=rng, num_classes=TOPICS)

    set_seed(seed)
    accelerator = Accelerator()
    model = Transformer()
    batches = DataLoader(TensorDataset(torch.from_numpy(x), torch.from_numpy(y)), batch_size=32, shuffle=True)
    model, optimizer, batches = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=1e-3), batches)
    schedule = schedule or default(TOPICS, epochs)
    for epoch in range(epochs):
        train(accelerator, model, optimizer, list(batches), *schedule(epoch))
    model.eval()
    with torch.no_grad():
        logits = model(torch.from_numpy(x_test).to(accelerator.device))
    probabilities = tempered_softmax(logits, schedule(epochs)[1])
    accuracy = (probabilities.argmax(1).cpu().numpy() == y_test).mean()
    accelerator.print(f"accuracy on clean test labels {accuracy:.1%}")
    return accuracy


def train(
    accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, batches: list, t1: float, t2: float
) -> None:
    """One epoch. A step's loss is the mean over all its labels, on all processes: batches may differ in size."""
    model.train()
    for first in range(0, len(batches), ACCUMULATED):
        step = batches[first : first + ACCUMULATED]
        labels_of_step = accelerator.gather(torch.tensor(sum(len(y) for _, y in step), device=accelerator.device)).sum()
        for number, (words, labels) in enumerate(step, start=1):
            with accelerator.no_sync(model) if number < len(step) else nullcontext():
                total = bi_tempered_logistic_loss(model(words), labels, t1, t2, reduction="sum")
                accelerator.backward(total / labels_of_step * accelerator.num_processes)  # whose gradients it averages
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
