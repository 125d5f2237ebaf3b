"""A PyDataset's on_epoch_begin and on_epoch_end are called, also after a resume, and do the same on all ranks."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import hvdtrain
from hvdtrain.callbacks import Checkpoint
from hvdtrain.distributed import world
from hvdtrain.errors import DesyncError

pytestmark = pytest.mark.world_size(2)
BATCHES = 5


class Curriculum(keras.utils.PyDataset):
    """Shuffles its rows as people do, and notes what is called and read."""

    def __init__(self, draw=lambda: np.random.permutation(2 * BATCHES)):  # noqa: NPY002 - what people write
        super().__init__()
        self.draw, self.level, self.rank = draw, 0, world.current().rank
        self.x = np.arange(2.0 * BATCHES, dtype=np.float32)[:, None]
        self.order = np.arange(len(self.x))
        self.calls, self.seen = [], []

    def __len__(self):
        return BATCHES

    def __getitem__(self, index):
        rows = self.order[2 * index : 2 * index + 2]
        self.seen.append((self.level, rows.tolist()))
        return self.x[rows], self.x[rows]

    def on_epoch_begin(self):
        if not self.calls:
            self.seen.clear()  # what ranks compared
        self.calls.append("begin")

    def on_epoch_end(self):
        self.calls.append("end")
        self.level += 1
        self.order = self.draw()


def trainer():
    net = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    return hvdtrain.Trainer(net, optimizer=keras.optimizers.SGD(0.0), loss="mse")


def fit(data, epochs, run=None, **options):
    (run or trainer()).fit(data, epochs=epochs, progress=False, run_dir=None, **options)


def read_in(data, level):
    """Return all rows that ranks have read at a level, sorted."""
    everyone = world.current().allgather_object(data.seen)
    return sorted(row for seen in everyone for at, rows in seen if at == level for row in rows)


def test_epochs_call_the_hooks_and_read_each_sample_once():
    np.random.seed(world.current().rank)  # noqa: NPY002 - a rank may have drawn other numbers than others
    state = np.random.get_state()[1].tolist()  # noqa: NPY002
    data, run = Curriculum(), trainer()
    fit(data, 3, run)
    assert data.calls == ["begin", "end", "begin", "end", "begin"]
    for level in range(3):
        assert read_in(data, level) == list(range(2 * BATCHES))
    assert data.order.tolist() != list(range(2 * BATCHES))
    assert state == np.random.get_state()[1].tolist()  # noqa: NPY002
    fit(data, 1)
    assert data.calls == ["begin", "end", "begin", "end", "begin", "end", "begin"]


def test_a_resumed_run_makes_the_calls_of_the_epochs_before(shared_tmp_path):
    whole = Curriculum()
    fit(whole, 3)
    fit(Curriculum(), 2, callbacks=[Checkpoint(shared_tmp_path)])
    again = Curriculum()
    fit(again, 3, callbacks=[Checkpoint(shared_tmp_path)])
    assert again.calls == whole.calls
    assert again.order.tolist() == whole.order.tolist()
    assert again.seen == [each for each in whole.seen if each[0] == 2]


def test_a_hook_that_draws_otherwise_on_ranks_is_an_error_on_all():
    unseeded = np.random.default_rng()
    with pytest.raises(DesyncError, match=r"Curriculum after on_epoch_end.*order.*seeded alike"):
        fit(Curriculum(lambda: unseeded.permutation(2 * BATCHES)), 2)
    seeded = np.random.default_rng(0)
    data = Curriculum(lambda: seeded.permutation(2 * BATCHES))
    fit(data, 2)
    assert read_in(data, 1) == list(range(2 * BATCHES))
