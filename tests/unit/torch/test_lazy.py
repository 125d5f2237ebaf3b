"""Models whose parameters have no shapes before the first batch, on one process."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import hvdtrain
from hvdtrain.errors import CheckpointError

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
Y = np.arange(8) % 3
QUIET = {"progress": False, "run_dir": None}


def lazy():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.LazyLinear(5), torch.nn.LazyBatchNorm1d(), torch.nn.LazyLinear(3))


def test_a_lazy_model_is_trained_saved_and_resumed(make, tmp_path):
    straight = lazy()
    make(straight).fit((X, Y), epochs=3, batch_size=4, **QUIET)
    make(lazy()).fit((X, Y), epochs=1, batch_size=4, checkpoint_dir=str(tmp_path), **QUIET)
    resumed = lazy()
    make(resumed).fit((X, Y), epochs=3, batch_size=4, checkpoint_dir=str(tmp_path), **QUIET)
    expected = straight.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in resumed.state_dict().items())
    assert not any(torch.nn.parameter.is_lazy(p) for p in resumed.parameters())


def test_a_checkpoint_of_another_model_is_refused_by_a_lazy_one(make, tmp_path):
    make(torch.nn.Linear(4, 3)).fit((X, Y), epochs=1, batch_size=4, checkpoint_dir=str(tmp_path), **QUIET)
    with pytest.raises(CheckpointError, match=r"tensor .* is missing in the checkpoint|Received: .* of a lazy module"):
        make(lazy()).fit((X, Y), epochs=3, batch_size=4, checkpoint_dir=str(tmp_path), **QUIET)


@pytest.mark.parametrize("options", [{"sync": hvdtrain.Delayed()}, {"accumulate": 2, "cutoff": 0.5}])
def test_ranks_that_step_alone_need_a_model_that_was_called(make, options):
    with pytest.raises(ValueError, match=r"a lazy module: .* call the model once on a batch before"):
        make(lazy(), **options)


def test_parameters_that_the_first_batch_creates_are_not_left_untrained(make):
    class Late(torch.nn.Linear):
        def __init__(self):
            super().__init__(5, 3)
            self.first = None

        def forward(self, x):
            if self.first is None:
                self.first = torch.nn.Linear(x.shape[1], self.in_features)
            return super().forward(self.first(x))

    with pytest.raises(ValueError, match=r"no optimizer trains. Received: 2 parameters, the first is first.weight, on"):
        make(Late()).fit((X, Y), **QUIET)
    model = Late()
    model(torch.as_tensor(X))
    make(model).fit((X, Y), **QUIET)


def test_an_average_of_weights_needs_a_model_that_was_called(make):
    with pytest.raises(ValueError, match=r"EMA needs .*0.weight of a lazy module.* Call the model once on a batch"):
        make(lazy()).fit((X, Y), callbacks=[hvdtrain.callbacks.EMA(decay=0.9)], **QUIET)
