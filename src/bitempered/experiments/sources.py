"""Files that others made: where they are, and what is in them, without executing any of it."""

import csv
import gzip
import math
import pickle
import tarfile
import zlib
from codecs import encode
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["SOURCES", "DataError", "Source", "cache_folder", "fetch", "read_cifar", "read_idx", "read_table"]


class DataError(Exception):
    """A data file is missing, damaged, or not what it should be; the message is one line that says what to do."""


@dataclass(frozen=True)
class Source:
    """A dataset's files, by name, with the MD5 of each as published, and the address of the folder they are in."""

    address: str
    files: dict[str, str]


SOURCES = {
    "mnist": Source(
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        {
            "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
            "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
            "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
        },
    ),
    "fashion-mnist": Source(
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
        {
            "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
            "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
            "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
        },
    ),
    "cifar100": Source(
        "https://www.cs.toronto.edu/~kriz", {"cifar-100-python.tar.gz": "eb9058c3a382ffc7106e4002c42a8d85"}
    ),
}


def fetch(name: str, data_dir: Path | None) -> list[Path]:
    """Return the paths of a dataset's files, in the order of its `Source`.

    With a `data_dir` they are looked for there and in its subfolder `name`, and nothing is downloaded;
    they may have been compressed again, so that their published checksums do not apply. Without one they
    come from the cache or from the network, and their checksums must be right.
    """
    source = SOURCES[name]
    if data_dir is not None:
        return [find(name, file, data_dir) for file in source.files]
    return [download(name, file) for file in source.files]


def find(name: str, file: str, data_dir: Path) -> Path:
    for folder in (data_dir, data_dir / name):
        # CIFAR's archive also serves as the folder that it unpacks to.
        for candidate in (folder / file, folder / file.removesuffix(".tar.gz")):
            if candidate.exists():
                return candidate
    raise DataError(f"{name}: there is no {file} in {data_dir} or {data_dir / name}; {advice(name)}")


def advice(name: str) -> str:
    source = SOURCES[name]
    return f"get {', '.join(source.files)} from {source.address}/, put them into a folder, and name it with --data-dir"


def cache_folder() -> Path:
    import pooch

    return Path(pooch.os_cache("bitempered"))


def download(name: str, file: str) -> Path:
    import pooch
    from rich.progress import Progress

    pooch.get_logger().setLevel("WARNING")  # the progress bar says what it would
    source = SOURCES[name]
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
        raise DataError(f"cannot download {name} ({type(error).__name__}); {advice(name)}") from error
    except ValueError as error:
        raise DataError(
            f"{source.address}/{file} has not the published checksum: the download is damaged or the file was "
            f"replaced; try again, or {advice(name)}"
        ) from error
    return Path(path)


class Bar:
    """What pooch asks of a progress bar, on rich's."""

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
        """Nothing: the bar closes with its `Progress`."""


def read_idx(path: Path) -> np.ndarray:
    """Return the bytes of a gzipped idx file as a uint8 array of the shape that its header states.

    Reference: the format at the foot of http://yann.lecun.com/exdb/mnist/.
    """
    try:
        with gzip.open(path) as file:
            content = file.read()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {error}; get it again") from error
    dimensions = content[3] if content[:3] == b"\x00\x00\x08" and len(content) > 3 else 0
    header = 4 + 4 * dimensions
    if not dimensions or len(content) < header:
        raise DataError(f"{path} is not an idx file of bytes; get it again")
    shape = np.frombuffer(content, ">u4", dimensions, 4).tolist()
    size = math.prod(shape)
    if len(content) != header + size:
        raise DataError(f"{path} is damaged: {len(content) - header} bytes where {size} are announced; get it again")
    # A copy, since torch warns of arrays that cannot be written to.
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape).copy()


