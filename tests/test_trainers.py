"""The scripts for trainers beat cross-entropy on noisy labels as they stand, and accumulate gradients of one mean."""

import importlib
from pathlib import Path
from statistics import mean

import pytest
import torch

from bitempered.schedules import anneal
from bitempered.torch import bi_tempered_logistic_loss

pytestmark = [  # what the frameworks say about a machine without a GPU
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator is found:UserWarning"),
    pytest.mark.filterwarnings("ignore:The '.*dataloader' does not have many workers:UserWarning"),
]
CROSS_ENTROPY = {
    "lightning_digits": {"t1": 1.0, "t2": 1.0},
    "huggingface_trainer": {"t1": 1.0, "t2": 1.0},
    "accelerate_text": {"schedule": anneal((1.0, 1.0), (1.0, 1.0), begin=0, finish=1)},
}
FRAMEWORKS = {"lightning_digits": "lightning", "huggingface_trainer": "transformers", "accelerate_text": "accelerate"}


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "examples"))

    def load(name):
        pytest.importorskip(FRAMEWORKS[name])
        return importlib.import_module(name)

    return load


@pytest.mark.slow
@pytest.mark.first
@pytest.mark.usefixtures("_torchvision")
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_it_beats_cross_entropy_over_five_seeds(name, script):
    example = script(name)
    robust = [example.main(seed=seed) for seed in range(5)]
    usual = [example.main(seed=seed, **CROSS_ENTROPY[name]) for seed in range(5)]
    assert mean(robust) > mean(usual), (robust, usual)


def test_accelerate_takes_steps_on_the_mean_of_all_labels(script):
    """Two uneven batches in a step, against one batch with all their rows."""
    example = script("accelerate_text")
    torch.manual_seed(0)
    words, labels = torch.randint(example.WORDS, (11, example.LENGTH)), torch.randint(example.TOPICS, (11,))
    model, reference = example.Transformer().double(), example.Transformer().double()
    reference.load_state_dict(model.state_dict())
    accelerator = example.Accelerator(cpu=True)
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    batches = [(words[:8], labels[:8]), (words[8:], labels[8:])]
    example.train(accelerator, prepared, optimizer, batches, 0.5, 1.3)
    value = bi_tempered_logistic_loss(reference(words), labels, 0.5, 1.3)
    for weight, gradient in zip(
        reference.parameters(), torch.autograd.grad(value, list(reference.parameters())), strict=True
    ):
        weight.data -= 0.5 * gradient
    for (name, weight), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(weight, expected, rtol=1e-12, atol=1e-12, msg=name)


def test_accelerate_runs_in_one_epoch(script):
    accuracy = script("accelerate_text").main(epochs=1)
    assert accuracy > 1.5 / 8  # half as good again as a guess
