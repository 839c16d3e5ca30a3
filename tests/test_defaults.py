"""`bitempered reproduce defaults`: which runs stand beside which, and the recipe's own numbers."""

import re

import pytest
from experiment_cases import invoke

from bitempered import schedules
from bitempered.experiments.files import read_rows, write_rows
from bitempered.experiments.recipes import defaults


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    folder = tmp_path_factory.mktemp("defaults")
    done = invoke("reproduce", "defaults", "--quick", "--seeds", 2, "--out", folder)
    assert done.exit_code == 0, done.output
    return folder, read_rows(folder / "defaults.jsonl")


def test_every_contender_trains_at_every_level(quick):
    _, rows = quick
    for optimizer, rate in defaults.RATES.items():
        for level in defaults.LEVELS:
            here = [row for row in rows if (row["optimizer"], row["noise"]) == (optimizer, level)]
            ours = [row for row in here if row["loss"] == "bi-tempered"]
            assert [row["learning_rate"] for row in ours] == [rate] * 2
            rates = {row["learning_rate"] for row in here if row["loss"] == "logistic"}
            assert rates == {rate, *defaults.SLOWER[optimizer]}
            schedule = schedules.default(10, ours[0]["epochs"])
            first, last = schedule.legs
            assert ours[0]["numbers"] == list(last.end)
            assert ours[0]["schedule"] == pytest.approx([first.begin, first.finish, *first.end, last.finish])


def test_the_best_rate_is_that_of_noisy_validation_labels_at_the_last_epoch(quick):
    _, rows = quick
    part = [
        row | ({"validation_last": 0.9, "test_last": 0.1} if row["learning_rate"] == 1e-4 else {"test_last": 0.5})
        for row in defaults.split(rows)[1]  # Adam
    ]
    found = defaults.contenders(part, 0.4)
    assert [{row["learning_rate"] for row in group} for group in found.values()] == [{1e-3}, {1e-3}, {1e-3}, {1e-4}]
    assert {name: {row["loss"] for row in group} for name, group in found.items()} == {
        "logistic": {"logistic"}, "gce (0.7)": {"gce"}, "default schedule": {"bi-tempered"},
        "logistic, best rate": {"logistic"},
    }  # fmt: skip


def test_the_page_states_the_rates_and_levels_of_the_rows(quick):
    _, rows = quick
    faster = {1e-3: 2e-3, 3e-4: 6e-4}
    rows = [
        row | {"noise": 2 * row["noise"], "learning_rate": faster.get(row["learning_rate"], row["learning_rate"])}
        for row in rows
        if row["learning_rate"] != 3e-5
    ]
    parts = defaults.split(rows)
    page = defaults.markdown("page", parts[1:])
    assert "| digits, Adam 0.002 | 80% |" in page
    assert "another rate, the one of\n3 whose" in page
    assert {row["learning_rate"] for row in defaults.contenders(parts[1], 0.8)["logistic"]} == {2e-3}


def test_the_page_has_means_and_differences_of_the_rows(quick):
    folder, rows = quick
    page = (folder / "defaults.md").read_text()
    line = next(line for line in page.splitlines() if line.startswith("| digits, Adam 0.001 | 40% |"))
    numbers = [float(number) for number in re.findall(r"[-+]?\d+\.\d+", line.split("|", 3)[3])]

    def mean(loss, column):
        here = [
            row[column]
            for row in rows
            if (row["optimizer"], row["noise"], row["loss"], row["learning_rate"]) == ("adam", 0.4, loss, 1e-3)
        ]
        return 100 * sum(here) / len(here)

    losses = ("logistic", "gce", "bi-tempered")
    wanted = [mean(loss, column) for loss in losses for column in ("test_last", "test_chosen")]
    assert numbers[0:12:2] == pytest.approx(wanted, abs=0.051)  # each is followed by its deviation
    assert numbers[12:14] == pytest.approx([wanted[4] - wanted[0], wanted[5] - wanted[1]], abs=0.051)


def test_a_folder_may_still_hold_rows_of_an_earlier_default(quick, tmp_path):
    """Of one leg; alone they are shown, and beside newer ones they do not count."""
    _, rows = quick
    older = [
        row | {"numbers": [0.0, 1.75], "schedule": [0.1, 0.8], "test_last": 0.0, "test_chosen": 0.0}
        for row in rows
        if row["loss"] == "bi-tempered"
    ]
    others = [row for row in rows if row["loss"] != "bi-tempered"]
    path = tmp_path / "defaults.jsonl"
    write_rows(path, others + older)
    alone = defaults.render(path)["defaults.md"].decode()
    assert "from (1, 1) to (0, 1.75) between 5% and 40% of the run, at" in alone
    write_rows(path, older + rows)
    both = defaults.render(path)["defaults.md"].decode()
    assert "to (0, 2.25) between 5% and 100% of the run, through (0, 1.75) at 40%" in both
    assert "| 0.0 ± " not in both
