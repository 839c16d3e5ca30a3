"""A search for logits that are hard to normalise, and the hardest it has found: witnesses.json.

`python tests/adversary.py [seed]` searches anew and keeps what is harder than what is there. Where a search ends
depends on the machine's exp and log; a stored witness does not.
"""

import itertools
import json
import math
import sys
from pathlib import Path

import numpy as np

from bitempered import core
from bitempered.encoding import namespace

WITNESSES = Path(__file__).parent / "witnesses.json"
CLASS_COUNTS = [3, 10, 1000, 2**18]
ADVERSARIAL_T = [0, 0.1, 0.3, 0.5, 0.8, 0.99, 1 + 1e-6, 1.01, 1.05, 1.2, 1.5, 2, 4, 10, 100]
LEVELS = 12

# The search runs in float64 for both precisions, to see convergence apart from rounding (which test_mass bounds).
FLOAT64, FLOAT32 = 2.0**-52, 2.0**-23
BAR = {FLOAT64: 1e-11, FLOAT32: 1e-6}


def weighted(counts):
    """NumPy as core's namespace, where class j stands for counts[j] equal classes: 2^18 classes cost a dozen."""
    return namespace(np, sum=lambda x, axis: np.sum(counts * x, axis=axis, keepdims=True))


def mass_error(gaps, counts, t, steps):
    """abs(mass - 1) after `steps` steps of each row: counts[i, j] logits lie gaps[i, j] below the largest."""
    xp = weighted(counts)
    m = core.normalizer(gaps, t, steps=steps, axis=1, xp=xp)
    return np.abs(xp.sum(np.exp(core.log_probs(gaps, m, t, xp=xp)), axis=1) - 1)[:, 0]


def logits(genes, classes):
    """Gaps and counts from each row of genes: log gaps, log multiplicities, log class count."""
    gaps = np.exp(np.clip(genes[:, :LEVELS], math.log(1e-6), math.log(2e4)))  # of logits up to 1e4
    share = np.exp(genes[:, LEVELS : 2 * LEVELS])
    total = np.exp(np.clip(genes[:, 2 * LEVELS :], 0, math.log(classes - 1)))
    ends = np.round(np.cumsum(share / share.sum(1, keepdims=True), axis=1) * total)
    counts = np.diff(ends, prepend=0)  # at most `classes` with the largest
    return np.pad(gaps, ((0, 0), (1, 0))), np.pad(counts, ((0, 0), (1, 0)), constant_values=1)


def worst_errors(t, classes, *, seed=0, population=400, generations=15, error=mass_error):
    """For 1, 2, ... steps the largest error that logits were found for, and those logits.

    `error` tells what a number of steps leaves. Evolution: the logits that are hardest for one number of steps are the
    parents of those for the next.
    """
    rng = np.random.default_rng(seed)
    genes = np.concatenate(
        [
            rng.uniform(-13, 10, (population, LEVELS)),
            rng.uniform(-12, 0, (population, LEVELS)),
            rng.uniform(0, math.log(classes), (population, 1)),
        ],
        axis=1,
    )
    # Ladders, where each step of Newton clears one rung, are hard for t < 1: half the population starts there.
    ladder = np.arange(LEVELS)
    for row in genes[::2]:
        shrink = rng.uniform(0.2, 0.9)
        row[:LEVELS] = rng.uniform(-3, 9) + ladder * math.log(shrink) * rng.uniform(1, 2)
        row[LEVELS : 2 * LEVELS] = -ladder * math.log(1 - shrink)
        row[2 * LEVELS] = math.log(classes) * rng.uniform(0.6, 1)
    start = genes
    for steps in itertools.count(1):
        genes = np.concatenate([start, genes])
        errors = error(*logits(genes, classes), t, steps)
        for _ in range(generations):
            best = np.argsort(-errors)[: population // 8]
            children = np.repeat(genes[best], 7, axis=0)
            change = rng.normal(size=children.shape) * rng.choice([0.03, 0.2, 1.0], (len(children), 1))
            children += change * (rng.random(children.shape) < 0.3)
            genes = np.concatenate([genes[best], children])
            errors = np.concatenate([errors[best], error(*logits(children, classes), t, steps)])
        gaps, counts = logits(genes[[errors.argmax()]], classes)
        yield errors.max(), (gaps[0], counts[0])


def search(t, classes, *bars, **options):
    """Of each bar, the highest first: the most steps that leave an error above it, and the logits that show it."""
    found, steps, hardest = worst_errors(t, classes, **options), 0, None
    error, logits = next(found)
    for bar in bars:
        while error > bar:
            steps, hardest = steps + 1, logits
            error, logits = next(found)
        yield steps, hardest


def witnesses():
    return json.loads(WITNESSES.read_text())


def main(seed):
    known = {(w["t"], w["classes"]): w for w in witnesses()} if WITNESSES.exists() else {}
    bar = 10 * BAR[FLOAT32]  # so that no machine's rounding takes a witness below the bar itself
    for t in ADVERSARIAL_T:
        for classes in CLASS_COUNTS:
            ((steps, hardest),) = search(t, classes, bar, seed=seed, population=2000, generations=40)
            before = known.get((t, classes), {"steps": 0})["steps"]
            if steps <= before:
                continue
            gaps, counts = (x[hardest[1] > 0] for x in hardest)
            gaps = [float(f"{gap:.6g}") for gap in gaps]
            if mass_error(np.array([gaps]), np.array([counts]), t, steps)[0] <= bar:
                print(f"t = {t:g}, {classes} classes: the witness for {steps} steps is lost when rounded to 6 digits")
                continue
            known[t, classes] = {
                "t": t, "classes": classes, "steps": steps, "gaps": gaps, "counts": [int(n) for n in counts]
            }  # fmt: skip
            print(f"t = {t:g}, {classes} classes: {steps} steps are too few, {before} were known")
    rows = ",\n".join(json.dumps(known[key]) for key in sorted(known))
    WITNESSES.write_text(f"[\n{rows}\n]\n")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
