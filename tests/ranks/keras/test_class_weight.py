"""Class weights on ranks equal those of one process, in the Trainer and in Keras's own fit."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras_jit import JIT

import hvdtrain
import hvdtrain.keras as hvd
from hvdtrain.data import sharding
from hvdtrain.errors import DesyncError

WEIGHT = {0: 0.2, 2: 5.0}  # a class that is left out weighs 1
LOCAL, SAMPLES = 4, 26  # the last step has fewer samples: on 3 ranks without accumulation, one has none


def compiled(kit, optimizer=None, **options):
    model = kit.model()
    optimizer = optimizer or keras.optimizers.SGD(0.1, momentum=0.9)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, weighted_metrics=["accuracy"], jit_compile=JIT, **options)
    return model


def data(kit, samples):
    x, _ = kit.data(batches=2)
    return x[:samples], np.arange(samples)[:, None] % 3


@pytest.mark.three_ranks
@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_trainer_trains_as_one_process(kit, accumulate):
    x, y = data(kit, SAMPLES)
    ours, reference = compiled(kit), compiled(kit, **kit.untraced)
    trainer = hvdtrain.Trainer(ours, accumulate=accumulate)
    history = trainer.fit((x, y), batch_size=LOCAL, class_weight=WEIGHT, progress=False, run_dir=None)
    order, batch = sharding.epoch_order(SAMPLES, epoch=0), LOCAL * hvd.size() * accumulate
    reference.reset_metrics = lambda: None
    for begin in range(0, SAMPLES, batch):
        rows = order[begin : begin + batch]
        logs = reference.train_on_batch(x[rows], y[rows], class_weight=WEIGHT, return_dict=True)
    kit.assert_close(ours, reference)
    assert history["accuracy"] == pytest.approx([logs["accuracy"]], abs=1e-6)
    if accumulate == 1:  # else its batches see weights of before the step
        assert history["loss"] == pytest.approx([logs["loss"]], abs=1e-5)


@pytest.mark.world_size(2)
def test_ranks_with_different_class_weights_are_told_so(kit):
    with pytest.raises(DesyncError, match=r"class_weight is .*1\.0} on rank 0"):
        hvdtrain.Trainer(compiled(kit)).fit(data(kit, 8), class_weight={0: 1.0 + hvd.rank()}, progress=False)


@pytest.mark.three_ranks
@pytest.mark.world_size(2, 3)
def test_kerass_own_fit_trains_as_one_process_on_equal_shards(kit):
    x, y = data(kit, 48)
    reference = compiled(kit, **kit.untraced)
    ours = compiled(kit, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)))
    options = {"epochs": 2, "shuffle": False, "class_weight": WEIGHT, "verbose": 0}
    reference.fit(x, y, batch_size=24, **options)
    ours.fit(kit.shard(x), kit.shard(y), batch_size=24 // hvd.size(), **options)
    kit.assert_close(ours, reference)
