"""The pages of docs/ do what they say: their code runs and prints what they show, their commands exist."""

import importlib
import re
import shlex
from pathlib import Path
from statistics import mean

import numpy as np
import pytest
import torch
import typer.main
from page_blocks import BLOCK, agree, run

from bitempered.cli import app
from bitempered.experiments import recipes
from bitempered.experiments.files import read_rows
from bitempered.experiments.recipes.table1 import LEVELS, TABLE1
from bitempered.torch import bi_tempered_logistic_loss

ROOT = Path(__file__).parent.parent
PAGES = {page.stem: page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md"))}
NEEDS = {
    "boosting": {"lightgbm": None, "xgboost": None},
    "jax": {"jax": None},
    "probabilities": {"sklearn": "1.8"},  # for temperature scaling
    "trainers": {"lightning": None, "transformers": None},
}
SLOW = {"trainers"}  # the frameworks take long to import

# What the frameworks say about themselves.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(name, marks=pytest.mark.slow if name in SLOW else ())
        for name, text in PAGES.items()
        if BLOCK.search(text)
    ],
)
def test_the_code_prints_what_the_page_shows(page, request):
    if page == "trainers":
        request.getfixturevalue("_torchvision")
    for framework, version in NEEDS.get(page, {}).items():
        pytest.importorskip(framework, version)
    for block, printed in run(PAGES[page]):
        assert agree(block["shown"] or "", printed), f"it prints\n{printed}instead of\n{block['shown']}"


def test_every_block_is_found():
    """One that is indented, or fenced in another way, would not be run."""
    for name, text in PAGES.items():
        assert text.count("```python") == len(BLOCK.findall(text)), name


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [("a: 86%\n", "a:  9%\n", False), ("a: 86%\n", "a: 83%\n", True), ("0.864", "0.865", True), ("0.86", "0.9", False),
     ("a 1", "b 1", False), ("1", "1 2", False)],
)  # fmt: skip
def test_outputs_agree_in_words_and_nearly_in_numbers(shown, printed, same):
    assert agree(shown, printed) is same


COMMANDS = [
    (name, line)
    for name, text in {**PAGES, "README": (ROOT / "README.md").read_text(encoding="utf-8")}.items()
    for code in [*re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL), *re.findall(r"`([^`\n]+)`", text)]
    for line in code.splitlines()
    if re.match(r"bitempered [a-z]|make |pip install", line)
]


