"""The pages of `bitempered tune`: the best recipe, the trials, which settings matter, and where the good ones lie."""

import math
import shlex
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from bitempered.experiments.cells import Comparison
from bitempered.experiments.datasets import is_table
from bitempered.experiments.losses import LossSettings
from bitempered.experiments.optimizers import OPTIMIZERS
from bitempered.experiments.report import Pages, grid, noise_in_words, png, table_csv
from bitempered.experiments.runs import Row
from bitempered.experiments.train import Training

__all__ = ["command", "importances", "pages", "python", "rows", "title"]

SHOWN = 10  # trials in the table
PAIRS = (("t1", "t2"), ("rate", "t1"), ("rate", "decay"), ("rate", "smoothing"))
LOGARITHMIC = {"rate", "decay"}


def pages(title: str, study: Any, command: str, python: str) -> Pages:
    """Return tune.md, tune.csv, importance.png and contour.png."""
    trials = rows(study)
    parts = importances(study)
    return {
        "tune.csv": table_csv(trials),
        "importance.png": png(importance_figure(parts)),
        "contour.png": png(contour_figure(trials)),
        "tune.md": markdown(title, trials, command, python).encode(),
    }


def rows(study: Any) -> list[Row]:
    """Return the finished trials; a pruned one has no score."""
    return [
        {
            "trial": trial.number, "state": trial.state.name.lower(), **trial.params,
            "score": trial.value if trial.state.name == "COMPLETE" else None,
        }
        for trial in study.get_trials(deepcopy=False)
        if trial.state.name in ("COMPLETE", "PRUNED")
    ]  # fmt: skip


def importances(study: Any) -> dict[str, float]:
    """Return each setting's share of the score's variance, by fANOVA; none if there are too few trials."""
    import optuna

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
            return dict(optuna.importance.get_param_importances(study, evaluator=evaluator))
        except (RuntimeError, ValueError):  # one complete trial, or all with the same score
            return {}


def importance_figure(parts: dict[str, float]) -> Figure:
    canvas = Figure(figsize=(6, 3), dpi=150, layout="constrained")
    axes = canvas.subplots()
    names = list(parts)[::-1]
    axes.barh(names, [parts[name] for name in names], color="tab:blue")
    axes.set_xlabel("share of the score's variance (fANOVA)")
    axes.grid(alpha=0.3, axis="x")
    return canvas


