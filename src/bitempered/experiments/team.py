"""The processes that `torchrun` starts for one command.

They train one network together, each on its part of every batch (`join(..., together=True)`), or they only share the
jobs of a folder, like processes that are started one by one. The first one writes files and prints.

A process that dies takes the others with it: they raise `Lost`, at the latest after a timeout. Checkpoints do not
depend on the number of processes: a different number can continue.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Lost", "Team", "current", "join", "neighbours"]

TIMEOUT = "BITEMPERED_TIMEOUT"  # in the environment: seconds to wait for another process
T = TypeVar("T")


class Lost(Exception):
    """Another process of the team has stopped."""


@dataclass(frozen=True)
class Team:
    """This process among those that train together. Alone it is a team as well, and sends nothing."""

    rank: int = 0
    size: int = 1
    together: bool = False

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def writes(self) -> bool:
        """Whether this process writes what its job makes: the first does if they train together, else each does."""
        return self.first or not self.together

    def part(self, items: list[T]) -> list[T]:
        """The items of this process: consecutive ones, so that the parts in the order of ranks make up all items."""
        if not self.together:
            return items
        return items[len(items) * self.rank // self.size : len(items) * (self.rank + 1) // self.size]

    def add(self, x: Tensor) -> Tensor:
        """The sum of the tensors of all processes, in place."""
        if self.together and self.size > 1:
            with raising_lost(self):
                dist.all_reduce(x)
        return x

    def share(self, make: Callable[[], T]) -> T:
        """Call `make` in the first process only; return its result, or raise its exception, in every process."""
        if not self.together or self.size == 1:
            return make()
        made: list[object] = [None, None]
        if self.first:
            try:
                made = [make(), None]
            except Exception as error:
                made = [None, error]
        with raising_lost(self):
            dist.broadcast_object_list(made, device=torch.device("cuda") if dist.get_backend() == "nccl" else None)
        if isinstance(made[1], Exception):
            raise made[1]
        return made[0]  # type: ignore[return-value]


@contextmanager
def raising_lost(team: Team) -> Iterator[None]:
    """Raise `Lost` for any error of torch.distributed."""
    try:
        yield
    except RuntimeError as error:
        raise Lost(
            f"process {team.rank} of {team.size} has lost the others: one was stopped, failed (see its message), or did"
            f" not answer in time ({TIMEOUT} seconds in the environment)"
        ) from error


_current = Team()


def current() -> Team:
    """The team that this process has joined; without one, itself."""
    return _current


@contextmanager
def join(device: str, *, together: bool) -> Iterator[Team]:
    """Join the team that torchrun's environment describes, if there is one, and use this process's GPU."""
    global _current
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield _current
        return
    before, team = _current, Team(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), together)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if together:
        seconds = timedelta(seconds=float(os.environ.get(TIMEOUT, "1800")))
        with raising_lost(team):
            dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=seconds)
    _current = team
    try:
        yield team
    finally:
        _current = before
        if together:
            dist.destroy_process_group()


def neighbours() -> int:
    """The number of processes of the team on this machine, with which it shares its cores."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if _current.size > 1 else 1
