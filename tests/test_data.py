"""The experiments' data: each format read from tiny files, and one line for whatever is wrong with them."""

import gzip
import hashlib
import http.server
import os
import pickle
import re
import struct
import sys
import tarfile
import threading

import numpy as np
import pytest

from bitempered.experiments import data, sources
from bitempered.experiments.sources import DataError


def one_line(error):
    return "\n" not in str(error.value)


# The ring


def test_ring_is_what_it_says():
    drawn = data.ring(1000, seed=3, gap=0.2)
    radius = np.linalg.norm(drawn.points.astype(float), axis=1)
    np.testing.assert_allclose(drawn.margin, 1 - radius, atol=1e-6)  # points are float32
    np.testing.assert_array_equal(drawn.labels == 1, drawn.margin > 0)
    assert drawn.labels.sum() == 500
    assert np.abs(drawn.margin).min() >= 0.1
    assert radius.max() <= 1.5 + 1e-6  # points are float32
    # Uniform over an area: half of the disc's points within 1 / sqrt(2) of its radius; five deviations are 56.
    assert abs((radius[drawn.labels == 1] < 0.9 / 2**0.5).sum() - 250) < 56
    np.testing.assert_array_equal(drawn.points, data.ring(1000, seed=3, gap=0.2).points)
    assert (drawn.points != data.ring(1000, seed=4, gap=0.2).points).any()
    with pytest.raises(ValueError, match=r"gap must be in \[0, 1\), got 1"):
        data.ring(4, seed=0, gap=1)


# Images in idx files


def packed(content):
    """Without the time, which would give the tests' parameters another name in each process."""
    return gzip.compress(content, mtime=0)


def idx(array):
    header = struct.pack(">BBBB", 0, 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.tobytes()


@pytest.fixture
def mnist(tmp_path, monkeypatch):
    """A folder with forty training and ten test images in MNIST's files."""
    monkeypatch.setattr(data, "VALIDATION_ROWS", 20)
    rng = np.random.default_rng(0)
    arrays = {
        "train-images-idx3-ubyte.gz": rng.integers(0, 256, (40, 28, 28), dtype=np.uint8),
        "train-labels-idx1-ubyte.gz": (np.arange(40) % 10).astype(np.uint8),
        "t10k-images-idx3-ubyte.gz": rng.integers(0, 256, (10, 28, 28), dtype=np.uint8),
        "t10k-labels-idx1-ubyte.gz": np.arange(10, dtype=np.uint8),
    }
    folder = tmp_path / "mnist"
    folder.mkdir()
    for name, array in arrays.items():
        (folder / name).write_bytes(packed(idx(array)))
    return folder, list(arrays.values())


@pytest.mark.parametrize("below", [False, True])  # the folder itself, or the one above it
def test_images_are_split_by_seed_and_keep_their_own_test_part(mnist, below):
    folder, (train_x, _, test_x, test_y) = mnist
    split = data.load_images("mnist", 0, folder.parent if below else folder)
    np.testing.assert_array_equal(split.test[0], test_x[:, None])
    np.testing.assert_array_equal(split.test[1], test_y)
    assert split.train[0].shape == (20, 1, 28, 28)
    assert split.train[0].dtype == np.uint8
    assert split.test[0].flags.writeable
    assert split.train[1].dtype == np.int64
    assert split.num_classes == 10
    assert np.bincount(split.validation[1]).tolist() == [2] * 10
    both = np.concatenate([split.train[0], split.validation[0]])
    assert {image.tobytes() for image in both} == {image.tobytes() for image in train_x}
    other = data.load_images("mnist", 1, folder)
    assert (other.train[0] != split.train[0]).any()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (packed(idx(np.zeros((40, 28, 28), np.uint8)))[:50], "cannot read .*; get it again"),  # truncated gzip
        (b"not gzip", "cannot read .*; get it again"),
        (packed(idx(np.zeros(40, np.uint8))[:-1]), "is damaged: 39 bytes where 40 are announced"),
        (packed(b"\0\0\x08\x03\0\0"), "is not an idx file of bytes"),
        (packed(b"\0\0\x0d\x01\0\0\0\0"), "is not an idx file of bytes"),  # floats
        (packed(b""), "is not an idx file of bytes"),
        # Four dimensions of 2^16: their product is 0 in 64 bits, which must not pass for "nothing announced".
        (packed(b"\0\0\x08\x04" + b"\0\1\0\0" * 4), "is damaged"),
        (packed(idx(np.zeros(40, np.uint8))), "must hold n images and n labels"),
    ],
)
def test_a_damaged_idx_file_gets_one_line(mnist, content, message):
    folder, _ = mnist
    (folder / "train-images-idx3-ubyte.gz").write_bytes(content)
    with pytest.raises(DataError, match=message) as error:
        data.load_images("mnist", 0, folder)
    assert one_line(error)


