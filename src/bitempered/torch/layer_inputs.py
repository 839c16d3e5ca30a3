"""What the two ways to compute the loss of a linear layer share: their inputs, and the size of a chunk of rows."""

from typing import NamedTuple

from torch import Tensor

from bitempered.kernels.options import LossOptions
from bitempered.torch.sharded import Shards

Gradients = tuple[Tensor | None, ...]  # of the first five tensors of Inputs


class Inputs(NamedTuple):
    """The tensors that autograd saves: n rows of the hidden layer, and what belongs to them."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    t1: Tensor | None  # None: a number, which is in the options
    t2: Tensor | None
    target: Tensor


class LayerOptions(NamedTuple):
    loss: LossOptions
    class_weight: Tensor | None
    softcap: float | None
    shards: Shards | None = None  # the classes of each process


def rows_per_chunk(rows: int, classes: int, features: int) -> int:
    """The number of rows whose logits are about as large as the hidden layer; at least 256, for large products."""
    return max(256, rows * features // classes)
