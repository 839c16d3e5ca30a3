"""What commands print: their progress, as a bar on a terminal and lines elsewhere, and all of it where little fits."""

import errno
import io
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["ProgressLines", "printing", "progress_bar"]


@contextmanager
def printing() -> Iterator[None]:
    """Print what an encoding lacks as question marks, and end with one line if the output cannot be written.

    A reader that stops reading, as `head` does, needs no line.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except OSError as error:
        if error.errno != errno.EPIPE:
            print(f"bitempered: cannot print the output: {error}", file=sys.stderr)
        os._exit(1)  # the end of Python would try to write the rest again


@contextmanager
def progress_bar() -> Iterator[Callable[[int, int, str], None]]:
    """Show a progress bar on a terminal, and lines elsewhere; call it with work done, total, and what is running."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    terminal = Console(stderr=True)
    if not terminal.is_terminal:
        yield ProgressLines()
        return
    columns = (BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=terminal, transient=True) as bar:
        task = bar.add_task("starting")
        yield lambda done, total, text: bar.update(task, completed=done, total=total, description=text)


class ProgressLines:
    """Prints a line of progress every few seconds, and after a minute every half minute."""

    def __init__(self) -> None:
        self.printed = time.monotonic()
        self.first: tuple[float, int] | None = None  # the time of the first call, and the work done by then

    def __call__(self, done: int, total: int, text: str) -> None:
        now = time.monotonic()
        if self.first is None:
            self.first = now, done
        started, before = self.first
        if now - self.printed < (5 if now - started < 60 else 30):
            return
        self.printed = now
        left = f", about {in_minutes((now - started) * (total - done) / (done - before))} left" if done > before else ""
        print(f"{done / total:4.0%}{left}: {text}", file=sys.stderr, flush=True)


def in_minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
