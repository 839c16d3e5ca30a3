"""The loss of logits whose classes are spread over the processes of a group, each with a shard of them.

A process keeps its shard. What crosses the network is a few numbers per example: the largest logit, the masses that the
solver asks for (`sharded_solver`), and the sums that the loss and its gradient consist of. They are the same on every
process afterwards, so that backward needs no message.

Before that the processes compare what they were given. One that finds a mistake tells the others, and all raise: none
waits for a message that never comes.
"""

import math
import zlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from bitempered import core, kernels
from bitempered.encoding import encode_classes
from bitempered.kernels import hooks
from bitempered.kernels.options import LossOptions
from bitempered.torch.autograd import along, compute_dtype, with_tensors, without_tensors, xp
from bitempered.torch.checks import check_probability_sums
from bitempered.torch.sharded_solver import LEAST_T, bracketed_normalizer, rounds


class Shards(NamedTuple):
    """The classes of this process among all: [first, first + own)."""

    group: Any
    first: int
    own: int
    largest: int  # of any process
    total: int

    @property
    def slice(self) -> slice:
        return slice(self.first, self.first + self.own)


class Agreement(NamedTuple):
    """What the processes of a group must have in common, and the number of classes, which they need not."""

    classes: int
    settings: tuple[Any, ...]  # plain values: shapes, dtypes, options
    values: tuple[Tensor | None, ...]  # tensors that are the same on every process
    device: torch.device


def check_group(group: Any) -> None:
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("group needs torch.distributed: call torch.distributed.init_process_group first")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group must be a torch.distributed.ProcessGroup, got {type(group).__name__}; a device mesh has get_group()"
        )
    if dist.get_rank(group) < 0:
        raise ValueError("this process is not a member of group: only members may call the loss")


def agreement(
    logits: Tensor, target: Tensor, weight: Tensor | None, options: LossOptions, *, classes: int, extra: Any
) -> Agreement:
    """The `Agreement` on the arguments of a loss of these logits."""
    indices, axis = not target.is_floating_point(), options.axis
    numbers, temperatures = without_tensors(options)
    settings = (
        ("examples", (*logits.shape[:axis], *logits.shape[axis + 1 :])),
        ("dtypes", logits.dtype, target.dtype, None if weight is None else weight.dtype),
        ("temperatures", numbers.t1, numbers.t2),
        ("options", numbers.label_smoothing, numbers.ignore_index, numbers.reduction, extra),
        ("class weights", None if weight is None else tuple(weight.shape)),
        ("need a gradient", _needs((target, *temperatures))),
    )
    return Agreement(classes, settings, (target if indices else None, weight, *temperatures), logits.device)


def _needs(tensors: tuple[Tensor | None, ...]) -> tuple[bool, ...]:
    return tuple(torch.is_grad_enabled() and x is not None and x.requires_grad for x in tensors)


def agree(group: Any, prepare: Callable[[], tuple[Agreement, Any]]) -> tuple[Shards, Any]:
    """Return the shards, and what `prepare` returns after its `Agreement`.

    `prepare` validates the arguments of this process. If it raises on any, or if the agreements differ, every process
    of the group raises.
    """
    check_group(group)
    mistake: Exception | None = None
    try:
        mine, prepared = prepare()
        own = torch.tensor([0, mine.classes, zlib.crc32(repr(mine.settings).encode()), 0], device=mine.device)
        own[3] = sum(_checksum(x) for x in mine.values if x is not None)
    except Exception as error:  # raised below, when the others know
        mistake = error
        own = torch.tensor([1, 0, 0, 0], device=_device_of(group))
    every = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, own, group=group)
    if mistake is not None:
        raise mistake
    failed, sizes, settings_of, values_of = zip(*torch.stack(every).tolist(), strict=True)
    if any(failed):
        ranks = [rank for rank, flag in enumerate(failed) if flag]
        raise RuntimeError(f"the arguments of rank {', '.join(map(str, ranks))} of the group are wrong: see its error")
    rank = dist.get_rank(group)
    _raise_if_different(settings_of, rank, f"shapes, dtypes, temperatures or options; here they are {mine.settings}")
    _raise_if_different(values_of, rank, "class indices, class weights or temperatures")
    if sum(sizes) == 0:
        raise ValueError("the logits of all processes together must have at least one class")
    return Shards(group, sum(sizes[:rank]), sizes[rank], max(sizes), sum(sizes)), prepared


