"""The time steps that a mask leaves to a Keras model's loss, which divides by their number.

A layer such as Embedding(mask_zero=True) gives its outputs a mask. Where it reaches the loss, a batch's mean is over
the time steps that are not masked, so batches are weighed by these and not by their samples.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from hvdtrain.distributed.data_ranks import DataRanks
from hvdtrain.distributed.world import World
from hvdtrain.keras.losses import are_sums, has_losses_of_layers
from hvdtrain.keras.overrides import overrides

log = logging.getLogger("hvdtrain")


class MaskedSteps:
    """Counts the time steps that are not masked, batch by batch.

    Args:
        model: a compiled model.
        world: the ranks.

    Attributes:
        is_masked: True if a mask reaches the loss.
    """

    def __init__(self, model: keras.Model, world: World) -> None:
        self._model, self._world = model, world
        self.is_masked = False
        self._counter: Callable[[Any], Any] | None = None

    def find(self, x: Any) -> None:
        """Find out from a batch's inputs whether a mask reaches the loss; a collective.

        Raises:
            ValueError: one does, and not every loss of the model divides by its time steps; on every rank.
        """
        masks, added = [], False
        try:
            masks = _masks(self._model(x, training=False))
            added = has_losses_of_layers(self._model)
        except Exception as error:  # noqa: BLE001 - a step of the user's own may call the model in another way
            log.debug("masks of %s were not looked for: %s", self._model.name, error)
        self._model._clear_losses()
        found = self._world.allreduce(np.array([bool(masks), added], np.int32), "max", name="mask")
        self.is_masked = (
            bool(found[0]) and self._model._compile_loss is not None and not are_sums(self._model, split=False)
        )
        if not self.is_masked:
            return
        if overrides(self._model, "train_step", "compute_loss"):
            self.is_masked = False
            if self._world.is_root:
                log.warning(
                    "A mask reaches the outputs of %s, whose step is your own. Batches are weighed by their samples: "
                    "let the loss divide by samples, and not by the time steps that are not masked.",
                    self._model.name,
                )
            return
        losses = len(self._model._compile_loss._flat_losses)
        if losses != 1 or found[1]:
            raise ValueError(
                "A loss with a mask divides by the time steps that are not masked, and other losses by samples: ranks "
                f"cannot weigh both. Received: {losses} losses of outputs{' and an add_loss' * bool(found[1])} in "
                f"{self._model.name}, with a mask. Use no mask (mask_zero=False), and give time steps that do not "
                "count a sample_weight of 0."
            )

    def weigh(self, inputs: Sequence[Any], samples: Sequence[int]) -> tuple[list[float], float]:
        """Return each batch's time steps that count, and their sum over all ranks and batches; a collective.

        Args:
            inputs: of this rank's batches.
            samples: of each batch; a batch of none is a filler.
        """
        counts = [self._count(x) if number else 0.0 for x, number in zip(inputs, samples, strict=True)]
        return counts, float(DataRanks(self._world).allreduce(np.array([sum(counts)]), name="mask.steps")[0])

    def _count(self, x: Any) -> float:
        if self._counter is None:
            self._counter = _compiled(lambda inputs: keras.ops.sum(_masks(self._model(inputs, training=False))[0]))
        return float(keras.ops.convert_to_numpy(self._counter(x)))


def _masks(outputs: Any) -> list[Any]:
    """Return the masks of outputs, as numbers."""
    from keras.src.backend import get_keras_mask  # public Keras has no way to read it

    masks = [get_keras_mask(leaf) for leaf in keras.tree.flatten(outputs)]
    return [keras.ops.cast(mask, "float32") for mask in masks if mask is not None]


def _compiled(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return `function` compiled where a compiler leaves out all but the mask."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        function = tf.function(function, reduce_retracing=True)
    elif keras.backend.backend() == "jax":
        import jax

        function = jax.jit(function)
    else:
        import torch

        function = torch.no_grad()(function)
    return function
