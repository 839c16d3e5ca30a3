"""The loss of class indices on a GPU, in two Triton kernels that restate `bitempered.core` in float32.

One program holds whole rows in registers: `_forward` reads the logits once and writes each row's loss and its m,
`_backward` reads them once more and writes the gradient. So backward keeps what the PyTorch adapter keeps, and second
derivatives can go through core. tests/test_triton.py runs the kernels in Triton's interpreter.
"""

import triton
import triton.language as tl
from torch import Tensor, empty, float32

from bitempered import core

MAX_CLASSES = 65536  # beyond, a row does not fit the registers of one program


@triton.jit
def _log1p(x):
    """log(1 + x), exact also where 1 + x rounds: the error of the sum is divided out again."""
    w = 1.0 + x
    return tl.where(w == 1.0, x, tl.log(w) * (x / tl.where(w == 1.0, 1.0, w - 1.0)))


@triton.jit
def _expm1(x):
    """exp(x) - 1: near 0 the rounding of exp(x) is divided out again, elsewhere nothing cancels."""
    e = tl.exp(x)
    near = (e - 1.0) * (x / tl.where(e == 1.0, 1.0, tl.log(e)))
    return tl.where(e == 1.0, x, tl.where(tl.abs(x) < 0.5, near, e - 1.0))


@triton.jit
def _phi(v, s, S_IS_ZERO: tl.constexpr):
    return v if S_IS_ZERO else _expm1(s * v) / s


@triton.jit
def _psi(v, s, S_IS_ZERO: tl.constexpr):
    return v if S_IS_ZERO else _log1p(s * v) / s


@triton.jit
def _log_ratios(u, masked, m, s, KIND: tl.constexpr):
    """log r_i and the classes outside a finite support (the edge is inside); KIND is the sign of s = t - 1."""
    if KIND == 0:
        return tl.where(masked, float("-inf"), -u), masked
    x = s * tl.where(masked, 0.0, u) * tl.exp(-s * m)
    outside = masked | (x < -1.0)
    log_r = -_log1p(tl.where(outside | (x == -1.0), 0.0, x)) / s
    return tl.where(outside | (x == -1.0), float("-inf"), log_r), outside


@triton.jit
def _gaps(logits_ptr, stride, rows, n_rows, columns, n_classes):
    """u and the masked classes, among them the columns beyond the last class."""
    kept = (rows < n_rows)[:, None] & (columns < n_classes)[None, :]
    at = rows.to(tl.int64)[:, None] * stride + columns[None, :]
    a = tl.load(logits_ptr + at, mask=kept, other=float("-inf")).to(tl.float32)
    u = tl.max(a, axis=1)[:, None] - a
    # Rows beyond the last are all masked, and NaN; real rows of -inf are NaN too, but not beyond their last column.
    return u, (u == float("inf")) | (columns >= n_classes)[None, :], kept