def _device_of(group: Any) -> torch.device:
    """A device that messages of this group can be on."""
    on_gpu = "nccl" in dist.get_backend(group)
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def _checksum(x: Tensor) -> Tensor:
    """A number that tells tensors of one shape apart, as far as 64 bits can; integers wrap around."""
    flat = x.detach().reshape(-1)
    numbers = flat.double().view(torch.int64) if x.is_floating_point() else flat.long()
    odd = 2 * torch.arange(len(numbers), device=x.device) + 1
    return (odd * (numbers ^ (numbers >> 31))).sum()


def _raise_if_different(of_ranks: tuple[int, ...], rank: int, what: str) -> None:
    others = [other for other, value in enumerate(of_ranks) if value != of_ranks[rank]]
    if others:
        raise ValueError(
            f"all processes of the group must be given the same {what}; rank {rank} of the group and rank"
            f" {', '.join(map(str, others))} differ"
        )


def raise_under_transforms(logits: Tensor, target: Tensor) -> None:
    if torch.compiler.is_compiling():
        raise RuntimeError("a loss over several processes cannot be compiled: keep it outside torch.compile")
    tensors = isinstance(logits, Tensor) and isinstance(target, Tensor)  # anything else is told to all processes
    if tensors and hooks.why_not_plain(logits, target) is not None and not hooks.missing:
        raise RuntimeError(
            "a loss over several processes has first derivatives by backward() only: no forward mode, no torch.func"
            " transforms and no tracing"
        )
    kernels.require_core("loss", "it does not compute over several processes")


def sharded_loss_per_example(
    logits: Tensor, target: Tensor, weight: Tensor | None, options: LossOptions, shards: Shards, *, rescaled: bool
) -> Tensor:
    """The loss of each example, equal on every process, from this process's shard of the logits.

    If they are `rescaled`, by a constant K^(t2-1), the gradient in t2 counts that factor.
    """
    options = options._replace(t1=along(options.t1, options.axis), t2=along(options.t2, options.axis))
    options, temperatures = without_tensors(options)
    needs = _needs((target, *temperatures))
    return _ShardedLoss.apply(logits, target, weight, *temperatures, options, shards, needs, rescaled).squeeze(
        options.axis
    )