def read_cifar(path: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Return images (n, 3, 32, 32) and fine labels (n,) of CIFAR-100's part "train" or "test".

    `path` is the published archive or the folder cifar-100-python that is in it. The parts are pickles;
    they are read by an unpickler that knows NumPy arrays and nothing else that could be called.
    """
    try:
        if path.is_dir():
            with (path / part).open("rb") as file:
                content = PlainUnpickler(file, encoding="bytes").load()
        else:
            with tarfile.open(path) as archive, archive.extractfile(f"cifar-100-python/{part}") as member:  # type: ignore[union-attr]
                content = PlainUnpickler(member, encoding="bytes").load()
        pixels, labels = content[b"data"], np.asarray(content[b"fine_labels"])
        images = pixels.reshape(-1, 3, 32, 32)
    except FileNotFoundError as error:
        raise DataError(f"there is no {path / part}; {advice('cifar100')}") from error
    except Exception as error:
        # A damaged pickle can raise nearly anything.
        raise DataError(f"cannot read {part} of {path}: {error or type(error).__name__}; get it again") from error
    if pixels.dtype != np.uint8 or labels.shape != (len(images),) or not set(np.unique(labels)) <= set(range(100)):
        raise DataError(f"{part} of {path} holds something else than CIFAR-100's images and labels; get it again")
    return images, labels.astype(np.int64)


class PlainUnpickler(pickle.Unpickler):
    """Unpickles containers, numbers, strings and NumPy arrays, and refuses every other name."""

    ALLOWED = {  # noqa: RUF012
        # Asked of an array, since NumPy 2 moved it; all four are written in C, so a pickle cannot change them.
        ("numpy.core.multiarray", "_reconstruct"): np.zeros(0).__reduce__()[0],
        ("numpy._core.multiarray", "_reconstruct"): np.zeros(0).__reduce__()[0],
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        ("_codecs", "encode"): encode,  # how Python 3 writes bytes for Python 2
    }

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self.ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no data file needs") from None


def read_table(path: Path, label_column: str) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Return features (n, d) float32, labels (n,) int64 and the names of the classes, from a CSV or Parquet file.

    Every column but `label_column` must hold finite numbers. The classes are numbered in the order of
    their values, numbers as numbers and everything else as text.
    """
    columns = read_parquet(path) if path.suffix == ".parquet" else read_csv(path)
    if label_column not in columns:
        raise DataError(
            f"{path} has no column {label_column!r}; there is: {', '.join(columns)}; choose one with --label-column"
        )
    given = columns.pop(label_column)
    if not columns or not given:
        raise DataError(f"{path} must have rows, and a column beside the label {label_column!r}")
    for row, value in enumerate(given, start=1):
        if value is None or value == "":
            raise DataError(f"{path}, row {row}: the label is missing; fill it in or remove the row")
    try:
        names = [str(value) for value in sorted({int(value) for value in given})]
        labels = [str(int(value)) for value in given]
    except (ValueError, TypeError):
        labels = [str(value) for value in given]
        names = sorted(set(labels))
    features = np.empty((len(given), len(columns)), np.float32)
    for column, (name, values) in enumerate(columns.items()):
        for row, value in enumerate(values):
            try:
                features[row, column] = value
            except (ValueError, TypeError):
                features[row, column] = np.nan
            if not np.isfinite(features[row, column]):
                raise DataError(
                    f"{path}, row {row + 1}, column {name!r}: expected a finite number, got {value!r}; "
                    "encode it as numbers or remove it"
                )
    number = {name: i for i, name in enumerate(names)}
    return features, np.array([number[label] for label in labels], np.int64), names


def read_csv(path: Path) -> dict[str, list[Any]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            header, *rows = [line for line in csv.reader(file, strict=True) if line]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"cannot read {path}: {error}") from error
    except ValueError as error:
        raise DataError(f"{path} is empty: expected a line of column names, then rows") from error
    if len(set(header)) < len(header):
        raise DataError(f"{path} names a column twice: {', '.join(header)}")
    for row, line in enumerate(rows, start=1):
        if len(line) != len(header):
            raise DataError(f"{path}, row {row}: expected {len(header)} values as in the first line, got {len(line)}")
    return {name: [line[i] for line in rows] for i, name in enumerate(header)}


def read_parquet(path: Path) -> dict[str, list[Any]]:
    try:
        from pyarrow import ArrowException, parquet
    except ModuleNotFoundError as error:
        raise DataError(f"{path}: reading Parquet needs pyarrow (pip install pyarrow), or save it as CSV") from error
    try:
        return parquet.read_table(path).to_pydict()
    except (OSError, ArrowException) as error:
        raise DataError(f"cannot read {path}: {str(error).splitlines()[0]}") from error
