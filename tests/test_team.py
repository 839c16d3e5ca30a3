"""Several processes that train one network give the numbers of one, and survive the loss of one of them."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import team_cases
import torch
from experiment_cases import without
from imagenet_cases import make_folder
from processes import run

from bitempered.experiments import team
from bitempered.experiments.files import read_rows

TESTS = Path(__file__).parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("imagenet"))


@pytest.fixture(scope="module")
def alone(folder, tmp_path_factory):
    (result,) = run(team_cases.train, 1, str(folder), str(tmp_path_factory.mktemp("alone")))
    return result


def assert_same(results, alone):
    """Batch normalisation's statistics are among the weights. A batch has three micro-batches: one of four idles."""
    for result in results:
        assert without(result["metrics"], "seconds") == without(alone["metrics"], "seconds")
        assert result["weights"].keys() == alone["weights"].keys()
        for name, value in alone["weights"].items():
            torch.testing.assert_close(result["weights"][name], value, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_final_weights_equal_those_of_one_process(world, folder, alone, tmp_path):
    results = run(team_cases.train, world, str(folder), str(tmp_path))
    assert_same(results, alone)
    assert len(list(tmp_path.glob("*.checkpoint"))) == 1  # of the first process


@pytest.mark.slow
def test_another_number_of_processes_continues(folder, alone, tmp_path):
    run(team_cases.train, 4, str(folder), str(tmp_path), 1)
    run(team_cases.train, 1, str(folder), str(tmp_path), 2)
    assert_same(run(team_cases.train, 2, str(folder), str(tmp_path)), alone)


@pytest.mark.slow
def test_the_first_process_decides():
    results = run(team_cases.first_alone, 3)
    for rank, (shared, calls, said, _, total) in enumerate(results):
        assert shared == "from the first"
        assert calls == ([0] if rank == 0 else [])
        assert said == "for all"
        assert total.tolist() == [3.0, 3.0]
    assert [x for *_, part, _ in results for x in part] == list(range(10))


def test_alone_nothing_is_sent():
    us = team.current()
    assert (us.rank, us.size, us.first, us.together) == (0, 1, True, False)
    assert us.part([1, 2]) == [1, 2]
    assert us.share(lambda: "mine") == "mine"
    assert us.add(torch.ones(1)).item() == 1


def start(world, kill_after, folder, out, *options):
    """`bitempered reproduce table2` in so many processes; their exit codes and what they wrote to stderr."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, str(TESTS / "team_cases.py"), str(kill_after), "reproduce", "table2", "--device", "cpu"]
    command += ["--data-dir", str(folder), "--out", str(out), *options]
    started = []
    for rank in range(world):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, team.TIMEOUT: "300", "OMP_NUM_THREADS": "1"}
        path = {"PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
        started.append(
            subprocess.Popen(
                command, env=os.environ | place | meet | path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        )
    said = [process.communicate(timeout=600) for process in started]
    return [process.returncode for process in started], said


@pytest.mark.slow
def test_a_killed_process_ends_the_run_which_another_number_resumes(folder, tmp_path):
    codes, said = start(2, 8, folder, tmp_path / "killed")  # in the second of three epochs
    assert codes[1] == -9
    assert codes[0] == 1
    assert "has lost the others" in said[0][1]
    assert "--resume to continue, on any number of processes" in said[0][1]
    assert "Traceback" not in said[0][1]
    codes, said = start(3, 0, folder, tmp_path / "killed", "--resume")
    assert codes == [0, 0, 0], said
    assert "Written to" in said[0][0]
    assert not said[1][0]  # only the first talks
    codes, said = start(1, 0, folder, tmp_path / "whole")
    assert codes == [0], said
    kept = ["seconds", "processes", "date"]
    rows, whole = (read_rows(tmp_path / name / "table2.jsonl") for name in ("killed", "whole"))
    assert [row["processes"] for row in rows] == [3, 3]
    assert without(rows, *kept) == without(whole, *kept)
    assert (tmp_path / "killed" / "table2.md").exists()
    assert not list((tmp_path / "killed").glob("*.checkpoint"))


@pytest.mark.slow
def test_torchrun(folder, tmp_path):
    """Under the real torchrun, which sets up the environment."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(TESTS / "team_cases.py"), "0", "reproduce", "table2", "--device", "cpu"]
    path = {"PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--data-dir", str(folder), "--out", str(tmp_path)],
        env=os.environ | path, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Written to") == 1
    assert [row["processes"] for row in read_rows(tmp_path / "table2.jsonl")] == [2, 2]
