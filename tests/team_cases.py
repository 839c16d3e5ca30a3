"""What the processes of tests/test_team.py do: one run of table 2 on small images, together."""

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from experiment_cases import silent
from imagenet_cases import TINY, Net

from bitempered import cli
from bitempered.experiments import imagenet, networks, team
from bitempered.experiments.checkpoints import Checkpoint
from bitempered.experiments.recipes import table2


def train(rank, world, folder, out, epochs=3):
    """The metrics and final weights of the bi-tempered run in float64; checkpoints stay in `out`."""
    torch.set_default_dtype(torch.float64)
    networks.imagenet_resnet = lambda name, *, classes: Net(classes)
    if dist.is_initialized():
        team._current = team.Team(rank, world, together=True)
    data = imagenet.read_folder(Path(folder), 16, None)
    run = imagenet.ImagenetRun(TINY.training, TINY.losses[1], 1, data, torch.device("cpu"))
    checkpoint = Checkpoint.of(Path(out), "run", [{"of": "this test"}])
    if epochs < 3:  # stop early, as if interrupted
        run.training = replace(run.training, epochs=epochs)
    metrics = run.train(checkpoint, silent)
    return {"metrics": metrics, "weights": run.learner.network.state_dict()}


def first_alone(rank, world):
    """What `share` gives each process, and what it raises."""
    us = team.Team(rank, world, together=True)
    calls = []

    def broken():
        raise ValueError("for all")

    shared = us.share(lambda: calls.append(rank) or "from the first")
    try:
        us.share(broken)
    except ValueError as error:
        said = str(error)
    return shared, calls, said, us.part(list(range(10))), us.add(torch.ones(2))


def main(kill_after, *options):
    """`bitempered reproduce table2` with small networks; the last process kills itself after so many steps."""
    networks.imagenet_resnet = lambda name, *, classes: Net(classes)
    table2.TABLE2 = {"resnet18": replace(TINY, seeds=(0,))}
    update, steps = imagenet.Learner.update, []

    def counted(self, rate):
        steps.append(rate)
        if len(steps) == int(kill_after) and os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
            os.kill(os.getpid(), signal.SIGKILL)
        update(self, rate)

    imagenet.Learner.update = counted
    sys.argv = ["bitempered", *options]
    cli.main()


if __name__ == "__main__":
    main(*sys.argv[1:])
