"""timm: mixup's soft targets go into the bi-tempered loss as they are; digits of which 40 % are labelled wrong.

pip install torch scikit-learn timm
"""

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from timm.data import Mixup
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bitempered.noise import symmetric
from bitempered.torch import BiTemperedLogisticLoss


def main(epochs: int = 10) -> float:
    pixels, labels = load_digits(return_X_y=True)
    images = (pixels / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    x, x_test, y, y_test = train_test_split(images, labels, test_size=500, random_state=0)
    y = symmetric(y, 0.4, rng=np.random.default_rng(0), num_classes=10)

    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002  timm draws from NumPy's global generator
    rows = TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    loader = DataLoader(rows, batch_size=64, shuffle=True, drop_last=True)  # timm mixes pairs: batches of an even size
    mixup = Mixup(mixup_alpha=0.2, label_smoothing=0.0, num_classes=10)
    criterion = BiTemperedLogisticLoss(t1=0.8, t2=1.2)  # in the place of timm's SoftTargetCrossEntropy
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(epochs):
        for batch, targets in loader:
            mixed, probabilities = mixup(batch, targets)  # (N, 1, 8, 8), and (N, 10) that sum to 1
            optimizer.zero_grad()
            criterion(model(mixed), probabilities).backward()
            optimizer.step()
    accuracy = (model(torch.from_numpy(x_test)).argmax(1).numpy() == y_test).mean()
    print(f"accuracy on clean test labels {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
