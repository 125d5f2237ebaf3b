"""The reference of N ranks: one process whose batch is all ranks' batches together. Not timed."""

from __future__ import annotations

from contextlib import suppress

from benchmarks import keras_tasks
from benchmarks.turns import Finished
from benchmarks.workloads import data_ranks

if __name__ == "__main__":
    keras_tasks.limit_threads()
    task = keras_tasks.Task()
    task.model.compile(optimizer=task.optimizer(), loss=task.loss)
    callbacks = [keras_tasks.ticks(task.turns(rank=0))]
    with suppress(Finished):
        task.fit(rank=0, size=1, callbacks=callbacks, batch_size=task.workload.batch_size * data_ranks())
