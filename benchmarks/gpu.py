"""Time, memory and error of the loss on a GPU, forward and backward, beside cross-entropy and the customary port.

    python benchmarks/gpu.py [--device cpu] [--out benchmarks]

Writes gpu.jsonl (a row for each contender, shape, dtype and pair of temperatures) and gpu.png. Contenders take turns,
the L2 cache is flushed between runs. Liger-Kernel and entmax take part where they can be imported. With --device cpu
the shapes are tiny: that only shows that this file runs.
"""

import argparse
import importlib.metadata
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

from bitempered import core, kernels, references
from bitempered.experiments.files import write_rows
from bitempered.experiments.origin import provenance, today
from bitempered.torch import bi_tempered_logistic_loss, linear_bi_tempered_logistic_loss, tempered_softmax
from bitempered.torch.autograd import xp

PAIRS = [(0.8, 1.2), (0.5, 4.0)]  # the paper's for CIFAR-100 and for MNIST
FLOAT, HALF = torch.float32, torch.bfloat16
SHAPES = [
    (128, 10, FLOAT),
    (4096, 1000, FLOAT),
    (8192, 32000, FLOAT),
    (8192, 32000, HALF),
    (4096, 128256, FLOAT),
    (4096, 128256, HALF),
]
GROWTH = [(4096, 4**k, FLOAT) for k in range(2, 10)]  # 16 to 262,144 classes
LINEAR = (4096, 4096, 128256, HALF)  # rows, features, classes: the head of a language model
RUNS = 15


def port(logits: Tensor, target: Tensor, t1: float, t2: float) -> Tensor:
    """What copies of the published code do: one-hot labels, five fixed-point iterations, autograd through them."""
    lam = references.fixed_point(logits, t2, iterations=5, axis=1, xp=xp)
    p = core.exp_t(logits - lam, t2, xp=xp)
    y = F.one_hot(target, logits.shape[1]).to(logits.dtype)
    log_p, log_y = core.log_t(p, t1, xp=xp), core.log_t(y + 1e-10, t1, xp=xp)
    return (y * (log_y - log_p) - (y ** (2 - t1) - p ** (2 - t1)) / (2 - t1)).sum(1).mean()


def contenders(t1: float, t2: float, growth: bool) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    found: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "bitempered": lambda a, y: bi_tempered_logistic_loss(a, y, t1, t2),
        "cross_entropy": F.cross_entropy,
    }
    if not growth:
        found["cross_entropy, torch.compile"] = torch.compile(F.cross_entropy, dynamic=False)
        found["port, 5 iterations"] = lambda a, y: port(a, y, t1, t2)
    try:
        from liger_kernel.transformers.functional import liger_cross_entropy

        found["Liger cross_entropy"] = liger_cross_entropy
    except ImportError:
        pass
    return found


def linear_contenders(t1: float, t2: float) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    found: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        "bitempered, fused linear": lambda h, w, y: linear_bi_tempered_logistic_loss(h, w, y, t1, t2),
        "linear, cross_entropy": lambda h, w, y: F.cross_entropy(F.linear(h, w), y),
    }
    try:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        found["Liger fused linear cross_entropy"] = lambda h, w, y: liger_fused_linear_cross_entropy(h, w, y)
    except ImportError:
        pass
    return found


def softmax_contenders() -> dict[str, Callable[[Tensor], Tensor]]:
    found: dict[str, Callable[[Tensor], Tensor]] = {"tempered_softmax, t = 0.5": lambda a: tempered_softmax(a, 0.5)}
    try:
        from entmax import entmax15

        found["entmax15"] = entmax15  # the same function of twice the logits
    except ImportError:
        pass
    return found


class Clock:
    """Takes turns: seconds of each call, the cache flushed before; and the memory at the peak of one call."""

    def __init__(self, device: str) -> None:
        self.cuda = device.startswith("cuda")
        self.flush = torch.empty(2**28 if self.cuda else 1, dtype=torch.int8, device=device)

    def seconds(self, call: Callable[[], Any]) -> float:
        self.flush.zero_()
        if not self.cuda:
            start = time.perf_counter()
            call()
            return time.perf_counter() - start
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3

    def peak(self, call: Callable[[], Any]) -> int | None:
        if not self.cuda:
            return None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before

    def rows(self, calls: dict[str, Callable[[], Any]], runs: int, **shape: Any) -> list[dict[str, Any]]:
        taken: dict[str, list[float]] = {name: [] for name in calls}
        peaks = {}
        for run in range(runs + 2):
            for name in list(taken):
                try:
                    if run == 0:
                        peaks[name] = self.peak(calls[name])
                    taken[name].append(self.seconds(calls[name]))
                except torch.cuda.OutOfMemoryError:
                    print(f"left out: {name}, out of memory at {shape}")
                    del taken[name]
        made = []
        for name, seconds in taken.items():
            low, middle, high = statistics.quantiles(seconds[2:], n=4)  # the first two warm up, and compile
            row = {"contender": name, **shape, "runs": runs, "median_us": middle * 1e6}
            made.append(row | {"quartiles_us": [low * 1e6, high * 1e6], "peak_bytes": peaks[name]})
        return made


