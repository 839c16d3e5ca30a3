"""Runs a function in several processes that are connected by gloo, and returns what it returns in each."""

import os
import sys
import tempfile
import traceback
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(function, world, *arguments, timeout=300):
    """The results of function(rank, world, *arguments) of each process, in the order of ranks."""
    # Fork from a server that has already imported what all need, which takes seconds. It has computed nothing, so no
    # pool of threads is lost.
    forkserver.set_forkserver_preload(["torch._dynamo", "fsdp_cases", "sharded_cases", "team_cases"])
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        forkserver.ensure_running()
    with tempfile.TemporaryDirectory() as folder:
        given = (function, world, arguments, timeout, folder)
        mp.start_processes(_work, given, nprocs=world, start_method="forkserver")
        return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(world)]


def _work(rank, function, world, arguments, timeout, folder):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
    )
    try:
        torch.save(function(rank, world, *arguments), Path(folder) / f"{rank}.pt")
    except BaseException:
        traceback.print_exc()  # of each process: torch shows only the first
        raise
    finally:
        dist.destroy_process_group()


class counted:
    """A context in which `messages` are the numbers of rows of all all-reduces: (numbers per example, examples)."""

    def __enter__(self):
        self.sizes, self.real = [], dist.all_reduce

        def all_reduce(tensor, *arguments, **options):
            self.sizes.append(tensor.numel())
            return self.real(tensor, *arguments, **options)

        dist.all_reduce = all_reduce
        return self

    def __exit__(self, *_):
        dist.all_reduce = self.real
