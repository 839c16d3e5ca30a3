"""The differentiable operations behind `bitempered.torch`.

Each solves once in forward. Backward uses `core`'s closed forms in plain torch operations on what forward saved, so
it never iterates and can itself be differentiated: the extra output (the log-probabilities, or the per-row `m`) ties
the graph of a second derivative back to the logits and to t2.

A temperature is a number, or a tensor of the shape and dtype of the loss per example, with or without a gradient.
"""

from typing import Any, TypeAlias

import torch
from torch import Tensor

from bitempered import core, encoding, pushforward
from bitempered.checks import FLOATS
from bitempered.encoding import encode_binary, encode_classes, namespace
from bitempered.kernels import hooks
from bitempered.kernels.options import LossOptions

xp = namespace(
    torch,
    max=lambda x, axis: torch.amax(x.detach(), dim=axis, keepdim=True),
    sum=lambda x, axis: torch.sum(x, dim=axis, keepdim=True),
    eps=lambda x: torch.finfo(x.dtype).eps,
    cast=lambda x, like: x.to(like.dtype),
    widen=lambda x: x.to(compute_dtype(x.dtype)),
    class_indices=lambda classes, target: torch.arange(classes, device=target.device),
    expand_dims=torch.unsqueeze,
)


Temperature: TypeAlias = float | Tensor
_COMPUTE_DTYPES = {getattr(torch, name): getattr(torch, encoding.compute_dtype(name)) for name in FLOATS}


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return _COMPUTE_DTYPES.get(dtype, torch.float32)


def without_tensors(options: LossOptions) -> tuple[LossOptions, tuple[Tensor | None, Tensor | None]]:
    """Return the options with None for temperatures that are tensors, and those tensors, which autograd must save."""
    if type(options.t1) is float and type(options.t2) is float:  # quicker than the checks below
        return options, (None, None)
    t1 = options.t1 if isinstance(options.t1, Tensor) else None
    t2 = options.t2 if isinstance(options.t2, Tensor) else None
    numbers = options if t1 is None else options._replace(t1=None)
    return numbers if t2 is None else numbers._replace(t2=None), (t1, t2)


def with_tensors(options: LossOptions, t1: Tensor | None = None, t2: Tensor | None = None) -> LossOptions:
    """Undo `without_tensors`."""
    options = options if t1 is None else options._replace(t1=t1)
    return options if t2 is None else options._replace(t2=t2)


def along(t: Temperature, axis: int) -> Temperature:
    """Temperatures per example, with the class axis inserted."""
    return t.unsqueeze(axis) if isinstance(t, Tensor) else t


