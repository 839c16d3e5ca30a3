"""`bitempered reproduce`: the panels hold what their titles say, and the command writes them."""

import mpmath as mp
import oracle
import pytest
from experiment_cases import invoke

from bitempered import __version__
from bitempered.experiments.recipes.figure1 import figure1


def exact_loss(a, t1, t2):
    return oracle.loss_and_gradient([a, 0.0], [1, 0], t1, t2)[0]


# Each panel of the paper's figure 1: title, symbol in the legend, its temperatures, the function it shows.
PANELS = [
    ("(a)", r"\log_t", "t", [0, 0.5, 1, 1.5, 2], oracle.log_t),
    ("(b)", r"\exp_t", "t", [0, 0.5, 1, 1.5, 2], oracle.exp_t),
    ("(c)", "t_2 = 1.2", "t_1", [0, 0.25, 0.5, 0.75, 1], lambda a, t1: exact_loss(a, t1, 1.2)),
    ("(d)", "t_1 = 0.8", "t_2", [1, 1.2, 1.5, 2, 4], lambda a, t2: exact_loss(a, 0.8, t2)),
]


@pytest.mark.parametrize("index", range(4))
def test_figure_1_shows_what_the_paper_says(index):
    letter, subject, symbol, temperatures, exact = PANELS[index]
    axes = figure1().axes[index]
    assert axes.get_title().startswith(letter)
    assert subject in axes.get_title()
    assert axes.get_xlabel()
    assert axes.get_ylabel()
    lines = axes.get_lines()
    labels = [f"${symbol} = {t:g}$" for t in temperatures]
    assert [line.get_label() for line in lines] == labels
    assert [text.get_text() for text in axes.get_legend().get_texts()] == labels
    assert len({line.get_color() for line in lines}) == len(lines)
    for t, line in zip(temperatures, lines, strict=True):
        for i in (0, 300, 500, 700):
            x, y = (float(values[i]) for values in line.get_data())
            value = exact(x, t)
            assert y == (value if mp.isinf(value) else pytest.approx(float(value), rel=1e-9, abs=1e-12))


def test_reproduce_writes_a_png(tmp_path):
    folder = tmp_path / "new" / "figures"
    done = invoke("reproduce", "figure1", "--out", folder)
    assert done.exit_code == 0, done.output
    assert done.stdout == f"Written to {folder}: figure1.png\n"
    assert [path.name for path in folder.iterdir()] == ["figure1.png"]
    assert (folder / "figure1.png").read_bytes().startswith(b"\x89PNG")


def test_reproduce_names_what_there_is_for_an_unknown_figure(tmp_path):
    done = invoke("reproduce", "figure9", "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert done.stderr.startswith("bitempered: unknown figure or table 'figure9'; choose from: figure1, ")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


EVERYWHERE = {"--quick": [], "--resume": [], "--seeds": ["0"]}
DATA = {"--data-dir": ["."], "--device": ["abacus"]}
TAKEN = {
    "figure1": {},
    "figure2": {"--quick": [], "--seeds": ["0"]},
    "figure3": EVERYWHERE | DATA | {"--dataset": ["none"], "--network": ["none"]},
    "other-noise": EVERYWHERE | {"--data-dir": ["."]},
    "table1": EVERYWHERE | DATA | {"--dataset": ["none"], "--network": ["none"]},
    "table2": EVERYWHERE | DATA | {"--network": ["none"]},
    "protocol-a": {"--resume": [], "--seeds": ["0"], "--data-dir": ["."]},
    "protocol-b": {"--resume": [], "--seeds": ["0"], "--data-dir": ["."]},
}


@pytest.mark.parametrize("what", TAKEN)
def test_reproduce_refuses_options_that_would_do_nothing(what, tmp_path):
    takes = ", ".join(sorted({*TAKEN[what], "--out"}))
    for name, value in (EVERYWHERE | DATA | {"--dataset": ["none"], "--network": ["none"]}).items():
        # No seeds at all, which is wrong for each of them, so that nothing is trained.
        given = ["reproduce", what, name, *value, "--out", str(tmp_path / "out")]
        done = invoke(*(given if name == "--seeds" else [*given, "--seeds", "0"]))
        assert done.exit_code == 2
        if name in TAKEN[what]:
            assert done.stderr == "bitempered: seeds must be at least 1, got 0\n"
        else:
            refused = ", ".join(sorted({name, "--seeds"} - {*TAKEN[what]}))
            assert done.stderr == f"bitempered: {what} has no {refused}; it takes: {takes}\n"
        assert not (tmp_path / "out").exists()


def test_the_command_says_its_version():
    done = invoke("--version")
    assert (done.exit_code, done.stdout) == (0, f"bitempered {__version__}\n")


def test_reproduce_says_so_where_it_cannot_write(tmp_path):
    (tmp_path / "file").write_text("in the way")
    done = invoke("reproduce", "figure1", "--out", tmp_path / "file")
    assert done.exit_code == 1
    assert done.stderr.startswith(f"bitempered: cannot use the folder {tmp_path / 'file'}: ")
    assert done.stderr.count("\n") == 1
