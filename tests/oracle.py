"""The loss, its gradient and the normaliser in 50 digits, from the paper, with none of the package's code.

Temperatures and logits are taken as the exact binary numbers they are, so that t = 1 + 1e-7 in float64 is itself.
Where `counts` are given, each class stands for that many equal ones.
"""

import mpmath as mp

mp.mp.dps = 50


def log_t(x, t):
    x, t = mp.mpf(x), mp.mpf(t)
    if t == 1:
        return mp.log(x) if x > 0 else -mp.inf
    if x == 0:
        return -1 / (1 - t) if t < 1 else -mp.inf
    return (x ** (1 - t) - 1) / (1 - t)


def exp_t(x, t):
    x, t = mp.mpf(x), mp.mpf(t)
    if t == 1:
        return mp.exp(x)
    base = 1 + (1 - t) * x
    if base <= 0:
        return mp.mpf(0) if t < 1 else mp.inf
    return base ** (1 / (1 - t))


def normalizer(a, t, counts=None):
    """lambda with sum exp_t(a_i - lambda) = 1, by a search between two bounds.

    It runs over the largest probability q in [1/K, 1], for which lambda = max(a) - log_t(q): for t far
    above 1, lambda itself spans hundreds of orders of magnitude.
    """
    t = mp.mpf(t)
    a = [mp.mpf(x) for x in a]
    top = max(a)
    counts = counts or [1] * len(a)
    low, high = -mp.log(sum(counts)), mp.mpf(0)

    def mass(log_q):
        lam = top - log_t(mp.exp(log_q), t)
        return mp.fsum(n * exp_t(x - lam, t) for n, x in zip(counts, a, strict=True))

    # Regula falsi (Illinois): a tenth of bisection's evaluations. The mass grows by q >= 1/K per unit of log q. Every
    # fourth step halves, for logits so huge that rounding keeps the mass from 1 and only the bounds say when to end.
    short, over, side = 1 - mass(low), mass(high) - 1, 0
    for step in range(800):
        middle = (low + high) / 2 if step % 4 == 3 else (low * over + high * short) / (over + short or 1)
        excess = mass(middle) - 1
        if abs(excess) < 1e-30 or high - low < 1e-48:  # powers of 1 / (t - 1) cost 16 of the 50 digits next to t = 1
            return top - log_t(mp.exp(middle), t)
        if excess > 0:
            high, over, short, side = middle, excess, short / 2 if side > 0 else short, 1
        else:
            low, short, over, side = middle, -excess, over / 2 if side < 0 else over, -1
    raise ArithmeticError(f"no normaliser of {a} at t = {t} after 800 steps")


def softmax(a, t, counts=None):
    lam = normalizer(a, t, counts)
    return [exp_t(mp.mpf(x) - lam, t) for x in a]


def divergence(y, p, t, counts=None):
    """The paper's Bregman divergence between two distributions, with 0 log_t 0 = 0."""
    t = mp.mpf(t)
    total = mp.mpf(0)
    for n, yi, pi in zip(counts or [1] * len(y), y, p, strict=True):
        if yi > 0:
            total += n * yi * (log_t(yi, t) - log_t(pi, t))
        total -= n * (yi ** (2 - t) - pi ** (2 - t)) / (2 - t)
    return total


def loss_and_gradient(a, y, t1, t2, w=None, counts=None):
    """W Delta(w y / W, y_hat), and its gradient in the logits by the paper's formula (appendix E)."""
    t1, t2 = mp.mpf(t1), mp.mpf(t2)
    counts = counts or [1] * len(y)

    def total(values):
        return mp.fsum(n * x for n, x in zip(counts, values, strict=True))

    z = [mp.mpf(yi) * (1 if w is None else mp.mpf(w[i])) for i, yi in enumerate(y)]
    W = total(z)
    if W == 0:
        return mp.mpf(0), [mp.mpf(0)] * len(z)
    q = [zi / W for zi in z]
    p = softmax(a, t2, counts)
    escort = [pi**t2 if pi > 0 else mp.mpf(0) for pi in p]
    norm = total(escort)
    v = [(pi - qi) * pi ** (t2 - t1) if pi > 0 else mp.mpf(0) for pi, qi in zip(p, q, strict=True)]
    v_sum = total(v)
    gradient = [W * (vi - ei / norm * v_sum) for vi, ei in zip(v, escort, strict=True)]
    return W * divergence(q, p, t1, counts), gradient
