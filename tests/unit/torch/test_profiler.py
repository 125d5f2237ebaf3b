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


def fit(profiler):
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = hvdtrain.Trainer(model, optimizer=optimizer, loss=torch.nn.CrossEntropyLoss())
    data = (np.ones((12, 4), np.float32), np.arange(12) % 3)
    trainer.fit(data, epochs=2, batch_size=4, callbacks=[profiler], progress=False, run_dir=None)


@pytest.mark.parametrize(("first", "steps", "recorded"), [(1, 3, 3), (4, 10, 2)])
def test_a_trace_has_the_steps_that_were_chosen(tmp_path, first, steps, recorded):
    fit(Profiler(tmp_path / "traces", first=first, steps=steps))
    (path,) = (tmp_path / "traces").iterdir()
    assert path.name == "rank-0.json"
    names = [event["name"] for event in json.loads(path.read_text())["traceEvents"]]
    assert names.count("aten::linear") == recorded


def test_a_run_that_ends_before_writes_nothing(tmp_path):
    fit(Profiler(tmp_path, first=6))
    assert not list(tmp_path.iterdir())


def test_a_trace_is_its_owners_alone(tmp_path):
    fit(Profiler(tmp_path / "traces", first=0, steps=1))
    assert stat.S_IMODE((tmp_path / "traces").stat().st_mode) & 0o077 == 0


def test_a_keras_model_is_refused_with_keras_own_way(tmp_path):
    class Model:
        __module__ = "keras.models"

    class Context:
        model = Model()

    with pytest.raises(TypeError, match="profile_batch"):
        Profiler(tmp_path).on_fit_begin(Context())


@pytest.mark.parametrize("wrong", [{"first": -1}, {"steps": 0}])
def test_an_option_out_of_range_is_shown(tmp_path, wrong):
    with pytest.raises(ValueError, match="Received: first="):
        Profiler(tmp_path, **wrong)
