"""Runs: their identity, their provenance, and making those that a folder lacks.

A run has a row of results. It is not repeated while a row with the same identity is in the folder: the same settings,
data, version of this package and `RESULTS`. The row also records commit, device and versions of other packages, for
information.
"""

import logging
import platform
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import partial
from glob import escape
from pathlib import Path
from typing import Any

import torch

from bitempered import __version__
from bitempered.experiments.checkpoints import Checkpoint
from bitempered.experiments.files import DEFAULTS_OF_OLD_ROWS, Row, append_rows, lock, read_rows
from bitempered.experiments.team import current

__all__ = [
    "RESULTS",
    "Job",
    "Progress",
    "Row",
    "Tell",
    "commit",
    "find",
    "identity",
    "make",
    "measure_once",
    "one_thread",
    "plain",
    "provenance",
    "today",
]

# Raise it whenever training changes: rows with another number, or none, are rendered but never reused.
RESULTS = 1
ARCHIVED = "$Format:%H$"  # `git archive` writes the commit here, see .gitattributes

Progress = Callable[[int, int, str], None]  # work done, total work, what is running
Tell = Callable[[int, str], None]  # the same inside a job: work done, what is running


def identity(setting: Row, data: str) -> Row:
    """Return the values that the row of a run must have; `data` is a hash of the data that the run sees."""
    return {**setting, "data": data, "bitempered": __version__, "results": RESULTS}


def plain(settings: Any) -> Row:
    """Return the fields of a dataclass as a row of JSON holds them."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(settings).items()}


def find(rows: list[Row], wanted: Row) -> Row | None:
    """Return the first row that has every wanted value."""
    for row in rows:
        known = DEFAULTS_OF_OLD_ROWS | row
        if all(name in known and known[name] == wanted[name] for name in wanted):
            return row
    return None


@dataclass(frozen=True)
class Job:
    """Runs that are trained together."""

    name: str  # of the lock and of the checkpoints
    runs: list[Row]  # the identity of each
    # Called with the indices of the runs to train, their checkpoints and a progress callback; returns each run's
    # results and metrics by epoch.
    train: Callable[[list[int], list[Checkpoint], Tell], tuple[list[Row], list[Row]]]
    work: int  # progress value of a finished job, the same for all
    separate: bool = False  # a checkpoint for each run; otherwise one for all

    def checkpoints(self, folder: Path, places: Iterable[int]) -> list[Checkpoint]:
        runs = [self.runs[place] for place in places]
        groups = [[run] for run in runs] if self.separate else [runs]
        return [Checkpoint.of(folder, self.name, group) for group in groups]

    def others(self, folder: Path, ours: set[Path]) -> list[Path]:
        """Return the checkpoints of runs that were trained together under this name, except ours."""
        found = [] if self.separate else folder.glob(f"{escape(self.name)}-*.checkpoint")
        return sorted(set(found) - ours)


def make(jobs: Sequence[Callable[[], Job]], folder: Path, name: str, progress: Progress, *, device: str) -> list[Row]:
    """Make the runs whose rows the folder lacks; return the rows of all, job by job.

    `folder` gets `name`.jsonl, a row for each run; curves.jsonl, its metrics by epoch; and checkpoints of unfinished
    runs. Several processes can share a folder: each takes jobs that no other is training, then waits for the rest and
    says so. A job is prepared when its turn comes. In a team that trains together all processes make the same job, and
    the first one keeps the folder.
    """
    team = current()
    rows_file, curves_file = folder / f"{name}.jsonl", folder / "curves.jsonl"
    maker = provenance(device)  # taken now: the source tree may change while this process trains
    done: dict[int, list[Row]] = {}
    queue = [(place, False) for place in range(len(jobs))]
    for place, wait in queue:  # jobs that other processes are training are appended
        job = jobs[place]()
        tell = teller(progress, len(done), len(jobs), job.work)
        if not done:  # after the data has been read, and not again if somebody deletes the folder
            folder.mkdir(parents=True, exist_ok=True)
        waiting = partial(tell, 0, f"waiting for another process, which is training {job.name}")
        with ExitStack() as stack:
            locked = lock(folder, job.name, waiting if wait else None)
            held = team.share(partial(stack.enter_context, locked))
            kept = team.share(partial(read_rows, rows_file))
            missing = [i for i, run in enumerate(job.runs) if find(kept, run) is None]
            if missing and not held:
                queue.append((place, True))
                continue
            checkpoints, everyone = (job.checkpoints(folder, part) for part in (missing, range(len(job.runs))))
            ours = {checkpoint.path for checkpoint in checkpoints + everyone}
            if missing:
                drawn = read_rows(curves_file)  # has ours too if a process was killed between writing curves and rows
                warn_of(path for path in job.others(folder, ours) if not is_finished(path, kept))
                results, curves = job.train(missing, checkpoints, tell)
                runs = [job.runs[i] for i in missing]
                new = [
                    {**run, **maker, **curve}
                    for run, curve in zip(runs, curves, strict=True)
                    if find(drawn, run) is None
                ]
                made = [{**run, **maker, **result, "date": today()} for run, result in zip(runs, results, strict=True)]
                if team.writes:
                    append_rows(curves_file, new)
                    append_rows(rows_file, made)
                kept += made
            if held and team.writes:
                # A process that is killed after writing its rows leaves a checkpoint, named after the runs it made.
                for path in ours.union(path for path in job.others(folder, ours) if is_finished(path, kept)):
                    path.unlink(missing_ok=True)
        done[place] = [row for run in job.runs if (row := find(kept, run)) is not None]
    return [row for place in range(len(jobs)) for row in done[place]]


def measure_once(
    folder: Path, name: str, run: Row, measure: Callable[[], Row], *, device: str, on_wait: Callable[[], object]
) -> Row:
    """Return the row of a run in `name`.jsonl; if there is none, append what `measure` returns.

    One process at a time does so; others call `on_wait` again and again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.jsonl"
    with lock(folder, name, on_wait):
        row = find(read_rows(path), run)
        if row is None:
            row = {**run, **provenance(device), **measure(), "date": today()}
            append_rows(path, [row])
    return row


