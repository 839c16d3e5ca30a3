"""The loss of classes spread over processes, beside cross-entropy in the same manner: its messages and its time.

    python benchmarks/scale.py            (2, 4 and 8 processes on this machine, connected by gloo; minutes)
    python benchmarks/scale.py --decoding (only how fast one core reads images)
    python benchmarks/scale.py --render   (only the page again, from benchmarks/scale.jsonl)

A row has the time of forward and backward of one loss, the sizes of its messages, and what the model of docs/scale.md
predicts: the time of the same computation on a shard without messages, and the time of an all-reduce of each size,
measured alone. Eight processes on fewer cores wait for each other, which the model counts as part of the messages.
"""

import argparse
import math
import os
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from bitempered.experiments.files import read_rows, write_atomically, write_rows
from bitempered.experiments.runs import provenance, today
from bitempered.torch import bi_tempered_logistic_loss

ROWS = Path(__file__).with_suffix(".jsonl")
RESULTS = Path(__file__).parents[1] / "results"
WORLDS = (2, 4, 8)
SHAPES = ((256, 4096),)  # examples, classes
T2 = (1.0, 1.2)
TURNS = 5

# The machine of the second table: H200s, eight to a node, NVLink inside, 50 GB/s of InfiniBand for each between nodes.
DEVICES = (8, 64, 512)
TOKENS = 8192
EPOCHS, IMAGES, BATCH = 180, 1_281_167, 4096  # of table 2
HOP = {"inside": 6e-6, "between": 12e-6}  # seconds for one of the log2(P) stages of an all-reduce of a few bytes
BANDWIDTH = {"inside": 400e9, "between": 50e9}  # bytes per second


class VocabularyParallel(torch.autograd.Function):
    """Cross-entropy of a shard of the classes: the largest logit, then the mass and the target's logit."""

    @staticmethod
    def forward(ctx, logits: Tensor, target: Tensor, first: int) -> Tensor:
        top = logits.amax(1)
        dist.all_reduce(top, dist.ReduceOp.MAX)
        powers = (logits - top[:, None]).exp()
        local = target - first
        here = (local >= 0) & (local < logits.shape[1])
        index = torch.where(here, local, 0)[:, None]
        own = torch.where(here, logits.gather(1, index)[:, 0] - top, 0.0)
        sums = torch.stack((powers.sum(1), own))
        dist.all_reduce(sums)
        probabilities = powers / sums[0, :, None]
        gradient = probabilities.scatter_add(1, index, -here.to(logits.dtype)[:, None]) / len(logits)
        ctx.save_for_backward(gradient)
        return (sums[0].log() - sums[1]).mean()

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor, None, None]:
        return g * ctx.saved_tensors[0], None, None


def work(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world, timeout=timedelta(seconds=120)
    )
    found = []
    for examples, classes in SHAPES:
        draw = torch.Generator().manual_seed(0)
        shard = torch.randn(examples, classes, generator=draw).chunk(world, 1)[rank].contiguous()
        target = torch.randint(classes, (examples,), generator=draw)
        for name, loss in losses(target, rank * shard.shape[1]).items():
            call = partial(step, loss, shard)
            sizes = messages(call)
            of_size = {n: timed(partial(dist.all_reduce, torch.zeros(n))) for n in sorted(set(sizes))}
            sending = sum(of_size[n] for n in sizes)
            sending += timed(agreement) if name != "cross-entropy" else 0.0
            found.append(
                {
                    "processes": world, "examples": examples, "classes": classes, "loss": name, "messages": sizes,
                    "seconds": timed(call), "computation": alone(call), "sending": round(sending, 7),
                }
            )  # fmt: skip
    if rank == 0:
        torch.save(found, f"{folder}/found.pt")
    dist.destroy_process_group()


