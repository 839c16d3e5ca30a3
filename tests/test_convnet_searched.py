"""`bitempered reproduce convnet-searched`: what is chosen and by what, which cells follow, and the page."""

import pytest
from experiment_cases import assert_rendered, change_dataset, invoke, write_images

from bitempered.experiments.files import read_rows
from bitempered.experiments.losses import Loss
from bitempered.experiments.recipes import convnet_searched
from bitempered.experiments.recipes.plans import SEARCH_SEED


@pytest.fixture
def small(tmp_path, monkeypatch):
    """The recipe on a few made-up images, with schedules as short as its runs."""
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


def test_the_first_table_leaves_the_search_out():
    def row(seed, accuracy, level=0.4):
        one = convnet_searched.setting(Loss("gce", (0.7,)), convnet_searched.ADAM, level, seed)
        return one.row() | {"test_last": accuracy, "test_chosen": accuracy + 0.1, "validation_last": 0.2}

    rows = [row(SEARCH_SEED, 0.9), row(0, 0.4), row(1, 0.5), row(0, 0.7, level=0.0)]
    assert convnet_searched.lines(rows) == [
        ["Adam 0.001", "0%", "gce (0.7)", "70.00", "80.00", "1"],
        ["Adam 0.001", "40%", "gce (0.7)", "45.00 ± 7.07", "55.00 ± 7.07", "2"],
    ]
