"""The recipe behind `bitempered reproduce figure1`, which needs no data."""

from collections.abc import Callable
from pathlib import Path

import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from bitempered.experiments.recipes.plans import Options, Plan
from bitempered.experiments.report import png, write
from bitempered.experiments.runs import Progress
from bitempered.torch import bi_tempered_logistic_loss, exp_t, log_t

__all__ = ["figure1", "plan"]

Curve = Callable[[Tensor, float], Tensor]  # of the points and one temperature


def plan(what: str, options: Options) -> Plan:
    def make(folder: Path, progress: Progress) -> None:
        write(folder, {"figure1.png": png(figure1())})

    return Plan("figure1", make, "figure1.png")


def figure1() -> Figure:
    """Draw the paper's figure 1: log_t, exp_t, and the loss of two classes against the first one's activation."""
    # The figure object itself, not pyplot: it needs no display and keeps no global state.
    figure = Figure(figsize=(15, 4.2), dpi=150, layout="constrained")
    logarithm, exponential, bounded, heavy = figure.subplots(1, 4)

    temperatures = (0.0, 0.5, 1.0, 1.5, 2.0)
    draw(logarithm, log_t, "t", temperatures, 1e-4, 4.0)
    logarithm.set(title="(a) tempered logarithm\n" r"$\log_t$", xlabel="$x$", ylabel=r"$\log_t(x)$", ylim=(-4, 3))
    draw(exponential, exp_t, "t", temperatures, -4.0, 2.5)
    exponential.set(title="(b) tempered exponential\n" r"$\exp_t$", xlabel="$x$", ylabel=r"$\exp_t(x)$", ylim=(-0.1, 4))

    draw(bounded, lambda a, t1: loss(a, t1, 1.2), "t_1", (0.0, 0.25, 0.5, 0.75, 1.0), -10.0, 10.0)
    bounded.set(title="(c) bi-tempered logistic loss\n" r"$t_2 = 1.2$ fixed, $t_1 \leq 1$", ylim=(-0.1, 6))
    draw(heavy, lambda a, t2: loss(a, 0.8, t2), "t_2", (1.0, 1.2, 1.5, 2.0, 4.0), -10.0, 10.0)
    heavy.set(title="(d) bi-tempered logistic loss\n" r"$t_1 = 0.8$ fixed, $t_2 \geq 1$", ylim=(-0.1, 6))
    for axes in (bounded, heavy):
        axes.set(xlabel=r"activation $\hat a_1$ of the true class ($\hat a_2 = 0$)", ylabel="loss")
    return figure


def loss(a: Tensor, t1: float, t2: float) -> Tensor:
    """The loss of two classes with activations (a, 0), where the label is the first."""
    logits = torch.stack([a, torch.zeros_like(a)], dim=-1)
    return bi_tempered_logistic_loss(logits, torch.zeros(len(a), dtype=torch.int64), t1, t2, reduction="none")


def draw(axes: Axes, curve: Curve, symbol: str, temperatures: tuple[float, ...], start: float, end: float) -> None:
    """Draw one curve per temperature: black at 1, blue below and red above, paler near 1."""
    x = torch.linspace(start, end, 1001, dtype=torch.float64)
    cold = sorted(t for t in temperatures if t < 1)
    hot = sorted((t for t in temperatures if t > 1), reverse=True)
    for t in temperatures:
        side, shades = (cold, "Blues") if t < 1 else (hot, "Reds")
        color = "black" if t == 1 else colormaps[shades](1 - 0.8 * side.index(t) / len(side))
        axes.plot(x, curve(x, t), color=color, linewidth=1.6, label=f"${symbol} = {t:g}$")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
