"""Lightning: a LightningModule with the bi-tempered loss, trained on digits of which 40 % are labelled wrong.

pip install torch scikit-learn lightning
"""

import lightning
import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from bitempered.noise import symmetric
from bitempered.torch import BiTemperedLogisticLoss, tempered_softmax

T1, T2 = 0.8, 1.2  # with (1, 1) it is cross-entropy


class Classifier(lightning.LightningModule):
    def __init__(self, t1: float = T1, t2: float = T2) -> None:
        super().__init__()
        self.save_hyperparameters()  # t2 belongs to the model: its probabilities need it
        self.network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        self.criterion = BiTemperedLogisticLoss(t1, t2)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        x, y = batch
        loss = self.criterion(self.network(x), y)
        self.log("loss", loss)
        return loss

    def predict_step(self, batch: list[Tensor], _: int) -> Tensor:
        return tempered_softmax(self.network(batch[0]), self.hparams.t2)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=2e-3)


def main(epochs: int = 10, seed: int = 0, t1: float = T1, t2: float = T2) -> float:
    pixels, labels = load_digits(return_X_y=True)
    x, x_test, y, y_test = train_test_split((pixels / 16).astype(np.float32), labels, test_size=500, random_state=0)
    y = symmetric(y, 0.4, rng=np.random.default_rng(seed), num_classes=10)

    lightning.seed_everything(seed)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Classifier(t1, t2)
    trainer.fit(model, DataLoader(TensorDataset(torch.from_numpy(x), torch.from_numpy(y)), batch_size=64, shuffle=True))
    predicted = trainer.predict(model, DataLoader(TensorDataset(torch.from_numpy(x_test)), batch_size=500))
    accuracy = (torch.cat(predicted).argmax(1).numpy() == y_test).mean()
    print(f"accuracy on clean test labels {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
