"""Traces of chosen steps: each rank's own, by the framework's profiler, and Horovod's timeline of all ranks."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hvdtrain.callbacks import Profiler

BATCH = 4


@pytest.mark.every_backend
@pytest.mark.world_size(2)
def test_each_rank_writes_a_trace_of_the_chosen_steps_and_rank_0_the_timeline(kit, world, shared_tmp_path):
    x, y = np.ones((5 * BATCH * world.size, 6), np.float32), np.arange(5 * BATCH * world.size) % 3
    profiler = Profiler(shared_tmp_path, first=1, steps=2)
    kit.trainer(kit.model()).fit((x, y), epochs=1, batch_size=BATCH, callbacks=[profiler], progress=False)
    world.barrier()
    for rank in range(world.size):
        files = [path for path in shared_tmp_path.rglob("*") if f"rank-{rank}" in str(path)]
        (trace,) = [path.read_bytes() for path in files if path.suffix in (".json", ".pb")]
        assert [step for step in range(5) if b"step %d" % step in trace] == [1, 2]
    events = json.loads((shared_tmp_path / "timeline.json").read_text())
    tensors = {event["pid"]: event["args"].get("name", "") for event in events if event.get("name") == "process_name"}
    reduced = [tensors[event["pid"]] for event in events if event.get("name") == "ALLREDUCE" and event["ph"] == "B"]
    gradients = [name for name in reduced if "hvdtrain." not in name]
    assert {gradients.count(name) for name in gradients} == {2}, reduced
