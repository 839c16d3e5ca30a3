"""Files of results: whole or not there, whatever ends a process, and however many write."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from experiment_cases import silent

from bitempered.experiments import files

# Files


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "file"
    files.write_atomically(path, b"old")

    def full(source, target):
        raise OSError("No space left on device")

    monkeypatch.setattr(files.os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        files.write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("torn", [b'{"a": ', b"{", b'{"a": 4'])
def test_a_row_that_was_torn_off_is_no_row(torn, tmp_path):
    path = tmp_path / "rows"
    files.append_rows(path, [{"a": 1}, {"a": 2}])
    with path.open("ab") as file:
        file.write(torn)
    assert files.read_rows(path) == [{"a": 1}, {"a": 2}]
    files.append_rows(path, [{"a": 3}])
    assert path.read_bytes() == b'{"a": 1}\n{"a": 2}\n{"a": 3}\n'


def test_a_row_without_its_end_of_line_is_a_row(tmp_path):
    path = tmp_path / "rows"
    path.write_bytes(b'{"a": 1}')
    assert files.read_rows(path) == [{"a": 1}]
    files.append_rows(path, [{"a": 2}])
    assert path.read_bytes() == b'{"a": 1}\n{"a": 2}\n'


@pytest.mark.parametrize("content", [b"not JSON", b'{"a": 1}\n[]', b'{"a": \n{"a": 1}\n', b"\xff"])
def test_other_damage_is_not_taken_for_a_torn_row(content, tmp_path):
    path = tmp_path / "rows"
    path.write_bytes(content)
    with pytest.raises(files.BadRows, match="is not a JSON object"):
        files.read_rows(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("before", [b"", b'{"a": 1}\n'])
def test_rows_that_do_not_fit_on_the_disk_leave_what_was_there(before, tmp_path):
    path = tmp_path / "rows"
    if before:
        path.write_bytes(before)
    code = """
import resource, signal, sys
from pathlib import Path
from bitempered.experiments import files
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    files.append_rows(Path(sys.argv[1]), [{"a": "b" * 3000}])
except OSError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, timeout=60)
    assert "File too large" in done.stdout, done.stderr
    assert (path.read_bytes() if path.exists() else b"") == before
    assert path.exists() == bool(before)


# Locks


def test_a_lock_that_was_waited_for_is_the_one_that_is_there(tmp_path, monkeypatch):
    """Its holder removes the file at the end, and whoever opened it before must not be content with what is gone."""
    opened, removed = threading.Event(), threading.Event()
    real = files.fcntl.flock

    def flock(*given):
        if threading.current_thread() is not threading.main_thread() and not opened.is_set():
            opened.set()
            assert removed.wait(60)
        real(*given)

    def second():
        with files.lock(tmp_path, "seed0", silent) as held:
            return held, (tmp_path / ".seed0.lock").exists()

    monkeypatch.setattr(files.fcntl, "flock", flock)
    with ThreadPoolExecutor(1) as pool:
        with files.lock(tmp_path, "seed0", None) as held:
            assert held
            with files.lock(tmp_path, "seed0", None) as again, files.lock(tmp_path, "seed1", None) as other:
                assert (again, other) == (False, True)
            future = pool.submit(second)
            assert opened.wait(60)
        removed.set()
        assert future.result() == (True, True)
    assert not list(tmp_path.iterdir())


def test_whoever_waits_for_a_lock_says_so_until_it_is_free(tmp_path):
    said = threading.Semaphore(0)

    def second():
        with files.lock(tmp_path, "seed0", said.release) as held:
            return held

    with ThreadPoolExecutor(1) as pool:
        with files.lock(tmp_path, "seed0", None):
            future = pool.submit(second)
            assert all(said.acquire(timeout=60) for _ in range(3))
            assert not future.done()
        assert future.result()


def test_a_checkpoint_that_a_process_is_using_is_not_that_of_a_stopped_run(tmp_path):
    paths = [tmp_path / "seed0-12.checkpoint", tmp_path / "search" / "seed0-34.checkpoint"]
    paths[1].parent.mkdir()
    for path in paths:
        path.touch()
    assert files.stopped(tmp_path) == sorted(paths)
    with files.lock(tmp_path, "seed0", None):
        assert files.stopped(tmp_path) == paths[1:]
    assert files.stopped(tmp_path / "nowhere") == []


def test_what_a_killed_process_left_half_written_is_cleared_away(tmp_path):
    for name in (".seed0-1234.checkpoint.abc", ".seed00-1234.checkpoint.abc", ".seed0.lock", "mine"):
        (tmp_path / name).touch()
    with files.lock(tmp_path, "seed0", None) as held:
        assert held
    assert sorted(path.name for path in tmp_path.iterdir()) == [".seed00-1234.checkpoint.abc", "mine"]
