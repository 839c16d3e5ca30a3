"""The parts of every report: tables, means with their spread, "made by", and files.

A recipe's `render(path)` makes its pages, tables and figures from a file of rows; nothing is trained.
"""

import argparse
import csv
import io
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import mean, stdev

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from rich.table import Table

from bitempered.experiments.files import Row, read_rows, value, write_atomically, write_rows
from bitempered.experiments.losses import LOSSES, Loss

__all__ = [
    "MARKS",
    "MOMENTS",
    "Pages",
    "draw_curves",
    "first_table",
    "grid",
    "last_and_chosen",
    "looks",
    "loss_names",
    "made_by",
    "made_by_commits",
    "made_with",
    "maker",
    "measure_or_render",
    "newest",
    "noise_in_words",
    "one_or_many",
    "png",
    "rich_table",
    "seeds_by_level",
    "seeds_in_words",
    "spread",
    "table_csv",
    "titled",
    "training_in_words",
    "write",
]

Pages = dict[str, bytes]  # contents by the name of the file
# The epochs whose accuracy is shown: the column of a row, and its name.
MOMENTS = {"test_last": "last epoch", "test_chosen": "chosen epoch"}
# The style of a loss's first line in a figure, its second, ..., and the mark of a chosen epoch on such a line.
MARKS = {"-": "x", "--": "o", ":": "^", "-.": "s"}
STYLES = tuple(MARKS)
TRIAL = 3  # epochs, the most that a quick run has


def grid(head: list[str], lines: list[list[str]], align: str | list[str] = "---:") -> str:
    """Return a Markdown table.

    >>> print(grid(["noise", "accuracy"], [["40%", "98.1"]]))
    | noise | accuracy |
    | ---: | ---: |
    | 40% | 98.1 |
    """
    rule = [align] * len(head) if isinstance(align, str) else align
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, rule, *lines])


def rich_table(title: str, head: list[str], lines: list[list[str]]) -> Table:
    """Return the same table for a terminal."""
    table = Table(title=title)
    for name in head:
        table.add_column(name, justify="right")
    for line in lines:
        table.add_row(*line)
    return table


def spread(values: list[float], digits: int) -> str:
    """Return mean and sample standard deviation of fractions in per cent; one value has no deviation.

    >>> spread([0.5, 0.7], 1), spread([0.5], 2), spread([], 1)
    ('60.0 ± 14.1', '50.00', '–')
    """
    if not values:
        return "–"
    percent = [100 * value for value in values]
    deviation = f" ± {stdev(percent):.{digits}f}" if len(percent) > 1 else ""
    return f"{mean(percent):.{digits}f}{deviation}"


def seeds_in_words(rows: list[Row]) -> str:
    """Return how many seeds rows have.

    >>> seeds_in_words([{"seed": 0}, {"seed": 1}, {"seed": 1}]), seeds_in_words([{"seed": 0}])
    ('2 seeds', '1 seed')
    """
    count = len({row["seed"] for row in rows})
    return f"{count} seed{'s' if count > 1 else ''}"


def one_or_many(count: int, many: str) -> str:
    """Return "one seed", or `many` with their number."""
    return "one seed" if count == 1 else many.format(count)


def seeds_by_level(rows: list[Row], many: str) -> str:
    """Say how many seeds each noise level has, by `one_or_many`.

    >>> seeds_by_level([{"noise": 0.0, "seed": 0}, {"noise": 0.4, "seed": 0}, {"noise": 0.4, "seed": 1}], "{} seeds")
    'one seed; at 40% 2 seeds'
    """
    levels: dict[int, list[str]] = {}  # by number of seeds
    for level in sorted({row["noise"] for row in rows}):
        levels.setdefault(len({row["seed"] for row in rows if row["noise"] == level}), []).append(f"{level:.0%}")
    texts: list[str] = []
    for count in sorted(levels):
        text = one_or_many(count, many)
        texts.append(f"at {', '.join(levels[count])} {text}" if texts else text)
    return "; ".join(texts)


