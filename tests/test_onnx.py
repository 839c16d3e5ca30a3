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
    def __init__(self, t):
        super().__init__()
        self.t = t

    def forward(self, logits):
        return tempered_softmax(logits, self.t)


def session(t, classes):
    program = torch.onnx.export(
        Probabilities(t).eval(),
        (torch.zeros(2, classes),),
        input_names=["logits"],
        dynamic_shapes=({0: "batch"},),
        dynamo=True,
        verbose=False,
    )
    return onnxruntime.InferenceSession(program.model_proto.SerializeToString())


# A finite support, softmax, the usual and a heavy tail; the number of solver steps grows with the classes.
@pytest.mark.parametrize("classes", [2, 1000])
@pytest.mark.parametrize("t", [0.5, 1.0, 1.2, 4.0])
def test_probabilities_equal_those_of_torch(t, classes):
    model = session(t, classes)
    rng = np.random.default_rng(0)
    # Batches other than the one it was exported with.
    for rows, scale in [(1, 0.0), (3, 0.1), (7, 1.0), (64, 10.0), (64, 100.0)]:
        logits = (scale * rng.normal(size=(rows, classes))).astype(np.float32)
        (got,) = model.run(None, {"logits": logits})
        assert got.dtype == np.float32
        want = tempered_softmax(torch.from_numpy(logits).double(), t).numpy()
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
        np.testing.assert_allclose(got.sum(1), 1, rtol=0, atol=1e-5)
    if t < 1:
        assert (got == 0).any()  # exactly: the support is finite
    masked = np.where(np.arange(classes) == 0, -np.inf, logits).astype(np.float32)
    assert (model.run(None, {"logits": masked})[0][:, 0] == 0).all()


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
