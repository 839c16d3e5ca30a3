"""The state of unfinished runs, saved so that an interruption loses little."""

import hashlib
import io
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bitempered.experiments.files import write_atomically
from bitempered.experiments.team import current

__all__ = ["BadCheckpoint", "Checkpoint", "Due", "pack", "unpack"]

DIGEST_BYTES = 32
SAVE_SECONDS = 30  # at least, between two checkpoints: those of three ResNet-34s take half a gigabyte


class BadCheckpoint(Exception):
    """A checkpoint belongs to another run, or is damaged."""


@dataclass(frozen=True)
class Checkpoint:
    """A file that holds the state of runs, and the identity of those runs."""

    path: Path
    identity: str

    @classmethod
    def of(cls, folder: Path, name: str, runs: list[dict[str, Any]]) -> "Checkpoint":
        """Return the checkpoint of these runs; its name has a hash of their identity, so no other run uses it."""
        identity = json.dumps(runs)
        key = hashlib.sha256(identity.encode()).hexdigest()[:12]
        return cls(folder / f"{name}-{key}.checkpoint", identity)

    @staticmethod
    def runs_in(path: Path) -> list[dict[str, Any]]:
        """Return the runs that a file holds the state of; none if it is damaged."""
        try:
            runs: list[dict[str, Any]] = json.loads(unpack(path.read_bytes(), torch.device("cpu"))["identity"])
        except Exception:  # as in `load`
            return []
        return runs

    def save(self, state: dict[str, Any]) -> None:
        """Save tensors, numbers, text, and lists and dictionaries of them. Only a process that `writes` does so."""
        if current().writes:
            write_atomically(self.path, pack({"identity": self.identity, **state}))

    def load(self, restore: Callable[[dict[str, Any]], None], device: torch.device) -> None:
        """Pass what was saved to `restore`, if there is a file; an exception from it means that the file is damaged."""
        content = current().share(lambda: self.path.read_bytes() if self.path.exists() else None)
        if content is None:
            return
        try:
            state = unpack(content, device)
            if state["identity"] != self.identity:
                raise BadCheckpoint(f"{self.path} belongs to another run; delete it, or choose another folder")
            restore(state)
        except BadCheckpoint:
            raise
        except Exception as error:  # torch.load can raise anything, such as an OSError for half a file
            raise BadCheckpoint(f"{self.path} is not a checkpoint, or is damaged; delete it to train again") from error


class Due:
    """Decides when to save: after an epoch, at most every `SAVE_SECONDS`."""

    def __init__(self) -> None:
        self.saved = time.perf_counter()

    def __call__(self) -> bool:
        now = time.perf_counter()
        due = now - self.saved > SAVE_SECONDS
        if due:
            self.saved = now
        return due


def pack(state: dict[str, Any]) -> bytes:
    """Return the content of a checkpoint: torch's format, then its hash.

    Without the hash torch loads some damaged files without an error.
    """
    content = io.BytesIO()
    torch.save(state, content)
    return content.getvalue() + hashlib.sha256(content.getbuffer()).digest()


def unpack(content: bytes, device: torch.device) -> dict[str, Any]:
    """Return what was packed; raise any exception if the content is damaged."""
    saved, digest = content[:-DIGEST_BYTES], content[-DIGEST_BYTES:]
    if hashlib.sha256(saved).digest() != digest:
        raise ValueError("the hash at the end is not that of the content")
    state: dict[str, Any] = torch.load(io.BytesIO(saved), map_location=device, weights_only=True)
    return state
