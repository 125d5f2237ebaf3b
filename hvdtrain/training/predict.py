"""Gather the outputs of a model that each rank computes for its shard, in input order."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.adapter import Adapter
from hvdtrain.data.sources import IndexedSource, as_source, leaves, tree_map
from hvdtrain.distributed.world import SoloWorld, World


def predict(adapter: Adapter, world: World, x: Any, *, batch_size: int) -> Any:
    """See `Trainer.predict`."""
    samples = isinstance(x, list) and any(isinstance(item, tuple | dict) for item in x)  # as in `fit`
    if isinstance(x, tuple | list) and not samples and all(hasattr(leaf, "shape") for leaf in leaves(x)):
        x = (x,)  # several inputs, none of them targets
    source = as_source(x, batch_size=batch_size, world=world)
    if not isinstance(source, IndexedSource):
        raise TypeError(f"predict needs arrays or a map-style dataset. Received: {type(x).__name__}")
    indices, shards = [], []
    for batch in source.epoch(0, shuffle=False):
        if batch.local_count and batch.indices is not None:
            indices.append(batch.indices)
            shards.append(adapter.predict_step(batch.inputs))
    if not shards:  # this rank has no samples: any sample gives the shape of its outputs
        any_sample = next(as_source(x, batch_size=1, world=SoloWorld()).epoch(0, shuffle=False))
        indices = [np.zeros(0, np.int64)]
        shards = [tree_map(lambda y: y[:0], adapter.predict_step(any_sample.inputs))]
    order = world.allgather(np.concatenate(indices), name="predict.indices")

    def in_order(local: NDArray[Any]) -> NDArray[Any]:
        gathered = world.allgather(local, name="predict")
        result = np.empty_like(gathered)
        result[order] = gathered
        return result

    outputs = (in_order(np.concatenate(column)) for column in zip(*map(leaves, shards), strict=True))
    return tree_map(lambda _: next(outputs), shards[0])
