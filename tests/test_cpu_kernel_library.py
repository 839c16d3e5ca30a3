"""The CPU kernel's library: how it is compiled, where it is kept, what is loaded, and what happens without it."""

import os
import pwd
import re
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cpu_kernel_cases import FEW_PAIRS, assert_agree, exact, make, run

from bitempered import kernels
from bitempered.kernels import cpu, library, sources
from bitempered.torch import bi_tempered_logistic_loss


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """A cache folder of its own, and a library that has not been looked for yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sources, "SHIPPED", tmp_path / "shipped")
    cpu.library.cache_clear()
    yield tmp_path / "cache" / "bitempered"
    cpu.library.cache_clear()


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return str(path)


BROKEN = {  # CC, what is said
    "no compiler": (
        "no-such-compiler",
        "cannot be started, install one or set CC: .*No such file or directory: 'no-such-compiler'",
    ),
    "a name that is no text": (
        os.fsdecode(b"\xff"),
        "cannot be started, install one or set CC: .*No such file or directory",
    ),
    "an error": ("cc -no-such-flag", "failed: .*no-such-flag"),
    "an odd quote": ('cc "', "CC must be a command line, got 'cc \"': No closing quotation"),
    "nothing made": ("true", "cpu.so"),
    "another library": ("cc -xc /dev/null -Dbitempered_loss=other", "a library with the loss in it: .*bitempered_loss"),
    "bytes that are no text": (r"sh -c 'printf \\377-broken >&2; exit 1'", "failed: \ufffd-broken"),
}


@pytest.mark.parametrize(("compiler", "reason"), BROKEN.values(), ids=BROKEN)
def test_without_a_library_core_serves_and_the_log_says_why(monkeypatch, cache, caplog, compiler, reason):
    logits, target = make(4, 5)
    monkeypatch.setenv("CC", compiler)
    for _ in range(3):
        assert kernels.choose(logits, target) == "core"
        assert bi_tempered_logistic_loss(logits, target, 0.8, 1.2).isfinite()
    (record,) = caplog.records  # once
    assert (record.name, record.levelname) == ("bitempered", "WARNING")
    assert re.search(reason, record.getMessage(), re.DOTALL)
    with kernels.use("cpu"), pytest.raises(RuntimeError, match=f"(?s){reason}"):
        bi_tempered_logistic_loss(logits, target, 0.8, 1.2)
    assert list(cache.glob("*")) == []


def test_a_compiler_that_hangs_is_ended_with_all_it_started(monkeypatch, cache, tmp_path):
    monkeypatch.setenv("CC", script(tmp_path / "cc", f"sleep 600 & echo $! > {tmp_path}/pid; wait"))
    monkeypatch.setattr(library, "_TIME_LIMIT", 1)
    start = time.monotonic()
    assert "did not finish in 1 s" in str(cpu.library())
    assert time.monotonic() - start < 60
    child = int((tmp_path / "pid").read_text())
    for _ in range(600):  # whoever inherits it has yet to bury it
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail(f"process {child} is still there")


def test_it_can_be_turned_off(monkeypatch, cache, caplog):
    logits, target = make(4, 5)
    monkeypatch.setenv("BITEMPERED_CPU_KERNEL", "0")
    assert kernels.choose(logits, target) == "core"
    with kernels.use("cpu"), pytest.raises(RuntimeError, match="BITEMPERED_CPU_KERNEL=0 turns it off"):
        bi_tempered_logistic_loss(logits, target, 0.8, 1.2)
    assert not caplog.records
    assert not cache.exists()


def test_the_library_is_made_once_which_the_log_says(monkeypatch, cache, caplog):
    caplog.set_level("INFO", "bitempered")
    monkeypatch.setenv("CC", "")  # as if not set
    logits, target = make(4, 5)
    want = exact(logits, target, 0.8, 1.2)[0].float()
    previous = os.umask(0)  # the widest
    try:
        torch.testing.assert_close(run(logits, target, 0.8, 1.2)[0], want)
    finally:
        os.umask(previous)
    (record,) = caplog.records
    assert record.levelname == "INFO"
    assert record.getMessage().startswith(f"compiling the C kernel, once, into {cache}")
    (made,) = cache.iterdir()
    assert stat.S_IMODE(made.stat().st_mode) == 0o600
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    before = made.stat()
    monkeypatch.delenv("CC")
    cpu.library.cache_clear()
    torch.testing.assert_close(run(logits, target, 0.8, 1.2)[0], want)
    assert (made.stat().st_ino, made.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert len(caplog.records) == 1


def test_only_a_whole_and_private_library_is_loaded(tmp_path):
    """In another process: a library that is cut off ends it."""
    program = """
import ctypes, os, sys
from pathlib import Path
from bitempered.kernels import cpu

