"""The experiments' data: each format read from tiny files, and one line for whatever is wrong with them."""

import hashlib
import http.server
import io
import os
import pickle
import struct
import tarfile
import threading
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from experiment_cases import change_dataset, idx, invoke, one_line, packed

from bitempered.experiments import datasets, pickles, sources
from bitempered.experiments.pickles import read_pickle
from bitempered.experiments.sources import DataError

# Images in idx files


@pytest.fixture
def mnist(tmp_path, monkeypatch):
    """A folder with forty training and ten test images in MNIST's files."""
    change_dataset(monkeypatch, "mnist", validation_rows=20)
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
    split = datasets.read("mnist", folder.parent if below else folder).split(0)
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
    other = datasets.read("mnist", folder).split(1)
    assert (other.train[0] != split.train[0]).any()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (packed(idx(np.zeros((40, 28, 28), np.uint8)))[:50], "cannot read .*; download it again"),  # truncated gzip
        (b"not gzip", "cannot read .*; download it again"),
        (packed(idx(np.zeros(40, np.uint8))[:-1]), "is damaged: its header announces 40 bytes, got 39"),
        (packed(b"\0\0\x08\x03\0\0"), "is not an idx file of bytes"),
        (packed(b"\0\0\x0d\x01\0\0\0\0"), "is not an idx file of bytes"),  # floats
        (packed(b""), "is not an idx file of bytes"),
        # Four dimensions of 2^16: their product is 0 in 64 bits, which must not pass for "nothing announced".
        (packed(b"\0\0\x08\x04" + b"\0\1\0\0" * 4), "is damaged"),
        # More than can be allocated, more than is ever read, and more dimensions than NumPy has.
        (packed(b"\0\0\x08\x03" + b"\xff\xff\xff\xff" * 3 + bytes(100)), "is damaged: its header announces 79228"),
        (packed(b"\0\0\x08\x01" + struct.pack(">I", 2**30) + bytes(100)), "its header announces 1073741824"),
        (packed(b"\0\0\x08\x41" + struct.pack(">65I", *[1] * 65) + b"\0"), "is not an idx file of bytes"),
        # Nothing, in a shape that NumPy refuses.
        (packed(b"\0\0\x08\x03" + struct.pack(">3I", 0, 2**32 - 1, 2**32 - 1)), "is empty: its header announces"),
        (packed(idx(np.zeros(40, np.uint8))), "must hold n images of 28 x 28 and n labels"),
        (packed(idx(np.zeros((40, 10, 10), np.uint8))), r"must hold n images of 28 x 28.*got shapes \(40, 10, 10\)"),
    ],
)
def test_a_damaged_idx_file_gets_one_line(mnist, content, message):
    folder, _ = mnist
    (folder / "train-images-idx3-ubyte.gz").write_bytes(content)
    with pytest.raises(DataError, match=message) as error:
        datasets.read("mnist", folder).split(0)
    assert one_line(error)


def test_a_gzip_bomb_is_read_no_further_than_its_header_says(tmp_path):
    path = tmp_path / "bomb.gz"
    path.write_bytes(packed(idx(np.zeros(10, np.uint8)) + bytes(2**26)))
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="is damaged: its header announces 10 bytes, got more"):
            sources.read_idx(path)
        assert tracemalloc.get_traced_memory()[1] < 2**22  # gzip's own buffers
    finally:
        tracemalloc.stop()


def test_too_few_images_get_one_line(mnist, monkeypatch):
    folder, _ = mnist
    change_dataset(monkeypatch, "mnist", validation_rows=5_000)
    with pytest.raises(DataError, match="mnist: cannot set 5000 of 40 rows aside with their share") as error:
        datasets.read("mnist", folder).split(0)
    assert one_line(error)
    done = invoke("compare", "--dataset", "mnist", "--data-dir", folder, "--out", folder / "out")
    assert (done.exit_code, done.stderr) == (1, f"bitempered: {error.value}\n")
    for name, array in (("images-idx3", np.zeros((0, 28, 28), np.uint8)), ("labels-idx1", np.zeros(0, np.uint8))):
        (folder / f"t10k-{name}-ubyte.gz").write_bytes(packed(idx(array)))
    with pytest.raises(DataError, match=r"t10k.*is empty: its header announces \[0, 28, 28\]"):
        datasets.read("mnist", folder).split(0)


def test_a_missing_file_gets_one_line_that_says_where_to_get_it(mnist):
    folder, _ = mnist
    (folder / "t10k-images-idx3-ubyte.gz").unlink()
    with pytest.raises(DataError, match=r"no t10k-images-idx3-ubyte\.gz in .*https://.*--data-dir") as error:
        datasets.read("mnist", folder).split(0)
    assert one_line(error)


