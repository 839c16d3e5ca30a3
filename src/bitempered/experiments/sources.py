"""Find, download and read data files from others, without executing anything in them."""

import csv
import gzip
import io
import math
import re
import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from bitempered.experiments.pickles import read_pickle

__all__ = [
    "CIFAR100",
    "FASHION_MNIST",
    "MNIST",
    "DataError",
    "Source",
    "as_text",
    "fetch",
    "first_names",
    "read_cifar",
    "read_csv",
    "read_idx",
    "read_parquet",
    "read_table",
]


LIMIT = 2**29  # bytes: no file here holds as much, and none is read beyond it
VALUES = 10**8  # the most in a table: a few gigabytes as Python objects
LARGEST = 1e300  # the largest number in a table, so that sums are finite
MISSING = ("na", "n/a", "#n/a", "<na>", "none", "null", "-", "?")  # how tables write "no label" among numbers


class DataError(Exception):
    """A data file is missing, damaged, or not what it should be; the message is one line that says what to do."""

    def __init__(self, message: str) -> None:
        # Text from a file, such as column names, may break lines or move a terminal's cursor.
        super().__init__("".join(c if c.isprintable() else " " for c in message))


@dataclass(frozen=True)
class Source:
    """The published files of a data set: their address, and the MD5 of each by its name."""

    address: str
    files: dict[str, str]


MNIST = Source(
    "https://ossci-datasets.s3.amazonaws.com/mnist",
    {
        "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
        "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
        "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
    },
)
FASHION_MNIST = Source(
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
    {
        "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
        "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
        "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
    },
)
CIFAR100 = Source("https://www.cs.toronto.edu/~kriz", {"cifar-100-python.tar.gz": "eb9058c3a382ffc7106e4002c42a8d85"})


def fetch(name: str, source: Source, data_dir: Path | None) -> list[Path]:
    """Return the paths of a dataset's files, in the order of its source.

    With a `data_dir` they must be there or in its subfolder `name`, and nothing is downloaded. They may have been
    compressed again, so the published checksums are not checked. Without one they come from the cache or the network,
    and their checksums must match.
    """
    if data_dir is not None:
        return [find(name, source, file, data_dir) for file in source.files]
    return [download(name, source, file) for file in source.files]


def find(name: str, source: Source, file: str, data_dir: Path) -> Path:
    for folder in (data_dir, data_dir / name):
        # CIFAR's archive may also be given as the folder it unpacks to.
        for candidate in (folder / file, folder / file.removesuffix(".tar.gz")):
            if candidate.exists():
                return candidate
    raise DataError(f"{name}: there is no {file} in {data_dir} or {data_dir / name}; {advice(source)}")


def advice(source: Source) -> str:
    files = ", ".join(source.files)
    return f"download {files} from {source.address}/, put them in a folder, and name it with --data-dir"


def cache_folder() -> Path:
    import pooch

    return Path(pooch.os_cache("bitempered"))


def download(name: str, source: Source, file: str) -> Path:
    import pooch
    from rich.progress import Progress

    pooch.get_logger().setLevel("WARNING")  # the progress bar says the same
    try:
        with Progress(transient=True) as progress:
            path = pooch.retrieve(
                f"{source.address}/{file}",
                known_hash=f"md5:{source.files[file]}",
                fname=file,
                path=cache_folder() / name,
                downloader=pooch.HTTPDownloader(progressbar=Bar(progress, file)),
            )
    except OSError as error:
        # Every error of requests is an OSError, as is a full disk.
        raise DataError(f"cannot download {name} ({type(error).__name__}); {advice(source)}") from error
    except ValueError as error:
        raise DataError(
            f"{source.address}/{file} does not have the published checksum: the download is damaged or the file was "
            f"replaced; try again, or {advice(source)}"
        ) from error
    return Path(path)


