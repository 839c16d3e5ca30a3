"""skorch: a scikit-learn classifier with the bi-tempered loss, trained on digits of which 40 % are labelled wrong.

pip install torch skorch
"""

from functools import partial

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from skorch import NeuralNetClassifier
from torch import nn

from bitempered.noise import symmetric
from bitempered.torch import BiTemperedLogisticLoss, tempered_softmax


def classifier(epochs: int, t1: float = 0.8, t2: float = 1.2) -> NeuralNetClassifier:
    return NeuralNetClassifier(
        nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)),
        criterion=BiTemperedLogisticLoss,
        criterion__t1=t1,
        criterion__t2=t2,
        # Without it predict_proba gives logits: skorch infers the softmax for torch's own losses only.
        predict_nonlinearity=partial(tempered_softmax, t=t2),
        optimizer=torch.optim.Adam,
        lr=2e-3,
        batch_size=64,
        max_epochs=epochs,
        iterator_train__shuffle=True,
        train_split=None,
        verbose=0,
    )


def main(epochs: int = 10) -> float:
    pixels, labels = load_digits(return_X_y=True)
    x, x_test, y, y_test = train_test_split((pixels / 16).astype(np.float32), labels, test_size=500, random_state=0)
    y = symmetric(y, 0.4, rng=np.random.default_rng(0), num_classes=10)

    torch.manual_seed(0)
    accuracy = classifier(epochs).fit(x, y).score(x_test, y_test)
    print(f"accuracy on clean test labels {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
