"""An elastic drop-in script with a tape: TensorFlowKerasState around a loop, in the shape of Horovod's own example."""

from __future__ import annotations

import hashlib
import time
from typing import Any

import numpy as np
import tensorflow as tf
from elastic_job import changes_hosts, dies, say

import hvdtrain.tensorflow as hvd

BATCH, STEPS, COMMIT_EVERY = 4, 20, 3
FAULT_STEP = 8  # two after a commit

hvd.init()
tf.keras.utils.set_random_seed(5 + hvd.rank())  # ranks begin with other weights, and must end with equal ones
model = tf.keras.Sequential(
    [tf.keras.Input((4,)), tf.keras.layers.Dense(8, activation="tanh"), tf.keras.layers.Dense(1)]
)
optimizer = tf.optimizers.Adam(0.01)
x = np.random.default_rng(0).random((STEPS * BATCH, 4), np.float32)
data = tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True))).batch(BATCH)


@tf.function
def training_step(inputs: Any, targets: Any, allreduce: bool = True) -> Any:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(inputs, training=True) - targets) ** 2)
    if allreduce:
        # The wire format whose graph depends on the number of ranks most.
        tape = hvd.DistributedGradientTape(tape, compression=hvd.Compression.bf16)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)
    return loss


for inputs, targets in data.take(1):
    training_step(inputs, targets, allreduce=False)  # makes the optimizer's variables


def place() -> dict[str, Any]:
    found = hashlib.sha256(b"".join(v.numpy().tobytes() for v in [*model.variables, *optimizer.variables])).hexdigest()
    updates = int(optimizer.iterations.numpy()) - 1
    return {"rank": hvd.rank(), "size": hvd.size(), "step": state.batch, "updates": updates, "digest": found}


@hvd.elastic.run
def train(state: Any) -> None:
    say("begin", **place())
    for inputs, targets in data.skip(state.batch).take(STEPS - state.batch):
        if state.batch == FAULT_STEP:
            dies(rank=hvd.rank(), size=hvd.size())
        training_step(inputs, targets)
        state.batch += 1
        state.taken.append(state.batch)
        if state.batch == FAULT_STEP and changes_hosts():
            while True:  # until the commit ends this, since hosts have changed
                state.commit()
                time.sleep(0.05)
        if state.batch % COMMIT_EVERY == 0:
            state.commit()


state = hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0, taken=[])
train(state)
say("end", **place(), taken=state.taken)
