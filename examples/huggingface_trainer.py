"""Hugging Face: Trainer(compute_loss_func=...) with the bi-tempered loss, on digits of which 40 % are labelled wrong.

The model is a small vision transformer made from its configuration, so that nothing is downloaded.

    pip install torch scikit-learn "transformers[torch]"
"""

import tempfile
from functools import partial

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification, set_seed
from transformers.modeling_outputs import ImageClassifierOutput

from bitempered.noise import symmetric
from bitempered.torch import bi_tempered_logistic_loss, tempered_softmax

T1, T2 = 0.8, 1.2  # with (1, 1) it is cross-entropy


def bi_tempered(
    outputs: ImageClassifierOutput,
    labels: Tensor,
    num_items_in_batch: Tensor | None = None,
    t1: float = T1,
    t2: float = T2,
) -> Tensor:
    """The mean loss; `num_items_in_batch` counts the labels of all the batches that one step accumulates."""
    if num_items_in_batch is None:
        return bi_tempered_logistic_loss(outputs.logits, labels, t1, t2)
    return bi_tempered_logistic_loss(outputs.logits, labels, t1, t2, reduction="sum") / num_items_in_batch


def main(epochs: int = 12, seed: int = 0, t1: float = T1, t2: float = T2) -> float:
    pixels, labels = load_digits(return_X_y=True)
    images = (pixels / 8 - 1).astype(np.float32).reshape(-1, 1, 8, 8)
    x, x_test, y, y_test = train_test_split(images, labels, test_size=500, random_state=0)
    y = symmetric(y, 0.4, rng=np.random.default_rng(seed), num_classes=10)

    set_seed(seed)
    config = ViTConfig(
        image_size=8,
        patch_size=4,
        num_channels=1,
        num_labels=10,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
    )
    model = ViTForImageClassification(config)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            num_train_epochs=epochs,
            per_device_train_batch_size=32,
            learning_rate=1e-3,
            save_strategy="no",
            seed=seed,
            report_to="none",
            disable_tqdm=True,
        )
        rows = [{"pixel_values": image, "labels": label} for image, label in zip(x, y, strict=True)]
        trainer = Trainer(model, arguments, train_dataset=rows, compute_loss_func=partial(bi_tempered, t1=t1, t2=t2))
        trainer.train()
        logits = trainer.predict([{"pixel_values": image} for image in x_test]).predictions
    probabilities = tempered_softmax(torch.from_numpy(logits), t2)
    accuracy = (probabilities.argmax(1).numpy() == y_test).mean()
    print(f"accuracy on clean test labels {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
