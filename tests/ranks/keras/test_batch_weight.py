"""Uneven batches weigh what they hold."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import hvdtrain.keras as hvd

pytestmark = pytest.mark.world_size(2, 3)


def _optimizer(steps=None):
    return keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.01, gradient_accumulation_steps=steps)


def _train_uneven(kit, optimizer, counts):
    """Train one step a row of `counts`: this rank's number of samples of that step."""
    x, y = kit.data()
    model = kit.model()
    model.compile(optimizer=optimizer, loss="mse")
    part = hvd.distributed_part(model.optimizer)
    part.set_batch_weight(1.0)
    first = 0
    for row in counts:
        mine = slice(first + sum(row[: hvd.rank()]), first + sum(row[: hvd.rank() + 1]))
        part.set_batch_weight(row[hvd.rank()] * hvd.size() / sum(row))
        if row[hvd.rank()]:
            model.train_on_batch(x[mine], y[mine])
        else:  # a rank without samples still takes part, and whatever it computes does not count
            model.train_on_batch(np.full_like(x[:1], np.nan), y[:1])
        first += sum(row)
    return model


def _train_alone(kit, counts, steps=None):
    x, y = kit.data()
    model = kit.model()
    model.compile(optimizer=_optimizer(steps), loss="mse", **kit.untraced)
    first = 0
    for row in counts:
        model.train_on_batch(x[first : first + sum(row)], y[first : first + sum(row)])
        first += sum(row)
    return model


# Few different lengths: TensorFlow traces a step for each, and JAX compiles one.
COUNTS = {2: [[3, 1], [1, 3], [4, 0], [0, 4]], 3: [[4, 4, 4], [4, 1, 1], [1, 1, 0], [0, 0, 1]]}


@pytest.mark.three_ranks
@pytest.mark.parametrize("steps", [None, pytest.param(2, marks=pytest.mark.every_backend)])
def test_uneven_and_empty_batches_equal_one_process(kit, steps):
    counts = COUNTS[hvd.size()]
    together = _train_uneven(kit, hvd.DistributedOptimizer(_optimizer(steps)), counts)
    kit.assert_close(together, _train_alone(kit, counts, steps))
    kit.assert_same_everywhere(together)


def test_the_weight_is_neither_state_nor_saved(kit):
    plain = kit.alone(kit.model(), _optimizer())
    weighted = _train_uneven(kit, hvd.DistributedOptimizer(_optimizer()), COUNTS[hvd.size()])
    assert len(weighted.optimizer.variables) == len(plain.optimizer.variables)
    assert weighted.optimizer.get_config().keys() == plain.optimizer.get_config().keys()
    assert len(weighted.variables) == len(plain.variables)


@pytest.mark.every_backend
def test_a_weight_after_compiled_steps_is_refused(kit):
    model = kit.together(kit.model(), hvd.DistributedOptimizer(_optimizer()))
    if kit.backend == "torch":
        model.optimizer.set_batch_weight(0.5)
        assert model.optimizer._hvd_state.weight.value == 0.5
        return
    with pytest.raises(RuntimeError, match="before the first step"):
        model.optimizer.set_batch_weight(0.5)
