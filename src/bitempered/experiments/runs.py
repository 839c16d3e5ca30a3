"""Which code made a result, on what, and when."""

import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from bitempered import __version__

__all__ = ["commit", "provenance", "today"]

ARCHIVED = "$Format:%H$"  # `git archive` writes the commit here, see .gitattributes


def provenance(device: str = "cpu") -> dict[str, Any]:
    """Say which code makes a row, on what. On a CPU each number of threads adds in an order of its own."""
    gpu = device.startswith("cuda")
    return {
        "commit": commit(),
        "device": torch.cuda.get_device_name(device) if gpu else f"cpu {platform.machine()}",
        "threads": None if gpu else torch.get_num_threads(),
        "bitempered": __version__,
        "torch": torch.__version__,
    }


def today() -> str:
    return datetime.now(timezone.utc).date().isoformat()


def commit() -> str:
    """Return the commit of this source tree, "unknown" where neither git nor an archive of it says."""
    here = Path(__file__)
    if not ARCHIVED.startswith("$"):
        return ARCHIVED
    try:
        # An installed copy may lie inside somebody else's repository: ask whether git tracks it.
        git("ls-files", "--error-unmatch", here.name)
        # Results that are being written do not make the code another.
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/*.py", ":/*.c", ":/*.toml")
        return git("rev-parse", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def git(*command: str) -> str:
    folder = Path(__file__).parent
    done = subprocess.run(["git", *command], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()
