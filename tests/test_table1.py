"""`bitempered reproduce table1` and `figure3`: the search, the table beside the paper's, the figure, going on."""

import re
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from experiment_cases import assert_rendered, change_dataset, idx, invoke, packed, silent

from bitempered.experiments import cells
from bitempered.experiments.files import read_rows
from bitempered.experiments.losses import Loss
from bitempered.experiments.recipes import table1, table2
from bitempered.experiments.recipes.table1 import LEVELS, TABLE1, quick

PAPER = Path(__file__).parents[1] / "results"


@pytest.fixture
def mnist(tmp_path, monkeypatch):
    """A folder with 120 + 40 images in MNIST's files: a bright row tells the class."""
    change_dataset(monkeypatch, "mnist", validation_rows=40)
    rng = np.random.default_rng(0)
    for name, n in (("train", 120), ("t10k", 40)):
        labels = (np.arange(n) % 10).astype(np.uint8)
        images = rng.integers(0, 60, (n, 28, 28)).astype(np.uint8)
        images[np.arange(n), 2 * labels + 3] = 250
        for kind, values in (("images-idx3", images), ("labels-idx1", labels)):
            (tmp_path / f"{name}-{kind}-ubyte.gz").write_bytes(packed(idx(values)))
    return tmp_path


@pytest.fixture
def small(monkeypatch):
    """Recipes whose quick versions take a second: steps of 20 images."""
    recipe = TABLE1["mnist"]
    for name, value in TABLE1.items():
        monkeypatch.setitem(TABLE1, name, replace(value, training=replace(value.training, batch_size=20)))
    return replace(
        quick(TABLE1["mnist"]),
        searched={"logistic": recipe.searched["logistic"][4:6], "bi-tempered": recipe.searched["bi-tempered"][-2:]},
    )


def test_both_losses_get_the_same_search():
    for recipe in TABLE1.values():
        assert len({len(found) for found in recipe.searched.values()}) == 1
        assert all(len(set(found)) == len(found) for found in recipe.searched.values())
        assert recipe.search.epochs < recipe.training.epochs
        assert table1.SEARCH_SEED not in recipe.seeds
        for further in recipe.more_seeds.values():
            assert len({table1.SEARCH_SEED, *recipe.seeds, *further}) == 1 + len(recipe.seeds) + len(further)
        # The paper's temperatures are among those tried, within the ranges that it searched.
        pairs = {loss.numbers for loss, _ in recipe.searched["bi-tempered"]}
        assert eval(recipe.temperatures) in pairs
        assert all(0.5 <= t1 < 1 < t2 <= 4 for t1, t2 in pairs)


