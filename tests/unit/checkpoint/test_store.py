"""Which checkpoints a run keeps, which one it goes on from, and what it never deletes."""

from __future__ import annotations

import logging
import math
import os
from pathlib import Path

import numpy as np
import pytest

from hvdtrain.checkpoint import Contents, Store, folders, read, write
from hvdtrain.errors import CheckpointError


def contents(**meta):
    return Contents({"model": {"w": np.ones(3)}}, meta)


def fill(store, metrics):
    for epoch, value in enumerate(metrics, start=1):
        write(store.place(epoch), contents(epoch=epoch, metrics={"loss": value}))
        store.prune()


def names(store):
    return [path.name for path in store.newest_first()]


def test_the_newest_comes_first_and_other_names_do_not_count(tmp_path):
    store = Store(tmp_path)
    for place in ((2, 0), (10, 0), (2, 120), (1, 0), (1_000_000, 0), (0, 7)):
        store.place(*place).mkdir()
    for other in ("notes", "epoch-3", "epoch-0000003", "epoch-000003-step-5", "epoch-000004.bak", "epoch-٠٠٠٠٠٤"):
        (tmp_path / other).mkdir()
    assert names(store) == [
        "epoch-1000000", "epoch-000010", "epoch-000002-step-00000120", "epoch-000002", "epoch-000001",
        "epoch-000000-step-00000007",
    ]  # fmt: skip
    assert Store(tmp_path / "none").newest_first() == []


@pytest.mark.parametrize("options", [{"keep_last": 0}, {"keep_last": True}, {"best": "loss", "mode": "less"}])
def test_options_outside_their_range_are_refused(tmp_path, options):
    with pytest.raises(ValueError, match="Received"):
        Store(tmp_path, **options)


def test_the_last_checkpoints_stay(tmp_path):
    store = Store(tmp_path, keep_last=2)
    fill(store, [3.0, 2.0, 1.0, 4.0])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch-000003", "epoch-000004"]
    keeps_all = Store(tmp_path, keep_last=None)
    fill(keeps_all, [1.0] * 6)
    assert len(names(keeps_all)) == 6


@pytest.mark.parametrize(
    ("metrics", "mode", "best"),
    [
        ([3.0, 1.0, 2.0, 2.0], "auto", 2),  # a loss: less is better
        ([3.0, 1.0, 2.0, 2.0], "max", 1),
        ([math.nan, 2.0, math.nan, 2.0], "min", 2),  # NaN is never best, and of equal ones the older is
        ([1.0, 1.0, 3.0, 3.0], "auto", 1),
    ],
)
def test_the_best_checkpoint_stays_too(tmp_path, metrics, mode, best):
    store = Store(tmp_path, keep_last=1, best="loss", mode=mode)
    fill(store, metrics)
    assert names(store) == ["epoch-000004", f"epoch-{best:06d}"]


def test_without_a_single_number_there_is_no_best(tmp_path):
    store = Store(tmp_path, keep_last=1, best="loss")
    fill(store, [math.nan, None, "0.1", [1]])
    assert names(store) == ["epoch-000004"]


def test_what_is_no_whole_checkpoint_is_neither_counted_nor_deleted(tmp_path, caplog):
    store = Store(tmp_path, keep_last=2)
    fill(store, [1.0])
    store.place(2).mkdir()
    (store.place(2) / "thesis.tex").write_text("years")
    store.place(3).write_text("a file")
    (tmp_path / "elsewhere").mkdir()
    write(tmp_path / "elsewhere" / "one", contents())
    store.place(0, 5).symlink_to(tmp_path / "elsewhere" / "one")
    write(store.place(4), contents())
    (store.place(4) / "meta.json").write_text("[]")
    fill(Store(tmp_path, keep_last=9), [1.0])
    store.prune()
    assert names(store) == [f"epoch-{epoch:06d}" for epoch in (4, 3, 2, 1)] + ["epoch-000000-step-00000005"]
    write(store.place(6), contents())
    write(store.place(5), contents())
    store.prune()
    assert names(store) == [f"epoch-{epoch:06d}" for epoch in (6, 5, 4, 3, 2)] + ["epoch-000000-step-00000005"]
    assert (store.place(2) / "thesis.tex").exists()
    assert read(tmp_path / "elsewhere" / "one").meta == {}
    assert "not deleted" in caplog.text


def test_a_kill_while_deleting_leaves_nothing_half(tmp_path, monkeypatch):
    import hvdtrain.checkpoint.folders as folders

    class Killed(BaseException):
        pass

    def die(path, **options):
        os.unlink(path / "manifest.json")
        raise Killed

    store = Store(tmp_path, keep_last=1)
    fill(store, [1.0])
    write(store.place(2), contents())
    monkeypatch.setattr(folders.shutil, "rmtree", die)
    with pytest.raises(Killed):
        store.prune()
    monkeypatch.undo()
    assert names(store) == ["epoch-000002"]
    assert len(list(tmp_path.iterdir())) == 2
    store.clear_leftovers()
    assert [path.name for path in tmp_path.iterdir()] == ["epoch-000002"]


