"""The loss of a linear layer on a GPU, by the Triton kernels, with large matrix products and little memory.

Three products with all rows and classes would do: the logits, the gradient of the layer's input and that of its weight.
But the logits are too large to keep, and summing the weight's gradient over chunks of rows would take float32. So most
rows take four products. They go through the layer and the loss in chunks of rows, and leave eight numbers each, which
give the gradient of any class from its logit. Then the weight's gradient is computed a block of classes at a time: the
logits of the block once more, their gradient, and one product over all rows.

Other rows need three, if they are kept: as many as the layer has features. Their logits, and the gradient in its place,
take as much memory as the weight's gradient, and lie there. They are stored in blocks of classes, block by block, so
that the product of a block leaves its part of the weight's gradient where its logits were.
"""

import torch
from torch import Tensor

from bitempered.kernels.implementations import implementation
from bitempered.kernels.targets import mean_divisor
from bitempered.torch.autograd import with_tensors
from bitempered.torch.layer_inputs import Gradients, Inputs, LayerOptions, rows_per_chunk

_LEAST_CLASSES = 8192  # of fewer, logits are not what takes memory
# From 2.9 on torch adds products of half precision in float32, on NVIDIA's GPUs.
_SUMS_IN_FLOAT32 = torch.version.hip is None and tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 9)


