"""A run that resumes within an epoch reads the rest of a torch DataLoader or stream."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    SequentialSampler,
    TensorDataset,
    get_worker_info,
)

from hvdtrain.data.reading import as_source
from hvdtrain.data.sources import Consumed
from hvdtrain.distributed.world import SoloWorld


class FakeWorld(SoloWorld):
    def __init__(self, rank, size):
        super().__init__()
        self.rank, self.size = rank, size

    def broadcast_object(self, obj, *, root=0, name="object"):
        return obj  # what rank 0 would have drawn too


ROWS = TensorDataset(torch.arange(23.0)[:, None])


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(23.0)[:, None])


class Drawn(Sampler):
    def __len__(self):
        return 23

    def __iter__(self):
        return iter(np.random.default_rng(5).permutation(23).tolist())


DATA = {
    "shuffled": lambda: DataLoader(ROWS, batch_size=3, shuffle=True),
    "workers": lambda: DataLoader(ROWS, batch_size=3, num_workers=1),
    "own sampler": lambda: DataLoader(ROWS, batch_size=3, sampler=Drawn()),
    "own batches": lambda: DataLoader(ROWS, batch_sampler=BatchSampler(SequentialSampler(ROWS), 3, drop_last=False)),
    "stream": lambda: DataLoader(Stream(), batch_size=3),
}


class Augmented(Dataset):
    """Draws from every generator that workers seed; and says from which worker it was asked."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        assert get_worker_info().dataset.__len__() == 24
        return index, torch.rand(()).item(), random.random(), float(np.random.random())  # noqa: NPY002


class AugmentedTogether(Augmented):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


AUGMENTED = {
    "shuffled": lambda **options: DataLoader(Augmented(), batch_size=3, shuffle=True, **options),
    "persistent": lambda **options: DataLoader(AugmentedTogether(), 3, persistent_workers=True, **options),
    "own batches": lambda **options: DataLoader(
        Augmented(), batch_sampler=BatchSampler(SequentialSampler(range(24)), 3, drop_last=False), **options
    ),
    "own samples": lambda **options: DataLoader(Augmented(), batch_size=None, **options),
}


@pytest.mark.parametrize("kind", AUGMENTED)
def test_workers_augment_the_rest_of_an_epoch_as_if_it_had_not_been_interrupted(kind):
    def epochs(*places, workers=2):
        data = AUGMENTED[kind](num_workers=workers, collate_fn=lambda rows: np.array(rows).reshape(-1, 4))
        source = as_source(data, batch_size=3, world=FakeWorld(1, 2), seed=0)
        taken = []
        for epoch, done in places:
            torch.manual_seed(7)  # as a checkpoint brings it back
            taken.append([b.inputs for b in source.epoch(epoch, shuffle=True, after=done) if b.local_count])
        return taken

    first, second = epochs((0, Consumed()), (1, Consumed()))
    numbers = np.concatenate([*first, *second])[:, 1:]
    assert len(np.unique(numbers)) == numbers.size
    per_step = len(first[0]) if kind != "own samples" else 1
    (rest,) = epochs((1, Consumed(3 * 2 * per_step, 3 * 2, 2)), workers=1)  # nor does it hang on the number of workers
    np.testing.assert_array_equal(np.concatenate(second[3:]), np.concatenate(rest))


@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (2, 1), (1, 3)])
def test_the_rest_of_an_epoch_is_what_was_not_seen(kind, before, after):
    def iterators(size, done):
        made = []
        for rank in range(size):
            source = as_source(DATA[kind](), batch_size=3, world=FakeWorld(rank, size), seed=0)
            # Ranks of this fake world run one after the other: each counts its own batches as the step's.
            made.append(source.epoch(0, shuffle=True, after=done))
        return made

    seen, steps = [], 2
    for mine in iterators(before, Consumed()):
        for _, batch in zip(range(steps), mine, strict=False):
            seen += [int(v) for v in batch.inputs[: batch.local_count, 0]]
    done = Consumed(len(seen), steps * before, before)
    for mine in iterators(after, done):
        seen += [int(v) for batch in mine if batch.local_count for v in batch.inputs[: batch.local_count, 0]]
    assert sorted(seen) == list(range(23))
