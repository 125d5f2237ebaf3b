"""An elastic drop-in script on Keras: KerasState and its callbacks around `fit`; with a third argument, in shards."""

from __future__ import annotations

import hashlib
import sys
import time
from typing import Any

import keras
import numpy as np
from elastic_job import changes_hosts, dies, say

import hvdtrain.keras as hvd
from hvdtrain.keras.shards import Slot

BATCH, STEPS, EPOCHS, COMMIT_EVERY = 4, 10, 2, 3
FAULT_STEP = 8  # two after a commit

hvd.init()
keras.utils.set_random_seed(5 + hvd.rank())  # ranks begin with other weights, and must end with equal ones
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])
in_shards = len(sys.argv) > 3
model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), shard_state=in_shards), loss="mse")
state = hvd.elastic.KerasState(model, epoch=0, batch=0, steps=0, taken=[])
x = np.random.default_rng(0).random((STEPS * BATCH, 4), np.float32)
y = x.sum(1, keepdims=True)


def place() -> dict[str, Any]:
    """Return where this rank is, and a hash of weights and of the optimizer's whole state; a collective."""
    found = hashlib.sha256()
    model.optimizer.consolidate_state_dict(to=None)
    for variable in [*model.weights, *model.optimizer.variables]:
        whole = variable.numpy() if isinstance(variable, Slot) else keras.ops.convert_to_numpy(variable)
        found.update(np.asarray(whole).tobytes())
    iterations = int(keras.ops.convert_to_numpy(model.optimizer.iterations))
    return {
        "rank": hvd.rank(), "size": hvd.size(), "step": state.steps, "updates": iterations, "digest": found.hexdigest(),
    }  # fmt: skip


class Script(keras.callbacks.Callback):
    """Counts steps, and brings the scenario about."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if state.steps == FAULT_STEP:
            dies(rank=hvd.rank(), size=hvd.size())

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        state.steps += 1
        state.taken.append(state.steps)
        if state.steps == FAULT_STEP and hvd.broadcast_object(hvd.rank() == 0 and changes_hosts(), root_rank=0):
            while True:  # until the commit ends this, since hosts have changed
                state.commit()
                time.sleep(0.05)


@hvd.elastic.run
def train(state: Any) -> None:
    say("begin", **place())
    callbacks = [
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.UpdateEpochStateCallback(state),
        Script(),
        hvd.elastic.CommitStateCallback(state, COMMIT_EVERY),
    ]
    while state.epoch < EPOCHS:
        done = state.batch * BATCH
        model.fit(x[done:], y[done:], batch_size=BATCH, shuffle=False, verbose=0, callbacks=callbacks)


train(state)
say("end", **place(), taken=state.taken, weights=[w.ravel().tolist() for w in model.get_weights()])
