"""The recipe behind `bitempered reproduce tuned`: searched settings against the default schedule and cross-entropy.

Both losses are searched with as many trials, on noisy validation labels and on a few clean ones. The best settings and
the default schedule, which is not searched, then train with other seeds. No search looks at test labels; but the rates
and decays that both begin with were chosen after a look at digits with 40 % noise, test rows included.
"""

from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path

from rich.table import Table

from bitempered.experiments import cells, tune_report
from bitempered.experiments.cells import Cell, Comparison
from bitempered.experiments.data import Dataset
from bitempered.experiments.datasets import DATASETS
from bitempered.experiments.files import read_rows, value, write_rows
from bitempered.experiments.losses import Loss, LossSettings
from bitempered.experiments.recipes import tune
from bitempered.experiments.recipes.compare import default_recipe
from bitempered.experiments.recipes.plans import SEARCH_SEED, Options, Plan
from bitempered.experiments.recipes.shared import (
    ADAM_RATE,
    LEVELS,
    DataUse,
    data_dir_of,
    part_progress,
)
from bitempered.experiments.report import (
    Pages,
    grid,
    last_and_chosen,
    made_by,
    rich_table,
    seeds_in_words,
    table_csv,
    titled,
    write,
)
from bitempered.experiments.runs import Progress, Row, identity, provenance, today
from bitempered.experiments.train import Training

__all__ = ["plan", "render"]

DATA = (
    DataUse("digits", Training("mlp", "adam", epochs=150, batch_size=125)),
    DataUse("mnist", Training("mlp", "adam", epochs=20, batch_size=128), rows=2_000),
)
CLEAN = (None, 100)  # rows with clean labels; None: noisy validation labels
TRIALS = 30
SEARCH_SEEDS = (SEARCH_SEED, SEARCH_SEED + 1)  # of each trial: one alone is mostly chance
CONTENDERS = ("searched", "default schedule", "logistic, searched")
HEAD = ["data", "noise", "scored on", *CONTENDERS]


def plan(what: str, options: Options) -> Plan:
    seeds = tuple(range(options.seeds or (1 if options.quick else 3)))
    trials = 2 if options.quick else TRIALS
    used = [data.quick(rows=128) for data in DATA[:1]] if options.quick else DATA
    levels = LEVELS[-1:] if options.quick else LEVELS
    parts = list(product(used, levels, CLEAN))

    def make(folder: Path, progress: Progress) -> Table:
        folder.mkdir(parents=True, exist_ok=True)
        trained: list[Row] = []
        tried: list[Row] = []
        maker = provenance()
        known: dict[str, Dataset] = {}
        for place, (data, level, clean) in enumerate(parts):
            tell = part_progress(progress, place, len(parts), f"{data.name}, {level:.0%}")
            base = comparison(data, level, clean, seeds)
            data_dir = data_dir_of(data.name, options)
            if data.name not in known:
                known[data.name] = cells.read_data(base, data_dir)
            default = default_recipe(DATASETS[data.name].num_classes, data.training.epochs)
            recipes = [LossSettings(default, rate=ADAM_RATE, decay=0.0)]
            for loss in tune.LOSSES:
                request = tune.TuneRequest(replace(base, seeds=SEARCH_SEEDS), loss, trials, data_dir=data_dir)
                best, found = tune.run(request, folder / "study.db", tell, data=known[data.name])
                run = {
                    "study": request.study, **identity(request.setting(), known[data.name].digest), **maker,
                    "date": today(),
                }  # fmt: skip
                tried += [{**run, **row} for row in tune_report.rows(found.study)]
                recipes.append(best)
            for recipe in recipes:
                training = replace(base.training, weight_decay=recipe.decay)
                one = replace(base, training=training, cells=(Cell(recipe.loss, level, recipe.rate),))
                trained += cells.run(one, folder, tell, name=what, data=known[data.name])
            write_rows(folder / "trials.jsonl", tried)
            write(folder, render(folder / f"{what}.jsonl"))
        return rich_table(title(trained), HEAD, lines(trained, deviations=False))

    files = f"{what}.md, {what}.csv, trials.jsonl, {what}.jsonl and study.db (delete both to train again)"
    return Plan(what, make, files)


def comparison(data: DataUse, level: float, clean: int | None, seeds: tuple[int, ...]) -> Comparison:
    cell = Cell(Loss("logistic"), level, ADAM_RATE)
    return Comparison(data.name, data.training, (cell,), seeds, rows=data.rows, clean_rows=clean)


def render(path: Path) -> Pages:
    """Render the table again from a file of rows; of a contender and a seed, the last row counts."""
    names = ("dataset", "noise", "clean_rows", "seed", "epochs", "rows")
    kept = {(contender(row), *(value(row, name) for name in names)): row for row in read_rows(path)}
    rows = list(kept.values())
    tried = read_rows(path.with_name("trials.jsonl"))
    return {f"{path.stem}.csv": table_csv(rows), f"{path.stem}.md": markdown(rows, tried).encode()}