def last_and_chosen(rows: list[Row], *, deviations: bool) -> str:
    """Return the accuracy at the last and at the chosen epoch, with or without standard deviations.

    >>> rows = [{"test_last": 0.5, "test_chosen": 0.6}, {"test_last": 0.7, "test_chosen": 0.6}]
    >>> last_and_chosen(rows, deviations=True), last_and_chosen(rows, deviations=False)
    ('60.0 ± 14.1 / 60.0 ± 0.0', '60.0 / 60.0')
    """
    texts = [spread([row[column] for row in rows], 1) for column in MOMENTS]
    return " / ".join(text if deviations else text.partition(" ±")[0] for text in texts)


def noise_in_words(level: float, noise_model: str) -> str:
    """Name a noise level; in class-dependent noise it is not the fraction of wrong labels.

    >>> noise_in_words(0.4, "symmetric"), noise_in_words(0.4, "class-dependent")
    ('40% wrong labels', '40% label noise')
    """
    return f"{level:.0%} {'label noise' if noise_model == 'class-dependent' else 'wrong labels'}"


def training_in_words(groups: Iterable[list[Row]]) -> str:
    """Say how long the rows of each data set were trained, and on how many rows."""
    return "; ".join(
        f"{rows[0]['dataset']}: {rows[0]['epochs']} epochs in batches of {rows[0]['batch_size']}"
        + (f", {rows[0]['rows']:,} training rows" if rows[0]["rows"] else "")
        for rows in groups
    )


def made_by_commits(rows: list[Row]) -> str:
    """Say which commits made rows, on what and until when; one clause for each machine."""
    machines: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        machines.setdefault((row["bitempered"], row["torch"], row["device"]), []).append(row)
    clauses = []
    for made in machines.values():
        commits = sorted({row["commit"] for row in made})
        text = maker(made[0], f"commit{'s' if len(commits) > 1 else ''} {', '.join(commits)}")
        clauses.append(f"{text}, {max(row['date'] for row in made)}")
    return ". ".join(clauses)


def is_trial(rows: list[Row]) -> bool:
    """Whether rows are of a quick run, which shows that everything works and no effect."""
    return all(row["epochs"] <= TRIAL for row in rows)


def titled(title: str, rows: list[Row]) -> str:
    """Return a title that says if the rows are of a quick run.

    >>> titled("Table 1, mnist", [{"epochs": 2}]), titled("Table 1, mnist", [{"epochs": 500}])
    ('A quick trial, which shows no effect (table 1, mnist)', 'Table 1, mnist')
    """
    return f"A quick trial, which shows no effect ({title[0].lower()}{title[1:]})" if is_trial(rows) else title


def first_table(page: str) -> str:
    """Return the title of a page and its first table.

    >>> first_table("# A\\n\\ntext\\n\\n| b |\\n| --- |\\n| 1 |\\n\\nmore\\n").splitlines()
    ['A', '', '| b |', '| --- |', '| 1 |']
    """
    title, table = (re.search(pattern, page, re.MULTILINE) for pattern in (r"^# (.*)", r"(?:^\|.*\n?)+"))
    return "\n\n".join([*([title[1]] if title else []), *([table[0].rstrip()] if table else [])])


