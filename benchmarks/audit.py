"""How well wrong labels are found: bitempered.audit beside cleanlab and beside margins over epochs.

    python benchmarks/audit.py digits
    python benchmarks/audit.py mnist --data-dir DIR      (5,000 of its training images)
    python benchmarks/audit.py memory                    (200,000 x 5,000 probabilities: 4 GB, and cleanlab needs more)

It needs the extra experiments, and cleanlab. Labels are made wrong in known ways; the contenders rank them:

- cleanlab's two label quality scores, for out-of-fold probabilities of a network with cross-entropy;
- margins of the logits, averaged over the epochs of one cross-entropy training on all rows (Pleiss et al., 2020);
- `bitempered.audit` with the network of `bitempered audit`, on the same folds: once, and by the mean of two times.

All networks have the same layers, optimiser, learning rate and batches. Cross-entropy trains for all epochs; the
network of `audit` may stop once its temperatures have settled and its loss no longer falls. Goes on from
benchmarks/audit.jsonl, which gets a row for each contender and draw of the noise, and writes the page
benchmarks/audit.md.
"""

import argparse
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import cleanlab
import numpy as np
import sklearn
import torch
from cleanlab.rank import get_label_quality_scores
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import StratifiedKFold
from sklearn.neural_network import MLPClassifier

from bitempered import noise
from bitempered.audit import label_issues, out_of_fold
from bitempered.experiments import audits
from bitempered.experiments.files import append_rows, read_rows, write_atomically
from bitempered.experiments.report import grid
from bitempered.experiments.runs import find, provenance, today

ROWS = Path(__file__).with_suffix(".jsonl")
SEEDS = range(5)
RATES = (0.2, 0.4)
REPEATS = 2
MNIST_ROWS = 5_000
CLASSES = 10
# The classes of digits that people mistake for each other; the rate is that of these classes.
MISTAKEN = {7: 1, 2: 7, 5: 6, 6: 5, 3: 8}
MODELS = ("symmetric", "pair-flip", "class-dependent")
CLEANLAB = "cleanlab, cross-entropy"
EPOCH_MARGINS = "margins over epochs, cross-entropy"
OURS = "audit"
CONTENDERS = (
    f"{CLEANLAB}, self-confidence",
    f"{CLEANLAB}, normalised margin",
    EPOCH_MARGINS,
    f"{OURS}, confidence",
    f"{OURS}, margin",
    f"{OURS}, margin, {REPEATS} times",
)
SHAPE = (200_000, 5_000)

Row = dict[str, Any]