def device_chunks(
    inputs: Inputs, options: LayerOptions, *, needs: tuple[bool, ...], g: Tensor | None = None
) -> tuple[Tensor, Gradients]:
    """Return the loss and the gradients it `needs`: of the loss, or if it is per row, of sum(g * loss)."""
    call = _Call(inputs, options, needs, g)
    (n, features), classes = inputs.hidden.shape, len(inputs.weight)
    kept = min(n, features) if needs[1] and _can_keep(inputs) else 0
    block = _even(classes, block_size(n, classes, features), 128)
    blocks = -(-classes // block)
    state = inputs.hidden.new_empty((8, n - kept), dtype=torch.float32) if needs[1] and n > kept else None
    losses: list[Tensor] = []
    by_weight = None
    if kept:
        by_weight = inputs.weight.new_empty((blocks * block, features))
        call.apart(losses, kept, state, by_weight.view(-1))
        logits = by_weight.view(blocks, features, block)[:, :kept]
        losses.insert(0, call.together(logits, n * block))
    else:
        call.apart(losses, 0, state)
        logits = None
        by_weight = torch.empty_like(inputs.weight) if needs[1] else None
    if by_weight is not None:
        by_weight = by_weight[:classes]
        call.into_weight(by_weight, block, kept, logits, state)
    by_bias = call.by_bias
    if by_bias is not None and inputs.bias is not None:
        by_bias = (by_bias / call.scale).to(inputs.bias.dtype)
    total = torch.cat(losses) if options.loss.reduction == "none" else torch.stack(losses).sum()
    return total, (call.by_hidden, by_weight, by_bias, None, None)


class _Call:
    """What the parts of one call share: its inputs, and the gradients that they fill."""

    def __init__(self, inputs: Inputs, options: LayerOptions, needs: tuple[bool, ...], g: Tensor | None) -> None:
        self.triton = implementation("triton")
        self.inputs, self.options, self.with_gradient, self.g = inputs, options, any(needs), g
        hidden, bias, of_loss = inputs.hidden, inputs.bias, options.loss
        self.divisor, self.scale = None, 1
        if of_loss.reduction == "mean":
            self.divisor = mean_divisor(
                inputs.target, options.class_weight, axis=of_loss.axis, ignore_index=of_loss.ignore_index
            )
            # Divided by n at once, a gradient in float16 would vanish. `scale` divides the products, which are in
            # float32.
            self.scale = min(len(hidden), 4096)
            self.g = torch.full((), self.scale, dtype=torch.float32, device=hidden.device)
        self.by_hidden = torch.empty_like(hidden) if needs[0] else None
        self.by_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and needs[2] else None
        self.needs_weight = needs[1]

    def apart(self, losses: list[Tensor], start: int, state: Tensor | None, memory: Tensor | None = None) -> None:
        """Add the losses of the rows from `start` on, chunk by chunk, in `memory` or in new memory."""
        hidden, weight, bias = self.inputs[:3]
        (n, features), classes = hidden.shape, len(weight)
        if start == n:
            return
        # The gradient of the weight comes later: until then a chunk may use as much memory.
        most = features if memory is not None else rows_per_chunk(n, classes, features)
        step = _even(n - start, max(most, features if self.needs_weight else 0), 1)
        buffer = _matrix(hidden, step, classes, memory)
        for first in range(start, n, step):
            rows = slice(first, min(first + step, n))
            logits = _linear(hidden[rows], weight, bias, buffer)
            of_rows = None if state is None else state[:, rows.start - start : rows.stop - start]
            losses.append(self._loss(logits, rows, state=of_rows))
            if self.by_hidden is not None:
                _product(logits, weight, self.scale, self.by_hidden[rows])
            if self.by_bias is not None:
                self.by_bias += logits.sum(0, dtype=torch.float32)

    def together(self, logits: Tensor, room: int) -> Tensor:
        """The loss of the rows that `logits`, (blocks, rows, classes of a block), is for; it then has their gradient.

        In half precision the gradient of the layer's input, a sum over blocks, is summed in float32, for as many rows
        at a time as take the memory of `room` logits.
        """
        hidden, weight, bias = self.inputs[:3]
        kept, block = logits.shape[1:]
        chunks = [slice(start, start + block) for start in range(0, len(weight), block)]
        for of_block, chunk in zip(logits, chunks, strict=True):
            _linear(hidden[:kept], weight[chunk], None if bias is None else bias[chunk], of_block)
        loss = self._loss(logits, slice(0, kept), classes=len(weight))
        if self.by_hidden is not None:
            step = _even(kept, max(128, room * hidden.element_size() // (4 * hidden.shape[1])), 128)
            for out, of_rows in zip(self.by_hidden[:kept].split(step), logits.split(step, dim=1), strict=True):
                _sum_products(of_rows, weight, self.scale, out)
        if self.by_bias is not None:
            for of_block, of_bias in zip(logits, self.by_bias.split(block), strict=True):
                of_bias += of_block[:, : len(of_bias)].sum(0, dtype=torch.float32)
        return loss

    def into_weight(
        self, by_weight: Tensor, block: int, kept: int, logits: Tensor | None, state: Tensor | None
    ) -> None:
        """The weight's gradient, block by block: in `logits` the first rows' is kept, the others' is computed again."""
        hidden, weight, bias, t1, t2, target = self.inputs
        rows = slice(kept, None)
        options = with_tensors(self.options.loss, t1=_rows_of(t1, rows), t2=_rows_of(t2, rows))
        buffer = _matrix(hidden, len(hidden), min(block, len(weight)))
        for i, start in enumerate(range(0, len(weight), block)):
            chunk = slice(start, start + block)
            part = buffer[:, : len(weight[chunk])]
            if logits is not None:
                part[:kept] = logits[i, :, : part.shape[1]]
            if state is not None:
                again = _linear(hidden[rows], weight[chunk], None if bias is None else bias[chunk], buffer[rows])
                self.triton.class_gradients_(again, target[rows], state, options, first=start)
            _product(part.t(), hidden, self.scale, by_weight[chunk])

    def _loss(self, logits: Tensor, rows: slice, state: Tensor | None = None, classes: int | None = None) -> Tensor:
        _, _, _, t1, t2, target = self.inputs
        loss: Tensor = self.triton.chunk_loss(
            logits, target[rows], self.options.class_weight,
            with_tensors(self.options.loss, t1=_rows_of(t1, rows), t2=_rows_of(t2, rows)),
            divisor=self.divisor, g=self.g if self.g is None or self.g.dim() == 0 else self.g[rows],
            with_gradient=self.with_gradient, state=state, classes=classes,
        )  # fmt: skip
        return loss


def _can_keep(inputs: Inputs) -> bool:
    """Whether logits can lie where the weight's gradient will, and products be added in float32."""
    hidden, weight = inputs[:2]
    many = len(weight) >= _LEAST_CLASSES and weight.is_contiguous()
    return many and (_SUMS_IN_FLOAT32 or hidden.dtype == torch.float32)


def _rows_of(t: Tensor | None, rows: slice) -> Tensor | None:
    return None if t is None else t[rows]


def _linear(hidden: Tensor, weight: Tensor, bias: Tensor | None, buffer: Tensor) -> Tensor:
    out = buffer[: len(hidden), : len(weight)]
    if bias is None:
        return torch.mm(hidden, weight.t(), out=out)
    return torch.addmm(bias, hidden, weight.t(), out=out)


def _product(a: Tensor, b: Tensor, divisor: int, out: Tensor) -> None:
    torch.addmm(out, a, b, beta=0, alpha=1 / divisor, out=out)


def _sum_products(blocks: Tensor, weight: Tensor, divisor: int, out: Tensor) -> None:
    """Write the sum over blocks of classes of their gradients times their weights, added in float32, to `out`."""
    total = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
    for i, (of_block, b) in enumerate(zip(blocks, weight.split(blocks.shape[2]), strict=True)):
        a, factors = of_block[:, : len(b)], {"beta": min(i, 1), "alpha": 1 / divisor}
        if a.dtype == torch.float32 or a.is_cpu:  # on the CPU kernels are only interpreted, and torch mixes no dtypes
            torch.addmm(total, a.float(), b.float(), **factors, out=total)
        else:
            torch.addmm(total, a, b, **factors, out_dtype=torch.float32, out=total)
    if total is not out:
        out.copy_(total)


def _matrix(like: Tensor, rows: int, classes: int, memory: Tensor | None = None) -> Tensor:
    """An empty matrix whose rows start at multiples of 16 bytes, which makes matrix products fast."""
    width = -(-classes // 8) * 8
    return like.new_empty((rows, width)) if memory is None else memory[: rows * width].view(rows, width)


def _even(n: int, most: int, multiple: int) -> int:
    """A chunk size of at most about `most`, a multiple of `multiple`, with few chunks and the last not much smaller."""
    return -(-n // (-(-n // most) * multiple)) * multiple


def block_size(rows: int, classes: int, features: int) -> int:
    """The number of classes whose logits take as much memory as the hidden layer, or as a sixteenth of the weight.

    If that is many, fewer: a power of 2 or 1.5 times one. Of these there are few, and a kernel is compiled for each.
    They are even tiles of a product: of 4,096 rows and 3,072 classes, 97 % of the places on 132 processors, of 3,840
    classes 91 %.
    """
    limit = max(256, features, classes * features // (16 * rows))
    if limit == max(256, features) <= 2048:
        return limit
    power = 2 ** ((limit - 1).bit_length() - 1)
    return power * 3 // 2 if power * 3 // 2 < limit else power