def test_an_unknown_dataset_is_refused():
    with pytest.raises(ValueError, match="unknown dataset 'svhn'; choose from: digits, mnist, fashion-mnist"):
        datasets.read("svhn").split(0)


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
    checksums = {name: hashlib.md5((folder / name).read_bytes()).hexdigest() for name in sources.MNIST.files}
    address = f"http://127.0.0.1:{httpd.server_port}"
    change_dataset(monkeypatch, "mnist", source=sources.Source(address, checksums))
    monkeypatch.setattr(sources, "cache_folder", lambda: tmp_path / "cache")
    yield folder
    httpd.shutdown()
    httpd.server_close()
    thread.join()


def test_files_are_downloaded_once(server):
    first = datasets.read("mnist").split(0)
    for file in server.iterdir():
        file.unlink()
    again = datasets.read("mnist").split(0)
    np.testing.assert_array_equal(first.train[0], again.train[0])


def test_a_wrong_checksum_gets_one_line_and_leaves_no_file(server, tmp_path):
    (server / "train-images-idx3-ubyte.gz").write_bytes(b"something else")
    with pytest.raises(DataError, match="does not have the published checksum") as error:
        datasets.read("mnist").split(0)
    assert one_line(error)
    assert not any(path.is_file() for path in (tmp_path / "cache").rglob("*"))


def test_no_network_gets_one_line_that_names_the_files(tmp_path, monkeypatch):
    files = sources.MNIST.files
    # Port 9 (discard) of this machine: refused at once, wherever the tests run.
    change_dataset(monkeypatch, "mnist", source=sources.Source("http://127.0.0.1:9", files))
    monkeypatch.setattr(sources, "cache_folder", lambda: tmp_path / "cache")
    with pytest.raises(DataError, match="cannot download mnist") as error:
        datasets.read("mnist").split(0)
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
    change_dataset(monkeypatch, "cifar100", validation_rows=100)
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
    (train_x, train_y), (test_x, test_y) = datasets.read_parts("cifar100", cifar_folder.parent)
    np.testing.assert_array_equal(train_x.reshape(200, 3072), cifar(200)[b"data"])
    np.testing.assert_array_equal(train_y, np.arange(200) % 100)
    assert test_x.shape == (100, 3, 32, 32)
    split = datasets.read("cifar100", cifar_folder.parent).split(0)
    assert split.num_classes == 100
    assert np.bincount(split.validation[1]).tolist() == [1] * 100
    np.testing.assert_array_equal(split.test[1], test_y)


class Malicious:
    def __init__(self, call, *arguments, state=None):
        self.made = (call, arguments) if state is None else (call, arguments, state)

    def __reduce__(self):
        return self.made


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
        datasets.read_parts("cifar100", tmp_path)
    assert one_line(error)
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps(cifar(5), protocol=2)[:-500], "cannot read train of"),
        (b"", "cannot read train of .*: pickle exhausted"),
        (pickle.dumps({}, protocol=2), "cannot read train of .*data"),
        (pickle.dumps({**cifar(5), b"fine_labels": [0]}, protocol=2), "expected a list of 5 labels"),
        (pickle.dumps({**cifar(5), b"fine_labels": [100] * 5}, protocol=2), "labels must be integers from 0 to 99"),
        (pickle.dumps({**cifar(5), b"fine_labels": [[0]] * 5}, protocol=2), "labels must be integers from 0 to 99"),
        (pickle.dumps({**cifar(5), b"data": np.zeros((5, 3072))}, protocol=2), "something other than arrays of bytes"),
    ],
)
def test_a_damaged_cifar_file_gets_one_line(cifar_folder, content, message):
    (cifar_folder / "train").write_bytes(content)
    with pytest.raises(DataError, match=message) as error:
        datasets.read_parts("cifar100", cifar_folder.parent)
    assert one_line(error)


def planted(dtype, raw, shape=(4,)):
    """The pickle of an array by hand: `dtype` is what calls NumPy's, with the state that follows."""
    reconstruct = np.zeros(0).__reduce__()[0]
    return Malicious(reconstruct, np.ndarray, (0,), b"b", state=(1, shape, dtype, False, raw))


