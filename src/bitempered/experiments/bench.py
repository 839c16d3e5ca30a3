"""Time, memory and error of the loss, forward and backward, beside cross-entropy and other implementations.

All contenders of a case take turns, so that other load on the machine affects all of them. On a GPU we time one call
between two events, with launches from Python, after flushing the L2 cache; losses are also replayed from a CUDA graph,
which times the device alone. Errors are those of the timed call, against float64. `bench_report` turns the rows into
tables and a figure.
"""

import functools
import gc
import importlib
import importlib.metadata
import math
import multiprocessing
import os
import random
import statistics
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bitempered import kernels
from bitempered.experiments import bench_report
from bitempered.experiments.files import Row, write_rows
from bitempered.experiments.report import write
from bitempered.experiments.runs import provenance, today
from bitempered.kernels import cpu
from bitempered.torch import (
    bi_tempered_binary_logistic_loss,
    bi_tempered_logistic_loss,
    linear_bi_tempered_logistic_loss,
    tempered_softmax,
)

__all__ = ["Case", "Suite", "run"]

Pair = tuple[float, float]
PAIRS: tuple[Pair, ...] = ((0.8, 1.2), (0.5, 4.0))  # the paper's for CIFAR-100 and for MNIST

OURS, BASE, LIGER = "bitempered", "cross_entropy", "Liger cross_entropy"
BINARY_BASE = "binary_cross_entropy_with_logits"
LINEAR_BASE, LINEAR_LIGER = "linear, cross_entropy", "Liger fused linear cross_entropy"
# The contenders whose times divide the others'.
REFERENCES = {
    "loss": (BASE, LIGER, f"{BASE}, torch.compile"),
    "segmentation": (BASE,),
    "probabilities": (BASE,),
    "binary": (BINARY_BASE,),
    "linear": (LINEAR_BASE, LINEAR_LIGER),
    "softmax": ("entmax15",),
}
GRAPH, COMPILED = bench_report.GRAPH, ", torch.compile"
WARM_UP = 2e-3  # seconds of untimed calls before a timed one, on a GPU
MIN_RUNS = 5  # of a contender so slow that more would take most of the time
PORT_LIMIT = {"cpu": 2**23, "cuda": 2**28}  # the most logits for the port, which takes 20 times their memory


class Case(NamedTuple):
    """Random logits (rows, classes), of a linear layer if it has features; `sweep` names the curve it is on.

    Of kind "segmentation" they are images, of the sizes in `image_shape`.
    """

    rows: int
    classes: int
    dtype: str = "float32"
    kind: str = "loss"
    features: int = 0
    sweep: str = ""

    def __str__(self) -> str:
        features = f" of {self.features:,} features" if self.features else ""
        sweep = f", by {self.sweep}" if self.sweep else ""
        return f"{self.rows:,} × {self.classes:,}{features}, {self.dtype}{sweep}"


@dataclass(frozen=True)
class Suite:
    """The cases, and for each `least` turns, then up to `most` while `seconds` last."""

    cases: tuple[Case, ...]
    least: int
    most: int
    seconds: float
    compiled: bool = True  # time torch.compile as well


class Contender(NamedTuple):
    name: str
    function: Callable[..., Tensor]
    pair: Pair | None = None  # of the bi-tempered loss
    rescale: bool = False
    overwrites: bool = False  # whether it overwrites its input with the gradient: then it gets a copy

    @property
    def label(self) -> str:
        return f"{self.name} {self.pair}" if self.pair else self.name


def log_t(x: Tensor, t: float) -> Tensor:
    return (x ** (1 - t) - 1) / (1 - t)


def exp_t(x: Tensor, t: float) -> Tensor:
    return (1 + (1 - t) * x).relu() ** (1 / (1 - t))


