"""DataLoaders and samplers, looked at from one rank of a fake world."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hvdtrain
from hvdtrain.data.reading import as_source
from hvdtrain.data.sources import Consumed
from hvdtrain.distributed.world import SoloWorld
from hvdtrain.torch.sources import ShardSampler


class FakeWorld(SoloWorld):
    def __init__(self, rank, size):
        super().__init__()
        self.rank, self.size = rank, size


ROWS = TensorDataset(torch.arange(10.0)[:, None])


def seen(data, rank=0, size=1):
    batches = as_source(data, batch_size=4, world=FakeWorld(rank, size), seed=0).epoch(0, shuffle=True)
    return [int(value) for batch in batches if batch.local_count for value in batch.inputs[:, 0]]


def test_a_shard_sampler_keeps_its_shuffle_and_seed():
    def order(**options):
        return seen(DataLoader(ROWS, batch_size=4, sampler=ShardSampler(10, world=SoloWorld(), **options)))

    assert order(shuffle=False) == list(range(10))
    assert order(seed=1) != order(seed=2) != list(range(10))


def test_a_sharded_loader_is_iterated_as_it_is():
    shares = []
    for rank in range(2):
        sampler = DistributedSampler(ROWS, num_replicas=2, rank=rank, shuffle=False)
        source = as_source(
            hvdtrain.Sharded(DataLoader(ROWS, batch_size=4, sampler=sampler)), batch_size=4, world=SoloWorld()
        )
        shares.append([int(v) for batch in source.epoch(0, shuffle=False) for v in batch.inputs[:, 0]])
    assert shares == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]


def test_samples_are_counted_by_arithmetic_whatever_a_collate_fn_returns():
    loader = DataLoader(ROWS, batch_size=4, collate_fn=lambda rows: ([torch.zeros(3, 8, 8) for _ in rows], len(rows)))
    source = as_source(loader, batch_size=4, world=FakeWorld(0, 1), seed=0)
    assert [batch.local_count for batch in source.epoch(0, shuffle=False)] == [4, 4, 2]


def test_a_sampler_that_shards_itself_is_refused_with_the_way_out(hvd):
    from hvdtrain.torch.elastic import ElasticSampler

    with pytest.raises(TypeError, match=r"ElasticSampler.*hvdtrain\.Sharded"):
        seen(DataLoader(ROWS, batch_size=4, sampler=ElasticSampler(ROWS)))


def test_dropping_everything_is_an_error():
    with pytest.raises(ValueError, match="drop_last leaves no samples"):
        seen(DataLoader(ROWS, batch_size=6, drop_last=True), size=2)


class Drawing(torch.utils.data.Dataset):
    """Rows that draw from a generator of their own."""

    def __init__(self):
        self.generator = torch.Generator()

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return ROWS[index][0] + torch.rand(1, generator=self.generator)


@pytest.mark.parametrize(("rank", "shares", "done", "steps"), [(1, None, 10, 0), (1, None, 9, 1), (0, [7, 1], 9, 1)])
def test_a_rank_that_has_nothing_left_after_a_resume_leaves_the_datas_generators(rank, shares, done, steps):
    data = Drawing()
    source = as_source(DataLoader(data, batch_size=4), batch_size=4, world=FakeWorld(rank, 2), seed=0)
    source.shares, before = shares, data.generator.get_state()
    taken = list(source.epoch(0, shuffle=True, after=Consumed(done, 3, 3)))
    assert [batch.local_count for batch in taken] == [0] * steps
    assert torch.equal(data.generator.get_state(), before)


def test_an_epoch_that_is_done_reads_no_sample():
    class Counted(Drawing):
        reads = 0

        def __getitem__(self, index):
            self.reads += 1
            return super().__getitem__(index)

    data = Counted()
    source = as_source(DataLoader(data, batch_size=4), batch_size=4, world=FakeWorld(0, 1), seed=0)
    assert list(source.epoch(0, shuffle=True, after=Consumed(10, 3, 1))) == []
    assert data.reads == 0


def test_leaving_a_prepared_loop_leaves_no_hooks_behind():
    from hvdtrain.distributed import world as worlds

    model = torch.nn.Linear(1, 1)
    worlds.use(FakeWorld(0, 2))
    try:
        from hvdtrain.torch.prepare import _prepare_loader

        loader = _prepare_loader(DataLoader(TensorDataset(ROWS.tensors[0][:3]), batch_size=1), model, FakeWorld(0, 2))
        for (x,) in loader:
            if loader.count and x.shape[0]:
                model(x).sum().backward()
            if len(model.weight._backward_hooks or ()):
                break
        del x
    finally:
        worlds.use(None)
    assert not model.weight._backward_hooks
    assert np.isfinite(model.weight.grad.item())


@pytest.mark.parametrize("wrap", [lambda rows: rows, lambda rows: DataLoader(rows, batch_size=2)])
def test_samples_of_unequal_shapes_are_told_to_be_padded(make, wrap):
    ragged = [(torch.zeros(3 + row % 3), torch.zeros(1)) for row in range(8)]
    with pytest.raises(ValueError, match=r"have equal shapes. Received(.|\n)*rank 0(.|\n)*collate_fn .*pads a bat"):
        make(loss=torch.nn.MSELoss()).fit(wrap(ragged), batch_size=2, progress=False, run_dir=None)


def test_a_list_of_samples_may_hold_arrays_alone(make):
    samples = [(torch.full((4,), float(row)), torch.zeros(3)) for row in range(8)]
    trainer = make(loss=torch.nn.MSELoss())
    history = trainer.fit(samples, batch_size=8, progress=False, run_dir=None)
    assert len(history["loss"]) == 1
    assert trainer.predict(samples).shape == (8, 3)
