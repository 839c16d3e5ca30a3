"""Sweep of tile constants on a GPU: device time of loss and gradient (one kernel call chain), in microseconds.

Run from the repository root:  PYTHONPATH=src python benchmarks/tiles.py [rows few soft binary long]
Every variant is compiled first: about 5 s each, 60 variants, so 4 to 6 minutes for all; a group alone about 1 minute.
"""

import itertools
import sys
from functools import partial

import torch
import torch.nn.functional as F
from triton.testing import do_bench

from bitempered.kernels.options import LossOptions
from bitempered.kernels.triton import binary, losses, tiles

only = sys.argv[1:] or ["rows", "few", "soft", "binary", "long"]
PAIRS = ((0.8, 1.2), (0.5, 4.0))
chosen = tiles.choose_tile
torch.manual_seed(0)


def us(f):
    return 1e3 * do_bench(f, warmup=20, rep=100, return_mode="median")


def torch_time(logits, target, f=F.cross_entropy):
    leaf = logits.detach().requires_grad_()
    return us(lambda: torch.autograd.grad(f(leaf, target), leaf))


def sweep(title, logits, target, variants, pairs=PAIRS):
    copy = us(logits.clone)
    print(f"\n{title}: torch {torch_time(logits, target):.1f} (with its launches), copy {copy:.1f}")
    for over, pair in itertools.product(variants, pairs):

        def tile(*given, over=over):
            made = {**chosen(*given), **over}
            made["VECTOR"] = min(made["VECTOR"], made["COLUMNS"])
            return made

        tiles.choose_tile = tile
        losses._plans.clear()
        options = LossOptions(*pair, 1)
        try:
            time = us(partial(losses.loss, logits, target, None, options, logits.dtype, torch.empty_like(logits)))
            print(f"  {pair} {over}: {time:.1f}", flush=True)
        except Exception as error:
            print(f"  {pair} {over}: {type(error).__name__} {str(error)[:100]}", flush=True)
    tiles.choose_tile = chosen


if "rows" in only:
    for rows, dtype in ((65536, torch.bfloat16), (65536, torch.float32), (4096, torch.float32)):
        x, y = torch.randn(rows, 1000, device="cuda", dtype=dtype), torch.randint(1000, (rows,), device="cuda")
        sweep(f"{rows} x 1000 {dtype}", x, y, [{}, {"num_warps": 1}, {"num_warps": 4}, {"ROWS": 2, "num_warps": 4}])
    for classes in (100, 300):  # between few and 1,000
        x, y = torch.randn(65536, classes, device="cuda"), torch.randint(classes, (65536,), device="cuda")
        few = [{"ROWS": 64, "COLUMNS": 1, "VECTOR": 1, "SINGLE": False, "num_warps": 2}]
        sweep(f"65536 x {classes} float32", x, y, [{}, {"num_warps": 1}, *few])
if "few" in only:

    def one(rows, warps):
        return {"ROWS": rows, "COLUMNS": 1, "VECTOR": 1, "SINGLE": False, "num_warps": warps}

    few = [one(32, 1), one(64, 1), one(64, 2), one(128, 4), one(128, 2), one(256, 4)]
    x, y = torch.randn(1_000_000, 10, device="cuda"), torch.randint(10, (1_000_000,), device="cuda")
    old = {"ROWS": 32, "COLUMNS": 16, "VECTOR": 1, "SINGLE": True, "num_warps": 4}
    sweep("1,000,000 x 10 float32", x, y, [*few, old])
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(8, 19, 512, 1024, device="cuda", dtype=dtype)
        y = torch.randint(19, (8, 512, 1024), device="cuda")
        old = {"ROWS": 32, "COLUMNS": 32, "VECTOR": 1, "SINGLE": True, "num_warps": 4}
        sweep(f"8 x 19 x 512 x 1024 {dtype}", x, y, [*few, old])
    # Where few ends: contiguous 32 (tiles._FEW) or more, images 64 or more; and from how many rows (tiles._MANY_ROWS).
    for classes, rows in ((32, 2**16), (64, 2**16), (10, 2**12), (10, 2**14)):
        x, y = torch.randn(rows, classes, device="cuda"), torch.randint(classes, (rows,), device="cuda")
        plain = chosen(classes, min(rows, 2**14 - 1), 4, True, 4 if classes % 4 == 0 else 1)
        sweep(f"{rows} x {classes} float32", x, y, [one(64, 2), plain], PAIRS[:1])
if "soft" in only:
    x = torch.randn(4096, 1000, device="cuda")
    y = torch.softmax(torch.randn(4096, 1000, device="cuda"), 1)
    # `losses._compute` doubles the warps of the tile.
    sweep("probabilities 4096 x 1000", x, y, [{"num_warps": 1}, {}, {"num_warps": 4}])
if "binary" in only:
    x = torch.randn(4096, 1000, device="cuda")
    y = torch.randint(2, (4096, 1000), device="cuda").float()
    base = torch_time(x, y, F.binary_cross_entropy_with_logits)
    print(f"\nbinary 4096 x 1000: torch {base:.1f} (with its launches)")
    made = torch.empty_like(x)
    for block, pair in itertools.product((256, 512, 1024), PAIRS):
        binary._BLOCK = block
        options = LossOptions(*pair, None)
        time = us(partial(binary.binary_loss, x, y, None, None, options, gradient=made))
        print(f"  {pair} _BLOCK {block}: {time:.1f}", flush=True)
if "long" in only:  # not meant to change: a check that it has not become slower
    for dtype in (torch.bfloat16, torch.float32):
        x, y = torch.randn(8192, 32000, device="cuda", dtype=dtype), torch.randint(32000, (8192,), device="cuda")
        sweep(f"8192 x 32000 {dtype}", x, y, [{}])