whole = Path(sys.argv[1])  # what CC, a script, copies to where the library shall be
made = 0


def damage(name, path):
    content = path.read_bytes()
    content = {
        "cut off": content[:8000],
        "of a byte too many": content + b" ",
        "no library": b"",
        "another library": Path(sys.argv[2]).read_bytes(),
    }.get(name, content)
    path.unlink()  # this process has it in memory
    path.write_bytes(content)
    path.chmod({"writable by the group": 0o620, "writable by others": 0o602}.get(name, 0o600))
    if name == "a link":
        path.rename(path.with_suffix(".other"))
        path.symlink_to(path.with_suffix(".other"))
    if name == "someone else's":
        os.chown(path, 1, -1)


names = ["cut off", "of a byte too many", "no library", "another library", "writable by the group"]
names += ["writable by others", "a link"] + ["someone else's"] * (os.getuid() == 0)
for name in names:
    os.environ["XDG_CACHE_HOME"] = str(Path(sys.argv[3]) / name)
    for done in ("made", "made again", "found"):
        print(name, done, flush=True)
        cpu.library.cache_clear()
        library = cpu.library()
        assert isinstance(library, ctypes.CDLL), library
        made += done != "found"
        assert len(Path(sys.argv[4]).read_text()) == made
        if done == "made":
            (path,) = Path(os.environ["XDG_CACHE_HOME"]).rglob("*.so")
            damage(name, path)
        else:
            assert path.read_bytes() == whole.read_bytes()
            assert path.lstat().st_mode & 0o777 == 0o600
"""
    whole, other, log = tmp_path / "whole", tmp_path / "other", tmp_path / "log"
    subprocess.run([*cpu.compiler(), *sources.FLAGS, "-O0", str(sources.SOURCES[0]), "-o", str(whole)], check=True)
    subprocess.run([*cpu.compiler(), "-shared", "-xc", "/dev/null", "-o", str(other)], check=True)
    copy = script(tmp_path / "cc", f'printf . >> {log}\nfor last; do :; done\ncp {whole} "$last"')
    arguments = [str(whole), str(other), str(tmp_path), str(log)]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], env=os.environ | {"CC": copy}, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{done.returncode} after {done.stdout.splitlines()[-1:]}: {done.stderr}"


def test_only_a_private_folder_is_used(monkeypatch, cache):
    monkeypatch.setenv("CC", "false")
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    assert "failed" in str(cpu.library())
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    cpu.library.cache_clear()
    assert f"{cache} belongs to another user" in str(cpu.library())


@pytest.mark.parametrize("home", [None, "", "relative"])
@pytest.mark.parametrize("xdg", [None, "", "relative"])
def test_the_cache_is_never_where_the_program_was_started(monkeypatch, cache, tmp_path, home, xdg):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CC", "false")
    for name, value in (("HOME", home), ("XDG_CACHE_HOME", xdg)):
        monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)
    monkeypatch.setattr(pwd, "getpwuid", lambda _: SimpleNamespace(pw_dir=str(tmp_path / "real")))
    assert "failed" in str(cpu.library())
    assert [path.relative_to(tmp_path) for path in tmp_path.rglob("bitempered")] == [Path("real/.cache/bitempered")]

    def nobody(_):
        raise KeyError

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    cpu.library.cache_clear()
    assert "there is no home folder" in str(cpu.library())


@pytest.mark.slow
def test_two_processes_make_it_at_once(cache):
    program = """
import torch
from bitempered import kernels
from bitempered.torch import bi_tempered_logistic_loss
print("ready", flush=True)
input()
with kernels.use("cpu"):
    print(bi_tempered_logistic_loss(torch.eye(3), torch.arange(3), 0.8, 1.2).item())
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([sys.executable, "-c", program], **pipes) for _ in range(2)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    results = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    with kernels.use("core"):
        want = bi_tempered_logistic_loss(torch.eye(3), torch.arange(3), 0.8, 1.2).item()
    assert [float(result) for result in results] == [pytest.approx(want, rel=1e-6)] * 2
    assert [path.suffix for path in cache.iterdir()] == [".so"]


def test_without_vector_instructions(monkeypatch, cache):
    monkeypatch.setattr(sources, "VECTORS", {})
    for classes, std in ((10, 10.0), (1000, 3.0)):
        logits, target = make(13, classes, std)
        for t1, t2 in FEW_PAIRS:
            options = {"label_smoothing": 0.1, "reduction": "none"}
            assert_agree(
                run(logits, target, t1, t2, **options), exact(logits, target, t1, t2, **options), cancelled=3e-7
            )
    logits, target = make(20000, 2)  # some at the edge of the support, where a product must not be rounded
    want = exact(logits, target, 0.0, 0.0, reduction="none")
    assert_agree(run(logits, target, 0.0, 0.0, reduction="none"), want)
