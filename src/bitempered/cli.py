"""The command `bitempered`: parses, calls, prints."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

NEEDS = 'this command needs the experiments extra: pip install "bitempered[experiments]"'

try:
    import typer
except ModuleNotFoundError as missing:
    raise SystemExit(f"bitempered: {missing}; {NEEDS}") from None

__all__ = ["main"]

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def bitempered() -> None:
    """The robust bi-tempered logistic loss: experiments from the command line."""


# The defaults are the recipe's, repeated (a test compares them) so that --help need not import torch.
@app.command()
def compare(
    dataset: Annotated[str, typer.Option(help="What to train on.")] = "digits",
    noise: Annotated[
        str, typer.Option(help="Fractions of wrong labels, separated by commas.")
    ] = "0,0.1,0.2,0.3,0.4,0.5",
    t1: Annotated[float, typer.Option(help="Temperature of the loss, in [0, 2).")] = 0.2,
    t2: Annotated[float, typer.Option(help="Temperature of the softmax, at least t1.")] = 1.2,
    seeds: Annotated[int, typer.Option(help="Runs per noise level and loss.")] = 5,
    epochs: Annotated[int, typer.Option(help="Passes over the training rows.")] = 150,
    out: Annotated[Path, typer.Option(help="Folder for rows, table and figure.")] = Path("results/compare"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON instead of the table.")] = False,
) -> None:
    """Train the logistic and the bi-tempered loss on noisy labels and compare them.

    Writes compare.jsonl (one row per run), compare.md and compare.png. The same command again
    reuses the runs that are already in compare.jsonl.
    """
    try:
        from rich.console import Console

        from bitempered.experiments import report
        from bitempered.experiments.compare import Comparison, run
        from bitempered.experiments.files import BadRows, write_atomically
    except ModuleNotFoundError as missing:
        fail(f"{missing}; {NEEDS}", 1)

    try:
        levels = tuple(float(level) for level in noise.split(","))
    except ValueError:
        fail(f"--noise must be numbers separated by commas, such as 0,0.2,0.4; got {noise!r}", 2)
    try:
        recipe = Comparison(dataset, levels, t1, t2, seeds, epochs)
    except ValueError as error:
        fail(str(error), 2)

    rows_file = out / "compare.jsonl"
    try:
        out.mkdir(parents=True, exist_ok=True)
        with progress_bar() as show:
            rows = run(recipe, rows_file, show)
        write_atomically(out / "compare.md", report.markdown(recipe, rows).encode())
        write_atomically(out / "compare.png", report.figure(recipe, rows))
    except KeyboardInterrupt:
        fail(f"stopped; finished runs are in {rows_file} and the same command goes on from there", 130)
    except OSError as error:
        fail(f"cannot use the folder {out}: {error}", 1)
    except BadRows as error:
        fail(str(error), 1)

    if as_json:
        print(json.dumps(rows, indent=1))
    else:
        Console().print(report.table(recipe, rows))
        print(f"Written to {out}: compare.md, compare.png and compare.jsonl (delete it to train again)")


@app.command()
def reproduce(
    figure: Annotated[str, typer.Argument(help="What to draw: figure1 or figure2.")],
    out: Annotated[Path, typer.Option(help="Folder for the figure.")] = Path("results/figures"),
) -> None:
    """Draw a figure of the paper.

    Figure 1: log_t, exp_t, and the loss of two classes for several temperatures. Figure 2: a small net on
    noisy labels in the plane, trained here in about a minute; figure2.jsonl and figure2.md say how well.
    """
    try:
        from bitempered.experiments import figure2
        from bitempered.experiments.figures import FIGURES, png
        from bitempered.experiments.files import write_atomically, write_rows
    except ModuleNotFoundError as missing:
        fail(f"{missing}; {NEEDS}", 1)

    known = [*FIGURES, "figure2"]
    if figure not in known:
        fail(f"unknown figure {figure!r}; there is: {', '.join(known)}", 2)
    path = out / f"{figure}.png"
    try:
        out.mkdir(parents=True, exist_ok=True)
        if figure == "figure2":
            recipe = figure2.Recipe()
            with progress_bar() as show:
                rows, panels = figure2.run(recipe, show)
            drawing = figure2.draw(recipe, rows, panels)
            write_rows(out / "figure2.jsonl", rows)
            write_atomically(out / "figure2.md", figure2.markdown(recipe, rows).encode())
        else:
            drawing = FIGURES[figure]()
        write_atomically(path, png(drawing))
    except KeyboardInterrupt:
        fail("stopped; nothing was written", 130)
    except OSError as error:
        fail(f"cannot use the folder {out}: {error}", 1)
    print(f"Written to {path}")


@contextmanager
def progress_bar() -> Iterator[Callable[[int, int, str], None]]:
    """A bar on the terminal, none where there is no terminal: call it with work done, work in all, what is running."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    terminal = Console(stderr=True)
    with Progress(*columns, console=terminal, transient=True, disable=not terminal.is_terminal) as bar:
        task = bar.add_task("starting")
        yield lambda done, total, text: bar.update(task, completed=done, total=total, description=text)


def fail(message: str, code: int) -> NoReturn:
    print(f"bitempered: {message}", file=sys.stderr)
    raise typer.Exit(code)


def main() -> None:
    app(prog_name="bitempered")


if __name__ == "__main__":
    main()
