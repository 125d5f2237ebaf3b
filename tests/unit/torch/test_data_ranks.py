"""What counts samples or replicas is over `DataRanks`, here two of four ranks: the other two see the same samples."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from thread_ranks import on_ranks
from torch.utils.data import DataLoader, IterableDataset

from hvdtrain.adapter import State
from hvdtrain.data.reading import as_source
from hvdtrain.data.sources import Batch
from hvdtrain.distributed.data_ranks import DataRanks
from hvdtrain.torch.ops.average_buffers import average_buffers
from hvdtrain.torch.reduction.loss_weights import LossWeights
from hvdtrain.torch.steps.metrics import Totals
from hvdtrain.training.pace import Pace
from hvdtrain.training.packing import pack
from hvdtrain.training.progress import RunProgress

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


@pytest.mark.parametrize("pairs", PAIRS)
def test_a_loss_weighs_its_part_of_the_labels_of_the_data_ranks(pairs):
    def weigh(world):
        weights = LossWeights(torch.nn.CrossEntropyLoss(), world)
        targets = torch.tensor([0] * (world.rank + 1) + [-100])
        counts = [sum(rank + 2 for rank in pair) for pair in pairs if world.rank in pair]
        weights.begin([Batch(None, targets, local_count=len(targets), global_count=counts[0])])
        return weights.factor(0)

    for rank, factor in enumerate(on_ranks(4, weigh, data_sets=pairs)):
        pair = next(each for each in pairs if rank in each)
        assert factor == 2 * (rank + 1) / sum(each + 1 for each in pair)


@pytest.mark.parametrize("pairs", PAIRS)
def test_metrics_and_statistics_are_of_the_data_ranks_and_time_of_all(pairs):
    def train(world):
        totals = Totals({}, torch.device("cpu"), world)
        totals._cells[0].fill_(world.rank)
        totals.counts[0] = 1.0
        statistics = torch.tensor([float(world.rank)])
        adapter = SimpleNamespace(
            metrics=totals.results,
            learning_rates=[0.1],
            average_buffers=lambda: average_buffers([("mean", statistics)], world),
        )
        pace = Pace(adapter, world)
        pace.begin_epoch(seconds=100.0 * world.rank)
        logs = pace.end_epoch(RunProgress())
        saved = pack(State(), {}, {"callbacks": {}}, world=world, copy=False).meta["world_size"]
        return logs["loss"], float(statistics), logs["seconds"], saved

    for rank, (loss, statistics, seconds, saved) in enumerate(on_ranks(4, train, data_sets=pairs)):
        pair = next(each for each in pairs if rank in each)
        assert loss == statistics == sum(pair) / 2
        assert seconds == pytest.approx(300.0, abs=10.0)
        assert saved == 2  # what the learning rate is scaled by when a run resumes
