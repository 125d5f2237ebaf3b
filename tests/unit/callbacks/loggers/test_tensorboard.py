"""The events, read by TensorBoard's own reader."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

from hvdtrain.callbacks import TensorBoardLogger

pytest.importorskip("tensorboard")


@pytest.fixture
def read(monkeypatch):
    """Return what reads a folder as TensorBoard does; not with TensorFlow, which would take seconds to load."""
    monkeypatch.setitem(sys.modules, "tensorboard.compat.notf", types.ModuleType("tensorboard.compat.notf"))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def events(folder):
        return EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()

    return events


def scalars(events, tag):
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_tensorboard_reads_curves_configuration_and_environment(fit, read, tmp_path):
    history = fit(TensorBoardLogger(tmp_path, every_s=0, options={"a|b": "c|d"}))
    events = read(tmp_path)
    assert [step for step, _ in scalars(events, "interval/loss")] == [1, 2, 3, 4, 5, 6]
    for name in ("loss", "val_loss"):
        assert scalars(events, f"epoch/{name}") == [
            (step, pytest.approx(value)) for step, value in zip((3, 6), history[name], strict=True)
        ]
    assert {"interval/learning_rate", "interval/samples_per_s", "interval/rank_s_max/step"} <= set(
        events.Tags()["scalars"]
    )
    (config,) = events.Tensors("config")
    assert "| options.a\\|b | c\\|d |" in config.tensor_proto.string_val[0].decode()
    assert "| ranks | 1 |" in events.Tensors("environment")[0].tensor_proto.string_val[0].decode()
    assert events.SummaryMetadata("config").plugin_data.plugin_name == "text"


def test_a_run_that_goes_on_has_each_step_once(killed_and_gone_on, read, tmp_path):
    history = killed_and_gone_on(lambda: TensorBoardLogger(tmp_path / "run", every_s=0))
    assert len(list((tmp_path / "run").iterdir())) == 2
    events = read(tmp_path / "run")
    assert [step for step, _ in scalars(events, "interval/loss")] == list(range(1, 10))
    assert scalars(events, "epoch/loss") == [
        (step, pytest.approx(value)) for step, value in zip((3, 6, 9), history["loss"], strict=True)
    ]


def test_another_run_in_the_folder_is_not_mixed_with_the_first(fit, read, tmp_path):
    for _ in range(2):
        history = fit(TensorBoardLogger(tmp_path))
    assert [value for _, value in scalars(read(tmp_path), "epoch/loss")] == pytest.approx(history["loss"])


def test_no_framework_is_imported_for_it(tmp_path):
    code = f"""
import sys
from hvdtrain.callbacks.loggers.logger import Record, Run
from hvdtrain.callbacks.loggers.tools import _TENSORBOARD, _EventFile
from pathlib import Path
_TENSORBOARD.load()
sink = _EventFile(Path({str(tmp_path)!r}))
sink.open(Run("id", "name", False, 0, {{}}, {{}}))
sink.write(Record("epoch", 1.0, 0, None, 1, {{"loss": 1.0}}))
sink.close(finished=True)
print(*sys.modules)
"""
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "tensorboard" in modules
    assert not {"torch", "tensorflow", "keras", "jax"} & set(modules)
