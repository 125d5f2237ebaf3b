"""Limits of DataLoader workers are said once where they are met, and nowhere else."""

from __future__ import annotations

import logging
import multiprocessing

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

import hvdtrain
from hvdtrain.data.reading import as_source
from hvdtrain.distributed.world import SoloWorld

pytestmark = pytest.mark.usefixtures("alone")
SAMPLES = 24


@pytest.fixture
def said(caplog):
    """Return what hvdtrain has warned of."""
    caplog.set_level(logging.WARNING, "hvdtrain")
    return lambda: caplog.messages


class Rows(Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return torch.ones(2), torch.zeros(1)


class WithEpoch(Rows):
    def set_epoch(self, epoch):
        self.epoch = epoch


class Stream(IterableDataset):
    def __iter__(self):
        return ((torch.full((2,), float(i)), torch.zeros(1)) for i in range(SAMPLES))


class StreamWithEpoch(Stream):
    def set_epoch(self, epoch):
        self.epoch = epoch


class SharesEpoch(StreamWithEpoch):
    def __init__(self, shared):
        self.shared = shared


def fit(data, epochs=2):
    model = torch.nn.Linear(2, 1)
    trainer = hvdtrain.Trainer(model, optimizer=torch.optim.SGD(model.parameters(), 1e-4), loss=torch.nn.MSELoss())
    trainer.fit(data, epochs=epochs, progress=False, run_dir=None)


@pytest.mark.parametrize("wrap", [lambda data: data, hvdtrain.Sharded])
@pytest.mark.parametrize("kind", [WithEpoch, StreamWithEpoch])
def test_persistent_workers_that_never_see_set_epoch_are_said_once(kind, wrap, said):
    data = wrap(DataLoader(kind(), 8, num_workers=1, persistent_workers=True))
    fit(data, epochs=1)  # which needs no other epoch
    assert not said()
    fit(data)
    fit(data)
    (line,) = said()
    assert f"{kind.__name__}.set_epoch does not reach the workers" in line


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(StreamWithEpoch(), 8, num_workers=1),
        lambda: DataLoader(StreamWithEpoch(), 8),
        lambda: DataLoader(Rows(), 8, num_workers=1, persistent_workers=True),
        lambda: DataLoader(SharesEpoch(multiprocessing.Value("i", 0)), 8, num_workers=1, persistent_workers=True),
        lambda: DataLoader(
            SharesEpoch({"epoch": multiprocessing.RawValue("i", 0)}), 8, num_workers=1, persistent_workers=True
        ),
        lambda: DataLoader(SharesEpoch(torch.zeros(()).share_memory_()), 8, num_workers=1, persistent_workers=True),
    ],
    ids=["ends", "no workers", "no set_epoch", "Value", "RawValue", "shared tensor"],
)
def test_workers_that_see_the_epoch_are_not_warned_of(make, said):
    fit(make())
    assert not said()


def test_prepare_says_it_too(said):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    hvdtrain.prepare(model, optimizer, DataLoader(WithEpoch(), 8, num_workers=1, persistent_workers=True))
    (line,) = said()
    assert "WithEpoch.set_epoch does not reach the workers" in line


class Split(Stream):
    """A part for each worker."""

    def __iter__(self):
        worker = get_worker_info()
        rows = range(SAMPLES) if worker is None else range(worker.id, SAMPLES, worker.num_workers)
        return ((torch.full((2,), float(i)), torch.zeros(1)) for i in rows)


class Shuffled(Stream):
    """Unsplit: each worker iterates all samples, in another order."""

    def __len__(self):
        return SAMPLES

    def __iter__(self):
        return ((torch.full((2,), float(i)), torch.zeros(1)) for i in torch.randperm(SAMPLES).tolist())


class SplitWithLength(Split):
    def __len__(self):
        return SAMPLES


class Constant(Split):
    """Data to measure speed with: split, but equal."""

    def __iter__(self):
        return ((torch.ones(2), torch.zeros(1)) for _ in super().__iter__())


class Batches(Stream):
    """Whole batches, for batch_size=None."""

    def __iter__(self):
        return ((torch.full((4, 2), float(i)), torch.zeros(4, 1)) for i in range(3))


def batches(data):
    source = as_source(data, batch_size=8, world=SoloWorld(), seed=0)
    for epoch in range(2):
        taken = [batch for batch in source.epoch(epoch, shuffle=True) if batch.local_count]
    return taken


REPEATED = {
    "same batches": (lambda: DataLoader(Stream(), 4, num_workers=2), "the same first batch"),
    "one batch each": (lambda: DataLoader(Stream(), SAMPLES, num_workers=2), "its 2 workers yielded the same batch"),
    "whole batches": (lambda: DataLoader(Batches(), None, num_workers=2), "the same first batch"),
    "other orders": (lambda: DataLoader(Shuffled(), 4, num_workers=2), f"yielded {2 * SAMPLES} samples of {SAMPLES}"),
    "sharded": (lambda: hvdtrain.Sharded(DataLoader(Stream(), 4, num_workers=2)), "the same first batch"),
}


@pytest.mark.parametrize("kind", REPEATED)
def test_workers_that_yield_each_sample_again_are_said_once(kind, said):
    make, expected = REPEATED[kind]
    data = make()
    batches(data)
    batches(data)
    (line,) = said()
    assert expected in line
    assert "get_worker_info" in line


DISTINCT = {
    "split": lambda: DataLoader(Split(), 4, num_workers=2),
    "length": lambda: DataLoader(SplitWithLength(), 4, num_workers=2),
    "constant": lambda: DataLoader(Constant(), 4, num_workers=2),
    "constant, one batch each": lambda: DataLoader(Constant(), SAMPLES, num_workers=2),
    "one worker": lambda: DataLoader(Stream(), 4, num_workers=1),
    "no worker": lambda: DataLoader(Stream(), 4),
    "by index": lambda: DataLoader(Rows(), 4, num_workers=2),
}


@pytest.mark.parametrize("kind", DISTINCT)
def test_workers_that_yield_each_sample_once_are_not_warned_of(kind, said):
    taken = batches(DISTINCT[kind]())
    assert sum(batch.local_count for batch in taken) == SAMPLES
    assert not said()
