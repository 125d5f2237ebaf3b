"""A PyDataset whose batches differ between ranks is refused."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import hvdtrain
from hvdtrain.data.reading import as_source
from hvdtrain.distributed import world
from hvdtrain.errors import DesyncError

pytestmark = pytest.mark.world_size(2)


class Batches(keras.utils.PyDataset):
    def __init__(self, order):
        super().__init__()
        self.order = order

    def __len__(self):
        return 5

    def __getitem__(self, index):
        rows = self.order[2 * index : 2 * index + 2]
        return np.ones((2, 1)), rows


def test_batches_that_differ_between_ranks_are_refused():
    here = world.current()
    data = Batches(np.roll(np.arange(10), here.rank))
    with pytest.raises(DesyncError, match=r"\[1\] of batch 0 is \[0, 1\] .* on rank 0 but \[9, 0\]"):
        as_source(data, batch_size=2, world=here)
    as_source(hvdtrain.Sharded(data), batch_size=2, world=here)
    as_source(Batches(np.arange(10)), batch_size=2, world=here)
