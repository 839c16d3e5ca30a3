"""The GPU's convolutions in bfloat16 against PyTorch's own in float32, at the widths the experiments train."""

from itertools import pairwise

import pytest
import torch

from bitempered.experiments import convolutions, networks


def leaf(*shape, scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(shape, generator=generator)).bfloat16().float()


def error(got, want):
    return float((got.detach().float().cpu() - want).norm() / want.norm())


def check(fast, slow, inputs, mask_of=None):
    """Values and derivatives in each of the inputs that are tensors."""
    on_gpu = [x.cuda().bfloat16().requires_grad_() if torch.is_tensor(x) else x for x in inputs]
    on_cpu = [x.clone().requires_grad_() if torch.is_tensor(x) else x for x in inputs]
    y, want = fast(*on_gpu), slow(*on_cpu)
    assert error(y, want.detach()) < 0.01  # bfloat16 rounds by up to 0.004 of a number, a few times
    g = leaf(*want.shape, seed=1)
    tensors = [i for i, x in enumerate(inputs) if torch.is_tensor(x)]
    got = torch.autograd.grad(y, [on_gpu[i] for i in tensors], g.cuda().bfloat16())
    for i, ours, exact in zip(tensors, got, torch.autograd.grad(want, [on_cpu[i] for i in tensors], g), strict=True):
        if i == mask_of:  # its ReLU's derivative is in it already
            exact = torch.where(inputs[i] > 0, exact, 0)
        # Rounding in between turns the sign of one in some thousand of a ReLU's inputs, and the derivative there.
        assert error(ours, exact) < 0.05


# Each width of either ResNet-56, with and without a change of size.
WIDTHS = [16, 32, 64, 128, 256]


@pytest.mark.parametrize("channels", [*zip(WIDTHS, WIDTHS, strict=True), *pairwise(WIDTHS)])
def test_residual_blocks(channels):
    x = leaf(2, 16, 16, 16, channels[0]).relu()
    weights = leaf(2, convolutions.block_size(*channels), scale=0.4 / channels[0] ** 0.5, seed=2)
    check(convolutions.trunk, networks.trunk, (x, weights, channels), mask_of=0)


def test_mnist_s_second_layer():
    x, weights, bias = leaf(2, 16, 14, 14, 32), leaf(2, 800, 64, scale=0.05, seed=2), leaf(2, 64, seed=3)
    check(convolutions.convolve, networks.convolve, (x, weights, bias, 5))
