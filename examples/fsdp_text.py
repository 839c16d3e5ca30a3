"""torchrun and FSDP2: a transformer whose weights are spread over the processes; 40 % of the words are tagged wrong.

Sentences have different lengths, and their padding is ignored. So the processes of a step have different numbers of
tags, and the mean must be over all of them. Sentences and noise follow from the seed: every process draws the same and
takes its part of each batch. If it is stopped, it continues from the last checkpoint in its folder, on any number of
processes.

    pip install torch
    torchrun --nproc-per-node 2 examples/fsdp_text.py FOLDER
"""

import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bitempered.noise import symmetric
from bitempered.schedules import default
from bitempered.torch import bi_tempered_logistic_loss

TOPICS, WORDS, OWN, LENGTH = 8, 400, 20, 16  # OWN words belong to a topic
BATCH, ACCUMULATED = 64, 2  # sentences in a step, and the parts in which a process takes its own
IGNORED = -100  # the tag of padding


class Transformer(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(width, TOPICS)

    def forward(self, sentences: Tensor) -> Tensor:
        x = self.words(sentences) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(x.flatten(0, 1))


def sentences(count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Words and tags `(count, LENGTH)`. A word's tag is the topic of its sentence."""
    topics = rng.integers(TOPICS, size=(count, 1))
    rank = rng.random((count, LENGTH)) ** 2  # some words are frequent
    own = WORDS // 2 + topics * OWN + (OWN * rank).astype(np.int64)
    words = np.where(rng.random((count, LENGTH)) < 0.5, own, (WORDS * rank).astype(np.int64))
    written = np.arange(LENGTH) < rng.integers(4, LENGTH + 1, size=(count, 1))
    return np.where(written, words, 0), np.where(written, topics, IGNORED)


def step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    parts: list[tuple[Tensor, Tensor]],
    t1: float,
    t2: float,
    weight: Tensor | None = None,
) -> Tensor:
    """A step on the mean over all tags of all processes, with class weights if given; returns that mean."""
    weights = torch.ones(TOPICS, device=parts[0][0].device) if weight is None else weight
    divisor = sum(weights[tags[tags != IGNORED]].sum() for _, tags in parts)
    dist.all_reduce(divisor)
    values = []
    for number, (words, tags) in enumerate(parts, start=1):
        model.set_requires_gradient_sync(number == len(parts))  # with DDP: model.no_sync() before the last
        total = bi_tempered_logistic_loss(model(words), tags.flatten(), t1, t2, weight=weight, reduction="sum")
        loss = total / divisor
        (loss * dist.get_world_size()).backward()  # FSDP and DDP average the gradients of processes
        values.append(loss.detach())
    optimizer.step()
    optimizer.zero_grad()
    mean = torch.stack(values).sum()
    dist.all_reduce(mean)
    return mean


def save(folder: Path, epoch: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder / f"epoch-{epoch}")


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The number of epochs of the last checkpoint, which is loaded; 0 if there is none."""
    done = [int(path.parent.name[6:]) for path in folder.glob("epoch-*/.metadata")]  # the file that is written last
    if not done:
        return 0
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder / f"epoch-{max(done)}")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    return max(done)


def train(folder: Path, device: str, epochs: int = 12, seed: int = 0) -> tuple[nn.Module, float]:
    """The trained model and its accuracy on clean tags. The process group must be there."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rng = np.random.default_rng(seed)
    words, tags = sentences(1000, rng)
    words_test, tags_test = (torch.from_numpy(x).to(device) for x in sentences(500, rng))
    tags[tags != IGNORED] = symmetric(tags[tags != IGNORED], 0.4, rng=rng, num_classes=TOPICS)

    torch.manual_seed(seed)
    model = Transformer().to(device)
    mesh = init_device_mesh(torch.device(device).type, (world,))
    for part in (*model.layers, model):
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = default(TOPICS, epochs)
    for epoch in range(load(folder, model, optimizer), epochs):
        order = np.random.default_rng((seed, epoch)).permutation(len(words))
        for batch in np.split(order, range(BATCH, len(order), BATCH)):
            own = np.array_split(batch[rank::world], ACCUMULATED)
            parts = [tuple(torch.from_numpy(x[rows]).to(device) for x in (words, tags)) for rows in own]
            loss = step(model, optimizer, parts, *schedule(epoch))
        save(folder, epoch + 1, model, optimizer)
        if rank == 0:
            print(f"epoch {epoch + 1}: loss of the last step {loss:.4f}", flush=True)
    with torch.no_grad():
        right = model(words_test).argmax(1) == tags_test.flatten()  # each process has all of them: a small test set
    return model, (right.sum() / (tags_test != IGNORED).sum()).item()


def main() -> None:
    cuda = torch.cuda.is_available()
    device = f"cuda:{os.environ['LOCAL_RANK']}" if cuda else "cpu"
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    _, accuracy = train(Path(sys.argv[1]), device)
    if dist.get_rank() == 0:
        print(f"accuracy on clean test tags {accuracy:.1%}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
