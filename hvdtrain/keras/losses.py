"""Which Keras losses can be weighed over ranks.

A rank's batch is weighed by its samples. That is right for losses that are means or sums over samples; others have
a divisor that differs from rank to rank and that Keras does not report.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import keras

from hvdtrain.distributed.world import World

log = logging.getLogger("hvdtrain")


def is_sum(model: keras.Model, *, split: bool) -> bool:
    """Return whether a compiled model's loss, or losses, are sums over samples (True) or means (False).

    The divisor matters where a step's samples are `split` over ranks or batches: then other losses are a ValueError.
    """
    leaves = [leaf for leaf in keras.tree.flatten(model.loss) if leaf is not None]
    sums = [getattr(leaf, "reduction", "mean") == "sum" for leaf in leaves]
    if not split:
        return bool(sums) and all(sums)
    for leaf in leaves:
        reduction, name = getattr(leaf, "reduction", "mean"), getattr(leaf, "name", leaf)
        if reduction != "sum" and getattr(leaf, "ignore_class", None) is not None:
            raise ValueError(
                "A loss with ignore_class divides by the number of targets that are left, which differs from rank to "
                f"rank. Received: ignore_class={leaf.ignore_class} in {name}. Leave it out and give those samples a "
                'sample_weight of 0, or use reduction="sum".'
            )
        if reduction not in ("sum_over_batch_size", "mean", "sum"):
            raise ValueError(
                f'A loss must have reduction="sum_over_batch_size" or "sum" when a step is split over ranks or '
                f"batches. Received: reduction={reduction!r} in {name}"
            )
    if any(sums) and not all(sums):
        raise ValueError(
            "Losses must be all means or all sums: no one weight of a batch is right for both. Use loss_weights to "
            f'balance them. Received: reduction="sum" in {sum(sums)} of {len(sums)} losses'
        )
    if any(sums) and any(getattr(v, "regularizer", None) is not None for v in model.trainable_variables):
        raise ValueError(
            'A loss with reduction="sum" adds up over ranks and batches, and a regularizer must not. Received: a model '
            'with regularizers. Use reduction="sum_over_batch_size", or the optimizer\'s weight_decay.'
        )
    return any(sums)


def warn_of_masks(model: keras.Model, *, world: World) -> None:
    """Make a compiled model log, once and on the root, that a mask reaches its loss.

    A masked loss divides by the number of time steps that are not masked, while batches are weighed by samples.
    """
    from keras.src.backend import get_keras_mask  # JAX's tensors do not carry their masks

    compiled = model._compile_loss
    if compiled is None or not world.is_root:
        return
    original = compiled.call

    @functools.wraps(original)
    def call(y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        if any(get_keras_mask(leaf) is not None for leaf in keras.tree.flatten(y_pred)):
            compiled.call = original
            log.warning(
                "A mask reaches the loss of %s, which divides by the time steps that are not masked. Batches are "
                "weighed by their samples, so results depend on which rank gets which sequences.",
                model.name,
            )
        return original(y_true, y_pred, sample_weight)

    compiled.call = call
