"""Convolutions of many small networks at once on a GPU, in Triton.

The members of a fleet (see `train`) have their own weights and see the same images. cuDNN runs such a grouped
convolution slowly and separate ones leave the GPU idle, so these kernels take all members in one launch: implicit
matrix products over tiles of pixels, activations `(members, n, height, width, channels)`, bias, ReLU, shortcut and
the derivative of ReLU folded into the last lines. Weights are `(members, taps * taps * inputs, outputs)`, taps first.
Sums over pixels are split in a fixed way and added in a fixed order, so results do not vary from run to run.
`networks` has the same networks in plain PyTorch; tests/test_networks.py compares.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# Kernels are not Python: Triton infers their types.

from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["convolve", "relu_pool", "trunk"]


@triton.jit
def _patch(x_ptr, image, h, w, k, kept, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr,
           TAPS: tl.constexpr, STRIDE: tl.constexpr, TRANSPOSED: tl.constexpr):  # fmt: skip
    """Values (pixels, BK) under the filter's entries k at output pixels (h, w); 0 outside of the image.

    Transposed: the pixels whose own outputs the filter takes from (h, w).
    """
    dy = (k // CHANNELS // TAPS - TAPS // 2)[None, :]
    dx = (k // CHANNELS % TAPS - TAPS // 2)[None, :]
    if TRANSPOSED:
        y, x = h[:, None] - dy, w[:, None] - dx
        inside = (y >= 0) & (x >= 0)
        if STRIDE > 1:
            inside = inside & (y % STRIDE == 0) & (x % STRIDE == 0)
            y, x = y // STRIDE, x // STRIDE
    else:
        y, x = h[:, None] * STRIDE + dy, w[:, None] * STRIDE + dx
        inside = (y >= 0) & (x >= 0)
    inside = inside & (y < HEIGHT) & (x < WIDTH) & kept[:, None] & (k < TAPS * TAPS * CHANNELS)[None, :]
    at = ((image[:, None] * HEIGHT + y) * WIDTH + x) * CHANNELS + (k % CHANNELS)[None, :]
    return tl.load(x_ptr + at, mask=inside, other=0.0)


@triton.jit
def _convolve(
    x_ptr, x_member, w_ptr, w_member, b_ptr, add_ptr, mask_ptr, y_ptr, pixels,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr,
    OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr, OUT_CHANNELS: tl.constexpr,
    ADD_HEIGHT: tl.constexpr, ADD_WIDTH: tl.constexpr, ADD_CHANNELS: tl.constexpr,
    TAPS: tl.constexpr, STRIDE: tl.constexpr, TRANSPOSED: tl.constexpr,
    BIAS: tl.constexpr, ADD: tl.constexpr, MASK: tl.constexpr, RELU: tl.constexpr,
    BP: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    member = tl.program_id(1).to(tl.int64)
    p = tl.program_id(0) * BP + tl.arange(0, BP)
    n = tl.arange(0, OUT_CHANNELS)
    kept = p < pixels
    image, h, w = p // (OUT_HEIGHT * OUT_WIDTH), p // OUT_WIDTH % OUT_HEIGHT, p % OUT_WIDTH
    total = tl.zeros((BP, OUT_CHANNELS), dtype=tl.float32)
    for start in range(0, TAPS * TAPS * CHANNELS, BK):
        k = start + tl.arange(0, BK)
        a = _patch(x_ptr + member * x_member, image, h, w, k, kept, HEIGHT, WIDTH, CHANNELS, TAPS, STRIDE, TRANSPOSED)
        if TRANSPOSED:  # the weight of tap, input n and output c, for k = (tap, c)
            at = ((k // CHANNELS)[:, None] * OUT_CHANNELS + n[None, :]) * CHANNELS + (k % CHANNELS)[:, None]
        else:
            at = k[:, None] * OUT_CHANNELS + n[None, :]
        b = tl.load(w_ptr + member * w_member + at, mask=(k < TAPS * TAPS * CHANNELS)[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    if BIAS:
        total += tl.load(b_ptr + member * w_member + n).to(tl.float32)[None, :]
    if ADD:  # the shortcut: every other pixel where the size halves, new channels empty; transposed, the way back
        if TRANSPOSED:
            near = (h % STRIDE == 0) & (w % STRIDE == 0)
            row = (image * ADD_HEIGHT + h // STRIDE) * ADD_WIDTH + w // STRIDE
        else:
            near = kept
            row = (image * ADD_HEIGHT + h * STRIDE) * ADD_WIDTH + w * STRIDE
        add_ptr += member * (pixels // (OUT_HEIGHT * OUT_WIDTH) * ADD_HEIGHT * ADD_WIDTH * ADD_CHANNELS)
        there = (kept & near)[:, None] & (n < ADD_CHANNELS)[None, :]
        total += tl.load(add_ptr + row[:, None] * ADD_CHANNELS + n[None, :], mask=there, other=0.0).to(tl.float32)
    first = member * pixels * OUT_CHANNELS
    at = p[:, None] * OUT_CHANNELS + n[None, :]
    if RELU:
        total = tl.maximum(total, 0.0)
    if MASK:
        total = tl.where(tl.load(mask_ptr + first + at, mask=kept[:, None], other=0.0) > 0.0, total, 0.0)
    tl.store(y_ptr + first + at, total.to(y_ptr.dtype.element_ty), mask=kept[:, None])


@triton.jit
def _weight_gradient(
    x_ptr, x_member, g_ptr, dw_ptr, part_stride, member_stride, pixels, per_part,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr,
    OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr, OUT_CHANNELS: tl.constexpr,
    TAPS: tl.constexpr, STRIDE: tl.constexpr, BP: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    part, member = tl.program_id(1), tl.program_id(2).to(tl.int64)
    g_ptr += member * pixels * OUT_CHANNELS
    k = tl.program_id(0) * BK + tl.arange(0, BK)
    n = tl.arange(0, OUT_CHANNELS)
    total = tl.zeros((BK, OUT_CHANNELS), dtype=tl.float32)
    for start in range(part * per_part, (part + 1) * per_part, BP):
        p = start + tl.arange(0, BP)
        kept = p < pixels
        image, h, w = p // (OUT_HEIGHT * OUT_WIDTH), p // OUT_WIDTH % OUT_HEIGHT, p % OUT_WIDTH
        a = _patch(x_ptr + member * x_member, image, h, w, k, kept, HEIGHT, WIDTH, CHANNELS, TAPS, STRIDE, False)
        g = tl.load(g_ptr + p[:, None] * OUT_CHANNELS + n[None, :], mask=kept[:, None], other=0.0)
        total = tl.dot(tl.trans(a), g, total, input_precision="ieee")
    base = part.to(tl.int64) * part_stride + member * member_stride
    at = base + k[:, None] * OUT_CHANNELS + n[None, :]
    tl.store(dw_ptr + at, total, mask=(k < TAPS * TAPS * CHANNELS)[:, None])


@triton.jit
def _corner(i, corner, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr):
    """Where one of the four pixels under output i of the pooling is in the input."""
    pixel = i // C
    image, h, w = pixel // (HEIGHT // 2 * (WIDTH // 2)), pixel // (WIDTH // 2) % (HEIGHT // 2), pixel % (WIDTH // 2)
    return ((image * HEIGHT + 2 * h + corner // 2) * WIDTH + 2 * w + corner % 2) * C + i % C


@triton.jit
def _relu_pool(x_ptr, y_ptr, where_ptr, size, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr,
               BLOCK: tl.constexpr):  # fmt: skip
    """The largest of 2 x 2 and 0, and which it was: 0 to 3, 4 for none."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    best = tl.zeros((BLOCK,), dtype=tl.float32)
    which = tl.full((BLOCK,), 4, dtype=tl.int32)
    for corner in tl.static_range(4):
        value = tl.load(x_ptr + _corner(i, corner, HEIGHT, WIDTH, C), mask=i < size, other=0.0).to(tl.float32)
        which = tl.where(value > best, corner, which)
        best = tl.maximum(value, best)
    tl.store(y_ptr + i, best.to(y_ptr.dtype.element_ty), mask=i < size)
    tl.store(where_ptr + i, which.to(tl.uint8), mask=i < size)


