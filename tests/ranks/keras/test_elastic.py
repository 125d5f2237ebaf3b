"""An elastic state restores, commits and synchronizes a Keras 3 model with its optimizer."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import hvdtrain.keras as hvd

pytestmark = pytest.mark.world_size(2)


def test_state_goes_back_to_the_last_commit(kit):
    model = kit.together(kit.model(), hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), epochs=1)
    state = hvd.elastic.KerasState(model, epoch=3, batch=0)
    committed = kit.digest([*model.weights, *model.optimizer.variables])
    kit.together(model, model.optimizer, epochs=1)
    state.epoch = 4
    assert kit.digest([*model.weights, *model.optimizer.variables]) != committed
    state.restore()
    assert kit.digest([*model.weights, *model.optimizer.variables]) == committed
    assert state.epoch == 3


def test_run_gives_new_ranks_the_roots_state_and_trains_on(kit):
    model = kit.model(seed=1 + 10 * hvd.rank())
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), loss="mse")
    state = hvd.elastic.KerasState(model, epoch=5 * (1 - hvd.rank()), batch=0)
    callbacks = [
        hvd.elastic.UpdateEpochStateCallback(state),
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.CommitStateCallback(state, batches_per_commit=2),
    ]
    x, y = kit.data()

    @hvd.elastic.run
    def train(state):
        assert state.epoch == 5
        state.model.fit(
            kit.shard(x), kit.shard(y), batch_size=12, epochs=2, shuffle=False, verbose=0, callbacks=callbacks
        )
        return state.epoch

    assert train(state) == 7
    alone = kit.alone(kit.model(seed=1), keras.optimizers.SGD(0.1, momentum=0.9), epochs=2)
    kit.assert_close(model, alone)
    kit.assert_same_everywhere(model)
    assert np.isfinite(kit.flat(model)).all()


@pytest.mark.every_backend
def test_training_resumes_after_a_reset(kit):
    """The state is synchronized, steps are compiled again, and training resumes."""
    model = kit.together(kit.model(), hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), epochs=1)
    state = hvd.elastic.KerasState(model, epoch=0)
    state.sync()
    x, y = kit.data()
    model.fit(kit.shard(x), kit.shard(y), batch_size=12, epochs=2, shuffle=False, verbose=0)
    alone = kit.alone(kit.model(), keras.optimizers.SGD(0.1, momentum=0.9), epochs=3)
    kit.assert_close(model, alone)
