"""How well wrong labels are found: bitempered.audit beside cleanlab and beside margins over epochs.

    python benchmarks/audit.py digits                    (1,297 of them; the other 500 test what is trained again)
    python benchmarks/audit.py mnist --data-dir DIR      (5,000 of its training images, tested on its test images)
    python benchmarks/audit.py gaussian                  (six Gaussian classes)
    python benchmarks/audit.py cifar100n --data-dir DIR  (labels by people, on features of patches)
    python benchmarks/audit.py memory                    (200,000 x 5,000 probabilities: 4 GB, and cleanlab needs more)

It needs the extra experiments, and cleanlab. Labels are made wrong in known ways; the contenders rank them:

- cleanlab's two label quality scores, for out-of-fold probabilities of a network with cross-entropy;
- margins of the logits, averaged over the epochs of one cross-entropy training on all rows (Pleiss et al., 2020);
- `bitempered.audit` with the network of `bitempered audit`, on the same folds, by each of its scores;
- the default score of `bitempered.audit` for the probabilities of cross-entropy, to tell the loss from the score.

All networks have the same layers, optimiser, learning rate, batches and epochs, and train to the last epoch. Then the
networks train again on the rows that are left, or on the labels suggested. Goes on from benchmarks/audit.jsonl, which
gets a row for each contender and draw of the noise, and writes the page benchmarks/audit.md.
"""

import argparse
import importlib.metadata
import json
import math
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import sklearn
import torch
from sklearn.base import clone
from sklearn.cluster import MiniBatchKMeans
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import StratifiedKFold
from sklearn.neural_network import MLPClassifier

from bitempered import noise
from bitempered.audit import SCORES, Audit, label_issues, out_of_fold
from bitempered.experiments import audits
from bitempered.experiments.data import fingerprint
from bitempered.experiments.datasets import DATASETS, read_parts
from bitempered.experiments.files import append_rows, read_rows, write_atomically
from bitempered.experiments.report import grid, newest
from bitempered.experiments.runs import find, identity, provenance, today

ROWS = Path(__file__).with_suffix(".jsonl")
PARTS = {"digits": "1,297 digits", "mnist": "5,000 of MNIST's training images", "gaussian": "six Gaussian classes"}
MODELS = ("symmetric", "pair-flip", "class-dependent")
RATES = (0.2, 0.4)
# The classes of digits that people mistake for each other; the rate is that of these classes.
MISTAKEN = {7: 1, 2: 7, 5: 6, 6: 5, 3: 8}
CLEANLAB = {
    "self_confidence": "cleanlab self-confidence, cross-entropy",
    "normalized_margin": "cleanlab normalised margin, cross-entropy",
}
EPOCH_MARGINS = "margins over epochs, cross-entropy"
LOGISTIC = f"{SCORES[0]}, cross-entropy"
OURS, CONSTANT = "audit", "bi-tempered (0.5, 4)"
CONTENDERS = (*CLEANLAB.values(), EPOCH_MARGINS, LOGISTIC, *(f"{OURS}, {score}" for score in SCORES))
AGAIN = {
    "cross-entropy": ("as given", "without cleanlab's issues", "without wrong ones", "cleaned"),
    "bi-tempered": ("as given", "without wrong ones", "cleaned"),
}
SEEDS = 5
MNIST_AGAIN = 2  # seeds with which networks train again on MNIST
TEST_DIGITS = 500
MNIST_ROWS = 5_000
CIFAR_ROWS = 10_000
SHAPE = (200_000, 5_000)

Row = dict[str, Any]
Part = tuple[np.ndarray, np.ndarray]


def make_wrong(labels: np.ndarray, model: str, rate: float, seed: int) -> np.ndarray:
    rng, classes = np.random.default_rng(seed), int(labels.max()) + 1
    if model == "symmetric":
        return noise.symmetric(labels, rate, rng=rng, num_classes=classes)
    if model == "pair-flip":
        return noise.pair_flip(labels, rate, rng=rng, num_classes=classes)
    return noise.asymmetric(labels, rate, rng=rng, mapping=MISTAKEN)


