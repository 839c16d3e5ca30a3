"""`bitempered audit`: its files, what a page may hold, and errors in one line."""

import csv
import io
import re
import warnings
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from experiment_cases import error_lines, invoke
from sklearn.datasets import load_breast_cancer, load_wine
from sklearn.exceptions import ConvergenceWarning

from bitempered import noise
from bitempered.audit import SCORES, Audit
from bitempered.experiments import audit_report, audits
from bitempered.experiments.audit_report import Audited, Rows
from bitempered.experiments.sources import read_table

EPOCHS = audits.EPOCHS
NAMES = ("<script>alert(1)</script>", 'a "quoted" & cie')


@pytest.fixture(autouse=True)
def _few_epochs(monkeypatch):
    monkeypatch.setattr(audits, "EPOCHS", (20, 20))


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Two classes far apart, 100 rows, of which 10 are labelled wrong; names that a page must escape."""
    path = tmp_path_factory.mktemp("table") / "table.csv"
    rng = np.random.default_rng(0)
    truth = np.arange(100) % 2
    labels = noise.symmetric(truth, 0.1, rng=rng, num_classes=2)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["x<1>", "note", "y"])
        writer.writerows([f"{8 * c + rng.normal():.3f}", "0007", NAMES[y]] for c, y in zip(truth, labels, strict=True))
    return path, truth, labels


def rows_of(path):
    return list(csv.DictReader(io.StringIO(path.read_text())))


def test_a_table(table, tmp_path):
    path, truth, labels = table
    done = invoke("audit", path, "--label-column", "y", "--out", tmp_path)
    assert done.exit_code == 0, done.stderr
    assert "10 count as wrong" in " ".join(done.stdout.split())
    assert f"Written to {tmp_path}: audit.csv, audit.html, cleaned.csv" in done.stdout

    ranked = rows_of(tmp_path / "audit.csv")
    assert sorted(int(row["row"]) for row in ranked) == list(range(1, 101))
    scores = [float(row["score"]) for row in ranked]
    assert scores == sorted(scores, reverse=True)
    found = {int(row["row"]) - 1 for row in ranked if row["wrong"] == "1"}
    assert found == set(np.flatnonzero(truth != labels))
    assert all(row["label"] == NAMES[labels[int(row["row"]) - 1]] for row in ranked)

    # The cleaned table is the same but for those labels: the text of other columns stays as it was.
    before, after = rows_of(path), rows_of(tmp_path / "cleaned.csv")
    assert [row["y"] for row in after] == [NAMES[c] for c in truth]
    assert [row | {"y": ""} for row in before] == [row | {"y": ""} for row in after]
    np.testing.assert_array_equal(read_table(tmp_path / "cleaned.csv", "y").labels, truth)


class Checker(HTMLParser):
    """Collects tags, and everything that a page would load."""

    def __init__(self):
        super().__init__()
        self.tags, self.loaded, self.text = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.loaded += [v for k, v in attrs if k in ("src", "href") and not v.startswith("#")]

    def handle_data(self, data):
        self.text.append(data)


def checked(html):
    page = Checker()
    page.feed(html)
    assert "script" not in page.tags
    assert all(address.startswith("data:image/png;base64,") for address in page.loaded)
    assert not re.search(r"https?:|url\(|@import", html)
    assert "prefers-color-scheme: dark" in html
    return page


def test_the_page_of_a_table_escapes_everything(table, tmp_path):
    path, _, _ = table
    assert invoke("audit", path, "--label-column", "y", "--out", tmp_path).exit_code == 0
    html = (tmp_path / "audit.html").read_text()
    page = checked(html)
    assert NAMES[0] in " ".join(page.text)  # as text
    assert "x<1>" in page.text


def test_images_are_pictures():
    rng = np.random.default_rng(0)
    digits = audits.read("digits")
    assert digits.images.shape == (1797, 1, 8, 8)
    few = replace(digits, features=digits.features[:400], labels=digits.labels[:400], images=digits.images[:400])
    audited = audits.run(replace(few, labels=noise.symmetric(few.labels, 0.1, rng=rng, num_classes=10)))
    pages = audits.pages(audited, "label")
    assert set(pages) == {"audit.csv", "audit.html"}
    page = checked(pages["audit.html"].decode())
    assert page.tags.count("img") == len(page.loaded) == min(100, max(12, audited.found.wrong.sum()))


def test_odd_names_and_huge_values(tmp_path):
    """Nothing breaks a line on the terminal, long names are cut, and the square of a value may overflow."""
    names, long = ["a\nb", "\x1b[31mred"], "x" * 5000
    with (tmp_path / "odd.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([long, "x y", "y"])
        writer.writerows([8 * (i % 2) + i / 100, 1e300 if i == 3 else i % 7 * 1e-300, names[i % 2]] for i in range(40))
    done = invoke("audit", tmp_path / "odd.csv", "--label-column", "y", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    shown = lines[lines.index(next(line for line in lines if line.split() == ["row", "label", "suggested", "score"])) :]
    assert [len(line) for line in shown[:11]] == [len(shown[0])] * 11
    assert "\x1b" not in done.stdout
    page = checked((tmp_path / "audit.html").read_text())
    assert "1e+300" in page.text or "6e-300" in page.text
    assert max(map(len, page.text[1:])) < 5000
    assert rows_of(tmp_path / "cleaned.csv")[3]["y"] == names[1]


def test_a_cleaned_table_can_be_read_again(tmp_path):
    """In Parquet a column may hold truth values, which a CSV has no number for."""
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    column = [i % 2 == 1 for i in range(40)]
    table = {"x": [float(i % 2) for i in range(40)], "odd": column, "label": [str(value) for value in column]}
    parquet.write_table(pa.table(table), tmp_path / "t.parquet")
    done = invoke("audit", tmp_path / "t.parquet", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    again = read_table(tmp_path / "cleaned.csv", "label")
    assert again.features[:, 1].tolist() == column
    assert again.classes == ["False", "True"]


@pytest.mark.parametrize("names", [["01", "02"], ["0.0", "1.0"]])
def test_suggested_labels_are_spelled_as_in_the_table(names, tmp_path):
    """A reader of text would see new classes otherwise; pandas writes a column of floats like the second."""
    lines = [f"{8 * (i % 2) + i / 100},{names[(i % 2) ^ (i == 3)]}" for i in range(40)]
    (tmp_path / "t.csv").write_text("\n".join(["x,y", *lines]))
    done = invoke("audit", tmp_path / "t.csv", "--label-column", "y", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    assert [row["y"] for row in rows_of(tmp_path / "cleaned.csv")] == [names[i % 2] for i in range(40)]
    worst = rows_of(tmp_path / "audit.csv")[0]
    assert (worst["row"], worst["label"], worst["suggested"]) == ("4", names[0], names[1])


@pytest.mark.parametrize("rows", [10, 24, 41])
def test_small_tables_reach_the_end_of_the_schedule(rows, monkeypatch):
    """The page says that the network is trained by the schedule, not by cross-entropy alone."""
    monkeypatch.setattr(audits, "EPOCHS", EPOCHS)
    y = np.arange(rows) % 2
    X = y[:, None] + np.linspace(-0.3, 0.3, rows)[:, None]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model = audits.classifier(rows).fit(X[: rows * 4 // 5], y[: rows * 4 // 5])
    assert (model.t1_, model.t2_) == (0, 2)


def test_every_line_end_in_a_cell_survives():
    cells = ["a\rb", "cat\r", "two\nlines", "\r\n", 'a "quote"', ""]
    written = audits.to_csv(["label", "n"], [[cell, "1"] for cell in cells]).decode()
    rows = list(csv.reader(io.StringIO(written, newline="")))
    assert rows == [["label", "n"], *([cell, "1"] for cell in cells)]
    assert written.startswith("label,n\n")


def test_a_folder_that_cannot_be_used_is_found_before_training(table, tmp_path, monkeypatch):
    monkeypatch.setattr(audits, "run", lambda *_, **__: pytest.fail("trained"))
    (tmp_path / "taken").write_text("a file")
    done = invoke("audit", table[0], "--label-column", "y", "--out", tmp_path / "taken")
    assert done.exit_code == 1
    (line,) = error_lines(done)
    assert f"cannot use the folder {tmp_path / 'taken'}: " in line


def test_an_audit_that_is_stopped_leaves_no_folder(table, tmp_path, monkeypatch):
    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(audits, "run", stopped)
    done = invoke("audit", table[0], "--label-column", "y", "--out", tmp_path / "new" / "out")
    assert "nothing was written" in done.stderr
    assert not (tmp_path / "new").exists()


def test_many_classes_get_no_warning_of_another_package(tmp_path):
    (tmp_path / "t.csv").write_text("x,label\n" + "".join(f"{i},{i % 30}\n" for i in range(60)))
    rows = audits.read(str(tmp_path / "t.csv"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        audits.run(rows)
    assert caught == []


def test_clean_labels_are_called_clean(tmp_path):
    lines = "".join(f"{8 * (i % 2) + i / 100},{i % 2}\n" for i in range(40))
    (tmp_path / "clean.csv").write_text("x,label\n" + lines)
    done = invoke("audit", tmp_path / "clean.csv", "--out", tmp_path)
    assert "About 0.0% of the 40 labels seem to be wrong. None counts as wrong here." in " ".join(done.stdout.split())
    page = checked((tmp_path / "audit.html").read_text())
    assert "None of them counts as wrong. Rows are numbered from 1, after the header." in page.text


@pytest.mark.parametrize(("name", "published"), [("wine", load_wine), ("breast-cancer", load_breast_cancer)])
def test_registered_tables_are_audited_as_tables(name, published, tmp_path):
    rows = audits.read(name)
    features, labels = published(return_X_y=True)
    assert rows.images is None
    np.testing.assert_array_equal(rows.features, features)
    np.testing.assert_array_equal(rows.labels, labels)
    done = invoke("audit", name, "--out", tmp_path)
    assert done.exit_code == 0, done.output
    assert len(rows_of(tmp_path / "audit.csv")) == len(labels)
    page = checked((tmp_path / "audit.html").read_text())
    assert "img" not in page.tags
    assert "feature 8" in page.text


@pytest.mark.parametrize("channels", [1, 3])
def test_a_picture_holds_its_image(channels):
    import base64

    from PIL import Image

    image = np.random.default_rng(0).integers(0, 256, (channels, 4, 5), dtype=np.uint8)
    content = base64.b64decode(audit_report.data_uri(image).removeprefix("data:image/png;base64,"))
    found = np.asarray(Image.open(io.BytesIO(content)))
    np.testing.assert_array_equal(found, image[0] if channels == 1 else image.transpose(1, 2, 0))


def test_many_classes_get_a_list_of_pairs():
    n, classes = 300, 30
    names = np.array([f"class {c}" for c in range(classes)])
    labels = names[np.arange(n) % classes]
    confusion = np.eye(classes) / classes
    confusion[3, 3], confusion[3, 7] = 0.5 / classes, 0.5 / classes
    found = Audit(labels, np.zeros(n), labels, np.arange(n), confusion, 1 - np.trace(confusion), names)
    rows = Rows("many", np.zeros((n, 2)), np.zeros(n, int), list(names), ["a", "b"])
    html = audit_report.page(Audited(rows, found, method="by hand"))
    checked(html)
    assert "<td>class 3</td><td>class 7</td><td>5</td><td>50%</td>" in html


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["nothing.csv"], 1, "cannot read nothing.csv"),
        (["letters"], 2, "unknown dataset 'letters'"),
        (["digits", "--label-column", "y"], 2, "--label-column is for tables"),
        (["TABLE", "--score", "entropy"], 2, "--score must be one of posterior, margin, confidence"),
        (["TABLE", "--repeats", "0"], 2, "--repeats must be at least 1"),
        (["TABLE"], 1, "has no column 'label'; choose from: x<1>, note, y"),
    ],
)
def test_errors_are_one_line(options, code, message, table, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = invoke("audit", *(str(table[0]) if option == "TABLE" else option for option in options))
    assert done.exit_code == code
    [line] = error_lines(done)
    assert message in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("labels", "message"),
    [("aaaab", "the class 'b' has a single row"), ("aaaaa", "at least two classes, got 1")],
)
def test_labels_that_cannot_be_judged(labels, message, tmp_path):
    (tmp_path / "t.csv").write_text("x,label\n" + "".join(f"{i},{label}\n" for i, label in enumerate(labels)))
    done = invoke("audit", tmp_path / "t.csv", "--out", tmp_path / "out")
    assert done.exit_code == 1
    [line] = error_lines(done)
    assert message in line


def test_a_rare_class_gets_fewer_folds(tmp_path):
    lines = [f"{i},{'rare' if i % 20 == 0 else 'a' if i % 2 else 'b'}" for i in range(60)]
    (tmp_path / "t.csv").write_text("x,label\n" + "\n".join(lines))
    told = []
    audits.run(audits.read(str(tmp_path / "t.csv")), progress=lambda done, total, text: told.append((done, total)))
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_help_names_the_scores():
    assert all(score in invoke("audit", "--help").stdout for score in SCORES)
