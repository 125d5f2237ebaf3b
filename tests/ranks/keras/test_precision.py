"""Mixed precision and compression: ranks skip together, sum exactly enough, and stay equal."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras.ops import convert_to_numpy as to_numpy

import hvdtrain.keras as hvd

pytestmark = pytest.mark.world_size(2, 3)


def _sgd(**options):
    return keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.01, **options)


@pytest.mark.parametrize(
    ("policy", "tolerance"),
    [pytest.param("mixed_float16", 2e-3, marks=pytest.mark.every_backend), ("mixed_bfloat16", 2e-2)],
)
def test_mixed_precision_equals_one_process(kit, policy, tolerance):
    keras.config.set_dtype_policy(policy)
    alone = kit.alone(kit.model(), _sgd())
    together = kit.together(kit.model(), hvd.DistributedOptimizer(_sgd()))
    kit.assert_close(together, alone, tolerance)
    kit.assert_same_everywhere(together)
    scaled = isinstance(together.optimizer, keras.optimizers.LossScaleOptimizer)
    assert scaled == (policy == "mixed_float16")


@pytest.mark.parametrize(
    ("outer", "steps"),
    [
        (False, None),
        pytest.param(False, 2, marks=pytest.mark.every_backend),
        pytest.param(True, None, marks=pytest.mark.every_backend),
        (True, 2),
    ],
)
def test_ranks_skip_an_overflow_together(kit, steps, outer):
    """One rank's batch overflows: all ranks skip that step and halve their scale, and none waits for another."""
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=steps)
    if outer:
        wrapped = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=256.0)
        optimizer = hvd.DistributedOptimizer(wrapped)
    else:
        optimizer = keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(optimizer), initial_scale=256.0)
    x, y = kit.data()
    local = 4
    model = kit.model()
    model.compile(optimizer=optimizer, loss="mse")
    for step in range(4):
        first = (step * hvd.size() + hvd.rank()) * local
        batch = x[first : first + local].copy()
        if step == 1 and hvd.rank() == hvd.size() - 1:
            batch[:] = np.inf
        model.train_on_batch(batch, y[first : first + local])
    assert np.isfinite(kit.flat(model)).all()
    assert float(to_numpy(model.optimizer.dynamic_scale)) == 128.0
    kit.assert_same_everywhere(model)


@pytest.mark.every_backend
def test_half_of_the_bytes_is_close_to_all_of_them(kit):
    alone = kit.alone(kit.model(), _sgd())
    for compression, tolerance in ((hvd.Compression.fp16, 1e-3), (hvd.Compression.bf16, 6e-3)):
        together = kit.together(kit.model(), hvd.DistributedOptimizer(_sgd(), compression=compression))
        kit.assert_close(together, alone, tolerance)
        assert np.abs(kit.flat(together) - kit.flat(alone)).max() > 0  # it was compressed
        kit.assert_same_everywhere(together)


@pytest.mark.every_backend
def test_bfloat16_sums_keep_what_bfloat16_addition_would_lose(kit):
    """1 + 2**-8 of each rank: in bfloat16 arithmetic the small parts vanish, in float32 their mean survives."""
    variable = keras.Variable(np.zeros(3, "float32"))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Sum, compression=hvd.Compression.bf16)
    gradient = np.array([1.0, 2.0**-8, -3.0], "float32") * (1 if hvd.rank() else 256)
    optimizer.apply([keras.ops.convert_to_tensor(gradient)], [variable])
    expected = np.array([1.0, 2.0**-8, -3.0]) * (256 + hvd.size() - 1)
    np.testing.assert_allclose(-to_numpy(variable), expected, rtol=2.0**-8)


def test_a_bfloat16_model_travels_as_float32(kit):
    keras.config.set_dtype_policy("bfloat16")
    together = kit.together(kit.model(), hvd.DistributedOptimizer(_sgd()))
    kit.assert_same_everywhere(together)
