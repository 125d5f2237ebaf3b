"""A checkpoint is whole or it is an error; what was there before is never lost."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hvdtrain.checkpoint import legacy as checkpoint
from hvdtrain.errors import CheckpointError

ARRAYS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "scalar": np.array(3), "empty": np.zeros((0, 2))}


def test_what_was_saved_is_loaded_bit_for_bit(tmp_path):
    checkpoint.save(tmp_path / "one", ARRAYS, {"epoch": 3})
    arrays, meta = checkpoint.load(tmp_path / "one")
    assert meta == {"epoch": 3}
    for name, array in ARRAYS.items():
        assert arrays[name].dtype == array.dtype
        assert arrays[name].shape == array.shape
        assert (arrays[name] == array).all()


def test_saving_again_replaces_and_leaves_nothing_else(tmp_path):
    for epoch in (1, 2):
        checkpoint.save(tmp_path / "one", ARRAYS, {"epoch": epoch})
    assert checkpoint.load(tmp_path / "one")[1] == {"epoch": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


@pytest.mark.parametrize("name", ["arrays.safetensors", "meta.json", "manifest.json"])
def test_every_flipped_bit_is_found(tmp_path, name):
    checkpoint.save(tmp_path / "one", ARRAYS, {"epoch": 3})
    path = tmp_path / "one" / name
    whole = path.read_bytes()
    for position in range(0, len(whole), 7):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :])
        with pytest.raises(CheckpointError):
            checkpoint.load(tmp_path / "one")
    path.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError):
        checkpoint.load(tmp_path / "one")


def test_a_missing_one_is_an_error_that_names_it(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere"):
        checkpoint.load(tmp_path / "nowhere")


def test_a_newer_format_is_an_error_that_says_to_update(tmp_path):
    checkpoint.save(tmp_path / "one", ARRAYS, {})
    manifest = tmp_path / "one" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 99}))
    with pytest.raises(CheckpointError, match=r"99.*update"):
        checkpoint.load(tmp_path / "one")


def test_a_failed_save_keeps_the_old_one(tmp_path, monkeypatch):
    checkpoint.save(tmp_path / "one", ARRAYS, {"epoch": 1})

    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "_write", full)
    with pytest.raises(CheckpointError, match="No space left"):
        checkpoint.save(tmp_path / "one", ARRAYS, {"epoch": 2})
    assert checkpoint.load(tmp_path / "one")[1] == {"epoch": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_the_newest_epoch_comes_first(tmp_path):
    for epoch in (2, 10, 1):
        checkpoint.save(checkpoint.epoch_directory(tmp_path, epoch), ARRAYS, {})
    (tmp_path / "notes").mkdir()
    assert [path.name for path in checkpoint.newest_first(tmp_path)] == ["epoch-000010", "epoch-000002", "epoch-000001"]
    assert list(checkpoint.newest_first(tmp_path / "none")) == []