def contender(row: Row) -> str:
    if row["loss"] == "logistic":
        return CONTENDERS[2]
    return CONTENDERS[0] if row["weight_decay"] else CONTENDERS[1]  # a search has no decay of 0


def scored_on(clean: int | None) -> str:
    return f"{clean} clean rows" if clean else "noisy validation"


def lines(rows: list[Row], deviations: bool) -> list[list[str]]:
    """Return the lines under `HEAD`: accuracy at the last and the chosen epoch, with or without deviations."""
    keys = dict.fromkeys((row["dataset"], row["noise"], value(row, "clean_rows")) for row in rows)
    table_lines = []
    for dataset, level, clean in sorted(keys, key=lambda key: (key[0], key[1], key[2] or 0)):
        here = [
            row for row in rows if (row["dataset"], row["noise"], value(row, "clean_rows")) == (dataset, level, clean)
        ]
        groups = [[row for row in here if contender(row) == name] for name in CONTENDERS]
        accuracies = (last_and_chosen(group, deviations=deviations) for group in groups)
        table_lines.append([dataset, f"{level:.0%}", scored_on(clean), *accuracies])
    return table_lines


def title(rows: list[Row]) -> str:
    what = titled("Searched settings", rows)
    return f"{what}: accuracy on clean test labels, %, last / chosen epoch, mean over {seeds_in_words(rows)}"


def training_in_words(rows: list[Row]) -> str:
    """Say on how many rows and for how long each data set was trained."""
    said = []
    for name, row in {row["dataset"]: row for row in rows}.items():
        used = f"{row['rows']:,} rows of each part, " if row["rows"] else ""
        said.append(f"{name}: {used}{row['epochs']} epochs.")
    return " ".join(said)


def missing_in_words(rows: list[Row]) -> str:
    """Say which parts of the whole table rows lack, or nothing."""
    known = {(row["dataset"], row["noise"], value(row, "clean_rows")) for row in rows}
    parts = product([data.name for data in DATA], LEVELS, CLEAN)
    missing = [f"{part[0]} at {part[1]:.0%} on {scored_on(part[2])}" for part in parts if part not in known]
    return f" Not measured yet: {', '.join(missing)}." if missing else ""


def trials_in_words(tried: list[Row]) -> str:
    """Say how many trials each search had, and how many networks a trial; old rows do not say the latter."""
    counts = sorted({*Counter(row["study"] for row in tried).values()})
    networks = sorted({len(row.get("seeds", SEARCH_SEEDS)) for row in tried})
    trials, networks_each = (" or ".join(map(str, numbers)) for numbers in (counts, networks))
    return f"Both searches had {trials} trials, of {networks_each} networks each, with other seeds than the results."


def starts_in_words(tried: list[Row]) -> str:
    """Say where the first schedules of the bi-tempered searches end: old rows have the default of their time."""
    pairs = sorted({(row["t1"], row["t2"]) for row in tried if row["trial"] == 0 and "t1" in row})
    return " or ".join(f"({t1:g}, {t2:g})" for t1, t2 in pairs)


def markdown(rows: list[Row], tried: list[Row]) -> str:
    clean = " or ".join(str(n) for n in sorted({row["clean_rows"] for row in rows if value(row, "clean_rows")}))
    defaults = [row for row in rows if contender(row) == CONTENDERS[1]]
    rate = defaults[0]["learning_rate"]
    ends = " or ".join(sorted({"({:g}, {:g})".format(*row["numbers"]) for row in defaults}))
    chosen = [
        [
            row["dataset"], f"{row['noise']:.0%}", scored_on(value(row, "clean_rows")),
            Loss.of(row).text, f"{row['learning_rate']:g}", f"{row['weight_decay']:g}",
        ]
        for row in rows
        if row["seed"] == 0 and contender(row) != CONTENDERS[1]
    ]  # fmt: skip
    return f"""# {title(rows)}

{grid(HEAD, lines(rows, deviations=True), ["---", "---:", "---", *["---:"] * 3])}

± is the sample standard deviation. {trials_in_words(tried)}
They began with the same rates and decays, the bi-tempered loss with schedules to {starts_in_words(tried)}.
A trial's score is the accuracy on validation labels at the last and the best epoch together. These are as noisy as the
training labels, or {clean} clean rows; the chosen epoch is the best on the same labels. The default schedule is not
searched: it ends at {ends}, and trains at Adam's rate of {rate:g}, without decay or smoothing.
The rates and decays to begin with were chosen after a look at digits with 40% noise, test rows included.
{training_in_words(rows)}{missing_in_words(rows)}

What the searches chose:

{grid(["data", "noise", "scored on", "loss", "rate", "decay"], chosen, ["---", "---:", "---", "---", "---:", "---:"])}

{". ".join(dict.fromkeys(made_by(row) for row in rows))}.
"""