def test_training_is_the_paper_s():
    mnist, cifar = TABLE1["mnist"].training, TABLE1["cifar100"].training
    assert (mnist.network, mnist.optimizer, mnist.epochs, mnist.batch_size) == ("mnist_cnn", "adadelta", 500, 128)
    assert (cifar.network, cifar.optimizer, cifar.steps, cifar.batch_size) == ("resnet56", "sgd", 50_000, 128)
    # Enough epochs for all steps with the 45,000 images that are left for training.
    assert cifar.epochs * (45_000 // 128) >= cifar.steps
    assert TABLE1["mnist"].levels == TABLE1["cifar100"].levels == LEVELS


def fast(recipe):
    return replace(recipe, search=replace(recipe.search, network="mlp", optimizer="sgd"))


def search(recipe, folder, data_dir):
    return table1.search(recipe, folder, table1.prepare(recipe, silent, "cpu", data_dir))


def test_the_search_takes_the_best_on_noisy_validation_labels(mnist, small, tmp_path):
    cells = search(fast(small), tmp_path / "search", mnist)
    assert [(cell.noise, cell.loss.name) for cell in cells] == [
        (level, loss) for level in (0.0, 0.4) for loss in ("logistic", "bi-tempered")
    ]
    rows = read_rows(tmp_path / "search" / "search.jsonl")
    assert len(rows) == 8
    assert {row["seed"] for row in rows} == {table1.SEARCH_SEED}
    for cell in cells:
        found = [row for row in rows if (row["noise"], row["loss"]) == (cell.noise, cell.loss.name)]
        best = max(row["validation_chosen"] for row in found)
        chosen = [(tuple(row["numbers"]), row["learning_rate"]) for row in found if row["validation_chosen"] == best]
        assert (cell.loss.numbers, cell.rate) in chosen


def test_a_level_that_is_not_searched_takes_the_nearest_one_s(mnist, small, tmp_path):
    recipe = replace(fast(small), levels=LEVELS, searched_at=(0.0, 0.2, 0.4))
    cells = search(recipe, tmp_path / "search", mnist)
    assert len(read_rows(tmp_path / "search" / "search.jsonl")) == 12
    logistic, tempered = ({cell.noise: (cell.loss, cell.rate) for cell in cells[i::2]} for i in (0, 1))
    for found in (logistic, tempered):
        assert list(found) == list(LEVELS)
        assert found[0.1] == found[0.2]
        assert found[0.3] == found[0.4] == found[0.5]
    assert {loss.name for loss, _ in tempered.values()} == {"bi-tempered"}


def test_table1_from_the_command_line(mnist, small, tmp_path):
    out = tmp_path / "out"
    command = ["reproduce", "table1", "--quick", "--data-dir", str(mnist), "--out", str(out)]
    done = invoke(*command)
    assert done.exit_code == 0, done.output
    made = ["curves.jsonl", "figure3.png", "table1.csv", "table1.jsonl", "table1.md"]
    assert sorted(path.name for path in out.iterdir()) == made
    assert (out / "figure3.png").read_bytes().startswith(b"\x89PNG")
    rows, page = read_rows(out / "table1.jsonl"), (out / "table1.md").read_text()
    assert len(rows) == 4
    for row in rows:
        assert f"{100 * row['test_chosen']:.2f}" in page
    assert page.startswith("# A quick trial, which shows no effect (table 1, mnist")
    assert "2,560 images" in page  # which a quick look has to say
    assert "No setting was searched" in page
    assert "| logistic, paper | 99.40 | 97.64 |" in page
    assert "| bi-tempered (0.5, 4), paper | 99.24 | 98.56 |" in page
    assert_rendered(out, "table1.csv", "table1.md", "figure3.png")

    again = invoke(*command)
    assert again.exit_code == 0
    assert read_rows(out / "table1.jsonl") == rows  # nothing was trained again


def test_some_levels_have_further_seeds(mnist, small, tmp_path, monkeypatch):
    one = {name: found[:1] for name, found in small.searched.items()}  # nothing to search
    # A fast one; with four steps to an epoch it stops in its second.
    training = replace(small.training, network="mlp", optimizer="sgd", epochs=9, steps=7)
    recipe = replace(small, training=training, searched=one, more_seeds={0.4: (1, 2)})
    out, shown = tmp_path / "out", []

    def make():
        return table1.reproduce(recipe, out, lambda *now: shown.append(now[:2]), device="cpu", data_dir=mnist)

    rows, curves = make()
    assert [(row["seed"], row["noise"], row["loss"]) for row in rows] == [
        (seed, level, loss)
        for seed, level in ((0, 0.0), (0, 0.4), (1, 0.4), (2, 0.4))
        for loss in ("logistic", "bi-tempered")
    ]
    assert read_rows(out / "table1.jsonl") == rows
    assert [curve["test"][-1] for curve in curves] == [row["test_last"] for row in rows]
    assert [(curve["seed"], curve["noise"]) for curve in curves] == [(row["seed"], row["noise"]) for row in rows]
    assert (out / "table1.csv").read_text().count("\n") == 1 + len(rows)
    # Two epochs: of four cells, then of two cells with two seeds.
    assert shown == [(done, 16) for done in (4, 8, 10, 12, 14, 16)]

    page = (out / "table1.md").read_text()
    assert page == table1.markdown(recipe, rows)
    last = [100 * row["test_last"] for row in rows if row["loss"] == "logistic"]
    spread = f"{statistics.mean(last[1:]):.2f} ± {statistics.stdev(last[1:]):.2f}"
    assert f"| logistic, last epoch | {last[0]:.2f} | {spread} |" in page

    monkeypatch.delattr(cells, "train")
    assert make() == (rows, curves)  # nothing was trained again


@pytest.fixture
def with_extra(small):
    """A fast recipe without a search, and with an extra cell of the bi-tempered loss."""
    one = {name: found[:1] for name, found in small.searched.items()}
    training = replace(small.training, network="mlp", optimizer="sgd")
    extra_cells = cells.Cell(Loss("bi-tempered", (0.8, 1.2)), 0.4, 0.3)
    return replace(small, training=training, searched=one, extra_cells=(extra_cells,))


def test_an_extra_cell_has_lines_of_its_own(mnist, with_extra, tmp_path):
    recipe = with_extra
    rows, curves = table1.reproduce(recipe, tmp_path / "out", silent, device="cpu", data_dir=mnist)
    assert [(row["noise"], row["loss"]) for row in rows[:4]] == [
        (level, loss) for level in (0.0, 0.4) for loss in ("logistic", "bi-tempered")
    ]
    assert [(row["noise"], row["numbers"], row["learning_rate"]) for row in rows[4:]] == [(0.4, [0.8, 1.2], 0.3)]
    lines = {line[0]: line[1:] for line in table1.lines(recipe, rows)}
    values = [f"{100 * row['test_chosen']:.2f}" for row in rows]
    assert lines["bi-tempered, chosen epoch"] == [values[1], values[3]]
    assert lines["bi-tempered (0.8, 1.2), chosen epoch"] == ["–", values[4]]
    page = (tmp_path / "out" / "table1.md").read_text()
    assert "| 40% | bi-tempered (0.8, 1.2) |" not in page  # it was not chosen
    assert "bi-tempered (0.8, 1.2) at 40% noise, learning rate 0.3" in page
    assert "all 5 cells of a seed" in page
    drawn = [line.get_ydata()[-1] for line in table1.draw_figure3(recipe, curves).axes[5].get_lines()]
    assert drawn == [100 * rows[1]["test_last"], 100 * rows[3]["test_last"]]
    assert TABLE1["cifar100-wide"].extra_cells
    assert quick(TABLE1["cifar100-wide"]).extra_cells == ()


def test_extra_cells_have_further_seeds_too(mnist, with_extra, tmp_path):
    (cell,) = with_extra.extra_cells
    recipe = replace(with_extra, extra_cells=(replace(cell, noise=0.0), cell), more_seeds={0.4: (1, 2)})
    shown = []
    rows, _ = table1.reproduce(
        recipe, tmp_path / "out", lambda *now: shown.append(now[:2]), device="cpu", data_dir=mnist
    )
    assert shown[-1] == (24, 24)  # two epochs of six cells, then of three with two seeds
    found = [row for row in rows if row["numbers"] == [0.8, 1.2]]
    assert [(row["noise"], row["seed"]) for row in found] == [(0.0, 0), (0.4, 0), (0.4, 1), (0.4, 2)]
    last = [100 * row["test_last"] for row in found]
    assert table1.lines(recipe, rows)[-1] == [
        "bi-tempered (0.8, 1.2), last epoch",
        f"{last[0]:.2f}",
        f"{statistics.mean(last[1:]):.2f} ± {statistics.stdev(last[1:]):.2f}",
    ]
    assert len(table1.lines(recipe, rows)) == 8


def test_a_cell_that_the_search_chose_is_not_extra(mnist, with_extra, tmp_path):
    (cell,) = with_extra.extra_cells
    recipe = replace(with_extra, searched=with_extra.searched | {"bi-tempered": ((cell.loss, cell.rate),)})
    rows, curves = table1.reproduce(recipe, tmp_path / "out", silent, device="cpu", data_dir=mnist)
    assert len(rows) == 4
    assert (tmp_path / "out" / "table1.md").read_text() == table1.markdown(replace(recipe, extra_cells=()), rows)
    assert len(table1.draw_figure3(recipe, curves).axes[5].get_lines()[1].get_ydata()) == 2


def test_texts_say_how_many_seeds_each_level_has():
    def row(level, loss, seed, fleet, seconds):
        found = {"noise": level, "loss": loss, "seed": seed, "fleet": fleet, "fleet_seconds": seconds}
        made = dict.fromkeys(("bitempered", "commit", "torch", "device", "date"), "")
        curve = {"clean": [0.1, 0.2], "noisy": [0.1, 0.2], "test": [0.1, 0.2]}
        numbers = () if loss == "logistic" else (0.8, 1.2)
        numbers = {"numbers": numbers, "learning_rate": 1, "epochs": 200, "test_chosen": 0.2, "test_last": 0.2}
        return found | made | curve | numbers

    recipe = TABLE1["cifar100"]
    assert (recipe.seeds, recipe.more_seeds) == ((0,), {0.4: (1, 2)})
    first = [row(level, loss, 0, 12, 900.4) for level in LEVELS for loss in recipe.searched]
    rows = first + [row(0.4, loss, seed, 2, 200 + seed) for seed in (1, 2) for loss in recipe.searched]
    page = table1.markdown(recipe, rows)
    text = "one seed; at 40% mean ± sample standard deviation of 3 seeds"
    assert text in page
    assert "all 12 cells of a seed in 900 s; 2 cells of a seed in 201, 202 s" in page
    assert text in table1.table(recipe, rows).title
    assert "one seed; at 40% mean of 3 seeds" in table1.draw_figure3(recipe, rows).get_suptitle()
    title = table1.draw_figure3(recipe, first).get_suptitle()
    assert "cifar100, resnet56: one seed" in title
    assert "40%" not in title


@pytest.mark.parametrize(
    ("options", "recipe"),
    [
        (["table1"], TABLE1["mnist"]),
        (["table1", "--dataset", "cifar100"], TABLE1["cifar100"]),
        (["figure3", "--dataset", "cifar100", "--network", "resnet56-wide"], TABLE1["cifar100-wide"]),
        (
            ["table1", "--dataset", "cifar100", "--seeds", "2"],
            replace(TABLE1["cifar100"], seeds=(0, 1), more_seeds={}),
        ),
        (["table1", "--dataset", "cifar100", "--quick"], quick(TABLE1["cifar100"])),
        (["table1", "--quick", "--seeds", "2"], replace(quick(TABLE1["mnist"]), seeds=(0, 1))),
        (["table2"], table2.TABLE2["resnet18"]),
        (
            ["table2", "--quick", "--seeds", "2", "--device", "cpu"],
            replace(table2.quick(table2.TABLE2["resnet18"], "cpu"), seeds=(0, 1)),
        ),
    ],
)
def test_seeds_are_the_recipe_s_unless_told(options, recipe, tmp_path, monkeypatch):
    given = []

    def stop(recipe, *rest, **options):
        given.append(recipe)
        raise KeyboardInterrupt

    for module in (table1, table2):
        monkeypatch.setattr(module, "reproduce", stop)
    done = invoke("reproduce", *options, "--out", tmp_path / "out")
    assert done.exit_code == 130
    assert given == [recipe]


def test_a_stopped_table_goes_on_only_when_told_to(mnist, small, tmp_path, monkeypatch):
    out, recipe = tmp_path / "out", TABLE1["mnist"]
    monkeypatch.setitem(TABLE1, "mnist", replace(recipe, training=replace(recipe.training, network="mlp")))
    command = ["reproduce", "table1", "--quick", "--data-dir", str(mnist), "--out", str(out)]
    real = cells.train

    def stopped(*given, checkpoint, on_epoch, **options):
        def stop(epoch, metrics):
            raise KeyboardInterrupt

        checkpoint.path.write_bytes(b"")  # as if the first epoch were in it
        return real(*given, checkpoint=None, on_epoch=stop, **options)

    monkeypatch.setattr(cells, "train", stopped)
    done = invoke(*command)
    assert done.exit_code == 130
    assert "with --resume to continue" in done.stderr
    done = invoke(*command)
    assert done.exit_code == 1
    assert re.search(r"--resume, or delete .*seed0-\w{12}\.checkpoint", done.stderr)
    done = invoke(*command, "--resume")
    assert done.exit_code == 130  # it went on, and was stopped again


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dataset", "digits"], "table 1 has no dataset 'digits'; choose from: mnist"),
        (
            ["--dataset", "cifar100", "--network", "vgg"],
            "table 1 has no network 'vgg' for cifar100; choose from: resnet56",
        ),
        (["--seeds", "0"], "seeds must be at least 1, got 0"),
        (["--seeds", "101"], "seeds must be at most 100, got 101"),  # the next ones are the search's
        (["--device", "abacus"], "--device must be cpu or cuda"),
    ],
)
def test_bad_options_get_one_line(options, message, tmp_path):
    done = invoke("reproduce", "table1", "--out", tmp_path / "out", *options)
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