@triton.jit
def _forward(
    logits_ptr, stride, target_ptr, weight_ptr, loss_ptr, m_ptr, n_rows, n_classes, ignore_index, t1, t2, s,
    KIND: tl.constexpr, T1_IS_ONE: tl.constexpr, WEIGHTED: tl.constexpr, STEPS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    u, masked, _ = _gaps(logits_ptr, stride, rows, n_rows, columns, n_classes)

    finite = tl.where(masked, 0.0, u)
    count = tl.sum(tl.where(masked, 0.0, 1.0), axis=1)
    v = tl.sum(finite, axis=1) / count * tl.exp(-s * tl.log(count))
    defined = s * v < 1.0
    bound = tl.log(count) - _psi(tl.where(defined, v, 0.0), -s, KIND == 0)
    m = tl.where(defined & (bound > 0.0), bound, 0.0)
    for _ in tl.static_range(STEPS):
        log_r, _ = _log_ratios(u, masked, m[:, None], s, KIND)
        r = tl.exp(log_r)
        r_to_t = tl.where(log_r == float("-inf"), 0.0, tl.exp(t2 * log_r))
        total = tl.sum(r, axis=1)
        log_z = tl.log(total) - m
        excess = total / tl.sum(r_to_t, axis=1) - 1.0
        m += log_z + _psi(excess * _phi(log_z, -s, KIND == 0), s, KIND == 0)

    log_r, _ = _log_ratios(u, masked, m[:, None], s, KIND)
    log_p = log_r - m[:, None]
    label = tl.load(target_ptr + rows, mask=rows < n_rows, other=0)
    is_label = columns[None, :] == label[:, None]
    d = -tl.sum(tl.where(is_label, log_p, 0.0), axis=1)
    others = tl.sum(tl.where(is_label | (columns >= n_classes)[None, :], 0.0, tl.exp((2.0 - t1) * log_p)), axis=1)
    loss = _phi(d, t1 - 1.0, T1_IS_ONE) - _phi(d, t1 - 2.0, False) + others / (2.0 - t1)
    loss = tl.where(loss < 0.0, 0.0, loss)
    kept = (label != ignore_index) & (rows < n_rows)
    if WEIGHTED:
        w = tl.load(weight_ptr + label, mask=kept, other=0.0).to(tl.float32)
        loss = tl.where(w == 0.0, 0.0, w * loss)
    tl.store(loss_ptr + rows, tl.where(kept, loss, 0.0), mask=rows < n_rows)
    tl.store(m_ptr + rows, m, mask=rows < n_rows)


@triton.jit
def _backward(
    logits_ptr, stride, target_ptr, weight_ptr, m_ptr, g_ptr, grad_ptr, n_rows, n_classes, ignore_index, t1, t2, s,
    KIND: tl.constexpr, SAME: tl.constexpr, T2_IS_ZERO: tl.constexpr, WEIGHTED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    u, masked, kept = _gaps(logits_ptr, stride, rows, n_rows, columns, n_classes)
    m = tl.load(m_ptr + rows, mask=rows < n_rows, other=0.0)[:, None]
    log_r, outside = _log_ratios(u, masked, m, s, KIND)
    log_p = log_r - m
    label = tl.load(target_ptr + rows, mask=rows < n_rows, other=0)
    y = tl.where(columns[None, :] == label[:, None], 1.0, 0.0)
    v = tl.exp(log_p) - y
    if not SAME:
        v *= tl.exp((t2 - t1) * log_p)
    escort = tl.where(outside, 0.0, 1.0) if T2_IS_ZERO else tl.exp(t2 * log_r)
    if KIND < 0:  # where the probability is 0, only the edge of the support counts
        v, escort = tl.where(outside, 0.0, v), tl.where(outside, 0.0, escort)
    v_sum, escort_sum = tl.sum(tl.where(kept, v, 0.0), axis=1), tl.sum(tl.where(kept, escort, 0.0), axis=1)
    grad = v - escort * (v_sum / escort_sum)[:, None]
    g = tl.load(g_ptr + rows, mask=rows < n_rows, other=0.0)
    factor = tl.where(label == ignore_index, 0.0, 1.0)
    if WEIGHTED:
        factor *= tl.load(weight_ptr + label, mask=(rows < n_rows) & (label != ignore_index), other=0.0).to(tl.float32)
    grad = tl.where((factor == 0.0)[:, None], 0.0, (g * factor)[:, None] * grad)
    at = rows.to(tl.int64)[:, None] * n_classes + columns[None, :]
    tl.store(grad_ptr + at, grad.to(grad_ptr.dtype.element_ty), mask=kept)


def _launch(n: int, classes: int) -> tuple[int, int, int]:
    """Rows and columns of a program's tile, and its warps.

    About 2,048 numbers, or one row where that is longer, or less where there would be few programs: a small batch is
    bound by how long one program takes.
    """
    columns = max(16, triton.next_power_of_2(classes))
    rows = max(1, 2048 // columns)
    while rows > 1 and rows * columns > 128 and n < 512 * rows:
        rows //= 2
    return rows, columns, min(32, max(1 if rows * columns < 512 else 4, rows * columns // 1024))


def _sign(x: float) -> int:
    return (x > 0) - (x < 0)


def forward(
    logits: Tensor, target: Tensor, weight: Tensor | None, t1: float, t2: float, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Loss and m of each row of logits (N, C), whose rows are contiguous, with class indices (N,)."""
    n, classes = logits.shape
    loss, m = (empty(n, dtype=float32, device=logits.device) for _ in range(2))
    rows, columns, warps = _launch(n, classes)
    if n:
        _forward[(triton.cdiv(n, rows),)](
            logits, logits.stride(0), target, weight, loss, m, n, classes, ignore_index, t1, t2, t2 - 1,
            KIND=_sign(t2 - 1), T1_IS_ONE=t1 == 1, WEIGHTED=weight is not None,
            STEPS=core.newton_steps(t2, classes, 2.0**-23), ROWS=rows, COLUMNS=columns, num_warps=warps,
        )  # fmt: skip
    return loss, m


def backward(
    logits: Tensor, target: Tensor, weight: Tensor | None, m: Tensor, g: Tensor, t1: float, t2: float, ignore_index: int
) -> Tensor:
    """The gradient of sum(g * loss) in the logits."""
    n, classes = logits.shape
    grad = empty((n, classes), dtype=logits.dtype, device=logits.device)
    rows, columns, warps = _launch(n, classes)
    if n:
        _backward[(triton.cdiv(n, rows),)](
            logits, logits.stride(0), target, weight, m, g, grad, n, classes, ignore_index, t1, t2, t2 - 1,
            KIND=_sign(t2 - 1), SAME=t1 == t2, T2_IS_ZERO=t2 == 0, WEIGHTED=weight is not None,
            ROWS=rows, COLUMNS=columns, num_warps=warps,
        )  # fmt: skip
    return grad
