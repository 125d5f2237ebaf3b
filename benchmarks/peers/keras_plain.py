"""One process, plain Keras."""

from __future__ import annotations

from contextlib import suppress

from benchmarks import keras_tasks
from benchmarks.turns import Finished

if __name__ == "__main__":
    keras_tasks.limit_threads()
    task = keras_tasks.Task()
    task.model.compile(optimizer=task.optimizer(), loss=task.loss)
    turns = task.turns(rank=0)
    with suppress(Finished):
        task.fit(rank=0, size=1, callbacks=[keras_tasks.ticks(turns)])
