"""The two differentiable operations that everything in `bitempered.torch` is made of.

Each solves once in forward. Backward uses `core`'s closed forms in plain torch operations on what forward saved, so
it never iterates and can itself be differentiated: the extra output (the log-probabilities, or the per-row `m`) ties
the graph of a second derivative back to the logits.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from bitempered import core
from bitempered.kernels import hooks

xp = SimpleNamespace(
    exp=torch.exp,
    expm1=torch.expm1,
    log=torch.log,
    log1p=torch.log1p,
    ones_like=torch.ones_like,
    where=torch.where,
    max=lambda x, axis: torch.amax(x, dim=axis, keepdim=True),
    sum=lambda x, axis: torch.sum(x, dim=axis, keepdim=True),
)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _solve(a: Tensor, t: float, axis: int) -> tuple[Tensor, Tensor]:
    u = core.gaps(a, axis=axis, xp=xp)
    steps = core.newton_steps(t, a.shape[axis], torch.finfo(a.dtype).eps)
    return u, core.normalizer(u, t, steps=steps, axis=axis, xp=xp)


class _LogSoftmax(torch.autograd.Function):
    """(logits, t, axis) -> log-probabilities, and lambda_t with the axis kept at length 1."""

    generate_vmap_rule = True

    @staticmethod
    def forward(logits: Tensor, t: float, axis: int) -> tuple[Tensor, Tensor]:
        a = logits.to(compute_dtype(logits.dtype))
        u, m = _solve(a, t, axis)
        return core.log_probs(u, m, t, xp=xp), xp.max(a, axis=axis) + core.phi(m, t - 1, xp=xp)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        logits, ctx.t, ctx.axis = inputs
        ctx.dtype = logits.dtype
        ctx.save_for_backward(output[0])
        ctx.save_for_forward(output[0])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, g_log_p: Tensor | None, g_lambda: Tensor | None) -> tuple[Any, ...]:
        (log_p,) = ctx.saved_tensors
        grad = 0.0
        if g_log_p is not None:
            grad = grad + core.pullback(g_log_p, log_p, ctx.t, axis=ctx.axis, xp=xp)
        if g_lambda is not None:
            grad = grad + g_lambda * core.escort(log_p, ctx.t, axis=ctx.axis, xp=xp)
        return (grad.to(ctx.dtype) if isinstance(grad, Tensor) else None), None, None


class _LogSoftmaxForwardMode(_LogSoftmax):
    @staticmethod
    def jvp(ctx: Any, logits: Tensor, *_: None) -> tuple[Tensor, Tensor]:
        (log_p,) = ctx.saved_tensors
        da = logits.to(log_p.dtype)
        d_lambda = xp.sum(core.escort(log_p, ctx.t, axis=ctx.axis, xp=xp) * da, axis=ctx.axis)
        outside = log_p == -torch.inf
        power = torch.exp((ctx.t - 1) * torch.where(outside, 0.0, log_p))
        return torch.where(outside, 0.0, power * (da - d_lambda)), d_lambda


class _Loss(torch.autograd.Function):
    """(logits, target, class weights, t1, t2, axis, smoothing, ignore_index) -> loss per example, and its `m`.

    Both outputs keep the class axis at length 1. An axis of None says binary: one logit a against a fixed 0, on a
    class axis that exists only inside. What is saved: the inputs and `m`.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        logits: Tensor,
        target: Tensor,
        weight: Tensor | None,
        t1: float,
        t2: float,
        axis: int | None,
        label_smoothing: float,
        ignore_index: int,
    ) -> tuple[Tensor, Tensor]:
        labels = axis is not None and not target.is_floating_point() and not label_smoothing
        a, y, q, total, weight, axis = encode(logits, target, weight, axis, label_smoothing, ignore_index)
        u, m = _solve(a, t2, axis)
        log_p = core.log_probs(u, m, t2, xp=xp)
        if labels:
            divergence = core.label_loss(q > 0, log_p, t1, axis=axis, xp=xp)
        else:
            divergence = core.loss(q, log_p, t1, log_y=_log_share(q, y, weight, total), axis=axis, xp=xp)
        return torch.where(total == 0, 0.0, total * divergence), m

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.options = inputs[3:]
        ctx.save_for_backward(*inputs[:3], output[1])
        ctx.save_for_forward(*inputs[:3], output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, g_loss: Tensor | None, g_m: Tensor | None) -> tuple[Any, ...]:
        logits, target, *_ = ctx.saved_tensors
        binary = ctx.options[2] is None
        loss_by_a, m_by_a, loss_by_y = _partials(ctx, ctx.needs_input_grad[1])
        grad = grad_target = None
        if g_loss is not None:
            grad = g_loss * loss_by_a
            if loss_by_y is not None:
                by_y = g_loss * loss_by_y
                grad_target = by_y[..., 1] - by_y[..., 0] if binary else by_y
        if g_m is not None:
            grad = g_m * m_by_a if grad is None else grad + g_m * m_by_a
        if grad is not None:
            grad = (grad[..., 1] if binary else grad).to(logits.dtype)
        if grad_target is not None:
            grad_target = grad_target.to(target.dtype)
        return grad, grad_target, None, None, None, None, None, None


