"""The examples' data: MNIST's files are read right or refused with a message that says what is wrong."""

from __future__ import annotations

import gzip
import importlib.util
import struct
import sys
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hvdtrain

PATH = Path(__file__).resolve().parents[3] / "examples" / "mnist" / "mnist_data.py"
IMAGES = np.random.default_rng(0).integers(0, 256, (5, 4, 4), np.uint8)
LABELS = np.array([3, 1, 4, 1, 5], np.uint8)


def _load_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mnist_data", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


mnist_data = _load_module()


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">{1 + array.ndim}I", 0x0800 | array.ndim, *array.shape) + array.tobytes()


def write(folder: Path, *, images: bytes | None = None, labels: bytes | None = None, suffix: str = "") -> Path:
    for name in ("train", "t10k"):
        (folder / f"{name}-images-idx3-ubyte{suffix}").write_bytes(idx(IMAGES) if images is None else images)
        (folder / f"{name}-labels-idx1-ubyte{suffix}").write_bytes(idx(LABELS) if labels is None else labels)
    return folder


@pytest.fixture(autouse=True)
def _solo() -> Iterator[None]:
    hvdtrain.world.use(hvdtrain.SoloWorld())
    yield
    hvdtrain.world.use(None)


@pytest.mark.parametrize(("suffix", "pack"), [("", bytes), (".gz", gzip.compress), ("", gzip.compress)])
def test_idx_files_give_what_was_written_gzipped_or_not(tmp_path: Path, suffix: str, pack: Any) -> None:
    write(tmp_path, images=pack(idx(IMAGES)), labels=pack(idx(LABELS)), suffix=suffix)
    for part in mnist_data.load(data_dir=str(tmp_path)):
        np.testing.assert_array_equal(np.rint(part.x * 255), IMAGES)
        np.testing.assert_array_equal(part.y, LABELS)
        assert (part.x.dtype, part.y.dtype) == (np.float32, np.int64)
        assert 0 <= part.x.min() <= part.x.max() <= 1


BAD_IMAGES = {
    "shorter than its header": (
        idx(LABELS),
        r"train-images-idx3-ubyte.*truncated: expected a header of 16 bytes.*13 bytes",
    ),
    "labels in place of images": (idx(np.zeros(50, np.uint8)), r"expected magic number 2051\. Found: 2049"),
    "int32 values": (struct.pack(">4I", 0x0C03, 1, 1, 1) + b"\0" * 4, r"expected magic number 2051\. Found: 3075"),
    "text": (b"<html>Not found</html>" * 9, r"expected magic number 2051\. Found: 1013478509"),
    "empty": (b"", r"expected a header of 16 bytes\. Found: 0 bytes"),
    "truncated": (idx(IMAGES)[:-1], r"is truncated: its header says \(5, 4, 4\), so 80 bytes .* Found: 79 bytes"),
    "too long": (idx(IMAGES) + b"\0", r"is too long: .* 80 bytes were expected\. Found: 81 bytes"),
    "size beyond memory": (struct.pack(">4I", 2051, *[2**32 - 1] * 3), r"79228162458924105385300197375 bytes were"),
    "truncated gzip": (
        gzip.compress(idx(IMAGES))[:-9],
        r"cannot be read\. Expected an IDX file.* Found: .*end-of-stream",
    ),
    "damaged gzip": (gzip.compress(b"x" * 99)[:12] + b"\xff" * 30, r"cannot be read\. Expected an IDX file"),
    "no images": (idx(np.zeros((0, 4, 4), np.uint8)), r"one label for each of the 0 images in .* Found: 5 labels"),
    "not square": (idx(np.zeros((5, 4, 3), np.uint8)), r"must hold square images.* Found: shape \(5, 4, 3\)"),
    "no pixels": (idx(np.zeros((5, 0, 0), np.uint8)), r"must hold square images.* Found: shape \(5, 0, 0\)"),
    "fewer images than labels": (idx(IMAGES[:3]), r"labels-idx1-ubyte must hold one label for each of the 3 images"),
}


