"""A checkpoint that training can resume from is never lost to later ones that hold NaN."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hvdtrain.checkpoint import Contents, Store, files, read, write
from hvdtrain.checkpoint.files import has_finite_numbers

NAN, INF = np.array([1.0, np.nan]), np.array([1.0, np.inf], np.float16)


def contents(weights=1.0, **meta):
    return Contents({"model": {"w": np.full(3, weights)}}, meta, trained=frozenset({"w"}))


def names(store):
    return [path.name for path in store.newest_first()]


def forget(path):
    """Make a manifest one of a version that did not know whether numbers are finite."""
    found = files.parse((path / "manifest.json").read_bytes())
    (path / "manifest.json").write_bytes(files.render(found._replace(finite=None)))


@pytest.mark.parametrize("keep_last", [1, 3])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_the_newest_finite_one_is_never_pruned(tmp_path, caplog, keep_last, bad):
    store = Store(tmp_path, keep_last=keep_last, best="loss")
    for epoch in range(1, 10):
        write(store.place(epoch), contents(1.0 if epoch < 5 else bad))
        store.prune()
    assert names(store) == [f"epoch-{epoch:06d}" for epoch in [*range(9, 9 - keep_last, -1), 4]]
    assert store.newest_finite() == store.place(4)
    assert caplog.text.count("epoch-000004 is not deleted: later checkpoints contain NaN or infinity") == 1


def test_once_numbers_are_finite_again_the_older_one_goes(tmp_path):
    store = Store(tmp_path, keep_last=1)
    for epoch, weights in enumerate([1.0, np.nan, 2.0, 3.0], start=1):
        write(store.place(epoch), contents(weights))
        store.prune()
    assert names(store) == ["epoch-000004"]


def test_without_a_finite_one_the_newest_stay(tmp_path):
    store = Store(tmp_path, keep_last=2)
    for epoch in range(1, 5):
        write(store.place(epoch), contents(np.nan))
        store.prune()
    assert names(store) == ["epoch-000004", "epoch-000003"]
    assert store.newest_finite() is None


def test_of_older_versions_checkpoints_the_numbers_are_read(tmp_path):
    store = Store(tmp_path, keep_last=1)
    for epoch, weights in enumerate([1.0, np.nan], start=1):
        write(store.place(epoch), contents(weights))
        forget(store.place(epoch))
    write(store.place(3), contents(np.nan))
    store.prune()
    assert names(store) == ["epoch-000003", "epoch-000001"]
    assert [read(path).finite for path in store.newest_first()] == [False, True]


def test_older_versions_read_the_manifest(tmp_path):
    write(tmp_path / "one", contents())
    kept = json.loads((tmp_path / "one" / "manifest.json").read_text())
    assert (kept["format"], kept["finite"]) == (2, True)
    assert set(kept["files"]) == {"meta.json", "model.safetensors"}


@pytest.mark.parametrize(
    ("groups", "finite"),
    [
        ({"model": {"w": NAN}}, False),
        ({"model": {"w": INF}}, False),
        ({"model": {"w": -INF}}, False),
        ({"model": {"w": NAN * 1j}}, False),
        ({"model": {"w": np.array([1, 2]), "empty": np.ones(0)}}, True),
        ({"model": {"mask": -INF}}, True),  # what no gradient changes may be infinite, but no NaN
        ({"model": {"mean": NAN}}, False),
        ({"optimizer": {"exp_avg": NAN}}, False),
        ({"optimizer": {"steps": INF}}, True),
        ({"ranks": {"1/mean.buffer.mean": NAN}}, False),
        ({"ranks": {"1/sum.totals": NAN, "0/random.python": np.ones(3)}}, True),
        ({"callbacks": {"0.best": NAN}}, True),
        ({"sync": {"gradient.w": NAN}}, False),  # `Delayed` applies it in the next step
        ({"sync": {"velocity.0.0": INF}}, False),
    ],
)
def test_what_must_be_finite(groups, finite):
    assert has_finite_numbers(groups, frozenset({"w", "empty"})) is finite
