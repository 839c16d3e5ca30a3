"""The modules of the kernels by their names."""

from typing import Any

from bitempered.kernels import cpu


def implementation(name: str) -> Any:
    """Return the module of these kernels. Triton is imported with the first use of its own."""
    if name == "cpu":
        return cpu
    from bitempered.kernels import triton

    return triton