@triton.jit
def _relu_pool_gradient(g_ptr, where_ptr, dx_ptr, size, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr,
                        BLOCK: tl.constexpr):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(g_ptr + i, mask=i < size, other=0.0)
    which = tl.load(where_ptr + i, mask=i < size, other=4).to(tl.int32)
    for corner in tl.static_range(4):
        at = _corner(i, corner, HEIGHT, WIDTH, C)
        tl.store(dx_ptr + at, tl.where(which == corner, g, 0.0).to(dx_ptr.dtype.element_ty), mask=i < size)


def _launch_convolve(
    x: Tensor, members: int, w: Tensor, b: Tensor | None, taps: int, stride: int, shape: tuple[int, int, int],
    *, transposed: bool = False, add: Tensor | None = None, mask: Tensor | None = None, relu: bool = False,
) -> Tensor:  # fmt: skip
    """Launch `_convolve`: x `([members,] n, h, w, c)` to `(members, n, *shape)`; w and b are views of one buffer."""
    n, height, width, channels = x.shape[-4:]
    pixels = n * shape[0] * shape[1]
    y = torch.empty(members, n, *shape, dtype=x.dtype, device=x.device)
    block = 128  # pixels; this and the other sizes of tiles are the fastest of those tried on an H200
    _convolve[(triton.cdiv(pixels, block), members)](
        x, x.stride(0) if x.dim() == 5 else 0, w, w.stride(0), b, add, mask, y, pixels,
        height, width, channels, *shape, *(add.shape[-3:] if add is not None else (1, 1, 1)),
        taps, stride, transposed, b is not None, add is not None, mask is not None, relu,
        BP=block, BK=min(channels, 64), num_warps=8 if min(channels, shape[2]) >= 64 else 4, num_stages=3,
    )  # fmt: skip
    return y


