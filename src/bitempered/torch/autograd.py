"""The differentiable operations behind `bitempered.torch`.

Each solves once in forward. Backward uses `core`'s closed forms in plain torch operations on what forward saved, so
it never iterates and can itself be differentiated: the extra output (the log-probabilities, or the per-row `m`) ties
the graph of a second derivative back to the logits and to t2.

A temperature is a number, or a tensor of the shape and dtype of the loss per example, with or without a gradient.
"""

from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from bitempered import core
from bitempered.encoding import encode_binary, encode_classes, namespace
from bitempered.kernels import hooks

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


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _split(*temperatures: Temperature) -> tuple[list[Tensor | None], list[float | None]]:
    """The tensors among temperatures, which autograd must save, and the numbers, each with None for the others."""
    tensors = [t if isinstance(t, Tensor) else None for t in temperatures]
    return tensors, [None if isinstance(t, Tensor) else t for t in temperatures]


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
        (tensor,), (ctx.t,) = _split(t)
        ctx.save_for_backward(output[0], tensor)
        ctx.save_for_forward(output[0], tensor)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, g_log_p: Tensor | None, g_lambda: Tensor | None) -> tuple[Any, ...]:
        log_p, t = ctx.saved_tensors
        t, axis = ctx.t if t is None else t, ctx.axis
        grad = grad_t = None
        if g_log_p is not None:
            grad = core.pullback(g_log_p, log_p, t, axis=axis, xp=xp)
        if g_lambda is not None:
            by_a = g_lambda * core.escort(log_p, t, axis=axis, xp=xp)
            grad = by_a if grad is None else grad + by_a
        if ctx.needs_input_grad[1]:
            if g_log_p is not None:
                inside = torch.where(log_p == -torch.inf, 0.0, g_log_p)
                grad_t = xp.sum(inside * core.log_probs_slope(log_p, t, axis=axis, xp=xp), axis=axis)
            if g_lambda is not None:
                by_t = g_lambda * core.log_partition_slope(log_p, t, axis=axis, xp=xp)
                grad_t = by_t if grad_t is None else grad_t + by_t
        return (None if grad is None else grad.to(ctx.dtype)), grad_t, None


class _LogSoftmaxForwardMode(_LogSoftmax):
    @staticmethod
    def jvp(ctx: Any, d_logits: Tensor | None, dt: Tensor | None, _: None) -> tuple[Tensor, Tensor]:
        log_p, t = ctx.saved_tensors
        t, axis = ctx.t if t is None else t, ctx.axis
        d_log_p, d_lambda = torch.zeros_like(log_p), torch.zeros_like(xp.sum(log_p, axis=axis))
        if d_logits is not None:
            da = d_logits.to(log_p.dtype)
            d_lambda = d_lambda + xp.sum(core.escort(log_p, t, axis=axis, xp=xp) * da, axis=axis)
            outside = log_p == -torch.inf
            power = torch.exp((t - 1) * torch.where(outside, 0.0, log_p))
            d_log_p = d_log_p + torch.where(outside, 0.0, power * (da - d_lambda))
        if dt is not None:
            d_log_p = d_log_p + dt * core.log_probs_slope(log_p, t, axis=axis, xp=xp)
            d_lambda = d_lambda + dt * core.log_partition_slope(log_p, t, axis=axis, xp=xp)
        return d_log_p, d_lambda


