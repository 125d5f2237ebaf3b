"""Data that differ between ranks are refused on all ranks; random data, and data of each rank, are not."""

from __future__ import annotations

import random
import secrets

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, random_split

import hvdtrain
from hvdtrain.data.reading import as_source
from hvdtrain.errors import DesyncError

pytestmark = pytest.mark.world_size(2)
N = 41
X = np.random.default_rng(0).random((N, 6)).astype(np.float32)


class Rows(Dataset):
    """Calls a function for each sample."""

    def __init__(self, sample):
        self.sample, self.generator = sample, np.random.default_rng()

    def __len__(self):
        return N

    def __getitem__(self, index):
        return self.sample(self, index)


class Transformed(Dataset):
    """Wraps a subset, as people do to give it transforms."""

    def __init__(self, part):
        self.part = part

    def __len__(self):
        return len(self.part)

    def __getitem__(self, index):
        return self.part[index]


def plain(_, index):
    return X[index], index % 3


def split(*, seed=None):
    """Return train and validation parts, of an order of this rank's own without a seed."""
    generator = torch.Generator()
    generator.manual_seed(generator.seed() if seed is None else seed)
    return random_split(Rows(plain), [30, N - 30], generator=generator)


def flipped(draw):
    return lambda rows, index: (X[index][:: -1 if draw(rows) < 0.5 else 1].copy(), index % 3)


def loader(data, workers):
    return DataLoader(data, batch_size=4, shuffle=True, num_workers=workers)


def check(data, world, **how):
    as_source(data, batch_size=4, world=world, **how)


SUBSETS = {
    "random_split": lambda _: split()[0],
    "wrapped": lambda _: Transformed(split()[0]),
    "subset of a subset": lambda _: Subset(split()[0], range(5)),
    "concatenated": lambda _: ConcatDataset([split(seed=0)[0], split()[1]]),
    "an array of indices": lambda rank: Subset(Rows(plain), np.random.default_rng(rank).permutation(N)[:9]),
}


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("kind", SUBSETS)
def test_subsets_that_differ_between_ranks_are_refused(world, kind):
    for data in (made := SUBSETS[kind](world.rank), loader(made, 0)):
        with pytest.raises(DesyncError, match=r"indices is .* on rank 0 but .* on rank 1.*manual_seed\(0\)"):
            check(data, world)


def test_an_unseeded_validation_split_is_refused_by_its_name(world):
    net = torch.nn.Linear(6, 3)
    run = hvdtrain.Trainer(net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), loss=torch.nn.CrossEntropyLoss())
    with pytest.raises(DesyncError, match=r"validation data: dataset\.indices"):
        run.fit(split(seed=0)[0], validation=split()[1], progress=False, run_dir=None)
    with pytest.raises(DesyncError, match=r"dataset\.indices"):
        run.evaluate(split()[1])
    run.fit(split(seed=0)[0], validation=split(seed=0)[1], progress=False, run_dir=None)


@pytest.mark.parametrize("workers", [0, 1])
def test_labels_numbered_by_the_order_of_a_set_are_refused(world, workers):
    rank = world.rank

    def labeled(_, index):
        return torch.from_numpy(X[index]), (index + rank) % 3

    with pytest.raises(DesyncError, match=r"\[1\] of sample 0 is 0 .* on rank 0 but 1 .* on rank 1.*sorted\(set"):
        check(loader(Rows(labeled), workers), world)
    of_batch = DataLoader(
        Rows(plain), 4, num_workers=workers, collate_fn=lambda pairs: torch.tensor([p[1] + rank for p in pairs])
    )
    with pytest.raises(DesyncError, match=r"collate_fn\(\.\.\.\) of sample 0"):
        check(of_batch, world)


def test_a_label_that_differs_in_one_of_many_rows_of_arrays_is_refused(world):
    labels = np.arange(N)
    labels[7] += world.rank
    with pytest.raises(DesyncError, match=r"data\[1\]"):
        check((X, labels), world)


DRAWS = {
    "numpy": lambda _: np.random.random(),  # noqa: NPY002
    "python": lambda _: random.random(),
    "torch": lambda _: float(torch.rand(())),
    "a generator of the dataset": lambda rows: rows.generator.random(),
    "the system": lambda _: secrets.randbelow(2),
}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("draw", DRAWS)
def test_augmentation_is_no_difference_and_its_labels_are_compared(world, draw, workers):
    torch.manual_seed(world.rank)
    random.seed(world.rank)
    np.random.seed(world.rank)  # noqa: NPY002
    augmented, rank = flipped(DRAWS[draw]), world.rank
    data = Rows(augmented)
    states = [random.getstate(), torch.get_rng_state().tolist(), data.generator.bit_generator.state]
    check(loader(data, workers), world)
    assert [random.getstate(), torch.get_rng_state().tolist(), data.generator.bit_generator.state] == states
    with pytest.raises(DesyncError, match=r"\[1\] of sample"):
        check(loader(Rows(lambda rows, index: (augmented(rows, index)[0], index + rank)), workers), world)


def test_workers_read_the_samples_so_that_this_process_opens_no_file(world):
    data = Rows(lambda rows, index: vars(rows).update(opened=True) or X[index])
    check(loader(data, 1), world)
    assert not hasattr(data, "opened")


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_one_rank_cannot_read_ends_all_ranks(world, workers):
    is_last = world.rank == world.size - 1

    def missing(_, index):
        if is_last and index == 0:
            raise FileNotFoundError("no 0.jpg")
        return X[index]

    text = rf"sample 0 cannot be read on rank {world.size - 1}: FileNotFoundError: no 0\.jpg"
    with pytest.raises(DesyncError, match=text) as raised:
        check(loader(Rows(missing), workers), world)
    assert isinstance(raised.value.__cause__, FileNotFoundError) == is_last


def test_a_sample_that_no_rank_can_read_is_left_to_the_training(world):
    def missing(_, index):
        return X[index + (index == 0) * N]

    check(Rows(missing), world)


def test_rounding_gives_a_warning_and_no_error(world, caplog):
    check(Rows(lambda _, index: X[index] * np.float32(1 + 1e-6 * world.rank)), world)
    assert ("disagree a little" in caplog.text) == world.is_root


def test_data_of_each_rank_are_allowed_as_sharded(world):
    rank = world.rank
    check(hvdtrain.Sharded(Rows(lambda _, index: (X[index], rank))), world)


def test_samples_of_a_dataset_are_read_once(world):
    read = []
    data = Rows(lambda _, index: read.append(index) or X[index])
    for _ in range(3):
        check(data, world)
    assert read == [0, N - 1, 6, 20, 33]


def test_files_may_be_in_another_folder_on_each_rank(world):
    rank = world.rank
    check(Rows(lambda _, index: {"x": X[index], "path": f"/scratch/{rank}/{index}.jpg"}), world)
