"""The playground's presets: does one side recover and the other not, and how soon, on how many frames?

    python benchmarks/playground.py              (needs the extras playground and experiments, and an idle machine)
    python benchmarks/playground.py --render     writes the page again, from the rows

Trains every preset for several seeds, and a few of them as a page does, over a WebSocket, with a clock. Writes
benchmarks/playground.jsonl, one row per run, and the page benchmarks/playground.md.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from websockets.sync.client import connect

from bitempered.experiments.report import grid, maker, measure_or_render
from bitempered.experiments.runs import provenance, today
from bitempered.playground.settings import Settings
from bitempered.playground.training import STEPS, STEPS_PER_FRAME, Duel

ROWS = Path(__file__).with_suffix(".jsonl")
RECOVERED = 0.95  # of the clean labels right
SOON = 5.0  # seconds
LEVELS = {"none": 0.0, "small-margin": 0.2, "large-margin": 0.15, "random": 0.3}  # as the page's buttons set them
# How many seeds: the two presets that a newcomer tries first get more.
SEEDS = {("ring", "random"): 10, ("ring", "large-margin"): 10, ("ring", "small-margin"): 5, ("ring", "none"): 3} | {
    (data, noise): 3 for data in ("moons", "spirals", "three") for noise in ("large-margin", "random")
}
TIMED = [("random", seed) for seed in range(3)] + [("large-margin", seed) for seed in range(3)]  # on the ring

Row = dict[str, Any]


def measure() -> list[Row]:
    torch.set_num_threads(1)  # as the server does
    asked = [preset(data, noise, seed) for (data, noise), seeds in SEEDS.items() for seed in range(seeds)]
    rows = [wanted | result(frames(wanted), None) for wanted in asked]
    command = [sys.executable, "-m", "bitempered", "playground", "--no-browser", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().split()[4].replace("http", "ws")
            with connect(f"{address}train", proxy=None) as page:
                list(served(page, preset("ring", "none", 0)))  # the first run of a process is slower
                for noise, seed in TIMED:
                    wanted = preset("ring", noise, seed)
                    rows.append(wanted | result(served(page, wanted), time.perf_counter()))
        finally:
            server.terminate()
    return [row | provenance() | {"date": today()} for row in rows]


def preset(data: str, noise: str, seed: int) -> Row:
    return {"data": data, "noise": noise, "level": LEVELS[noise], "seed": seed}


def frames(asked: Row) -> Any:
    duel = Duel(Settings.read(asked))
    while not duel.done:
        yield duel.advance(STEPS_PER_FRAME, None)


def served(page: Any, asked: Row) -> Any:
    page.send(json.dumps({"settings": asked}))
    while True:
        message = json.loads(page.recv(60))
        if "frame" in message:
            yield message["frame"]
            if message["frame"]["done"]:
                return


def result(run: Any, started: float | None) -> Row:
    """The end of a run, and when the bi-tempered side first had recovered; in seconds too if it is timed."""
    step = second = None
    count, early = 0, None
    for count, frame in enumerate(run, 1):  # noqa: B007  (the last one counts)
        if started is not None and time.perf_counter() - started <= SOON:
            early = frame
        if step is None and frame["sides"][1]["clean"] >= RECOVERED:
            step = frame["step"]
            second = None if started is None else round(time.perf_counter() - started, 2)
    logistic, ours = (side["clean"] for side in frame["sides"])
    row = {"t1": frame["t1"], "t2": frame["t2"], "logistic": logistic, "bi-tempered": ours, "recovered_step": step}
    if started is None:
        return row
    seconds = time.perf_counter() - started
    speed = {"seconds": round(seconds, 2), "frames_per_second": round(count / seconds, 1)}
    soon = [side["clean"] for side in early["sides"]] if early else None
    return row | {"soon": soon, "recovered_second": second} | speed


def spread(values: list[float], digits: int = 1) -> str:
    low, middle, high = (f"{value:.{digits}f}" for value in (min(values), median(values), max(values)))
    return f"{middle} ({low} to {high})"


def page(rows: list[Row]) -> str:
    timed = [row for row in rows if "seconds" in row]
    lines = []
    for data, noise in SEEDS:
        cell = [row for row in rows if (row["data"], row["noise"]) == (data, noise) and "seconds" not in row]
        if not cell:
            continue
        steps = [row["recovered_step"] for row in cell if row["recovered_step"] is not None]
        never = len(cell) - len(steps)
        lines.append(
            [
                data, f"{noise}, {cell[0]['level']:.0%}" if cell[0]["level"] else noise, str(len(cell)),
                spread([100 * row["logistic"] for row in cell]), spread([100 * row["bi-tempered"] for row in cell]),
                ", ".join([spread(steps, 0) for _ in steps[:1]] + [f"{never} never"] * bool(never)),
            ]
        )  # fmt: skip
    head = ["data", "wrong labels", "seeds", "logistic", "bi-tempered", "step of 95 %"]
    table = grid(head, lines, ["---"] * 2 + ["---:"] * 4)
    clock = grid(
        ["wrong labels", "seed", "logistic", "bi-tempered", "s to 95 %", "s in all", "frames per s"],
        [
            [
                f"{row['noise']}, {row['level']:.0%}", str(row["seed"]),
                *(f"{100 * value:.1f}" for value in row["soon"]),
                f"{row['recovered_second']:.1f}" if row["recovered_second"] is not None else "never",
                f"{row['seconds']:.1f}", f"{row['frames_per_second']:.1f}",
            ]
            for row in timed
        ],
        ["---"] + ["---:"] * 6,
    )  # fmt: skip
    one = rows[0]
    return f"""# The playground's presets: clean labels right after {STEPS} steps, %

{table}

Median (least to most) over the seeds, and the step at which the bi-tempered side first has {RECOVERED:.0%} of the clean
labels right. Both sides have the same net, first weights, optimiser and learning rate; the bi-tempered loss has
t1 = {one["t1"]:g}, t2 = {one["t2"]:g}.

## With a clock: clean labels right {SOON:g} seconds after the request, %, disc in ring

{clock}

Over the WebSocket, on two cores. The server pushes at most 20 frames a second, {STEPS_PER_FRAME} steps each.

{maker(one, "commit " + ", ".join(dict.fromkeys(row["commit"] for row in rows)))}, {rows[-1]["date"]}, by
`python benchmarks/playground.py`.
"""


def main() -> None:
    measure_or_render(ROWS, measure, page)


if __name__ == "__main__":
    main()