@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_commands_and_their_options_exist(page, line):
    program, name, *rest = shlex.split(line.split(" # ")[0])
    if program == "make":
        assert re.search(rf"^{name}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    elif program == "pip":
        extras = re.fullmatch(r"\.\[([\w,]+)\]", rest[0])[1].split(",")
        for extra in extras:
            assert re.search(rf"^{extra} = \[", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    else:
        command = typer.main.get_command(app).commands[name]
        options = {option for parameter in command.params for option in parameter.opts} | {"--help"}
        assert {word for word in rest if word.startswith("--")} <= options
        if name == "reproduce":
            assert rest[0] in recipes.REPRODUCED


@pytest.mark.parametrize(
    ("t1", "t2", "classes", "said"), [(0.8, 1.2, 10, "0.4"), (0.8, 1.2, 1000, "0.06"), (0.5, 4.0, 10, "0.0003")]
)
def test_the_gradient_at_zero_logits_is_smaller_by_the_factor_it_says(t1, t2, classes, said):
    assert re.search(rf"\b{re.escape(said)}\b for (\({t1}, {t2}\) and\s+)?K = {classes:,}", PAGES["choose"])
    logits = torch.zeros(classes, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(bi_tempered_logistic_loss(logits, torch.tensor(0), t1, t2), logits)
    (of_cross_entropy,) = torch.autograd.grad(torch.nn.functional.cross_entropy(logits, torch.tensor(0)), logits)
    torch.testing.assert_close(gradient, classes ** -(t2 - t1) * of_cross_entropy, rtol=1e-12, atol=0)
    assert classes ** -(t2 - t1) == pytest.approx(float(said), rel=0.07)  # rounded to one digit


def test_the_verdicts_on_the_default_schedule_are_those_of_its_table():
    """If it is measured again, these sentences of when.md and choose.md must follow."""
    noisy, clean, better, factors = [], [], [], []
    for line in (ROOT / "results/defaults/defaults.md").read_text(encoding="utf-8").splitlines():
        found = re.fullmatch(
            r"\| \w+, \w+ (?P<usual>\S+) \| (?P<noise>\d+)% \|.*\| (?P<ours>\S+) ± [^|]*\| (?P<gain>\S+) / [^|]*"
            r"\| (?P<rate>[\d.]+): (?P<theirs>\S+) ±.*", line
        )  # fmt: skip
        if found and found["noise"] == "0":
            clean.append(float(found["gain"]))
        elif found and found["noise"] == "40":
            noisy.append(float(found["gain"]))
            better.append(float(found["theirs"]) - float(found["ours"]))
            factors.append(float(found["usual"]) / float(found["rate"]))
    when, choose = (" ".join(PAGES[name].split()) for name in ("when", "choose"))
    assert f"gains {min(noisy):.0f} to {max(noisy):.0f} points if 40 %" in when
    assert len(clean) == 4
    assert -1.25 <= min(clean) <= max(clean) <= -0.75  # "about one percentage point"
    assert f"At a rate {min(factors):.0f} to {max(factors):.0f} times smaller" in when
    remedies = [points for points in better if points > 0]
    assert len(remedies) == 3  # "three of the four"
    assert "three of the four" in when
    assert "three of the four" in choose
    assert f"by {min(remedies):.0f} to {max(remedies):.0f} points. On digits with SGD" in when
    assert round(min(better)) == -2  # "two points ahead"


def test_the_verdicts_on_the_convolutional_net_are_those_of_its_table():
    found = {}
    for line in (ROOT / "results/convnet/convnet.md").read_text(encoding="utf-8").splitlines():
        if not line.startswith(("| Fashion-MNIST |", "| CIFAR-100 |")):
            continue
        name, _, noise, *cells, difference, slower = (cell.strip() for cell in line.strip("|").split("|"))
        logistic, gce, constant, ours, slower = (
            np.array([float(accuracy.split()[0]) for accuracy in cell.split(": ")[-1].split(" / ")])
            for cell in (*cells, slower)
        )
        gain = np.array(difference.split(" / "), dtype=float)
        np.testing.assert_allclose(ours - logistic, gain, atol=0.11)  # of rounded numbers
        found.setdefault((name, noise), []).append([gain, ours - gce, ours - constant, ours - slower])
    assert {place: len(rows) for place, rows in found.items()} == {
        ("Fashion-MNIST", "0%"): 3,
        ("Fashion-MNIST", "40%"): 3,
        ("CIFAR-100", "0%"): 2,
        ("CIFAR-100", "40%"): 2,
    }
    # At the last and at the chosen epoch, by training: what the schedule gains over the logistic loss and the others.
    when, findings = (" ".join(PAGES[name].split()) for name in ("when", "findings"))

    def ends(gains, digits=0):
        return f"{min(gains):.{digits}f} to {max(gains):.{digits}f}"

    (last, chosen), gce, constant, slower = np.array(found["Fashion-MNIST", "40%"]).transpose(1, 2, 0)
    gained = f"On Fashion-MNIST with 40 % noise it gains {ends(last)} points over cross-entropy at the last epoch"
    assert gained in when
    assert gained in findings
    assert f"and {ends(chosen, 1)} at the chosen one. Without" in when
    assert f"Without noise it loses at most {-np.array(found['Fashion-MNIST', '0%'])[:, 0].min():g}." in when
    assert f"cross-entropy is ahead of it by {ends(-gce[0])} points, and" in when
    assert f"at the best of four rates by {ends(-slower[0])}." in when
    assert all(last - constant[0] < 5)  # constant (0.8, 1.2) "does not keep this net from memorising"

    (last, chosen), gce, constant, slower = np.array(found["CIFAR-100", "40%"]).transpose(1, 2, 0)
    gained = f"On CIFAR-100 with 40 % noise it gains {ends(last)} points over cross-entropy at the last epoch, "
    assert f"{gained}and {ends(chosen)} at the chosen one." in when
    assert f"the same net gains {ends(last)} points, and {ends(chosen)} with early stopping" in when
    assert f"{gained}{ends(chosen)} at the chosen one" in findings
    assert f"the default schedule is {ends(chosen)} points ahead at 40 % noise, and {ends(slower[1])} ahead" in findings
    assert f"it gains {chosen[0]:.0f} and {chosen[1]:.0f}. The tables" in when
    assert [round(points) for points in -gce[0]] == [4, 4]
    assert "ahead of it by 4 points at the last epoch" in when
    assert f"behind by {gce[1].min():.1f} and {gce[1].max():.1f} at the chosen one" in when
    assert [round(points) for points in slower[0]] == [2, 2]
    assert f"behind by 2 points at the last epoch, and by {ends(slower[1])} at the chosen one" in when
    over = (last - constant[0], chosen - constant[1])
    assert (
        f"(0.8, 1.2) gains {ends(over[0])} points over cross-entropy at the last epoch, and {ends(over[1])} at" in when
    )
    (clean_last, clean_chosen), *_, (clean_slower, _) = np.array(found["CIFAR-100", "0%"]).transpose(1, 2, 0)
    assert f"too: {ends(clean_last)} points at the last epoch and {ends(clean_chosen)} at the chosen one." in when
    assert min(*clean_last, *clean_chosen) >= 1
    assert f"Against the best of four rates it gains {ends(clean_slower)} points at the last epoch." in when


def test_the_verdicts_on_the_searched_convolutional_net_are_those_of_its_rows():
    rows = read_rows(ROOT / "results/convnet-searched/convnet-searched.jsonl")

    def lead(level, decay=0.0):
        """By how many points the schedule is ahead at the last and at the chosen epoch, and of how many seeds."""
        cell = [row for row in rows if (row["noise"], row["weight_decay"]) == (level, decay) and row["seed"] < 100]
        ours, theirs = ([row for row in cell if row["loss"] == name] for name in ("bi-tempered", "gce"))
        assert len(ours) == len(theirs)
        columns = ("test_last", "test_chosen")
        return [100 * (mean(row[at] for row in ours) - mean(row[at] for row in theirs)) for at in columns], len(ours)

    when, findings = (" ".join(PAGES[name].split()) for name in ("when", "findings"))
    (last, chosen), seeds = lead(0.4)
    assert seeds == 3
    said = f"{last:.1f} points ahead at the last epoch and {chosen:.1f} at the chosen one (three seeds)"
    assert f"where it was searched, it is {said}" in when
    assert f"It is {said}" in findings
    assert f"a searched schedule is {last:.1f} points ahead (three seeds)" in findings
    (last, chosen), seeds = lead(0.6)
    assert seeds == 1
    ahead = f"{last:.1f} ahead at the last epoch and {-chosen:.1f} behind at the chosen one (one seed)"
    assert f"At 60 % it is {ahead}" in when
    (last, chosen), seeds = lead(0.0)
    assert seeds == 1
    assert abs(last) < 0.05
    assert f"level at the last epoch and {chosen:.1f} ahead at the chosen one" in when
    (last, _), _ = lead(0.4, decay=5e-4)
    assert f"the same schedule fails: it ends {-last:.0f} points behind generalized cross-entropy" in when


def test_the_verdicts_on_many_classes_are_those_of_their_rows():
    gains = {}
    for line in (ROOT / "benchmarks/classes.md").read_text(encoding="utf-8").splitlines():
        if "| 40% |" in line:
            classes, optimizer, *_, gain = (cell.strip() for cell in line.strip("|").split("|"))
            gains[int(classes), optimizer] = float(gain.split(" / ")[1])
    when = " ".join(PAGES["when"].split())
    assert f"it gains {gains[26, 'SGD']:.0f} and {gains[26, 'Adam']:.0f} points with 26 classes." in when
    assert f"With 100 it gains {gains[100, 'SGD']:.0f} with SGD and loses {-gains[100, 'Adam']:.0f} with Adam." in when


def test_the_verdicts_on_hardt_and_ma_s_net_are_those_of_its_rows():
    rows = read_rows(ROOT / "results/protocol-hardt-ma/protocol-hardt-ma.jsonl")
    paper = TABLE1["cifar100"].paper
    tried = {name: [row for row in rows if row["seed"] == 100 and row["loss"] == name] for name in paper}
    cells = {(row["noise"], row["loss"]): row for row in rows if row["seed"] != 100}
    assert {row["noise"] for found in tried.values() for row in found} == {0.4}
    assert [len(found) for found in tried.values()] == [3, 3]
    pairs = [level for level in (0.4, 0.5, 0.2, 0.0) if {(level, name) for name in paper} <= cells.keys()]
    # With other rows these pages must follow.
    assert (len(cells), len(rows), len(pairs)) == (9, 15, 4)
    for (_, name), row in cells.items():
        best = max(tried[name], key=lambda row: row["validation_chosen"])
        assert all(row[key] == best[key] for key in ("numbers", "learning_rate", "weight_decay"))
    assert cells[0.4, "bi-tempered"]["numbers"] == [0.8, 1.2]
    printed = {name: np.array([paper[name][LEVELS.index(level)] for level in pairs]) for name in paper}
    ours = {name: np.array([100 * cells[level, name]["test_chosen"] for level in pairs]) for name in paper}
    leads, in_the_paper = (found["bi-tempered"] - found["logistic"] for found in (ours, printed))
    short = {name: printed[name] - ours[name] for name in paper}
    when, findings = (" ".join(PAGES[name].split()) for name in ("when", "findings"))
    words = "by {1:.1f} {0}at 40 % noise, {2:.1f} at 50 %, {3:.1f} at 20 % and {4:.1f} without noise"
    assert min(leads) > 0  # "in all four pairs"
    assert f"is ahead of our logistic loss in all four pairs: {words.format('points ', *leads)}." in findings
    assert "it is ahead by {:.1f}, {:.1f}, {:.1f} and {:.1f}.".format(*in_the_paper) in findings
    assert f"misses the paper's numbers {words.format('', *short['bi-tempered'])};" in findings
    assert "misses them by {:.1f}, {:.1f}, {:.1f} and {:.1f}.".format(*short["logistic"]) in findings
    other = {
        (row["loss"], *row["numbers"]): 100 * row["test_chosen"]
        for row in read_rows(ROOT / "results/table1-cifar100-wide/table1.jsonl")
        if row["noise"] == 0.4
    }
    theirs, near, paper_s = other["logistic",], other["bi-tempered", 0.9, 1.1], other["bi-tempered", 0.8, 1.2]
    weak, best = (ours[name][0] for name in ("logistic", "bi-tempered"))
    assert f"(0.8, 1.2) is {leads[0]:.1f} points ahead, but the logistic loss" in when
    assert f"it has {weak:.1f} %, and {theirs:.1f} % with another net of this width." in when
    assert f"(0.9, 1.1) is {near - theirs:.1f} points ahead and (0.8, 1.2) {theirs - paper_s:.1f} behind" in when
    assert f"it has {theirs:.1f} % with the other net of this width, and {weak:.1f} % with this one" in findings
    assert f"(0.8, 1.2) has {best:.1f} % here, which is {best - theirs:.1f} above that logistic loss" in findings
    assert f"{near - best:.1f} below (0.9, 1.1) there" in findings
    assert f"it is {near - theirs:.1f} and {leads[0]:.1f} ahead at 40 %" in findings  # "with two larger ones"
    fits = "fits only {:.0f} and {:.0f} % of the training labels"
    assert fits.format(*(100 * cells[0.0, name]["noisy_last"] for name in paper)) in findings
    assert cells[0.4, "logistic"]["chosen_epoch"] == cells[0.4, "logistic"]["epochs"]  # "when training ends"
    constant, robust = (row["test_chosen"] for row in tried["bi-tempered"] if row["weight_decay"] == 5e-4)
    assert f"is {100 * (constant - robust):.1f} points behind constant (0.9, 1.1)." in findings


def test_the_verdicts_on_rare_classes_are_those_of_their_rows():
    rows = read_rows(ROOT / "benchmarks/rare_classes.jsonl")

    def lead(kept, level, balanced, part):
        """Return by how many points the default schedule is ahead of cross-entropy."""
        cell = [row for row in rows if (row["kept"], row["noise"], row["balanced"]) == (kept, level, balanced)]
        ours, theirs = (
            [row[part] for row in cell if row["model"] == name] for name in ("default schedule", "cross-entropy")
        )
        assert len(ours) == len(theirs) == 5
        return 100 * (mean(ours) - mean(theirs))

    when = " ".join(PAGES["when"].split())
    plain = {(kept, level): lead(kept, level, False, "rare") for kept in (10, 30) for level in (0, 0.2, 0.4)}
    assert (
        f"by {-plain[10, 0]:.0f} points without noise, and by {-plain[10, 0.2]:.0f} and {-plain[10, 0.4]:.0f}" in when
    )
    few = f"behind by {-plain[30, 0]:.0f} without noise, and ahead by {plain[30, 0.2]:.0f} and {plain[30, 0.4]:.0f}"
    assert f"{few} with noise" in when
    rare, common = ({place: lead(*place, True, part) for place in plain} for part in ("rare", "common"))
    assert min(rare.values()) > 0  # "in all six cases"
    noisy = [place for place in plain if place[1]]
    ends = [f"{end([part[place] for place in noisy]):.0f}" for part in (rare, common) for end in (min, max)]
    assert "leads by {} to {} points there, and by {} to {} on common".format(*ends) in when
    assert all(-1.5 < common[kept, 0] < -0.5 for kept in (10, 30))  # "about one point"


def test_no_table_of_results_is_copied():
    """The page links to them. The site replaces a link named Table by the table."""
    for name, text in PAGES.items():
        if name != "math":  # its table is of temperatures, and another test evaluates it
            assert not re.findall(r"^\|.*\| *[+−-]?\d[\d.,]*(?: ± [\d.]+)?%? *\|", text, re.MULTILINE), name


def test_links_to_tables_name_what_is_there():
    """The site raises if a table or a row is missing, and leaves a link that it does not understand."""
    lines = [line for text in PAGES.values() for line in text.splitlines() if line.lower().startswith("[table")]
    assert len(lines) > 30
    for line in lines:
        link = re.fullmatch(r"\[Table(?: \d+)?(?:, rows of .+)?\]\(\.\./((?:results|benchmarks)/\S+\.md)\)", line)
        assert link, line
        assert (ROOT / link[1]).exists(), line


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "api").glob("*.md")), ids=lambda page: page.stem)
def test_the_reference_names_what_a_module_exports(page):
    text = page.read_text(encoding="utf-8")
    (name,) = re.findall(r"^::: (\S+)$", text, re.MULTILINE)
    if listed := re.findall(r"^ +- (\w+)$", text, re.MULTILINE):
        assert {*listed, "baselines"} == {*importlib.import_module(name).__all__, "baselines"}
