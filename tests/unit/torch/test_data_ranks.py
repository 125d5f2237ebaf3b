"""Data are divided over `DataRanks`, here two of four ranks: the other two train on the same samples."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from thread_ranks import on_ranks
from torch.utils.data import DataLoader, IterableDataset

from hvdtrain.data.reading import as_source
from hvdtrain.distributed.data_ranks import DataRanks

ROWS = torch.arange(22.0).reshape(11, 2)
PAIRS = [[0, 1], [2, 3]], [[0, 2], [1, 3]]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(ROWS)


DATA = {
    "arrays": lambda: (ROWS.numpy(), ROWS.numpy()),
    "a dataset": lambda: [(row, row) for row in ROWS.numpy()],
    "a loader": lambda: DataLoader(ROWS, batch_size=2, shuffle=True),
    "a sampler": lambda: DataLoader(ROWS, batch_size=2, sampler=list(range(11))),
    "a batch sampler": lambda: DataLoader(
        ROWS, batch_sampler=[list(range(i, min(i + 2, 11))) for i in range(0, 11, 2)]
    ),
    "a stream": lambda: DataLoader(Stream(), batch_size=2),
}


@pytest.mark.parametrize("pairs", PAIRS)
def test_data_ranks_are_those_of_the_process_set(pairs):
    def ask(world):
        ranks = DataRanks(world)
        mine = np.array([float(world.rank)])
        found = [float(ranks.allreduce(mine, op, name="x")[0]) for op in ("sum", "mean", "max")]
        gathered = ranks.allgather(mine, name="x").tolist()
        return ranks.rank, ranks.size, found, gathered, ranks.allgather_object({"rank": world.rank}, name="x")

    for rank, found in enumerate(on_ranks(4, ask, data_sets=pairs)):
        pair = next(each for each in pairs if rank in each)
        sums = [sum(pair), sum(pair) / 2, max(pair)]
        assert found == (pair.index(rank), 2, sums, pair, [{"rank": each} for each in pair])


@pytest.mark.parametrize("kind", DATA)
def test_each_pair_of_ranks_sees_every_sample_once(kind):
    def read(world):
        batches = list(as_source(DATA[kind](), batch_size=2, world=world).epoch(0, shuffle=True))
        rows = [np.asarray(batch.inputs)[: batch.local_count, 0].tolist() for batch in batches]
        return rows, [batch.global_count for batch in batches]

    (mine, counts), (others, counts_there), *again = on_ranks(4, read, data_sets=PAIRS[0])
    assert again == [(mine, counts), (others, counts_there)]
    assert sorted(itertools.chain(*mine, *others)) == ROWS[:, 0].tolist()
    assert counts == counts_there == [len(a) + len(b) for a, b in zip(mine, others, strict=True)]
    assert sum(counts) == len(ROWS)
