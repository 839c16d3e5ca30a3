"""The linear estimator on a sparse million of rows with 100,000 features: in batches, and all at once.

    python benchmarks/scale_linear.py            (minutes; 2 GB of memory for all at once)
    python benchmarks/scale_linear.py --render   (only the page again, from benchmarks/scale_linear.jsonl)

A row is made up like a short text: 30 words, of which 15 % belong to its class; some words are far more frequent than
others. 40 % of the labels are wrong. Batches are drawn when they are needed. Each line has a process of its own,
whose largest memory is that of the interpreter, the data it holds and the fit.
"""

import argparse
import multiprocessing
import os
import resource
import time
from pathlib import Path

import numpy as np
from scipy import sparse

from bitempered.experiments.files import read_rows, write_atomically, write_rows
from bitempered.experiments.runs import provenance, today
from bitempered.sklearn import BiTemperedLogisticRegression

ROWS = Path(__file__).with_suffix(".jsonl")
EXAMPLES, FEATURES, CLASSES, WORDS, BATCH = 1_000_000, 100_000, 4, 30, 50_000
NOISE = 0.4
TESTED = 20_000
WAYS = {"partial_fit": (0.8, 1.2), "fit": (0.8, 1.2)}


def draw(seed: int, count: int) -> tuple[sparse.csr_array, np.ndarray, np.ndarray]:
    """Examples, their noisy labels and their classes."""
    rng = np.random.default_rng(seed)
    classes = rng.integers(CLASSES, size=count)
    anyones = (FEATURES * rng.random((count, WORDS)) ** 3).astype(np.int32)
    own = classes[:, None] + CLASSES * (FEATURES // CLASSES * rng.random((count, WORDS)) ** 3).astype(np.int32)
    words = np.where(rng.random((count, WORDS)) < 0.15, own, anyones).astype(np.int32)
    ends = np.arange(0, count * WORDS + 1, WORDS, dtype=np.int32)
    X = sparse.csr_array((np.full(count * WORDS, WORDS**-0.5), words.ravel(), ends), shape=(count, FEATURES))
    X.sum_duplicates()
    other = (classes + rng.integers(1, CLASSES, size=count)) % CLASSES
    return X, np.where(rng.random(count) < NOISE, other, classes), classes


def work(way: str, queue: multiprocessing.Queue) -> None:
    model = BiTemperedLogisticRegression(*WAYS[way])
    batches = (draw(seed, BATCH)[:2] for seed in range(EXAMPLES // BATCH))
    if way == "fit":
        parts = list(batches)
        batches = iter([(sparse.vstack([X for X, _ in parts], format="csr"), np.concatenate([y for _, y in parts]))])
        del parts
    cpu = wall = 0.0
    iterations = 0
    for X, y in batches:
        starts = time.process_time(), time.perf_counter()
        model.fit(X, y) if way == "fit" else model.partial_fit(X, y, classes=range(CLASSES))
        cpu, wall = cpu + time.process_time() - starts[0], wall + time.perf_counter() - starts[1]
        iterations += int(model.n_iter_[0])
    X, _, classes = draw(EXAMPLES, TESTED)
    queue.put(
        {
            "way": way, "examples": EXAMPLES, "features": FEATURES, "classes": CLASSES, "noise": NOISE,
            "accuracy": round(model.score(X, classes), 5), "cpu_seconds": round(cpu, 1), "seconds": round(wall, 1),
            "iterations": iterations, "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        }
    )  # fmt: skip


def measure() -> None:
    context, rows = multiprocessing.get_context("spawn"), []
    for way in WAYS:
        load, queue = round(os.getloadavg()[0], 1), context.Queue()
        process = context.Process(target=work, args=(way, queue))
        process.start()
        found = queue.get()
        process.join()
        rows.append({**found, "cores": os.cpu_count(), "load": load, **provenance(), "date": today()})
        print(found, flush=True)
    write_rows(ROWS, rows)


def page(rows: list[dict]) -> str:
    by_way = {row["way"]: row for row in rows}
    lines = [
        "| | accuracy on clean labels, % | CPU seconds | iterations | memory, MB |",
        "| --- | --- | --- | --- | --- |",
    ]
    for way, (t1, t2) in WAYS.items():
        if way in by_way:
            row, name = by_way[way], f"{way}, t1 = {t1:g}, t2 = {t2:g}"
            cells = (
                f"{100 * row['accuracy']:.2f} | {row['cpu_seconds']:.0f} | {row['iterations']} | {row['memory_mb']:,}"
            )
            lines.append(f"| {name} | {cells} |")
    row = rows[-1]
    made = f"commit {row['commit']},\n{row['device']}, {row['date']}; the load of the machine was {row['load']}"
    table = "\n".join(lines)
    return f"""# The linear estimator on a million rows

{table}

{EXAMPLES:,} x {FEATURES:,}, {CLASSES} classes, {WORDS} words in a row, {NOISE:.0%} of the labels wrong; accuracy on
{TESTED:,} others, C = 1, one seed. `partial_fit` has batches of {BATCH:,} rows, drawn when needed, each seen once;
`fit` has all in memory. Time is that of the fit alone, on one thread; memory is the largest of the process.

Made by benchmarks/scale_linear.py, {made} at the start.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--render", action="store_true", help="only the page again, from the rows")
    if not parser.parse_args().render:
        os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before the processes start
        measure()
    write_atomically(ROWS.with_suffix(".md"), page(read_rows(ROWS)).encode())


if __name__ == "__main__":
    main()
