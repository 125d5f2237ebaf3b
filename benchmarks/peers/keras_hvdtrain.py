"""hvdtrain as a drop-in: a Horovod script for Keras with one import changed."""

from __future__ import annotations

from contextlib import suppress

import hvdtrain.keras as hvd
from benchmarks import keras_tasks
from benchmarks.turns import Finished

if __name__ == "__main__":
    hvd.init()
    task = keras_tasks.Task()
    task.model.compile(optimizer=hvd.DistributedOptimizer(task.optimizer()), loss=task.loss)
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), keras_tasks.ticks(task.turns(rank=hvd.rank()))]
    with suppress(Finished):
        task.fit(rank=hvd.rank(), size=hvd.size(), callbacks=callbacks)