@pytest.mark.parametrize(
    "content",
    [
        # A field of objects in a dtype whose flags deny it: NumPy takes the bytes for addresses. The second is the same
        # through the state of a dtype that is called a byte.
        *(
            pickle.dumps(
                {
                    **cifar(4),
                    b"fine_labels": planted(
                        Malicious(np.dtype, name, state=(3, "|", None, ("a",), {"a": (np.dtype("O"), 0)}, 8, 1, 0)),
                        b"A" * 32,
                    ),
                },
                protocol=2,
            )
            for name in ("V8", "u1")
        ),
        pickle.dumps({**cifar(4), b"data": planted(np.dtype("O"), [1, 2, 3, 4])}, protocol=2),
        pickle.dumps({**cifar(4), b"data": planted(np.dtype("u1"), b"A" * 12288, (2**62, 4))}, protocol=2),
        pickle.dumps({**cifar(4), b"data": planted(np.dtype("u1"), b"A" * 12288, (-1, 0))}, protocol=2),
        b"\x80\x02})" + b"\x85" * 200_000 + b"K\x01s.",  # a key whose hash is 200,000 calls deep
        b"\x80\x02Nr\xfe\xff\xff\x7f.",  # the 2,147,483,646th entry of a table of what was seen
        b"\x80\x02cnumpy\nndarray\nJ\xff\xff\xff\x7f\x85R.",  # an array of two gigabytes
        b"\x80\x02cnumpy\ndtype\n}X\x01\x00\x00\x00aK\x01sb.",  # state for what is named, not made
        b"\x80\x04\x8c\x05numpy\x8c\x05dtype\x93)\x81.",  # NEWOBJ
        b"\x80\x05\x96" + b"\xff" * 7 + b"\x0f.",  # a byte array of 2^60
    ],
    ids=range(11),
)
def test_a_hostile_pickle_gets_one_line(cifar_folder, content):
    (cifar_folder / "train").write_bytes(content)
    with pytest.raises(DataError, match=r"cannot read train of .*; download it again") as error:
        datasets.read_parts("cifar100", cifar_folder.parent)
    assert one_line(error)


def test_the_state_of_a_dtype_is_ignored(cifar_folder):
    dtype = Malicious(np.dtype, "u1", state=(3, "<", None, ("a",), {"a": None}, 77, -1, 63))
    (cifar_folder / "train").write_bytes(
        pickle.dumps({**cifar(4), b"data": planted(dtype, b"A" * 12288, (4, 3072))}, protocol=2)
    )
    images, _ = sources.read_cifar(cifar_folder, "train")
    assert (images == ord("A")).all()
    assert images.shape == (4, 3, 32, 32)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4])
def test_pickles_are_read_as_python_reads_them(protocol):
    content = {
        b"bytes": b"\x00\xff\n", "text": "\u00e4\n\u20ac", b"list": [0, 1, 255, 256, 65536, -1, 2**31, -(2**40)],
        b"none": [None, True, False, (), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), [], {}], b"again": [b"x"] * 3,
    }  # fmt: skip
    assert read_pickle(pickle.dumps(content, protocol=protocol)) == content


def test_a_pickle_has_a_limited_number_of_instructions(monkeypatch):
    monkeypatch.setattr(pickles, "STEPS", 100)
    assert read_pickle(b"N" * 99 + b".") is None
    with pytest.raises(ValueError, match="more than 100 instructions"):
        read_pickle(b"N" * 100 + b".")


def test_bytes_that_are_unpacked_again_and_again_are_counted(monkeypatch):
    monkeypatch.setattr(pickles, "ENCODED", 1000)
    once = b"\x80\x02(X\x90\x01\x00\x00" + b"a" * 400 + b"q\x00"
    call = b"c_codecs\nencode\nh\x00X\x06\x00\x00\x00latin1\x86R"
    assert read_pickle(once + call * 2 + b"t.") == ("a" * 400, b"a" * 400, b"a" * 400)
    with pytest.raises(ValueError, match="unpacks to far more"):
        read_pickle(once + call * 3 + b"t.")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw[:124] + b"-0000001000\0" + raw[136:], "it is not a tar archive"),  # would be read for ever
        (lambda raw: raw[:124] + b"77777777777\0" + raw[136:], "it has no cifar-100-python/train"),
        (lambda raw: raw[:1600], "no newline found"),
        (lambda raw: bytes(len(raw)), "it has no cifar-100-python/train"),
        (lambda raw: b"", "it has no cifar-100-python/train"),
    ],
)
def test_a_damaged_archive_gets_one_line(cifar_folder, change, message):
    path = cifar_folder.parent / "cifar.tar.gz"
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as archive:
        archive.add(cifar_folder / "train", "cifar-100-python/train")
    path.write_bytes(packed(change(raw.getvalue())))
    with pytest.raises(DataError, match=f"cannot read train of .*{message}") as error:
        sources.read_cifar(path, "train")
    assert one_line(error)