def gaussian_classes(n: int, classes: int = 6, features: int = 50) -> Part:
    """Classes with normal features of deviation 1, whose centres are about 6 apart."""
    rng = np.random.default_rng(2019)
    centres = rng.normal(scale=0.6, size=(classes, features))
    labels = rng.integers(0, classes, n)
    return (centres[labels] + rng.normal(size=(n, features))).astype(np.float32), labels


def read(dataset: str, data_dir: Path | None) -> tuple[Part, Part | None]:
    """Return the rows to audit, and those to test on."""
    if dataset == "gaussian":
        return gaussian_classes(2_000), None
    rows = audits.read(dataset, data_dir=data_dir)
    order = np.random.default_rng(2019).permutation(len(rows.labels))
    if dataset == "digits":
        chosen, held = order[TEST_DIGITS:], order[:TEST_DIGITS]
        return (rows.features[chosen], rows.labels[chosen]), (rows.features[held], rows.labels[held])
    chosen = order[:MNIST_ROWS]
    _, (images, labels) = read_parts(dataset, data_dir)
    test = images.reshape(len(images), -1).astype(np.float32) / 255, labels.astype(np.int64)
    return (rows.features[chosen], rows.labels[chosen]), test


def epoch_margins(network: Any, x: np.ndarray, labels: np.ndarray, seed: int) -> np.ndarray:
    """Minus the mean over all epochs of the label's logit less the largest other one, on the rows trained on."""
    model = MLPClassifier(network.hidden_layer_sizes, batch_size=network.batch_size, random_state=seed)
    total, row = np.zeros(len(labels)), np.arange(len(labels))
    for _ in range(network.max_iter):
        model.partial_fit(x, labels, classes=np.arange(labels.max() + 1))
        logits = model.predict_log_proba(x)  # but for a constant in each row
        own = logits[row, labels]
        logits[row, labels] = -np.inf
        total -= own - logits.max(axis=1)
    return total / network.max_iter


def quality(scores: np.ndarray, wrong: np.ndarray) -> Row:
    """AUROC, and the share of wrong labels among as many of the worst as there are."""
    worst = np.argsort(-scores, kind="stable")[: wrong.sum()]
    return {"auroc": float(roc_auc_score(wrong, scores)), "precision": float(wrong[worst].mean())}


def estimates(found: Audit, clean: np.ndarray) -> Row:
    """How far the estimates are from the truth: the noise rate, the confusion, the pairs that are confused.

    The error of the confusion is half the sum of differences. The true pairs are those that the true confusion has.
    """
    labels, classes = found.labels, len(found.classes)
    truth = np.zeros((classes, classes))
    np.add.at(truth, (clean, labels), 1 / len(labels))
    known = Audit(labels, found.scores, clean, found.order, truth, 1 - np.trace(truth), found.classes)
    pairs, true_pairs = ({(int(a), int(b)) for a, b, _ in one.systematic} for one in (found, known))
    return {
        "noise_rate": found.noise_rate,
        "true_rate": float(np.mean(clean != labels)),
        "confusion_error": float(abs(found.confusion - truth).sum() / 2),
        "cleaned_right": float(np.mean(found.cleaned == clean)),
        "pairs": len(pairs), "true_pairs": len(true_pairs), "pairs_right": len(pairs & true_pairs),
    }  # fmt: skip


def networks(rows: int, seed: int) -> tuple[Any, Any]:
    """The network of `bitempered audit` and the same with cross-entropy; both train to the last epoch."""
    network = audits.classifier(rows)
    network.set_params(random_state=seed, tol=0.0, n_iter_no_change=network.max_iter)
    return network, clone(network).set_params(t1=1.0, t2=1.0)