def _launch_weight_gradient(x: Tensor, g: Tensor, taps: int, stride: int) -> Tensor:
    """Launch `_weight_gradient`; returns `(members, taps * taps * inputs * outputs)`."""
    n, height, width, channels = x.shape[-4:]
    members, _, out_height, out_width, out_channels = g.shape
    pixels, size = n * out_height * out_width, taps * taps * channels
    # The sum over pixels is split into parts, so that there are enough programs.
    if size < 512:
        rows, block, parts = 64, 128, 8 if x.dim() == 5 else 32
    elif taps == 5:
        rows, block, parts = 256, 64, 8
    else:
        rows, block, parts = (128, 64, 4) if out_channels > 128 else (64, 64, 16)
    per_part = triton.cdiv(triton.cdiv(pixels, parts), block) * block
    dw = torch.empty(parts, members, size * out_channels, dtype=torch.float32, device=x.device)
    _weight_gradient[(triton.cdiv(size, rows), parts, members)](
        x, x.stride(0) if x.dim() == 5 else 0, g, dw, dw.stride(0), dw.stride(1), pixels, per_part,
        height, width, channels, out_height, out_width, out_channels, taps, stride,
        BP=block, BK=rows, num_warps=8 if out_channels > 128 else 4, num_stages=3,
    )  # fmt: skip
    return dw.sum(dim=0)


def _bias_gradient(g: Tensor) -> Tensor:
    """The sum over images and pixels, `(members, outputs)`."""
    # First over each image: a single sum to so few numbers would leave most of the GPU idle.
    return g.sum(dim=(2, 3), dtype=torch.float32).sum(dim=1)


class _Convolve(torch.autograd.Function):
    """A convolution with its bias; x may be shared by the members, `(n, h, w, c)`, and then has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, taps: int) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.taps, ctx.bias = taps, b is not None
        packed = w if b is None else torch.cat([w.flatten(1), b], dim=1)
        bias = None if b is None else packed[:, w[0].numel() :]
        return _launch_convolve(x, w.shape[0], packed, bias, taps, 1, (*x.shape[-3:-1], w.shape[2]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        g = g.contiguous()
        dx = None
        if ctx.needs_input_grad[0]:
            dx = _launch_convolve(g, w.shape[0], w, None, ctx.taps, 1, tuple(x.shape[-3:]), transposed=True)
        dw = _launch_weight_gradient(x, g, ctx.taps, 1).view_as(w).to(w.dtype)
        return dx, dw, _bias_gradient(g).to(w.dtype) if ctx.bias else None, None


def convolve(x: Tensor, w: Tensor, b: Tensor | None, taps: int) -> Tensor:
    """The convolution that keeps the image's size, `([members,] n, h, w, c)` to `(members, n, h, w, outputs)`."""
    return _Convolve.apply(x, w, b, taps)


