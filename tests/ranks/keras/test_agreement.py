"""Ranks that differ get an error with a name, on every rank."""

from __future__ import annotations

import keras
import pytest

import hvdtrain.keras as hvd
from hvdtrain.errors import DesyncError

pytestmark = pytest.mark.world_size(2, 3)


def test_another_shape_on_one_rank_is_named_on_all(kit):
    model = kit.model(units=7 if hvd.rank() else 9)
    with pytest.raises(DesyncError, match=r"hidden/kernel of shape \(5, 9\), float32"):
        kit.together(model, hvd.DistributedOptimizer("sgd"))


def test_a_missing_variable_is_named(kit):
    model = kit.model(use_bias=hvd.rank() == 0)
    with pytest.raises(DesyncError, match="hidden/bias"):
        kit.together(model, hvd.DistributedOptimizer("sgd"))


def test_a_broadcast_of_different_models_is_refused(kit):
    model = kit.model(units=7 if hvd.rank() else 9)
    with pytest.raises(DesyncError, match="hidden/kernel"):
        hvd.broadcast_variables(model.weights, root_rank=0)


def test_gradients_that_would_skip_the_reduction_are_refused(kit):
    class Hasty(keras.optimizers.SGD):
        def _backend_apply_gradients(self, grads, trainable_variables):
            self._backend_update_step(grads, trainable_variables, self.learning_rate)

    with pytest.raises(hvd_error(), match="not reduced over ranks"):
        kit.together(kit.model(), hvd.DistributedOptimizer(_bypassing(Hasty)))


def hvd_error():
    from hvdtrain.errors import HvdTrainError

    return HvdTrainError


def _bypassing(base):
    class Bypassing(base):
        def apply(self, grads, trainable_variables=None):
            if not self.built:
                self.build(trainable_variables)
            self._backend_update_step(list(grads), self._trainable_variables, self.learning_rate)

    return Bypassing(0.1)
