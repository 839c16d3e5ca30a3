"""Tables of one's own, CSV and Parquet: what is read from them, and one line for whatever is wrong."""

import re
import struct
import sys
from datetime import date
from decimal import Decimal

import numpy as np
import pytest
from experiment_cases import one_line

from bitempered.experiments import data, datasets, sources
from bitempered.experiments.sources import DataError

# Tables

CSV = "height,width,kind\n" + "".join(f"{i},{i / 2},{'cat' if i % 3 else 'dog'}\n" for i in range(30))


def load_table(path, label_column="kind"):
    return datasets.read(str(path), label_column=label_column).split(0)


def test_csv_and_parquet_give_the_same_split(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "table.csv").write_text(CSV)
    _, *lines = (line.split(",") for line in CSV.splitlines())
    columns = {"height": [int(a) for a, _, _ in lines], "width": [float(b) for _, b, _ in lines]}
    parquet.write_table(pyarrow.table({**columns, "kind": [c for _, _, c in lines]}), tmp_path / "table.parquet")
    first, second = (load_table(tmp_path / name) for name in ("table.csv", "table.parquet"))
    assert first.num_classes == second.num_classes == 2
    assert [np.bincount(y).tolist() for _, y in (first.train, first.validation, first.test)] == [
        [12, 6],
        [4, 2],
        [4, 2],
    ]
    for (x, y), (same_x, same_y) in zip(
        (first.train, first.validation, first.test), (second.train, second.validation, second.test), strict=True
    ):
        assert x.dtype == np.float32
        np.testing.assert_array_equal(x, same_x)
        np.testing.assert_array_equal(y, same_y)
    # Float32: the mean and deviation of eighteen numbers carry a few units of the last of seven digits.
    np.testing.assert_allclose(first.train[0].mean(axis=0), 0, atol=1e-6)
    np.testing.assert_allclose(first.train[0].std(axis=0), 1, atol=1e-6)


def test_classes_that_are_numbers_are_ordered_as_numbers(tmp_path):
    (tmp_path / "table.csv").write_text("\ufeffx,y\n1,10\n2,9\n3,10\n", encoding="utf-8")  # with the mark Excel writes
    table = sources.read_table(tmp_path / "table.csv", "y")
    assert table.classes == ["9", "10"]
    assert table.labels.tolist() == [1, 0, 1]
    assert table.features.tolist() == [[1], [2], [3]]
    assert table.columns == ["x"]


# Unix times, constant but for a few units; numbers whose squares overflow or vanish, in float32 and in float64.
@pytest.mark.parametrize(
    "change", ["{} + 1700000000", "{} * 1e20", "{} * 5e37", "{} * 1e200", "{} * 1e-30", "{} * 1e-200"]
)
def test_features_of_any_magnitude_are_standardised(change, tmp_path):
    """The oracle is exact: standardised integers from -50 to 49, in any unit and from any origin."""
    x = np.arange(100) - 50
    path = tmp_path / "table.csv"
    path.write_text("x,kind\n" + "".join(f"{eval(change.format(i))!r},{i % 2}\n" for i in x))
    split = load_table(path)
    seen = np.concatenate([part[0][:, 0] for part in (split.train, split.validation, split.test)])
    path.write_text("x,kind\n" + "".join(f"{i},{i % 2}\n" for i in x))
    plain = load_table(path)
    expected = np.concatenate([part[0][:, 0] for part in (plain.train, plain.validation, plain.test)])
    assert seen.dtype == np.float32
    np.testing.assert_allclose(seen, expected, rtol=1e-6, atol=1e-7)
    train = plain.train[0].astype(np.float64)
    np.testing.assert_allclose([train.mean(), train.std()], [0, 1], atol=1e-6)


