"""A file of arrays is the one of safetensors, and is written array by array."""

from __future__ import annotations

import errno

import numpy as np
import pytest
from safetensors.numpy import save

from hvdtrain.checkpoint import Contents, Draft, read, scan, write
from hvdtrain.checkpoint.array_file import ArrayFile, kind_of
from hvdtrain.errors import CheckpointError
from hvdtrain.system import safe_arrays

TYPES = "bool uint8 int8 int16 uint16 float16 int32 uint32 float32 complex64 float64 int64 uint64 complex128"
ARRAYS = {
    **{f"a.{name}": np.arange(6).astype(name).reshape(2, 3) for name in TYPES.split()},
    "scalar": np.array(3.5, np.float32),
    "empty": np.zeros((0, 2)),
    "strided": np.arange(12.0).reshape(3, 4)[:, 1],
    'quoted "π"\n': np.ones(1),
}


@pytest.mark.parametrize("arrays", [ARRAYS, {}])
def test_a_file_has_the_bytes_of_safetensors_in_whatever_order_arrays_come(tmp_path, arrays):
    file = ArrayFile(tmp_path / "a", {name: kind_of(array) for name, array in arrays.items()})
    for name in reversed(arrays):
        file.put(name, arrays[name])
    entry = file.finish()
    assert (tmp_path / "a").read_bytes() == save(safe_arrays.encoded(arrays))
    assert entry.size == (tmp_path / "a").stat().st_size


def test_pieces_of_stored_arrays_are_read_alone(tmp_path):
    write(tmp_path / "one", Contents({"model": ARRAYS}, {}))
    stored = scan(tmp_path / "one").arrays["model"].stored
    assert stored.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        for first, last in ((0, array.size), (array.size // 3, array.size // 2), (array.size, array.size)):
            piece = stored[name].read_piece(first, last)
            assert piece.dtype == array.dtype
            assert piece.tobytes() == array.reshape(-1)[first:last].tobytes()
            assert piece.flags.writeable


def draft(folder):
    awaited = {"optimizer": {"0.exp_avg": kind_of(np.zeros(3))}, "sync": {"v": kind_of(np.zeros(2))}}
    return Draft(folder, Contents({"model": {"w": np.ones(2)}, "optimizer": {"0.step": np.array(1.0)}}, {}), awaited)


def test_arrays_that_are_put_are_part_of_the_checkpoint(tmp_path):
    begun, array = draft(tmp_path / "one"), np.arange(3.0)
    begun.put("optimizer", "0.exp_avg", array)
    array[:] = 0
    begun.put("sync", "v", np.ones(2))
    begun.finish()
    begun.close()
    arrays = read(tmp_path / "one").arrays
    assert arrays["optimizer"]["0.exp_avg"].tolist() == [0, 1, 2]
    assert arrays["optimizer"]["0.step"] == arrays["model"]["w"][0] == arrays["sync"]["v"][0] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_an_array_that_is_put_and_not_finite_counts(tmp_path):
    begun = draft(tmp_path / "one")
    begun.put("optimizer", "0.exp_avg", np.full(3, np.nan))
    begun.put("sync", "v", np.ones(2))
    begun.finish()
    begun.close()
    assert not read(tmp_path / "one").finite


def test_a_draft_without_an_array_that_it_awaits_is_no_checkpoint(tmp_path):
    begun = draft(tmp_path / "one")
    begun.put("sync", "v", np.ones(2))
    with pytest.raises(ValueError, match=r"optimizer.safetensors lacks arrays, such as 0.exp_avg"):
        begun.finish()
    begun.close()
    assert list(tmp_path.iterdir()) == []


def test_the_first_error_of_a_put_is_that_of_the_draft(tmp_path, monkeypatch):
    def full(self, name, array):
        raise OSError(errno.ENOSPC, f"No space left for {name}")

    monkeypatch.setattr(ArrayFile, "put", full)
    begun = draft(tmp_path / "one")
    begun.put("optimizer", "0.exp_avg", np.zeros(3))
    begun.put("sync", "v", np.zeros(2))
    with pytest.raises(CheckpointError, match=r"No space left for 0.exp_avg .*Older checkpoints are as they were"):
        begun.finish()
    begun.close()
    assert list(tmp_path.iterdir()) == []
