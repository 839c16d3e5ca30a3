"""What the processes of tests/test_fsdp.py do with examples/fsdp_text.py, in float64."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from bitempered.torch import bi_tempered_logistic_loss

sys.path.append(str(Path(__file__).parent.parent / "examples"))
import fsdp_text as example

STEPS = 4
WEIGHT = torch.linspace(0.1, 3, example.TOPICS, dtype=torch.float64)


def batches():
    """Words and tags of steps: some padding, and the whole first quarter, which is a process of four."""
    draw = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        words = torch.randint(example.WORDS, (22, example.LENGTH), generator=draw)
        tags = torch.randint(example.TOPICS, (22, example.LENGTH), generator=draw)
        tags[torch.rand(tags.shape, generator=draw) < 0.3] = example.IGNORED
        tags[: 22 // 4] = example.IGNORED
        yield words, tags


def start():
    torch.manual_seed(0)
    return example.Transformer(16).double()


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=1e-2)


class Replicated(DistributedDataParallel):
    def set_requires_gradient_sync(self, wanted):
        self.require_backward_grad_sync = wanted  # what no_sync() sets


def whole(model):
    model = model.module if isinstance(model, Replicated) else model
    return {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in model.state_dict().items()}


def steps(rank, world, kind, weight):
    """The losses of steps on uneven parts of each batch, and the weights after them."""
    model = start()
    if kind == "ddp":
        model = Replicated(model)
    else:
        for part in (*model.layers, model):
            fully_shard(part)
    optimizer, losses = adam(model), []
    for batch in batches():
        first, last = (22 * i * i // world**2 for i in (rank, rank + 1))  # of different sizes
        first = 0 if rank == 0 else max(first, 22 // 4)
        last = max(last, 22 // 4)
        parts = list(zip(*(x[first:last].tensor_split([2]) for x in batch), strict=True))  # one may be empty
        losses.append(example.step(model, optimizer, parts, 0.5, 1.3, weight=weight).item())
    return losses, whole(model)


def reference(weight):
    """The same in one process, by one mean over each batch."""
    model = start()
    optimizer, losses = adam(model), []
    for words, tags in batches():
        loss = bi_tempered_logistic_loss(model(words), tags.flatten(), 0.5, 1.3, weight=weight)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def train(rank, world, folder, epochs):
    """The example itself, stopped after so many of three epochs; its weights and accuracy."""
    torch.set_default_dtype(torch.float64)
    example.default = lambda topics, _: default(topics, 3)
    model, accuracy = example.train(Path(folder), "cpu", epochs=epochs)
    assert dist.get_world_size() == world
    return whole(model), accuracy


default = example.default