def port(logits: Tensor, target: Tensor, t1: float, t2: float) -> Tensor:
    """Compute as copies of the published code do, for t2 > 1: one-hot labels, five fixed-point iterations, autograd."""
    top = logits.amax(1, keepdim=True)
    centred = logits - top
    shrunk = centred
    for _ in range(5):
        shrunk = centred * exp_t(shrunk, t2).sum(1, keepdim=True) ** (1 - t2)
    normalization = top - log_t(1 / exp_t(shrunk, t2).sum(1, keepdim=True), t2)
    p = exp_t(logits - normalization, t2)
    y = F.one_hot(target, logits.shape[1]).to(logits.dtype)
    losses = y * (log_t(y + 1e-10, t1) - log_t(p, t1)) - (y ** (2 - t1) - p ** (2 - t1)) / (2 - t1)
    return losses.sum(1).mean()


def core(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def forced(*arguments: Any) -> Tensor:
        with kernels.use("core"):
            return function(*arguments)

    return forced


def losses(kind: str) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Return our loss of this kind, and torch's."""
    if kind == "binary":
        return bi_tempered_binary_logistic_loss, F.binary_cross_entropy_with_logits
    return bi_tempered_logistic_loss, F.cross_entropy


def at(function: Callable[..., Tensor], pair: tuple[Any, Any], **options: Any) -> Callable[..., Tensor]:
    return lambda *inputs: function(*inputs, *pair, **options)


def found(module: str, name: str) -> Any:
    """Return a function of a package, or None if that is not installed."""
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError:
        return None


def contenders(case: Case, device: str, compiled: bool) -> list[Contender]:
    cuda, liger = device == "cuda", "liger_kernel.transformers.functional"
    if case.kind == "softmax":  # at t = 1/2, where it is entmax with its usual alpha, 3/2
        made = [Contender(OURS, lambda a: tempered_softmax(a, 0.5))]
        functions = {name: found("entmax", name) for name in ("entmax15", "entmax_bisect")}
        return made + [Contender(name, function) for name, function in functions.items() if function]
    if case.kind == "linear":
        made = [Contender(LINEAR_BASE, lambda h, w, y: F.cross_entropy(F.linear(h, w), y))]
        if cuda and (fused := found(liger, "liger_fused_linear_cross_entropy")):
            made.append(Contender(LINEAR_LIGER, fused))
        return made + [Contender(OURS, at(linear_bi_tempered_logistic_loss, pair), pair) for pair in PAIRS]
    our_loss, torch_loss = losses(case.kind)
    made = [Contender(REFERENCES[case.kind][0], torch_loss)]
    if compiled := compiled and not case.sweep and (cuda or case.kind == "loss"):
        made.append(Contender(made[0].name + COMPILED, torch.compile(torch_loss, dynamic=False)))
    if case.kind == "loss" and cuda and (fused := found(liger, "liger_cross_entropy")):
        made.append(Contender(LIGER, fused, overwrites=True))
    for pair in PAIRS:
        ours = at(our_loss, pair)
        made.append(Contender(OURS, ours, pair))
        if not cuda and not case.sweep:
            made.append(Contender("core", at(core(our_loss), pair), pair))
        if compiled:
            made.append(Contender(OURS + COMPILED, torch.compile(ours, dynamic=False), pair))
        if case.kind != "loss":
            continue
        if cuda and not case.sweep:
            rescaled = at(our_loss, pair, rescale=True)
            made.append(Contender(f"{OURS}, rescale", rescaled, pair, rescale=True))
            first, second = (torch.tensor(t, device=device) for t in pair)
            made.append(Contender(f"{OURS}, temperatures in memory", at(our_loss, (first, second)), pair))
        if not cuda and case.dtype != "float32":  # the port is of float32
            continue
        if case.rows * case.classes <= PORT_LIMIT[device] and not (case.sweep and pair != PAIRS[0]):
            made.append(Contender("port, 5 iterations", at(port, pair), pair))
    return made


class Inputs(NamedTuple):
    leaves: tuple[Tensor, ...]  # the gradient's variables: logits, or hidden layer and weight
    target: tuple[Tensor, ...]  # class indices or probabilities; empty for a softmax
    cotangent: Tensor | None  # only for a softmax


def image_shape(positions: int) -> tuple[int, ...]:
    """Two square images or, if they cannot have as many positions, eight that are twice as wide as high."""
    side = math.isqrt(positions // 2)
    if 2 * side * side == positions:
        return 2, side, side
    side = math.isqrt(positions // 16)
    return 8, side, 2 * side


def make(case: Case, device: str) -> Inputs:
    generator = torch.Generator(device).manual_seed(0)
    n, k, h = case.rows, case.classes, case.features
    normal = functools.partial(torch.randn, device=device, dtype=getattr(torch, case.dtype), generator=generator)
    made = [normal(n, h), normal(k, h) * h**-0.5] if h else [normal(n, k)]
    if case.kind == "segmentation":
        images, *size = image_shape(n)
        made = [normal(images, k, *size)]
    leaves = tuple(x.requires_grad_() for x in made)
    if case.kind == "softmax":
        return Inputs(leaves, (), normal(n, k))
    if case.kind == "probabilities":
        return Inputs(leaves, (torch.softmax(normal(n, k), 1),), None)
    if case.kind == "binary":
        return Inputs(leaves, (torch.randint(2, (n, k), device=device, generator=generator).to(leaves[0]),), None)
    shape = image_shape(n) if case.kind == "segmentation" else (n,)
    return Inputs(leaves, (torch.randint(k, shape, device=device, generator=generator),), None)


class Call:
    """One forward and backward."""

    def __init__(self, contender: Contender, inputs: Inputs) -> None:
        self.function, self.inputs, self.leaves = contender.function, inputs, inputs.leaves
        if contender.overwrites:
            self.leaves = tuple(x.detach().clone().requires_grad_() for x in inputs.leaves)

    def restore(self) -> None:
        """Restore inputs that the last call overwrote: not timed, since training has new logits in every step."""
        if self.leaves is not self.inputs.leaves:
            with torch.no_grad():
                for own, x in zip(self.leaves, self.inputs.leaves, strict=True):
                    own.copy_(x)

    def __call__(self) -> tuple[Tensor, Tensor]:
        value = self.function(*self.leaves, *self.inputs.target)
        return value.detach(), torch.autograd.grad(value, self.leaves, self.inputs.cotangent)[0]


def recorded(call: Call) -> Callable[[], None]:
    """Record a call as a CUDA graph, which runs without Python."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # torch requires a warm-up on another stream before recording
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        call()
    return graph.replay


class Clock:
    def __init__(self, device: str) -> None:
        self.device, self.cuda = device, device == "cuda"
        if self.cuda:
            self.flush = torch.empty(2**28, dtype=torch.int8, device=device)
            self.begin, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def seconds(self, call: Callable[[], Any]) -> float:
        if isinstance(call, Call):
            # Warm up, so that the contender before does not affect this one through the host's caches.
            start = time.perf_counter()
            while self.cuda and time.perf_counter() - start < WARM_UP:
                call.restore()
                call()
            call.restore()
        if not self.cuda:
            start = time.perf_counter()
            call()
            return time.perf_counter() - start
        torch.cuda.synchronize()
        self.flush.zero_()
        if isinstance(call, Call):  # a graph or a copy is queued while the flush runs: its launch is not timed
            torch.cuda.synchronize()
        self.begin.record()
        call()
        self.end.record()
        torch.cuda.synchronize()
        return self.begin.elapsed_time(self.end) / 1e3

    def peak(self, call: Call) -> int | None:
        """Return the most bytes that one call requests at once; None on a CPU, where they are not counted.

        Not `max_memory_allocated`: it counts whole blocks, and a free block may be 1 MiB larger than the request.
        """
        if not self.cuda:
            return None
        call.restore()
        torch.cuda.reset_peak_memory_stats()
        there = torch.cuda.memory_stats()["requested_bytes.all.current"]
        call()
        return torch.cuda.memory_stats()["requested_bytes.all.peak"] - there

    def take_turns(self, calls: dict[str, Callable[[], Any]], suite: Suite) -> dict[str, list[float]]:
        taken: dict[str, list[float]] = {label: [] for label in calls}
        gc.collect()
        gc.disable()  # as timeit does: after torch.compile a collection takes 0.2 s
        try:
            turn, end = 0, time.perf_counter() + suite.seconds
            while turn < suite.least or (turn < suite.most and time.perf_counter() < end):
                for label in random.Random(turn).sample(list(calls), len(calls)):
                    if turn < MIN_RUNS or sum(taken[label]) < suite.seconds:
                        taken[label].append(self.seconds(calls[label]))
                turn += 1
        finally:
            gc.enable()
        return taken


def exact(case: Case, pair: Pair | None, inputs: Inputs, *, rescale: bool = False) -> tuple[Tensor, Tensor]:
    """Return value and gradient in float64, by core, or by torch for cross-entropy; a chunk of rows at a time."""
    values, gradients = [], []
    first, *others = (x.detach().double() for x in inputs.leaves)
    count = inputs.target[0].numel() if case.kind == "binary" else case.rows
    per_row = max(first[:1].numel(), case.classes)
    for rows in torch.arange(len(first), device=first.device).split(max(1, 2**25 // per_row)):
        leaf, cotangent = first[rows].requires_grad_(), None
        with kernels.use("core"):
            if inputs.cotangent is not None:
                value, cotangent = tempered_softmax(leaf, 0.5), inputs.cotangent[rows].double()
            else:
                loss = losses(case.kind)[0 if pair else 1]
                logits, target = F.linear(leaf, *others) if others else leaf, inputs.target[0][rows]
                target = target.double() if target.is_floating_point() else target
                options = {"rescale": True} if rescale else {}
                value = loss(logits, target, *(pair or ()), reduction="sum", **options) / count
        gradients.append(torch.autograd.grad(value, leaf, cotangent)[0])
        values.append(value.detach())
    value = torch.stack(values).sum() if inputs.cotangent is None else torch.cat(values)
    return value, torch.cat(gradients)


def errors(result: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> Row:
    """Return the errors of the worst row: of the loss relative to max(1, loss) (or of a softmax), and of the gradient.

    Errors are norms. The gradient is that of the logits, or of the hidden layer before them.
    """
    off = [torch.atleast_2d(got.double() - right).norm(dim=1) for got, right in zip(result, want, strict=True)]
    value, gradient = (torch.atleast_2d(right).norm(dim=1) for right in want)
    return {
        "loss_error": (off[0] / value.clamp_min(1)).max().item(),
        "gradient_error": (off[1] / gradient).max().item(),
    }


def measure(case: Case, suite: Suite, clock: Clock, say: Callable[[str], None]) -> list[Row]:
    """Return a row for each contender: times, their ratios to the references' medians, memory, errors."""
    inputs, made = make(case, clock.device), []
    calls: dict[str, Callable[[], Any]] = {}
    if case.kind != "linear":  # one read and one write of the logits: the least cost of a loss and its gradient
        logits = inputs.leaves[0].detach()
        calls["copy"] = functools.partial(torch.empty_like(logits).copy_, logits)
    wanted: dict[tuple[Pair | None, bool], tuple[Tensor, Tensor]] = {}
    graphs = clock.cuda and case.kind not in ("linear", "softmax")
    torch.compiler.reset()
    for contender in contenders(case, clock.device, suite.compiled):
        t1, t2 = contender.pair or (None, None)
        row = {"contender": contender.name, "label": contender.label, "t1": t1, "t2": t2} | case._asdict()
        made.append(row)
        try:
            call = Call(contender, inputs)
            result = call()  # compiles
            if not case.sweep:
                key = contender.pair, contender.rescale
                if key not in wanted:
                    wanted[key] = exact(case, contender.pair, inputs, rescale=contender.rescale)
                row |= errors(result, wanted[key])
            del result
            row["peak_bytes"] = clock.peak(call)
            calls[contender.label] = call
            if graphs and contender.name.removesuffix(COMPILED) in (OURS, REFERENCES[case.kind][0]):
                calls[contender.label + GRAPH] = recorded(call)
                made.append(row | {"contender": contender.name + GRAPH, "label": contender.label + GRAPH})
        except Exception as error:  # another package's kernel fails, or memory runs out: measure the others
            row["failed"] = f"{type(error).__name__}: {error}".splitlines()[0]
            say(f"failed: {contender.label} at {case}: {row['failed']}")
    wanted.clear()
    for warm_up in calls.values():
        clock.seconds(warm_up)
    taken = clock.take_turns(calls, suite)
    return [row | summary(row, taken) for row in made]


def summary(row: Row, taken: dict[str, list[float]]) -> Row:
    """Return a contender's microseconds, and their ratios to the references'."""
    runs = [1e6 * seconds for seconds in taken.get(row["label"], [])]
    if not runs:
        return {}
    low, middle, high = statistics.quantiles(runs, n=4)
    medians = {label: 1e6 * statistics.median(seconds) for label, seconds in taken.items()}
    graph = GRAPH if row["label"].endswith(GRAPH) else ""  # a graph's time is divided by a graph's
    names = list(REFERENCES[row["kind"]])
    if row["contender"].removesuffix(GRAPH) == OURS + COMPILED:
        names.append(row["label"].removesuffix(GRAPH).replace(COMPILED, ""))  # the same without the compiler
    over = {name: middle / medians[name + graph] for name in names if name + graph in medians}
    made: Row = {"runs": len(runs), "median_us": middle, "quartiles_us": [low, high], "min_us": min(runs), "over": over}
    if row["peak_bytes"] is not None:
        size = row["rows"] * row["classes"] * getattr(torch, row["dtype"]).itemsize
        made["peak_over_logits"] = row["peak_bytes"] / size
    if "copy" in medians:
        made |= {"copy_us": medians["copy"], "copy_share": medians["copy"] / middle}
    return made


def compile_ahead(case: Case, compiled: bool) -> None:
    """Compile a case into the cache on disk; what fails here fails again where it is reported."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    # Other processes need memory too. Triton specialises on multiples of 16.
    rows = 2**28 // case.classes // 16 * 16 if case.sweep or case.kind == "softmax" else case.rows
    inputs = make(case._replace(rows=min(case.rows, rows)), "cuda")
    for contender in contenders(case, "cuda", compiled):
        if contender.name not in ("port, 5 iterations", "entmax15", "entmax_bisect"):
            with suppress(Exception):
                Call(contender, inputs)()


def benchmark_provenance(device: str) -> Row:
    """Return `runs.provenance` with the versions of contenders and compilers."""
    versions = {}
    for package in ("triton", "liger_kernel", "entmax"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    made = provenance(device) | versions | {"date": today()}
    if device == "cuda":
        return made | {"cuda": str(torch.version.cuda)}
    made |= {"threads": str(torch.get_num_threads()), "vectors": torch.backends.cpu.get_cpu_capability()}
    library = cpu.library()
    if isinstance(library, cpu.Unavailable):
        return made | {"compiler": "none, so that bitempered is core"}
    if cpu.is_shipped(library):
        return made | {"compiler": "that of the wheel"}
    version = subprocess.run([*cpu.compiler(), "--version"], capture_output=True, text=True, check=True).stdout
    return made | {"compiler": version.splitlines()[0]}


def run(suite: Suite, device: str, out: Path, say: Callable[[str], None]) -> list[Row]:
    """Measure every case, and write rows and tables as they come: gpu.* or cpu.* in the folder `out`."""
    start, name, made_by = time.perf_counter(), "gpu" if device == "cuda" else "cpu", benchmark_provenance(device)
    rows: list[Row] = []
    say(", ".join(f"{key} {value}" for key, value in made_by.items()))
    if device == "cuda":  # many processes fill the cache on disk; one alone would compile for minutes
        workers = min(len(suite.cases), os.cpu_count() or 1, 14)
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
            for case, done in [(case, pool.submit(compile_ahead, case, suite.compiled)) for case in suite.cases]:
                if error := done.exception():
                    say(f"not compiled ahead: {case}: {error}")
        say(f"{time.perf_counter() - start:5.1f} s  compiled")
    clock = Clock(device)
    for case in suite.cases:
        rows += [row | made_by for row in measure(case, suite, clock, say)]
        if clock.cuda:
            gc.collect()  # tracebacks may still hold tensors
            torch.cuda.empty_cache()
        write_rows(out / f"{name}.jsonl", rows)
        write(out, {f"{name}.md": bench_report.markdown(rows, name).encode()})
        say(f"{time.perf_counter() - start:5.1f} s  {case}")
    write(out, bench_report.pages(rows, name))
    return rows
