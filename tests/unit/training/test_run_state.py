"""What a checkpoint holds of a run is what was restored from it, until steps change that."""

from __future__ import annotations

import numpy as np

from hvdtrain.distributed.world import SoloWorld
from hvdtrain.training.progress import RunProgress
from hvdtrain.training.run_state import RunState


class NoState:
    """An adapter without state of its own."""

    rank_state: dict[str, np.ndarray] = {}
    settings: list[dict[str, float]] = []


def test_a_run_that_was_loaded_is_saved_with_its_metrics_cutoffs_and_shares():
    first = RunState(NoState(), {"accumulate": 1}, SoloWorld())
    first.progress = RunProgress(epoch=1, global_step=4)
    first.history.add({"loss": 0.5})
    first.history.cutoffs[3] = [8, 7]
    first.shares = [6, 2]
    saved = first.snapshot(seconds=0.0, callbacks=lambda: [{"best": 0.5}])
    second = RunState(NoState(), {"accumulate": 1}, SoloWorld())
    second.restore(saved)
    again = second.snapshot(seconds=0.0, callbacks=lambda: [None])
    assert again.meta == saved.meta
    assert again.meta["shares"] == [6, 2]