def make_wrong(labels: np.ndarray, model: str, rate: float, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if model == "symmetric":
        return noise.symmetric(labels, rate, rng=rng, num_classes=CLASSES)
    if model == "pair-flip":
        return noise.pair_flip(labels, rate, rng=rng, num_classes=CLASSES)
    return noise.asymmetric(labels, rate, rng=rng, mapping=MISTAKEN)


def read(dataset: str, data_dir: Path | None) -> tuple[np.ndarray, np.ndarray]:
    rows = audits.read(dataset, data_dir=data_dir)
    if dataset == "digits":
        return rows.features, rows.labels
    chosen = np.random.default_rng(2019).permutation(len(rows.labels))[:MNIST_ROWS]
    return rows.features[chosen], rows.labels[chosen]


def epoch_margins(network: Any, x: np.ndarray, labels: np.ndarray, seed: int) -> np.ndarray:
    """Minus the mean over all epochs of the label's logit less the largest other one, on the rows trained on."""
    model = MLPClassifier(network.hidden_layer_sizes, batch_size=network.batch_size, random_state=seed)
    total, row = np.zeros(len(labels)), np.arange(len(labels))
    for _ in range(network.max_iter):
        model.partial_fit(x, labels, classes=np.arange(CLASSES))
        logits = model.predict_log_proba(x)  # but for a constant in each row
        own = logits[row, labels]
        logits[row, labels] = -np.inf
        total -= own - logits.max(axis=1)
    return total / network.max_iter


def quality(scores: np.ndarray, wrong: np.ndarray) -> Row:
    """AUROC, and the share of wrong labels among as many of the worst as there are."""
    worst = np.argsort(-scores, kind="stable")[: wrong.sum()]
    return {"auroc": float(roc_auc_score(wrong, scores)), "precision": float(wrong[worst].mean())}


def estimates(found: Any, clean: np.ndarray, labels: np.ndarray) -> Row:
    """How far the estimated noise rate and confusion are from the truth; for the latter half the sum of differences."""
    truth = np.zeros((CLASSES, CLASSES))
    np.add.at(truth, (clean, labels), 1 / len(labels))
    return {
        "noise_rate": found.noise_rate,
        "true_rate": float(np.mean(clean != labels)),
        "confusion_error": float(abs(found.confusion - truth).sum() / 2),
        "cleaned_right": float(np.mean(found.cleaned == clean)),
    }


def rank_one(x: np.ndarray, clean: np.ndarray, setting: Row) -> Iterator[Row]:
    labels = make_wrong(clean, setting["noise_model"], setting["noise"], setting["seed"])
    wrong, seed = labels != clean, setting["seed"]
    network = clone(audits.classifier(len(labels))).set_params(random_state=seed)
    logistic = clone(network).set_params(schedule=None, t1=1.0, t2=1.0, tol=0.0, n_iter_no_change=network.max_iter)

    def probabilities(model: Any, repeat: int) -> np.ndarray:
        folds = StratifiedKFold(audits.FOLDS, shuffle=True, random_state=100 * seed + repeat)
        return out_of_fold(model.set_params(random_state=100 * seed + repeat), x, labels, folds)[2]

    started = time.perf_counter()
    probs = probabilities(logistic, 0)
    seconds = time.perf_counter() - started
    for method in ("self_confidence", "normalized_margin"):
        name = method.replace("_", "-").replace("normalized-", "normalised ")
        scores = 1 - get_label_quality_scores(labels, probs, method=method)
        row = quality(scores, wrong) | estimates(label_issues(labels, probs), clean, labels)
        yield {"contender": f"{CLEANLAB}, {name}"} | row | {"seconds": seconds}
    started = time.perf_counter()
    scores = epoch_margins(network, x, labels, seed)
    yield {"contender": EPOCH_MARGINS} | quality(scores, wrong) | {"seconds": time.perf_counter() - started}
    started, total = time.perf_counter(), np.zeros_like(probs)
    for repeat in range(REPEATS):
        total += probabilities(network, repeat)
        seconds = time.perf_counter() - started
        for score in ("confidence", "margin"):
            name = f"{OURS}, {score}" + (f", {repeat + 1} times" if repeat else "")
            if name in CONTENDERS:
                found = label_issues(labels, total / (repeat + 1), score=score)
                row = quality(found.scores, wrong) | estimates(found, clean, labels)
                yield {"contender": name} | row | {"seconds": seconds}


# Run in a process of its own, whose peak is the one measured: neither scikit-learn nor torch is loaded for ours.
MEMORY = """
import json, resource, sys, time
import numpy as np
n, classes, which = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
sys.path += json.loads(sys.argv[4])
rng = np.random.default_rng(0)
probs = np.empty((n, classes), np.float32)
for start in range(0, n, 1000):
    part = probs[start : start + 1000]
    rng.standard_normal(dtype=np.float32, out=part)
    part *= 2
    np.exp(part, out=part)
    part /= part.sum(axis=1, keepdims=True)
labels = np.concatenate([np.arange(classes), rng.integers(0, classes, n - classes)])
if which == "audit":
    from bitempered.audit import label_issues as find
else:
    from cleanlab.filter import find_label_issues
    find = lambda labels, probs: find_label_issues(labels, probs, return_indices_ranked_by="self_confidence", n_jobs=1)
started = time.perf_counter()
find(labels, probs)
seconds = time.perf_counter() - started
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"seconds": seconds, "peak": peak / probs.nbytes}))
"""


def memory(which: str, shape: tuple[int, int]) -> Row:
    arguments = [sys.executable, "-c", MEMORY, *map(str, shape), which, json.dumps(sys.path)]
    done = subprocess.run(arguments, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"ended by signal {-done.returncode}"])[-1]
        return {"failed": reason[:200]}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def spread(values: list[float], digits: int) -> str:
    return f"{mean(values):.{digits}f}" + (f" ± {stdev(values):.{digits}f}" if len(values) > 1 else "")


