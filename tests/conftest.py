"""What must come before every test module."""

import os
from contextlib import suppress

os.environ["TRITON_INTERPRET"] = "1"  # read where a kernel is defined, Triton's own among them
os.environ["KERAS_BACKEND"] = "torch"  # read where Keras is imported, which other packages do too
with suppress(ImportError):  # there is none but for Linux
    import triton  # noqa: F401  (it ends the process if TensorFlow was imported before it)
