"""Ways to compute the loss of a linear layer on a GPU: time, peak memory and errors of each, in one run.

Run from the repository root:  PYTHONPATH=src python benchmarks/linear_variants.py [profile]
About 70 s on an H200; `profile` also lists the kernels of a call with and without kept rows.

`device_linear.KEEP_ROWS` chooses between them; `kept` beside `apart` in the first table is what to decide by.
"""

import gc
import statistics
import sys
from functools import partial

import torch
import torch.nn.functional as F

from bitempered import kernels
from bitempered.experiments.bench import LINEAR_LIGER, Call, Case, Clock, Contender, Suite, contenders, make
from bitempered.torch import bi_tempered_logistic_loss, device_linear, linear_bi_tempered_logistic_loss

CASE = Case(8192, 128256, "bfloat16", "linear", 4096)
PAIRS = ((0.8, 1.2), (0.5, 4.0))
SUITE = Suite((CASE,), least=7, most=30, seconds=12.0)
# Name, whether rows are kept, and the classes of a block (None: as by default).
VARIANTS = (
    ("apart, 4,096 classes", False, 4096),  # as before blocks were chosen for memory
    ("apart", False, None),
    ("kept", True, None),
    ("kept, 2,048 classes", True, 2048),
    ("kept, 4,224 classes", True, 4224),  # above Liger's memory, but the most even tiles
)
default_size = device_linear.block_size


def loss_by(keep, size, pair, hidden, weight, target):
    """The public function with these constants: its gradients are computed in forward."""
    device_linear.KEEP_ROWS = keep
    device_linear.block_size = default_size if size is None else lambda *_: size
    return linear_bi_tempered_logistic_loss(hidden, weight, target, *pair)


def exact(inputs, pair):
    """The loss and both gradients in float64, by core or, without temperatures, by torch."""
    hidden, weight = (x.detach().double() for x in inputs.leaves)
    total, by_hidden, by_weight = 0.0, [], torch.zeros_like(weight)
    weight.requires_grad_()
    for x, target in zip(hidden.split(512), inputs.target[0].split(512), strict=True):
        x.requires_grad_()
        with kernels.use("core"):
            loss = partial(bi_tempered_logistic_loss, t1=pair[0], t2=pair[1]) if pair else F.cross_entropy
            value = loss(F.linear(x, weight), target, reduction="sum") / len(hidden)
        of_rows, of_classes = torch.autograd.grad(value, (x, weight))
        by_hidden.append(of_rows)
        by_weight += of_classes
        total += value.detach()
    return total, torch.cat(by_hidden), by_weight


def errors(call, want):
    """The error of the loss, and of each gradient relative to its norm; of the hidden layer's also the worst row's."""
    value = call.function(*call.leaves, *call.inputs.target)
    gradients = torch.autograd.grad(value, call.leaves)
    off = [
        ((got.double() - right).norm() / right.norm()).item() for got, right in zip(gradients, want[1:], strict=True)
    ]
    worst = ((gradients[0].double() - want[1]).norm(dim=1) / want[1].norm(dim=1)).max().item()
    return (value.double() - want[0]).abs().item() / max(1.0, want[0].item()), *off, worst


def show_kernels(name, call):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    print(f"\n{name}: kernels")
    for row in sorted(profile.key_averages(), key=lambda row: -row.device_time_total)[:12]:
        print(f"  {row.device_time_total / 1e3:8.2f} ms  {row.count:5d} x  {row.key[:100]}")


def main():
    inputs, clock = make(CASE, "cuda"), Clock("cuda")
    others = [c for c in contenders(CASE, "cuda", compiled=False) if c.pair is None]
    calls, rows = {}, {}
    for pair in (None, *PAIRS):
        variants = VARIANTS if pair == PAIRS[0] else [v for v in VARIANTS if v[2] is None]
        made = others if pair is None else [Contender(n, partial(loss_by, k, s, pair), pair) for n, k, s in variants]
        want = exact(inputs, pair)
        for contender in made:
            call = Call(contender, inputs)
            rows[contender.label] = errors(call, want)
            calls[contender.label] = call
        del want
        gc.collect()
        torch.cuda.empty_cache()
    peaks = {label: clock.peak(call) for label, call in calls.items()}
    taken = clock.take_turns(calls, SUITE)
    medians = {label: statistics.median(seconds) for label, seconds in taken.items()}
    base, liger = medians[others[0].label], peaks.get(LINEAR_LIGER)
    print(f"{CASE}, {torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("ms (median, least), over unfused, peak bytes, at most Liger's; errors: loss, hidden, weight, hidden by row")
    for label, seconds in taken.items():
        below = "" if liger is None else "yes" if peaks[label] <= liger else "no"
        print(
            f"{label:42} {1e3 * medians[label]:7.2f} {1e3 * min(seconds):7.2f} {medians[label] / base:5.2f}"
            f" {peaks[label]:14,} {below:4}" + "".join(f" {x:.1e}" for x in rows[label])
        )
    if "profile" in sys.argv[1:]:
        for name in ("apart", "kept"):
            show_kernels(name, calls[f"{name} {PAIRS[0]}"])


if __name__ == "__main__":
    main()
