"""Digits with 40% wrong labels in Keras: cross-entropy, and the bi-tempered loss in its place.

    pip install keras scikit-learn torch      # or tensorflow, or jax
    KERAS_BACKEND=torch python examples/keras_digits.py     # the same numbers on each, but for rounding

One seed and one learning rate, searched for neither loss: `bitempered compare` is the comparison.
"""

import keras
import numpy as np
from sklearn.datasets import load_digits

from bitempered.keras import BiTemperedLogisticLoss
from bitempered.noise import symmetric


def data(noise: float = 0.4, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Training images and labels, of which a fraction `noise` is wrong; test images and labels, all of them right."""
    images, labels = load_digits(return_X_y=True)
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(images))
    images, labels = images[order] / 16, labels[order]
    return images[:1000], symmetric(labels[:1000], noise, rng=rng, num_classes=10), images[1000:], labels[1000:]


def network(seed: int = 0) -> keras.Model:
    """A small network; its last layer has no activation. NumPy draws the weights, so that backends start alike."""
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256, activation="relu"), keras.layers.Dense(10)])
    rng = np.random.default_rng(seed)
    model.set_weights([rng.normal(scale=len(w) ** -0.5, size=w.shape) * (w.ndim > 1) for w in model.get_weights()])
    return model


def train(loss: keras.losses.Loss, epochs: int) -> tuple[list[float], float]:
    """The training loss of each epoch, and the accuracy on the test labels after the last."""
    x, y, test_x, test_y = data()
    model = network()
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss)
    losses = model.fit(x, y, batch_size=50, epochs=epochs, shuffle=False, verbose=0).history["loss"]
    accuracy = np.mean(model.predict(test_x, verbose=0).argmax(-1) == test_y)
    return losses, float(accuracy)


def main(epochs: int = 30) -> None:
    for loss in (
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        BiTemperedLogisticLoss(t1=0.2, t2=1.2),  # takes its place
    ):
        losses, accuracy = train(loss, epochs)
        print(f"{loss.name}: loss {losses[0]:.4f} to {losses[-1]:.4f}, accuracy on clean labels {accuracy:.1%}")


if __name__ == "__main__":
    main()
