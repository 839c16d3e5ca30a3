"""`bitempered report`: every committed page, table and figure is what its rows give, without training or data."""

import functools
import json
import shutil
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from experiment_cases import invoke
from PIL import Image

from bitempered.experiments import recipes
from bitempered.experiments.files import read_rows, write_rows

RESULTS = Path(__file__).parents[1] / "results"
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
FOLDERS = recipes.folders(RESULTS)
RAW = {".jsonl", ".npz"}  # what pages are rendered from
rendered = functools.cache(recipes.render)  # of folders that no test changes


def test_all_committed_folders_are_known():
    assert sorted(path for path in RESULTS.iterdir() if any(path.glob("*.jsonl"))) == FOLDERS
    assert FOLDERS


@pytest.mark.parametrize("folder", [*FOLDERS, BENCHMARKS], ids=lambda folder: folder.name)
def test_what_is_committed_is_what_its_rows_give(folder):
    pages = rendered(folder)
    if folder == BENCHMARKS:  # which also has scripts that write pages of their own
        assert set(pages) == {"cpu.md", "cpu.png", "gpu.md", "gpu.png"}
    else:
        assert set(pages) == {path.name for path in folder.glob("*.*") if path.suffix not in RAW}
    for name, content in pages.items():
        committed = (folder / name).read_bytes()
        if name.endswith(".png") and content != committed:
            ours, theirs = (Image.open(BytesIO(png)) for png in (content, committed))
            # Byte for byte with one version of matplotlib; another may draw letters and edges otherwise.
            assert ours.info["Software"] != theirs.info["Software"], name
            ours, theirs = (np.asarray(image.convert("L"), float) for image in (ours, theirs))
            assert ours.shape == theirs.shape
            assert np.abs(ours - theirs).mean() < 2  # of 255
        else:
            assert content == committed, name


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("table1-mnist", ["table1-mnist"]),
        ("figure3", ["table1-cifar100", "table1-cifar100-wide", "table1-mnist"]),
        ("protocol-a", ["protocol-a"]),
        (RESULTS / "compare", ["compare"]),
        (BENCHMARKS, ["benchmarks"]),
    ],
)
def test_report_writes_what_it_is_asked_for(what, names, tmp_path, monkeypatch):
    monkeypatch.chdir(RESULTS.parent)
    monkeypatch.setattr(recipes, "render", lambda folder: rendered(folder.resolve()))
    done = invoke("report", what, "--out", tmp_path)
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    for name in names:
        for path in (tmp_path / name).glob("*.md"):
            folder = BENCHMARKS if name == "benchmarks" else RESULTS / name
            assert path.read_bytes() == (folder / path.name).read_bytes()


def test_report_without_words_renders_all_beside_their_rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("figure2", "protocol-b"):
        (tmp_path / "results" / name).mkdir(parents=True)
        for path in (RESULTS / name).iterdir():
            if path.suffix in RAW:
                shutil.copy(path, tmp_path / "results" / name)
    (tmp_path / "results" / "notes").mkdir()
    done = invoke("report")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "results" / "figure2" / "figure2.png").exists()
    for name in ("figure2", "protocol-b"):
        assert (Path("results") / name / f"{name}.md").read_bytes() == (RESULTS / name / f"{name}.md").read_bytes()


def test_older_rows_in_the_file_are_not_shown(tmp_path):
    """Of other settings, and of the same ones made before."""
    rows = read_rows(RESULTS / "compare" / "compare.jsonl")
    older = [{**row, "epochs": 2, "test_last": 0} for row in rows] + [{**row, "test_last": 0} for row in rows]
    write_rows(tmp_path / "compare.jsonl", older + rows)
    assert recipes.render(tmp_path)["compare.md"] == (RESULTS / "compare" / "compare.md").read_bytes()


def test_rows_need_not_be_named_as_their_recipe(tmp_path, monkeypatch):
    entry = recipes.RECIPES["compare"]
    monkeypatch.setattr(recipes, "RECIPES", {"again": replace(entry, rows="other-rows")})
    write_rows(tmp_path / "other-rows.jsonl", read_rows(RESULTS / "compare" / "compare.jsonl"))
    assert recipes.render(tmp_path)["compare.md"] == (RESULTS / "compare" / "compare.md").read_bytes()


def test_a_part_of_a_comparison_is_shown_with_dashes(tmp_path):
    rows = read_rows(RESULTS / "compare" / "compare.jsonl")
    rows = [row for row in rows if row["seed"] == rows[0]["seed"]]
    write_rows(tmp_path / "compare.jsonl", rows[:-1])
    page = recipes.render(tmp_path)["compare.md"].decode()
    assert " | – |" in page
    assert f"{len(rows) - 1} of {len(rows)} runs" in page


@pytest.mark.parametrize("what", ["nothing", "results/notes", None])
def test_nothing_to_render_gets_one_line(what, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results" / "notes").mkdir(parents=True)
    done = invoke("report", *([what] if what else []))
    assert done.exit_code == 2
    assert done.stderr.startswith("bitempered: found no results for ")
    assert "table1" in done.stderr  # one of those to choose from
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("content", ["not JSON\n", json.dumps({"dataset": "digits"}) + "\n", ""])
def test_rows_of_something_else_get_one_line(content, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "compare.jsonl").write_text(content)
    done = invoke("report", tmp_path / "mine")
    assert done.exit_code == 1
    assert done.stderr.count("\n") == 1
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["compare.jsonl"]


@pytest.mark.parametrize("content", [None, b"not an archive"])
def test_figure_2_without_its_probabilities_gets_one_line(content, tmp_path):
    shutil.copy(RESULTS / "figure2" / "figure2.jsonl", tmp_path)
    if content is not None:
        (tmp_path / "figure2.npz").write_bytes(content)
    done = invoke("report", tmp_path)
    assert done.exit_code == 1
    assert done.stderr.count("\n") == 1
    assert "figure2.npz" in done.stderr
