"""Measure bitempered beside the implementations that people use today, in one run on one machine.

    python benchmarks/peers.py
    python benchmarks/peers.py --render     writes the page again, from the rows

Writes benchmarks/peers.jsonl (one row per contender, with versions) and the table benchmarks/peers.md, which the README
shows. Contenders other than bitempered are whichever of these can be imported: the packages pytorch_optimizer and
pytorch_toolbelt, and the module bi_tempered_loss_pytorch of github.com/fhopfmueller/bi-tempered-loss-pytorch.
"""

import importlib
import importlib.metadata
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import bitempered.torch as ours
from bitempered.experiments.report import measure_or_render
from bitempered.experiments.runs import commit

ROWS = Path(__file__).with_suffix(".jsonl")
PEERS = {
    "pytorch_optimizer": "pytorch_optimizer.loss.bi_tempered",
    "pytorch_toolbelt": "pytorch_toolbelt.losses.bitempered_loss",
    "PyTorch port": "bi_tempered_loss_pytorch",
}

Row = dict[str, Any]


class Contender:
    """A module with the functions `tempered_softmax` and `bi_tempered_logistic_loss`, called alike."""

    def __init__(self, name: str, module: Any) -> None:
        self.name, self.module = name, module
        package = "bitempered" if module is ours else module.__name__.split(".")[0]
        try:
            self.version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            self.version = "unknown"

    def softmax(self, logits: torch.Tensor, t: float) -> torch.Tensor:
        return self.module.tempered_softmax(logits, t)

    def loss(self, logits: torch.Tensor, target: torch.Tensor, t1: float, t2: float) -> torch.Tensor:
        return self.module.bi_tempered_logistic_loss(logits, target, t1, t2, reduction="none")

    def binary(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The binary loss at t1 = t2 = 1, which should be binary cross-entropy."""
        if hasattr(self.module, "BinaryBiTemperedLogisticLoss"):
            made = self.module.BinaryBiTemperedLogisticLoss(t1=1.0, t2=1.0, reduction="mean")
            return made(logits[:, None], target[:, None])
        return self.module.bi_tempered_binary_logistic_loss(logits, target, 1.0, 1.0, reduction="mean")


def contenders() -> list[Contender]:
    found = [Contender("bitempered", ours)]
    for name, module in PEERS.items():
        try:
            found.append(Contender(name, importlib.import_module(module)))
        except ImportError as error:
            print(f"left out: {name} ({error})")
    return found


def normal(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


def mass_error(it: Contender, classes: int) -> float:
    """The largest abs(sum p - 1) for Gaussian logits of standard deviation 5 to 50 and t from 1.2 to 4."""
    return max(
        (it.softmax(normal(8, classes, scale=scale), t).double().sum(-1) - 1).abs().max().item()
        for scale in (5.0, 10.0, 50.0)
        for t in (1.2, 2.0, 4.0)
    )


def loss_error(it: Contender, t1: float, t2: float, dtype: torch.dtype = torch.float32) -> float:
    """The largest error of the loss relative to max(1, loss). Exact is ours in float64, tested to 1e-12 with mpmath."""
    logits = normal(64, 10, scale=5.0).to(dtype)
    target = torch.arange(64) % 10
    exact = ours.bi_tempered_logistic_loss(logits.double(), target, t1, t2, reduction="none")
    return ((it.loss(logits, target, t1, t2).double() - exact).abs() / exact.clamp_min(1)).max().item()


def bad_gradients(it: Contender, t1: float, t2: float, scale: float) -> float:
    """The share of examples whose loss or gradient is not finite."""
    logits = normal(256, 10, scale=scale).requires_grad_()
    loss = it.loss(logits, torch.arange(256) % 10, t1, t2)
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    return 1 - (loss.isfinite() & gradient.isfinite().all(1)).double().mean().item()


def binary_error(it: Contender) -> float:
    logits, target = normal(64), (torch.arange(64) % 2).float()
    return (it.binary(logits, target) - F.binary_cross_entropy_with_logits(logits, target)).abs().item()


def image_shape(it: Contender) -> bool:
    """Whether logits (N, C, d) give what cross_entropy's layout says: each position's own loss."""
    logits, target = normal(4, 5, 3), torch.arange(12).view(4, 3) % 5
    want = it.loss(logits.movedim(1, -1).reshape(12, 5), target.reshape(12), 0.8, 1.2).view(4, 3)
    return bool(torch.allclose(it.loss(logits, target, 0.8, 1.2), want))


def vmap_of_grad(it: Contender) -> bool:
    logits, target = normal(4, 5), torch.arange(4)
    rows = torch.func.vmap(torch.func.grad(lambda a, y: it.loss(a[None], y[None], 0.8, 1.2).sum()))(logits, target)
    return bool(rows.isfinite().all())


def kept_for_backward(it: Contender) -> float:
    """Bytes that autograd keeps besides logits and target, in units of the logits, at 128 x 1000."""
    logits, target = normal(128, 1000).requires_grad_(), torch.arange(128)
    known = {logits.untyped_storage().data_ptr(), target.untyped_storage().data_ptr()}
    kept: dict[int, int] = {}
    alive = []  # a storage that is freed could lend its address to the next

    def pack(x: torch.Tensor) -> torch.Tensor:
        alive.append(x)
        if x.untyped_storage().data_ptr() not in known:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        nodes = [it.loss(logits, target, 0.8, 1.2).mean().grad_fn]
    while nodes:  # what a node keeps by itself, as ours does the gradient, passes no hook
        node = nodes.pop()
        nodes += [below for below, _ in node.next_functions if below is not None]
        for value in getattr(node, "__dict__", {}).values():
            if isinstance(value, torch.Tensor):
                pack(value)
    return sum(kept.values()) / (128 * 1000 * 4)


def times_cross_entropy(them: list[Contender], rows: int, classes: int, repeats: int) -> dict[str, float]:
    """Median time of forward and backward over that of F.cross_entropy, all taken in turns."""
    logits, target = normal(rows, classes).requires_grad_(), torch.arange(rows) % classes
    functions: dict[str, Callable[[], torch.Tensor]] = {"cross_entropy": lambda: F.cross_entropy(logits, target)}
    compiled = torch.compile(lambda: ours.bi_tempered_logistic_loss(logits, target, 0.8, 1.2))
    functions["bitempered, torch.compile"] = compiled
    for it in them:
        functions[it.name] = lambda it=it: it.loss(logits, target, 0.8, 1.2).mean()  # type: ignore[misc]
    taken: dict[str, list[float]] = {name: [] for name in functions}
    for repeat in range(repeats + 3):
        for name, function in functions.items():
            start = time.perf_counter()
            torch.autograd.grad(function(), logits)
            if repeat >= 3:  # the first ones warm up
                taken[name].append(time.perf_counter() - start)
    base = statistics.median(taken.pop("cross_entropy"))
    return {name: statistics.median(values) / base for name, values in taken.items()}


def attempt(measure: Callable[[], float | bool]) -> float | bool | str:
    try:
        return measure()
    except Exception as error:
        return f"raises {type(error).__name__}"


# (column of the rows, line of the table, measure)
MEASURES: list[tuple[str, str, Callable[[Contender], float | bool]]] = [
    *(
        (f"mass_{classes}", f"worst abs(sum p − 1), {classes:,} classes", lambda it, c=classes: mass_error(it, c))
        for classes in (100, 1000, 10000, 50257)
    ),
    *(
        (f"near_one_{d:g}", f"error of the loss at t = 1 ∓ {d:g}", lambda it, d=d: loss_error(it, 1 - d, 1 + d))
        for d in (1e-4, 1e-6, 1e-7)
    ),
    ("float16", "error of the loss in float16, (0.8, 1.2)", lambda it: loss_error(it, 0.8, 1.2, torch.float16)),
    (
        "bounded",
        "(0.2, 1.0), logits of scale 100: share of examples not finite",
        lambda it: bad_gradients(it, 0.2, 1.0, 100),
    ),
    ("binary", "binary loss off from BCE at t = 1", binary_error),
    ("image", "logits (N, C, d) as in cross_entropy", image_shape),
    ("vmap", "vmap of grad", vmap_of_grad),
    ("kept", "kept for backward beside logits and target, × logits", kept_for_backward),
]
TIMES = [(128, 10, 200), (1024, 1000, 20)]


def format_value(value: float | bool | str) -> str:
    if isinstance(value, bool):
        return "yes" if value else "wrong"
    if isinstance(value, str):
        return value
    return "NaN" if value != value else "0" if value == 0 else f"{value:.2g}" if value < 10 else f"{value:.0f}"


def measure() -> list[Row]:
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    them = contenders()
    rows: list[Row] = []
    for it in them:
        row: Row = {"contender": it.name, "version": it.version}
        for column, _, measured in MEASURES:
            row[column] = attempt(lambda measured=measured, it=it: measured(it))
        rows.append(row)
        print(json.dumps(row))
    for n, k, repeats in TIMES:
        ratios = times_cross_entropy(them, n, k, repeats)
        for row in rows:
            row[f"time_{n}x{k}"] = ratios[row["contender"]]
        rows[0][f"time_{n}x{k}_compiled"] = ratios["bitempered, torch.compile"]
    made_on = {
        "commit": commit(),
        "date": date.today().isoformat(),
        "device": f"cpu {platform.machine()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
    }
    return [{**row, **made_on} for row in rows]


def page(rows: list[Row]) -> str:
    lines = [(column, line) for column, line, _ in MEASURES]
    for n, k, _ in TIMES:
        lines.append((f"time_{n}x{k}", f"time of forward + backward, {n:,} × {k:,}, over cross_entropy"))
        lines.append((f"time_{n}x{k}_compiled", "the same under torch.compile"))
    table = [["", *(row["contender"] for row in rows)], ["---"] * (len(rows) + 1)]
    table += [[line, *(format_value(row.get(column, "")) for row in rows)] for column, line in lines]
    text = "\n".join(f"| {' | '.join(line)} |" for line in table)
    first = rows[0]
    made = f"bitempered at {first['commit']}, torch {first['torch']}, {first['device']}, {first['date']}"
    return f"{text}\n\n{made}. Versions and unrounded figures: peers.jsonl.\n"


def main() -> None:
    measure_or_render(ROWS, measure, page)


if __name__ == "__main__":
    main()
