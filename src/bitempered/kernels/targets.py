"""What class indices mean to a loss: how much each of them counts."""


import torch
from torch import Tensor


def target_weights(target: Tensor, weight: Tensor | None, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """The weight of each target, 0 where it is ignored. A mean over class indices divides by their sum."""
    kept = target != ignore_index
    return kept if weight is None else torch.where(kept, weight.to(dtype)[torch.where(kept, target, 0)], 0.0)
