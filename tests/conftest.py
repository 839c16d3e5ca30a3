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
# Triton exists only for Linux, and ends the process if TensorFlow was imported before it. Its names may change.
with suppress(ImportError, AttributeError):
    from triton.runtime import interpreter

    _patch_lang, _tl = interpreter._patch_lang, interpreter.tl

    def _patch_once(function):
        """Give Triton's language the interpreter's meaning, unless the kernel that calls this function has done so.

        Triton does it at every call of a function in a kernel, which takes more than half of the time.
        """
        languages = [module for module in function.__globals__.values() if module is _tl or module is _tl.core]
        if not languages or any(_tl.core.is_builtin(language.load) for language in languages):
            return _patch_lang(function)
        return None

    interpreter._patch_lang = _patch_once

# So that failing asserts in shared modules show their values.
pytest.register_assert_rewrite("cpu_kernel_cases", "experiment_cases", "imagenet_cases")

# The same examples on every machine, however slow.
settings.register_profile("same", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("same")


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.get_closest_marker("first") is None)


@pytest.fixture
def by_triton(monkeypatch):
    """The public functions, except that the Triton kernels compute, on whatever device."""
    import torch

    from bitempered import kernels

    def chosen(*arguments, temperatures=(), binary=False):
        if any(isinstance(t, torch.Tensor) and t.requires_grad for t in temperatures):
            return "core"
        return "triton" if torch.compiler.is_compiling() or kernels._forced.get() is None else "core"

    monkeypatch.setattr(kernels, "choose", chosen)


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
