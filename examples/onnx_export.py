"""A classifier as an ONNX file that gives probabilities: trained on noisy digits, exported, run by ONNX Runtime.

Its probabilities are those of torch to 1e-5, next to t2 = 1 as well. There, torch.onnx.export by itself is not as
good: ONNX has no log1p, and the log(1 + x) in its place costs about 2e-8 / abs(t2 - 1), which is 2e-5 for t2 = 1.001.
The `log1p` below keeps the digits.

    pip install torch scikit-learn onnxscript onnxruntime
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from onnxscript import opset18 as op
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from bitempered.noise import symmetric
from bitempered.torch import bi_tempered_logistic_loss, tempered_softmax

T1, T2 = 0.8, 1.2


class Classifier(nn.Module):
    """Trains on its logits; what is exported is `forward`, the probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, x: Tensor) -> Tensor:
        return tempered_softmax(self.logits(x), T2)


def log1p(x: Any) -> Any:
    """x log(w) / (w - 1) with w = 1 + x rounded: both factors err alike. x where w is 1, log(x) where w is x."""
    one = op.CastLike(op.Constant(value_float=1.0), x)
    w = op.Add(x, one)
    between = op.Mul(op.Log(w), op.Div(x, op.Sub(w, one)))
    return op.Where(op.Equal(w, one), x, op.Where(op.Equal(w, x), op.Log(x), between))


def export(model: nn.Module, x: Tensor) -> Any:
    """The ONNX program of a model, for batches of any length."""
    return torch.onnx.export(
        model.eval(),
        (x,),
        input_names=["x"],
        dynamic_shapes=({0: "batch"},),
        dynamo=True,
        verbose=False,
        custom_translation_table={torch.ops.aten.log1p.default: log1p},
    )


def main(folder: Path, steps: int = 40) -> tuple[float, float]:
    pixels, labels = load_digits(return_X_y=True)
    x, x_test, y, y_test = train_test_split((pixels / 16).astype(np.float32), labels, test_size=500, random_state=0)
    y = symmetric(y, 0.4, rng=np.random.default_rng(0), num_classes=10)

    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    for _ in range(steps):
        optimizer.zero_grad()
        bi_tempered_logistic_loss(model.logits(torch.from_numpy(x)), torch.from_numpy(y), T1, T2).backward()
        optimizer.step()

    file = folder / "digits.onnx"
    export(model, torch.from_numpy(x_test[:2])).save(file)

    (probabilities,) = onnxruntime.InferenceSession(file).run(None, {"x": x_test})
    with torch.no_grad():
        difference = np.abs(probabilities - model(torch.from_numpy(x_test)).numpy()).max()
    accuracy = (probabilities.argmax(1) == y_test).mean()
    print(f"accuracy on clean test labels {accuracy:.1%}, off from torch by at most {difference:.0e}")
    return accuracy, difference


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))
