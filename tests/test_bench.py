"""`bitempered bench`: what it writes is what it measured, and its errors are those against float64."""

import importlib.util
import json
import math
import statistics
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")
pytest.importorskip("typer.testing")

import torch.nn.functional as F
from experiment_cases import invoke
from oracle import loss_and_gradient

from bitempered.experiments import bench, bench_report
from bitempered.experiments.files import read_rows
from bitempered.experiments.recipes import bench as recipe


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    out = tmp_path_factory.mktemp("bench")
    done = invoke("bench", "--device", "cpu", "--quick", "--out", out)
    assert done.exit_code == 0, done.output
    return out, read_rows(out / "cpu.jsonl"), done.output


def test_every_case_has_its_contenders(written):
    _, rows, _ = written
    assert {bench.Case(*(row[field] for field in bench.Case._fields)) for row in rows} == set(recipe.QUICK)
    losses = {(row["contender"], row["t1"], row["t2"]) for row in rows if (row["rows"], row["classes"]) == (4, 300)}
    ours = {(name, *pair) for name in ("bitempered", "core", "port, 5 iterations") for pair in bench.PAIRS}
    assert losses == {("cross_entropy", None, None)} | ours
    for row in rows:
        low, high = row["quartiles_us"]
        assert 0 < row["min_us"] <= row["median_us"]
        assert low <= row["median_us"] <= high
        assert row["runs"] == 3
        assert {"commit", "device", "torch", "liger_kernel", "entmax", "threads", "date"} <= row.keys()


def test_ratios_are_those_of_medians(written):
    _, rows, _ = written
    for row in rows:
        beside = [other for other in rows if all(other[field] == row[field] for field in bench.Case._fields)]
        for name, ratio in row["over"].items():
            (reference,) = (other for other in beside if other["label"] == name)
            assert ratio == pytest.approx(row["median_us"] / reference["median_us"])
        if row["kind"] != "linear":
            assert row["copy_share"] == pytest.approx(row["copy_us"] / row["median_us"])


