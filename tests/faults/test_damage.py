"""Random damage to a checkpoint's files is always found, and no full or read-only disk costs an older checkpoint."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from contextlib import contextmanager

import numpy as np
import pytest

from hvdtrain.checkpoint import Contents, Store, Writer, read, read_meta, write
from hvdtrain.errors import CheckpointError


def contents(rng, size=200):
    model = {f"{i}.weight": rng.standard_normal(size).astype(np.float32) for i in range(3)}
    optimizer = {f"{i}.momentum": rng.standard_normal(size).astype(np.float32) for i in range(3)}
    return Contents({"model": model, "optimizer": optimizer, "ranks": {"rng": np.arange(8)}}, {"epoch": 3, "lr": 0.1})


def same(one, two):
    return one.meta == two.meta and all(
        np.array_equal(array, two.arrays[stem][name])
        for stem, arrays in one.arrays.items()
        for name, array in arrays.items()
    )


def damage(content, rng):
    """Return a content with a bit flipped or its end cut off."""
    if rng.random() < 0.3:
        return content[: rng.integers(len(content))]
    position, bit = rng.integers(len(content)), rng.integers(8)
    return content[:position] + bytes([content[position] ^ (1 << bit)]) + content[position + 1 :]


def test_every_random_bit_flip_and_truncation_is_detected(tmp_path, rng, scale, row):
    written = contents(rng)
    write(tmp_path / "one", written)
    files = sorted((tmp_path / "one").iterdir())
    tries = 100 * scale
    for _ in range(tries):
        path = files[rng.integers(len(files))]
        whole = path.read_bytes()
        path.write_bytes(damage(whole, rng))
        with pytest.raises(CheckpointError, match=path.name):
            read(tmp_path / "one")
        if path.suffix == ".json":
            with pytest.raises(CheckpointError, match=path.name):
                read_meta(tmp_path / "one")
        path.write_bytes(whole)
    assert same(written, read(tmp_path / "one"))
    row("bit flip or truncation of a checkpoint's file", tries, f"{tries} detected")


def run(*command):
    return subprocess.run(command, capture_output=True, text=True)


@contextmanager
def small_disk(path, size):
    """Mount a filesystem of this size, or skip where that is not permitted."""
    path.mkdir()
    mounted = run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)) if shutil.which("mount") else None
    if mounted is None or mounted.returncode != 0:
        pytest.skip(f"no small filesystem can be mounted here: {mounted and mounted.stderr.strip()}")
    try:
        yield path
    finally:
        assert run("umount", str(path)).returncode == 0


@contextmanager
def limited_files(size):
    """Let no file of this process grow beyond a size, as a quota does; needs no rights."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def keeps_the_old_ones(store, rng, reason):
    """Fail to write once, in the background, and find everything as it was."""
    before = sorted(path.name for path in store.root.iterdir())
    kept = store.newest_whole()
    writer = Writer()
    writer.submit(store.place(9), contents(rng, size=100_000), then=store.prune)
    writer.wait()
    assert [reason in str(error) for error in writer.lost] == [True]
    assert sorted(path.name for path in store.root.iterdir()) == before
    assert same(kept[1], store.newest_whole()[1])


def test_a_full_disk_costs_no_older_checkpoint_and_keeps_no_room(tmp_path, rng, row):
    with small_disk(tmp_path / "disk", "1m") as disk:
        store = Store(disk / "run")
        write(store.place(1), contents(rng))
        free = os.statvfs(disk).f_bfree
        keeps_the_old_ones(store, rng, "No space left on device")
        assert os.statvfs(disk).f_bfree == free
        write(store.place(2), contents(rng))
    row("disk full (tmpfs of 1 MiB)", 1, "older kept, nothing left behind")


def test_a_disk_filled_to_any_byte_costs_no_older_checkpoint(tmp_path, rng, scale, row):
    tries = 10 * scale
    with small_disk(tmp_path / "disk", "64k") as disk:
        store = Store(disk / "run", keep_last=1)
        failed = 0
        for number in range(tries):
            free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_bsize
            (disk / "filler").write_bytes(bytes(int(rng.integers(free))))
            try:
                write(store.place(1), contents(rng, size=1 + number % 900))
                store.prune()
            except CheckpointError:
                failed += 1
            (disk / "filler").unlink()
            assert [path.name for path in store.root.iterdir()] in ([], ["epoch-000001"])
            if list(store.root.iterdir()):
                read(store.place(1))
    assert 0 < failed < tries
    row("disk full at a random byte", tries, f"{failed} refused, {tries - failed} written, 0 unloadable")


def test_a_read_only_disk_costs_no_older_checkpoint(tmp_path, rng, row):
    with small_disk(tmp_path / "disk", "8m") as disk:
        store = Store(disk / "run")
        write(store.place(1), contents(rng))
        assert run("mount", "-o", "remount,ro", str(disk)).returncode == 0
        keeps_the_old_ones(store, rng, "Read-only file system")
        store.clear_leftovers()
        with pytest.raises(CheckpointError, match="Read-only file system"):
            store.set_aside()
    row("read-only disk", 1, "older kept, still readable")


def test_a_quota_costs_no_older_checkpoint(tmp_path, rng, row):
    store = Store(tmp_path)
    write(store.place(1), contents(rng))
    with limited_files(100_000):
        keeps_the_old_ones(store, rng, "File too large")
    row("quota (files limited to 100 kB)", 1, "older kept, nothing left behind")
