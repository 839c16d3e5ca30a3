"""Time of the loss on a CPU, forward and backward, over that of F.cross_entropy in the same run.

    python benchmarks/cpu.py

Writes benchmarks/cpu.jsonl (a row for each contender, shape and pair of temperatures) and benchmarks/cpu.md. Class
indices, float32, mean. Contenders take turns, so that whatever else the machine does falls on all of them; it should
be idle all the same. The port is what copies of the published code do: one-hot labels and five fixed-point iterations.
"""

import gc
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from bitempered import kernels
from bitempered.experiments.files import write_atomically, write_rows
from bitempered.experiments.origin import provenance, today
from bitempered.kernels import cpu
from bitempered.torch import bi_tempered_logistic_loss

HERE = Path(__file__).parent
BASE = "cross_entropy"
PAIRS = [(0.8, 1.2), (0.5, 4.0)]  # the paper's for CIFAR-100 and for MNIST
SHAPES = [(128, 10), (128, 1000), (1024, 1000), (256, 32000)]  # MNIST, ImageNet twice, a vocabulary
GROWTH = [(2_560_000 // classes, classes) for classes in (10, 100, 1000, 10_000, 100_000, 256_000)]
SECONDS = 5.0  # for all contenders of a shape and pair, after warming up


class _Normalization(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, t):
        top = a.amax(-1, keepdim=True)
        start = a - top
        shifted = start
        for _ in range(5):
            z = _exp_t(shifted, t).sum(-1, keepdim=True)
            shifted = start * z ** (1 - t)
        z = _exp_t(shifted, t).sum(-1, keepdim=True)
        normalization = -_log_t(1 / z, t) + top
        ctx.save_for_backward(_exp_t(a - normalization, t) ** t)
        return normalization

    @staticmethod
    def backward(ctx, g):
        (escort,) = ctx.saved_tensors
        return g * escort / escort.sum(-1, keepdim=True), None


def _log_t(x: Tensor, t: float) -> Tensor:
    return (x ** (1 - t) - 1) / (1 - t)


def _exp_t(x: Tensor, t: float) -> Tensor:
    return (1 + (1 - t) * x).relu() ** (1 / (1 - t))


def port(logits: Tensor, target: Tensor, t1: float, t2: float) -> Tensor:
    y = F.one_hot(target, logits.shape[-1]).to(logits.dtype)
    p = _exp_t(logits - _Normalization.apply(logits, t2), t2)
    losses = y * (_log_t(y + 1e-10, t1) - _log_t(p, t1)) - (y ** (2 - t1) - p ** (2 - t1)) / (2 - t1)
    return losses.sum(-1).mean()


def forced(kernel: str) -> Callable[..., Tensor]:
    def loss(logits: Tensor, target: Tensor, t1: float, t2: float) -> Tensor:
        with kernels.use(kernel):
            return bi_tempered_logistic_loss(logits, target, t1, t2)

    return loss


def contenders(compiled: bool) -> dict[str, Callable[..., Tensor]]:
    found: dict[str, Callable[..., Tensor]] = {
        BASE: lambda logits, target, t1, t2: F.cross_entropy(logits, target),
        "cpu kernel": bi_tempered_logistic_loss,  # as it is called: the choice is part of the cost
        "core": forced("core"),
    }
    if compiled:
        torch.compiler.reset()
        found["core, torch.compile"] = torch.compile(bi_tempered_logistic_loss, dynamic=False)
        found["port, 5 iterations"] = port
    return found


def measure(rows: int, classes: int, t1: float, t2: float, compiled: bool) -> list[dict[str, object]]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, classes, generator=generator).requires_grad_()
    target = torch.randint(classes, (rows,), generator=generator)
    functions = contenders(compiled)
    taken: dict[str, list[float]] = {name: [] for name in functions}
    deadline = None
    while deadline is None or time.perf_counter() < deadline or len(taken[BASE]) < 5:
        for name, function in functions.items():
            start = time.perf_counter()
            torch.autograd.grad(function(logits, target, t1, t2), logits)
            taken[name].append(time.perf_counter() - start)
        if deadline is None and len(taken[BASE]) == 3:  # the first three warm up, and compile
            deadline = time.perf_counter() + SECONDS
            taken = {name: [] for name in functions}
            gc.collect()
            gc.disable()  # as timeit does: a collection takes 0.2 s with all that torch.compile leaves
    gc.enable()
    base = statistics.median(taken[BASE])
    made = []
    for name, seconds in taken.items():
        low, middle, high = statistics.quantiles(seconds, n=4)
        row = {"contender": name, "rows": rows, "classes": classes, "t1": t1, "t2": t2, "runs": len(seconds)}
        row |= {"median_us": middle * 1e6, "quartiles_us": [low * 1e6, high * 1e6], "min_us": min(seconds) * 1e6}
        made.append(row | {"times_cross_entropy": middle / base})
        print(json.dumps(made[-1]), flush=True)
    return made


def table(rows: list[dict[str, object]], shapes: list[tuple[int, int]], pairs: list[tuple[float, float]]) -> list[str]:
    """Lines of Markdown: microseconds of cross_entropy, then each contender over that, with its quartiles."""
    names = [row["contender"] for row in rows]
    names = [name for name in dict.fromkeys(names) if name != BASE]
    lines = [["N × C", "(t1, t2)", "cross_entropy, µs", *names], ["---", "---", *["---:"] * (len(names) + 1)]]
    for shape in shapes:
        for pair in pairs:
            found = {
                row["contender"]: row
                for row in rows
                if (row["rows"], row["classes"]) == shape and (row["t1"], row["t2"]) == pair
            }
            base = found[BASE]["median_us"]
            cells = [f"{shape[0]:,} × {shape[1]:,}", f"({pair[0]}, {pair[1]})", f"{base:,.0f}"]
            for name in names:
                low, high = (us / base for us in found[name]["quartiles_us"])
                cells.append(f"{found[name]['times_cross_entropy']:.2f} ({low:.2f} to {high:.2f})")
            lines.append(cells)
    return [f"| {' | '.join(line)} |" for line in lines]


def main() -> None:
    made = cpu.library()
    if isinstance(made, cpu.Unavailable):
        raise SystemExit(f"there is no CPU kernel to measure: {made}")
    version = subprocess.run([*cpu.compiler(), "--version"], capture_output=True, text=True, check=True).stdout
    origin = provenance() | {
        "date": today(),
        "threads": torch.get_num_threads(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "compiler": version.splitlines()[0],
    }
    start = time.perf_counter()
    shapes = [row for n, k in SHAPES for t1, t2 in PAIRS for row in measure(n, k, t1, t2, compiled=True)]
    growth = [row for n, k in GROWTH for row in measure(n, k, *PAIRS[0], compiled=False)]
    write_rows(HERE / "cpu.jsonl", [row | origin for row in shapes + growth])
    made_by = (
        f"bitempered at {origin['commit']}, torch {origin['torch']}, {origin['device']}, {origin['threads']} threads, "
        f"{origin['vectors']}, {origin['compiler']}, {origin['date']}. Every figure: cpu.jsonl."
    )
    text = "\n".join(
        [
            "Forward and backward, over `F.cross_entropy` in the same run: medians, and quartiles in parentheses.",
            "",
            *table(shapes, SHAPES, PAIRS),
            "",
            "The same number of logits, ever more classes:",
            "",
            *table(growth, GROWTH, PAIRS[:1]),
            "",
            made_by,
        ]
    )
    write_atomically(HERE / "cpu.md", f"{text}\n".encode())
    print(f"{text}\n\n{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
