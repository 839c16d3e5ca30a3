"""Tables in Markdown, and a figure, from the rows of `bench`."""

import itertools
import math
from collections.abc import Iterable

from matplotlib.figure import Figure

from bitempered.experiments.files import Row
from bitempered.experiments.report import Pages, grid, made_with, png

__all__ = ["GRAPH", "figure", "markdown", "pages"]

GRAPH = ", CUDA graph"
# The same on a CPU and on a GPU, and cross-entropy and ours as in other figures.
COLOURS = {
    "cross_entropy": "tab:orange",
    "bitempered (0.8, 1.2)": "tab:blue",
    "bitempered (0.5, 4.0)": "tab:cyan",
    "port, 5 iterations (0.8, 1.2)": "tab:red",
    "Liger cross_entropy": "tab:purple",
}
MADE_WITH = (
    "bitempered",
    "commit",
    "torch",
    "cuda",
    "triton",
    "liger_kernel",
    "entmax",
    "threads",
    "vectors",
    "compiler",
)
KINDS = {
    "loss": "Loss",
    "segmentation": "Loss of images",
    "probabilities": "Loss of class probabilities",
    "binary": "Binary loss",
    "linear": "Linear layer and loss",
    "softmax": "Tempered softmax at t = 1/2, which is entmax with alpha = 3/2",
}
OF_KIND = {"segmentation": ", in images", "probabilities": ", class probabilities", "binary": ", binary"}
LEGEND = """\
Random logits of standard deviation 1, class indices, mean over the rows. (t1, t2) are the temperatures of the
bi-tempered loss; contenders without a pair compute cross-entropy. The port is what copies of the published code do:
one-hot labels, 5 fixed-point iterations, autograd.

- µs: the median of runs in which all contenders took turns, in random order, and quartiles; ÷: over another
  contender's median.
- copy share: the time of one copy of the logits (a read and a write) over the contender's.
- error, against float64: of the loss relative to max(1, loss), or of a softmax's worst row; of a row's gradient
  (a linear layer's: in its input) relative to its norm, the worst row."""
ON_GPU = """\
- memory: what one call adds at its peak, over the size of the logits. Liger's cross_entropy adds nothing because it
  writes the gradient over the logits.
- Times are between two CUDA events around the call, launches from Python included, after 2 ms of the same call and a
  flush of the L2 cache. A CUDA graph's and the copy's are the device's alone."""


def pages(rows: list[Row], name: str) -> Pages:
    """Return the files rendered from the rows of `name`.jsonl."""
    return {f"{name}.md": markdown(rows, name).encode(), f"{name}.png": png(figure(rows))}


def by_case(rows: Iterable[Row]) -> list[list[Row]]:
    columns = ("rows", "classes", "dtype", "kind", "features", "sweep")
    return [list(group) for _, group in itertools.groupby(rows, lambda row: [row[column] for column in columns])]


def named_grid(lines: list[list[str]]) -> list[str]:
    """Return a table whose first column holds names."""
    head, *body = lines
    return grid(head, body, ["---", *["---:"] * (len(head) - 1)]).splitlines()


def number(x: float) -> str:
    """Format with three digits, or all those before the decimal point."""
    return f"{x:,.{max(0, 2 - math.floor(math.log10(x)))}f}"


def table(rows: list[Row]) -> list[str]:
    """Return the table of one case, a line for each contender."""
    references = dict.fromkeys(name for row in rows for name in row.get("over", {}))
    with_copy, with_memory = (any(column in row for row in rows) for column in ("copy_share", "peak_over_logits"))
    head = ["contender", "µs (quartiles)", *(f"÷ {name}" for name in references)]
    head += ["copy share"] * with_copy + ["memory ÷ logits"] * with_memory + ["error of loss", "of gradient", "runs"]
    lines = [head]
    for row in rows:
        if "median_us" not in row:
            lines.append([row["label"], row["failed"], *[""] * (len(head) - 2)])
            continue
        low, high = map(number, row["quartiles_us"])
        line = [row["label"], f"{number(row['median_us'])} ({low} to {high})"]
        line += [f"{row['over'][name]:.2f}" if name in row["over"] else "" for name in references]
        line += [f"{row['copy_share']:.0%}"] if with_copy else []
        line += [f"{row['peak_over_logits']:.2f}"] if with_memory else []
        lines.append([*line, f"{row['loss_error']:.1e}", f"{row['gradient_error']:.1e}", str(row["runs"])])
    return named_grid(lines)


