"""The private functions of torch that tell whether a kernel may read a tensor's memory.

Other versions of torch may lack them. If one of `NEEDED` is missing, no kernel runs and core computes everything.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

__all__ = [
    "NEEDED",
    "constant_when_compiled",
    "in_torch_func",
    "is_constant",
    "is_wrapped",
    "jvp_levels",
    "missing",
    "single_level_apply",
    "transformed",
    "why_not_plain",
    "without_missing",
]

NEEDED = (
    "_C._are_functorch_transforms_active",
    "_C._functorch.is_functorch_wrapped_tensor",
    "_C._len_torch_dispatch_stack",
    "_C._is_tracing",
    "autograd.forward_ad._current_level",
)


def _find(name: str) -> Any:
    """Return a private part of torch, or None if this version lacks it."""
    found: Any = torch
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


_transforms_active, _is_wrapped, _dispatch_modes, _is_tracing, _ = map(_find, NEEDED)
_interpreters = _find("_C._functorch.get_interpreter_stack")
_jvp = _find("_C._functorch.TransformType.Jvp")
missing = tuple(name for name in NEEDED if _find(name) is None)


def without_missing() -> str:
    """Say what this version of torch lacks."""
    return f"torch {torch.__version__} has no {missing[0]}, without which kernels cannot tell where they may run"


def why_not_plain(logits: Tensor, target: Tensor | None) -> str | None:
    """Why a kernel must not read these tensors: their memory does not hold their values, or operations are recorded."""
    if missing:
        return without_missing()
    if _transforms_active() or forward_ad._current_level >= 0:
        return "it does not run under torch.func transforms or forward-mode differentiation"
    if _is_wrapped(logits) or (target is not None and _is_wrapped(target)):
        return "it takes plain tensors, got one that a torch.func transform has wrapped"
    if _dispatch_modes() or _is_tracing():
        return "it does not run where operations are traced"
    return None


def constant_when_compiled(function: Any) -> Any:
    """Have torch.compile call this function and take its result as a constant.

    torch.compiler.assume_constant_result does the same, but imports what compiling needs, Triton included.
    """
    function._dynamo_marked_constant = True
    return function


def in_torch_func() -> bool:
    """Whether a torch.func transform is active; False if this torch does not tell."""
    return not missing and _transforms_active()


def transformed() -> bool:
    """Whether torch.func or forward mode is active, or this torch does not tell. torch.compile can trace this."""
    return bool(missing) or _transforms_active() or forward_ad._current_level >= 0


def is_wrapped(x: Any) -> bool:
    """Whether x is a tensor that a torch.func transform has wrapped, or this torch does not tell."""
    return isinstance(x, Tensor) and (bool(missing) or _is_wrapped(x))


def jvp_levels() -> int | None:
    """Return the number of active forward-mode transforms of torch.func; None if this torch does not tell."""
    if _interpreters is None or _jvp is None:
        return None
    return sum(level.key() == _jvp for level in _interpreters() or [])


def is_constant(number: float) -> bool:
    """Whether torch.compile takes this number as a constant, rather than as an input that may change between calls.

    If this version of torch does not tell, every number is a constant: a different one compiles again.
    """
    from torch.fx.experimental import symbolic_shapes  # imports SymPy, as compiling does

    known = getattr(symbolic_shapes, "statically_known_true", None)
    return known is None or known(number >= 1) or known(number < 1)


def single_level_apply(function: Any) -> Any:
    """Return `function.apply` without its support for torch.func transforms, if this torch keeps the two apart."""
    return getattr(super(torch.autograd.Function, function), "apply", function.apply)