class _LossForwardMode(_Loss):
    @staticmethod
    def jvp(
        ctx: Any, d_logits: Tensor | None, d_target: Tensor | None, d_weight: Tensor | None, *_: None
    ) -> tuple[Tensor, Tensor]:
        if d_weight is not None:
            raise RuntimeError("the loss is not differentiated in its class weights (weight, pos_weight); detach them")
        binary = ctx.options[2] is None
        axis = -1 if binary else ctx.options[2]
        loss_by_a, m_by_a, loss_by_y = _partials(ctx, d_target is not None)
        d_loss, d_m = torch.zeros_like(ctx.saved_tensors[3]), torch.zeros_like(ctx.saved_tensors[3])
        if d_logits is not None:
            da = torch.stack((torch.zeros_like(d_logits), d_logits), dim=-1) if binary else d_logits
            d_loss = d_loss + xp.sum(loss_by_a * da, axis=axis)
            d_m = d_m + xp.sum(m_by_a * da, axis=axis)
        if loss_by_y is not None and d_target is not None:
            dy = torch.stack((-d_target, d_target), dim=-1) if binary else d_target
            d_loss = d_loss + xp.sum(loss_by_y * dy, axis=axis)
        return d_loss, d_m


def encode(
    logits: Tensor, target: Tensor, weight: Tensor | None, axis: int | None, label_smoothing: float, ignore_index: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, int]:
    """The logits a to compute with, the target y, q = w y / W, W, the weights w as they broadcast, the class axis."""
    a = logits.to(compute_dtype(logits.dtype))
    kept, label = None, False
    if axis is None:
        axis = -1
        y = target.to(a.dtype)
        a, y = torch.stack((torch.zeros_like(a), a), dim=-1), torch.stack((1 - y, y), dim=-1)
        if weight is not None:
            weight = torch.stack((torch.ones_like(weight), weight), dim=-1)
    else:
        along_axis = [-1] + [1] * (a.dim() - axis - 1)
        if weight is not None:
            weight = weight.view(along_axis)
        if target.is_floating_point():
            y = target.to(a.dtype)
        else:
            y = (torch.arange(a.shape[axis], device=a.device).view(along_axis) == target.unsqueeze(axis)).to(a.dtype)
            kept, label = (target != ignore_index).unsqueeze(axis), not label_smoothing
        if label_smoothing:
            y = (1 - label_smoothing) * y + label_smoothing / a.shape[axis]
    z = y
    if weight is not None:
        weight = weight.to(a.dtype)
        if label:
            weight = torch.where(y > 0, weight, 1.0)  # those of other classes do not matter, whatever they are
        z = y * weight
    total = xp.sum(z, axis=axis)
    q = y if label else z / torch.where(total == 0, 1.0, total)
    if kept is not None:
        total = torch.where(kept, total, 0.0)
    return a, y, q, total, weight, axis


