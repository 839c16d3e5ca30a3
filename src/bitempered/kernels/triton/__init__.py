"""The loss and the tempered softmax on a GPU: Triton kernels that restate `bitempered.core` in float32.

From the bottom up: `mathematics` (one number), `tiles` (rows and columns of numbers), `solver` (a row), the kernels of
`label_loss`, `soft_loss`, `binary`, `tempered_softmax` and `scaling`, `launch`, which launches them, and the `losses`
that `bitempered.torch` and `operators` call. tests/test_triton*.py run all of it in Triton's interpreter.
"""

from bitempered.kernels.triton.binary import binary_loss, sigmoid
from bitempered.kernels.triton.losses import (
    chunk_loss,
    class_gradients_,
    gradient,
    gradient_from,
    loss,
    loss_and_state,
    new_state,
)
from bitempered.kernels.triton.scaling import scale_
from bitempered.kernels.triton.tempered_softmax import softmax, softmax_backward

__all__ = [
    "binary_loss",
    "chunk_loss",
    "class_gradients_",
    "gradient",
    "gradient_from",
    "loss",
    "loss_and_state",
    "new_state",
    "scale_",
    "sigmoid",
    "softmax",
    "softmax_backward",
]
