"""The loss of logits whose classes are spread over processes equals the loss of all logits in one process.

Each process is a real one, connected by gloo. They start once for all tests of this module.
"""

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("this torch is built without torch.distributed", allow_module_level=True)

import sharded_cases
from processes import run
from sharded_cases import CLASSES, SIZES, axis_of, gradients_of_all, gradients_of_case, linear_gradients, shard

from bitempered import kernels
from bitempered.torch import bi_tempered_logistic_loss


@pytest.fixture(
    scope="module", params=[pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
def of_ranks(request):
    return run(sharded_cases.everything, request.param)


def unsharded(*arguments):
    with kernels.use("core"):
        return gradients_of_case(bi_tempered_logistic_loss, *arguments)


def close(value, exact, bar):
    torch.testing.assert_close(value, exact, rtol=bar, atol=bar, equal_nan=True)


def test_every_option(of_ranks):
    # Sums of at most ten terms in another order, and two solvers that both end at rounding error.
    world = len(of_ranks)
    for i, case in enumerate(sharded_cases.cases()):
        loss, gradient = unsharded(*case)
        for rank, results in enumerate(of_ranks):
            value, of_shard, _ = results["losses"][i]
            torch.testing.assert_close(value, of_ranks[0]["losses"][i][0], rtol=0, atol=0, equal_nan=True)
            close(value, loss, 1e-12)
            close(of_shard, shard(gradient, rank, world, axis_of(case[0])), 1e-12)


def test_gradients_in_target_and_temperatures(of_ranks):
    world = len(of_ranks)
    for i, case in enumerate(sharded_cases.derivative_cases()):
        with kernels.use("core"):
            loss, by_a, by_y, by_t1, by_t2 = gradients_of_all(bi_tempered_logistic_loss, *case)
        for rank, results in enumerate(of_ranks):
            found = results["all_gradients"][i]
            close(found[0], loss, 1e-12)
            close(found[1], shard(by_a, rank, world, 1), 1e-12)
            close(found[2], None if by_y is None else shard(by_y, rank, world, 1), 1e-12)
            close(found[3], by_t1, 1e-12)
            close(found[4], by_t2, 1e-12)


def test_the_fused_layer(of_ranks):
    world = len(of_ranks)
    for i, (hidden, weight, bias, target, options) in enumerate(sharded_cases.linear_cases()):
        loss, by_hidden, by_weight, by_bias = linear_gradients(hidden, weight, bias, target, options)
        for rank, results in enumerate(of_ranks):
            found = results["linear"][i]
            # The gradients are sums over 700 rows with factors up to 700.
            close(found[0], loss, 1e-12)
            close(found[1], by_hidden, 1e-11)
            close(found[2], shard(by_weight, rank, world, 0), 1e-10)
            close(found[3], None if bias is None else shard(by_bias, rank, world, 0), 1e-10)


def test_a_distributed_tensor_needs_no_group(of_ranks):
    cases = list(sharded_cases.derivative_cases())
    for results in of_ranks:
        assert len(results["dtensors"]) == len(cases) * (2 if len(of_ranks) == 4 else 1)
        for (value, gradient, same_placement), case in zip(results["dtensors"], cases * 2, strict=False):
            logits, target, t1, t2, options = case
            loss, by_a = unsharded(logits, target, t1[0].item(), t2[0].item(), options)
            assert same_placement
            close(value, loss, 1e-12)
            close(gradient, by_a, 1e-12)


def test_few_messages(of_ranks):
    """For float32 and 0.5 <= t2 <= 4 at most 8 all-reduces of at most 4 numbers per example, backward included."""
    world, counts = len(of_ranks), {}
    for i, (logits, target, t2, options) in enumerate(sharded_cases.float32_cases()):
        wide = options | ({"weight": options["weight"].double()} if "weight" in options else {})
        loss, gradient = unsharded(logits.double(), as_double(target), min(t2, 0.8), t2, wide)
        in_one, gradient_in_one = multiplied_first(logits, target, min(t2, 0.8), t2, options)
        # Twice the rounding errors of one process with float32, and a few more of its own.
        bars = [
            2 * distance(in_one, loss) + 5e-6 * max(1.0, loss.abs().max().item()),
            2 * distance(gradient_in_one, gradient) + 5e-6 * max(1.0, gradient.abs().max().item()),
        ]
        for rank, results in enumerate(of_ranks):
            value, of_shard, sizes = results["float32"][i]
            assert len(sizes) <= 8
            assert max(sizes) <= 4 * len(logits)
            counts.setdefault(t2, set()).add(len(sizes))
            assert distance(value, loss) <= bars[0]
            assert distance(of_shard, gradient.chunk(world, 1)[rank]) <= bars[1]
    assert counts[1.0] == {3}  # as many as cross-entropy needs: the largest logit, the mass, the loss
    assert max(counts[1.2]) == 7


def multiplied_first(logits, target, t1, t2, options):
    """`unsharded`, but with `rescale` logits are multiplied before the largest is subtracted, as a shard's are."""
    if not options.get("rescale"):
        return unsharded(logits, target, t1, t2, options)
    inner, outer = logits.shape[1] ** (t2 - 1), logits.shape[1] ** (1 - t1)
    loss, gradient = unsharded(inner * logits, target, t1, t2, options | {"rescale": False})
    return outer * loss, inner * outer * gradient


def distance(value, exact):
    return (value.double() - exact).abs().max().item()


def as_double(x):
    return x.double() if x.is_floating_point() else x


def test_half_precision_computes_in_float32(of_ranks):
    world = len(of_ranks)
    for i, (logits, target, options) in enumerate(sharded_cases.half_cases()):
        loss, gradient = unsharded(logits, target, 0.8, 1.2, options)
        for rank, results in enumerate(of_ranks):
            value, of_shard = results["halves"][i]
            assert value.dtype == of_shard.dtype == logits.dtype
            step = torch.finfo(logits.dtype).eps  # a result may round to a neighbour
            close(value, loss, step)
            close(of_shard, gradient.chunk(world, 1)[rank], step)


# What each process says: the first, and the others, whose arguments are right but for the comparison.
DIFFERENT = ("ValueError", "all processes of the group must be given the same")
ELSEWHERE = ("RuntimeError", "the arguments of rank 0 of the group are wrong: see its error")
MISTAKES = {
    "rows": (DIFFERENT, DIFFERENT),
    "targets' shape on one rank": (("ValueError", "target must be class indices"), ELSEWHERE),
    "targets' values": (DIFFERENT, DIFFERENT),
    "targets' kind": (DIFFERENT, DIFFERENT),
    "dtype": (DIFFERENT, DIFFERENT),
    "temperature": (DIFFERENT, DIFFERENT),
    "option": (DIFFERENT, DIFFERENT),
    "bad temperature on one rank": (("ValueError", "t1 must not exceed t2"), ELSEWHERE),
    "bad index": (("IndexError", "target must hold class indices from 0 to"),) * 2,
    "weight is a shard": (("RuntimeError", "it is whole on every process"),) * 2,
    "weights' values": (DIFFERENT, DIFFERENT),
    "negative weight": (("ValueError", "weight must not be negative"),) * 2,
    "sum of probabilities": (("ValueError", "sum to 1 within 0.001 over the classes of all processes"),) * 2,
    "negative probability on one rank": (("ValueError", "target must hold probabilities"), ELSEWHERE),
    "not a tensor": (("TypeError", "logits must be a torch.Tensor, got list"), ELSEWHERE),
    "no classes at all": (("ValueError", "at least one class"),) * 2,
    "not a group": (("TypeError", "group must be a torch.distributed.ProcessGroup, got str"),) * 2,
    "not a member": (("TypeError", "got str"), ("TypeError", "group must be")),
    "second derivative": (("RuntimeError", "first derivatives only"),) * 2,
    "vmap": (("RuntimeError", "no torch.func"),) * 2,
    "jvp": (("RuntimeError", "no torch.func"),) * 2,
    "forward mode": (("RuntimeError", "no forward mode"),) * 2,
    "compile": (("Unsupported", "compile"),) * 2,
    "hidden rows": (("ValueError", "target must be class indices"), ELSEWHERE),
    "hidden features on one rank": (("ValueError", "hidden must be of shape"), ELSEWHERE),
    "hidden needs a gradient on one rank": (DIFFERENT, DIFFERENT),
}


def test_a_mistake_is_told_to_every_process(of_ranks):
    for rank, results in enumerate(of_ranks):
        found = dict(results["mistakes"])
        assert found.pop("afterwards") == pytest.approx(of_ranks[0]["mistakes"]["afterwards"], abs=0)
        assert set(found) == set(MISTAKES)
        for name, by_rank in MISTAKES.items():
            kind, message = by_rank[min(rank, 1)]
            assert found[name][0] == kind, (name, found[name])
            assert message in found[name][1], (name, found[name])


def test_without_processes():
    with pytest.raises(RuntimeError, match="init_process_group"):
        bi_tempered_logistic_loss(torch.zeros(2, 3), torch.tensor([0, 1]), 0.8, 1.2, group="world")


def test_the_shards_cover_the_classes():
    assert all(sum(sizes) == CLASSES for sizes in SIZES.values())
