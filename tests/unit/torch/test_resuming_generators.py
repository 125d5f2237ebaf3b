"""A run that resumes draws what a run that never stopped draws: data hold generators of their own."""

from __future__ import annotations

import logging
import random

import numpy as np
import pytest
import torch
from stopping import StopAt, StoppedError
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import hvdtrain
from hvdtrain.callbacks import Checkpoint

SAMPLES, BATCH, EPOCHS = 20, 5, 3


pytestmark = pytest.mark.usefixtures("alone")


class Rows(Dataset):
    def __init__(self, rng=None):
        self.rng = rng

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return torch.tensor([float(index), 0.0 if self.rng is None else float(self.rng.random())])


class Drawn(Sampler):
    """Draws from NumPy's or Python's generators."""

    def __init__(self, rng):
        self.rng = rng

    def __len__(self):
        return SAMPLES

    def __iter__(self):
        order = list(range(SAMPLES))
        self.rng.shuffle(order)
        return iter(order)


class Stream(IterableDataset):
    """Draws the order when its iteration begins; without `rng` from torch's global generator."""

    def __init__(self, rng=None):
        self.rng = rng

    def __iter__(self):
        order = torch.randperm(SAMPLES).tolist() if self.rng is None else self.rng.permutation(SAMPLES).tolist()
        return (torch.tensor([float(index), 0.0]) for index in order)


class CountedStream(Stream):
    """Counts epochs by itself."""

    def __init__(self):
        self.epoch = 0

    def __iter__(self):
        self.epoch += 1
        self.rng = np.random.default_rng(self.epoch)
        return super().__iter__()


class Counted(Drawn):
    """Seeds each epoch by a count of its own."""

    def __init__(self):
        super().__init__(None)
        self.epoch = 0

    def __iter__(self):
        self.rng = random.Random(self.epoch)
        self.epoch += 1
        return super().__iter__()


class ShuffledInPlace(Drawn):
    """Shuffles batches of equal length: the order of an epoch depends on the one before."""

    def __init__(self, kind):
        super().__init__(random)
        self.batches = [kind(range(first, first + BATCH)) for first in range(0, SAMPLES, BATCH)]

    def __len__(self):
        return SAMPLES // BATCH

    def __iter__(self):
        self.rng.shuffle(self.batches)
        return iter(list(self.batches))


class ShuffledArray(Drawn):
    def __init__(self):
        super().__init__(np.random.default_rng(3))
        self.order = np.arange(SAMPLES)

    def __iter__(self):
        self.rng.shuffle(self.order)
        return iter(self.order.copy())


class ShuffledTensor(Drawn):
    """Replaces its tensor in each epoch, and holds how many are done in another one."""

    def __init__(self):
        super().__init__(None)
        self.order, self.done = torch.arange(SAMPLES), torch.zeros(())

    def __iter__(self):
        self.done += 1
        self.order = self.order[(torch.arange(SAMPLES) * 7 + int(self.done)) % SAMPLES]
        return iter(self.order.tolist())


def generator():
    return torch.Generator().manual_seed(3)


def shared():
    one = generator()
    sampler = WeightedRandomSampler(torch.ones(SAMPLES), SAMPLES, replacement=False, generator=one)
    return DataLoader(Rows(Uniform(one)), BATCH, sampler=sampler, generator=one)


class Uniform:
    """Has torch's generator, and NumPy's method."""

    def __init__(self, torchs):
        self.torchs = torchs

    def random(self):
        return torch.rand((), generator=self.torchs)


def batches():
    sampler = RandomSampler(range(SAMPLES), generator=generator())
    return DataLoader(Rows(), batch_sampler=BatchSampler(sampler, BATCH, drop_last=False))