def losses(target: Tensor, first: int) -> dict[str, Callable[[Tensor], Tensor]]:
    """Losses of a shard of the logits, whose first class is `first`."""

    def bi_tempered(logits: Tensor, t2: float) -> Tensor:
        return bi_tempered_logistic_loss(logits, target, min(t2, 0.8), t2, group=dist.group.WORLD)

    tempered = {f"bi-tempered, t2 = {t2:g}": partial(bi_tempered, t2=t2) for t2 in T2}
    return {"cross-entropy": lambda logits: VocabularyParallel.apply(logits, target, first), **tempered}


def step(loss, shard: Tensor) -> None:
    loss(shard.detach().requires_grad_()).backward()


def agreement() -> None:
    own = torch.zeros(4, dtype=torch.int64)
    dist.all_gather([torch.empty_like(own) for _ in range(dist.get_world_size())], own)


def timed(function) -> float:
    """The median over turns, which all processes begin together."""
    seconds = []
    for _ in range(TURNS + 2):
        dist.barrier()
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return round(median(seconds[2:]), 7)


def messages(function) -> list[int]:
    """The sizes of the all-reduces in a call."""
    sizes, real = [], dist.all_reduce

    def all_reduce(tensor, *arguments, **options):
        sizes.append(tensor.numel())
        return real(tensor, *arguments, **options)

    dist.all_reduce = all_reduce
    try:
        function()
    finally:
        dist.all_reduce = real
    return sizes


def alone(function) -> float:
    """The time of a call whose messages are not sent: every process computes with its own sums."""
    real = dist.all_reduce
    dist.all_reduce = lambda *_, **__: None
    try:
        return timed(function)
    finally:
        dist.all_reduce = real


def measure() -> None:
    rows, load = [], round(os.getloadavg()[0], 1)
    for world in WORLDS:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(work, (world, folder), nprocs=world)
            found = torch.load(f"{folder}/found.pt")
        rows += [{**row, "cores": os.cpu_count(), "load": load, **provenance(), "date": today()} for row in found]
        print(f"{world} processes: done", flush=True)
    write_rows(ROWS, [*rows, decoding()])


def decoding() -> dict:
    """Images per second that one core reads, crops and resizes as table 2 does, from JPEGs of ImageNet's usual size."""
    from PIL import Image

    from bitempered.experiments.imagenet import ImageFiles

    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        names = [f"{i}.JPEG" for i in range(40)]
        for name in names:
            coarse = Image.fromarray(rng.integers(0, 256, (38, 50, 3), dtype=np.uint8))
            coarse.resize((500, 375), Image.Resampling.BICUBIC).save(f"{folder}/{name}", quality=90)
        images = ImageFiles(Path(folder), np.array(names, dtype="S"), np.zeros(40, dtype=int), 224, draw=(0, 1))
        rates = []
        for _ in range(5):
            start = time.process_time()  # of this core alone, however busy the machine is
            images[list(range(40))]
            rates.append(40 / (time.process_time() - start))
    found = {"decoding": "500 x 375 to 224 x 224", "images_per_second": round(median(rates), 1)}
    return {**found, "cores": os.cpu_count(), **provenance(), "date": today()}


# The page


