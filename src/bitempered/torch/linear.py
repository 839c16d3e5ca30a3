"""A last linear layer and its loss, without holding all logits at once.

A model with many classes spends most of its memory on logits and their gradient. Here rows of the hidden layer go
through the linear layer and the loss a chunk at a time. A chunk leaves only its loss and its share of the gradients of
the layer's input, weight and bias.

The weight's gradient must be summed in float32, which takes twice the size of a half-precision weight. On a GPU
`device_linear` avoids that sum.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitempered import kernels
from bitempered.checks import check_number, expected_target
from bitempered.kernels import hooks
from bitempered.kernels.implementations import implementation
from bitempered.kernels.options import LossOptions
from bitempered.torch.autograd import Temperature, compute_dtype, with_tensors, without_tensors
from bitempered.torch.checks import (
    check_all_classes,
    check_class_weight,
    check_not_negative,
    check_options,
    check_stored_options,
    checked_class_options,
    temperatures_per_example,
)
from bitempered.torch.device_linear import device_chunks
from bitempered.torch.functional import class_loss, probabilities, result_dtype, sharded_class_loss
from bitempered.torch.layer_inputs import Gradients, Inputs, LayerOptions, rows_per_chunk
from bitempered.torch.reductions import divide, safe_divisor
from bitempered.torch.sharded import (
    Agreement,
    Shards,
    agree,
    agreement,
    raise_under_transforms,
    sum_over_processes,
)

_NOTHING = (False,) * 5


def linear_bi_tempered_logistic_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    t1: Temperature,
    t2: Temperature,
    *,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    rescale: bool = False,
    group: Any = None,
) -> Tensor:
    """`bi_tempered_logistic_loss` of the logits `linear(hidden, weight, bias)`, which never exist all at once.

    Apart from its results it needs memory for two chunks of logits, each about as large as `hidden`, and for the
    gradient of `weight` in float32. On a GPU, for class indices without smoothing, softcap or gradients in t1 and t2,
    it needs only one such chunk. For "mean" and "sum" the gradients are computed in forward, for "none" in backward.

    Args:
        hidden: (..., H), the input of the linear layer.
        weight: (C, H), its weight; it may be shared with other layers.
        target: class indices (...), or class probabilities (..., C).
        t1: temperature of the logarithm, 0 <= t1 < 2. Below 1 the loss is bounded.
        t2: temperature of the softmax, t2 >= t1. Above 1 its tail is heavy.
        bias: (C), the linear layer's bias.
        class_weight: (C), the `weight` of `bi_tempered_logistic_loss`, which explains the other options too.
        softcap: turns each logit z into softcap tanh(z / softcap).
        rescale: as in `bi_tempered_logistic_loss`, applied to the capped logits.
        group: as in `bi_tempered_logistic_loss`. `weight`, `bias` and class probabilities are this process's shards;
            `hidden` is equal on every process, and so is its gradient, a sum over all processes.

    Each temperature may be a tensor, with or without a gradient, that broadcasts to the shape of the unreduced loss.

    Returns:
        A scalar, or for "none" the shape of `hidden` without H. The dtype is that of `hidden`, float32 under autocast.

    It has only first derivatives, in `hidden`, `weight`, `bias`, t1 and t2: second ones, forward mode and torch.func
    raise. Keep this loss outside torch.compile, inside which all logits are formed at once.

    >>> hidden, weight = torch.eye(2), torch.tensor([[4.0, 0.0], [0.0, 9.0], [0.0, 0.0]])
    >>> linear_bi_tempered_logistic_loss(hidden, weight, torch.tensor([0, 2]), t1=0.8, t2=1.2, reduction="none")
    tensor([0.0509, 3.2077])
    """
    arguments = (hidden, weight, bias, target, t1, t2, class_weight, softcap)
    of_call: dict[str, Any] = {
        "ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing, "rescale": rescale
    }  # fmt: skip
    shards: Shards | None = None
    if group is None:
        inputs, options = _prepare(*arguments, shard=False, **of_call)
    else:
        raise_under_transforms(hidden, target)

        def prepare() -> tuple[Agreement, tuple[Inputs, LossOptions]]:
            inputs, options = _prepare(*arguments, shard=True, **of_call)
            return _agreement(inputs, options, class_weight, (softcap, rescale)), (inputs, options)

        shards, (inputs, options) = agree(group, prepare)
        check_all_classes(
            shards.total, inputs.target, class_weight, options, rescale=rescale, weight_name="class_weight"
        )
    check_not_negative(class_weight, "class_weight")
    dtype = result_dtype(hidden)
    if torch.compiler.is_compiling():
        logits = _capped(F.linear(inputs.hidden, inputs.weight, inputs.bias), softcap)
        loss = class_loss(logits, inputs.target, class_weight, options, dtype)
    else:
        options, temperatures = without_tensors(options)
        inputs = inputs._replace(t1=temperatures[0], t2=temperatures[1])
        loss = _apply(inputs, LayerOptions(options, class_weight, softcap, shards))
    return loss.reshape(hidden.shape[:-1] if reduction == "none" else ()).to(dtype)


def _prepare(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    t1: Temperature,
    t2: Temperature,
    class_weight: Tensor | None,
    softcap: float | None,
    *,
    shard: bool,
    **of_call: Any,
) -> tuple[Inputs, LossOptions]:
    """Validate everything except values, of a whole layer or a shard. Returns the tensors in rows, and the options."""
    _check_softcap(softcap)
    _check_layer(hidden, weight, bias, least=0 if shard else 1)
    rows = hidden.shape[:-1]
    if not isinstance(target, Tensor):
        raise TypeError(f"target must be a torch.Tensor, got {type(target).__name__}")
    if target.shape != ((*rows, len(weight)) if target.is_floating_point() else rows):
        raise ValueError(expected_target(rows, (*rows, len(weight)), target.dtype, target.shape))
    if target.requires_grad:
        raise RuntimeError("target cannot require a gradient here; detach it, or use bi_tempered_logistic_loss")
    if torch.is_autocast_enabled(hidden.device.type) and hidden.dtype != torch.float64:  # which it leaves alone
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    t1, t2 = (t.reshape(-1) if isinstance(t, Tensor) else t for t in temperatures_per_example(t1, t2, hidden, rows))
    n = math.prod(rows)
    target, options = checked_class_options(
        hidden.detach().new_empty(()).expand(n, len(weight)),  # the shape of all logits, without their memory
        target.reshape(n, len(weight)) if target.is_floating_point() else target.reshape(n),
        class_weight, t1=t1, t2=t2, weight_name="class_weight", shard=shard, **of_call,
    )  # fmt: skip
    return Inputs(hidden.reshape(n, hidden.shape[-1]), weight, bias, None, None, target), options


def _agreement(inputs: Inputs, options: LossOptions, class_weight: Tensor | None, others: Any) -> Agreement:
    """What the processes of a group must have in common, such as which of them send messages."""
    layer, recording = inputs[:3], torch.is_grad_enabled()
    hidden, weight, _ = layer
    in_backward = options.reduction == "none" and any(x is not None and x.requires_grad for x in layer)
    messages = recording and hidden.requires_grad, recording and in_backward
    rows = hidden.detach().new_empty(()).expand(len(hidden), len(weight))
    extra = (tuple(hidden.shape), others, messages)
    return agreement(rows, inputs.target, class_weight, options, classes=len(weight), extra=extra)


class LinearBiTemperedLogisticLoss(nn.Module):
    """`linear_bi_tempered_logistic_loss` with its options stored; the linear layer's weight comes with each call.

    >>> LinearBiTemperedLogisticLoss(t1=0.8, t2=1.2)
    LinearBiTemperedLogisticLoss(t1=0.8, t2=1.2)
    """

    class_weight: Tensor | None

    def __init__(
        self,
        t1: Temperature = 0.8,
        t2: Temperature = 1.2,
        class_weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        softcap: float | None = None,
        rescale: bool = False,
    ) -> None:
        super().__init__()
        self.t1, self.t2, self.rescale = check_stored_options(t1, t2, rescale)
        check_options(ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)
        check_class_weight(class_weight, "class_weight")
        _check_softcap(softcap)
        self.register_buffer("class_weight", class_weight)
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.softcap = softcap

    def forward(self, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear_bi_tempered_logistic_loss(
            hidden,
            weight,
            target,
            self.t1,
            self.t2,
            bias=bias,
            class_weight=self.class_weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            softcap=self.softcap,
            rescale=self.rescale,
        )

    def probabilities(self, hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The class probabilities (..., C) of the layer, all at once."""
        _check_layer(hidden, weight, bias)
        logits = _capped(F.linear(hidden, weight, bias), self.softcap)
        return probabilities(logits, self.t2, axis=-1, rescale=self.rescale)

    def extra_repr(self) -> str:
        return f"t1={self.t1}, t2={self.t2}" + ", rescale=True" * self.rescale


