"""`hvdtrain.read_parquet` on files that pyarrow and Spark's way of writing make."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import hvdtrain
from hvdtrain.data import parquet
from hvdtrain.errors import HvdTrainError

pa = pytest.importorskip("pyarrow", reason="needs pyarrow: pip install 'hvdtrain[parquet]'")
pq = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow: pip install 'hvdtrain[parquet]'")


def write(folder: Path, tables: dict[str, dict[str, Any]], **options: Any) -> Path:
    folder.mkdir(exist_ok=True)
    for name, columns in tables.items():
        pq.write_table(pa.table(columns), folder / name, **options)
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def test_rows_come_in_the_order_of_file_names_with_their_types_and_shapes(tmp_path: Path, cache: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.random((1000, 3), np.float32), rng.integers(0, 9, 1000).astype(np.int16)
    flag, wide = rng.random(1000) > 0.5, rng.random(1000)
    parts = {}
    for i in (1, 0):  # written last to first
        rows = slice(500 * i, 500 * (i + 1))
        parts[f"b{i}.parquet"] = {
            "x": pa.FixedSizeListArray.from_arrays(x[rows].ravel(), 3) if i else pa.array(list(x[rows])),
            "y": y[rows], "flag": flag[rows], "wide": wide[rows], "a": x[rows, 0], "b": x[rows, 1],
        }  # fmt: skip
        parts[f"b{i}.parquet"]["x"] = parts[f"b{i}.parquet"]["x"].cast(pa.list_(pa.float32()))
    folder = write(tmp_path / "data", parts, row_group_size=77)
    (folder / "_SUCCESS").touch()
    (folder / ".b0.parquet.crc").write_text("not Parquet")
    names = ["x", "y", "flag", "wide"]
    for name, got in hvdtrain.read_parquet(folder, names, cache_dir=cache).items():
        wanted = {"x": x, "y": y, "flag": flag, "wide": wide}[name]
        assert got.dtype == wanted.dtype
        np.testing.assert_array_equal(got, wanted)
    side = hvdtrain.read_parquet(folder, {"both": ["b", "x", "a"], "label": "y"}, cache_dir=cache)
    np.testing.assert_array_equal(side["both"], np.column_stack([x[:, 1], x, x[:, 0]]))
    np.testing.assert_array_equal(side["label"], y)
    assert list(hvdtrain.read_parquet(folder / "b0.parquet", cache_dir=cache)) == [*names, "a", "b"]


BAD = {
    "null": ({"a": [1.0, None]}, "column 'a' is null in row 1 of"),
    "null in a list": ({"a": [[1.0, None]]}, "holds a null"),
    "ragged": ({"a": [[1.0], [1.0, 2.0]]}, "Received: 1 numbers in row 0 of .*, 2 in row 1"),
    "string": ({"a": ["one"]}, "is of string: a model takes numbers. Encode it"),
    "struct": ({"a": [{"size": 1}]}, "ML vectors are written as lists by hvdtrain.integrations.spark.write_parquet"),
    "nested": ({"a": [[[1.0]]]}, "an array takes numbers, or lists of numbers"),
    "decimal": ({"a": pa.array([1], pa.decimal128(5))}, "is of decimal128"),
    "empty": ({"a": pa.array([], pa.float32())}, "holds no samples"),
    "missing": ({"b": [1.0]}, "has no column 'a'. It has: b"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_what_no_array_can_hold_is_refused_by_name(kind: str, tmp_path: Path, cache: Path) -> None:
    columns, message = BAD[kind]
    folder = write(tmp_path / "data", {"a.parquet": columns})
    with pytest.raises(ValueError, match=message):
        hvdtrain.read_parquet(folder, ["a"], cache_dir=cache)
    assert [entry.name for entry in cache.rglob("*") if not entry.name.endswith(".lock")] in (
        [], [f"hvdtrain-parquet-{os.getuid()}"],
    )  # fmt: skip


def test_files_of_other_lengths_or_types_than_the_first_are_refused(tmp_path: Path, cache: Path) -> None:
    folder = write(tmp_path / "data", {"a.parquet": {"x": [[1.0, 2.0]]}, "b.parquet": {"x": [[1.0]]}})
    with pytest.raises(ValueError, match="have 1 numbers, and 2 before"):
        hvdtrain.read_parquet(folder, cache_dir=cache)
    write(folder, {"b.parquet": {"x": [[1]]}})
    with pytest.raises(ValueError, match=r"b.parquet has another schema than .*a.parquet: see x"):
        hvdtrain.read_parquet(folder, cache_dir=cache)
    with pytest.raises(ValueError, match=r"takes columns of one type\. Received: a int64, b float64"):
        hvdtrain.read_parquet(write(tmp_path / "two", {"a.parquet": {"a": [1], "b": [1.5]}}), {"x": ["a", "b"]})
    found = hvdtrain.read_parquet(tmp_path / "two", {"x": ["a", "b"]}, dtypes={"x": "float32"}, cache_dir=cache)
    assert (found["x"].dtype, found["x"].tolist()) == (np.float32, [[1.0, 1.5]])
    with pytest.raises(ValueError, match="dtypes names 'z', which is none of the arrays: a, b"):
        hvdtrain.read_parquet(tmp_path / "two", dtypes={"z": "float32"}, cache_dir=cache)


def test_a_folder_that_is_half_written_partitioned_empty_or_not_there_is_refused(tmp_path: Path) -> None:
    part = "part-00000-7d3f5a52-0000-4000-8000-000000000000-c000.snappy.parquet"
    folder = write(tmp_path / "spark", {part: {"a": [1.0]}})
    with pytest.raises(ValueError, match="half written: Spark's _SUCCESS is missing"):
        hvdtrain.read_parquet(folder)
    (folder / "_SUCCESS").touch()
    (folder / "_temporary").mkdir()
    with pytest.raises(ValueError, match="half written"):
        hvdtrain.read_parquet(folder)
    (tmp_path / "hive" / "day=1").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"is partitioned \(day=1\)"):
        hvdtrain.read_parquet(tmp_path / "hive")
    (tmp_path / "none").mkdir()
    with pytest.raises(FileNotFoundError, match=r"holds no \*.parquet file"):
        hvdtrain.read_parquet(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="in a file system that all hosts share"):
        hvdtrain.read_parquet(tmp_path / "nowhere")
    (tmp_path / "text.parquet").write_text("not Parquet at all")
    with pytest.raises(ValueError, match="is no Parquet file"):
        hvdtrain.read_parquet(tmp_path / "text.parquet")


def test_a_host_unpacks_a_table_once_and_anew_when_it_changes(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "data", {"a.parquet": {"x": [1.0, 2.0]}})
    unpack, unpacked = parquet._unpack, []

    def slowly(*arguments: Any) -> None:
        unpacked.append(arguments)
        time.sleep(0.3)
        unpack(*arguments)

    monkeypatch.setattr(parquet, "_unpack", slowly)
    found: list[Any] = []
    ranks = [
        threading.Thread(target=lambda: found.append(hvdtrain.read_parquet(folder, cache_dir=cache))) for _ in range(2)
    ]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    assert [each["x"].tolist() for each in found] == [[1.0, 2.0]] * 2
    assert len(unpacked) == 1
    found[0]["x"][0] = 5.0  # of this reader alone
    assert hvdtrain.read_parquet(folder, cache_dir=cache)["x"].tolist() == [1.0, 2.0]
    write(folder, {"a.parquet": {"x": [3.0, 4.0]}})
    assert hvdtrain.read_parquet(folder, cache_dir=cache)["x"].tolist() == [3.0, 4.0]
    assert len(unpacked) == 2


def test_only_what_was_unpacked_and_not_read_for_a_week_is_removed(tmp_path: Path, cache: Path) -> None:
    cache.mkdir()
    mine = cache / "mine.txt"
    mine.touch()
    folder = write(tmp_path / "data", {"a.parquet": {"x": [1.0]}})
    hvdtrain.read_parquet(folder, cache_dir=cache)
    (old,) = [entry for entry in cache.glob("hvdtrain-parquet-*/*") if entry.is_dir()]
    for entry in (mine, old):
        os.utime(entry, (0, 0))
    write(folder, {"a.parquet": {"x": [2.0, 1.0]}})
    hvdtrain.read_parquet(folder, cache_dir=cache)
    assert mine.exists()
    assert not old.exists()


def test_a_full_disk_is_an_error_that_says_what_to_do(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "data", {"a.parquet": {"x": [1.0]}})

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(parquet, "_side_by_side", full)
    with pytest.raises(HvdTrainError, match=r"No space left on device\. Choose another disk of this host by cache_dir"):
        hvdtrain.read_parquet(folder, cache_dir=cache)


def test_training_from_parquet_gives_the_weights_of_training_from_arrays(tmp_path: Path, cache: Path) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    x, y = rng.random((333, 4), np.float32), rng.integers(0, 3, 333)
    folder = write(tmp_path / "data", {"a.parquet": {"x": list(x), "y": y}}, row_group_size=50)
    columns = hvdtrain.read_parquet(folder, cache_dir=cache)

    def train(data: Any) -> dict[str, Any]:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        trainer = hvdtrain.Trainer(model, optimizer=optimizer, loss=torch.nn.CrossEntropyLoss(), metrics=["accuracy"])
        trainer.fit(data, epochs=2, batch_size=16, run_dir=None, progress=False)
        return {name: value.numpy() for name, value in model.state_dict().items()}

    wanted = train((x, y))
    for name, value in train((columns["x"], columns["y"])).items():
        np.testing.assert_array_equal(value, wanted[name])


def test_the_pages_script_runs_on_two_ranks(
    tmp_path: Path, load_script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = load_script("readme/run_blocks.py")
    page = (blocks.ROOT / "docs/pages/data.md").read_text(encoding="utf-8")
    (block,) = [each for each in blocks.read(page) if each.file_name == "from_parquet.py"]
    command = ["horovodrun", "--gloo", "-np", "2", sys.executable, blocks.save_block(block, tmp_path).name]
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "epoch 2/2" in done.stdout
