"""What must come before every test module, and the fixtures that test modules share."""

import atexit
import importlib
import importlib.util
import os
import shutil
import tempfile
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, settings

if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores: threads that wait for each other double the time
    os.environ.setdefault("OMP_NUM_THREADS", "1")
if "ATEN_CPU_CAPABILITY" in os.environ:  # inductor's cache takes code for one instruction set as code for another
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)
os.environ["TRITON_INTERPRET"] = "1"  # read where a kernel is defined, Triton's own among them
os.environ["KERAS_BACKEND"] = "torch"  # read where Keras is imported, which other packages do too
with suppress(ImportError):  # Triton exists only for Linux
    import triton  # noqa: F401  (it ends the process if TensorFlow was imported before it)

# So that failing asserts in shared modules show their values.
pytest.register_assert_rewrite("cpu_kernel_cases", "experiment_cases", "imagenet_cases")

# The same examples on every machine, however slow.
settings.register_profile("same", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("same")


@pytest.fixture
def by_triton(monkeypatch):
    """The public functions, except that the Triton kernels compute, on whatever device."""
    import torch

    from bitempered import kernels

    def chosen(*arguments, temperatures=()):
        if any(isinstance(t, torch.Tensor) and t.requires_grad for t in temperatures):
            return "core"
        return "triton" if torch.compiler.is_compiling() or kernels._forced.get() is None else "core"

    monkeypatch.setattr(kernels, "choose", chosen)
    monkeypatch.setattr(kernels, "choose_binary", chosen)


@pytest.fixture(params=[pytest.param(1, marks=pytest.mark.slow), 4])  # a program for each row takes twice as long
def chunks(monkeypatch, request):
    """Rows in chunks of 64 classes, as if they were long."""
    from bitempered.kernels.triton import tiles

    tile = {"ROWS": request.param, "COLUMNS": 64, "SINGLE": False, "num_warps": 4}
    monkeypatch.setattr(tiles, "choose_tile", lambda *given: {**tile, "VECTOR": given[-1]})


@pytest.fixture(scope="module")
def _torchvision():
    """timm, transformers and Lightning's metrics import torchvision where they find it, for nothing used here.

    PyPI's build beside a CPU build of torch lacks its compiled operators, and stops where it describes two of them.
    """
    import torch

    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor boxes, Tensor scores, float threshold) -> Tensor")
        importlib.import_module("torchvision")
