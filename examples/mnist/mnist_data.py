"""The images for all examples: scikit-learn's handwritten digits, or MNIST.

The digits (1,797 images of 8 x 8) come with scikit-learn and need no download. MNIST is read from its IDX files, or
downloaded.
"""

from __future__ import annotations

import argparse
import gzip
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

import hvdtrain

IDX_UINT8 = 0x08  # third byte of an IDX file: the type of its values; the fourth is the number of dimensions
MNIST_SHAPE = (70_000, 28, 28)
MNIST_TRAIN = 60_000  # the first ones, as published


class Images(NamedTuple):
    """Images in [0, 1], float32 of shape (n, side, side), and their labels 0 to 9, int64 of shape (n,)."""

    x: np.ndarray
    y: np.ndarray


class DataError(ValueError):
    """The data cannot be used; the message names the file, what was expected and what was found."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose the data."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--data-dir", metavar="DIR", help="read MNIST's four IDX files, gzipped or not, from DIR")
    where.add_argument("--download", action="store_true", help="download MNIST with scikit-learn, which caches it")


def load(*, data_dir: str | None = None, download: bool = False) -> tuple[Images, Images]:
    """Return (train, test): the digits, or MNIST if an option selects it. Every rank gets all images.

    Raises:
        DataError: see its message.
    """
    if data_dir:
        return load_idx(data_dir, "train"), load_idx(data_dir, "t10k")
    return download_mnist() if download else load_digits()


def load_or_exit(args: argparse.Namespace) -> tuple[Images, Images]:
    """Return (train, test) for the options of `add_arguments`; end the script with one line if that fails."""
    try:
        return load(data_dir=args.data_dir, download=args.download)
    except DataError as error:
        raise SystemExit(f"error: {error}") from None


def load_digits() -> tuple[Images, Images]:
    """Return scikit-learn's digits, in a split that is the same in every run: 1,437 to train, 360 to test."""
    digits = _datasets().load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))  # scikit-learn sorts them by writer
    x, y = digits.images[order].astype(np.float32) / 16, digits.target[order].astype(np.int64)
    return Images(x[:-360], y[:-360]), Images(x[-360:], y[-360:])


def download_mnist() -> tuple[Images, Images]:
    """Return MNIST, downloaded on rank 0 and broadcast to the other ranks, which may be on other hosts."""
    world = hvdtrain.init()
    pixels, labels, problem = np.empty(MNIST_SHAPE, np.uint8), np.empty(MNIST_SHAPE[0], np.uint8), ""
    if world.is_root:  # only I/O here: the other ranks wait in the broadcast below
        try:
            pixels, labels = _fetch_mnist()
        except DataError as error:
            problem = str(error)
    problem = world.broadcast_object(problem)
    if problem:
        raise DataError(problem)
    pixels, labels = world.broadcast(pixels), world.broadcast(labels)
    x, y = _images(pixels), labels.astype(np.int64)
    return Images(x[:MNIST_TRAIN], y[:MNIST_TRAIN]), Images(x[MNIST_TRAIN:], y[MNIST_TRAIN:])


def _fetch_mnist() -> tuple[np.ndarray, np.ndarray]:
    datasets = _datasets()
    try:
        # This parser needs no pandas.
        mnist = datasets.fetch_openml("mnist_784", version=1, as_frame=False, parser="liac-arff")
    except (OSError, ValueError) as error:
        raise DataError(
            f"MNIST could not be fetched: {error}. Without a network, omit --download to train on scikit-learn's "
            "digits, or give --data-dir a folder with MNIST's IDX files."
        ) from error
    if mnist.data.size != np.prod(MNIST_SHAPE):
        raise DataError(f"MNIST as fetched must hold {MNIST_SHAPE} pixels. Found: {mnist.data.shape}")
    return mnist.data.reshape(MNIST_SHAPE).astype(np.uint8), mnist.target.astype(np.uint8)


def load_idx(directory: str | Path, name: str) -> Images:
    """Return the images and labels of `name` ("train" or "t10k") from MNIST's IDX files, gzipped or not.

    Raises:
        DataError: a file is missing, unreadable, not IDX, truncated, or does not fit the other one.
    """
    images_path, pixels = read_idx(Path(directory), f"{name}-images-idx3-ubyte", dimensions=3)
    labels_path, labels = read_idx(Path(directory), f"{name}-labels-idx1-ubyte", dimensions=1)
    if len(pixels) != len(labels):
        raise DataError(f"{labels_path} must hold one label for each of the {len(pixels)} images in {images_path}. "
                        f"Found: {len(labels)} labels")  # fmt: skip
    if not pixels.size or pixels.shape[1] != pixels.shape[2]:
        raise DataError(f"{images_path} must hold square images, at least one. Found: shape {pixels.shape}")
    if labels.max() > 9:
        raise DataError(f"{labels_path} must hold labels from 0 to 9. Found: {labels.max()}")
    return Images(_images(pixels), labels.astype(np.int64))


def read_idx(directory: Path, name: str, *, dimensions: int) -> tuple[Path, np.ndarray]:
    """Return the path of an IDX file of bytes and its array: header (magic, one size a dimension), then the values."""
    paths = [directory / name, directory / f"{name}.gz"]
    path = next((each for each in paths if each.exists()), None)
    if path is None:
        raise DataError(f"{paths[0]} is missing, and so is {paths[1].name}. Expected one of MNIST's four IDX files")
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":  # gzip's magic number, whatever the file's name is
            data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read. Expected an IDX file, gzipped or not. Found: {error}") from error
    header = 4 + 4 * dimensions
    if len(data) < header:
        raise DataError(f"{path} is truncated: expected a header of {header} bytes. Found: {len(data)} bytes")
    magic, *shape = struct.unpack(f">{1 + dimensions}I", data[:header])
    expected = IDX_UINT8 << 8 | dimensions
    if magic != expected:
        raise DataError(f"{path} is not an IDX file of {dimensions}-dimensional bytes: expected magic number "
                        f"{expected}. Found: {magic}")  # fmt: skip
    size = int(np.prod(shape, dtype=object))
    if len(data) - header != size:
        kind = "truncated" if len(data) - header < size else "too long"
        raise DataError(f"{path} is {kind}: its header says {tuple(shape)}, so {size} bytes were expected. "
                        f"Found: {len(data) - header} bytes")  # fmt: skip
    return path, np.frombuffer(data, np.uint8, offset=header).reshape(shape)


def _images(pixels: np.ndarray) -> np.ndarray:
    return pixels.astype(np.float32) / 255


def _datasets():
    try:
        from sklearn import datasets
    except ImportError as error:
        raise DataError(
            "scikit-learn, which holds the digits, is not installed. Run `pip install scikit-learn`, or give "
            f"--data-dir. Found: {error}"
        ) from error
    return datasets
