"""Fast implementations for `bitempered.torch`, and `choose`, the only place that picks one.

- "core" computes everything.
- "triton" computes losses over classes, binary losses, the tempered softmax and sigmoid on a GPU, in half precision and
  float32.
- "cpu" computes losses over classes, binary losses, the tempered softmax and sigmoid on a CPU. The wheel for Linux on
  x86-64 carries it; elsewhere a C compiler makes it. BITEMPERED_CPU_KERNEL=0 in the environment turns it off.

The kernels compute first derivatives; core computes second derivatives, jvp and vmap. `chosen` says which one computes
a loss. Where a device has no kernel, core computes, and the logger "bitempered" warns once and says why.
"""

import functools
import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from bitempered.kernels import cpu, hooks

__all__ = ["choose", "chosen", "require_core", "use"]

NAMES = ("core", "triton", "cpu")
_PLAIN = (Tensor, torch.nn.Parameter)
_HAS_TRITON = importlib.util.find_spec("triton") is not None
_WHAT = {  # by whether it is binary, and has no target
    (False, False): "loss",
    (False, True): "softmax",
    (True, False): "binary loss",
    (True, True): "sigmoid",
}
_forced: ContextVar[str | None] = ContextVar("bitempered_kernel", default=None)


@contextmanager
def use(name: str) -> Iterator[None]:
    """Force an implementation inside a `with` block. What it cannot compute raises RuntimeError.

    torch.compile ignores this: a compiled loss uses the kernel of its device, if there is one, and core otherwise.

    >>> with use("core"):
    ...     pass
    """
    if name not in NAMES:
        raise ValueError(f"unknown kernel {name!r}: choose from {', '.join(NAMES)}")
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


def chosen(logits: Tensor, target: Tensor | None = None, *, binary: bool = False) -> str:
    """Return the name of the implementation that would compute this loss: "core", "triton" or "cpu".

    Args:
        logits, target: those of `bi_tempered_logistic_loss`; without a target, those of `tempered_softmax`.
        binary: ask for `bi_tempered_binary_logistic_loss`, or without a target for `tempered_sigmoid`.

    This assumes that temperatures are numbers. Tensors that need a gradient are left to core, as are, on the CPU, all
    tensors of more than one number. What runs inside torch.compile can differ.

    >>> with use("core"):
    ...     chosen(torch.zeros(2, 3), torch.tensor([0, 2]))
    'core'
    """
    return choose(logits, target, binary=binary)


def choose(logits: Tensor, target: Tensor | None, *, temperatures: tuple[Any, ...] = (), binary: bool = False) -> str:
    """Return the name of the implementation for a loss or, without a target, for a tempered softmax or sigmoid."""
    if torch.compiler.is_compiling():
        return _compiled(logits, target, temperatures, binary)
    forced = _forced.get()
    name = forced or ("triton" if logits.is_cuda else "cpu" if logits.is_cpu else "core")
    if name == "core":
        if forced is None:
            _warn_of_device(logits.device.type)
        return name
    refusal = (_triton_refuses if name == "triton" else _cpu_refuses)(logits, target, temperatures, binary)
    if refusal and forced:
        raise _cannot(name, _WHAT[binary, target is None], refusal)
    return "core" if refusal else name


def require_core(what: str, reason: str) -> None:
    """Raise RuntimeError if a kernel is forced that for this `reason` cannot compute `what`: only core can."""
    forced = None if torch.compiler.is_compiling() else _forced.get()
    if forced not in (None, "core"):
        raise _cannot(forced, what, reason)


def _cannot(name: str, what: str, reason: str) -> RuntimeError:
    return RuntimeError(f"the {name} kernel cannot compute this {what}: {reason}")


def _triton_refuses(logits: Tensor, target: Tensor | None, temperatures: tuple[Any, ...], binary: bool) -> str | None:
    """Why the Triton kernels cannot compute this, or None."""
    if not logits.is_cuda:
        return f"it needs logits on a CUDA device, got {logits.device}"
    return _triton_cannot(logits, target, temperatures, binary) or _not_plain(logits, target)


