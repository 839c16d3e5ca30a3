"""Text: which package of Python's standard library is a docstring from? 40 % of the training labels are wrong.

python examples/gallery/text.py figure.png        (pip install torch scikit-learn matplotlib)
"""

import ast
import sys
import sysconfig
from pathlib import Path

import curves
import numpy as np
import torch
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.model_selection import train_test_split
from torch import nn

from bitempered.noise import symmetric
from bitempered.schedules import default
from bitempered.torch import BiTemperedLogisticLoss

PACKAGES = ("asyncio", "email", "importlib", "logging", "multiprocessing", "unittest")


def docstrings(package):
    """Those in the package's files, which are read and not executed."""
    for path in sorted((Path(sysconfig.get_path("stdlib")) / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield ast.get_docstring(node) or ""


def train(criterion, schedule, epochs, x, y, x_test, y_test):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(x.shape[1], 64), nn.ReLU(), nn.Linear(64, len(PACKAGES)))
    optimizer, accuracies = torch.optim.Adam(net.parameters(), lr=1e-3), []
    for epoch in range(epochs):
        criterion.t1, criterion.t2 = schedule(epoch)  # which cross-entropy does not look at
        for batch in torch.randperm(len(x)).split(32):
            optimizer.zero_grad()
            criterion(net(x[batch]), y[batch]).backward()
            optimizer.step()
        accuracies.append((net(x_test).argmax(1) == y_test).float().mean().item())
    return accuracies


def main(figure=None, epochs=40):
    found = {text: k for k, name in enumerate(PACKAGES) for text in docstrings(name) if len(text) > 40}
    words = TfidfVectorizer(stop_words="english", sublinear_tf=True).fit_transform(found).toarray().astype(np.float32)
    x, x_test, y, y_test = train_test_split(words, np.array([*found.values()]), test_size=0.4, random_state=0)
    y = symmetric(y, 0.4, rng=np.random.default_rng(0), num_classes=len(PACKAGES))
    tensors, schedule = [torch.as_tensor(a) for a in (x, y, x_test, y_test)], default(len(PACKAGES), epochs)
    losses = {"cross-entropy": nn.CrossEntropyLoss(), "bi-tempered": BiTemperedLogisticLoss()}
    runs = {name: train(loss, schedule, epochs, *tensors) for name, loss in losses.items()}
    return curves.figure(runs, "docstrings of six packages, 40 % wrong labels", figure)


if __name__ == "__main__":
    main(*sys.argv[1:])