def temperatures(rows: int, classes: int) -> Row:
    """Where the temperatures of that network end, and the epochs at which they begin to move and arrive."""
    network = audits.classifier(rows)
    network.classes_ = np.arange(classes)
    pairs = network._temperatures(steps=math.ceil(rows * (audits.FOLDS - 1) / audits.FOLDS / network.batch_size))
    return {"numbers": list(pairs[-1]), "schedule": [pairs.count(pairs[0]) - 1, pairs.index(pairs[-1])]}


def probabilities(model: Any, x: np.ndarray, labels: np.ndarray, seed: int) -> np.ndarray:
    folds = StratifiedKFold(audits.FOLDS, shuffle=True, random_state=100 * seed)
    return out_of_fold(clone(model).set_params(random_state=100 * seed), x, labels, folds)[2]


def rank(x: np.ndarray, clean: np.ndarray, labels: np.ndarray, seed: int, constant: bool) -> Iterator[tuple[Row, Any]]:
    """Yield a row of each contender, and the audit behind it where there is one."""
    from cleanlab.rank import get_label_quality_scores

    wrong = labels != clean
    network, logistic = networks(len(labels), seed)
    started = time.perf_counter()
    probs = probabilities(logistic, x, labels, seed)
    seconds = time.perf_counter() - started
    for method, name in CLEANLAB.items():
        scores = 1 - get_label_quality_scores(labels, probs, method=method)
        yield {"contender": name} | quality(scores, wrong) | {"seconds": seconds}, probs
    found = label_issues(labels, probs)
    row = quality(found.scores, wrong) | estimates(found, clean)
    yield {"contender": LOGISTIC} | row | {"seconds": seconds}, None
    started = time.perf_counter()
    scores = epoch_margins(network, x, labels, seed)
    row = {"contender": EPOCH_MARGINS} | quality(scores, wrong)
    yield row | {"seconds": time.perf_counter() - started}, None
    contenders = {OURS: network}
    if constant:  # the temperatures of the paper's MNIST
        contenders[CONSTANT] = clone(network).set_params(t1=0.5, t2=4.0, rescale=True)
    for name, model in contenders.items():
        started = time.perf_counter()
        probs = probabilities(model, x, labels, seed)
        seconds = time.perf_counter() - started
        for score in SCORES:
            found = label_issues(labels, probs, score=score)
            row = quality(found.scores, wrong) | estimates(found, clean)
            yield {"contender": f"{name}, {score}"} | row | {"seconds": seconds}, found


def train_again(x: np.ndarray, labels: np.ndarray, test: Part, seed: int, found: Audit, probs: np.ndarray) -> list[Row]:
    """Return the accuracy on clean test labels of networks that train on what was found, and before."""
    from cleanlab.filter import find_label_issues

    network, logistic = networks(len(labels), seed)
    everything = np.ones(len(labels), bool)
    left = ~find_label_issues(labels, probs)  # a mask: cleanlab's default filter
    runs = {
        "as given": (labels, everything), "without wrong ones": (labels, ~found.wrong),
        "cleaned": (found.cleaned, everything), "without cleanlab's issues": (labels, left),
    }  # fmt: skip
    rows = []
    for name, model in {"bi-tempered": network, "cross-entropy": logistic}.items():
        for used, (targets, kept) in runs.items():
            if used in AGAIN[name]:
                accuracy = clone(model).fit(x[kept], targets[kept]).score(*test)
                rows.append({"contender": f"{name}, {used}", "accuracy": float(accuracy), "left": int(kept.sum())})
    return rows