@pytest.mark.parametrize("case", BAD_IMAGES)
def test_bad_image_file_is_refused_with_its_name_what_was_expected_and_found(tmp_path: Path, case: str) -> None:
    images, message = BAD_IMAGES[case]
    with pytest.raises(mnist_data.DataError, match=message) as caught:
        mnist_data.load(data_dir=str(write(tmp_path, images=images)))
    assert str(tmp_path / "train-") in str(caught.value)


def test_label_beyond_nine_is_refused(tmp_path: Path) -> None:
    write(tmp_path, labels=idx(np.array([0, 1, 2, 3, 10], np.uint8)))
    with pytest.raises(mnist_data.DataError, match=r"labels from 0 to 9\. Found: 10"):
        mnist_data.load(data_dir=str(tmp_path))


@pytest.mark.parametrize("name", ["train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"])
def test_missing_file_is_named(tmp_path: Path, name: str) -> None:
    (write(tmp_path) / name).unlink()
    with pytest.raises(mnist_data.DataError, match=rf"{name} is missing, and so is {name}\.gz"):
        mnist_data.load(data_dir=str(tmp_path))


def test_unreadable_file_is_named_with_the_systems_reason(tmp_path: Path) -> None:
    (write(tmp_path) / "train-images-idx3-ubyte").unlink()
    (tmp_path / "train-images-idx3-ubyte").mkdir()
    with pytest.raises(mnist_data.DataError, match=r"train-images-idx3-ubyte cannot be read.*Is a directory"):
        mnist_data.load(data_dir=str(tmp_path))


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 96), at=st.integers(0, 95), value=st.integers(0, 255), zipped=st.booleans())
def test_damaged_file_is_read_or_refused_but_never_fails_otherwise(
    tmp_path: Path, cut: int, at: int, value: int, zipped: bool
) -> None:
    data = bytearray(gzip.compress(idx(IMAGES)) if zipped else idx(IMAGES))
    data[at] = value
    try:
        train, _ = mnist_data.load(data_dir=str(write(tmp_path, images=bytes(data[: len(data) - cut]))))
    except mnist_data.DataError:
        return
    assert train.x.shape == IMAGES.shape


def test_digits_are_split_the_same_in_every_run_and_share_no_image() -> None:
    (train, test), (again, _) = mnist_data.load(), mnist_data.load()
    assert (train.x.shape, test.x.shape) == ((1437, 8, 8), (360, 8, 8))
    np.testing.assert_array_equal(train.x, again.x)
    assert {image.tobytes() for image in train.x}.isdisjoint(image.tobytes() for image in test.x)
    assert (train.x.max(), train.x.min()) == (1, 0)
    assert set(test.y) == set(range(10))


class _Mnist:
    data = np.zeros((70_000, 784))
    target = np.array([str(i % 10) for i in range(70_000)], object)


def test_download_gives_mnists_own_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sklearn.datasets.fetch_openml", lambda *_, **__: _Mnist)
    train, test = mnist_data.load(download=True)
    assert (train.x.shape, test.x.shape) == ((60_000, 28, 28), (10_000, 28, 28))
    np.testing.assert_array_equal(test.y[:3], [0, 1, 2])


@pytest.mark.parametrize("error", [urllib.error.URLError("no network"), ValueError("no network")])
def test_download_without_a_network_says_what_to_do(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fetch(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("sklearn.datasets.fetch_openml", fetch)
    with pytest.raises(mnist_data.DataError, match=r"could not be fetched: .*no network.*--data-dir"):
        mnist_data.load(download=True)


def test_another_rank_does_not_download_and_hears_why_rank_0_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    class SecondRank(hvdtrain.SoloWorld):
        rank, size = 1, 2

        def broadcast_object(self, obj: Any, *, root: int = 0, name: str = "object") -> Any:
            return "what rank 0 said"

    monkeypatch.setattr("sklearn.datasets.fetch_openml", lambda *_, **__: pytest.fail("rank 1 downloaded"))
    hvdtrain.world.use(SecondRank())
    with pytest.raises(mnist_data.DataError, match="what rank 0 said"):
        mnist_data.load(download=True)


def test_missing_scikit_learn_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(mnist_data.DataError, match=r"pip install scikit-learn"):
        mnist_data.load()