def report(rows: list[Row]) -> str:
    parts = ["# Finding wrong labels\n"]
    for dataset in ("digits", "mnist"):
        found = [row for row in rows if row["part"] == dataset]
        if not found:
            continue
        what = "all 1,797 digits" if dataset == "digits" else f"{MNIST_ROWS:,} of MNIST's training images"
        for key, title, digits in (("auroc", "AUROC", 4), ("precision", "Precision at the number of errors", 3)):
            cases = [(model, rate) for model in MODELS for rate in RATES]
            lines = [
                [
                    name,
                    *(spread(values, digits) if (values := pick(found, name, *case, key)) else "–" for case in cases),
                ]
                for name in CONTENDERS
            ]
            head = ["", *(f"{model} {rate:.0%}" for model, rate in cases)]
            parts.append(f"## {title}, {what}\n\n{grid(head, lines, ['---', *['---:'] * len(cases)])}\n")
        lines = [
            [
                f"{model} {rate:.0%}",
                f"{100 * mean(pick(found, name, model, rate, 'true_rate')):.1f}",
                spread([100 * v for v in pick(found, name, model, rate, "noise_rate")], 1),
                spread([100 * v for v in pick(found, name, model, rate, "confusion_error")], 1),
                spread([100 * v for v in pick(found, name, model, rate, "cleaned_right")], 1),
            ]
            for model in MODELS
            for rate in RATES
            for name in [f"{OURS}, margin"]
            if pick(found, name, model, rate, "noise_rate")
        ]
        head = ["", "wrong", "estimated", "misplaced in the confusion", "right when cleaned"]
        parts.append(f"## What `audit` estimates, {what}, % of rows\n\n{grid(head, lines, ['---', *['---:'] * 4])}\n")
        draws = {len(pick(found, CONTENDERS[0], *case, "auroc")) for case in cases}
        number = f"{max(draws)}" if len(draws) == 1 else f"{min(draws)} to {max(draws)} (unfinished)"
        parts.append(
            f"Mean ± sample standard deviation over {number} draws of the noise. Class-dependent noise is a rate "
            f"of some classes ({', '.join(f'{a} to {b}' for a, b in MISTAKEN.items())}), half as much of all labels. "
            f"Same folds, layers and optimiser for all; cross-entropy trains for {audits.EPOCHS} epochs, `audit` may "
            "stop after half of them. Its settings were chosen while looking at digits with these draws of noise. "
            "The margins over epochs are of one "
            f"training on all rows, and `{OURS}, margin, {REPEATS} times` takes {REPEATS} times as long as once.\n"
        )
    if sizes := [row for row in rows if row["part"] == "memory"]:
        lines = [
            [
                f"{row['shape'][0]:,} x {row['shape'][1]:,}",
                row["contender"],
                *(
                    ("failed: " + row["failed"], "")
                    if "failed" in row
                    else (f"{row['seconds']:.0f}", f"{row['peak']:.2f}")
                ),
            ]
            for row in sizes
        ]
        head = ["float32 probabilities", "", "seconds", "peak memory, in sizes of the input"]
        parts.append(
            f"## Memory\n\n{grid(head, lines, ['---', '---', '---:', '---:'])}\n\nPeak memory is of the whole process, "
            "the probabilities included. `audit` is `label_issues`; cleanlab's is `find_label_issues`, ranked by "
            "self-confidence, in one process.\n"
        )
    last = rows[-1]
    commits = ", ".join(sorted({row["commit"] for row in rows}))
    parts.append(
        f"Made by benchmarks/audit.py (commit {commits}) with bitempered {last['bitempered']}, torch {last['torch']}, "
        f"scikit-learn {last['sklearn']} and cleanlab {last['cleanlab']} on {last['device']}, one thread, "
        f"{last['date']}.\n"
    )
    return "\n".join(parts)


def pick(rows: list[Row], contender: str, model: str, rate: float, key: str) -> list[float]:
    wanted = {"contender": contender, "noise_model": model, "noise": rate}
    return [row[key] for row in rows if key in row and all(row[name] == value for name, value in wanted.items())]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how well wrong labels are found.")
    parser.add_argument("part", choices=["digits", "mnist", "memory", "report"])
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="draws of the noise")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", ConvergenceWarning)  # the number of epochs is given
    origin = provenance() | {"sklearn": sklearn.__version__, "cleanlab": cleanlab.__version__, "date": today()}
    if arguments.part == "memory":
        for which in ("audit", "cleanlab"):
            setting = {"part": "memory", "contender": which, "shape": list(SHAPE)}
            if find(read_rows(ROWS), setting) is None:
                append_rows(ROWS, [setting | memory(which, SHAPE) | origin])
    elif arguments.part != "report":
        x, clean = read(arguments.part, arguments.data_dir)
        for seed in range(arguments.seeds):
            for model in MODELS:
                for rate in RATES:
                    setting = {"part": arguments.part, "noise_model": model, "noise": rate, "seed": seed}
                    if find(read_rows(ROWS), setting) is None:
                        rows = [setting | row | origin for row in rank_one(x, clean, setting)]
                        append_rows(ROWS, rows)
                        print(
                            *(f"{row['contender']}: {row['auroc']:.4f}" for row in rows), setting, sep="\n", flush=True
                        )
    write_atomically(ROWS.with_suffix(".md"), report(read_rows(ROWS)).encode())


if __name__ == "__main__":
    main()