def test_a_missing_file_gets_one_line_that_says_where_to_get_it(mnist):
    folder, _ = mnist
    (folder / "t10k-images-idx3-ubyte.gz").unlink()
    with pytest.raises(DataError, match=r"no t10k-images-idx3-ubyte\.gz in .*https://.*--data-dir") as error:
        data.load_images("mnist", 0, folder)
    assert one_line(error)


def test_unknown_images_are_refused():
    with pytest.raises(ValueError, match="unknown dataset 'svhn'; there is: mnist, fashion-mnist, cifar100"):
        data.load_images("svhn", 0)


# Downloads


@pytest.fixture
def server(mnist, tmp_path, monkeypatch):
    """The folder `mnist` behind http, known by its own checksums, with an empty cache."""
    folder, _ = mnist

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=folder)

        def log_message(self, *args):
            pass

    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    checksums = {name: hashlib.md5((folder / name).read_bytes()).hexdigest() for name in sources.SOURCES["mnist"].files}
    address = f"http://127.0.0.1:{httpd.server_port}"
    monkeypatch.setitem(sources.SOURCES, "mnist", sources.Source(address, checksums))
    monkeypatch.setattr(sources, "cache_folder", lambda: tmp_path / "cache")
    yield folder
    httpd.shutdown()
    httpd.server_close()
    thread.join()


def test_files_are_downloaded_once(server):
    first = data.load_images("mnist", 0)
    for file in server.iterdir():
        file.unlink()
    again = data.load_images("mnist", 0)
    np.testing.assert_array_equal(first.train[0], again.train[0])


def test_a_wrong_checksum_gets_one_line_and_leaves_no_file(server, tmp_path):
    (server / "train-images-idx3-ubyte.gz").write_bytes(b"something else")
    with pytest.raises(DataError, match="has not the published checksum") as error:
        data.load_images("mnist", 0)
    assert one_line(error)
    assert not any(path.is_file() for path in (tmp_path / "cache").rglob("*"))


def test_no_network_gets_one_line_that_names_the_files(tmp_path, monkeypatch):
    files = sources.SOURCES["mnist"].files
    # Port 9 (discard) of this machine: refused at once, wherever the tests run.
    monkeypatch.setitem(sources.SOURCES, "mnist", sources.Source("http://127.0.0.1:9", files))
    monkeypatch.setattr(sources, "cache_folder", lambda: tmp_path / "cache")
    with pytest.raises(DataError, match="cannot download mnist") as error:
        data.load_images("mnist", 0)
    assert one_line(error)
    assert all(name in str(error.value) for name in files)
    assert "--data-dir" in str(error.value)


# CIFAR-100


def cifar(n, seed=0):
    rng = np.random.default_rng(seed)
    return {
        b"data": rng.integers(0, 256, (n, 3072), dtype=np.uint8),
        b"fine_labels": [i % 100 for i in range(n)],
        b"filenames": [b"image.png"] * n,
    }


@pytest.fixture
def cifar_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "VALIDATION_ROWS", 100)
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    for part, n in (("train", 200), ("test", 100)):
        # Protocol 2 is the one of the published files.
        (folder / part).write_bytes(pickle.dumps(cifar(n), protocol=2))
    return folder


@pytest.mark.parametrize("packed", [False, True])
def test_cifar_is_read_from_its_folder_and_from_its_archive(cifar_folder, packed):
    if packed:
        with tarfile.open(cifar_folder.parent / "cifar-100-python.tar.gz", "w:gz") as archive:
            archive.add(cifar_folder, "cifar-100-python")
        for file in cifar_folder.iterdir():
            file.unlink()
        cifar_folder.rmdir()
    (train_x, train_y), (test_x, test_y) = data.read_images("cifar100", cifar_folder.parent)
    np.testing.assert_array_equal(train_x.reshape(200, 3072), cifar(200)[b"data"])
    np.testing.assert_array_equal(train_y, np.arange(200) % 100)
    assert test_x.shape == (100, 3, 32, 32)
    split = data.load_images("cifar100", 0, cifar_folder.parent)
    assert split.num_classes == 100
    assert np.bincount(split.validation[1]).tolist() == [1] * 100
    np.testing.assert_array_equal(split.test[1], test_y)


class Malicious:
    def __init__(self, call, *arguments):
        self.call, self.arguments = call, arguments

    def __reduce__(self):
        return self.call, self.arguments