def test_what_no_float32_can_hold_is_refused():
    train = np.array([[0.0], [1.0]])
    with pytest.raises(DataError, match=r"t.csv: the value 1e[+]200 of feature 1 is too far from its mean"):
        data.standardised("t.csv", np.array([[1e200]]), *data.centre_and_spread(train))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a,b\n1,2\n", r"has no column 'kind'; choose from: a, b \(with --label-column\)"),
        ("a;kind\n1;2\n", r"choose from: a;kind .*it has one column: save it with commas between the values"),
        ("a, kind\n1, 2\n", r"choose from: a, ' kind' \(with --label-column\)$"),
        (b"\x1f\x8b\x08", "cannot read .*it must be CSV in UTF-8, not compressed"),
        ("", "is empty: expected a line of column names"),
        ("a,kind\n", "must have rows"),
        ("kind\n1\n", "a column other than the label 'kind'"),
        ("a,a,kind\n1,2,3\n", "names a column twice"),
        (
            ",a,kind\n0,1,x\n1,2,y\n",
            r"column 1 has no name\. If it numbers the rows, as pandas' index does, leave it out",
        ),
        ("a,kind\n1\n", "row 1: expected 2 values as in the first line, got 1"),
        ("a,kind\n1,\n", "row 1: the label is missing"),
        ("a,kind\n1,x\nred,x\n", "row 2, column 'a': expected a finite number, got 'red'"),
        ("a,kind\nnan,x\n", "expected a finite number, got 'nan'"),
        ("a,kind\n" + "1,x\n" * 9, "column 'kind' must hold at least two classes, got 1"),
        ("a,kind\n" + "1,x\n" * 9 + "1,y\n", "cannot set 2 of 10 rows aside .*leave out rare classes or add rows"),
        ("a,kind\n1,x\0\n", "holds NUL characters"),
        ("a,kind\n" + "1" * 200_000 + ",x\n", "cannot read .*field larger than field limit"),
        ("a,kind\n1e301,x\n", "expected a finite number, got '1e301'"),
        ('"a\nb\x1b[2J",c\n1,2\n', r"has no column 'kind'; choose from: a b \[2J, c \(with"),
        (",".join(f"c{i}" for i in range(99)) + "\n" + "1," * 98 + "1\n", r"c19 and 79 more \(with"),
        (b"a,kind\n\xff\xfe,1\n", "cannot read .*utf-8"),
    ],
)
def test_a_bad_table_gets_one_line(tmp_path, content, message):
    path = tmp_path / "table.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message) as error:
        load_table(path)
    assert one_line(error)


LABELS = {
    # What a column holds, as text and in Parquet: the same classes in the same order, or the same refusal.
    "whole": (["10", "9", "10", "-1"], [10, 9, 10, -1], ["-1", "9", "10"]),
    "whole floats": (["1.0", "2", "1", "2.0"], [1.0, 2.0, 1.0, 2.0], ["1", "2"]),
    "large": (["9007199254740993", "9007199254740992"] * 2, [9007199254740993, 9007199254740992] * 2, None),
    "text": (["b", "a", "B", "c "], ["b", "a", "B", "c "], ["B", "a", "b", "c "]),
    "spaces": (["a", "a ", "a", "a "], ["a", "a ", "a", "a "], "'a' and 'a ' differ only in the spaces around them"),
    "truth": (["True", "False"] * 2, [True, False] * 2, ["False", "True"]),
    "dates": (["2020-10-01", "2020-09-30"] * 2, [date(2020, 10, 1), date(2020, 9, 30)] * 2, None),
    "decimals": (["1.00", "2.00"] * 2, [Decimal("1.00"), Decimal("2.00")] * 2, ["1", "2"]),
    "underscores": (["1_0", "10"] * 2, ["1_0", "10"] * 2, ["10", "1_0"]),
    "other digits": (["\u0661", "1"] * 2, ["\u0661", "1"] * 2, ["1", "\u0661"]),
    "some text": (["0.5", "red"] * 2, ["0.5", "red"] * 2, ["0.5", "red"]),
    "no numbers": (["no", "NA", "no", "None"], ["no", "NA", "no", "None"], ["NA", "None", "no"]),
    "large with a point": (
        ["9007199254740993.0", "9007199254740992.0"] * 2,
        ["9007199254740993.0", "9007199254740992.0"] * 2,
        ["9007199254740992", "9007199254740993"],
    ),
    "measurements": (["0.2", "0.7", "1.5", "0.2"], [0.2, 0.7, 1.5, 0.2], "row 1: the label 0.2 is not a whole number"),
    "half": (["1", "2", "2.5", "1"], [1.0, 2.0, 2.5, 1.0], "row 3: the label 2.5 is not a whole number"),
    "decimal parts": (["1.50"] * 4, [Decimal("1.50")] * 4, "the label 1.50 is not a whole number"),
    "infinite": (["1", "inf", "2", "1"], [1.0, float("inf"), 2.0, 1.0], "row 2: the label inf is not a whole number"),
    "too large": (["1", "1e400", "2", "1"], ["1", "1e400", "2", "1"], "row 2: the label 1e400 is not a whole number"),
    "nan": (["1", "nan", "2", "1"], [1.0, float("nan"), 2.0, 1.0], "row 2: the label is missing"),
    "missing among numbers": (
        ["1", "2", "NA", "1"],
        ["1", "2", "NA", "1"],
        r"row 3: the label is missing \('NA' among",
    ),
    "nan and text": (["a", "NaN", "b", "a"], ["a", "NaN", "b", "a"], "row 2: the label is missing"),
    "empty": (["a", "", "b", "a"], ["a", None, "b", "a"], "row 2: the label is missing"),
    "blank": (["a", " ", "b", "a"], ["a", " ", "b", "a"], "row 2: the label is missing"),
}