def errors(logits: Tensor, target: Tensor, t1: float, t2: float, name: str) -> dict[str, float]:
    """Of the loss, relative to max(1, loss), and of a row's gradient by norm, against core in float64: 64 rows."""
    function = contenders(t1, t2, growth=False)[name]
    some, labels = logits.detach()[:64], target[:64]
    leaf, wide = some.clone().requires_grad_(), some.double().requires_grad_()
    loss = function(leaf, labels)
    (gradient,) = torch.autograd.grad(loss, leaf)
    with kernels.use("core"):
        want = bi_tempered_logistic_loss(wide, labels, t1, t2)
    (exact,) = torch.autograd.grad(want, wide)
    norms = (gradient.double() - exact).norm(dim=1) / exact.norm(dim=1)
    return {
        "loss_error": (loss.double() - want).abs().item() / max(1.0, want.item()),
        "gradient_error": norms.max().item(),
    }


def measure(
    clock: Clock, device: str, n: int, k: int, dtype: torch.dtype, pair: tuple[float, float], growth: bool
) -> Any:
    logits = torch.randn(n, k, device=device, dtype=dtype).requires_grad_()
    target = torch.randint(k, (n,), device=device)
    # Liger writes its gradient over its input, which it is given a copy of.
    inputs = {
        name: logits.detach().clone().requires_grad_() if "Liger" in name else logits
        for name in contenders(*pair, growth)
    }
    calls = {
        name: lambda f=function, a=inputs[name]: torch.autograd.grad(f(a, target), a)
        for name, function in contenders(*pair, growth).items()
    }
    shape = {"rows": n, "classes": k, "dtype": str(dtype)[6:], "t1": pair[0], "t2": pair[1], "growth": growth}
    made = clock.rows(calls, RUNS if device != "cpu" else 3, **shape)
    size = logits.numel() * logits.element_size()
    copy = torch.empty_like(logits)
    moved = statistics.median(clock.seconds(lambda: copy.copy_(logits.detach())) for _ in range(5))
    for row in made:
        # Of the time of a copy: one read and one write of the logits, what a loss and its gradient cost at least.
        row["copy_share"] = moved / (row["median_us"] / 1e6)
        row["peak_over_logits"] = row["peak_bytes"] / size if row["peak_bytes"] is not None else None
        if not growth and row["contender"] in ("bitempered", "port, 5 iterations"):
            row |= errors(logits, target, *pair, row["contender"])
    return made


def measure_linear(clock: Clock, device: str, n: int, h: int, k: int, dtype: torch.dtype) -> Any:
    hidden = torch.randn(n, h, device=device, dtype=dtype).requires_grad_()
    weight = (0.02 * torch.randn(k, h, device=device, dtype=dtype)).requires_grad_()
    target = torch.randint(k, (n,), device=device)
    calls = {
        name: lambda f=function: torch.autograd.grad(f(hidden, weight, target), (hidden, weight))
        for name, function in linear_contenders(*PAIRS[0]).items()
    }
    return clock.rows(calls, 5, rows=n, features=h, classes=k, dtype=str(dtype)[6:], growth=False)


def figure(rows: list[dict[str, Any]]) -> Figure:
    """Time and peak memory against the number of classes, at 4,096 rows in float32."""
    made = Figure(figsize=(10, 4), dpi=150, layout="constrained")
    left, right = made.subplots(1, 2)
    growth = [row for row in rows if row["growth"]]
    for name in dict.fromkeys(row["contender"] for row in growth):
        mine = [row for row in growth if row["contender"] == name]
        classes = [row["classes"] for row in mine]
        left.plot(classes, [row["median_us"] for row in mine], marker="o", label=name)
        if all(row["peak_bytes"] is not None for row in mine):
            right.plot(classes, [row["peak_bytes"] / 2**20 for row in mine], marker="o", label=name)
    left.set(xscale="log", yscale="log", xlabel="classes", ylabel="forward and backward, µs")
    right.set(xscale="log", yscale="log", xlabel="classes", ylabel="peak memory beside the logits, MiB")
    left.legend(frameon=False)
    return made


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    given = parser.parse_args(arguments)
    tiny = not given.device.startswith("cuda")
    shapes = [(8, 10, FLOAT), (4, 300, FLOAT)] if tiny else SHAPES
    growth = [(4, 16, FLOAT), (4, 64, FLOAT)] if tiny else GROWTH
    clock = Clock(given.device)
    rows = [row for shape in shapes for pair in PAIRS for row in measure(clock, given.device, *shape, pair, False)]
    rows += [row for shape in growth for row in measure(clock, given.device, *shape, PAIRS[0], True)]
    rows += measure_linear(clock, given.device, *((300, 4, 16, FLOAT) if tiny else LINEAR))
    logits = torch.randn(*((4, 16) if tiny else (8192, 32000)), device=given.device).requires_grad_()
    calls = {
        name: lambda f=function: torch.autograd.grad(f(logits).square().sum(), logits)
        for name, function in softmax_contenders().items()
    }
    rows += clock.rows(calls, 5, rows=len(logits), classes=logits.shape[1], dtype="float32", growth=False)
    versions = {}
    for package in ("triton", "liger_kernel", "entmax"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    origin = provenance(given.device) | versions | {"date": today()}
    write_rows(given.out / "gpu.jsonl", [row | origin for row in rows])
    path = given.out / "gpu.png"
    figure(rows).savefig(path, format="png")
    for row in rows:
        print(
            f"{row['contender']:35} {row['rows']:6} x {row['classes']:6} {row['dtype']:9} {row['median_us']:10.1f} us"
        )


if __name__ == "__main__":
    main()