class _LinearLoss(torch.autograd.Function):
    """(*inputs, options, compute) -> the loss, by `_chunks` or `device_chunks`.

    Unless the loss is per row, forward also computes the gradients. The first backward scales those tensors in place
    and returns them; later ones recompute them.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *tensors, options, compute = arguments
        ctx.save_for_backward(*tensors, options.class_weight)  # so that autograd notices if one has changed
        ctx.options, ctx.compute = options._replace(class_weight=None), compute
        needs = ctx.needs_input_grad[:5] if options.loss.reduction != "none" else _NOTHING
        loss, gradients = compute(Inputs(*tensors), options, needs=needs)
        if any(needs):
            ctx.gradients = gradients
        return loss

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "linear_bi_tempered_logistic_loss has first derivatives only (create_graph=True asks for more):"
                " use bi_tempered_logistic_loss on the logits"
            )
        gradients, per_row = vars(ctx).pop("gradients", None), ctx.options.loss.reduction == "none"
        if gradients is None:
            *tensors, class_weight = ctx.saved_tensors
            options, needs = ctx.options._replace(class_weight=class_weight), ctx.needs_input_grad[:5]
            _, gradients = ctx.compute(Inputs(*tensors), options, needs=needs, g=g if per_row else None)
        if not per_row:
            scale = implementation("triton").scale_ if ctx.compute is device_chunks else _scale
            gradients = tuple(None if x is None else scale(x, g, x.dim() - 1) for x in gradients)
        return *gradients, None, None, None


def _scale(gradient: Tensor, g: Tensor, _: int) -> Tensor:
    return gradient.mul_(g)


def _apply(inputs: Inputs, options: LayerOptions) -> Tensor:
    compute = device_chunks if _by_triton(inputs, options) else _chunks
    if torch.is_grad_enabled():
        if hooks.in_torch_func():
            raise RuntimeError(
                "linear_bi_tempered_logistic_loss has first derivatives by backward() only, not by torch.func:"
                " use bi_tempered_logistic_loss on the logits"
            )
        return _LinearLoss.apply(*inputs, options, compute)
    return compute(inputs, options, needs=_NOTHING)[0]


def _by_triton(inputs: Inputs, options: LayerOptions) -> bool:
    """Whether `device_chunks` can compute this; otherwise `_chunks` does."""
    hidden, weight, _, t1, t2, target = inputs
    if options.shards is not None or len(hidden) == 0 or target.is_floating_point():
        return False
    if options.loss.label_smoothing > 0 or options.softcap is not None:
        return False
    chunk = hidden.detach().new_empty((0, len(weight)))  # like one of logits, but without rows
    return kernels.choose(chunk, target[:0], temperatures=(t1, t2)) == "triton"


def _chunks(
    inputs: Inputs, options: LayerOptions, *, needs: tuple[bool, ...], g: Tensor | None = None
) -> tuple[Tensor, Gradients]:
    """Return the loss and the gradients it `needs`: of the loss, or if it is per row, of sum(g * loss)."""
    hidden, weight, bias, t1, t2, target = inputs
    reduction = options.loss.reduction
    of_loss = options.loss._replace(reduction="none" if reduction == "none" else "sum")
    wide = compute_dtype(hidden.dtype)
    by_hidden = torch.empty_like(hidden) if needs[0] else None
    by_weight = torch.zeros_like(weight, dtype=wide) if needs[1] else None
    by_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and needs[2] else None
    by_t = [hidden.new_empty(len(hidden), dtype=wide) if needed else None for needed in needs[3:]]
    losses = []
    shards = options.shards
    step = rows_per_chunk(len(hidden), len(weight) if shards is None else shards.largest, weight.shape[1])
    for start in range(0, len(hidden), step):
        rows = slice(start, start + step)
        logits = F.linear(hidden[rows], weight, bias)
        first = None if t1 is None else t1[rows].detach().requires_grad_(needs[3])
        second = None if t2 is None else t2[rows].detach().requires_grad_(needs[4])
        with torch.set_grad_enabled(any(needs)):
            capped = _capped(logits.requires_grad_(any(needs)), options.softcap)
            of_chunk = with_tensors(of_loss, t1=first, t2=second)
            arguments = capped, target[rows], options.class_weight, of_chunk
            loss = class_loss(*arguments, wide) if shards is None else sharded_class_loss(*arguments, shards, wide)
            losses.append(loss.detach())
            if not any(needs):
                continue
            moving = [logits, *(t for t in (first, second) if t is not None and t.requires_grad)]
            by_logits, *by_rows = torch.autograd.grad(loss, moving, None if g is None else g[rows])
        if by_hidden is not None:
            torch.mm(by_logits, weight, out=by_hidden[rows])
        if by_weight is not None:
            by_weight += by_logits.t() @ hidden[rows]
        if by_bias is not None:
            by_bias += by_logits.sum(0, dtype=wide)
        for of_all, of_rows in zip((x for x in by_t if x is not None), by_rows, strict=True):
            of_all[rows] = of_rows
    if by_hidden is not None and shards is not None:
        by_hidden = sum_over_processes(by_hidden.to(wide), shards.group).to(hidden.dtype)
    gradients = [by_hidden, by_weight, by_bias, *by_t]
    if reduction == "none":
        total = torch.cat(losses) if losses else hidden.new_empty(0, dtype=wide)
    else:
        total = torch.stack(losses).sum() if losses else hidden.new_zeros((), dtype=wide)
    if reduction == "mean":
        divisor, empty = safe_divisor(target, options.class_weight, options.loss, wide)
        total = divide(total, divisor, empty)
        gradients = [None if x is None else x.div_(divisor).masked_fill_(empty, 0.0) for x in gradients]
    by_hidden, by_weight, by_bias, *by_t = gradients
    by_weight = None if by_weight is None else by_weight.to(weight.dtype)
    by_bias = None if by_bias is None or bias is None else by_bias.to(bias.dtype)
    return total, (by_hidden, by_weight, by_bias, *by_t)


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _check_softcap(softcap: float | None) -> None:
    if softcap is not None and check_number(softcap, "softcap") <= 0:
        raise ValueError(f"softcap must be greater than 0, got {softcap}")


def _check_layer(hidden: Tensor, weight: Tensor, bias: Tensor | None, *, least: int = 1) -> None:
    for name, x in (("hidden", hidden), ("weight", weight), *((("bias", bias),) if bias is not None else ())):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if not x.is_floating_point():
            raise RuntimeError(f"{name} must hold floating-point numbers, got {x.dtype}")
        as_hidden = x.dtype == hidden.dtype
        if torch.is_autocast_enabled(hidden.device.type):  # converts all but float64
            as_hidden |= torch.float64 not in (x.dtype, hidden.dtype)
        if x.device != hidden.device or not as_hidden:
            raise RuntimeError(
                f"{name} must be of the device and dtype of hidden, {hidden.device} and {hidden.dtype},"
                f" got {x.device} and {x.dtype}"
            )
    if hidden.dim() == 0 or weight.dim() != 2 or weight.shape[1] != hidden.shape[-1] or len(weight) < least:
        raise ValueError(
            "hidden must be of shape (..., H) and weight of shape (C, H) with at least one class,"
            f" got {tuple(hidden.shape)} and {tuple(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be of shape {tuple(weight.shape[:1])}, got {tuple(bias.shape)}")