def test_leftovers_go_and_everything_else_stays(tmp_path):
    store = Store(tmp_path)
    fill(store, [1.0])
    for name in (".epoch-000002.00000000-0123456789ab", ".epoch-000003.0123456789ab", ".cache", ".thesis.replaced"):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (1e9, 1e9))
    (tmp_path / ".epoch-000004.00000000-0123456789ab").write_text("no folder")
    store.clear_leftovers()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".cache", ".epoch-000003.0123456789ab", ".epoch-000004.00000000-0123456789ab", ".thesis.replaced",
        "epoch-000001",
    ]  # fmt: skip
    Store(tmp_path / "none").clear_leftovers()


def test_a_half_replaced_one_is_found_pruned_moved_and_put_back(tmp_path):
    store = Store(tmp_path, keep_last=1)
    fill(store, [1.0])
    store.place(1).rename(tmp_path / ".epoch-000001.replaced")
    assert names(store) == ["epoch-000001"]
    path, found = store.newest_whole()
    assert (path, found.meta["epoch"]) == (store.place(1), 1)
    store.clear_leftovers()
    assert [path.name for path in tmp_path.iterdir()] == ["epoch-000001"]
    store.place(1).rename(tmp_path / ".epoch-000001.replaced")
    store.set_aside()
    assert read(tmp_path / "old-1" / "epoch-000001").meta["epoch"] == 1
    (tmp_path / "old-1" / "epoch-000001").rename(tmp_path / ".epoch-000001.replaced")
    fill(store, [])
    write(store.place(2), contents())
    store.prune()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch-000002", "old-1"]


def test_the_newest_whole_one_is_taken_and_the_skipped_are_named_with_their_reason(tmp_path, caplog):
    store = Store(tmp_path)
    assert store.newest_whole() is None
    fill(store, [1.0, 2.0, 3.0])
    (store.place(3) / "meta.json").unlink()
    model = store.place(2) / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1] + b"\1")
    with caplog.at_level(logging.WARNING, "hvdtrain"):
        path, found = store.newest_whole()
    assert (path, found.meta["epoch"]) == (store.place(1), 1)
    first, second = (record.getMessage() for record in caplog.records)
    assert "epoch-000003" in first
    assert "meta.json cannot be read (No such file" in first
    assert "epoch-000002" in second
    assert "model.safetensors is damaged" in second


def test_older_runs_are_set_aside_one_by_one(tmp_path):
    store = Store(tmp_path)
    store.set_aside()
    assert list(tmp_path.iterdir()) == []
    for number in (1, 2):
        fill(store, [1.0, 2.0])
        store.set_aside()
        assert (tmp_path / f"old-{number}" / "epoch-000001").is_dir()
        assert store.newest_whole() is None
    assert read(tmp_path / "old-2" / "epoch-000002").meta["epoch"] == 2


def test_a_folder_that_cannot_be_listed_or_changed_is_a_checkpoint_error(tmp_path, monkeypatch):
    store = Store(tmp_path)
    fill(store, [1.0])

    def denied(*args, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "rename", denied)
    with pytest.raises(CheckpointError, match=r"could not be moved.*Permission denied"):
        store.set_aside()
    monkeypatch.setattr(type(tmp_path), "iterdir", denied)
    with pytest.raises(CheckpointError, match=r"cannot be listed: Permission denied"):
        store.newest_whole()


def test_a_folder_that_cannot_be_written_is_said_with_what_to_do(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(CheckpointError, match=r"file/runs on host .*Give a folder that this user can write to"):
        Store(tmp_path / "file" / "runs").check_writable(1)


def test_a_disk_without_space_for_one_checkpoint_is_said_with_both_sizes(tmp_path, monkeypatch):
    store = Store(tmp_path / "runs")
    monkeypatch.setattr(folders, "free_bytes", lambda path: 2_000_000)
    store.check_writable(2_000_000)
    with pytest.raises(CheckpointError, match=r"takes at least 3\.0 MB, and 2\.0 MB are free. Free some space"):
        store.check_writable(3_000_000)
    monkeypatch.setattr(folders, "free_bytes", lambda path: None)
    store.check_writable(3_000_000)
    assert list(store.root.iterdir()) == []


def test_free_space_is_that_of_the_disk(tmp_path):
    assert folders.free_bytes(tmp_path) > 0
    assert folders.free_bytes(Path("/proc")) is None