def draw(dataset: str, audited: Part, test: Part | None, run: Row) -> list[Row]:
    """Return all rows of one draw of the noise."""
    x, clean = audited
    seed = run["seed"]
    labels = make_wrong(clean, run["noise_model"], run["noise"], seed)
    rows, probs, found = [], None, None
    for row, what in rank(x, clean, labels, seed, constant=dataset == "gaussian"):
        rows.append(row)
        if row["contender"] in CLEANLAB.values():
            probs = what
        elif row["contender"] == f"{OURS}, {SCORES[0]}":
            found = what
    if test is not None and (dataset == "digits" or seed < MNIST_AGAIN):
        rows += train_again(x, labels, test, seed, found, probs)
    return rows


def patch_features(images: np.ndarray, centres: int = 400, size: int = 6) -> np.ndarray:
    """Features (n, 4 centres) of images (n, 3, 32, 32), learnt without labels, as by Coates and Ng (2012).

    Patches are normalised and whitened, and compared with the centres of k-means on 10 patches of each of 10,000
    images; what is nearer than the mean distance counts. Sums over the four quarters of the image are standardised.
    """
    rng = np.random.default_rng(2019)
    planes = torch.from_numpy(images)

    def patches(chosen: torch.Tensor) -> torch.Tensor:
        """(n, places, values) of images, each patch of mean 0 and about deviation 1."""
        found = torch.nn.functional.unfold(chosen.float(), size).transpose(1, 2)
        return (found - found.mean(2, keepdim=True)) / (found.var(2, keepdim=True) + 10).sqrt()

    chosen = rng.permutation(len(images))[:10_000]
    sample = torch.cat(
        [
            part[:, torch.from_numpy(rng.integers(0, part.shape[1], 10))].flatten(0, 1)
            for part in map(patches, planes[torch.from_numpy(chosen)].split(500))
        ]
    )
    middle = sample.mean(0)
    values, vectors = torch.linalg.eigh(torch.cov((sample - middle).T))
    whiten = vectors @ torch.diag((values + 0.1).rsqrt()) @ vectors.T
    found = MiniBatchKMeans(centres, batch_size=2_000, n_init=1, random_state=0).fit(
        ((sample - middle) @ whiten).numpy()
    )
    centre = torch.from_numpy(found.cluster_centers_.astype(np.float32))
    sums = []
    for part in planes.split(200):
        white = (patches(part) - middle) @ whiten
        distance = torch.cdist(white, centre)
        near = (distance.mean(2, keepdim=True) - distance).clamp_min(0).transpose(1, 2)
        side = 32 - size + 1
        quarters = torch.nn.functional.adaptive_avg_pool2d(near.unflatten(2, (side, side)), 2)
        sums.append(quarters.flatten(1))
    features = torch.cat(sums)
    return ((features - features.mean(0)) / features.std(0)).numpy()