class _Loss(torch.autograd.Function):
    """(logits, target, class weights, t1, t2, axis, smoothing, ignore_index) -> loss per example, and its `m`.

    Both outputs keep the class axis at length 1, as tensors t1 and t2 do. An axis of None means binary: one logit a
    against a fixed 0, on a last class axis that exists only inside. Forward saves the inputs and `m`.
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
    ) -> tuple[Tensor, Tensor]:
        a, weighted, axis = encode(logits, target, weight, axis, label_smoothing, ignore_index)
        u, m = core.solve(a, t2, axis=axis, xp=xp)
        return core.weighted_loss(weighted, core.log_probs(u, m, t2, xp=xp), t1, axis=axis, xp=xp), m

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        tensors, numbers = _split(*inputs[3:5])
        ctx.options = *numbers, *inputs[5:]
        ctx.save_for_backward(*inputs[:3], output[1], *tensors)
        ctx.save_for_forward(*inputs[:3], output[1], *tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, g_loss: Tensor | None, g_m: Tensor | None) -> tuple[Any, ...]:
        logits, target, *_ = ctx.saved_tensors
        binary = ctx.options[2] is None
        by = _partials(ctx, ctx.needs_input_grad[1], any(ctx.needs_input_grad[3:5]))
        grad = grad_target = grad_t1 = grad_t2 = None
        if g_loss is not None:
            grad = g_loss * by.loss_by_a
            if by.loss_by_y is not None:
                by_y = g_loss * by.loss_by_y
                grad_target = by_y[..., 1] - by_y[..., 0] if binary else by_y
            if by.loss_by_t is not None:
                grad_t1, grad_t2 = (g_loss * x for x in by.loss_by_t)
        if g_m is not None:
            grad = g_m * by.m_by_a if grad is None else grad + g_m * by.m_by_a
            if by.m_by_t is not None:
                grad_t2 = g_m * by.m_by_t if grad_t2 is None else grad_t2 + g_m * by.m_by_t
        if grad is not None:
            grad = (grad[..., 1] if binary else grad).to(logits.dtype)
        if grad_target is not None:
            grad_target = grad_target.to(target.dtype)
        needs_t1, needs_t2 = ctx.needs_input_grad[3:5]
        grad_t1, grad_t2 = grad_t1 if needs_t1 else None, grad_t2 if needs_t2 else None
        return grad, grad_target, None, grad_t1, grad_t2, None, None, None


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
            raise RuntimeError("the loss is not differentiated in its class weights (weight, pos_weight); detach them")
        binary = ctx.options[2] is None
        axis = -1 if binary else ctx.options[2]
        by = _partials(ctx, d_target is not None, dt1 is not None or dt2 is not None)
        d_loss, d_m = torch.zeros_like(ctx.saved_tensors[3]), torch.zeros_like(ctx.saved_tensors[3])
        if d_logits is not None:
            da = torch.stack((torch.zeros_like(d_logits), d_logits), dim=-1) if binary else d_logits
            d_loss = d_loss + xp.sum(by.loss_by_a * da, axis=axis)
            d_m = d_m + xp.sum(by.m_by_a * da, axis=axis)
        if by.loss_by_y is not None and d_target is not None:
            dy = torch.stack((-d_target, d_target), dim=-1) if binary else d_target
            d_loss = d_loss + xp.sum(by.loss_by_y * dy, axis=axis)
        if by.loss_by_t is not None:
            for dt, loss_by_t in zip((dt1, dt2), by.loss_by_t, strict=True):
                d_loss = d_loss if dt is None else d_loss + loss_by_t * dt
            d_m = d_m if dt2 is None else d_m + by.m_by_t * dt2
        return d_loss, d_m


def encode(
    logits: Tensor, target: Tensor, weight: Tensor | None, axis: int | None, label_smoothing: float, ignore_index: int
) -> tuple[Tensor, core.Target, int]:
    """Return the logits to compute with, the weighted target (W = 0 where it is ignored), and the class axis."""
    a = logits.to(compute_dtype(logits.dtype))
    if axis is None:
        a, y, w = encode_binary(a, target, weight, xp=xp)
        return a, core.weigh(y, w, is_label=False, axis=-1, xp=xp), -1
    indices = not target.is_floating_point()
    y, w, is_label = encode_classes(a, target, weight, label_smoothing, axis, indices=indices, xp=xp)
    weighted = core.weigh(y, w, is_label=is_label, axis=axis, xp=xp)
    if indices:
        kept = (target != ignore_index).unsqueeze(axis)
        weighted = weighted._replace(total=torch.where(kept, weighted.total, 0.0))
    return a, weighted, axis


class _Partials(NamedTuple):
    """The derivatives of a _Loss and of its `m`, in the logits a, the class probabilities y, and (t1, t2)."""

    loss_by_a: Tensor
    m_by_a: Tensor
    loss_by_y: Tensor | None
    loss_by_t: tuple[Tensor, Tensor] | None
    m_by_t: Any  # in t2; None where loss_by_t is


def _partials(ctx: Any, for_target: bool, for_temperatures: bool) -> _Partials:
    logits, target, weight, m, *tensors = ctx.saved_tensors
    *numbers, axis, label_smoothing, ignore_index = ctx.options
    t1, t2 = (number if t is None else t for t, number in zip(tensors, numbers, strict=True))
    a, weighted, axis = encode(logits, target, weight, axis, label_smoothing, ignore_index)
    # A row that does not count may hold NaN, and a factor of 0 would not hide that from a second derivative.
    uncounted = weighted.total == 0
    a, m = torch.where(uncounted, 0.0, a), torch.where(uncounted, 0.0, m)
    at = core.state(core.gaps(a, axis=axis, xp=xp), m, t2, axis=axis, xp=xp)
    loss_by_a = core.weighted_gradient(weighted, at, t1, t2, axis=axis, xp=xp)
    m_by_a = core.normalizer_gradient(at, t2, xp=xp)
    loss_by_y = loss_by_t = m_by_t = None
    if for_target:
        loss_by_y = (1 - label_smoothing) * core.target_gradient(weighted, at.log_p, t1, axis=axis, xp=xp)
        loss_by_y = loss_by_y if weighted.w is None else loss_by_y * weighted.w
    if for_temperatures:
        loss_by_t = core.temperature_gradients(weighted, at, t1, t2, axis=axis, xp=xp)
        m_by_t = core.normalizer_slope(at, t2, axis=axis, xp=xp)
    return _Partials(loss_by_a, m_by_a, loss_by_y, loss_by_t, m_by_t)


def log_softmax_and_partition(logits: Tensor, t: Temperature, axis: int) -> tuple[Tensor, Tensor]:
    return _mode(_LogSoftmax, _LogSoftmaxForwardMode).apply(logits, along(t, axis), axis)


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


def loss_per_example(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    t1: Temperature,
    t2: Temperature,
    axis: int | None,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
) -> Tensor:
    function, class_axis = _mode(_Loss, _LossForwardMode), -1 if axis is None else axis
    temperatures = along(t1, class_axis), along(t2, class_axis)
    rows, _ = function.apply(logits, target, weight, *temperatures, axis, label_smoothing, ignore_index)
    return rows.squeeze(class_axis)


def gradient_per_example(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    t1: Temperature,
    t2: Temperature,
    axis: int,
    label_smoothing: float,
    ignore_index: int,
) -> Tensor:
    """The gradient of each example's loss in its logits, by operations that can be differentiated and mapped."""
    options = t1, t2, axis, label_smoothing, ignore_index
    _, m = _mode(_Loss, _LossForwardMode).apply(logits, target, weight, *options)
    context = SimpleNamespace(saved_tensors=(logits, target, weight, m, None, None), options=options)
    return _partials(context, False, False).loss_by_a