@pytest.mark.parametrize("protocol", [0, 2, 4])  # GLOBAL in text, in binary, and STACK_GLOBAL
@pytest.mark.parametrize(
    ("call", "arguments", "name"),
    [
        (os.system, ("touch owned",), "system"),
        (eval, ("open('owned', 'w')",), "builtins.eval|__builtin__.eval"),
        (getattr, ("", "format"), "getattr"),
        (np.load, ("owned",), "load"),
    ],
)
def test_a_malicious_pickle_is_refused(cifar_folder, tmp_path, monkeypatch, protocol, call, arguments, name):
    monkeypatch.chdir(tmp_path)
    (cifar_folder / "train").write_bytes(pickle.dumps({b"data": Malicious(call, *arguments)}, protocol=protocol))
    with pytest.raises(DataError, match=rf"it asks for .*({name}), which no data file needs") as error:
        data.read_images("cifar100", tmp_path)
    assert one_line(error)
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps(cifar(5), protocol=2)[:-500], "cannot read train of"),
        (b"", "cannot read train of .*: Ran out of input"),
        (pickle.dumps({}, protocol=2), "cannot read train of .*data"),
        (pickle.dumps({**cifar(5), b"fine_labels": [0]}, protocol=2), "holds something else than CIFAR-100's"),
        (pickle.dumps({**cifar(5), b"fine_labels": [100] * 5}, protocol=2), "holds something else than CIFAR-100's"),
    ],
)
def test_a_damaged_cifar_file_gets_one_line(cifar_folder, content, message):
    (cifar_folder / "train").write_bytes(content)
    with pytest.raises(DataError, match=message) as error:
        data.read_images("cifar100", cifar_folder.parent)
    assert one_line(error)


def test_a_missing_cifar_part_gets_one_line(cifar_folder):
    (cifar_folder / "test").unlink()
    with pytest.raises(DataError, match=r"there is no .*test; get cifar-100-python\.tar\.gz from") as error:
        data.read_images("cifar100", cifar_folder.parent)
    assert one_line(error)


def test_human_labels(tmp_path):
    clean = np.arange(5)
    np.savez(tmp_path / "people.npz", noisy_label=clean[::-1], clean_label=clean)
    np.testing.assert_array_equal(data.load_human_labels(clean, tmp_path / "people.npz"), clean[::-1])
    with pytest.raises(DataError, match="same order"):
        data.load_human_labels(clean[::-1], tmp_path / "people.npz")
    with pytest.raises(DataError, match=r"missing\.npz"):
        data.load_human_labels(clean, tmp_path / "missing.npz")


# Tables

CSV = "height,width,kind\n" + "".join(f"{i},{i / 2},{'cat' if i % 3 else 'dog'}\n" for i in range(30))


def test_csv_and_parquet_give_the_same_split(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "table.csv").write_text(CSV)
    _, *lines = (line.split(",") for line in CSV.splitlines())
    columns = {"height": [int(a) for a, _, _ in lines], "width": [float(b) for _, b, _ in lines]}
    parquet.write_table(pyarrow.table({**columns, "kind": [c for _, _, c in lines]}), tmp_path / "table.parquet")
    first, second = (data.load_table(tmp_path / name, "kind", 0) for name in ("table.csv", "table.parquet"))
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
    features, labels, names = sources.read_table(tmp_path / "table.csv", "y")
    assert names == ["9", "10"]
    assert labels.tolist() == [1, 0, 1]
    assert features.tolist() == [[1], [2], [3]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a,b\n1,2\n", "has no column 'kind'; there is: a, b; choose one with --label-column"),
        ("", "is empty: expected a line of column names"),
        ("a,kind\n", "must have rows"),
        ("kind\n1\n", "a column beside the label 'kind'"),
        ("a,a,kind\n1,2,3\n", "names a column twice"),
        ("a,kind\n1\n", "row 1: expected 2 values as in the first line, got 1"),
        ("a,kind\n1,\n", "row 1: the label is missing"),
        ("a,kind\n1,x\nred,x\n", "row 2, column 'a': expected a finite number, got 'red'"),
        ("a,kind\nnan,x\n", "expected a finite number, got 'nan'"),
        ("a,kind\n" + "1,x\n" * 9, "column 'kind' must hold at least two classes, got 1"),
        ("a,kind\n" + "1,x\n" * 9 + "1,y\n", "10 rows of 2 classes cannot be split three ways"),
        (b"a,kind\n\xff\xfe,1\n", "cannot read .*utf-8"),
    ],
)
def test_a_bad_table_gets_one_line(tmp_path, content, message):
    path = tmp_path / "table.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message) as error:
        data.load_table(path, "kind", 0)
    assert one_line(error)


def test_a_missing_table_gets_one_line(tmp_path):
    for name in ("table.csv", "table.parquet"):
        if name == "table.parquet":
            pytest.importorskip("pyarrow")
        with pytest.raises(DataError, match=f"cannot read .*{re.escape(name)}") as error:
            data.load_table(tmp_path / name, "kind", 0)
        assert one_line(error)


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match="pip install pyarrow"):
        data.load_table(tmp_path / "table.parquet", "kind", 0)


def test_a_parquet_file_that_is_none_gets_one_line(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "table.parquet").write_bytes(b"no Parquet")
    with pytest.raises(DataError, match=r"cannot read .*table\.parquet") as error:
        data.load_table(tmp_path / "table.parquet", "kind", 0)
    assert one_line(error)
