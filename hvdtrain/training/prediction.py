"""Run a model over all of some data, each rank a share, and put the outputs back in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.adapter import Adapter
from hvdtrain.data.sources import IndexedSource, as_source, leaves, rebuild, tree_map
from hvdtrain.distributed.world import SoloWorld, World


def predict(adapter: Adapter, x: Any, *, batch_size: int, world: World) -> Any:
    """See `Trainer.predict`."""
    samples = isinstance(x, list) and any(isinstance(item, tuple) for item in x)  # (inputs, targets), as `fit` has them
    if isinstance(x, tuple | list) and not samples and all(hasattr(leaf, "shape") for leaf in leaves(x)):
        x = (x,)  # several inputs, and no targets among them
    source = as_source(x, batch_size=batch_size, world=world)
    if not isinstance(source, IndexedSource):
        raise TypeError(f"predict needs arrays or a map-style dataset. Received: {type(x).__name__}")
    shards: list[Any] = []
    indices: list[NDArray[np.int64]] = []
    for batch in source.epoch(0, shuffle=False):
        if batch.local_count and batch.indices is not None:
            shards.append(adapter.predict_step(batch.inputs))
            indices.append(batch.indices)
    if not shards:  # fewer samples than ranks: one sample tells the shape of what this rank has none of
        first = next(iter(as_source(x, batch_size=1, world=SoloWorld()).epoch(0, shuffle=False)))
        shards = [tree_map(lambda y: y[:0], adapter.predict_step(first.inputs))]
        indices = [np.zeros(0, np.int64)]
    order = world.allgather(np.concatenate(indices), name="predict.indices")

    def in_order(local: NDArray[Any]) -> NDArray[Any]:
        gathered = world.allgather(local, name="predict")
        result = np.empty_like(gathered)
        result[order] = gathered
        return result

    return _join(shards, in_order)


def _join(shards: Sequence[Any], finish: Callable[[NDArray[Any]], NDArray[Any]]) -> Any:
    """Concatenate trees of arrays leaf by leaf, and finish each leaf."""
    if isinstance(shards[0], dict):
        return {key: _join([shard[key] for shard in shards], finish) for key in shards[0]}
    if isinstance(shards[0], tuple | list):
        return rebuild(shards[0], [_join(column, finish) for column in zip(*shards, strict=True)])
    return finish(np.concatenate(shards))
