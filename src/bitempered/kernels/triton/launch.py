"""Launching a kernel: the constants it is compiled for, and a shortcut for a launch like an earlier one."""

import functools
import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
from torch import Tensor

from bitempered.kernels.layout import repeats_one_number
from bitempered.kernels.memo import Memo
from bitempered.kernels.options import LossOptions
from bitempered.kernels.triton.mathematics import exp

_COMPILED = isinstance(exp, triton.JITFunction)  # and not interpreted
COMPILER_OPTIONS: dict[str, Any] = {"enable_fp_fusion": True} if _COMPILED else {}
# debug keeps device_assert in the kernel.
ASSERTING_OPTIONS = {**COMPILER_OPTIONS, "debug": True, "sanitize_overflow": False} if _COMPILED else {}
FAST_MATH = _COMPILED and torch.version.hip is None
# Triton inspects every argument of every call. From 3.3 on a compiled kernel's launcher takes the constants too.
DIRECT = FAST_MATH and tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 3)
_NEAR = 0.09  # of s: nearer to 0, 1 + s v would lose digits that the exponent 1 / s needs
_launches = Memo()
_ANY = {"KIND": 3, "SHIFT": -1, "FAST": FAST_MATH, "NEAR": True, "Q": 0, "R": 0, "E": 0, "SAME": False, "T1_ZERO": 2}


def temperature_constants(t1: Any, t2: Any, *names: str) -> dict[str, Any]:
    """Return the constants that the temperatures compile a kernel for, those of these names or all."""
    known = _ANY if isinstance(t1, Tensor) or isinstance(t2, Tensor) else _constants(t1, t2)
    return {name: known[name] for name in names} if names else known


@functools.lru_cache(4096)
def _constants(t1: float, t2: float) -> dict[str, Any]:
    """See `summands` and `named_sums`."""
    s = t2 - 1
    kind = (s > 0) - (s < 0) + (s > 1)
    shift = 0 if t1 == 1 else -2 if t1 > 1 else 1 if kind > 0 and math.isclose(1 - t1, s, rel_tol=1e-9) else -1
    known = {"KIND": kind, "SHIFT": shift, "FAST": FAST_MATH, "SAME": t1 == t2, "T1_ZERO": int(t1 == 1)}
    for q in range(1, 13) if s >= _NEAR else ():
        r, e = q / s, q * (2 - t1) / s
        if max(r, e) + q < 64 and all(math.isclose(n, round(n), rel_tol=1e-9) for n in (r, e)):
            return known | {"NEAR": False, "Q": q, "R": round(r), "E": round(e)}
    return known | {"NEAR": abs(s) < _NEAR, "Q": 0, "R": 0, "E": 0}


def temperature_arguments(options: LossOptions, classes: int, device: torch.device) -> tuple[Any, ...]:
    """Return the arguments of `tiles.row_temperatures`, except the rows."""
    t1, t2 = options.t1, options.t2
    if isinstance(t1, Tensor) or isinstance(t2, Tensor):
        log_classes = math.log(classes) if options.rescale else 0.0
        return 1.0, 1.0, 0.0, log_classes, 1.0, *_by_row(t1, device), *_by_row(t2, device)
    return t1, t2, t2 - 1, *options.scales(classes), None, 0, None, 0


def _by_row(t: Any, device: torch.device) -> tuple[Tensor, int]:
    """A temperature in float32, and the distance from one row's to the next."""
    if not isinstance(t, Tensor):
        t = torch.full((), t, dtype=torch.float32, device=device)
    return (t, 0) if repeats_one_number(t) else (t.contiguous(), 1)


def launch_kernel(kernel: Any, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any]) -> Any:
    """Run kernel[(programs,)](*arguments, **constants), by a shortcut if one like it has been launched before.

    Triton binds and inspects every argument of every call, which takes longer than a small kernel runs. Returns the
    shortcut: a function that launches the compiled kernel on arguments like these, and its last arguments; or None.
    """
    if not DIRECT:
        kernel[(programs,)](*arguments, **constants)
        return None
    # A compiled kernel may depend on the dtype and alignment of a pointer and the value of an integer, but on no float.
    kinds = [
        (x.dtype, x.data_ptr() % 16) if isinstance(x, Tensor) else None if isinstance(x, float) else (x,)
        for x in arguments
    ]
    key = (kernel, programs, torch.cuda.current_device(), *kinds, *constants.values())
    found = _launches.get(key)
    if found is not None:
        launch, rest = found
        launch(*arguments, *rest)
        return found
    launch = kernel[(programs,)](*arguments, **constants)[programs, 1, 1]
    rest = [constants[name] for name in kernel.arg_names[len(arguments) :]]
    return _launches.keep(key, (launch, rest))


def on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    if x.device.type != "cuda" or x.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)
