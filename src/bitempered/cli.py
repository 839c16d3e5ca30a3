"""The command `bitempered`: parses, calls, prints."""

import json
import os
import signal
import sys
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from copy import copy
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Any, NoReturn

from bitempered.experiments import recipes
from bitempered.experiments.files import stopped
from bitempered.experiments.progress import printing, progress_bar
from bitempered.extras import install

NEEDS = {
    extra: f"this command needs more packages: {install(extra)}" for extra in ("experiments", "tune", "playground")
}

try:
    import typer
except ModuleNotFoundError as missing:
    called = "".join(sys.argv[1:2])
    raise SystemExit(f"bitempered: {missing}; {NEEDS.get(called, NEEDS['experiments'])}") from None
except KeyboardInterrupt:
    print("bitempered: stopped", file=sys.stderr)
    raise SystemExit(130) from None

__all__ = ["main"]

OUTPUT = Path("output")  # where commands write, unless told; results has what is committed

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def print_version(wanted: bool) -> None:
    if wanted:
        from bitempered import __version__

        print(f"bitempered {__version__}")
        raise typer.Exit


@app.callback()
def bitempered(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=print_version)
    ] = False,
) -> None:
    """The robust bi-tempered logistic loss: experiments from the command line."""


DATASET = typer.Option(
    help="digits, mnist, fashion-mnist, cifar100 (an unknown name lists all), or the path of a .csv or .parquet file."
)
DATA_DIR = typer.Option(help="Folder with the data set's files; without it, they are downloaded, except ImageNet's.")
NOISE_MODEL = typer.Option(
    help="How labels become wrong: symmetric (over the other classes), symmetric-all (over all classes), pair-flip (to "
    "the next class), class-dependent (some classes are mistaken for others: in digits and mnist 7 for 1, 2 for 7, 5 "
    "for 6, 6 for 5 and 3 for 8, elsewhere half of them at random; --noise is the fraction of their labels), "
    "weak-model (the mistakes of a linear model that learns from 1% of the rows, the surest first) or human (cifar100)."
)
LABEL_COLUMN = typer.Option(help="The column of a table that holds the labels; without it, the one named label.")
DEVICE = typer.Option(help="Where to train: cpu or cuda. Without it, cuda if there is one.")


