"""The loss of class indices in float32 on a CPU: cpu.c, which a C compiler makes into a library at first use.

C, compiled at first use, was chosen by measurement: nanoseconds per logit on one core of a busy machine, loss and
gradient at (0.8, 1.2), and what comes on top.

    classes                                    10   100   1,000   16,000   first use   every start   a call
    cpu.c, gcc 12 and ctypes                   17     7       4        4         2 s             -     2 us
    a plainer version in Numba 0.68, by row    55    11       5        5    5 to 9 s           1 s     6 us

Numba's thread pools come on top of torch's, and the flag that lets LLVM vectorise sums also let it simplify away the
rounding that exp2 is made of. torch.compile (`bitempered bench`) compiles anew for shapes and options, and cannot stop
where a row has converged. The wheel stays pure Python; without a compiler core serves.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

_SOURCES = [Path(__file__).with_name(name) for name in ("cpu.c", "vectors.h")]
_FLAGS = [
    *("-O3", "-std=gnu11", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC"),
    *("-fwrapv", "-fno-strict-aliasing"),  # integers are bits of floats, blocks are both vectors and numbers
]
# What torch found the processor to have, so that a library in a shared home folder never meets a lesser one.
_VECTORS = {"AVX2": ["-mavx2", "-mfma"], "AVX512": ["-mavx2", "-mfma"]}

_REDUCTIONS = {"none": 0, "sum": 1, "mean": 2}


class Unavailable(Exception):
    """The library cannot be made here, and why."""


def compiler() -> list[str]:
    return shlex.split(os.environ.get("CC", "cc"))


@functools.cache
def library() -> ctypes.CDLL | Unavailable:
    """The library of cpu.c, made once per source, compiler and processor, and kept in the user's cache folder."""
    vectors = _VECTORS.get(torch.backends.cpu.get_cpu_capability(), [])
    command = [*compiler(), *_FLAGS, *vectors, str(_SOURCES[0])]
    try:
        source = b"".join(path.read_bytes() for path in _SOURCES)
        key = hashlib.sha256(source + f"{platform.machine()} {command}".encode()).hexdigest()[:16]
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bitempered"
        path = folder / f"cpu-{key}.so"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as made:  # renamed when whole: others may be at it too
                subprocess.run([*command, "-o", f"{made}/cpu.so"], check=True, capture_output=True, text=True)
                os.replace(f"{made}/cpu.so", path)
        loaded = ctypes.CDLL(str(path))
    except subprocess.CalledProcessError as error:
        return Unavailable(f"{shlex.join(command)} failed: {error.stderr.strip()}")
    except (OSError, RuntimeError) as error:  # no compiler, no home, a folder that is read-only or must not execute
        return Unavailable(f"{shlex.join(command)}: {error}")
    pointer, integer, size, real = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_double
    loaded.bitempered_loss.argtypes = [
        *(pointer, size, pointer, pointer, size, size),  # logits, stride, target, weight, rows, classes
        *(real, real, real, size, integer),  # t1, t2, label_smoothing, ignore_index, reduction
        *(pointer, pointer),  # the loss, reduced or not, and its gradient
        *(pointer, integer),  # parallel, threads
    ]
    return loaded


@functools.cache
def _parallel() -> int | None:
    """The OpenMP entry point that torch itself is linked to: a second pool of threads would fight with its own.

    None, and one thread, where there is none, as on macOS.
    """
    try:
        torch_library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return ctypes.cast(torch_library.GOMP_parallel, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None


def loss(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    options: tuple[float, float, int, float, int, str],
    dtype: torch.dtype,
) -> Tensor:
    """The loss of logits (N, C) with class indices (N,).

    The options are t1, t2, the class axis (1), label_smoothing, ignore_index and reduction. IndexError where an index
    is neither a class nor ignore_index.
    """
    return _run(logits, target, weight, options, None).to(dtype)


def loss_and_gradient(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    options: tuple[float, float, int, float, int, str],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    made = torch.empty_like(logits, memory_format=torch.contiguous_format)
    return _run(logits, target, weight, options, made).to(dtype), made


def gradient(
    g: Tensor,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    options: tuple[float, float, int, float, int, str],
) -> Tensor:
    """The gradient of sum(g * loss) in the logits."""
    return scale_(loss_and_gradient(logits, target, weight, options, torch.float32)[1], g, 1)


def scale_(gradient: Tensor, g: Tensor, axis: int) -> Tensor:
    """Multiply the gradient in place by g, a scalar or one number per row."""
    if g.dim() or g.item() != 1:
        gradient *= g.unsqueeze(axis) if g.dim() else g
    return gradient


def _run(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    options: tuple[float, float, int, float, int, str],
    gradient: Tensor | None,
) -> Tensor:
    t1, t2, _, label_smoothing, ignore_index, reduction = options
    made = library()
    if isinstance(made, Unavailable):
        raise made
    if not -(2**63) <= ignore_index < 2**63:
        raise RuntimeError(f"ignore_index must fit into 64 bits, as class indices do, got {ignore_index}")
    n, classes = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    target = target.contiguous()
    weight = None if weight is None else weight.to(torch.float32).contiguous()
    out = logits.new_empty(n if reduction == "none" else ())
    status = made.bitempered_loss(
        *(logits.data_ptr(), logits.stride(0), target.data_ptr(), _address(weight), n, classes),
        *(t1, t2, label_smoothing, ignore_index, _REDUCTIONS[reduction], out.data_ptr(), _address(gradient)),
        *(_parallel(), torch.get_num_threads()),
    )
    if status == 1:
        raise IndexError
    if status == 2:
        raise MemoryError(f"no memory for a row of {classes} classes in each of {torch.get_num_threads()} threads")
    return out


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