def contour_figure(trials: list[Row]) -> Figure:
    """Draw the score over pairs of settings: contours through the trials, which are dots; a cross is the best."""
    complete = [trial for trial in trials if trial["score"] is not None]
    pairs = [pair for pair in PAIRS if all(name in trial for trial in complete for name in pair)]
    across = min(len(pairs), 2)
    down = -(-len(pairs) // across)
    canvas = Figure(figsize=(4.8 * across, 3.6 * down), dpi=150, layout="constrained")
    score = np.array([trial["score"] for trial in complete])
    panels = canvas.subplots(down, across, squeeze=False)
    for axes, (x, y) in zip(panels.flat, pairs, strict=True):
        xs, ys = (np.array([scaled(name, trial[name]) for trial in complete]) for name in (x, y))
        if len({*zip(xs, ys, strict=True)}) > 3 and np.ptp(score) > 0 and min(np.ptp(xs), np.ptp(ys)) > 0:
            axes.tricontourf(xs, ys, score, levels=12, cmap="viridis")
        dots = axes.scatter(xs, ys, c=score, cmap="viridis", edgecolors="white", linewidths=0.5, s=18)
        best = int(score.argmax())
        axes.plot(xs[best], ys[best], "rx", markersize=10)
        axes.use_sticky_edges = False
        axes.margins(0.04)  # dots on the edge are whole
        axes.locator_params(nbins=6)
        axes.set_xlabel(labelled(x))
        axes.set_ylabel(labelled(y))
    canvas.colorbar(dots, ax=panels, label="validation accuracy")
    return canvas


def scaled(name: str, value: float) -> float:
    return math.log10(value) if name in LOGARITHMIC else value


def labelled(name: str) -> str:
    return f"log10 of the {name}" if name in LOGARITHMIC else name


def markdown(title: str, trials: list[Row], command: str, python: str) -> str:
    complete = sorted((trial for trial in trials if trial["score"] is not None), key=lambda trial: -trial["score"])
    names = list(dict.fromkeys(name for trial in complete for name in trial if name != "state"))
    lines = [[cell(trial.get(name)) for name in names] for trial in complete[:SHOWN]]
    return f"""# {title}

{len(trials)} trials, of which {len(trials) - len(complete)} were pruned. The best recipe, tested with other seeds:

    {command}

In Python:

```python
{python}
```

The best {min(SHOWN, len(complete))} trials (all are in tune.csv). With a schedule the temperatures leave (1, 1) at
`begin` and arrive `length` later, both fractions of the run:

{grid(names, lines)}

![](importance.png)

![](contour.png)
"""


def cell(value: Any) -> str:
    return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def title(comparison: Comparison, loss: str, clean_file: str | None) -> str:
    """Say what was searched."""
    if comparison.clean_rows is not None:
        scored = f"{comparison.clean_rows} clean labels"
    else:
        scored = "validation labels" if clean_file is None else f"the labels in {clean_file}"
    level = comparison.cells[0].noise
    noise = f" with {noise_in_words(level, comparison.noise_model)}" if level else ""
    return f"The {loss} loss on {comparison.dataset}{noise}, scored by accuracy on {scored}"


def command(comparison: Comparison, recipe: LossSettings, data_dir: Path | None) -> str:
    """Return the command that trains with a recipe and tests it."""
    options = {
        "dataset": comparison.dataset, "losses": f"{recipe.loss.text}@{recipe.rate:g}", "weight-decay": recipe.decay,
        "noise": None if comparison.noise_model == "human" else comparison.cells[0].noise,
        "noise-model": comparison.noise_model if comparison.noise_model != "symmetric" else None,
        "network": comparison.training.network, "epochs": comparison.training.epochs,
        "label-column": comparison.label_column if is_table(comparison.dataset) else None,
        "data-dir": data_dir,
    }  # fmt: skip
    given = [f"--{name} {shlex.quote(f'{value}')}" for name, value in options.items() if value is not None]
    return "bitempered compare " + " ".join(given)


def python(training: Training, recipe: LossSettings) -> str:
    """Return a recipe as Python, for PyTorch."""
    loss = recipe.loss
    smoothing = f"label_smoothing={loss.smoothing:g}" if loss.smoothing else ""
    optimizer = OPTIMIZERS[training.optimizer].python.format(rate=recipe.rate, momentum=training.momentum)
    lines, imports, body = [], ["import torch"], []
    if loss.name == "logistic":
        lines.append(f"criterion = torch.nn.CrossEntropyLoss({smoothing})")
    else:
        imports.append("from bitempered.torch import BiTemperedLogisticLoss")
        t1, t2 = (f"{number:g}" for number in loss.numbers)
        lines.append(f"criterion = BiTemperedLogisticLoss({t1}, {t2}{', ' if smoothing else ''}{smoothing})")
        if loss.schedule is not None:
            imports.insert(1, "from bitempered.schedules import anneal")
            begin, finish = (f"{epoch:g}" for epoch in loss.schedule)
            lines.append(f"temperatures = anneal((1, 1), ({t1}, {t2}), begin={begin}, finish={finish})")
            body.append("    criterion.t1, criterion.t2 = temperatures(epoch)")
    lines.append(f"optimizer = torch.optim.{optimizer}, weight_decay={recipe.decay:g})")
    body.append("    ...  # train with criterion(logits, labels)")
    return "\n".join([*imports, "", *lines, f"for epoch in range({training.epochs}):", *body])
