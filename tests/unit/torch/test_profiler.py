"""A trace of chosen steps, in a file of each rank's own."""

from __future__ import annotations

import json
import stat

import numpy as np
import pytest
import torch

import hvdtrain
from hvdtrain.callbacks import Profiler
from hvdtrain.distributed import world


@pytest.fixture(autouse=True)
def solo():
    world.use(world.SoloWorld())
    yield
    world.use(None)


def fit(*callbacks):
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = hvdtrain.Trainer(model, optimizer=optimizer, loss=torch.nn.CrossEntropyLoss())
    data = (np.ones((12, 4), np.float32), np.arange(12) % 3)
    trainer.fit(data, epochs=2, batch_size=4, callbacks=callbacks, progress=False, run_dir=None)


@pytest.mark.parametrize(("first", "steps", "recorded"), [(1, 3, 3), (4, 10, 2)])
def test_a_trace_has_the_steps_that_were_chosen(tmp_path, first, steps, recorded):
    fit(Profiler(tmp_path / "traces", first=first, steps=steps))
    (path,) = (tmp_path / "traces").iterdir()
    assert path.name == "rank-0.json"
    names = [event["name"] for event in json.loads(path.read_text())["traceEvents"]]
    assert names.count("aten::linear") == recorded
    marks = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("cat") == "user_annotation"]
    steps = {mark["name"] for mark in marks if mark["name"].startswith("step ")}
    assert steps == {f"step {number}" for number in range(first, first + recorded)}


def test_a_run_that_fails_within_the_window_closes_its_trace(tmp_path):
    class Failing(hvdtrain.callbacks.Callback):
        def on_step_begin(self, trainer, step):
            if step == 2:
                raise RuntimeError("in the third step")

    with pytest.raises(RuntimeError, match="in the third step"):
        fit(Profiler(tmp_path, first=1, steps=9), Failing())
    trace = json.loads((tmp_path / "rank-0.json").read_text())
    assert "step 1" in {event["name"] for event in trace["traceEvents"]}
    fit(Profiler(tmp_path, first=0, steps=1))  # torch has one profiler a process: it is free again


def test_a_run_that_ends_before_writes_nothing(tmp_path):
    fit(Profiler(tmp_path, first=6))
    assert not list(tmp_path.iterdir())


def test_a_trace_is_its_owners_alone(tmp_path):
    fit(Profiler(tmp_path / "traces", first=0, steps=1))
    assert stat.S_IMODE((tmp_path / "traces").stat().st_mode) & 0o077 == 0


@pytest.mark.parametrize("wrong", [{"first": -1}, {"steps": 0}])
def test_an_option_out_of_range_is_shown(tmp_path, wrong):
    with pytest.raises(ValueError, match="Received: first="):
        Profiler(tmp_path, **wrong)
