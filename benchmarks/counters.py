"""Read the GPU's own counters while the loss kernel runs, with NVIDIA's Nsight Compute.

    python benchmarks/counters.py

Needs ncu on the path and the right to read counters. Writes benchmarks/counters.jsonl (one row per dtype and pair of
temperatures, with versions) and the table benchmarks/counters.md.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from bitempered.experiments.bench_report import named_grid
from bitempered.experiments.files import write_atomically, write_rows
from bitempered.experiments.runs import provenance, today
from bitempered.torch import bi_tempered_logistic_loss

HERE = Path(__file__).parent
ROWS, CLASSES = 8192, 32000
PAIRS = ((0.8, 1.2), (0.5, 4.0))
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
METRICS = {  # by the heading of its column
    "µs": "gpu__time_duration.sum",
    "GB moved": "dram__bytes.sum",
    "memory busy": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "issue slots busy": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "FMA pipe": "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active",
    "ALU pipe": "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active",
    "special functions": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "warps": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "registers": "launch__registers_per_thread",
    "waiting for memory": "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",
    "waiting for a pipe": "smsp__average_warps_issue_stalled_math_pipe_throttle_per_issue_active.ratio",
}
UNITS = {"us": 1.0, "ms": 1e3, "Gbyte": 1.0, "Mbyte": 1e-3, "%": 1.0, "register/thread": 1.0, "inst": 1.0}

Row = dict[str, Any]


def launch() -> None:
    """One loss and gradient of every kind, in the order of `cases`."""
    torch.manual_seed(0)
    print("origin", json.dumps({**provenance("cuda"), "date": today()}))
    for dtype, pair in cases():
        logits = torch.randn(ROWS, CLASSES, device="cuda", dtype=DTYPES[dtype]).requires_grad_()
        target = torch.randint(CLASSES, (ROWS,), device="cuda")
        torch.autograd.grad(bi_tempered_logistic_loss(logits, target, *pair), logits)
        torch.cuda.synchronize()


def cases() -> list[tuple[str, tuple[float, float]]]:
    return [(dtype, pair) for dtype in DTYPES for pair in PAIRS]


def read(output: str) -> list[Row]:
    """The rows from what ncu prints: a block of "name unit value" for each launch of the kernel."""
    origin = re.search(r"^origin (.*)$", output, re.MULTILINE)
    values = {
        heading: [
            float(value.replace(",", "")) * UNITS[unit]
            for unit, value in re.findall(rf"^ *{re.escape(metric)} +(\S+) +([\d.,]+)$", output, re.MULTILINE)
        ]
        for heading, metric in METRICS.items()
    }
    if origin is None or any(len(found) != len(cases()) for found in values.values()):
        raise SystemExit(f"ncu gave no counters:\n{output[-2000:]}")
    made = json.loads(origin[1])
    return [
        {"dtype": dtype, "t1": t1, "t2": t2, **{heading: found[i] for heading, found in values.items()}, **made}
        for i, (dtype, (t1, t2)) in enumerate(cases())
    ]


def page(rows: list[Row]) -> str:
    percent = ("memory busy", "issue slots busy", "FMA pipe", "ALU pipe", "special functions", "warps")
    lines = [["dtype", "(t1, t2)", *METRICS]]
    for row in rows:
        shown = [f"{row[name]:.0f}%" if name in percent else f"{row[name]:.3g}" for name in METRICS]
        lines.append([row["dtype"], f"({row['t1']:g}, {row['t2']:g})", *shown])
    made, table = rows[0], "\n".join(named_grid(lines))
    least = [f"{ROWS * CLASSES * 2 * size / 1e9:.2f}" for size in (4, 2)]
    return f"""# What binds the loss kernel: counters of {made["device"]}

One launch of the kernel that computes the loss and its gradient, {ROWS:,} × {CLASSES:,} logits of standard deviation 1.
Reading them once and writing the gradient once moves {least[0]} GB in float32, {least[1]} in bfloat16. Busy, pipes and
warps are shares of the peak; waiting is in warps per instruction issued.

{table}

Made by bitempered {made["bitempered"]} (commit {made["commit"]}) with torch {made["torch"]}, {made["date"]}, by
`python benchmarks/counters.py`.
"""


def main() -> None:
    if sys.argv[1:] == ["launch"]:
        launch()
        return
    if shutil.which("ncu") is None:
        raise SystemExit("counters.py needs NVIDIA's Nsight Compute: there is no ncu on the path")
    metrics = ",".join(METRICS.values())
    command = ["ncu", "--clock-control", "none", "--kernel-name", "loss_kernel", "--metrics", metrics]
    done = subprocess.run([*command, sys.executable, __file__, "launch"], capture_output=True, text=True)
    rows = read(done.stdout + done.stderr)
    write_rows(HERE / "counters.jsonl", rows)
    write_atomically(HERE / "counters.md", page(rows).encode())
    print(f"Written to {HERE}: counters.md and counters.jsonl")


if __name__ == "__main__":
    main()