def people(data_dir: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return some training images of CIFAR-100, their true labels, and the labels that people gave them."""
    (images, clean), _ = read_parts("cifar100", data_dir)
    labels = DATASETS["cifar100"].human_labels.read(clean, data_dir)
    chosen = np.random.default_rng(2019).permutation(len(clean))[:CIFAR_ROWS]
    return images[chosen], clean[chosen], labels[chosen]


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
    if not values:
        return "–"
    return f"{mean(values):.{digits}f}" + (f" ± {stdev(values):.{digits}f}" if len(values) > 1 else "")


def pick(rows: list[Row], contender: str, model: str, rate: float, key: str) -> list[float]:
    wanted = {"contender": contender, "noise_model": model, "noise": rate}
    return [row[key] for row in rows if key in row and all(row[name] == value for name, value in wanted.items())]


def table(title: str, first: str, head: list[str], lines: list[list[str]]) -> str:
    return f"## {title}\n\n{grid([first, *head], lines, ['---', *['---:'] * len(head)])}\n"


def by_noise(part: str, rows: list[Row]) -> list[str]:
    """The sections of a data set with several kinds of noise."""
    what, cases = PARTS[part], [(model, rate) for model in MODELS for rate in RATES]
    head = [f"{model} {rate:.0%}" for model, rate in cases]

    def lines(names: list[str], key: str, digits: int, times: float = 1) -> list[list[str]]:
        return [
            [name, *(spread([times * v for v in pick(rows, name, *case, key)], digits) for case in cases)]
            for name in names
        ]

    sections = [
        table(f"AUROC, {what}", "", head, lines(list(CONTENDERS), "auroc", 4)),
        table(f"Precision at the number of errors, {what}", "", head, lines(list(CONTENDERS), "precision", 3)),
    ]
    ours, estimated = f"{OURS}, {SCORES[0]}", []
    for (model, rate), name in zip(cases, head, strict=True):

        def found(key: str, digits: int, times: float = 1, model: str = model, rate: float = rate) -> str:
            return spread([times * v for v in pick(rows, ours, model, rate, key)], digits)

        all_named = pick(rows, ours, model, rate, "pairs")
        estimated.append(
            [
                name,
                found("true_rate", 1, 100),
                found("noise_rate", 1, 100),
                found("confusion_error", 1, 100),
                found("cleaned_right", 1, 100),
                found("true_pairs", 1),
                found("pairs_right", 1),
                f"{sum(all_named) - sum(pick(rows, ours, model, rate, 'pairs_right')):.0f}",
            ]
        )
    columns = ["wrong, %", "estimated, %", "misplaced in the confusion, %", "right when cleaned, %"]
    columns += ["confused pairs", "of them named", "others named, in all draws"]
    sections.append(table(f"What `audit` estimates, {what}", "", columns, estimated))
    names = [f"{net}, {used}" for net, runs in AGAIN.items() for used in runs]
    sections.append(
        table(f"Trained again, {what}: accuracy on clean test labels, %", "", head, lines(names, "accuracy", 1, 100))
    )
    draws = {len(pick(rows, ours, *case, "auroc")) for case in cases}
    number = f"{max(draws)}" if len(draws) == 1 else f"{min(draws)} to {max(draws)} (unfinished)"
    again = max(len(pick(rows, names[0], *case, "accuracy")) for case in cases)
    sections.append(
        f"Draws of the noise: {number}, of them for networks trained again: {again}; ± is the sample "
        "standard deviation. Class-dependent noise is a rate of some classes "
        f"({', '.join(f'{a} to {b}' for a, b in MISTAKEN.items())}), half as much of all labels. The settings of "
        "`audit` were chosen with other draws of the noise. "
        "`without wrong ones` leaves out the labels that `audit` counts as wrong, `cleaned` takes the suggested label "
        "for them; cleanlab's issues are those of `find_label_issues`, for cross-entropy.\n"
    )
    return sections


def report(rows: list[Row]) -> str:
    rows = newest(rows, ("part", "noise_model", "noise", "seed", "contender", "shape"), ())
    parts = ["# Finding wrong labels\n"]
    of = {name: [row for row in rows if row["part"] == name] for name in (*PARTS, "cifar100n", "memory")}
    for dataset in ("digits", "mnist"):
        if of[dataset]:
            parts += by_noise(dataset, of[dataset])
    titles = {
        "gaussian": "Six Gaussian classes in 50 dimensions, 2,000 points, 40 % of the labels flipped",
        "cifar100n": "CIFAR-100N: 10,000 of the images, with labels by people, one seed",
    }
    for name, title in titles.items():
        if found := of[name]:
            contenders = dict.fromkeys(row["contender"] for row in found)
            lines = [
                [
                    contender,
                    *(
                        spread([row[key] for row in found if row["contender"] == contender], digits)
                        for key, digits in (("auroc", 4), ("precision", 3))
                    ),
                ]
                for contender in contenders
            ]
            draws = len({row["seed"] for row in found})
            title += f", {draws} draws of the noise" if draws > 1 else ""
            parts.append(table(title, "", ["AUROC", "precision at the number of errors"], lines))
    if people := [row for row in of["cifar100n"] if row["contender"] == f"{OURS}, {SCORES[0]}"]:
        row = people[0]
        parts.append(
            f"On CIFAR-100N `audit` estimates that {row['noise_rate']:.1%} of the labels are wrong; in truth "
            f"{row['true_rate']:.1%} are. It names {row['pairs']} confused pairs; {row['pairs_right']} of them are "
            f"among the {row['true_pairs']} that the true labels show. With all its suggestions, "
            f"{row['cleaned_right']:.1%} of the labels would be right. The network sees features of patches, learnt "
            "without labels (Coates and Ng, 2012): it is good enough to rank labels, too weak to correct them.\n"
        )
    if of["memory"]:
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
            for row in of["memory"]
        ]
        head = ["float32 probabilities", "", "seconds", "peak memory, in sizes of the input"]
        parts.append(
            f"## Memory\n\n{grid(head, lines, ['---', '---', '---:', '---:'])}\n\nPeak memory is of the whole process, "
            "the probabilities included. `audit` is `label_issues`; cleanlab's is `find_label_issues`, ranked by "
            "self-confidence, in one process. The machine was busier when `audit` was timed.\n"
        )
    last = rows[-1]
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    parts.append(
        "All networks have the same layers, optimiser, folds and epochs, and train to the last one. The margins over "
        "epochs are of one training on all rows.\n\n"
        f"Made by benchmarks/audit.py (commit {commits}) with bitempered {last['bitempered']}, torch {last['torch']}, "
        f"scikit-learn {last['sklearn']} and cleanlab {last['cleanlab']} on {last['device']}, one thread, "
        f"{max(row['date'] for row in rows)}.\n"
    )
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how well wrong labels are found.")
    parser.add_argument("part", choices=[*PARTS, "cifar100n", "memory", "report"])
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="draws of the noise")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", ConvergenceWarning)  # the number of epochs is given
    made_on = provenance() | {"sklearn": sklearn.__version__, "date": today()}
    if arguments.part != "report":
        made_on["cleanlab"] = importlib.metadata.version("cleanlab")

    def lacks(run: Row) -> bool:
        return find(read_rows(ROWS), run) is None

    if arguments.part == "memory":
        for which in ("audit", "cleanlab"):
            run = identity({"part": "memory", "contender": which, "shape": list(SHAPE)}, "random probabilities")
            if lacks(run):
                append_rows(ROWS, [run | memory(which, SHAPE) | made_on])
    elif arguments.part == "cifar100n":
        data = people(arguments.data_dir)
        setting = {"part": "cifar100n", "noise_model": "human", "noise": 0.4, "seed": 0} | temperatures(CIFAR_ROWS, 100)
        run = identity(setting, fingerprint(*data))
        if lacks(run):
            images, clean, labels = data
            ranked = rank(patch_features(images), clean, labels, 0, constant=False)
            append_rows(ROWS, [run | row | made_on for row, _ in ranked])
    elif arguments.part != "report":
        audited, test = read(arguments.part, arguments.data_dir)
        data = fingerprint(*audited, *(test or ()))
        schedule = temperatures(len(audited[1]), int(audited[1].max()) + 1)
        for seed in range(arguments.seeds):
            for model, rate in [(model, rate) for model in MODELS for rate in RATES]:
                if arguments.part == "gaussian" and (model, rate) != ("symmetric", 0.4):
                    continue
                setting = {"part": arguments.part, "noise_model": model, "noise": rate, "seed": seed}
                run = identity(setting | schedule, data)
                if lacks(run):
                    rows = draw(arguments.part, audited, test, run)
                    append_rows(ROWS, [run | row | made_on for row in rows])
                    print(run, *(f"{row['contender']}: {row.get('auroc', 0):.4f}" for row in rows), sep="\n")
    write_atomically(ROWS.with_suffix(".md"), report(read_rows(ROWS)).encode())


if __name__ == "__main__":
    main()
