"""Temperatures that change while a model trains. Needs no framework.

>>> schedule = anneal((1, 1), (0.5, 1.5), begin=10, finish=20)
>>> [schedule(epoch) for epoch in (0, 15, 30)]
[(1.0, 1.0), (0.75, 1.25), (0.5, 1.5)]

A loss has its temperatures as attributes. PyTorch:

    for step, (x, y) in enumerate(batches):
        criterion.t1, criterion.t2 = schedule(step)
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()

Lightning, for a module with a loss `criterion`:

    class Anneal(lightning.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            module.criterion.t1, module.criterion.t2 = schedule(trainer.global_step)

Hugging Face, for a Trainer whose `compute_loss_func` calls `criterion`:

    class Anneal(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            criterion.t1, criterion.t2 = schedule(state.global_step)

Keras, for a model compiled with `metrics=[loss.temperatures]`:

    class Anneal(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            loss.t1, loss.t2 = schedule(epoch)

JAX, where `update` is a function under `jax.jit` with t1 and t2 among its arguments, and compiles once:

    for step, (x, y) in enumerate(batches):
        params = update(params, x, y, *schedule(step))
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bitempered.checks import check_number, check_temperatures

__all__ = ["anneal", "default"]

Pair = tuple[float, float]
SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda x: x,
    "cosine": lambda x: (1 - math.cos(math.pi * x)) / 2,
}


def anneal(start: Pair, end: Pair, *, begin: float, finish: float, shape: str = "linear") -> "Anneal":
    """Return a function from a step (or an epoch) to (t1, t2): `start` up to `begin`, `end` from `finish` on.

    In between, both temperatures move together, along a line or (`shape="cosine"`) along half a cosine, which starts
    and ends slowly. Any unit of time will do, if `begin` and `finish` use the same. The function can be pickled.
    """
    begin, finish = check_number(begin, "begin"), check_number(finish, "finish")
    if begin > finish:
        raise ValueError(f"begin must not be after finish, got begin = {begin:g} and finish = {finish:g}")
    if shape not in SHAPES:
        raise ValueError(f"shape must be one of {', '.join(SHAPES)}, got {shape!r}")
    for pair, name in ((start, "start"), (end, "end")):
        if not isinstance(pair, Sequence) or len(pair) != 2:
            raise TypeError(f"{name} must be a pair of temperatures (t1, t2), got {pair!r}")
    return Anneal(check_temperatures(*start), check_temperatures(*end), begin, finish, shape)


@dataclass(frozen=True)
class Anneal:
    """A function from a step to (t1, t2), see `anneal`. Not a closure: estimators are pickled with their schedule."""

    start: Pair
    end: Pair
    begin: float
    finish: float
    shape: str

    def __call__(self, step: float) -> Pair:
        step = float(step)  # a NumPy number would give temperatures that torch.compile cannot trace
        if not -math.inf <= step <= math.inf:  # NaN; torch.compile cannot trace math.isnan
            raise ValueError("step must be a number, got nan")
        if step >= self.finish:
            return self.end
        part = SHAPES[self.shape]((step - self.begin) / (self.finish - self.begin)) if step > self.begin else 0.0
        (t1, t2), (t1_end, t2_end) = self.start, self.end
        first, second = t1 + part * (t1_end - t1), t2 + part * (t2_end - t2)
        return first, max(first, second)  # rounding may put t1 above t2


@dataclass(frozen=True)
class Legs:
    """A function from a step to (t1, t2): schedules in turn, each up to the step where it finishes."""

    legs: tuple[Anneal, ...]

    def __call__(self, step: float) -> Pair:
        return next((leg for leg in self.legs if step < leg.finish), self.legs[-1])(step)


def default(classes: int, steps: float) -> Legs:
    """The schedule to try first, for a run of `steps` steps (or epochs): cross-entropy at first, robust later.

    Temperatures move from (1, 1) to (0, t2) between 5 and 40 % of the run, for the loss as it is, without `rescale`, at
    the learning rate of cross-entropy. t2 is 1.75 for ten classes, and then rises slowly to 2.25 at the end of the run,
    so that memorising does not catch up. For other numbers of classes K^(t2 - 1), the scale of the logits, stays what
    it is there, but t2 is at most 2, and 2.5 at the end. More than 25 classes take longer to learn: the move begins
    later, after 20 % of the run from 100 classes on, and lasts as long, and the second rise shrinks, to none from 100
    classes on. benchmarks/classes.md has measurements.

    Cross-entropy needs steps of its own, and more with many classes: in a short run `anneal` with a later `begin` can
    be better. So can the first leg alone, `default(classes, steps).legs[0]`: a small network in a short run may not
    keep up with the second, above all with weight decay (benchmarks/decay.md).

    >>> schedule = default(10, 100)  # a function from a step to (t1, t2)
    >>> schedule(5), schedule(40), schedule(100)
    ((1.0, 1.0), (0.0, 1.75), (0.0, 2.25))
    >>> default(2, 100)(100), default(100, 100)(20), default(100, 100)(100)
    ((0.0, 2.5), (1.0, 1.0), (0.0, 1.38))
    """
    count, steps = check_number(classes, "classes", least=1), check_number(steps, "steps", least=0)
    later = min(max(0.0, 0.002 * (count - 25)), 0.15)
    scale = math.log(10) / math.log(max(count, 2))
    middle = (0.0, round(1 + min(1.0, 0.75 * scale), 2))
    end = (0.0, round(1 + min(1.5, (1.25 - later / 0.3) * scale), 2))
    finish = (0.4 + later) * steps
    fast = anneal((1.0, 1.0), middle, begin=(0.05 + later) * steps, finish=finish)
    return Legs((fast, anneal(middle, end, begin=finish, finish=steps)))
