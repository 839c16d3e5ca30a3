"""What commands do where little can be printed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROTOCOL_B = Path(__file__).parents[1] / "results" / "protocol-b"


def report(folder, out, **environment):
    shutil.copytree(PROTOCOL_B, folder)
    command = [sys.executable, "-m", "bitempered", "report", str(folder)]
    variables = {**os.environ, **environment} if environment else None
    return subprocess.run(command, stdout=out, stderr=subprocess.PIPE, timeout=120, env=variables)


def test_what_an_encoding_lacks_is_a_question_mark(tmp_path):
    done = report(tmp_path / "rows", subprocess.PIPE, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, b"")
    assert b" ? " in done.stdout  # a plus-minus sign


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_output_that_cannot_be_written_gets_one_line(tmp_path):
    with open("/dev/full", "wb") as full:
        done = report(tmp_path / "rows", full)
    assert done.returncode == 1
    assert done.stderr == b"bitempered: cannot print the output: [Errno 28] No space left on device\n"