def _triton_cannot(logits: Tensor, target: Tensor | None, temperatures: tuple[Any, ...], binary: bool) -> str | None:
    if not _has_triton():
        return "triton is not installed"
    if logits.dtype == torch.float64:
        return "it computes in float32, got float64 logits"
    if target is not None and (target.requires_grad or target.dtype == torch.float64):
        return "it takes targets of at most float32 that need no gradient"
    if any(isinstance(t, Tensor) and t.requires_grad for t in temperatures):
        return "it takes temperatures that need no gradient"
    return None


def _not_plain(logits: Tensor, target: Tensor | None) -> str | None:
    """Why a kernel must not read these tensors' memory, or None."""
    if type(logits) not in _PLAIN or (target is not None and type(target) not in _PLAIN):
        return f"it takes plain tensors, got {type(logits).__name__} and {type(target).__name__}"
    if logits.is_neg() or (target is not None and target.is_neg()):
        return "it takes tensors that are stored with their own sign"
    if hooks.missing:
        _warn(hooks.without_missing())
    return hooks.why_not_plain(logits, target)


@functools.cache
def _warn(reason: str) -> None:
    """Say once why there is no kernel where one would be expected."""
    logging.getLogger("bitempered").warning("plain PyTorch, which is slower, computes the loss: %s", reason)


def _warn_of_device(kind: str) -> None:
    if kind != "meta":  # where nothing is computed
        _warn(f"there is no kernel for {kind} devices")


@hooks.constant_when_compiled
def _has_triton() -> bool:
    if not _HAS_TRITON:
        _warn("the kernel for CUDA devices needs Triton: pip install triton")
    return _HAS_TRITON


def _compiled(logits: Tensor, target: Tensor | None, temperatures: tuple[Any, ...], binary: bool) -> str:
    """The implementation inside torch.compile, which traces this.

    The compiler can fuse core. A loss uses its kernel, as an opaque operator, but not in torch.export: exported
    programs run without this package. Unless strict, export traces without Dynamo.
    """
    if target is None or not torch.compiler.is_dynamo_compiling() or _is_exporting():
        return "core"
    if hooks.transformed():
        return "core"
    if logits.is_cuda:
        return "triton" if _triton_cannot(logits, target, temperatures, binary) is None else "core"
    if logits.device.type != "cpu" or _cpu_cannot(logits, target, temperatures, binary) is not None:
        return "core"
    return "cpu" if _cpu_is_available() else "core"


@hooks.constant_when_compiled  # traced, torch 2.11 answers True wherever it compiles
def _is_exporting() -> bool:
    exports = getattr(torch.compiler, "is_exporting", None)
    return exports is not None and exports()


@hooks.constant_when_compiled
def _cpu_is_available() -> bool:
    return not isinstance(cpu.library(), cpu.Unavailable)


def _cpu_refuses(logits: Tensor, target: Tensor | None, temperatures: tuple[Any, ...], binary: bool) -> str | None:
    """Why the CPU kernel cannot compute this loss, softmax or sigmoid, or None."""
    if not logits.is_cpu:
        return f"it needs logits on the CPU, got {logits.device}"
    refusal = _cpu_cannot(logits, target, temperatures, binary) or _not_plain(logits, target)
    if refusal:
        return refusal
    library = cpu.library()
    return str(library) if isinstance(library, cpu.Unavailable) else None


def _cpu_cannot(logits: Tensor, target: Tensor | None, temperatures: tuple[Any, ...], binary: bool) -> str | None:
    for t in temperatures:
        if isinstance(t, Tensor):
            return "it takes temperatures that are numbers, got a tensor"
    if target is not None and target.requires_grad:
        return "it takes targets that need no gradient"
    for x in (logits, target):
        if x is not None and x.dtype not in cpu.DTYPES and x.is_floating_point():
            return f"it takes float16, bfloat16, float32 and float64, got {x.dtype}"
    if binary and logits.dim() > cpu.DIMENSIONS:
        return f"it takes at most {cpu.DIMENSIONS} dimensions, got shape {tuple(logits.shape)}"
    if not binary and logits.numel() >= 2**31 and max(logits.shape) >= 2**31:
        return f"it takes at most 2^31 - 1 classes, got shape {tuple(logits.shape)}"
    return None
