"""The tests that rounding could move, under each instruction set that this CPU has: `make test-portable`.

Arguments go to pytest in place of those tests.
"""

import os
import platform
import subprocess
import sys
import time

import numpy as np
import torch

SENSITIVE = [
    f"tests/test_{name}.py"
    for name in (
        "solver", "sklearn", "torch_oracle", "cpu_kernel", "cpu_kernel_faces", "cpu_kernel_binary",
        "cpu_kernel_softmax", "cpu_kernel_oracle", "cpu_kernel_ties", "cpu_kernel_library", "core", "extreme_logits",
        "numpy", "boosting",
    )
]  # fmt: skip


def settings():
    """What each instruction set is to the libraries, whose sums and functions differ by rounding from set to set."""
    found = np.show_config(mode="dicts")["SIMD Extensions"].get("found", [])
    above_avx2 = [name for name in found if "AVX512" in name or name == "X86_V4"]
    return {
        "DEFAULT": {
            "ATEN_CPU_CAPABILITY": "default",
            "NPY_DISABLE_CPU_FEATURES": " ".join(found),
            "OPENBLAS_CORETYPE": "Nehalem",
            "ONEDNN_MAX_CPU_ISA": "SSE41",
            "XLA_FLAGS": "--xla_cpu_max_isa=AVX2",  # below, XLA cannot compile float16
            "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA,-AVX512F",
            "TF_ENABLE_ONEDNN_OPTS": "0",
            "OMP_NUM_THREADS": "1",
        },
        "AVX2": {
            "ATEN_CPU_CAPABILITY": "avx2",
            "NPY_DISABLE_CPU_FEATURES": " ".join(above_avx2),
            "OPENBLAS_CORETYPE": "Haswell",
            "ONEDNN_MAX_CPU_ISA": "AVX2",
            "XLA_FLAGS": "--xla_cpu_max_isa=AVX2",
            "OMP_NUM_THREADS": "1",
        },
        "AVX512": {
            "ATEN_CPU_CAPABILITY": "avx512",
            "OPENBLAS_CORETYPE": "SkylakeX",
            "OMP_NUM_THREADS": "2",
            "OMP_WAIT_POLICY": "passive",  # the workers' threads share the cores
        },
    }


def main(arguments):
    if platform.machine() not in ("x86_64", "AMD64"):
        print(f"{platform.machine()} has one instruction set, that of `make test`: nothing to do")
        return 0
    best = torch.backends.cpu.get_cpu_capability()
    names = list(settings())
    failed = []
    for name, variables in settings().items():
        if names.index(name) > names.index(best):
            print(f"{name}: skipped, this CPU has {best}")
            continue
        print(f"{name}: {' '.join(f'{key}={value!r}' for key, value in variables.items())}", flush=True)
        start = time.monotonic()
        done = subprocess.run([sys.executable, "-m", "pytest", *arguments], env=os.environ | variables)
        print(
            f"{name}: {'passed' if done.returncode == 0 else 'FAILED'} in {time.monotonic() - start:.0f} s", flush=True
        )
        failed += [name] * (done.returncode != 0)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["-n", "auto", *SENSITIVE]))