class _ShardedLoss(torch.autograd.Function):
    """(logits, target, class weights, t1, t2, options, shards, needs, rescaled) -> loss per example, the axis kept.

    `needs` says whether the target, t1 and t2 need gradients. All gradients are computed in forward, so that backward
    sends nothing: it may run on some processes only, in any order.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        logits, target, weight, t1, t2, options, shards, needs, rescaled = arguments
        options = with_tensors(options, t1=t1, t2=t2)
        ctx.dtypes = logits.dtype, target.dtype
        needs = (ctx.needs_input_grad[0], *needs)
        losses, gradients = _loss_and_gradients(logits, target, weight, options, shards, needs, rescaled)
        ctx.save_for_backward(*gradients)
        return losses

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a loss over several processes has first derivatives only (create_graph=True asks for more)"
            )
        by_a, by_y, by_t1, by_t2 = (None if x is None else g * x for x in ctx.saved_tensors)
        by_a = None if by_a is None else by_a.to(ctx.dtypes[0])
        by_y = None if by_y is None else by_y.to(ctx.dtypes[1])
        return by_a, by_y, None, by_t1, by_t2, None, None, None, None


def _loss_and_gradients(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    options: LossOptions,
    shards: Shards,
    needs: tuple[bool, ...],
    rescaled: bool,
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """The losses, and their gradients in the logits, the target, t1 and t2, or None."""
    t1, t2, axis, smoothing = options.t1, options.t2, options.axis, options.label_smoothing
    shared = _shared(shards)
    a, indices = logits.to(compute_dtype(logits.dtype)), not target.is_floating_point()
    y, w, is_label = encode_classes(
        a, target, None if weight is None else weight[shards.slice],
        label_smoothing=smoothing, axis=axis, indices=indices, all_classes=shards.total, xp=shared,
    )  # fmt: skip
    z = y if w is None else y * w
    u = core.gaps(a, axis=axis, xp=shared)
    top = u == 0

    def mass(m: Tensor) -> Tensor:
        """sum r of this shard, the inner loop: up to t = 2 `core.log_ratios` in place, without its precautions."""
        if t2 == 1:
            return xp.sum(torch.exp(-u), axis=axis)
        if t2 > 2:
            return xp.sum(core.log_ratios(u, m, t2, xp=xp).exp_(), axis=axis)
        x = u * ((t2 - 1) * torch.exp((1 - t2) * m))
        return xp.sum(x.clamp_(min=-1).log1p_().div_(1 - t2).exp_(), axis=axis)

    # The solver's first messages have room for other sums.
    waiting = [xp.sum(top.to(u.dtype), axis=axis), xp.sum(z, axis=axis)]
    waiting += [] if indices else [xp.sum(target.to(u.dtype), axis=axis)]
    arrived: list[Tensor] = []

    def log_masses(points: list[Tensor]) -> list[Tensor]:
        others = [waiting.pop(0) for _ in range(min(4 - len(points), len(waiting)))]
        totals = shared.totals([mass(m) for m in points] + others)
        arrived.extend(totals[len(points) :])
        return [torch.log(total) - m for total, m in zip(totals, points, strict=False)]

    zero = torch.zeros_like(xp.sum(u, axis=axis))
    if isinstance(t2, Tensor) or t2 < LEAST_T:
        ends = (0, math.inf) if isinstance(t2, Tensor) else (t2,)
        steps = max(core.newton_steps(t, shards.total, xp.eps(u)) for t in ends)
        m = core.normalizer(u, t2, steps=steps, axis=axis, xp=shared)
        arrived = shared.totals(waiting)
    else:
        m = bracketed_normalizer(log_masses, zero, t2, classes=shards.total, count=rounds(t2, xp.eps(u)))
    tops, total, *sums = arrived
    if indices:
        total = torch.where((target != options.ignore_index).unsqueeze(axis), total, 0.0)
    else:
        check_probability_sums(target, sums[0].squeeze(axis))
    weighted = core.Target(y, w, y if is_label else z / torch.where(total == 0, 1.0, total), total, is_label)

    log_r = core.log_ratios(u, m, t2, xp=xp)
    log_p, outside = log_r - m, core.outside(u, m, t2, xp=xp)
    powers = core.power(log_r, t2, outside=outside, xp=xp)
    v = (log_p.exp() - weighted.q) * core.power(log_p, t2 - t1, outside=outside, xp=xp)
    # The divergence is a sum over classes of terms that are not negative: each process has its share of it.
    loss, rest, v_rest, v_top = shared.totals(
        [core.weighted_loss(weighted, log_p, t1, axis=axis, xp=xp)]
        + [xp.sum(torch.where(here, x, 0.0), axis=axis) for here, x in ((~top, powers), (~top, v), (top, v))]
    )
    escort = powers / (tops + rest)
    needs_a, needs_y, needs_t1, needs_t2 = needs
    by_a = by_y = by_t1 = by_t2 = None
    if needs_a or needs_t2:
        # v_i - e_i sum_j v_j, for a single largest logit without the part that cancels. Ties lose digits here.
        most = rest / (tops + rest) * v - escort * v_rest
        by_a = torch.where(escort > 0.5, most, v - escort * (v_rest + v_top))
        by_a = torch.where(total == 0, 0.0, total * by_a)
    if needs_y:
        by_y = (1 - smoothing) * core.target_gradient(weighted, log_p, t1, axis=axis, xp=shared)
        by_y = by_y if w is None else by_y * w
    if needs_t1 or needs_t2:
        at = core.State(u, m, log_p, outside, escort)
        slopes = core.temperature_gradients(weighted, at, t1, t2, axis=axis, xp=shared)
        by_t1, by_t2 = (slope if needed else None for slope, needed in zip(slopes, needs[2:], strict=True))
    if by_a is not None and by_t2 is not None and rescaled:
        moved = torch.where(a.abs() < math.inf, by_a * a, 0.0)
        by_t2 = by_t2 + math.log(shards.total) * shared.sum(moved, axis=axis)
    return loss, (by_a, by_y, by_t1, by_t2)


def sum_over_processes(x: Tensor, group: Any) -> Tensor:
    """The sum of the tensors of all processes, in place."""
    if x.numel():
        dist.all_reduce(x, dist.ReduceOp.SUM, group=group)
    return x


def _shared(shards: Shards) -> Any:
    """The namespace of torch for `core`, where sums and maxima go over the classes of all processes."""

    def all_reduce(x: Tensor, op: Any) -> Tensor:
        if x.numel():
            dist.all_reduce(x, op, group=shards.group)
        return x

    def maximum(x: Tensor, axis: int) -> Tensor:
        lowest = x.new_full((*x.shape[:axis], 1, *x.shape[axis + 1 :]), -math.inf)
        return all_reduce(torch.cat((x.detach(), lowest), dim=axis).amax(axis, keepdim=True), dist.ReduceOp.MAX)

    def totals(of_shard: list[Tensor]) -> list[Tensor]:
        """Several sums in one message."""
        return list(all_reduce(torch.stack(of_shard), dist.ReduceOp.SUM))

    own: dict[str, Any] = {
        "max": maximum,
        "sum": lambda x, axis: all_reduce(xp.sum(x, axis=axis).contiguous(), dist.ReduceOp.SUM),
        "totals": totals,
        "class_indices": lambda classes, target: torch.arange(
            shards.first, shards.first + classes, device=target.device
        ),
    }
    return SimpleNamespace(**vars(xp) | own)


class ClassShards(NamedTuple):
    """A process's logits, target and class weights, its group, and what makes the loss as distributed as they were."""

    tensors: tuple[Tensor, Tensor, Tensor | None]
    group: Any
    wrap: Callable[[Tensor], Tensor]


