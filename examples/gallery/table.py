"""Tables: scikit-learn's breast cancer, some training labels wrong; the same perceptron with either loss.

python examples/gallery/table.py figure.png        (pip install torch scikit-learn scipy matplotlib)
"""

import sys
import warnings

import curves
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from bitempered.noise import symmetric
from bitempered.sklearn import BiTemperedMLPClassifier

LEVELS = (0.0, 0.1, 0.2, 0.3)
LOSSES = {"cross-entropy": {"t1": 1.0, "t2": 1.0}, "bi-tempered": {}}  # without temperatures: the default schedule


warnings.filterwarnings("ignore", "training stopped at max_iter")  # which is meant: both train to the end


def accuracy(temperatures, level, seed, epochs):
    X, y = load_breast_cancer(return_X_y=True)
    X, X_test, y, y_test = train_test_split(X, y, test_size=0.4, stratify=y, random_state=seed)
    noisy = symmetric(y, level, rng=np.random.default_rng(seed), num_classes=2)
    net = BiTemperedMLPClassifier(
        **temperatures, max_iter=epochs, batch_size=32, n_iter_no_change=epochs, random_state=seed
    )
    return make_pipeline(StandardScaler(), net).fit(X, noisy).score(X_test, y_test)


def main(figure=None, levels=LEVELS, seeds=5, epochs=100):
    canvas, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
    means = {}
    for name, temperatures in LOSSES.items():
        found = np.array([[accuracy(temperatures, level, s, epochs) for s in range(seeds)] for level in levels])
        means[name] = found.mean(1).tolist()
        print(f"{name}:", ", ".join(f"{m:.1%} at {p:.0%} noise" for p, m in zip(levels, means[name], strict=True)))
        axes.errorbar(levels, means[name], found.std(1), marker="o", capsize=3, color=curves.COLOURS[name], label=name)
    axes.set(
        xlabel="share of wrong training labels", ylabel="clean test labels right", title="breast cancer, 2 classes"
    )
    axes.legend()
    curves.save(canvas, figure)
    return means


if __name__ == "__main__":
    main(*sys.argv[1:])
