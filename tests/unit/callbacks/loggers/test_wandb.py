"""The file that `wandb sync` uploads, read as W&B wrote it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hvdtrain.callbacks import WandbLogger
from hvdtrain.callbacks.loggers import logger
from hvdtrain.callbacks.loggers.logger import Record, Run
from hvdtrain.callbacks.loggers.tools import _OfflineRun

pytestmark = pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="pip install 'hvdtrain[loggers]'")

_BLOCK, _HEADER = 32768, 7  # of LevelDB's log, in whose format the file is


@pytest.fixture(autouse=True)
def _time_for_wandb(monkeypatch):
    """Let W&B's own process take its time to start on a busy machine."""
    monkeypatch.setattr(logger, "CLOSE_LIMIT_S", 60.0)


def records(path):
    """Yield a file's records, as W&B's own messages. A record whose end is not written yet is left out."""
    from wandb.proto.wandb_internal_pb2 import Record

    yield from (Record.FromString(whole) for whole in whole_records(Path(path).read_bytes()))


def whole_records(data):
    at, whole = _HEADER, b""
    while at + _HEADER <= len(data):
        if _BLOCK - at % _BLOCK < _HEADER:
            at += _BLOCK - at % _BLOCK
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        part = data[at + _HEADER : at + _HEADER + length]
        if len(part) < length:
            return
        whole += part
        at += _HEADER + length
        if kind in (1, 4):  # whole, or the last part
            yield whole
            whole = b""


def test_a_record_that_is_not_written_whole_is_left_out():
    body = b"a record"
    header = bytes(4) + len(body).to_bytes(2, "little") + b"\x01"
    data = bytes(_HEADER) + (header + body) * 2
    counts = [len(list(whole_records(data[:end]))) for end in range(_HEADER, len(data) + 1)]
    assert counts == [0] * 15 + [1] * 15 + [2]


def whole(path, last="exit"):
    """Return a file's records once its last is there: W&B's own process writes it, and is given a moment."""
    until = time.monotonic() + 10  # less than the 15 s that W&B itself takes
    while not any(each.HasField(last) for each in records(path)) and time.monotonic() < until:
        time.sleep(0.02)
    return list(records(path))


def rows(path):
    """Return the metrics by step."""
    history = [each.history.item for each in whole(path) if each.HasField("history")]
    named = [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row} for row in history]
    return {row["_step"]: row for row in named}


def the_files(folder):
    return sorted(Path(folder, "wandb").glob("offline-run-*/run-*.wandb"))


def test_the_offline_file_has_metrics_and_configuration_and_no_secrets(fit, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", "--token", "hunter2"])
    history = fit(WandbLogger("mine", folder=tmp_path, name="first", every_s=0, options={"width": 3}))
    (file,) = the_files(tmp_path)
    (run,) = [each.run for each in whole(file) if each.HasField("run")]
    assert (run.project, run.display_name) == ("mine", "first")
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert (config["options.width"], config["environment.ranks"]) == (3, 1)
    logged = rows(file)
    assert sorted(logged) == [1, 2, 3, 4, 5, 6]
    for step, loss, val_loss in zip((3, 6), history["loss"], history["val_loss"], strict=True):
        assert (logged[step]["epoch/loss"], logged[step]["epoch/val_loss"]) == (loss, val_loss)
    assert {"interval/loss", "interval/learning_rate", "interval/rank_s_max/step"} <= logged[1].keys()
    (ended,) = [each.exit for each in whole(file) if each.HasField("exit")]
    assert ended.exit_code == 0
    kept = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"hunter2" not in kept
    done = subprocess.run(
        [Path(sys.executable).with_name("wandb"), "sync", "--dry-run"], cwd=tmp_path, capture_output=True, text=True
    )
    assert file.name in done.stdout + done.stderr


def test_a_run_that_goes_on_has_the_same_id(killed_and_gone_on, tmp_path):
    history = killed_and_gone_on(lambda: WandbLogger(folder=tmp_path, every_s=0))
    files = the_files(tmp_path)
    runs = [[each.run.run_id for each in whole(file) if each.HasField("run")] for file in files]
    assert runs[0] == runs[1]
    logged = [rows(file) for file in files]
    assert sorted(sorted(row) for row in logged) == [[1, 2, 3, 4, 5], [5, 6, 7, 8, 9]]
    last = max(logged, key=max)
    assert (last[6]["epoch/loss"], last[9]["epoch/loss"]) == tuple(history["loss"][1:])


def test_a_run_that_raises_is_one_that_crashed(fit_until, tmp_path):
    fit_until(2, WandbLogger(folder=tmp_path, every_s=0))
    (file,) = the_files(tmp_path)
    assert [each.exit.exit_code for each in whole(file) if each.HasField("exit")] == [1]
    assert sorted(rows(file)) == [1, 2]


def test_what_is_logged_is_soon_where_a_kill_leaves_it(tmp_path):
    sink = _OfflineRun("mine", tmp_path)
    sink.open(Run("id", "name", False, 0, {}, {}))
    for step in (1, 2):  # W&B has a row when the next begins
        sink.write(Record("interval", 1.0, 0, step, step, {"loss": 0.5}))
    (file,) = the_files(tmp_path)
    kept = [each for each in whole(file, last="history") if each.HasField("history")]
    sink.close(finished=True)
    assert len(kept) == 1
