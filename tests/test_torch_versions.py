"""Without a private part of torch, which another version may not have, everything still computes, by core."""

import importlib
import shutil
import sys

import pytest
import torch

from bitempered import kernels
from bitempered.kernels import cpu, hooks, library
from bitempered.torch import bi_tempered_logistic_loss, checks

LOGITS = torch.tensor([[0.3, -0.2, 0.1], [2.0, 1.0, -3.0]])
TARGET = torch.tensor([0, 2])


def loss_and_gradient(logits=LOGITS):
    logits = logits.clone().requires_grad_()
    loss = bi_tempered_logistic_loss(logits, TARGET, 0.8, 1.2)
    return loss.detach(), torch.autograd.grad(loss, logits)[0]


@pytest.fixture
def without(monkeypatch):
    """Remove a part of torch by its name, and look all of them up again, as at import."""

    def remove(name):
        *path, last = name.split(".")
        owner = torch
        for part in path:
            owner = getattr(owner, part)
        with monkeypatch.context() as patch:
            patch.delattr(owner, last)
            importlib.reload(hooks)  # in place: whoever holds the module sees the new functions

    yield remove
    importlib.reload(hooks)


@pytest.mark.parametrize("name", hooks.NEEDED)
def test_without_it_no_kernel_runs(without, name):
    want = loss_and_gradient()
    assert not hooks.missing
    without(name)
    assert hooks.missing == (name,)
    assert kernels.choose(LOGITS, TARGET) == "core"
    for found, wanted in zip(loss_and_gradient(), want, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)  # core's float32 beside the kernel's
    with kernels.use("cpu"), pytest.raises(RuntimeError, match=rf"has no {name.replace('.', '[.]')}"):
        bi_tempered_logistic_loss(LOGITS, TARGET, 0.8, 1.2)


@pytest.mark.parametrize("name", ["_C._functorch.get_interpreter_stack", "_C._functorch.TransformType.Jvp"])
def test_without_it_forward_mode_raises(without, name):
    """It cannot be told apart from forward over forward, whose derivative would be 0."""
    logits = LOGITS.double()

    def f(x):
        return bi_tempered_logistic_loss(x, TARGET, 0.8, 1.2)

    tangents = torch.ones_like(logits)
    torch.func.jvp(f, (logits,), (tangents,))
    if name.endswith("Jvp"):
        hooks._jvp = None  # a member of an enumeration cannot be removed
    else:
        without(name)
    with pytest.raises(RuntimeError, match="jvp"):  # torch's own error
        torch.func.jvp(f, (logits,), (tangents,))
    want = torch.autograd.functional.jacobian(f, logits)
    torch.testing.assert_close(torch.func.grad(f)(logits), want)
    importlib.reload(hooks)


def test_without_it_every_number_is_a_constant_to_the_compiler(monkeypatch):
    from torch.fx.experimental import symbolic_shapes

    assert hooks.is_constant(0.8)
    monkeypatch.delattr(symbolic_shapes, "statically_known_true")
    assert hooks.is_constant(0.8)


def test_another_base_class_of_functions():
    class Plain:
        @staticmethod
        def apply(x):
            return 2 * x

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.autograd, "Function", Plain)
        double = type("Double", (Plain,), {})
        assert hooks.single_level_apply(double)(3) == 6


def test_without_a_device_side_assert_values_are_still_checked(monkeypatch):
    """A CUDA tensor of which we only have the properties that the check asks for."""

    class OnDevice:
        is_cpu, is_cuda = False, True

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for fine in (True, False):
        asserted = []
        monkeypatch.setattr(torch, "_assert_async", asserted.append, raising=False)
        checks._check_values(OnDevice(), lambda fine=fine: torch.tensor([fine]), IndexError)
        assert [bool(x) for x in asserted] == [fine]
    monkeypatch.delattr(torch, "_assert_async")
    checks._check_values(OnDevice(), lambda: torch.tensor([True]), IndexError)
    with pytest.raises(IndexError):
        checks._check_values(OnDevice(), lambda: torch.tensor([False]), IndexError)


def test_without_openmp_of_torch_one_thread_computes(monkeypatch):
    if shutil.which(cpu.compiler()[0]) is None:  # a compiler that fails is no reason
        pytest.skip("there is no C compiler here")
    want = loss_and_gradient()
    library.parallel.cache_clear()
    monkeypatch.setattr(cpu.torch, "__file__", "/nowhere/torch/__init__.py")
    assert library.parallel() is None
    with kernels.use("cpu"):
        for found, wanted in zip(loss_and_gradient(), want, strict=True):
            assert torch.equal(found, wanted)
    library.parallel.cache_clear()


def test_nothing_private_is_asked_of_torch_elsewhere():
    """A new private name belongs into `hooks`, with a test above."""
    for name in [name for name in sys.modules if name.startswith("bitempered")]:
        module = sys.modules[name]
        if module is hooks or not getattr(module, "__file__", None):
            continue
        with open(module.__file__, encoding="utf-8") as file:
            lines = [line for line in file if "torch._" in line or "forward_ad._" in line]
        assert [line for line in lines if "_assert_async" not in line and "torch.__" not in line] == [], name
