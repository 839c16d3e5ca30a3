"""Which implementation computes a loss: the only place that decides.

"core" serves everything. "triton" serves class indices without smoothing, on a GPU, in two dimensions, first
derivatives; whatever else is asked of it later (a second derivative, jvp, vmap) goes through core.
"""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

__all__ = ["choose", "use"]

NAMES = ("core", "triton")
_forced: ContextVar[str | None] = ContextVar("bitempered_kernel", default=None)


@contextmanager
def use(name: str) -> Iterator[None]:
    """Force an implementation inside a `with` block; a loss that it cannot compute raises there.

    >>> with use("core"):
    ...     pass
    """
    if name not in NAMES:
        raise ValueError(f"there is no kernel {name!r}; there is: {', '.join(NAMES)}")
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


def choose(logits: Tensor, target: Tensor, axis: int | None, label_smoothing: float) -> str:
    """The name of the implementation for these arguments of a loss."""
    if torch.compiler.is_compiling():
        return "core"  # which the compiler fuses
    forced = _forced.get()
    if forced == "core" or (forced is None and logits.device.type != "cuda"):
        return "core"
    refusal = _triton_refuses(logits, target, axis, label_smoothing)
    if refusal and forced == "triton":
        raise RuntimeError(f"the triton kernel cannot compute this loss: {refusal}")
    return "core" if refusal else "triton"


def _triton_refuses(logits: Tensor, target: Tensor, axis: int | None, label_smoothing: float) -> str | None:
    """Why the Triton kernel cannot compute this loss, or None."""
    if logits.device.type != "cuda":
        return f"it needs logits on a CUDA device, got {logits.device}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if torch._C._are_functorch_transforms_active():
        return "it does not run under torch.func transforms"
    if axis is None or target.is_floating_point() or label_smoothing:
        return "it takes class indices without label smoothing"
    if logits.dim() != 2 or logits.stride(1) != 1:
        return f"it takes logits (N, C) with contiguous rows, got shape {tuple(logits.shape)}"
    if logits.dtype == torch.float64:
        return "it computes in float32, got float64 logits"
    from bitempered.kernels.triton import MAX_CLASSES

    if not 0 < logits.shape[1] <= MAX_CLASSES:
        return f"it takes up to {MAX_CLASSES} classes, got {logits.shape[1]}"
    return None