class _LogSoftmax(torch.autograd.Function):
    """(logits, t, axis) -> log-probabilities, and lambda_t with the axis kept at length 1, as a tensor t has it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(logits: Tensor, t: Temperature, axis: int) -> tuple[Tensor, Tensor]:
        a = logits.to(compute_dtype(logits.dtype))
        u, m = core.solve(a, t, axis=axis, xp=xp)
        return core.log_probs(u, m, t, xp=xp), core.log_partition(a, m, t, axis=axis, xp=xp)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        logits, t, ctx.axis = inputs
        ctx.dtype = logits.dtype
        tensor, ctx.t = (t, None) if isinstance(t, Tensor) else (None, t)
        ctx.save_for_backward(output[0], tensor)
        ctx.save_for_forward(output[0], tensor)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, g_log_p: Tensor | None, g_lambda: Tensor | None) -> tuple[Any, ...]:
        log_p, t = ctx.saved_tensors
        t, axis = ctx.t if t is None else t, ctx.axis
        if g_log_p is None and g_lambda is None:
            return None, None, None
        by_a = core.softmax_pullback(log_p, t, g_log_p=g_log_p, g_lambda=g_lambda, axis=axis, xp=xp).to(ctx.dtype)
        if not ctx.needs_input_grad[1]:
            return by_a, None, None
        by_t = 0.0 if g_lambda is None else g_lambda * core.log_partition_slope(log_p, t, axis=axis, xp=xp)
        if g_log_p is not None:
            inside = torch.where(log_p == -torch.inf, 0.0, g_log_p)
            by_t = by_t + xp.sum(inside * core.log_probs_slope(log_p, t, axis=axis, xp=xp), axis=axis)
        return by_a, by_t, None


class _LogSoftmaxForwardMode(_LogSoftmax):
    @staticmethod
    def jvp(ctx: Any, d_logits: Tensor | None, dt: Tensor | None, _: None) -> tuple[Tensor, Tensor]:
        log_p, t = ctx.saved_tensors
        t, axis = ctx.t if t is None else t, ctx.axis
        da = None if d_logits is None else d_logits.to(log_p.dtype)
        return pushforward.of_softmax(log_p, t, da=da, dt=dt, axis=axis, xp=xp)


class _Loss(torch.autograd.Function):
    """(logits, target, class weights, *options) -> loss per example, and its `m`.

    The fields of the options are separate arguments, in their order: autograd must see temperatures that are tensors,
    and vmap takes no tuple here. Both outputs keep the class axis at length 1, as these temperatures do. An axis of
    None means binary: one logit a against a fixed 0, on a last class axis that exists only inside. Forward saves the
    inputs and `m`.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        logits: Tensor,
        target: Tensor,
        weight: Tensor | None,
        t1: Temperature,
        t2: Temperature,
        axis: int | None,
        label_smoothing: float,
        ignore_index: int,
        reduction: str,
        rescale: bool,
    ) -> tuple[Tensor, Tensor]:  # not *options: torch.compile counts the arguments
        options = LossOptions(t1, t2, axis, label_smoothing, ignore_index, reduction, rescale)
        a, weighted, axis = encode(logits, target, weight, options)
        u, m = core.solve(a, t2, axis=axis, xp=xp)
        return core.weighted_loss(weighted, core.log_probs(u, m, t2, xp=xp), t1, axis=axis, xp=xp), m

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        logits, target, weight, *values = inputs
        ctx.options, tensors = without_tensors(LossOptions(*values))
        ctx.save_for_backward(logits, target, weight, output[1], *tensors)
        ctx.save_for_forward(logits, target, weight, output[1], *tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, g_loss: Tensor | None, g_m: Tensor | None) -> tuple[Any, ...]:
        logits, target, weight, m, options = _saved(ctx)
        _, needs_y, _, needs_t1, needs_t2, *others = ctx.needs_input_grad
        weighted, at, axis = _at_solution(logits, target, weight, m, options)
        t1, t2, binary = options.t1, options.t2, options.axis is None
        grad = grad_target = grad_t1 = grad_t2 = None
        if g_loss is not None:
            grad = g_loss * core.weighted_gradient(weighted, at, t1, t2, axis=axis, xp=xp)
            if needs_y:
                by_z = core.target_gradient(weighted, at.log_p, t1, axis=axis, xp=xp)
                by_y = (1 - options.label_smoothing) * by_z
                by_y = g_loss * (by_y if weighted.w is None else by_y * weighted.w)
                grad_target = (by_y[..., 1] - by_y[..., 0] if binary else by_y).to(target.dtype)
            if needs_t1 or needs_t2:
                slopes = core.temperature_gradients(weighted, at, t1, t2, axis=axis, xp=xp)
                grad_t1, grad_t2 = (g_loss * slope for slope in slopes)
        if g_m is not None:
            grad = (0.0 if grad is None else grad) + g_m * core.normalizer_gradient(at, t2, xp=xp)
            if needs_t2:
                by_t2 = g_m * core.normalizer_slope(at, t2, axis=axis, xp=xp)
                grad_t2 = by_t2 if grad_t2 is None else grad_t2 + by_t2
        if grad is not None:
            grad = (grad[..., 1] if binary else grad).to(logits.dtype)
        grad_t1, grad_t2 = grad_t1 if needs_t1 else None, grad_t2 if needs_t2 else None
        return grad, grad_target, None, grad_t1, grad_t2, *(None for _ in others)


class _LossForwardMode(_Loss):
    @staticmethod
    def jvp(
        ctx: Any,
        d_logits: Tensor | None,
        d_target: Tensor | None,
        d_weight: Tensor | None,
        dt1: Tensor | None,
        dt2: Tensor | None,
        *_: None,
    ) -> tuple[Tensor, Tensor]:
        if d_weight is not None:
            raise RuntimeError("the loss has no derivative in its class weights (weight, pos_weight): detach them")
        logits, target, weight, m, options = _saved(ctx)
        weighted, at, axis = _at_solution(logits, target, weight, m, options)
        da, dz = d_logits, d_target
        if options.axis is None:
            da = None if da is None else torch.stack((torch.zeros_like(da), da), dim=-1)
            dz = None if dz is None else torch.stack((-dz, dz), dim=-1)
        if dz is not None:
            dz = (1 - options.label_smoothing) * (dz if weighted.w is None else dz * weighted.w)
        d_loss = pushforward.of_loss(
            weighted, at, options.t1, options.t2, da=da, dz=dz, dt1=dt1, dt2=dt2, axis=axis, xp=xp
        )
        return d_loss, pushforward.of_normalizer(at, options.t2, da=da, dt=dt2, axis=axis, xp=xp)