class Bar:
    """The progress bar that pooch expects, drawn by rich."""

    def __init__(self, progress: Any, label: str) -> None:
        self.progress, self.task = progress, progress.add_task(label, total=None)

    @property
    def total(self) -> float | None:
        return self.progress.tasks[self.task].total

    @total.setter
    def total(self, size: float) -> None:
        self.progress.update(self.task, total=size)

    def update(self, size: float) -> None:
        self.progress.advance(self.task, size)

    def reset(self) -> None:
        self.progress.reset(self.task)

    def close(self) -> None:
        """Do nothing: the bar closes with its `Progress`."""


def read_idx(path: Path) -> np.ndarray:
    """Return the bytes of a gzipped idx file as a uint8 array of the shape that its header states.

    Reference: the format at the foot of http://yann.lecun.com/exdb/mnist/.
    """
    try:
        with gzip.open(path) as file:
            magic = file.read(4)
            dimensions = magic[3] if magic[:3] == b"\x00\x00\x08" and len(magic) > 3 else 0
            header = file.read(4 * dimensions)
            if not 1 <= dimensions <= 4 or len(header) < 4 * dimensions:
                raise DataError(f"{path} is not an idx file of bytes; download it again")
            shape = np.frombuffer(header, ">u4").tolist()
            if 0 in shape:
                raise DataError(f"{path} is empty: its header announces {shape}; download it again")
            size = math.prod(shape)
            # One byte too many shows that a file is too long; a file that unpacks to far more is never read whole.
            content = file.read(min(size, LIMIT) + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {error}; download it again") from error
    if len(content) != size:
        found = "more" if len(content) > min(size, LIMIT) else len(content)
        raise DataError(f"{path} is damaged: its header announces {size} bytes, got {found}; download it again")
    # A copy, since torch warns of arrays that cannot be written to.
    return np.frombuffer(content, np.uint8).reshape(shape).copy()


def read_cifar(path: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Return images (n, 3, 32, 32) and fine labels (n,) of CIFAR-100's part "train" or "test".

    `path` is the published archive or the folder cifar-100-python from it.
    """
    try:
        if path.is_dir():
            with (path / part).open("rb") as file:
                content = file.read(LIMIT)
        else:
            with gzip.open(path) as file:
                content = tar_member(file.read(LIMIT), f"cifar-100-python/{part}".encode())
        found = read_pickle(content)
        images, labels = found[b"data"].array().reshape(-1, 3, 32, 32), found[b"fine_labels"]
        if type(labels) is not list or len(labels) != len(images):
            raise ValueError(f"expected a list of {len(images)} labels")
        if not all(type(label) is int and 0 <= label < 100 for label in labels):
            raise ValueError("labels must be integers from 0 to 99")
    except FileNotFoundError as error:
        raise DataError(f"there is no {path / part}; {advice(CIFAR100)}") from error
    except Exception as error:
        # A damaged file can raise nearly anything.
        raise DataError(
            f"cannot read {part} of {path}: {str(error) or type(error).__name__}; download it again"
        ) from error
    return images, np.array(labels, np.int64)


def tar_member(content: bytes, name: bytes) -> bytes:
    """Return a file of a tar archive; Python's own reader loops forever on a negative size."""
    at = 0
    while at < len(content):
        header = content[at : at + 512]
        size = int(header[124:136].strip(b" \0") or b"0", 8)
        if size < 0:
            raise ValueError("it is not a tar archive")
        if header[:100].rstrip(b"\0") == name:
            return content[at + 512 : at + 512 + size]
        at += 512 + -(-size // 512) * 512
    raise ValueError(f"it has no {name.decode()}")


@dataclass(frozen=True)
class TableRows:
    """The rows of a CSV or Parquet file."""

    features: np.ndarray  # (n, d) float64
    labels: np.ndarray  # (n,) int64
    columns: list[str]  # the names of the features
    classes: list[str]
    spelled: list[str]  # the classes as the table mostly writes them, such as 01 for 1


def read_table(path: Path, label_column: str, like: TableRows | None = None) -> TableRows:
    """Read a CSV or Parquet file.

    Every column except `label_column` must hold finite numbers. Labels are whole numbers, numbered in their order, or
    else text. A table `like` another has the same columns, in any order, and no other classes.
    """
    columns = read_parquet(path) if path.suffix == ".parquet" else read_csv(path)
    if label_column not in columns:
        alone = "; it has one column: save it with commas between the values" if len(columns) == 1 else ""
        raise DataError(
            f"{path} has no column {label_column!r}; choose from: {first_names(columns)} (with --label-column){alone}"
        )
    for place, name in enumerate(columns, start=1):
        if not name.strip():
            raise DataError(
                f"{path}: column {place} has no name. If it numbers the rows, as pandas' index does, leave it out "
                "(index=False). If the lines end in a comma, remove it. Else name the column"
            )
    given = columns.pop(label_column)
    if not columns or not given:
        raise DataError(f"{path} must have rows, and a column other than the label {label_column!r}")
    if like is None:
        labels, classes = number_classes(path, given)
    else:
        labels, classes = find_classes(path, given, like.classes), like.classes
        if set(columns) != set(like.columns):
            missing, extra = (
                [c for c in a if c not in b] for a, b in ((like.columns, columns), (columns, like.columns))
            )
            what = [f"{word} {first_names(names)}" for word, names in (("lacks", missing), ("adds", extra)) if names]
            raise DataError(f"{path} must have the columns of the training table: it {' and '.join(what)}")
        columns = {name: columns[name] for name in like.columns}
    features = np.empty((len(given), len(columns)))
    for column, (name, values) in enumerate(columns.items()):
        found = np.array([number(value) for value in values])
        for row in np.flatnonzero(~(np.abs(found) <= LARGEST))[:1]:
            raise DataError(
                f"{path}, row {row + 1}, column {name!r}: expected a finite number, got {values[row]!r:.80}; "
                "encode it as numbers or remove it"
            )
        features[:, column] = found
    texts = [Counter(as_text(given[row]) for row in np.flatnonzero(labels == c)) for c in range(len(classes))]
    spelled = [found.most_common(1)[0][0] if found else name for found, name in zip(texts, classes, strict=True)]
    return TableRows(features, labels, list(columns), classes, spelled)


def number(value: Any) -> float:
    """Return a value of a table as a number, or NaN if it is not one."""
    try:
        return float(value)
    except (ValueError, TypeError, OverflowError):
        return math.nan


def find_classes(path: Path, given: list[Any], classes: list[str]) -> np.ndarray:
    """Return the numbers of labels among known classes: by their text or, for numbers, by their value."""
    place = {name: i for i, name in enumerate(classes)}
    texts = [as_text(value) for value in given]
    if not all(text in place for text in texts):
        numbers, names = number_classes(path, given)
        texts = [names[number] for number in numbers]
    for row, text in enumerate(texts, start=1):
        if text not in place:
            raise DataError(
                f"{path}, row {row}: the class {text!r:.80} is not in the training table, which has: "
                f"{first_names(classes)}"
            )
    return np.array([place[text] for text in texts], np.int64)


def as_text(value: Any) -> str:
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)


def number_classes(path: Path, given: list[Any]) -> tuple[np.ndarray, list[str]]:
    """Return the labels as numbers from 0 and their names, the same for a CSV and a Parquet file."""
    labels: list[Any] = []
    for row, value in enumerate(given, start=1):
        if isinstance(value, list | dict | tuple):
            raise DataError(f"{path}, row {row}: expected a label, got a {type(value).__name__}; choose another column")
        text = as_text(value)
        if value is None or text.strip().lstrip("+-").lower() in ("", "nan"):
            raise DataError(f"{path}, row {row}: the label is missing; fill it in or remove the row")
        labels.append(text)
    # Python also reads 1_0 and the digits of all scripts as numbers, but their author may have meant text.
    is_number = [text.isascii() and "_" not in text and not math.isnan(number(text)) for text in labels]
    others = [row for row, numeric in enumerate(is_number) if not numeric]
    if 0 < len(others) < len(labels) and all(labels[row].strip().lower() in MISSING for row in others):
        raise DataError(
            f"{path}, row {others[0] + 1}: the label is missing ({labels[others[0]]!r} among numbers); fill it in or "
            "remove the row"
        )
    if not others:
        for row, text in enumerate(labels, start=1):
            if not number(text).is_integer():
                raise DataError(
                    f"{path}, row {row}: the label {text:.80} is not a whole number, and measurements are not classes; "
                    "choose another column with --label-column, or give the classes names"
                )
        labels = [int(text) if text.strip().lstrip("+-").isdigit() else int(Decimal(text)) for text in labels]
    classes = sorted(set(labels))
    if others:
        check_spaces(path, classes)
    place = {label: i for i, label in enumerate(classes)}
    return np.array([place[label] for label in labels], np.int64), [str(label) for label in classes]


def check_spaces(path: Path, classes: list[str]) -> None:
    """Raise a DataError if two classes differ in nothing but the spaces around their names."""
    known: dict[str, str] = {}
    for name in classes:
        other = known.setdefault(name.strip(), name)
        if other != name:
            raise DataError(
                f"{path}: the labels {other!r:.80} and {name!r:.80} differ only in the spaces around them; write them "
                "alike"
            )


def read_csv(path: Path) -> dict[str, list[Any]]:
    try:
        text = path.read_bytes().decode("utf-8-sig")
        if "\0" in text:
            raise DataError(f"cannot read {path}: it holds NUL characters, which no text has; save it as CSV in UTF-8")
        header, *rows = [line for line in csv.reader(io.StringIO(text, newline=""), strict=True) if line]
    except UnicodeDecodeError as error:
        raise DataError(f"cannot read {path}: {error}; it must be CSV in UTF-8, not compressed") from error
    except (OSError, csv.Error) as error:
        raise DataError(f"cannot read {path}: {error}") from error
    except ValueError as error:
        raise DataError(f"{path} is empty: expected a line of column names, then rows") from error
    if len(set(header)) < len(header):
        raise DataError(f"{path} names a column twice: {first_names(header)}")
    for row, line in enumerate(rows, start=1):
        if len(line) != len(header):
            raise DataError(f"{path}, row {row}: expected {len(header)} values as in the first line, got {len(line)}")
    return {name: [line[i] for line in rows] for i, name in enumerate(header)}


def read_parquet(path: Path) -> dict[str, list[Any]]:
    try:
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise DataError(f"{path}: reading Parquet needs pyarrow (pip install pyarrow), or save it as CSV") from error
    try:
        if path.is_file():
            size = parquet.read_metadata(path)
            if size.num_rows * size.num_columns > VALUES:  # a few bytes can encode any number of equal values
                raise ValueError(f"it holds {size.num_rows} rows of {size.num_columns} columns, more than can be used")
        columns: dict[str, list[Any]] = parquet.read_table(path).to_pydict()
    except Exception as error:  # text that is not UTF-8, dates that Python does not have: nearly anything
        raise DataError(f"cannot read {path}: {str(error) or type(error).__name__}") from error
    # Without the row labels of pandas, which its reader does not show: where rows are sorted, they tell the class.
    return {name: values for name, values in columns.items() if not re.fullmatch(r"__index_level_\d+__", name)}


def first_names(names: Iterable[str], count: int = 20) -> str:
    """List the first names, those with spaces around them in quotes, and the number of the others."""
    every = list(names)
    rest = f" and {len(every) - count} more" if len(every) > count else ""
    return ", ".join(name[:80] if name == name.strip() else repr(name[:80]) for name in every[:count]) + rest
