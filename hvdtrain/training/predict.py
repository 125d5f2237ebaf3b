"""Gather the outputs of a model that each rank computes for its shard, in input order."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.adapter import Adapter
from hvdtrain.data.reading import as_source
from hvdtrain.data.sources import OrderedSource, Source, reading
from hvdtrain.data.trees import leaves, tree_map
from hvdtrain.distributed import agreement
from hvdtrain.distributed.data_ranks import DataRanks
from hvdtrain.distributed.world import SoloWorld, World


def predict(adapter: Adapter, world: World, x: Any, *, batch_size: int) -> Any:
    """See `Trainer.predict`."""
    samples = isinstance(x, list) and any(isinstance(item, tuple | dict) for item in x)  # as in `fit`
    if isinstance(x, tuple | list) and not samples and all(hasattr(leaf, "shape") for leaf in leaves(x)):
        x = (x,)  # several inputs, none of them targets
    source = as_source(x, batch_size=batch_size, world=world, prefetch=adapter.prefetch)
    with agreement.everywhere(world=world, name="predict.shard"):
        indices, shards = _predict_shard(adapter, _ordered(source, x), world)
        if not shards:  # this rank has no samples: any sample gives the shape of its outputs
            any_sample = _ordered(as_source(x, batch_size=1, world=SoloWorld()), x)
            indices, shards = _predict_shard(adapter, any_sample, world, steps=1)
            indices, shards = [indices[0][:0]], [tree_map(lambda y: y[:0], shards[0])]
        columns = [_concatenate(column, world) for column in zip(*map(leaves, shards), strict=True)]
    rows = [f"{each.shape[1:]} {each.dtype}" for each in columns]
    agreement.require_equal({"one row of each output": rows}, world=world, what="predict's outputs", advice=_EQUAL_ROWS)
    ranks = DataRanks(world)
    order = ranks.allgather(np.concatenate(indices), name="predict.indices")

    def in_order(local: NDArray[Any]) -> NDArray[Any]:
        gathered = ranks.allgather(local, name="predict")
        result = np.empty_like(gathered)
        result[order] = gathered
        return result

    outputs = map(in_order, columns)
    return tree_map(lambda _: next(outputs), shards[0])


_EQUAL_ROWS = "Let the model return rows of one shape and type for all samples: pad all samples to one length."


def _ordered(source: Source, x: Any) -> OrderedSource:
    if not isinstance(source, OrderedSource):
        raise TypeError(
            "predict needs samples in an order: arrays, a map-style dataset, or a DataLoader over one, with a "
            f"batch_size. Received: {type(x).__name__}, which can only be iterated. Call the model in a loop of your "
            "own."
        )
    return source


def _predict_shard(
    adapter: Adapter, source: OrderedSource, world: World, *, steps: int | None = None
) -> tuple[list[NDArray[np.int64]], list[Any]]:
    """Return the indices and the outputs of this rank's batches, whose outputs have one row a sample."""
    indices, shards, first = [], [], None
    # Ranks that gather weights together call the model equally often.
    is_together = world.grid is not None and world.grid.shards > 1
    with reading(source.in_order()) as batches:
        for batch in batches:
            if not batch.local_count or batch.indices is None:
                if is_together and first is not None:
                    adapter.predict_step(tree_map(lambda leaf: leaf[:1], first.inputs))
                continue
            outputs = adapter.predict_step(batch.inputs)
            if any(np.shape(leaf)[:1] != (batch.local_count,) for leaf in leaves(outputs)):
                raise _no_rows(outputs, batch.local_count, world)
            first = batch if first is None else first
            indices.append(batch.indices)
            shards.append(outputs)
            if len(shards) == steps:
                break
    if first is not None and not is_together and len({len(each) for each in indices}) == 1:
        _check_row(adapter, first.inputs, shards[0], first.local_count, world)
    return indices, shards


def _check_row(adapter: Adapter, inputs: Any, outputs: Any, count: int, world: World) -> None:
    """Raise ValueError if the first axis has the samples' number by chance, such as the layers of a GRU's last state.

    Called where all batches have `count` samples. If another axis has this size too, the model predicts one sample.
    """
    if count == 1 or all(count not in np.shape(leaf)[1:] for leaf in leaves(outputs)):
        return
    try:
        alone = adapter.predict_step(tree_map(lambda leaf: leaf[:1], inputs))
    except Exception:  # noqa: BLE001 - a model of one batch size: nothing tells the axes apart
        return
    if [np.shape(leaf) for leaf in leaves(alone)] != [(1, *np.shape(leaf)[1:]) for leaf in leaves(outputs)]:
        raise _no_rows(alone, 1, world)


def _no_rows(outputs: Any, count: int, world: World) -> ValueError:
    shapes = ", ".join(str(np.shape(leaf)) for leaf in leaves(outputs))
    return ValueError(
        "predict returns one row a sample: the first axis of each output must be the samples. Received: outputs of "
        f"shapes {shapes} for {count} {'sample' if count == 1 else 'samples'} on rank {world.rank}. Let the model "
        "return such an output with the samples first (tensor.transpose(0, 1) for a GRU's last state), or without it."
    )


def _concatenate(column: tuple[Any, ...], world: World) -> NDArray[Any]:
    rows = dict.fromkeys(np.shape(each)[1:] for each in column)
    if len(rows) > 1:
        received = " and ".join(map(str, list(rows)[:2]))
        raise ValueError(f"{_EQUAL_ROWS} Received: rows of shapes {received} on rank {world.rank}")
    return np.concatenate(column)
