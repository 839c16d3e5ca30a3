"""Launches of the Triton kernels: what is remembered of one serves the next like it."""

import inspect
import os

import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"  # read where a kernel is defined, so before the imports below

from bitempered.kernels.memo import Memo
from bitempered.kernels.options import LossOptions
from bitempered.kernels.triton import launch, losses


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


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("rows", "classes"), [(128, 10), (40, 1000), (5000, 10)])
def test_a_launch_like_an_earlier_one_gets_the_same_arguments(monkeypatch, rows, classes, reduction):
    launches, counts = [], []
    for module in (launch, losses):
        monkeypatch.setattr(module, "DIRECT", True)
    monkeypatch.setattr(losses, "loss_kernel", Compiled(losses.loss_kernel, launches))
    monkeypatch.setattr(losses, "divisor_kernel", Compiled(losses.divisor_kernel, counts))
    monkeypatch.setattr(losses, "_plans", Memo())
    monkeypatch.setattr(launch, "_launches", Memo())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)  # what a CPU tensor calls its device
    logits, target = torch.randn(rows, classes), torch.arange(rows) % classes
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
    options = LossOptions(t1=0.8, t2=1.2, axis=1, reduction=reduction)
    for into in (torch.zeros_like(logits), None):
        launches.clear()
        counts.clear()
        for _ in range(3):
            losses.loss(logits, target, None, options, torch.float32, into)
        assert len(launches) == 3
        assert launches == launches[:1] * 3
        assert len(counts) == (3 if reduction == "mean" and rows > 4096 else 0)
        assert counts == counts[:1] * len(counts)
    assert len(losses._plans) == 2