def _saved(ctx: Any) -> tuple[Tensor, Tensor, Tensor | None, Tensor, LossOptions]:
    """Return the logits, the target, the class weights, `m` and the options, as forward had them."""
    logits, target, weight, m, t1, t2 = ctx.saved_tensors
    return logits, target, weight, m, with_tensors(ctx.options, t1=t1, t2=t2)


def encode(
    logits: Tensor, target: Tensor, weight: Tensor | None, options: LossOptions
) -> tuple[Tensor, core.Target, int]:
    """Return the logits to compute with, the weighted target (W = 0 where it is ignored), and the class axis."""
    a, axis = logits.to(compute_dtype(logits.dtype)), options.axis
    if axis is None:
        a, y, w = encode_binary(a, target, weight, xp=xp)
        return a, core.weigh(y, w, is_label=False, axis=-1, xp=xp), -1
    smoothing, indices = options.label_smoothing, not target.is_floating_point()
    y, w, is_label = encode_classes(a, target, weight, label_smoothing=smoothing, axis=axis, indices=indices, xp=xp)
    weighted = core.weigh(y, w, is_label=is_label, axis=axis, xp=xp)
    if indices:
        kept = (target != options.ignore_index).unsqueeze(axis)
        weighted = weighted._replace(total=torch.where(kept, weighted.total, 0.0))
    return a, weighted, axis


def _at_solution(
    logits: Tensor, target: Tensor, weight: Tensor | None, m: Tensor, options: LossOptions
) -> tuple[core.Target, core.State, int]:
    """Return what the derivatives of a _Loss are made of: the weighted target, the state, and the class axis."""
    a, weighted, axis = encode(logits, target, weight, options)
    # A row that does not count may hold NaN, and a factor of 0 would not hide that from a second derivative.
    uncounted = weighted.total == 0
    a, m = torch.where(uncounted, 0.0, a), torch.where(uncounted, 0.0, m)
    return weighted, core.state(core.gaps(a, axis=axis, xp=xp), m, options.t2, axis=axis, xp=xp), axis


def log_softmax_and_partition(logits: Tensor, t: Temperature, axis: int) -> tuple[Tensor, Tensor]:
    return _apply(_mode(_LogSoftmax, _LogSoftmaxForwardMode), logits, along(t, axis), axis)


def _apply(function: Any, *arguments: Any) -> Any:
    """function.apply(*arguments). In plain eager mode, skip its support for torch.func: it inspects signatures."""
    if torch.compiler.is_compiling() or hooks.transformed() or any(map(hooks.is_wrapped, arguments)):
        return function.apply(*arguments)
    return hooks.single_level_apply(function)(*arguments)


def _mode(function: Any, with_forward_mode: Any) -> Any:
    if torch.compiler.is_compiling():
        return function  # torch.compile does not take a Function with a forward-mode rule
    levels = hooks.jvp_levels()
    if levels is None:
        return function  # its forward mode raises, which is better than the wrong number explained below
    if levels > 1:
        # torch runs a Function's jvp with forward mode off: the second derivative would be 0.
        raise RuntimeError(
            "forward mode over forward mode is not supported: take second derivatives with torch.func.hessian,"
            " jacfwd(jacrev(f)), jacrev(jacfwd(f)) or jacrev(jacrev(f))"
        )
    return with_forward_mode


def loss_per_example(logits: Tensor, target: Tensor, weight: Tensor | None, options: LossOptions) -> Tensor:
    axis = -1 if options.axis is None else options.axis
    return _loss_and_m(logits, target, weight, _along_classes(options))[0].squeeze(axis)


def gradient_per_example(logits: Tensor, target: Tensor, weight: Tensor | None, options: LossOptions) -> Tensor:
    """The gradient of each example's loss in its logits, by operations that can be differentiated and mapped."""
    options = _along_classes(options)
    _, m = _loss_and_m(logits, target, weight, options)
    weighted, at, axis = _at_solution(logits, target, weight, m, options)
    return core.weighted_gradient(weighted, at, options.t1, options.t2, axis=axis, xp=xp)


def _along_classes(options: LossOptions) -> LossOptions:
    axis = -1 if options.axis is None else options.axis
    return options._replace(t1=along(options.t1, axis), t2=along(options.t2, axis))


def _loss_and_m(logits: Tensor, target: Tensor, weight: Tensor | None, options: LossOptions) -> tuple[Tensor, Tensor]:
    return _apply(_mode(_Loss, _LossForwardMode), logits, target, weight, *options)
