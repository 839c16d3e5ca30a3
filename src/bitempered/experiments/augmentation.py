"""Images of the training set, shifted, mirrored and rotated at random."""

import math

import torch
from torch import Tensor

__all__ = ["move", "shift_and_mirror"]

SHIFT = 4  # pixels, at most


def shift_and_mirror(images: Tensor, generator: torch.Generator) -> Tensor:
    """Shift images `(n, h, w, c)` by up to 4 pixels either way, filling with zeros, and mirror half of them."""
    n, device = len(images), images.device
    down, right = torch.randint(0, 2 * SHIFT + 1, (2, n, 1, 1), generator=generator, device=device) - SHIFT
    mirrored = torch.rand((n, 1, 1), generator=generator, device=device) < 0.5
    return look_up(images, *pixels(images), mirrored, down, right)


def move(images: Tensor, rotation: float, generator: torch.Generator) -> Tensor:
    """Shift and mirror images, then rotate them by up to `rotation` degrees about the centre, to the nearest pixel."""
    (height, width), device = images.shape[1:3], images.device
    draw = torch.rand((4, len(images), 1, 1), generator=generator, device=device)
    down, right = (draw[:2] * (2 * SHIFT + 1)).long() - SHIFT
    angle = (2 * draw[3] - 1) * math.radians(rotation)
    row, column = pixels(images)
    y, x = row + 0.5 - height / 2, column + 0.5 - width / 2
    row = (angle.cos() * y - angle.sin() * x + height / 2).floor().long()
    column = (angle.sin() * y + angle.cos() * x + width / 2).floor().long()
    return look_up(images, row, column, draw[2] < 0.5, down, right)


def pixels(images: Tensor) -> tuple[Tensor, Tensor]:
    """Return row `(h, 1)` and column `(1, w)` of each pixel."""
    height, width = (torch.arange(size, device=images.device) for size in images.shape[1:3])
    return height[:, None], width[None, :]


def look_up(images: Tensor, row: Tensor, column: Tensor, mirrored: Tensor, down: Tensor, right: Tensor) -> Tensor:
    """Take each pixel from `row` and `column` of the image that was shifted and then mirrored; 0 outside."""
    n, height, width, _ = images.shape
    inside = within(row, height) & within(column, width)
    row, column = row + down, torch.where(mirrored, width - 1 - column, column) + right
    inside = inside & within(row, height) & within(column, width)
    image = torch.arange(n, device=images.device)[:, None, None]
    return torch.where(inside[..., None], images[image, row.clamp(0, height - 1), column.clamp(0, width - 1)], 0)


def within(place: Tensor, size: int) -> Tensor:
    return (place >= 0) & (place < size)
