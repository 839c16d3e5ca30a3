"""The C kernels, the folder c, as a library: the one that came with the wheel, or one compiled at first use.

Why C: a version in Numba was slower, above all for few classes, at every start and in every call. Numba would also
bring a second thread pool, and the flag that lets LLVM vectorise sums also lets it remove the rounding step of exp2.
torch.compile (`bitempered bench`) recompiles for new shapes and options, and cannot stop when a row has converged.
The wheel for Linux on x86-64 carries a library for each instruction set; elsewhere a C compiler makes one. Without
either, core computes the loss, and the logger "bitempered" warns why. BITEMPERED_CPU_KERNEL=0 in the environment turns
the kernel off.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import signal
import stat
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

import torch

from bitempered.kernels import sources

FUNCTIONS = ("bitempered_loss", "bitempered_binary", "bitempered_softmax")
_TIME_LIMIT = 120  # seconds; a compiler needs 2 to 10


class Unavailable(Exception):
    """The reason why the library cannot be built here."""


def compiler() -> list[str]:
    return shlex.split(os.environ.get("CC", "")) or ["cc"]


@functools.cache
def library() -> ctypes.CDLL | Unavailable:
    """Load the C kernels: shipped, or built once per source, compiler and processor and kept in the cache folder."""
    switch = os.environ.get("BITEMPERED_CPU_KERNEL") or "1"
    if switch != "1":
        return Unavailable(f"BITEMPERED_CPU_KERNEL={switch} turns it off")
    try:
        return _shipped() or _find_or_make()
    except (Unavailable, OSError) as error:  # OSError: a folder that is read-only, full or must not execute
        logging.getLogger("bitempered").warning(
            "the C kernel is not available and plain PyTorch, which is slower, computes the loss: %s"
            " (BITEMPERED_CPU_KERNEL=0 chooses this without a warning)",
            error,
        )
        return error if isinstance(error, Unavailable) else Unavailable(str(error))


def _shipped() -> ctypes.CDLL | None:
    """Return the library for this processor that came with the package, if there is one and it can be loaded."""
    path = sources.SHIPPED / sources.shipped_name(torch.backends.cpu.get_cpu_capability())
    if not path.exists():
        return None
    try:
        return _load(path)
    except (OSError, AttributeError) as error:  # as when a package is copied to another kind of machine
        logging.getLogger("bitempered").info("the C kernel that was shipped cannot be loaded: %s", error)
        return None


def is_shipped(loaded: ctypes.CDLL) -> bool:
    """Whether a library came with the package, so that no compiler of this machine has made it."""
    return Path(loaded._name).parent == sources.SHIPPED


def _find_or_make() -> ctypes.CDLL:
    vectors = sources.VECTORS.get(torch.backends.cpu.get_cpu_capability(), [])
    try:
        command = [*compiler(), *sources.FLAGS, *vectors, str(sources.SOURCES[0])]
    except ValueError as error:
        raise Unavailable(f"CC must be a command line, got {os.environ['CC']!r}: {error}") from None
    source = b"".join(path.read_bytes() for path in sources.SOURCES)
    key = hashlib.sha256(source + os.fsencode(f"{platform.machine()} {shlex.join(command)}")).hexdigest()[:16]
    folder = _private_folder()
    for path in sorted(folder.glob(f"cpu-{key}-*.so")):
        try:
            if _is_private(path) and path.name == _name(key, path):
                return _load(path)
        except (OSError, AttributeError):  # gone, or made on another machine that shares the folder
            continue
    logging.getLogger("bitempered").info("compiling the C kernel, once, into %s: %s", folder, shlex.join(command))
    with tempfile.TemporaryDirectory(dir=folder) as made:
        path = Path(made) / "cpu.so"
        _compile([*command, "-o", str(path)], Path(made) / "output")
        try:
            loaded = _load(path)
        except AttributeError as error:
            raise Unavailable(f"{shlex.join(command)} did not make a library with the loss in it: {error}") from None
        path.chmod(0o600)
        os.replace(path, folder / _name(key, path))  # atomically: another process may be doing the same
    return loaded


def _name(key: str, path: Path) -> str:
    """Return the file name that the library at `path` must have, which includes the hash of its content."""
    return f"cpu-{key}-{hashlib.sha256(path.read_bytes()).hexdigest()}.so"


def _is_private(path: Path) -> bool:
    """Whether this is a file that belongs to this user and that others cannot write to."""
    found = path.lstat()
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


def _private_folder() -> Path:
    """Return the cache folder. Only this user may own it and write to it, since we load and run its contents."""
    if not hasattr(os, "getuid"):
        raise Unavailable("it needs a POSIX system")
    import pwd

    homes = [Path(os.environ.get("XDG_CACHE_HOME", "")), Path(os.environ.get("HOME", "")) / ".cache"]
    with suppress(KeyError):  # a user without an entry, as in containers
        homes.append(Path(pwd.getpwuid(os.getuid()).pw_dir) / ".cache")
    # A relative path would depend on where the program is started, and might name someone else's folder.
    cache = next((home for home in homes if home.is_absolute()), None)
    if cache is None:
        raise Unavailable("there is no home folder to keep it in: set XDG_CACHE_HOME to an absolute path")
    folder = cache / "bitempered"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.getuid():
        raise Unavailable(f"{folder} belongs to another user: set XDG_CACHE_HOME to a folder of your own")
    if found.st_mode & 0o022:
        folder.chmod(0o700)
    return folder


def _compile(command: list[str], output: Path) -> None:
    """Run the compiler. Its output goes to a file: a pipe would wait for every process that the compiler started."""
    with output.open("wb") as file:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            raise Unavailable(f"the C compiler cannot be started, install one or set CC: {error}") from None
        try:
            status = process.wait(_TIME_LIMIT)
        except BaseException as error:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                raise Unavailable(f"{shlex.join(command)} did not finish in {_TIME_LIMIT} s") from None
            raise
    if status:
        raise Unavailable(f"{shlex.join(command)} failed: {output.read_bytes().decode(errors='replace').strip()}")


def _load(path: Path) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(path))
    for name in FUNCTIONS:
        getattr(loaded, name).argtypes = [ctypes.c_void_p]  # the structure of its arguments
    return loaded


@functools.cache
def parallel() -> int | None:
    """Return the OpenMP entry point that torch is linked to: a second thread pool would compete with torch's.

    If there is none, as on macOS, return None, and one thread computes.
    """
    try:
        torch_library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return ctypes.cast(torch_library.GOMP_parallel, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None