def looks(losses: list[tuple[str, bool]]) -> list[tuple[str, str]]:
    """Return the colour and style of each line, from a loss's name and whether it has a schedule: that one is solid.

    From the fifth line of a loss on, its colour is darker, then lighter.

    >>> looks([("logistic", False), ("bi-tempered", False), ("bi-tempered", True)])
    [('tab:orange', '-'), ('tab:blue', '--'), ('tab:blue', '-')]
    """
    order = sorted(range(len(losses)), key=lambda place: not losses[place][1])
    found: dict[int, tuple[str, str]] = {}
    for place in order:
        name = losses[place][0]
        earlier = sum(losses[other][0] == name for other in found)
        found[place] = shade(LOSSES[name].colour, earlier // len(STYLES)), STYLES[earlier % len(STYLES)]
    return [found[place] for place in range(len(losses))]


def shade(colour: str, number: int) -> str:
    """Return a colour, a darker one and a lighter one for the numbers 0, 1 and 2, and so on.

    >>> shade("tab:blue", 0), shade("tab:blue", 1), shade("tab:blue", 2)
    ('tab:blue', '#103c5a', '#8fbbda')
    """
    if number % 3 == 0:
        return colour
    lightest = 1.0 if number % 3 == 2 else 0.0
    red, green, blue = to_rgb(colour)
    return to_hex(((red + lightest) / 2, (green + lightest) / 2, (blue + lightest) / 2))


def loss_names(losses: Iterable[Loss]) -> dict[Loss, str]:
    """Name losses: in words, or in full where two have the same words, as with different schedules.

    >>> early, late = Loss("bi-tempered", (0.5, 4.0), (0, 10)), Loss("bi-tempered", (0.5, 4.0), (20, 40))
    >>> list(loss_names([Loss("logistic"), early]).values())
    ['logistic', 'bi-tempered (0.5, 4), annealed']
    >>> list(loss_names([early, late]).values())
    ['bi-tempered:0.5:4:anneal=0..10', 'bi-tempered:0.5:4:anneal=20..40']
    """
    words = {loss: str(loss) for loss in losses}
    counts = Counter(words.values())
    return {loss: name if counts[name] == 1 else loss.text for loss, name in words.items()}


def made_by(row: Row, between: str = " ") -> str:
    """Say which code made a row, on what and when; `between` stands before the date."""
    return f"{maker(row, 'commit ' + row['commit'])},{between}{row['date']}"


def maker(row: Row, commits: str) -> str:
    """Describe the code and machine behind rows made at these commits."""
    return f"Made by bitempered {row['bitempered']} ({commits}) with torch {row['torch']} on {row['device']}"


def made_with(row: Row, names: Iterable[str]) -> str:
    """List the versions that a row records, and its date."""
    return ", ".join([*(f"{name} {row[name]}" for name in names if name in row), row["date"]])


def newest(rows: list[Row], varying: Iterable[str], fixed: Iterable[str]) -> list[Row]:
    """Return the rows of the last run in a file that also keeps older ones.

    They agree with the file's last row in the `fixed` names; of those that agree in the `varying` names, the last
    counts.
    """
    names = list(varying)
    last = [row for row in rows if all(value(row, name) == value(rows[-1], name) for name in fixed)]
    return list({str([value(row, name) for name in names]): row for row in last}.values())


def table_csv(rows: list[Row]) -> bytes:
    """Return rows as a table that spreadsheets read."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def draw_curves(
    axes: Axes, curves: list[list[float]], look: tuple[str, str], label: str, epochs: Sequence[int] | None = None
) -> None:
    """Draw the mean of accuracies by epoch, one list for each seed, and a band of ±1 sample standard deviation.

    Every epoch was measured unless `epochs` says which were.
    """
    colour, style = look
    accuracy = 100 * np.array(curves)
    epochs = epochs or range(1, 1 + (accuracy.shape[1] if accuracy.size else 0))
    centre = accuracy.mean(0) if accuracy.size else []
    axes.plot(epochs, centre, style, color=colour, label=label)
    if len(accuracy) > 1:
        deviation = accuracy.std(0, ddof=1)
        axes.fill_between(epochs, centre - deviation, centre + deviation, color=colour, alpha=0.15, linewidth=0)


def png(figure: Figure) -> bytes:
    content = io.BytesIO()
    figure.savefig(content, format="png")
    return content.getvalue()


def measure_or_render(rows_file: Path, measure: Callable[[], list[Row]], page: Callable[[list[Row]], str]) -> None:
    """Run a benchmark from the command line: write its rows and page, or with --render only the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--render", action="store_true", help="write the page from the rows, without measuring")
    if parser.parse_args().render:
        rows = read_rows(rows_file)
    else:
        rows = measure()
        write_rows(rows_file, rows)
    write_atomically(rows_file.with_suffix(".md"), page(rows).encode())


def write(folder: Path, pages: Pages) -> None:
    """Write each file whole or not at all."""
    for name, content in pages.items():
        write_atomically(folder / name, content)