class _ReluPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        members, n, height, width, channels = x.shape
        y = torch.empty(members, n, height // 2, width // 2, channels, dtype=x.dtype, device=x.device)
        where = torch.empty_like(y, dtype=torch.uint8)
        ctx.save_for_backward(where)
        _relu_pool[(triton.cdiv(y.numel(), 1024),)](x, y, where, y.numel(), height, width, channels, BLOCK=1024)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (where,) = ctx.saved_tensors
        members, n, height, width, channels = where.shape
        g = g.contiguous()
        dx = torch.empty(members, n, 2 * height, 2 * width, channels, dtype=g.dtype, device=g.device)
        _relu_pool_gradient[(triton.cdiv(g.numel(), 1024),)](
            g, where, dx, g.numel(), 2 * height, 2 * width, channels, BLOCK=1024
        )
        return dx


def relu_pool(x: Tensor) -> Tensor:
    """max(0, .) and the largest of 2 x 2."""
    return _ReluPool.apply(x)


class _Trunk(torch.autograd.Function):
    """Residual blocks; x is the output of a ReLU, and its gradient comes back with that ReLU's derivative in it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, flat: Tensor, channels: tuple[int, ...]) -> Tensor:
        members, kept, at = x.shape[0], [x], 0
        for inputs, outputs in pairwise(channels):
            stride = outputs // inputs
            shape = (x.shape[2] // stride, x.shape[3] // stride, outputs)
            (w1, b1), (w2, b2), at = _views(flat, inputs, outputs, at)
            h = _launch_convolve(x, members, w1, b1, 3, stride, shape, relu=True)
            x = _shortcut(h, x, members, w2, b2, stride, shape)
            kept += [h, x]
        ctx.channels = channels
        ctx.save_for_backward(flat, *kept)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        flat, *kept = ctx.saved_tensors
        members, channels = flat.shape[0], ctx.channels
        gradients: list[Tensor] = []  # of weights and biases, the last ones first
        g = torch.where(kept[-1] > 0, g, 0)
        at = flat.shape[1]
        for block in reversed(range(len(channels) - 1)):
            inputs, outputs = channels[block : block + 2]
            stride = outputs // inputs
            x, h = kept[2 * block], kept[2 * block + 1]
            at -= block_size(inputs, outputs)
            (w1, _), (w2, _), _ = _views(flat, inputs, outputs, at)
            gradients += [_bias_gradient(g), _launch_weight_gradient(h, g, 3, 1)]
            dh = _launch_convolve(g, members, w2, None, 3, 1, tuple(h.shape[2:]), transposed=True, mask=h)
            gradients += [_bias_gradient(dh), _launch_weight_gradient(x, dh, 3, stride)]
            g = _launch_convolve(dh, members, w1, None, 3, stride, tuple(x.shape[2:]), transposed=True, add=g, mask=x)
        return g, torch.cat(gradients[::-1], dim=1).to(flat.dtype), None


def _shortcut(
    h: Tensor, x: Tensor, members: int, w: Tensor, b: Tensor, stride: int, shape: tuple[int, int, int]
) -> Tensor:
    """ReLU of the second convolution plus the shortcut, whose stride is not the convolution's."""
    if stride > 1:
        x = torch.nn.functional.pad(x[:, :, ::stride, ::stride], (0, shape[2] - x.shape[4]))
    return _launch_convolve(h, members, w, b, 3, 1, shape, add=x, relu=True)


def block_size(inputs: int, outputs: int) -> int:
    """Weights and biases of one block."""
    return 9 * inputs * outputs + outputs + 9 * outputs * outputs + outputs


def _views(flat: Tensor, inputs: int, outputs: int, at: int) -> tuple[Any, Any, int]:
    """The two convolutions of the block whose weights begin at `at` in the last dimension, and where the next begin."""
    pairs = []
    for channels in (inputs, outputs):
        size = 9 * channels * outputs
        pairs.append((flat[..., at : at + size], flat[..., at + size : at + size + outputs]))
        at += size + outputs
    return pairs[0], pairs[1], at


def trunk(x: Tensor, flat: Tensor, channels: tuple[int, ...]) -> Tensor:
    """Residual blocks of these channels, with all their weights in one `(members, size)` tensor."""
    return _Trunk.apply(x, flat, channels)
