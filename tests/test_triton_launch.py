"""Launches of the Triton kernels: what is remembered of one serves the next like it."""

import inspect
import itertools
import os

import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"  # read where a kernel is defined, so before the imports below

from bitempered.kernels.memo import Memo
from bitempered.kernels.options import LossOptions
from bitempered.kernels.triton import binary, launch, losses, tiles


class Compiled:
    """Stands for a kernel of Triton's, and for what it is compiled to: writes down what it is launched with."""

    def __init__(self, kernel, launches):
        self.arg_names, self.launches = list(inspect.signature(kernel.fn).parameters), launches

    def __getitem__(self, grid):
        def launch(*arguments, **constants):
            rest = [constants[name] for name in self.arg_names[len(arguments) :]]
            kinds = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in (*arguments, *rest)]
            self.launches.append((grid[0], *kinds))
            return Compiled.again(self)

        return launch

    @staticmethod
    def again(made):
        class Again:
            def __getitem__(self, grid):
                return lambda *arguments: made[grid[:1]](*arguments)

        return Again()


SHAPES = [(128, 10), (40, 1000), (5000, 10), (70000, 2), (2, 3, 200, 200)]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["indices", "smoothed", "probabilities"])
def test_a_launch_like_an_earlier_one_gets_the_same_arguments(monkeypatch, shape, kind, reduction):
    launches, counts = [], []
    for module in (launch, losses):
        monkeypatch.setattr(module, "DIRECT", True)
    for name in ("loss_kernel", "soft_loss_kernel"):
        monkeypatch.setattr(losses, name, Compiled(getattr(losses, name), launches))
    monkeypatch.setattr(losses, "divisor_kernel", Compiled(losses.divisor_kernel, counts))
    monkeypatch.setattr(losses, "_plans", Memo())
    monkeypatch.setattr(launch, "_launches", Memo())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)  # what a CPU tensor calls its device
    logits, soft = torch.randn(shape), kind == "probabilities"
    target = torch.softmax(logits, 1) if soft else torch.zeros(shape[:1] + shape[2:], dtype=torch.int64)
    # The same memory for whatever a call allocates, so that its launches can be compared.
    buffers = {}

    def empty(*shape, dtype, device):
        made = torch.zeros(*shape, dtype=dtype)
        return buffers.setdefault(made.shape, made)

    monkeypatch.setattr(torch, "empty", empty)

    def empty_like(pattern):
        assert pattern.untyped_storage().size() == 0
        assert pattern.dtype == buffers[pattern.shape].dtype
        return buffers[pattern.shape]

    monkeypatch.setattr(torch, "empty_like", empty_like)
    options = LossOptions(0.8, 1.2, 1, label_smoothing=0.1 if kind == "smoothed" else 0.0, reduction=reduction)
    counted_apart = reduction == "mean" and not soft and (target.numel() > 4096 or kind == "smoothed")
    at = 1 + getattr(losses, "loss_kernel" if kind == "indices" else "soft_loss_kernel").arg_names.index("divisor_ptr")
    for into in (torch.zeros_like(logits), None):
        launches.clear()
        counts.clear()
        for _ in range(3):
            losses.loss(logits, target, None, options, torch.float32, into)
        assert len(launches) == 3
        if target.numel() > 65536:  # torch adds the divisor up, in memory of its own
            assert all((x[at] is not None) == counted_apart for x in launches)
            launches[:] = [(*x[:at], *x[at + 1 :]) for x in launches]
        assert launches == launches[:1] * 3
        assert len(counts) == (3 if counted_apart else 0)
        assert counts == counts[:1] * len(counts)
    assert len(losses._plans) == 2


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("layout", ["dense", "transposed"])
def test_a_binary_launch_like_an_earlier_one_gets_the_same_arguments(monkeypatch, layout, reduction):
    launches, kept, like = [], [], torch.empty_like
    for module in (launch, binary):
        monkeypatch.setattr(module, "DIRECT", True)
    monkeypatch.setattr(binary, "binary_kernel", Compiled(binary.binary_kernel, launches))
    monkeypatch.setattr(binary, "_plans", Memo())
    monkeypatch.setattr(launch, "_launches", Memo())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)  # what a CPU tensor calls its device
    logits = torch.randn(40, 1000) if layout == "dense" else torch.randn(1000, 40).t()
    target, gradient = torch.zeros(40, 1000), like(logits)
    options = LossOptions(0.8, 1.2, None, reduction=reduction)
    names = binary.binary_kernel.arg_names

    def empty_like(x, **given):
        kept.append(like(x, **given))
        return kept[-1]

    monkeypatch.setattr(torch, "empty_like", empty_like)
    for into in (gradient, None):
        launches.clear()
        for _ in range(3):
            loss = binary.binary_loss(logits, target, None, None, options, gradient=into)
            assert loss.shape == (logits.shape if reduction == "none" else ())
            assert loss.dtype == torch.float32
            if reduction == "none":
                assert loss.stride() == logits.stride()
        assert len(launches) == 3
        if reduction == "none":  # the losses that were returned last are those that were written
            assert launches[-1][1 + names.index("out_ptr")] == loss.data_ptr()
        fresh = {1 + names.index("out_ptr"), 1 + names.index("sums_ptr")}  # in new memory each time
        same = [[x is None if i in fresh else x for i, x in enumerate(of)] for of in launches]
        assert same == same[:1] * 3
    assert len(binary._plans) == 2
    binary.binary_loss(logits, target, None, torch.ones(1), options)
    assert len(binary._plans) == 2  # a weight is not remembered


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("vector", [1, 8])
def test_tiles_are_powers_of_two(itemsize, contiguous, vector):
    """A GPU refuses others, and the interpreter takes them."""
    many = (1, 2, 10, 33, 100, 1000, 8192, 8193, 32000, 2**18)
    for classes, rows in itertools.product(many, (1, 3, 128, 5000, 10**6)):
        tile = tiles.choose_tile(classes, rows, itemsize, contiguous, vector)
        for name in ("ROWS", "COLUMNS", "VECTOR", "num_warps"):
            assert tile[name] > 0
            assert tile[name] & (tile[name] - 1) == 0, (name, classes, rows)
