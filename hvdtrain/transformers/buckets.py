"""Save which gradients are sent together: on three ranks or more, buckets decide the last bit of sums."""

from __future__ import annotations

from typing import Any

import numpy as np
from transformers.trainer_callback import ExportableState, TrainerCallback

from hvdtrain.transformers.accelerator import unwrapped

_SIZE, _FLAGS = "ranks", "gradients"


class KeepBuckets(TrainerCallback, ExportableState):
    """Write the flags of `Reducer.packed` into trainer_state.json, and give them to a resumed run."""

    def __init__(self, trainer: Any = None) -> None:
        self._trainer = trainer

    def state(self) -> dict[str, Any]:
        """Return what trainer_state.json holds of the buckets."""
        reducer = getattr(unwrapped(self._trainer.optimizer), "_hvd_reducer", None)  # none before training
        flags = reducer and reducer.packed
        saved = None if flags is None else [int(flag) for flag in flags]
        return {"args": {}, "attributes": {_SIZE: self._trainer.world.size, _FLAGS: saved}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore the buckets of the checkpoint from which the run resumes."""
        # A checkpoint of one process has none; transformers expects a place for each callback with a state.
        held = state.stateful_callbacks.setdefault(type(self).__name__, {"args": {}, "attributes": {}})
        held = held.get("attributes", {})
        if state.global_step and held.get(_FLAGS) and held.get(_SIZE) == self._trainer.world.size:
            unwrapped(self._trainer.optimizer)._hvd_reducer.packed = np.array(held[_FLAGS], np.uint8)
