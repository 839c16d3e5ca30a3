"""`bitempered reproduce protocol-hardt-ma`: Hardt and Ma's training, equal searches, and what they choose."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from experiment_cases import assert_rendered, silent

from bitempered.experiments import streams
from bitempered.experiments.files import read_rows
from bitempered.experiments.losses import Loss
from bitempered.experiments.recipes import hardt_ma
from bitempered.experiments.recipes.plans import SEARCH_SEED, Options
from bitempered.experiments.recipes.table1 import LEVELS


def test_training_is_hardt_and_ma_s_but_shorter():
    protocol = hardt_ma.PROTOCOL
    steps = (50_000 - hardt_ma.HELD_OUT) // protocol.batch_size
    rates = [protocol.rate * protocol.rate_factor(step // steps) for step in range(protocol.epochs * steps)]
    falls = [step for step in range(1, len(rates)) if rates[step] < rates[step - 1]]
    assert rates[0] == 0.05
    assert [rates[step] for step in falls] == pytest.approx([0.005])
    assert falls == pytest.approx([19_000], abs=steps)
    assert len(rates) == pytest.approx(22_500, abs=steps)
    assert (protocol.weight_decay, protocol.momentum, protocol.clip, protocol.rotation) == (1e-4, 0.9, 5, 0)


def test_losses_get_equal_searches_with_the_paper_s_temperatures():
    assert len({len(set(found)) for of_a_level in hardt_ma.SEARCHED.values() for found in of_a_level.values()}) == 1
    assert hardt_ma.PAPER_LOSS.numbers == (0.8, 1.2)
    losses = {level: [loss for loss, _, _ in found["bi-tempered"]] for level, found in hardt_ma.SEARCHED.items()}
    assert all(hardt_ma.PAPER_LOSS in found for found in losses.values())
    [scheduled] = (loss for found in losses.values() for loss in found if loss.schedule)
    falls = next(epoch for epoch in range(hardt_ma.PROTOCOL.epochs) if hardt_ma.PROTOCOL.rate_factor(epoch) < 1)
    assert {scheduled.at(epoch).numbers for epoch in range(falls)} == {(0.9, 1.1)}
    assert scheduled.at(falls + 3).numbers == (0.6, 1.5)
    assert scheduled.at(hardt_ma.EPOCHS).numbers == (0.5, 1.8)


def test_committed_rows_are_of_the_recipe_s_settings_and_their_page_says_what_lacks():
    folder = Path(__file__).parents[1] / "results" / "protocol-hardt-ma"
    rows, page = read_rows(folder / "protocol-hardt-ma.jsonl"), (folder / "protocol-hardt-ma.md").read_text()
    tried = [row for row in rows if row["seed"] == SEARCH_SEED]
    assert {hardt_ma.setting_of(row) for row in tried} <= set(hardt_ma.search())
    assert {row["epochs"] for row in rows} == {hardt_ma.EPOCHS}
    assert "Found at 40% noise, for 30%, 40% and 50%: logistic, rate 0.1, decay 0.0005; bi-tempered (0.8, 1.2)," in page
    assert ("is not finished." in page) == (len(tried) < 12)
    for row in tried:
        accuracies = (f"{100 * row[name]:.2f}" for name in ("validation_chosen", "test_chosen", "test_last"))
        ends = " | ".join([f"{row['learning_rate']:g}", f"{row['weight_decay']:g}", *accuracies])
        assert (
            sum(
                line.startswith(f"| {row['noise']:.0%} | {row['loss']}") and line.endswith(f"| {ends} |")
                for line in page.splitlines()
            )
            == 1
        )


def test_the_page_says_which_settings_count_and_which_cells_are_missing():
    def row(level, seed, loss, rate, accuracy):
        chosen = {"validation_chosen": accuracy, "learning_rate": rate, "weight_decay": 1e-4, "held_out": 5000}
        return {**Loss(*loss).row(), "noise": level, "seed": seed, **chosen}

    logistic, ours = ("logistic",), ("bi-tempered", (0.8, 1.2))
    tried = [
        row(level, SEARCH_SEED, loss, rate, rate if level == 0.4 else -rate)
        for level in (0.4, 0.2)
        for loss in (logistic, ours)
        for rate in (0.1, 0.2, 0.3)
    ]
    rest = [row(level, 0, loss, 0.3, 0.5) for level in (0.4, 0.3, 0.5) for loss in (logistic, ours)]
    at_40 = (
        "Found at 40% noise, for 30%, 40% and 50%: logistic, rate 0.3, decay 0.0001; bi-tempered (0.8, 1.2), rate 0.3"
    )
    unfinished = "The search at 20% noise, for 0%, 10% and 20%, is not finished."
    assert hardt_ma.notes(tried[:6], rest) == f"{unfinished}\n{at_40}, decay 0.0001."
    said = hardt_ma.notes(tried, [*rest, row(0.2, 0, logistic, 0.3, 0.5)])
    assert "Found at 20% noise, for 0%, 10% and 20%: logistic, rate 0.1," in said
    assert said.endswith("Other cells are earlier runs.\nSome cells have not been run yet.")
    low = [row(level, 0, loss, 0.1, 0.5) for level in (0.0, 0.1, 0.2) for loss in (logistic, ours)]
    assert "cells" not in hardt_ma.notes(tried, rest + low)


def test_every_level_uses_a_search():
    assert sorted(level for levels in hardt_ma.USED_AT.values() for level in levels) == sorted(LEVELS)
    assert set(hardt_ma.USED_AT) == set(hardt_ma.SEARCHED)


@pytest.mark.slow
def test_the_whole_recipe_in_small(tmp_path, monkeypatch):
    """Every command line option aside: searches, their winners at the levels near by, two seeds at 40 %, the page."""
    part = {
        n: (np.random.default_rng(n).integers(0, 255, (n, 3, 32, 32)).astype(np.uint8), np.arange(n) % 4)
        for n in (32, 8)
    }
    images = streams.Cifar100(part[32], part[8])
    monkeypatch.setattr(hardt_ma, "HELD_OUT", 8)
    tiny = replace(hardt_ma.PROTOCOL, epochs=1, batch_size=8, width=8)
    monkeypatch.setattr(hardt_ma, "PROTOCOL", tiny)
    monkeypatch.setattr(hardt_ma.Cifar100, "read", lambda data_dir, human: images)
    some = {
        level: {name: found[:1] + found[-1:] for name, found in of_a_level.items()}
        for level, of_a_level in hardt_ma.SEARCHED.items()
    }
    monkeypatch.setattr(hardt_ma, "SEARCHED", some)

    def on_cpu(*given, device):
        return streams.run(*given, device="cpu")

    monkeypatch.setattr(hardt_ma, "run", on_cpu)
    made = hardt_ma.plan("protocol-hardt-ma", Options("cuda")).make(tmp_path, silent)
    rows = read_rows(tmp_path / "protocol-hardt-ma.jsonl")
    tried = [row for row in rows if row["seed"] == SEARCH_SEED]
    assert len(tried) == 8
    assert {row["network"] for row in rows} == {"resnet56-hardt-ma"}
    final = [row for row in rows if row["seed"] != SEARCH_SEED]
    for name in ("logistic", "bi-tempered"):
        here = [row for row in final if row["loss"] == name]
        assert sorted((row["noise"], row["seed"]) for row in here) == sorted([*((at, 0) for at in LEVELS), (0.4, 1)])
    for level, levels in hardt_ma.USED_AT.items():
        for name, found in some[level].items():
            candidates = [row for row in tried if (row["loss"], row["noise"]) == (name, level)]
            best = hardt_ma.setting_of(max(candidates, key=lambda row: row["validation_chosen"]))
            used = {hardt_ma.setting_of(row) for row in final if row["loss"] == name and row["noise"] in levels}
            assert {replace(setting, noise=level, seed=SEARCH_SEED) for setting in used} == {best}
            assert (best.loss, best.rate, best.weight_decay) in found
    assert made.row_count == 2 * len({hardt_ma.in_words(hardt_ma.setting_of(row)) for row in final}) + 2
    assert_rendered(tmp_path, "protocol-hardt-ma.md")


def test_it_needs_a_gpu():
    with pytest.raises(ValueError, match="protocol-hardt-ma needs a GPU"):
        hardt_ma.plan("protocol-hardt-ma", Options("cpu"))