def expected(devices: int, numbers: list[int]) -> float:
    """Seconds of these all-reduces, of so many float32 numbers per token each, by the model."""
    nodes = max(1, devices // 8)
    stages = math.log2(min(devices, 8)) * HOP["inside"] + math.log2(nodes) * HOP["between"]
    slowest = BANDWIDTH["inside" if nodes == 1 else "between"]
    return sum(2 * stages + 2 * 4 * n * TOKENS / slowest for n in numbers)


def line(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def table2(decoded: float) -> list[str]:
    """Hours of one run of table 2 by the number of GPUs, from the steps that one H200 has been timed with."""
    header = ["network", "GPUs", "images per micro-batch", "hours", "of that adding gradients", "cores that decode"]
    lines = [line(*header), line(*["---"] * len(header))]
    for name, weights in (("resnet18", 11.7e6), ("resnet50", 25.6e6)):
        speed = read_rows(RESULTS / f"table2-{name}-quick" / "speed.jsonl")[-1]
        per_second = speed["images"] * speed["steps_per_second"][1]
        for devices in (8, 16, 64, 256):
            steps = EPOCHS * (IMAGES // BATCH)
            computing = steps * BATCH / devices / per_second
            nodes = devices // 8
            adding = steps * 2 * 4 * weights / BANDWIDTH["inside" if nodes == 1 else "between"]
            hours = (computing + adding) / 3600
            cores = BATCH * steps / (computing + adding) / decoded
            micro = min(256, BATCH // devices)
            lines.append(
                line(name, devices, micro, f"{hours:.2f}", f"{adding / (computing + adding):.0%}", f"{cores:,.0f}")
            )
    return lines


def page(all_rows: list[dict]) -> str:
    *rows, last = all_rows
    header = ["processes", "examples x classes", "loss", "all-reduces", "numbers per example", "measured, ms"]
    header += ["of that computing", "model, ms"]
    measured = [line(*header), line(*["---"] * len(header))]
    for row in rows:
        per_example = [n // row["examples"] for n in row["messages"]]
        model = row["computation"] + row["sending"]
        measured.append(
            line(
                row["processes"], f"{row['examples']} x {row['classes']:,}", row["loss"], len(per_example),
                sum(per_example), *(f"{1e3 * x:.1f}" for x in (row["seconds"], row["computation"], model)),
            )
        )  # fmt: skip
    largest = [row for row in rows if row["processes"] == WORLDS[-1] and row["examples"] == SHAPES[0][0]]
    header = ["devices", "loss", "all-reduces", "bytes per token", "milliseconds of messages"]
    modelled = [line(*header), line(*["---"] * len(header))]
    for devices in DEVICES:
        for row in largest:
            numbers = [n // row["examples"] for n in row["messages"]]
            seconds = expected(devices, numbers)
            modelled.append(line(devices, row["loss"], len(numbers), 4 * sum(numbers), f"{1e3 * seconds:.2f}"))
    ratios = [row["seconds"] / (row["computation"] + row["sending"]) for row in rows]
    first = rows[0]
    return f"""# Classes spread over processes

{chr(10).join(measured)}

Forward and backward in float32, medians of {TURNS} turns; processes with one thread each, on {first["cores"]} cores, so
that more processes than cores wait for each other. The model adds the computation, measured without messages, and each
all-reduce, measured alone: the measured time is {min(ratios):.2f} to {max(ratios):.2f} times the model's. The
bi-tempered loss also has one all-gather of four integers, in which the processes compare their arguments.

{chr(10).join(modelled)}

The model for {TOKENS:,} tokens and H200s in nodes of eight: an all-reduce has 2 log2(P) stages, of
{1e6 * HOP["inside"]:g} microseconds inside a node and {1e6 * HOP["between"]:g} between nodes, and sends twice its bytes
at {BANDWIDTH["inside"] / 1e9:g} GB/s inside a node or {BANDWIDTH["between"] / 1e9:g} GB/s between nodes. These figures
are assumptions, not measurements.

{chr(10).join(table2(last["images_per_second"]))}

One run of table 2 (180 epochs of 1,281,167 images in batches of 4,096) from the steps of 256 images that one H200 has
been timed with, and gradients that are added once a batch at the bandwidth above. A batch has 16 micro-batches of 256:
more than 16 GPUs need smaller ones, which changes batch normalisation, and the time assumes that they are as fast per
image. A core's second decodes {last["images_per_second"]:.0f} images (JPEGs of 500 x 375, to 224 x 224).

Made by benchmarks/scale.py, commit {first["commit"]},
{first["device"]}, torch {first["torch"]}, {first["date"]}; the load of the machine was {first["load"]:g} at the start.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--render", action="store_true", help="only the page again, from the rows")
    parser.add_argument("--decoding", action="store_true", help="only how fast one core reads images")
    options = parser.parse_args()
    if options.decoding:
        write_rows(ROWS, [*read_rows(ROWS)[:-1], decoding()])
    elif not options.render:
        measure()
    write_atomically(ROWS.with_suffix(".md"), page(read_rows(ROWS)).encode())


if __name__ == "__main__":
    main()