def glance(rows: list[Row]) -> list[str]:
    """Return the table of our losses, relative to those of torch and Liger-Kernel, with the device's own time."""
    head = ["N × C", "(t1, t2)", "µs", "÷ torch", "÷ Liger", "copy share", "device alone, µs", "its copy share"]
    lines = [[*head, "memory ÷ logits", "error of gradient"]]
    for group in by_case(row for row in rows if row["kind"] != "softmax" and not row["sweep"]):
        labelled = {row["label"]: row for row in group if "median_us" in row}
        for row in group:
            if row["contender"] != "bitempered" or row["label"] not in labelled:
                continue
            liger, torch = (
                next((f"{value:.2f}" for name, value in row["over"].items() if ("Liger" in name) == wanted), "")
                for wanted in (True, False)
            )
            alone = labelled.get(row["label"] + GRAPH, {})
            shares = [f"{one['copy_share']:.0%}" if "copy_share" in one else "" for one in (row, alone)]
            kind = (
                f", fused with a linear layer of {row['features']:,}"
                if row["features"]
                else OF_KIND.get(row["kind"], "")
            )
            memory = row.get("peak_over_logits")
            lines.append([
                f"{row['rows']:,} × {row['classes']:,}, {row['dtype']}{kind}", f"({row['t1']}, {row['t2']})",
                number(row["median_us"]), torch, liger, shares[0],
                number(alone["median_us"]) if alone else "", shares[1],
                "" if memory is None else f"{memory:.2f}", f"{row['gradient_error']:.1e}",
            ])  # fmt: skip
    used = [any(line[column] for line in lines[1:]) for column in range(len(lines[0]))]
    return named_grid([list(itertools.compress(line, used)) for line in lines])


def growth(rows: list[Row], sweep: str) -> list[str]:
    """Return a column per contender: microseconds, and nanoseconds per logit, constant where time is linear."""
    labels = dict.fromkeys(row["label"] for row in rows)
    lines = [[sweep, *labels]]
    for group in by_case(rows):
        us = {row["label"]: row["median_us"] for row in group if "median_us" in row}
        logits = group[0]["rows"] * group[0]["classes"]
        cells = [f"{number(us[label])} ({number(1e3 * us[label] / logits)})" if label in us else "" for label in labels]
        lines.append([f"{group[0][sweep]:,}", *cells])
    return named_grid(lines)


def markdown(rows: list[Row], name: str) -> str:
    """Return the results as a page; `name` is that of the files beside it."""
    lines = [f"# One forward and backward on {rows[0]['device']}", "", LEGEND, *([ON_GPU] if name == "gpu" else [])]
    if all(row.get("runs", 0) <= 3 for row in rows):
        lines += ["", "Three runs at most of each: this shows that everything runs, not how fast."]
    lines += ["", "## At a glance", "", *glance(rows)]
    for group in by_case(row for row in rows if not row["sweep"]):
        row = group[0]
        features = f" of {row['features']:,} features" if row["features"] else ""
        shape = f"{row['rows']:,} × {row['classes']:,}{features}, {row['dtype']}"
        lines += ["", f"## {KINDS[row['kind']]}: {shape}", "", *table(group)]
    for sweep, fixed in (("classes", "rows"), ("rows", "classes")):
        if points := [row for row in rows if row["sweep"] == sweep]:
            title = f"Growth with {sweep}, {points[0][fixed]:,} {fixed}, {points[0]['dtype']}"
            lines += ["", f"## {title}: µs (ns per logit)", "", *growth(points, sweep)]
    made = f"{made_with(rows[0], MADE_WITH)}. Every figure: {name}.jsonl."
    return "\n".join([*lines, "", made, "", f"![]({name}.png)", ""])


def figure(rows: list[Row]) -> Figure:
    """Draw time against classes and rows, and memory against classes if it was measured; slope 1 in grey."""
    panels = [("classes", "rows", "median_us", 1.0), ("rows", "classes", "median_us", 1.0)]
    if any(row["sweep"] and row.get("peak_bytes") for row in rows):
        panels.append(("classes", "rows", "peak_bytes", 2.0**-20))
    names = list(dict.fromkeys(row["label"] for row in rows if row["sweep"] and not row["label"].endswith(GRAPH)))
    canvas = Figure(figsize=(5 * len(panels), 4.8), dpi=150, layout="constrained")
    for axes, (sweep, fixed, column, unit) in zip(canvas.subplots(1, len(panels)), panels, strict=True):
        points = [row for row in rows if row["sweep"] == sweep and row.get(column)]
        if column == "peak_bytes":
            points = [row for row in points if not row["label"].endswith(GRAPH)]
        curves = {
            label: [(row[sweep], unit * row[column]) for row in points if row["label"] == label]
            for label in dict.fromkeys(row["label"] for row in points)
        }
        for label, curve in curves.items():
            # A contender keeps its colour in every panel, even if others are missing; dotted means the device alone.
            name = label.removesuffix(GRAPH)
            colour = COLOURS.get(name, f"C{names.index(name)}")
            style = "o:" if label.endswith(GRAPH) else "o-"
            axes.plot(*zip(*curve, strict=True), style, color=colour, markersize=4, label=label)
        if points:
            (start, _), (end, top) = curves[points[0]["label"]][0], max(max(curve) for curve in curves.values())
            axes.plot([start, end], [1.5 * top * start / end, 1.5 * top], "--", color="grey", label="slope 1")
            axes.set_title(f"{points[0][fixed]:,} {fixed}, {points[0]['dtype']}", fontsize="medium")
        what = "forward and backward, µs" if column == "median_us" else "peak memory beside the logits, MiB"
        axes.set(xscale="log", yscale="log", xlabel=sweep, ylabel=what)
        axes.grid(alpha=0.3)
    canvas.legend(*canvas.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    return canvas