KINDS = {
    "sampler": lambda: DataLoader(Rows(), BATCH, sampler=SubsetRandomSampler(range(SAMPLES), generator=generator())),
    "numpy sampler": lambda: DataLoader(Rows(), BATCH, sampler=Drawn(np.random.default_rng(3))),
    "python sampler": lambda: DataLoader(Rows(), BATCH, sampler=Drawn(random.Random(3))),
    "batch sampler": batches,
    "shared": shared,
    "dataset": lambda: DataLoader(Subset(Rows(np.random.default_rng(3)), range(SAMPLES)), BATCH, shuffle=True),
    "workers": lambda: DataLoader(Rows(np.random.default_rng(3)), BATCH, shuffle=True, num_workers=2),
    "no loader": lambda: Rows(np.random.RandomState(3)),
    "stream": lambda: DataLoader(Stream(np.random.default_rng(3)), BATCH),
    "stream, global": lambda: DataLoader(Stream(), BATCH),
    "counted": lambda: DataLoader(Rows(), BATCH, sampler=Counted()),
    "counted stream": lambda: DataLoader(CountedStream(), BATCH),
    "counted bare stream": CountedStream,
    "lists": lambda: DataLoader(Rows(), batch_sampler=ShuffledInPlace(list)),
    "tuples": lambda: DataLoader(Rows(), batch_sampler=ShuffledInPlace(tuple)),
    "tensor": lambda: DataLoader(Rows(), BATCH, sampler=ShuffledTensor()),
    "array": lambda: DataLoader(Rows(), BATCH, sampler=ShuffledArray()),
    "sharded": lambda: hvdtrain.Sharded(DataLoader(Rows(), BATCH, shuffle=True, generator=generator())),
    "sharded, global": lambda: hvdtrain.Sharded(DataLoader(Rows(), BATCH, shuffle=True)),
}


def train(data, *, seed=0, callbacks=(), **options):
    """Train on `data`; return the samples of each epoch, in order."""
    torch.manual_seed(seed)
    random.seed(seed)
    seen = {}

    def step(model, batch):
        if model.training:
            seen.setdefault(trainer.epoch, []).append(batch.tolist())
        return hvdtrain.Loss(model(batch).square().mean())

    model = torch.nn.Linear(2, 1)
    trainer = hvdtrain.Trainer(model, optimizer=torch.optim.SGD(model.parameters(), 1e-4), step=step)
    options = {"epochs": EPOCHS, "batch_size": BATCH, "progress": False, "run_dir": None, **options}
    try:
        trainer.fit(data, callbacks=callbacks, **options)
    except StoppedError:
        assert callbacks
    return seen


@pytest.mark.parametrize("stop", [4, 6])  # at the end of the first epoch, and within the second one
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_sees_what_a_run_that_never_stopped_sees(kind, stop, tmp_path):
    straight = train(KINDS[kind]())
    before = train(KINDS[kind](), callbacks=[Checkpoint(tmp_path, every_steps=1), StopAt(stop)])
    after = train(KINDS[kind](), seed=9, callbacks=[Checkpoint(tmp_path, every_steps=1)])
    assert {epoch: before.get(epoch, []) + after.get(epoch, []) for epoch in straight} == straight
    assert straight[0] != straight[1]
    for steps in straight.values():
        assert sorted(int(row[0]) for batch in steps for row in batch) == list(range(SAMPLES))


def test_validation_within_an_epoch_leaves_a_shared_generator_as_it_was():
    def data(one):
        sampler = SubsetRandomSampler(range(SAMPLES), generator=one)
        return DataLoader(Rows(Uniform(one)), BATCH, sampler=sampler)

    one, other = generator(), generator()
    validated = DataLoader(Rows(Uniform(one)), BATCH)
    assert train(data(one), validation=validated, validate_every=2) == train(data(other))


def test_a_generator_of_the_validation_data_resumes(tmp_path):
    def run(**options):
        rng = np.random.default_rng(3)
        train(DataLoader(Rows(), BATCH), validation=DataLoader(Rows(rng), BATCH), **options)
        return rng.random()

    straight = run()
    run(callbacks=[Checkpoint(tmp_path, every_steps=1), StopAt(6)])
    assert run(callbacks=[Checkpoint(tmp_path)]) == straight


class Unsaved(Drawn):
    def __init__(self):
        super().__init__(random.SystemRandom())


def test_what_checkpoints_cannot_hold_is_said_once_if_there_are_some(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "hvdtrain"):
        train(DataLoader(Rows(), BATCH, sampler=Unsaved()))
        assert not caplog.messages
        train(DataLoader(Rows(), BATCH, sampler=Unsaved()), checkpoint_dir=tmp_path)
    (said,) = caplog.messages
    assert "checkpoints do not hold sampler.rng, since a SystemRandom has no state (of train)" in said


def test_a_checkpoint_without_a_generators_state_says_so(tmp_path, caplog):
    train(DataLoader(Rows(), BATCH), callbacks=[Checkpoint(tmp_path, every_steps=1), StopAt(6)])
    with caplog.at_level(logging.WARNING, "hvdtrain"):
        train(KINDS["sampler"](), callbacks=[Checkpoint(tmp_path)])
    (said,) = caplog.messages
    assert "the checkpoint does not hold train.sampler.generator" in said