def class_shards(logits: Any, target: Any, weight: Any, group: Any) -> ClassShards | None:
    """The arguments themselves if there is a group; the parts of a DTensor that is sharded on its classes; or None."""
    if group is not None:
        return ClassShards((logits, target, weight), group, lambda loss: loss)
    if not hasattr(logits, "placements"):
        return None
    from torch.distributed.tensor import DTensor, Replicate, Shard

    axis, mesh = min(1, logits.dim() - 1), logits.device_mesh
    split = [i for i, placement in enumerate(logits.placements) if placement == Shard(axis)]
    if not split:
        return None
    kept = [placement.is_replicate() for i, placement in enumerate(logits.placements) if i not in split]
    if len(split) > 1 or not all(kept):
        raise ValueError(
            f"logits must be sharded on their class dimension over one dimension of the mesh and replicated over the"
            f" others, got {logits.placements}: redistribute them, or pass to_local() with group"
        )

    def local(x: Any, name: str, placements: Any) -> Any:
        if isinstance(x, DTensor):
            return x.redistribute(mesh, placements).to_local()
        if x is not None and placements is logits.placements:
            raise ValueError(f"{name} must be a DTensor as the logits are, got {type(x).__name__}")
        return x

    whole = [Replicate()] * mesh.ndim
    probabilities = isinstance(target, Tensor) and target.is_floating_point()
    tensors = (
        logits.to_local(),
        local(target, "class probabilities", logits.placements if probabilities else whole),
        local(weight, "weight", whole),
    )
    return ClassShards(tensors, mesh.get_group(split[0]), lambda x: DTensor.from_local(x, mesh, whole, run_check=False))