@pytest.mark.parametrize("kind", LABELS)
def test_labels_are_classes_whatever_the_format(kind, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts, values, expected = LABELS[kind]
    (tmp_path / "table.csv").write_text("x,y\n" + "".join(f"{i},{text}\n" for i, text in enumerate(texts)))
    parquet.write_table(pyarrow.table({"x": range(4), "y": values}), tmp_path / "table.parquet")
    encoded = pyarrow.array(values).dictionary_encode()
    parquet.write_table(pyarrow.table({"x": range(4), "y": encoded}), tmp_path / "categories.parquet")
    for name in ("table.csv", "table.parquet", "categories.parquet"):
        if isinstance(expected, str):
            with pytest.raises(DataError, match=expected) as error:
                sources.read_table(tmp_path / name, "y")
            assert one_line(error)
        else:
            table = sources.read_table(tmp_path / name, "y")
            assert table.classes == (expected or sorted(set(texts)))
            order = {text: i for i, text in enumerate(table.classes)}
            whole = (text.removesuffix(".0").removesuffix(".00") for text in texts)
            assert table.labels.tolist() == [order[text] for text in whole]
            # A test table with the same labels, in either format, has the same classes.
            for other in ("table.csv", "table.parquet"):
                again = sources.read_table(tmp_path / other, "y", like=table)
                assert again.labels.tolist() == table.labels.tolist()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([[1], [2]], "row 1: expected a label, got a list"),
        ([{"a": 1}, {"a": 2}], "row 1: expected a label, got a dict"),
        ("not UTF-8", "cannot read .*utf-8"),
        ("equal values", "it holds 200000000 rows of 2 columns, more than can be used"),
    ],
)
def test_a_parquet_file_of_something_else_gets_one_line(values, message, tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "table.parquet"
    if values == "not UTF-8":
        offsets, text = (pyarrow.py_buffer(part) for part in (struct.pack("<3i", 0, 1, 2), b"\xff\xfe"))
        values = pyarrow.Array.from_buffers(pyarrow.string(), 2, [None, offsets, text])
    if isinstance(values, str):
        monkeypatch.setattr(sources, "VALUES", 3)
        values, message = [0, 1], "it holds 2 rows of 2 columns, more than can be used"
    parquet.write_table(pyarrow.table({"x": [1.0, 2.0], "y": values}), path)
    with pytest.raises(DataError, match=message) as error:
        sources.read_table(path, "y")
    assert one_line(error)


def test_the_row_labels_of_pandas_are_no_feature(tmp_path):
    """Where rows are sorted by class, they tell it, and pandas' reader does not show them as a column."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [i for i in range(40) if i % 3]
    columns = {"a": [i % 7 for i in rows], "kind": [i // 20 for i in rows], "__index_level_0__": rows}
    parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    found = sources.read_table(tmp_path / "t.parquet", "kind")
    assert found.columns == ["a"]
    assert found.features[:, 0].tolist() == columns["a"]
    assert found.labels.tolist() == columns["kind"]
    parquet.write_table(pyarrow.table({"": rows, **columns}), tmp_path / "t.parquet")
    with pytest.raises(DataError, match="column 1 has no name"):
        sources.read_table(tmp_path / "t.parquet", "kind")


def test_a_missing_table_gets_one_line(tmp_path):
    for name in ("table.csv", "table.parquet"):
        if name == "table.parquet":
            pytest.importorskip("pyarrow")
        with pytest.raises(DataError, match=f"cannot read .*{re.escape(name)}") as error:
            load_table(tmp_path / name)
        assert one_line(error)


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match="pip install pyarrow"):
        load_table(tmp_path / "table.parquet")


def test_a_parquet_file_that_is_none_gets_one_line(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "table.parquet").write_bytes(b"no Parquet")
    with pytest.raises(DataError, match=r"cannot read .*table\.parquet") as error:
        load_table(tmp_path / "table.parquet")
    assert one_line(error)


# A second table to test on

TRAIN = "a,b,kind\n" + "".join(f"{i},{i % 4},{i % 3}\n" for i in range(30))


def load_with_test(folder, content, train=TRAIN):
    (folder / "train.csv").write_text(train)
    (folder / "test.csv").write_text(content)
    return datasets.read(str(folder / "train.csv"), None, "kind", str(folder / "test.csv"))


def test_a_test_table_gives_all_test_rows_and_the_other_the_rest(tmp_path):
    """Its columns may have another order, and its classes may be fewer."""
    made = load_with_test(tmp_path, "kind,b,a\n2.0,7,100\n1,8,200\n")
    np.testing.assert_array_equal(made.test[0], [[100, 7], [200, 8]])
    assert made.test[1].tolist() == [2, 1]
    assert len(made.rest[1]) == 30
    assert made.training_rows == 24
    split = made.split(0)
    assert [len(part[1]) for part in (split.train, split.validation, split.test)] == [24, 6, 2]
    # Standardised by the training rows alone.
    x = made.rest[0][split.rows[0]]
    np.testing.assert_allclose(split.test[0], (made.test[0] - x.mean(0)) / x.std(0), rtol=1e-5)
    assert split.names == ("0", "1", "2")


def test_one_number_of_the_test_table_makes_other_data(tmp_path):
    hashes = [load_with_test(tmp_path, f"kind,b,a\n2,7,{a}\n{c},8,200\n").digest for a, c in ((1, 1), (2, 1), (1, 0))]
    hashes.append(datasets.read(str(tmp_path / "train.csv"), None, "kind").digest)
    assert len(set(hashes)) == 4


def test_text_that_looks_like_numbers_is_found_by_its_text(tmp_path):
    """Alone, 01 and 1.5 would be read as numbers; among text they are text."""
    train = "a,kind\n" + "".join(f"{i},{('01', '1.5', 'x')[i % 3]}\n" for i in range(30))
    made = load_with_test(tmp_path, "a,kind\n1,01\n2,1.5\n", train)
    assert made.test[1].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "a,b,kind\n1,2,0\n1,2,3\n",
            r"test.csv, row 2: the class '3' is not in the training table, which has: 0, 1, 2",
        ),
        ("a,kind\n1,0\n", "test.csv must have the columns of the training table: it lacks b$"),
        ("a,b,c,kind\n1,2,3,0\n", "test.csv must have the columns of the training table: it adds c$"),
        ("a,c,kind\n1,2,0\n", "it lacks b and adds c$"),
        ("a,b\n1,2\n", "test.csv has no column 'kind'"),
        ("a,b,kind\n", "test.csv must have rows"),
        ("a,b,kind\n1,2,\n", "test.csv, row 1: the label is missing"),
        ("a,b,kind\n1,red,0\n", "test.csv, row 1, column 'b': expected a finite number, got 'red'"),
    ],
)
def test_a_bad_test_table_gets_one_line(content, message, tmp_path):
    with pytest.raises(DataError, match=message) as error:
        load_with_test(tmp_path, content)
    assert one_line(error)
