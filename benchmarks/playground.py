"""Run the playground's presets as a page does, over a WebSocket: does one side recover, how soon, how many frames?

    python benchmarks/playground.py              (needs the extras playground and experiments, and an idle machine)
    python benchmarks/playground.py --render     writes the page again, from the rows

Writes benchmarks/playground.jsonl, one row per run, and the page benchmarks/playground.md.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from websockets.sync.client import connect

from bitempered.experiments.report import grid, maker, measure_or_render
from bitempered.experiments.runs import provenance, today

ROWS = Path(__file__).with_suffix(".jsonl")
RECOVERED = 0.95  # of the clean labels right
LEVELS = {"none": 0.0, "small-margin": 0.2, "large-margin": 0.15, "random": 0.3}  # as the page's buttons set them
# How many seeds: the two presets that a newcomer tries first get more.
SEEDS = {("ring", "random"): 10, ("ring", "large-margin"): 10, ("ring", "small-margin"): 5, ("ring", "none"): 3} | {
    (data, noise): 3 for data in ("moons", "spirals", "three") for noise in ("large-margin", "random")
}

Row = dict[str, Any]


def measure() -> list[Row]:
    command = [sys.executable, "-m", "bitempered", "playground", "--no-browser", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().split()[4].replace("http", "ws")
            with connect(f"{address}train", proxy=None) as page:
                run(page, {"noise": "none"})  # the first run of a process is slower
                rows = []
                for (data, noise), seeds in SEEDS.items():
                    for seed in range(seeds):
                        asked = {"data": data, "noise": noise, "level": LEVELS[noise], "seed": seed}
                        rows.append(asked | run(page, asked) | provenance() | {"date": today()})
                        print(rows[-1], flush=True)
        finally:
            server.terminate()
    return rows


def run(page: Any, asked: Row) -> Row:
    """One run from the request to the last frame."""
    page.send(json.dumps({"settings": asked}))
    started = time.perf_counter()
    recovered, frames = None, 0
    while True:
        message = json.loads(page.recv(60))
        if "frame" not in message:
            continue
        frame, seconds = message["frame"], time.perf_counter() - started
        logistic, ours = (side["clean"] for side in frame["sides"])
        frames += 1
        if recovered is None and ours >= RECOVERED:
            recovered = round(seconds, 2)
        if frame["done"]:
            break
    return {
        "t1": frame["t1"], "t2": frame["t2"], "steps": frame["step"], "logistic": logistic, "bi-tempered": ours,
        "recovered_seconds": recovered, "seconds": round(seconds, 2), "frames_per_second": round(frames / seconds, 1),
    }  # fmt: skip


def spread(values: list[float], digits: int = 1) -> str:
    low, middle, high = (f"{value:.{digits}f}" for value in (min(values), median(values), max(values)))
    return f"{middle} ({low} to {high})"


def page(rows: list[Row]) -> str:
    lines = []
    for data, noise in SEEDS:
        cell = [row for row in rows if (row["data"], row["noise"]) == (data, noise)]
        if not cell:
            continue
        soon = [row["recovered_seconds"] for row in cell if row["recovered_seconds"] is not None]
        lines.append(
            [
                data, f"{noise}, {cell[0]['level']:.0%}" if cell[0]["level"] else noise, str(len(cell)),
                spread([100 * row["logistic"] for row in cell]), spread([100 * row["bi-tempered"] for row in cell]),
                spread(soon) + ("" if len(soon) == len(cell) else f", {len(cell) - len(soon)} never") if soon else "never",
                spread([row["seconds"] for row in cell]), spread([row["frames_per_second"] for row in cell]),
            ]
        )  # fmt: skip
    head = ["data", "wrong labels", "seeds", "logistic", "bi-tempered", "s to 95 %", "s in all", "frames per s"]
    table = grid(head, lines, ["---"] * 2 + ["---:"] * 6)
    one = rows[0]
    return f"""# The playground's presets: clean labels right at the end, %, and how fast

{table}

Median (least to most) over the seeds. Both sides have the same net, first weights, optimiser and learning rate; the
bi-tempered loss has t1 = {one["t1"]:g}, t2 = {one["t2"]:g}. A run has {one["steps"]} steps. Seconds count from the
request to the frame in which the bi-tempered side first has 95 % of the clean labels right, and to the last one, on
two cores; the server pushes at most 20 frames a second.

{maker(one, "commit " + ", ".join(dict.fromkeys(row["commit"] for row in rows)))}, {rows[-1]["date"]}, by
`python benchmarks/playground.py`.
"""


def main() -> None:
    measure_or_render(ROWS, measure, page)


if __name__ == "__main__":
    main()