# The defaults are the recipe's, repeated (a test compares them) so that --help need not import torch.
@app.command()
def compare(
    dataset: Annotated[str, DATASET] = "digits",
    losses: Annotated[
        str,
        typer.Option(
            help="The losses, separated by commas: logistic (cross-entropy), gce:q (generalized cross-entropy), "
            "bi-tempered (with its default schedule), bi-tempered:t1:t2, tsallis:t1:t2, t-logistic:t, sce:alpha:beta, "
            "mae. After the numbers, anneal=BEGIN..FINISH moves the temperatures from (1, 1) between two epochs "
            "(BEGIN..EPOCH..T1..T2..FINISH passes through a pair on the way), and smoothing=0.1 smooths the labels, as "
            "in bi-tempered:0.5:1.5:anneal=15..75:smoothing=0.1. @ fixes the learning rate, as in mae@0.01. An unknown "
            "name lists all losses. By default logistic, gce:0.7, bi-tempered, bi-tempered:0.8:1.2.",
            show_default=False,
        ),
    ] = "logistic,gce:0.7,bi-tempered,bi-tempered:0.8:1.2",
    noise: Annotated[
        str | None,
        typer.Option(
            help="Fractions of labels to make wrong, separated by commas; without it, none in a table of your own, and "
            "0,0.4 in other data."
        ),
    ] = None,
    noise_model: Annotated[str, NOISE_MODEL] = "symmetric",
    network: Annotated[
        str | None,
        typer.Option(
            help="mlp, mnist_cnn, resnet56 or resnet56-wide (an unknown name lists all); without it, one that suits "
            "the data set."
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Runs per noise level and loss.")] = 5,
    epochs: Annotated[
        int | None, typer.Option(help="Passes over the training rows; without it, what suits the data set.")
    ] = None,
    rates: Annotated[
        str | None,
        typer.Option(
            help="Learning rates to try for every loss, separated by commas; a single one is used without a search. "
            "Without this option, four that suit the optimiser."
        ),
    ] = None,
    weight_decay: Annotated[
        float | None, typer.Option(help="The same for every loss; without it, what suits the data set.")
    ] = None,
    label_column: Annotated[str | None, LABEL_COLUMN] = None,
    test: Annotated[
        Path | None,
        typer.Option(
            help="A table with clean labels to test on, with the same columns; without it, a fifth of the table."
        ),
    ] = None,
    data_dir: Annotated[Path | None, DATA_DIR] = None,
    device: Annotated[str | None, DEVICE] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for rows, table and figure; without it, output/compare for digits, and output/compare-NAME "
            "for other data."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON instead of the table.")] = False,
) -> None:
    """Train a network with several losses on noisy labels, and show which predicts best.

    In your own table (--dataset FILE.csv) the labels are used as they are. If
    they are noisy, the labels of the rows set aside for testing are noisy too,
    and accuracy is limited by the share of correct ones. If you have a file
    with clean labels, pass it with --test. In the built-in data sets, training
    and validation labels are made wrong at random (--noise), and the test
    labels are clean.

    Losses need different learning rates. So each loss tries the same few rates
    with two seeds, and keeps the best one on validation labels, at the last and
    the best epoch together. These labels are as noisy as the training labels.
    Every loss has the same number of trials, and none sees a test label. Then
    each loss trains with --seeds other seeds.

    The table shows the accuracy at the last epoch and at the chosen epoch, the
    best on validation labels. An exclamation mark means that a run did not
    learn, or never predicts one of the classes.

    Writes compare.jsonl (one row per run), curves.jsonl (metrics by epoch),
    compare.md, compare.csv, compare.png, and the trials in the folder search.
    If it is stopped, the same command continues; finished runs are kept.
    """
    with packages("experiments"):
        from rich.console import Console

        from bitempered.experiments import cells, compare_report, report
        from bitempered.experiments.recipes import compare as recipe

    with valid_request():
        contenders = tuple(recipe.Contender.parse(loss) for loss in losses.split(","))
        request = recipe.request(
            dataset, contenders, levels=None if noise is None else numbers("noise", noise), seeds=seeds, epochs=epochs,
            rates=None if rates is None else numbers("rates", rates), noise_model=noise_model,
            label_column=label_column, network=network, test_file=None if test is None else str(test),
            data_dir=data_dir, weight_decay=weight_decay,
        )  # fmt: skip
    device = choose_device(device)
    out = out or OUTPUT / ("compare" if dataset == "digits" else f"compare-{Path(dataset).stem}")

    with clear_errors(out):
        with progress_bar() as progress:
            comparison, rows, tried = recipe.run(request, out, progress, device=device)
        report.write(out, compare_report.pages(comparison, rows, tried, cells.curves_of(out, rows)))

    if as_json:
        print(json.dumps(rows, indent=1))
    else:
        console = Console()
        console.print(compare_report.table(comparison, rows))
        print()
        for note in compare_report.notes(comparison, rows, tried):
            print(textwrap.fill(note, min(console.width, 100), subsequent_indent="  ", break_on_hyphens=False))
        trained = "compare.jsonl and search" if tried else "compare.jsonl"
        print(f"Written to {out}: compare.md, compare.csv, compare.png; {trained} (delete to train again)")


@app.command()
def tune(
    dataset: Annotated[str, DATASET] = "digits",
    loss: Annotated[str, typer.Option(help="bi-tempered, or logistic (cross-entropy).")] = "bi-tempered",
    trials: Annotated[int, typer.Option(help="Settings to try, including those of earlier and other processes.")] = 50,
    noise: Annotated[
        float | None,
        typer.Option(
            help="Fraction of labels to make wrong; without it, none in a table of your own, and 0.4 in other data."
        ),
    ] = None,
    noise_model: Annotated[str, NOISE_MODEL] = "symmetric",
    clean: Annotated[
        str | None,
        typer.Option(
            help="Score trials on a few clean labels instead of the noisy validation labels. Give a number of rows or, "
            "for a table of your own, a second table with the same columns."
        ),
    ] = None,
    network: Annotated[str | None, typer.Option(help="As in compare; without it, one that suits the data set.")] = None,
    seeds: Annotated[int, typer.Option(help="Runs of each trial; its score is their mean.")] = 1,
    epochs: Annotated[
        int | None, typer.Option(help="Passes over the training rows; without it, what suits the data set.")
    ] = None,
    label_column: Annotated[str | None, LABEL_COLUMN] = None,
    data_dir: Annotated[Path | None, DATA_DIR] = None,
    device: Annotated[str | None, DEVICE] = None,
    storage: Annotated[
        str | None,
        typer.Option(help="Where to keep the study: a SQLite file or an Optuna URL; without it, study.db in --out."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the study and the pages; without it, output/tune-NAME.")
    ] = None,
) -> None:
    """Search temperatures, schedule, learning rate, weight decay and label smoothing together, with Optuna.

    A trial trains the network once (or --seeds times). Its score is the accuracy
    on validation labels, at the last and the best epoch together. These labels
    are as noisy as the training labels. With --clean, the score is the accuracy
    on a few clean labels. Test labels are not used. Hopeless trials are pruned.
    The search begins with the first leg of the default schedule and with
    cross-entropy.

    The study is kept in a SQLite file. If it is stopped or killed, the same
    command continues. Any number of processes that run the same command share
    the trials.

    Prints the best recipe as Python, and as a command that tests it. Writes
    tune.md, tune.csv (the trials), importance.png and contour.png.
    """
    with packages("tune"):
        from bitempered.experiments import report, tune_report
        from bitempered.experiments.recipes import tune as recipe

    with valid_request():
        request = recipe.request(
            dataset, loss, noise=noise, trials=trials, seeds=seeds, epochs=epochs, noise_model=noise_model,
            label_column=label_column, network=network, clean=clean, data_dir=data_dir,
        )  # fmt: skip
    device = choose_device(device)
    out = out or OUTPUT / f"tune-{Path(dataset).stem}"
    with clear_errors(out, "the finished trials are kept: run the same command to continue"):
        with progress_bar() as progress:
            best, found = recipe.run(request, storage or out / "study.db", progress, device=device)
        comparison = request.comparison
        command = tune_report.command(comparison, best, data_dir)
        python = tune_report.python(comparison.training, best)
        title = tune_report.title(comparison, loss, request.clean_file)
        report.write(out, tune_report.pages(title, found.study, command, python))
    print(title)
    shown = ", ".join(f"{name} {part:.0%}" for name, part in tune_report.importances(found.study).items())
    print(f"Best of {request.trials} trials: {found.score:.2%}. Importance: {shown or 'too few trials'}")
    print(f"\nTo train with it and test it:\n\n  {command}\n\nIn Python:\n\n{textwrap.indent(python, '  ')}\n")
    print(f"Written to {out}: tune.md, tune.csv, importance.png, contour.png; the study is in {storage or 'study.db'}")


# A paragraph for each figure or table.
ABOUT = "\n\n".join(f"{name}: {entry.about}" for name, entry in recipes.REPRODUCED.items())


class Reproduce(typer.core.TyperCommand):
    """`reproduce`, whose --help after the name of a figure or table is about that one."""

    def parse_args(self, context: Any, args: list[str]) -> list[str]:
        what = next((word for word in args if word in recipes.REPRODUCED), None)
        if what is not None and "--help" in args:
            entry, about = recipes.REPRODUCED[what], copy(self)
            about.help = f"Reproduce {what}: {entry.about}"
            about.params = [param for param in self.params if param.name in entry.options | {"out"}]
            context.info_name = f"{context.info_name} {what}"
            print(about.get_help(context))
            context.exit()
        return super().parse_args(context, args)


@app.command(
    cls=Reproduce,
    help="Reproduce the paper's figures and tables, and our own comparisons.\n\nAdd --help after the name of one to "
    f"see which options it takes.\n\n{ABOUT}",
)
def reproduce(
    context: typer.Context,
    what: Annotated[str, typer.Argument(help=f"{', '.join(recipes.REPRODUCED)}.")],
    dataset: Annotated[str | None, typer.Option(help="For table1 and figure3: mnist or cifar100.")] = None,
    network: Annotated[
        str | None,
        typer.Option(
            help="For cifar100 in table1 and figure3, resnet56 or resnet56-wide (4 times as wide); for table2, "
            "resnet18 or resnet50. The first is the default."
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="For a laptop: a small table that shows no effect; figure2 with one seed.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a run that was stopped.")] = False,
    seeds: Annotated[
        int | None, typer.Option(help="Runs for each cell or panel; without it, the recipe's number.")
    ] = None,
    data_dir: Annotated[Path | None, DATA_DIR] = None,
    device: Annotated[str | None, DEVICE] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the results; without it, one in output, such as output/figure2.")
    ] = None,
) -> None:
    if what not in recipes.REPRODUCED:
        fail(f"unknown figure or table {what!r}; choose from: {', '.join(recipes.REPRODUCED)}", 2)
    takes = recipes.REPRODUCED[what].options
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
    if useless := given - takes - {"what", "out"}:
        fail(f"{what} has no {in_words(useless)}; it takes: {in_words(takes | {'out'})}", 2)
    with packages("experiments"), valid_request():
        from rich.console import Console

        from bitempered.experiments.team import join

        if seeds is not None:
            recipes.check_seeds(seeds)
        options = recipes.Options(
            choose_device(device), dataset=dataset, network=network, quick=quick, seeds=seeds, data_dir=data_dir
        )
        plan = recipes.plan(what, options)
    out = out or OUTPUT / plan.name
    after_ctrl_c = "run the same command with --resume to continue" if "resume" in takes else "nothing was written"
    with clear_errors(out, after_ctrl_c), join(options.device, together=plan.together) as team:
        if "resume" in takes and not resume and (unfinished := team.share(lambda: stopped(out))):
            fail(f"a run was stopped: continue it with --resume, or delete {', '.join(map(str, unfinished))}", 1)
        with progress_bar() if team.first else nullcontext(lambda *_: None) as progress:
            table = plan.make(out, progress)
    if not team.first:
        return
    if isinstance(table, str):  # Markdown, whose lines must not be broken
        print(table)
    elif table is not None:
        Console().print(table)
    print(f"Written to {out}: {plan.files}")


@app.command()
def report(
    what: Annotated[
        str | None,
        typer.Argument(
            help="A folder of rows, given by its path or by its name in results or output, such as table1-mnist; or "
            f"one of {', '.join(recipes.ROWS)}, to render every folder there with such rows."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write to, with a subfolder for each; without it, beside the rows.")
    ] = None,
) -> None:
    """Render tables and figures again from the rows of earlier runs, without training or data.

    Without an argument, every folder in results and output is rendered. Prints the first table of each.
    """
    with packages("experiments"):
        from bitempered.experiments import report as reports
        from bitempered.experiments import runs  # noqa: F401  (for torch, which every recipe needs)

    roots = (Path("results"), OUTPUT)
    chosen = [folder for root in roots for folder in recipes.folders(root)]
    if what is not None:
        chosen = recipes.choose(what, *roots)
    if not chosen:
        kinds = ", ".join(recipes.ROWS)
        fail(
            f"found no results for {what or 'any figure or table'}; give a folder with result rows, or one of: {kinds}",
            2,
        )
    for folder in chosen:
        target = folder if out is None else out / folder.name
        with clear_errors(target, "some pages may not be updated; none is incomplete"):
            pages = recipes.render(folder)
            target.mkdir(parents=True, exist_ok=True)
            reports.write(target, pages)
        for name, page in pages.items():
            if name.endswith(".md"):
                print(reports.first_table(page.decode()))
        print(f"Written to {target}: {', '.join(pages)}\n")


@app.command()
def bench(
    device: Annotated[
        str | None, typer.Option(help="What to measure: cpu or cuda. Without it, cuda if there is one.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A few tiny cases, to see that everything runs, not how fast.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for rows, tables and figure; without it, output/bench, or output/bench-quick with --quick."
        ),
    ] = None,
) -> None:
    """Time the loss against cross-entropy and other implementations (minutes on an idle machine).

    Writes cpu.jsonl, cpu.md and cpu.png, or gpu.*, case by case. Liger-Kernel and entmax are timed if installed.
    """
    with packages("experiments"):
        from bitempered.experiments.bench import run
        from bitempered.experiments.recipes import bench as recipe
        from bitempered.experiments.report import first_table

    device = choose_device(device)
    suite = recipe.quick(recipe.SUITES[device]) if quick else recipe.SUITES[device]
    out = out or OUTPUT / ("bench-quick" if quick else "bench")
    with clear_errors(out, "the cases measured so far are kept"):
        out.mkdir(parents=True, exist_ok=True)
        rows = run(suite, device, out, lambda text: print(text, flush=True))
    name = "gpu" if device == "cuda" else "cpu"
    print(f"\n{first_table((out / f'{name}.md').read_text(encoding='utf-8'))}\n")
    print(f"Written to {out}: {name}.md, {name}.png and {name}.jsonl")
    failed = [f"{row['label']} at {row['rows']} x {row['classes']}" for row in rows if "failed" in row]
    if failed:
        fail(f"these failed: {'; '.join(failed)}", 1)


@app.command()
def audit(
    dataset: Annotated[
        str,
        typer.Argument(
            help="The path of a .csv or .parquet file, or digits, mnist, fashion-mnist, cifar100 (an unknown name "
            "lists all)."
        ),
    ],
    label_column: Annotated[str | None, LABEL_COLUMN] = None,
    score: Annotated[
        str,
        typer.Option(
            help="How labels are ranked: posterior (knows which mistakes are common), margin (between the label and "
            "the likeliest other class) or confidence (in the label)."
        ),
    ] = "posterior",
    repeats: Annotated[
        int, typer.Option(help="How often to fit all folds; the mean of several ranks a little better.")
    ] = 1,
    data_dir: Annotated[Path | None, DATA_DIR] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write to; without it, output/audit-NAME.")] = None,
) -> None:
    """Find the labels that are probably wrong, in a table of your own or in images.

    Networks are trained with the bi-tempered loss on four fifths of the rows,
    and judge the labels of the other fifth. In a table, every column except
    the label must hold numbers.

    Writes audit.csv, with all labels sorted from the worst on and a suggestion
    for each; audit.html, a page with the worst cases, images as pictures; and
    for a table cleaned.csv, the same table with the suggested labels, which
    bitempered compare --dataset takes. Nothing is changed in place.
    """
    with packages("experiments"):
        from bitempered.experiments import audits, report

    with valid_request():
        audits.check_request(dataset, score, repeats, label_column)
    out = out or OUTPUT / f"audit-{Path(dataset).stem}"
    column = label_column or audits.LABEL_COLUMN
    with clear_errors(out, "nothing was written"):
        rows = audits.read(dataset, column, data_dir)
        check_folder(out)
        with progress_bar() as progress:
            audited = audits.run(rows, repeats=repeats, score=score, progress=progress)
        pages = audits.pages(audited, column)
        report.write(out, pages)

    for line in audited.found.notes():
        print(textwrap.fill(line, 100, subsequent_indent="  ", break_on_hyphens=False))
    print(f"\n{audited.found.table(10, first=1)}\n\nWritten to {out}: {', '.join(pages)}")


@app.command()
def playground(
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 for any free one.", min=0, max=65535)] = 8421,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Print the address without opening it.")] = False,
) -> None:
    """Open a page where a logistic and a bi-tempered network train side by side on noisy labels."""
    with packages("playground"):
        from bitempered.playground.server import serve
    try:
        serve(host, port, browser=not no_browser)
    except OSError as error:
        fail(str(error), 1)


def numbers(option: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(number) for number in text.split(","))
    except ValueError:
        raise ValueError(f"--{option} must be numbers separated by commas, such as 0,0.2,0.4; got {text!r}") from None


def in_words(options: Iterable[str]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in sorted(options))


def choose_device(device: str | None) -> str:
    import torch

    found = "cuda" if torch.cuda.is_available() else "cpu"
    if device not in (None, "cpu", "cuda"):
        fail(f"--device must be cpu or cuda, got {device!r}", 2)
    if device == "cuda" and found == "cpu":
        fail("torch finds no CUDA device; omit --device to train on the CPU", 2)
    return device or found


@contextmanager
def packages(extra: str) -> Iterator[None]:
    """Stop with one line if a package is missing, which names what this command needs."""
    try:
        yield
    except ModuleNotFoundError as missing:
        fail(f"{missing}; {NEEDS[extra]}", 1)


@contextmanager
def valid_request() -> Iterator[None]:
    """Stop with one line if the options do not make sense."""
    try:
        yield
    except ValueError as error:
        fail(str(error), 2)


@contextmanager
def clear_errors(out: Path, after_ctrl_c: str = "run the same command to continue") -> Iterator[None]:
    """Print one line for any error with a folder of results, and `after_ctrl_c` on Ctrl-C."""
    from bitempered.experiments.checkpoints import BadCheckpoint
    from bitempered.experiments.files import BadRows
    from bitempered.experiments.sources import DataError
    from bitempered.experiments.team import Lost

    with_main = signal.getsignal(signal.SIGINT) is stop_at_once
    try:
        if with_main:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        yield
    except KeyboardInterrupt:
        fail(f"stopped; {after_ctrl_c} ({out})", 130)
    except OSError as error:
        fail(f"cannot use the folder {out}: {error}", 1)
    except ModuleNotFoundError as missing:
        fail(f"{missing}; {NEEDS['experiments']}", 1)
    except (BadRows, DataError, BadCheckpoint, ImportError) as error:  # that of torchvision says what to install
        fail(str(error), 1)
    except Lost as error:
        fail(f"{error}; {after_ctrl_c}, on any number of processes ({out})", 1)
    finally:
        if with_main:
            signal.signal(signal.SIGINT, stop_at_once)


def check_folder(out: Path) -> None:
    """Write to the folder, or to the one that it will be made in, before work that would be lost."""
    with TemporaryFile(dir=next(folder for folder in (out, *out.parents) if folder.exists())):
        pass


def fail(message: str, code: int) -> NoReturn:
    print(f"bitempered: {message}", file=sys.stderr)
    raise typer.Exit(code)


def stop_at_once(number: int, frame: object) -> NoReturn:
    """Handle Ctrl-C outside `clear_errors`: nothing is being written, and an interrupted import can fail in any way."""
    os.write(2, b"bitempered: stopped\n")
    os._exit(130)


def main() -> None:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not in a script that ignores Ctrl-C
        signal.signal(signal.SIGINT, stop_at_once)
    with printing():
        app(prog_name="bitempered")


if __name__ == "__main__":
    main()
