"""What the C kernels are compiled from, and how. Building a wheel reads this without PyTorch."""

import hashlib
from pathlib import Path

__all__ = ["FLAGS", "SHIPPED", "SOURCES", "VECTORS", "shipped_name"]

SOURCES = sorted((Path(__file__).parent / "c").iterdir(), key=lambda path: (path.suffix != ".c", path.name))
FLAGS = [
    *("-O2", "-std=gnu11", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC"),
    *("-fwrapv", "-fno-strict-aliasing"),  # integers are bits of floats, blocks are both vectors and numbers
]
# By the instruction set that torch found: a home folder may be shared with a machine that has less.
VECTORS = {
    "AVX2": ["-mavx2", "-mfma"],
    "AVX512": ["-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"],
}
SHIPPED = Path(__file__).parent / "shipped"  # in a wheel for Linux on x86-64: a library for each instruction set


def shipped_name(capability: str) -> str:
    """Return the file name of the library that a wheel carries for an instruction set, as torch names it.

    It includes the hash of source and flags, so that a library of other sources is not found.

    >>> shipped_name("AVX2").startswith("cpu-avx2-")
    True
    """
    source = b"".join(path.read_bytes() for path in SOURCES)
    flags = " ".join([*FLAGS, *VECTORS.get(capability, [])])
    return f"cpu-{capability.lower()}-{hashlib.sha256(source + flags.encode()).hexdigest()[:16]}.so"
