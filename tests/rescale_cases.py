"""The rescaled loss K^(1-t1) L(K^(t2-1) a) in 50 digits, for the tests of every adapter."""

import mpmath as mp
import oracle

# Both sides of 1, cross-entropy itself, and the pairs of the paper's tables: mild, heavy and heavier tails.
RESCALED = [(0.5, 0.8), (1.0, 1.0), (0.8, 1.2), (1.3, 1.6), (0.2, 2.0), (0.5, 4.0)]


def rescaled_losses(logits, y, t1, t2, weight=None):
    """The losses of the rows, and the entries of their gradients in one list."""
    losses, gradients = [], []
    for a, q in zip(logits.tolist(), y.tolist(), strict=True):
        k, first, second = mp.mpf(len(a)), mp.mpf(t1), mp.mpf(t2)
        inner, outer = k ** (second - 1), k ** (1 - first)
        value, gradient = oracle.loss_and_gradient([inner * mp.mpf(x) for x in a], q, t1, t2, weight)
        losses.append(outer * value)
        gradients += [inner * outer * g for g in gradient]
    return losses, gradients