def test_an_archive_is_read_no_further_than_its_limit(cifar_folder, monkeypatch):
    monkeypatch.setattr(sources, "LIMIT", 2**20)
    path = cifar_folder.parent / "cifar.tar.gz"
    path.write_bytes(packed(bytes(2**27)))
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="it has no cifar-100-python/train"):
            sources.read_cifar(path, "train")
        assert tracemalloc.get_traced_memory()[1] < 2**23
    finally:
        tracemalloc.stop()


def test_a_missing_cifar_part_gets_one_line(cifar_folder):
    (cifar_folder / "test").unlink()
    with pytest.raises(DataError, match=r"there is no .*test; download cifar-100-python\.tar\.gz from") as error:
        datasets.read_parts("cifar100", cifar_folder.parent)
    assert one_line(error)


def test_human_labels(tmp_path):
    clean = np.arange(5)
    np.savez(tmp_path / "cifar100n.npz", noisy_label=clean[::-1], clean_label=clean)
    np.testing.assert_array_equal(datasets.CIFAR100N.read(clean, tmp_path), clean[::-1])
    with pytest.raises(DataError, match="same order"):
        datasets.CIFAR100N.read(clean[::-1], tmp_path)
    with pytest.raises(DataError, match=r"none.cifar100n\.npz"):
        datasets.CIFAR100N.read(clean, tmp_path / "none")


# Hashes


def test_a_dataset_s_digest_is_of_all_that_was_read(tmp_path):
    first = datasets.read("digits")
    assert first.digest == datasets.read("digits").digest != datasets.read("wine").digest
    for part in range(2):
        for place in range(2):
            arrays = [[array.copy() for array in part] for part in (first.rest, first.test)]
            arrays[part][place].flat[-1] += 1
            assert replace(first, rest=tuple(arrays[0]), test=tuple(arrays[1])).digest != first.digest


# Files that are damaged in any way


def damage(content, rng):
    """Change, cut out, double or overwrite a few bytes, mostly near the beginning, where the headers are."""
    content = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 2, 3, 8])):
        at = int(rng.integers(min(len(content), int(rng.choice([64, 400, 2**20]))) or 1))
        length = int(rng.integers(1, 20))
        extreme = struct.pack(rng.choice(["<I", ">I"]), rng.choice([0, 1, 2**28, 2**31 - 1, 2**31, 2**32 - 1]))
        other = int(rng.integers(len(content) or 1))
        change = rng.integers(5)
        if change == 0:
            content[at : at + 1] = rng.bytes(1)
        elif change == 1:
            del content[at : at + length]
        elif change == 2:
            content[at:at] = content[other : other + length]
        elif change == 3:
            content[at : at + 4] = extreme
        else:
            del content[at + 1000 * length :]
    return bytes(content)


CSV = "height,width,kind\n" + "".join(f"{i},{i / 2},{'cat' if i % 3 else 'dog'}\n" for i in range(30))


def example(kind):
    buffer = io.BytesIO()
    if kind == "idx":
        return idx(np.zeros((5, 4, 4), np.uint8))
    if kind == "pickle":
        return pickle.dumps(cifar(3), protocol=2)
    if kind == "tar":
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
            for part in ("test", "train"):
                info = tarfile.TarInfo(f"cifar-100-python/{part}")
                info.size = len(example("pickle"))
                archive.addfile(info, io.BytesIO(example("pickle")))
    elif kind == "npz":
        np.savez_compressed(buffer, noisy_label=np.arange(5), clean_label=np.arange(5))
    elif kind == "csv":
        return CSV.encode()
    else:
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.table({"height": [1.0, 2.0], "kind": ["cat", "dog"]}), buffer)
    return buffer.getvalue()


def read_example(kind, content, folder):
    path = folder / f"train.{kind}"
    if kind == "pickle":
        path = folder / "train"
    path.write_bytes(packed(content) if kind in ("idx", "tar") else content)
    if kind == "idx":
        sources.read_idx(path)
    elif kind == "pickle":
        sources.read_cifar(folder, "train")
    elif kind == "tar":
        sources.read_cifar(path, "train")
    elif kind == "npz":
        path.rename(folder / "cifar100n.npz")
        datasets.CIFAR100N.read(np.arange(5), folder)
    else:
        sources.read_table(path, "kind")


@pytest.mark.parametrize("count", [100, pytest.param(3000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["idx", "pickle", "tar", "npz", "csv", "parquet"])
def test_a_file_that_is_damaged_in_any_way_gets_one_line(kind, count, tmp_path):
    rng, whole = np.random.default_rng(0), example(kind)
    read_example(kind, whole, tmp_path)
    refused = []
    for _ in range(count):
        try:
            read_example(kind, damage(whole, rng), tmp_path)
        except DataError as error:
            refused.append(str(error))
    assert len(refused) > count / 3  # what is still a file of its kind may be read
    assert not any("\n" in message for message in refused)
