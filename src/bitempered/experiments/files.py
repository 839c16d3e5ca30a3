"""Result files that are never half-written, even if several processes write them and some are killed."""

import fcntl
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from glob import escape
from io import FileIO
from pathlib import Path
from typing import Any

__all__ = [
    "DEFAULTS_OF_OLD_ROWS",
    "BadRows",
    "Row",
    "append_rows",
    "lock",
    "read_rows",
    "stopped",
    "value",
    "write_atomically",
    "write_rows",
]

WAIT_SECONDS = 0.05  # between two looks at a lock
Row = dict[str, Any]  # one result, with everything it depends on
# The settings of old rows that do not name them.
DEFAULTS_OF_OLD_ROWS: Row = {
    "schedule": None,
    "rescale": False,
    "smoothing": 0.0,
    "test_file": None,
    "clip": None,
    "clean_rows": None,
}


def value(row: Row, name: str) -> Any:
    """Return a value of a row, or the setting of an old row that does not name it."""
    return row.get(name, DEFAULTS_OF_OLD_ROWS.get(name))


class BadRows(Exception):
    """A file of rows holds something else."""


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file, making its folder, so that `path` holds either its old content or all of the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o644)  # mkstemp's files are private; results are for sharing
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)  # it is missing if somebody deleted the folder
        raise


@contextmanager
def open_locked(path: Path, *, on_wait: Callable[[], object] | None = lambda: None) -> Iterator[FileIO | None]:
    """Lock and open a file, creating it if necessary.

    While another process holds it, `on_wait` is called again and again; without it, None is yielded at once. The lock
    ends with the process, even if it is killed.
    """
    while True:
        with path.open("ab+", buffering=0) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if on_wait is None:
                    yield None
                    return
                on_wait()
                time.sleep(WAIT_SECONDS)
                continue
            if os.fstat(file.fileno()).st_nlink:  # else its last holder removed it while this process waited
                yield file
                return


@contextmanager
def lock(folder: Path, name: str, on_wait: Callable[[], object] | None) -> Iterator[bool]:
    """Let one process at a time make the files `name`-* in a folder; yield whether it is this one.

    `on_wait` is that of `open_locked`.
    """
    path = folder / f".{name}.lock"
    with open_locked(path, on_wait=on_wait) as file:
        if file is None:
            yield False
            return
        try:
            for leftover in folder.glob(f".{escape(name)}-*"):  # from a process that was killed while writing
                leftover.unlink()
            yield True
        finally:
            path.unlink(missing_ok=True)


def stopped(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder and below it that no process is using."""
    unused = []
    for path in sorted(folder.glob("**/*.checkpoint")):
        with lock(path.parent, path.name.rpartition("-")[0], None) as held:
            if held:
                unused.append(path)
    return unused


def write_rows(path: Path, rows: list[Row]) -> None:
    """Write rows as JSON lines."""
    write_atomically(path, encode(rows))


def append_rows(path: Path, rows: list[Row]) -> None:
    """Append rows to a file, all or none; other processes may do so at the same time."""
    with open_locked(path) as file:
        assert file is not None
        file.seek(0)
        whole = without_torn(file.read())
        file.truncate(len(whole))
        content = memoryview((b"\n" if whole and not whole.endswith(b"\n") else b"") + encode(rows))
        try:
            while content:
                content = content[file.write(content) :]
        except BaseException:
            file.truncate(len(whole))
            if not whole:
                path.unlink()
            raise


def read_rows(path: Path) -> list[Row]:
    """Read the rows of a file; there are none if it does not exist yet."""
    if not path.exists():
        return []
    rows = []
    for number, line in enumerate(without_torn(path.read_bytes()).splitlines(), start=1):
        if (row := decode(line)) is None:
            raise BadRows(
                f"{path} is not a file of results: line {number} is not a JSON object; "
                "move it away or choose another folder"
            )
        rows.append(row)
    return rows


def without_torn(content: bytes) -> bytes:
    """Drop an incomplete last row, left by a process that was killed while writing."""
    start = content.rfind(b"\n") + 1
    last = content[start:]
    return content[:start] if last.startswith(b"{") and decode(last) is None else content


def encode(rows: list[Row]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def decode(line: bytes) -> Row | None:
    """Return the row in a line, or None if it holds something else."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None
