"""Result files that are never half-written."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

__all__ = ["BadRows", "read_rows", "write_atomically", "write_rows"]


class BadRows(Exception):
    """A file of rows holds something else."""


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that `path` holds its old content or all of the new one, never a part."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o644)  # mkstemp's files are private, results are to be shared
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as JSON lines."""
    write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows).encode())


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read rows that `write_rows` wrote; none if there is no such file yet."""
    if not path.exists():
        return []
    rows = []
    # What is not UTF-8 is not JSON either, and is reported as such below.
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise BadRows(
                f"{path} is not a file of results: line {number} is not a JSON object; "
                "move it away or choose another folder"
            )
        rows.append(row)
    return rows
