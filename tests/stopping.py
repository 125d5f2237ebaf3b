"""A stop within `fit`, for tests of runs that resume."""

from __future__ import annotations

from hvdtrain.callbacks import Callback


class StoppedError(Exception):
    """Stands for a kill: nothing of this run happens after it."""


class StopAt(Callback):
    """Raises StoppedError before the step that follows `global_step` steps."""

    def __init__(self, global_step):
        self._global_step = global_step

    def on_step_begin(self, trainer, step):
        if trainer.global_step == self._global_step:
            raise StoppedError