def test_tables_and_figure(written):
    out, rows, said = written
    page = (out / "cpu.md").read_text(encoding="utf-8")
    assert "## Loss: 4 × 300, float32" in page
    (row,) = (row for row in rows if row["classes"] == 300 and row["label"] == "bitempered (0.5, 4.0)")
    (line,) = (
        line
        for line in page.partition("## Loss: 4 × 300")[2].splitlines()[:10]
        if line.startswith("| bitempered (0.5, 4.0)")
    )
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert float(cells[1].split(" ")[0].replace(",", "")) == pytest.approx(row["median_us"], rel=0.01)
    assert float(cells[2]) == pytest.approx(row["over"]["cross_entropy"], abs=0.01)
    assert float(cells[5]) == pytest.approx(row["gradient_error"], rel=0.1)
    (glance,) = (line for line in page.splitlines() if line.startswith("| 4 × 300, float32 | (0.5, 4.0) |"))
    assert glance.split(" | ")[2:4] == [cells[1].split(" ")[0], cells[2]]
    assert "## Growth with classes, 4 rows, float32" in page
    assert row["commit"] in page
    assert (out / "cpu.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert "Written to" in said


def test_errors_are_against_float64(written):
    _, rows, _ = written
    measured = [row for row in rows if not row["sweep"]]
    assert measured
    for row in measured:
        assert row["gradient_error"] > 0  # float32 is not float64
        assert row["loss_error"] <= 5e-6
        assert row["gradient_error"] <= (1e-2 if "port" in row["contender"] else 5e-6)
    # Five iterations are not enough for 300 classes.
    port, ours = (
        next(row for row in measured if row["classes"] == 300 and row["label"] == f"{name} (0.8, 1.2)")
        for name in ("port, 5 iterations", "bitempered")
    )
    assert port["gradient_error"] > 100 * ours["gradient_error"]


def test_what_errors_are_measured_against_is_the_oracles():
    case = bench.Case(3, 5)
    inputs = bench.make(case, "cpu")
    logits = inputs.leaves[0].tolist()
    labels = F.one_hot(inputs.target[0], 5).tolist()
    for pair in bench.PAIRS:
        value, gradient = bench.exact(case, pair, inputs)
        wanted = [loss_and_gradient(a, y, *pair) for a, y in zip(logits, labels, strict=True)]
        assert value.item() == pytest.approx(statistics.fmean(float(loss) for loss, _ in wanted), rel=1e-12)
        for row, (_, exact) in zip(3 * gradient, wanted, strict=True):
            assert row.tolist() == pytest.approx([float(x) for x in exact], rel=1e-9, abs=1e-12)


def test_an_error_is_found_as_large_as_it_is():
    want = torch.tensor(2.0, dtype=torch.float64), torch.tensor([[3.0, 4.0], [1.0, 0.0]], dtype=torch.float64)
    got = want[0] + 0.5, want[1] + torch.tensor([[0.0, 1.0], [0.1, 0.0]])
    assert bench.errors(got, want) == {"loss_error": 0.25, "gradient_error": pytest.approx(0.2)}


def test_an_overwritten_input_is_restored():
    def overwrites(logits, target):
        loss = F.cross_entropy(logits, target)
        with torch.no_grad():
            logits.zero_()
        return 2 * loss.detach() + 0 * logits.sum()

    inputs = bench.make(bench.Case(4, 8), "cpu")
    call = bench.Call(bench.Contender("", overwrites, overwrites=True), inputs)
    first, _ = call()
    zeroed, _ = call()
    call.restore()
    again, _ = call()
    assert first == again != zeroed
    assert zeroed.item() == pytest.approx(2 * math.log(8))
    assert inputs.leaves[0].abs().min() > 0


def test_what_fails_is_said_and_the_others_go_on(monkeypatch, tmp_path):
    def broken(logits, target, t1, t2):
        raise RuntimeError("no such thing\nand more")

    monkeypatch.setattr(bench, "port", broken)
    monkeypatch.setattr(recipe, "QUICK", (bench.Case(4, 16),))
    done = invoke("bench", "--device", "cpu", "--quick", "--out", tmp_path)
    assert done.exit_code == 1
    assert "these failed: port, 5 iterations (0.8, 1.2) at 4 x 16" in done.output
    assert "| port, 5 iterations (0.8, 1.2) | RuntimeError: no such thing |" in (tmp_path / "cpu.md").read_text("utf-8")
    rows = read_rows(tmp_path / "cpu.jsonl")
    assert {row["contender"] for row in rows if "median_us" in row} == {"cross_entropy", "bitempered", "core"}


def test_compiled_is_compared_with_the_same_without_the_compiler():
    label = "bitempered, torch.compile (0.8, 1.2)"
    row = {"label": label, "contender": "bitempered, torch.compile", "kind": "loss", "peak_bytes": None}
    taken = {label: [3.0] * 3, "bitempered (0.8, 1.2)": [2.0] * 3, "cross_entropy": [4.0] * 3}
    over = bench.summary(row, taken)["over"]
    assert over == {"cross_entropy": pytest.approx(0.75), "bitempered (0.8, 1.2)": pytest.approx(1.5)}


def test_images_have_as_many_positions_as_rows_were_asked_for():
    assert bench.image_shape(2 * 256 * 256) == (2, 256, 256)
    assert bench.image_shape(8 * 512 * 1024) == (8, 512, 1024)
    for case in (*recipe.CPU, *recipe.CUDA, *recipe.QUICK):
        if case.kind == "segmentation":
            assert math.prod(bench.image_shape(case.rows)) == case.rows


def test_a_slow_contender_sits_out_after_five_runs():
    class Clock(bench.Clock):
        def seconds(self, call):
            return call()

    suite = bench.Suite((), least=8, most=8, seconds=1.0)
    taken = Clock("cpu").take_turns({"slow": lambda: 0.5, "fast": lambda: 0.01}, suite)
    assert {label: len(runs) for label, runs in taken.items()} == {"slow": bench.MIN_RUNS, "fast": 8}


def test_memory_has_a_column_and_a_panel_where_it_is_measured(written):
    _, rows, _ = written
    rows = [row | {"peak_bytes": 2**20, "peak_over_logits": 1.5} for row in rows]
    assert "memory ÷ logits" in bench_report.markdown(rows, "gpu")
    assert len(bench_report.figure(rows).axes) == 3


@pytest.mark.parametrize("device", ["gpu", "tpu"])
def test_unknown_device(device, tmp_path):
    done = invoke("bench", "--device", device, "--out", tmp_path)
    assert done.exit_code == 2
    assert f"--device must be cpu or cuda, got '{device}'" in done.output


def test_committed_counters_are_what_their_rows_say():
    folder = Path(__file__).parents[1] / "benchmarks"
    specification = importlib.util.spec_from_file_location("counters", folder / "counters.py")
    counters = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(counters)
    rows = read_rows(folder / "counters.jsonl")
    assert (folder / "counters.md").read_text() == counters.page(rows)
    # As ncu prints them, with a time of the first in milliseconds.
    made = {name: rows[0][name] for name in ("commit", "device", "bitempered", "torch", "date")}
    printed = f"origin {json.dumps(made)}\n"
    for i, row in enumerate(rows):
        for heading, metric in counters.METRICS.items():
            unit = {"µs": "us", "GB moved": "Gbyte", "registers": "register/thread"}.get(heading, "%")
            value = row[heading]
            if (i, unit) == (0, "us"):
                unit, value = "ms", value / 1000
            printed += f"    {metric}   {unit}   {value:,.6f}\n"
    read = counters.read(printed)
    assert len(read) == len(rows) == 4
    for got, row in zip(read, rows, strict=True):
        assert got == pytest.approx(row)
    with pytest.raises(SystemExit, match="ncu gave no counters"):
        counters.read(printed.replace("dram__bytes.sum", ""))


def test_a_quick_page_says_that_it_shows_no_speed(written):
    _, rows, _ = written
    note = "this shows that everything runs, not how fast"
    assert note in bench_report.markdown(rows, "cpu")
    assert note not in bench_report.markdown([row | {"runs": 15} for row in rows], "cpu")
