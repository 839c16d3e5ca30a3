"""`bitempered reproduce convnet`: which runs stand beside which, what they compute, and their page."""

from dataclasses import replace
from statistics import mean

import pytest
from experiment_cases import assert_rendered, change_dataset, invoke, results, silent, write_images

from bitempered import schedules
from bitempered.experiments.datasets import read
from bitempered.experiments.files import read_rows
from bitempered.experiments.losses import Loss
from bitempered.experiments.recipes import convnet
from bitempered.experiments.runs import make


@pytest.fixture
def images(tmp_path, monkeypatch):
    """300 + 100 images in Fashion-MNIST's files, a third of the first to validate."""
    change_dataset(monkeypatch, "fashion-mnist", validation_rows=100)
    write_images(tmp_path, train=300, test=100)
    return tmp_path


def test_the_command_makes_every_contender_and_a_page_of_the_rows(images):
    out = images / "out"
    done = invoke("reproduce", "convnet", "--quick", "--data-dir", images, "--out", out)
    assert done.exit_code == 0, done.output
    rows = read_rows(out / "convnet.jsonl")
    first, last = schedules.default(10, 2).legs
    schedule = [first.begin, first.finish, *first.end, last.finish]
    wanted = {("logistic", (), None), ("gce", (0.7,), None), ("bi-tempered", (0.8, 1.2), None)}
    for optimizer, decay in convnet.TRAININGS:
        rate = convnet.RATES[optimizer]
        for level in convnet.LEVELS:
            setting = (optimizer, decay, level)
            here = [row for row in rows if (row["optimizer"], row["weight_decay"], row["noise"]) == setting]
            at_usual = [row for row in here if row["learning_rate"] == rate]
            constant = {
                (row["loss"], tuple(row["numbers"]), row["schedule"]) for row in at_usual if not row["schedule"]
            }
            assert constant == wanted
            (ours,) = (row for row in at_usual if row["schedule"])
            assert ours["numbers"] == list(last.end)
            assert ours["schedule"] == pytest.approx(schedule)
            slower = {row["learning_rate"] for row in here if row["learning_rate"] != rate}
            assert slower == set(convnet.SLOWER[optimizer])
            assert {row["loss"] for row in here if row["learning_rate"] != rate} == {"logistic"}
    assert_rendered(out, "convnet.md", "convnet.png")
    assert "A quick trial, which shows no effect" in (out / "convnet.md").read_text()


def made_up():
    """Rows of three seeds with accuracies by loss and rate, as a file of rows has them."""
    rows = []
    for optimizer, decay in convnet.TRAININGS:
        for level in convnet.LEVELS:
            for loss, rate in convnet.contenders(10, optimizer, 30):
                for seed in range(3):
                    setting = convnet.Setting("fashion-mnist", optimizer, decay, loss, rate, level, seed, 30, 10_000)
                    number = 0.5 + 0.01 * seed + 0.1 * (loss == Loss("gce", (0.7,))) + 0.2 * bool(loss.schedule)
                    accuracies = {"test_last": number, "test_chosen": number + 0.05, "validation_last": 0.3}
                    rows.append(setting.row() | accuracies)
    return rows


def test_the_table_has_means_and_differences_and_the_best_rate_by_noisy_labels():
    rows = made_up()
    for row in rows:
        if row["learning_rate"] == 1e-4:
            row |= {"validation_last": 0.9, "test_last": 0.1}  # worst on test labels, which choose nothing
    adam = [line for line in convnet.lines(rows, deviations=True) if line[1:3] == ["Adam 0.001", "40%"]]
    ((_, _, _, logistic, gce, constant, ours, difference, slower),) = adam
    assert logistic == constant == "51.0 ± 1.0 / 56.0 ± 1.0"
    assert gce == "61.0 ± 1.0 / 66.0 ± 1.0"
    assert ours == "71.0 ± 1.0 / 76.0 ± 1.0"
    assert difference == "+20.0 / +20.0"
    assert slower == "0.0001: 10.0 ± 0.0 / 56.0 ± 1.0"