def _log_share(q: Tensor, y: Tensor, weight: Tensor | None, total: Tensor) -> Tensor | None:
    return None if weight is None else core.log_share(q, y, weight, total, xp=xp)


def _partials(ctx: Any, for_target: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """The derivatives of a _Loss in the logits a, of its `m` in a, and of the loss in the class probabilities."""
    logits, target, weight, m = ctx.saved_tensors
    t1, t2, axis, label_smoothing, ignore_index = ctx.options
    a, y, q, total, weight, axis = encode(logits, target, weight, axis, label_smoothing, ignore_index)
    # A row that does not count may hold NaN, which 0 times it would not hide from a second derivative.
    a, m = torch.where(total == 0, 0.0, a), torch.where(total == 0, 0.0, m)
    # The shift is a constant here, and m the function psi_s(lambda - shift): ties in the maximum do not matter.
    u = xp.max(a, axis=axis).detach() - a
    log_p = core.log_probs(u, m, t2, xp=xp)
    inside = core.support(u, m, t2, xp=xp)
    e = core.escort(log_p, t2, inside=inside, axis=axis, xp=xp)
    gradient = core.gradient(q, log_p, t1, t2, e=e, inside=inside, axis=axis, xp=xp)
    loss_by_a = total * gradient
    m_by_a = torch.exp((1 - t2) * m) * e
    if not for_target:
        return loss_by_a, m_by_a, None
    # W Delta(q, y_hat) in z = w y: W = sum z and q = z / W vary together.
    by_q = core.target_gradient(q, log_p, t1, xp=xp)
    mean = xp.sum(torch.where(q == 0, 0.0, q * by_q), axis=axis)
    loss_by_z = core.loss(q, log_p, t1, log_y=_log_share(q, y, weight, total), axis=axis, xp=xp) + by_q - mean
    loss_by_y = (1 - label_smoothing) * (loss_by_z if weight is None else loss_by_z * weight)
    return loss_by_a, m_by_a, torch.where(total == 0, 0.0, loss_by_y)


def log_softmax_and_partition(logits: Tensor, t: float, axis: int) -> tuple[Tensor, Tensor]:
    return _mode(_LogSoftmax, _LogSoftmaxForwardMode).apply(logits, t, axis)


def _mode(function: Any, with_forward_mode: Any) -> Any:
    if torch.compiler.is_compiling():
        return function  # torch.compile does not take a Function with a forward-mode rule
    levels = hooks.jvp_levels()
    if levels is None:
        return function  # whose forward mode raises: better than the wrong number that is explained below
    if levels > 1:
        # torch runs a Function's jvp with forward mode off: the second derivative would come out as 0.
        raise RuntimeError(
            "forward mode over forward mode is not supported: take second derivatives with torch.func.hessian,"
            " jacfwd(jacrev(f)), jacrev(jacfwd(f)) or jacrev(jacrev(f))"
        )
    return with_forward_mode


def loss_per_example(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    t1: float,
    t2: float,
    axis: int | None,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
) -> Tensor:
    function = _mode(_Loss, _LossForwardMode)
    rows, _ = function.apply(logits, target, weight, t1, t2, axis, label_smoothing, ignore_index)
    return rows.squeeze(-1 if axis is None else axis)


def gradient_per_example(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    t1: float,
    t2: float,
    axis: int,
    label_smoothing: float,
    ignore_index: int,
) -> Tensor:
    """The gradient of each example's loss in its logits, in operations that can be differentiated and mapped."""
    options = t1, t2, axis, label_smoothing, ignore_index
    _, m = _mode(_Loss, _LossForwardMode).apply(logits, target, weight, *options)
    return _partials(SimpleNamespace(saved_tensors=(logits, target, weight, m), options=options), False)[0]
