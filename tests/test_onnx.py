"""A model that ends in tempered_softmax, exported to ONNX and run by ONNX Runtime, gives torch's probabilities."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript", reason="torch.onnx needs onnxscript")

from bitempered.torch import tempered_softmax

# torch's exporter uses what torch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")


class Probabilities(nn.Module):
    def __init__(self, *temperatures):
        super().__init__()
        self.temperatures = temperatures

    def forward(self, logits):
        return [tempered_softmax(logits, t) for t in self.temperatures]


def session(temperatures, classes):
    program = torch.onnx.export(
        Probabilities(*temperatures).eval(),
        (torch.zeros(2, classes),),
        input_names=["logits"],
        dynamic_shapes=({0: "batch"},),
        dynamo=True,
        verbose=False,
    )
    return onnxruntime.InferenceSession(program.model_proto.SerializeToString())


TEMPERATURES = [0.5, 1.0, 1.2, 4.0]  # a finite support, softmax, the usual and a heavy tail


# The number of solver steps grows with the classes.
@pytest.mark.parametrize("classes", [2, pytest.param(1000, marks=pytest.mark.slow)])
def test_probabilities_equal_those_of_torch(classes):
    model = session(TEMPERATURES, classes)  # one export of all: most of its time is the exporter's own
    rng = np.random.default_rng(0)
    # Batches other than the one it was exported with.
    for rows, scale in [(1, 0.0), (3, 0.1), (7, 1.0), (64, 10.0), (64, 100.0)]:
        logits = (scale * rng.normal(size=(rows, classes))).astype(np.float32)
        for t, got in zip(TEMPERATURES, model.run(None, {"logits": logits}), strict=True):
            assert got.dtype == np.float32
            want = tempered_softmax(torch.from_numpy(logits).double(), t).numpy()
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
            np.testing.assert_allclose(got.sum(1), 1, rtol=0, atol=1e-5)
            assert t > 0.5 or scale < 100 or (got == 0).any()  # exactly: the support is finite
    masked = np.where(np.arange(classes) == 0, -np.inf, logits).astype(np.float32)
    for got in model.run(None, {"logits": masked}):
        assert (got[:, 0] == 0).all()


@pytest.mark.parametrize("t", [1.0001, 1.001])
def test_next_to_1_with_the_log1p_of_the_recipe(t, monkeypatch):
    """Where torch's own log(1 + x) is off by 1e-4 and 1e-5."""
    pytest.importorskip("sklearn", reason="the recipe needs scikit-learn")
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "examples"))
    import onnx_export

    program = onnx_export.export(Probabilities(t), torch.zeros(2, 10))
    model = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    for scale in (0.1, 1.0, 100.0):
        logits = (scale * np.random.default_rng(0).normal(size=(1000, 10))).astype(np.float32)
        logits[500:, 0] = -np.inf
        (got,) = model.run(None, {"x": logits})
        want = tempered_softmax(torch.from_numpy(logits).double(), t).numpy()
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)
