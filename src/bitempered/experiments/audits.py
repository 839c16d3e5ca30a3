"""What `bitempered audit` does: read a table or images, fit out of fold, and write what was found."""

import csv
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import RepeatedStratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from bitempered.audit import SCORES, Audit, label_issues, out_of_fold
from bitempered.experiments.audit_report import Audited, Rows, page
from bitempered.experiments.datasets import DATASETS, LABEL_COLUMN, check_dataset, is_table, read_parts
from bitempered.experiments.report import Pages
from bitempered.experiments.sources import DataError, as_text, read_csv, read_parquet, read_table
from bitempered.sklearn import BiTemperedMLPClassifier

__all__ = ["check_request", "classifier", "pages", "read", "run"]

FOLDS = 5
WIDTH = 256
EPOCHS = (25, 400)
IN_WORDS = {
    "posterior": "the posterior: it weighs in which mistakes are common",
    "margin": "the margin between the label and the likeliest other class",
    "confidence": "the confidence in the label",
}
STEPS = 800  # at least, if the most epochs allow


def check_request(dataset: str, score: str, repeats: int, label_column: str | None) -> None:
    """Raise a ValueError if an option of the command line does not fit."""
    check_dataset(dataset)
    if label_column is not None and not is_table(dataset):
        raise ValueError(f"--label-column is for tables; {dataset} has its own labels")
    if score not in SCORES:
        raise ValueError(f"--score must be one of {', '.join(SCORES)}, got {score!r}")
    if repeats < 1:
        raise ValueError(f"--repeats must be at least 1, got {repeats}")


def read(dataset: str, label_column: str = LABEL_COLUMN, data_dir: Path | None = None) -> Rows:
    """Read a table by its path, or the rows of a registered data set in their published order.

    If a data set is published in two parts, these are its training rows.
    """
    check_dataset(dataset)
    if is_table(dataset):
        table = read_table(Path(dataset), label_column)
        return Rows(dataset, table.features, table.labels, table.spelled, table.columns)
    entry = DATASETS[dataset]
    values, labels = entry.published() if entry.published else read_parts(dataset, data_dir)[0]
    classes = [str(number) for number in range(entry.num_classes)]
    if values.ndim == 4:
        features = values.reshape(len(values), -1).astype(np.float32) / 255
        return Rows(dataset, features, labels.astype(np.int64), classes, [], values)
    columns = [f"feature {number}" for number in range(1, 1 + values.shape[1])]
    return Rows(dataset, values, labels.astype(np.int64), classes, columns)


def classifier(rows: int) -> BiTemperedMLPClassifier:
    """Return the network that judges labels, for that many rows: cross-entropy at first, robust later.

    Small tables get small batches and many epochs, so that there are enough steps; with many epochs of large tables,
    it would only memorise more.
    """
    batch = min(200, max(16, rows // 10))
    epochs = int(np.clip(math.ceil(STEPS * batch * FOLDS / (FOLDS - 1) / rows), *EPOCHS))
    return BiTemperedMLPClassifier(hidden_layer_sizes=(WIDTH,), max_iter=epochs, batch_size=batch, random_state=0)


def run(
    rows: Rows, *, repeats: int = 1, score: str = SCORES[0], progress: Callable[[int, int, str], None] | None = None
) -> Audited:
    """Audit labels by `repeats` x 5-fold cross-validation, with fewer folds if a class has fewer rows."""
    counts = np.bincount(rows.labels, minlength=len(rows.classes))
    if len(rows.classes) < 2:
        raise DataError(f"{rows.name} must hold at least two classes, got {len(rows.classes)}")
    if counts.min() < 2:
        raise DataError(
            f"{rows.name}: the class {rows.classes[counts.argmin()]!r:.80} has a single row, which no other row can "
            "confirm; leave it out"
        )
    folds = int(min(FOLDS, counts.min()))
    network: Any = classifier(len(rows.labels))
    estimator, features = network, rows.features
    if rows.images is None:
        estimator = make_pipeline(StandardScaler(), network)
        # By powers of two, which is exact: the square of a huge value would overflow, that of a tiny one vanish.
        features = np.ldexp(features, -np.frexp(np.abs(features).max(axis=0))[1])

    def tell(done: int, total: int) -> None:
        if progress is not None:
            progress(done, total, f"fold {done} of {total}")

    cv = RepeatedStratifiedKFold(n_splits=folds, n_repeats=repeats, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the epochs are the length of the schedule
        warnings.filterwarnings("ignore", "The number of unique classes is greater than 50%")  # they are classes
        classes, given, probs = out_of_fold(estimator, features, rows.labels, cv, tell)
    found = label_issues(given, probs, score=score)
    names = np.array(rows.classes)[classes]
    named = replace(found, labels=names[given], suggested=names[found.suggested], classes=names)
    again = f", {repeats} times over" if repeats > 1 else ""
    method = (
        f"Each label was judged by a network that was trained on other rows ({folds} folds{again}) with the "
        f"bi-tempered loss and the first leg of its default schedule. The score is {IN_WORDS[score]}."
    )
    return Audited(rows, named, method)


def pages(audited: Audited, label_column: str) -> Pages:
    """Return the files to write: the labels worst first, the page to look at, and a table with the labels suggested."""
    files = {"audit.csv": ranked_csv(audited.found), "audit.html": page(audited).encode()}
    if is_table(audited.rows.name):
        files["cleaned.csv"] = cleaned_csv(audited, label_column)
    return files


def ranked_csv(found: Audit) -> bytes:
    """Return a line for each label, worst first. Rows are numbered from 1, as in messages about the table."""
    wrong = found.wrong
    return to_csv(
        ["row", "label", "suggested", "score", "wrong"],
        [[i + 1, found.labels[i], found.suggested[i], f"{found.scores[i]:.6f}", int(wrong[i])] for i in found.order],
    )


def cleaned_csv(audited: Audited, label_column: str) -> bytes:
    """Return the table as it was read, but with the suggested label where the given one counts as wrong."""
    path = Path(audited.rows.name)
    columns = read_parquet(path) if path.suffix == ".parquet" else read_csv(path)
    wrong, suggested = audited.found.wrong, audited.found.suggested
    if len(columns[label_column]) != len(wrong):
        raise DataError(f"{path} has changed since it was audited; run the same command again")
    columns[label_column] = [
        suggested[i] if wrong[i] else as_text(given) for i, given in enumerate(columns[label_column])
    ]
    for name, values in columns.items():
        if name != label_column and any(isinstance(value, bool) for value in values):  # a CSV holds numbers
            columns[name] = [int(value) if isinstance(value, bool) else value for value in values]
    return to_csv(list(columns), list(zip(*columns.values(), strict=True)))


def to_csv(head: list[str], lines: list[Any]) -> bytes:
    text: list[str] = []
    # It ends lines with \r\n: with another line end, older versions of Python do not quote cells that hold \r.
    csv.writer(SimpleNamespace(write=text.append)).writerows([head, *lines])
    return "".join(line.removesuffix("\r\n") + "\n" for line in text).encode()
