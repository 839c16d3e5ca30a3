"""The state of unfinished runs, saved so that an interruption loses little."""

import hashlib
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bitempered.experiments.files import write_atomically

__all__ = ["BadCheckpoint", "Checkpoint"]


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

    def save(self, state: dict[str, Any]) -> None:
        """Save tensors, numbers, text, and lists and dictionaries of them."""
        content = io.BytesIO()
        torch.save({"identity": self.identity, **state}, content)
        write_atomically(self.path, content.getvalue())

    def load(self, restore: Callable[[dict[str, Any]], None], device: torch.device) -> None:
        """Pass what was saved to `restore`, if there is a file; an exception from it means that the file is damaged."""
        if not self.path.exists():
            return
        content = io.BytesIO(self.path.read_bytes())
        try:
            state = torch.load(content, map_location=device, weights_only=True)
            if state["identity"] != self.identity:
                raise BadCheckpoint(f"{self.path} belongs to another run; delete it, or choose another folder")
            restore(state)
        except BadCheckpoint:
            raise
        except Exception as error:  # torch.load can raise anything, such as an OSError for half a file
            raise BadCheckpoint(f"{self.path} is not a checkpoint, or is damaged; delete it to train again") from error
