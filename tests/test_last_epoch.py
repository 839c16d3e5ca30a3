"""`bitempered reproduce last-epoch`: equal searches, judged by the last epoch, and a page that its rows give."""

import pytest
from experiment_cases import assert_rendered, change_dataset, invoke, write_images

from bitempered.experiments import train
from bitempered.experiments.cells import Cell
from bitempered.experiments.files import read_rows
from bitempered.experiments.losses import Loss
from bitempered.experiments.recipes import last_epoch
from bitempered.experiments.recipes.plans import SEARCH_SEED
from bitempered.experiments.recipes.table1 import LEVELS


def searched(noise, loss, rate, validation):
    return {
        "noise": noise,
        **loss.row(),
        "learning_rate": rate,
        "validation_last": validation,
        "validation_chosen": 0.9,
    }


def test_contenders_get_equal_searches_of_which_the_last_epoch_chooses():
    assert len({len(found) for found in last_epoch.CONTENDERS.values()}) == 1
    assert set(last_epoch.TAKES) == set(LEVELS)
    best = {0.0: 1, 0.2: 3, 0.4: 5}  # the place of the best setting, by level
    tried = [
        searched(level, loss, rate, 0.5 + 0.1 * (place == wanted))
        for level, wanted in best.items()
        for settings in last_epoch.CONTENDERS.values()
        for place, (loss, rate) in enumerate(settings)
    ]
    found = last_epoch.chosen(tried, LEVELS)
    for name, settings in last_epoch.CONTENDERS.items():
        wanted = [settings[place] for place in (1, 3, 3, 5, 5, 5)]
        assert found[name] == [Cell(loss, level, rate) for level, (loss, rate) in zip(LEVELS, wanted, strict=True)]
    paper = [loss for loss, _ in last_epoch.CONTENDERS["bi-tempered (0.5, 4)"]]
    assert set(paper) == {Loss("bi-tempered", (0.5, 4.0))}


@pytest.fixture
def small(tmp_path, monkeypatch):
    """120 + 40 images in MNIST's files, and a network that trains in a second."""
    change_dataset(monkeypatch, "mnist", validation_rows=40)
    for name in ("TRAINING", "SEARCH"):
        shorter = train.Training("mlp", "sgd", epochs=3, batch_size=20)
        monkeypatch.setattr(last_epoch, name, shorter)
    write_images(tmp_path, train=120, test=40)
    return tmp_path


def test_last_epoch_from_the_command_line(small, tmp_path):
    out = tmp_path / "out"
    command = ["reproduce", "last-epoch", "--quick", "--data-dir", str(small), "--out", str(out)]
    done = invoke(*command)
    assert done.exit_code == 0, done.output
    rows, tried = read_rows(out / "last-epoch.jsonl"), read_rows(out / "search" / "search.jsonl")
    assert len(rows) == 6
    assert {row["seed"] for row in tried} == {SEARCH_SEED}
    assert len(tried) == 36
    page = (out / "last-epoch.md").read_text()
    for row in rows:
        assert f"{100 * row['test_last']:.2f}" in page
    assert "A quick look" in page
    assert_rendered(out, "last-epoch.md", "last-epoch.csv", "last-epoch.png")
    assert invoke(*command).exit_code == 0
    assert read_rows(out / "last-epoch.jsonl") == rows  # nothing was trained again