def test_training_learns_and_an_interrupted_run_goes_on_with_the_same_numbers(images, monkeypatch):
    data = read("fashion-mnist", images)
    ours = convnet.Setting(
        "fashion-mnist", "adam", 0.0, Loss("bi-tempered", (0.5, 1.5), (1, 3)), 1e-3, 0.2, 0, 6, 10_000
    )

    def run(folder, progress=silent, setting=ours):
        return make([lambda: convnet.job(setting, data, "cpu")], images / folder, "convnet", progress, device="cpu")

    (whole,) = run("whole")
    assert whole["test_last"] > 0.9  # one pixel gives the label away
    assert 0.6 < whole["train_last"] < 1  # a fifth of the training labels is wrong
    (decayed,) = run("whole", setting=replace(ours, weight_decay=10.0))
    assert decayed["test_last"] < 0.5
    monkeypatch.setattr(convnet, "Due", lambda: lambda: True)

    def stop(done, of, text):
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run("stopped", stop)
    (checkpoint,) = (images / "stopped").glob("*.checkpoint")
    seen = []
    (resumed,) = run("stopped", lambda done, of, text: seen.append(done))
    assert seen == [4, 5, 6]  # the fourth epoch was not saved before it was stopped
    assert results([resumed]) == results([whole])
    assert not checkpoint.exists()


def test_no_two_runs_share_a_lock(images):
    data = read("fashion-mnist", images)
    runs = [
        convnet.Setting(use.dataset, optimizer, decay, loss, rate, level, 0, 30, 100)
        for use in convnet.USES
        for optimizer, decay in use.trainings
        for loss, rate in convnet.contenders(use.classes, optimizer, 30)
        for level in convnet.LEVELS
    ]
    assert len({convnet.job(run, data, "cpu").name for run in runs}) == len(runs)


def test_each_data_set_has_its_own_lines_and_panels():
    fashion, cifar = convnet.USES
    rows = made_up()
    other = [{**row, "dataset": cifar.dataset, "rows": 7_000, "seed": 0, "test_last": 0.25} for row in rows]
    other = [row for row in other if (row["optimizer"], row["weight_decay"]) in cifar.trainings]
    table = convnet.lines(rows + other, deviations=False)
    assert [line[0] for line in table] == [fashion.title] * 6 + [cifar.title] * 4
    assert {line[3].split(" / ")[0] for line in table} == {"51.0", "25.0"}
    assert convnet.lines(rows, deviations=False) == table[:6]
    assert convnet.images(rows + other) == [
        "Fashion-MNIST: 10,000 training images, 3 seeds.",
        "CIFAR-100: 7,000 training images, 1 seed.",
    ]
    panels = convnet.figure(rows + other, [])
    assert [axes.get_title() for axes in panels.axes] == [
        f"{use.title}, {convnet.in_words(*training)}"
        for use in convnet.USES
        for training in convnet.TRAININGS
        if training in use.trainings
    ]


def test_wrong_labels_are_counted_and_test_labels_stay_clean(images, monkeypatch):
    data, seen = read("fashion-mnist", images), {}
    monkeypatch.setattr(convnet, "train", lambda setting, parts, *_: seen.update(parts=parts) or [])
    setting = convnet.Setting("fashion-mnist", "sgd", 0.0, Loss("logistic"), 0.05, 0.4, 1, 1, 150)
    with pytest.raises(IndexError):  # no epochs
        convnet.job(setting, data, "cpu").train([0], [None], silent)
    split = data.split(1)
    (x, y), (_, validation), (_, test) = seen["parts"]
    assert len(x) == 150
    assert (x == split.train[0][:150]).all()
    assert mean((y != split.train[1][:150]).tolist()) == 0.4
    assert mean((validation != split.validation[1]).tolist()) == 0.4
    assert (test == split.test[1]).all()