@contextmanager
def one_thread(wanted: bool = True) -> Iterator[None]:
    """Use one thread, if `wanted`: sums then do not depend on the number of cores."""
    threads = torch.get_num_threads()
    if wanted:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def teller(progress: Progress, done: int, jobs: int, work: int) -> Tell:
    """Progress callback for a job that follows `done` of `jobs` equal jobs."""
    return lambda now, text: progress(done * work + now, jobs * work, text)


def is_finished(checkpoint: Path, rows: list[Row]) -> bool:
    """Whether all runs in a checkpoint have rows."""
    runs = Checkpoint.runs_in(checkpoint)
    return bool(runs) and all(find(rows, run) is not None for run in runs)


def warn_of(checkpoints: Iterable[Path]) -> None:
    for path in checkpoints:
        logging.getLogger(__name__).warning(
            "bitempered: %s belongs to a stopped run with other settings, data or version; this run starts over", path
        )


def provenance(device: str = "cpu") -> Row:
    """Return the code and the machine behind a row. On a CPU the number of threads sets the order of sums."""
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
    """Return the commit of this source tree, or "unknown" outside of git and its archives."""
    here = Path(__file__)
    if not ARCHIVED.startswith("$"):
        return ARCHIVED
    try:
        # An installed copy may lie inside somebody else's repository: ask whether git tracks it.
        git("ls-files", "--error-unmatch", here.name)
        # Only code counts, not results that are being written.
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/*.py", ":/*.c", ":/*.h", ":/*.toml")
        return git("rev-parse", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def git(*command: str) -> str:
    folder = Path(__file__).parent
    done = subprocess.run(["git", *command], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()
