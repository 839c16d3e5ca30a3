"""What a newcomer meets on the command line: help, folders, numbers, titles and colours."""

import re
from pathlib import Path

import pytest
from experiment_cases import invoke

from bitempered.experiments import recipes, report
from bitempered.experiments.losses import LOSSES
from bitempered.experiments.recipes import last_epoch, protocols, table1, table2

ROOT = Path(__file__).parent.parent


def words(text):
    return " ".join(re.sub(r"[^\w.,:;()'-]", " ", text).split())


@pytest.mark.parametrize("what", recipes.REPRODUCED)
def test_help_after_a_name_is_about_it(what):
    entry = recipes.REPRODUCED[what]
    for arguments in ([what, "--help"], ["--help", what]):
        done = invoke("reproduce", *arguments)
        assert done.exit_code == 0, done.output
        said = words(done.stdout)
        assert words(f"Reproduce {what}: {entry.about}") in said
        assert all(words(other.about) not in said for name, other in recipes.REPRODUCED.items() if name != what)
        options = set(re.findall(r"^\W*--([\w-]+)", done.stdout, re.MULTILINE))
        assert options == {name.replace("_", "-") for name in entry.options} | {"out", "help"}


def test_help_without_a_name_is_about_all():
    said = words(invoke("reproduce", "--help").stdout)
    assert all(words(entry.about) in said for entry in recipes.REPRODUCED.values())


def test_commands_write_outside_what_is_committed():
    """Folders that help texts name are in output, which git ignores."""
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert "/output/" in ignored
    for command in ("compare", "tune", "reproduce", "bench", "audit"):
        said = words(invoke(command, "--help").stdout)
        assert re.search(r"without it,?( one in)? output", said), command
        assert "results" not in re.search(r"Folder (for|to) .*?(?= --|$)", said)[0].replace("the results", ""), command


def test_report_finds_rows_in_both_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = (ROOT / "results" / "protocol-b" / "protocol-b.jsonl").read_bytes()
    for folder in ("results/protocol-b", "output/protocol-b", "output/mine"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "protocol-b.jsonl").write_bytes(rows)
    done = invoke("report")
    assert done.exit_code == 0, done.output
    assert re.findall(r"^Written to (\S+):", done.stdout, re.MULTILINE) == [
        "results/protocol-b", "output/mine", "output/protocol-b"
    ]  # fmt: skip
    page = (ROOT / "results" / "protocol-b" / "protocol-b.md").read_text(encoding="utf-8")
    assert done.stdout.count(report.first_table(page)) == 3
    assert invoke("report", "mine").stdout.count("Written to") == 1


@pytest.mark.parametrize("epochs", [2, 500])
def test_a_quick_run_says_so_in_its_title(epochs):
    rows = [{"epochs": epochs, "seed": 0}]
    for title in (last_epoch.title(rows), report.titled("Table 1, mnist", rows)):
        assert title.startswith("A quick trial, which shows no effect") is (epochs == 2)


def test_committed_quick_runs_are_titled_so():
    folders = sorted((ROOT / "results").glob("*-quick"))
    assert folders
    for folder in folders:
        (page,) = folder.glob("*.md")
        assert page.read_text(encoding="utf-8").startswith("# A quick trial, which shows no effect (")
    for folder in {*(ROOT / "results").iterdir()} - {*folders}:
        for page in folder.glob("*.md"):
            assert "quick trial" not in page.read_text(encoding="utf-8").splitlines()[0]


def test_quick_recipes_are_short_enough_to_be_told():
    """`titled` looks at epochs."""
    assert table1.quick(table1.TABLE1["mnist"]).training.epochs <= report.TRIAL
    assert table2.quick(table2.TABLE2["resnet18"], "cpu").training.epochs <= report.TRIAL


def test_every_loss_has_its_own_colour():
    assert len({entry.colour for entry in LOSSES.values()}) == len(LOSSES)


def test_lines_of_a_loss_share_its_colour_and_differ_in_style():
    looks = report.looks([("logistic", False), ("gce", False), ("logistic", False), ("logistic", False)])
    assert [colour for colour, _ in looks] == [
        LOSSES[name].colour for name in ("logistic", "gce", "logistic", "logistic")
    ]
    assert len({style for colour, style in looks if colour == LOSSES["logistic"].colour}) == 3
    assert last_epoch.LOOKS["annealed to (0.5, 4)"] == (LOSSES["bi-tempered"].colour, "-")


def test_a_protocol_prints_its_table(monkeypatch, tmp_path):
    """It needs a GPU to train; here its rows are there already."""
    (tmp_path / "protocol-b.jsonl").write_bytes((ROOT / "results/protocol-b/protocol-b.jsonl").read_bytes())
    monkeypatch.setattr(protocols.Cifar100, "read", lambda *_, **__: None)
    monkeypatch.setattr(protocols, "run", lambda *_, **__: [])
    plan = protocols.plan("protocol-b", recipes.Options("cuda"))
    printed = plan.make(tmp_path, lambda *_: None)
    assert printed == report.first_table((ROOT / "results/protocol-b/protocol-b.md").read_text(encoding="utf-8"))
