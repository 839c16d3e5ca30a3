"""What must come before every test module."""

import atexit
import os
import shutil
import tempfile
from contextlib import suppress

from hypothesis import HealthCheck, settings

if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores: threads that wait for each other double the time
    os.environ.setdefault("OMP_NUM_THREADS", "1")
if "ATEN_CPU_CAPABILITY" in os.environ:  # inductor's cache takes code for one instruction set as code for another
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)
os.environ["TRITON_INTERPRET"] = "1"  # read where a kernel is defined, Triton's own among them
os.environ["KERAS_BACKEND"] = "torch"  # read where Keras is imported, which other packages do too
with suppress(ImportError):  # there is none but for Linux
    import triton  # noqa: F401  (it ends the process if TensorFlow was imported before it)

# The same examples on every machine, however slow.
settings.register_profile("same", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("same")