# What is committed


@pytest.mark.parametrize(("dataset", "seeds"), [("mnist", 3), ("cifar100", 3), ("cifar100-wide", 1)])
def test_committed_table_is_what_its_rows_say(dataset, seeds):
    folder = PAPER / f"table1-{dataset}"
    rows, recipe = read_rows(folder / "table1.jsonl"), TABLE1[dataset]
    assert (folder / "table1.md").read_text() == table1.markdown(recipe, rows)
    line = next(line for line in table1.lines(recipe, rows) if line[0] == "bi-tempered, chosen epoch")
    found = [row for row in rows if (row["loss"], row["noise"]) == ("bi-tempered", 0.4)]
    values = [100 * row["test_chosen"] for row in found if row["numbers"] == found[0]["numbers"]]
    spread = f" ± {statistics.stdev(values):.2f}" if seeds > 1 else ""
    assert line[1 + recipe.levels.index(0.4)] == f"{statistics.mean(values):.2f}{spread}"
    assert len(values) == seeds


NEAREST = {0.1: 0.2, 0.3: 0.4, 0.5: 0.4}  # on CIFAR-100, where other levels are searched


@pytest.mark.parametrize(
    ("dataset", "settings", "searched_at"),
    [("mnist", 12, {}), ("cifar100", 6, NEAREST), ("cifar100-wide", 4, {0.0: 0.4})],
)
def test_committed_settings_are_the_search_s(dataset, settings, searched_at):
    folder = PAPER / f"table1-{dataset}"
    rows, searched = read_rows(folder / "table1.jsonl"), read_rows(folder / "search" / "search.jsonl")
    extra_cells = TABLE1[dataset].extra_cells
    for row in rows:
        level = searched_at.get(row["noise"], row["noise"])
        found = [s for s in searched if (s["noise"], s["loss"]) == (level, row["loss"])]
        assert len(found) == settings
        if any((list(cell.loss.numbers), cell.rate) == (row["numbers"], row["learning_rate"]) for cell in extra_cells):
            found = [s for s in found if s["numbers"] == row["numbers"]]  # the best of its temperatures
        best = max(found, key=lambda s: s["validation_chosen"])
        assert (best["numbers"], best["learning_rate"]) == (row["numbers"], row["learning_rate"])
        assert str(Loss(row["loss"], tuple(row["numbers"]))) in (folder / "table1.md").read_text()
