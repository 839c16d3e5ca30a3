"""`bitempered reproduce convnet-searched`: what is chosen and by what, which cells follow, and the page."""

import pytest
from experiment_cases import assert_rendered, change_dataset, invoke, write_images

from bitempered.experiments.files import read_rows
from bitempered.experiments.losses import Loss
from bitempered.experiments.recipes import convnet_searched
from bitempered.experiments.recipes.plans import SEARCH_SEED


@pytest.fixture
def small(tmp_path, monkeypatch):
    """The recipe on a few made-up images, for one epoch."""
    change_dataset(monkeypatch, "fashion-mnist", validation_rows=100)
    write_images(tmp_path, train=300, test=100)
    for name, value in {"DATASET": "fashion-mnist", "ROWS": 200, "EPOCHS": 1}.items():
        monkeypatch.setattr(convnet_searched, name, value)
    return tmp_path


def test_both_losses_have_as_many_settings():
    counts = {name: len(set(losses)) for name, losses in convnet_searched.SEARCHED.items()}
    assert counts == {"gce": 4, "bi-tempered": 4}


def test_noisy_labels_choose_and_the_chosen_ones_train_in_every_cell(small):
    out = small / "out"
    done = invoke("reproduce", "convnet-searched", "--data-dir", small, "--out", out)
    assert done.exit_code == 0, done.output
    rows = read_rows(out / "convnet-searched.jsonl")
    tried = [row for row in rows if row["seed"] == SEARCH_SEED]
    assert [Loss.of(row) for row in tried] == [loss for losses in convnet_searched.SEARCHED.values() for loss in losses]
    assert {(row["optimizer"], row["weight_decay"], row["noise"]) for row in tried} == {("adam", 0.0, 0.4)}
    final = [row for row in rows if row["seed"] != SEARCH_SEED]
    for name in convnet_searched.SEARCHED:
        here = [row for row in tried if row["loss"] == name]
        best = max(here, key=lambda row: row["validation_last"])
        cells = [row for row in final if row["loss"] == name]
        assert {Loss.of(row) for row in cells} == {Loss.of(best)}
        assert [((row["optimizer"], row["weight_decay"]), row["noise"], row["seed"]) for row in cells] == list(
            convnet_searched.CELLS
        )
    assert_rendered(out, "convnet-searched.md")
    assert {row["rows"] for row in rows} == {200}


GCE = Loss("gce", (0.7,))


def row(seed, accuracy, level=0.4, loss=GCE, training=convnet_searched.ADAM, validation=0.2):
    one = convnet_searched.setting(loss, training, level, seed)
    return one.row() | {"test_last": accuracy, "test_chosen": accuracy + 0.1, "validation_last": validation}


def test_noisy_labels_choose_and_not_test_labels():
    first, second, *_ = convnet_searched.SEARCHED["bi-tempered"]
    tried = [
        row(SEARCH_SEED, 0.9, loss=first),
        row(SEARCH_SEED, 0.1, loss=second, validation=0.3),
        row(SEARCH_SEED, 0.5),
    ]
    assert convnet_searched.winners(tried) == [GCE, second]


def test_settings_are_not_averaged_together():
    ours, *_ = convnet_searched.SEARCHED["bi-tempered"]
    rows = [
        row(0, 0.1, training=convnet_searched.DECAYED), row(0, 0.3, loss=ours), row(0, 0.4), row(1, 0.5),
        row(0, 0.2, loss=Loss("gce", (0.5,))), row(0, 0.7, level=0.0),
    ]  # fmt: skip
    assert convnet_searched.lines(rows) == [
        ["Adam 0.001", "0%", "gce (0.7)", "70.00", "80.00", "1"],
        ["Adam 0.001", "40%", "gce (0.5)", "20.00", "30.00", "1"],
        ["Adam 0.001", "40%", "gce (0.7)", "45.00 ± 7.07", "55.00 ± 7.07", "2"],
        ["Adam 0.001", "40%", str(ours), "30.00", "40.00", "1"],
        ["SGD 0.05, decay 0.0005", "40%", "gce (0.7)", "10.00", "20.00", "1"],
    ]
