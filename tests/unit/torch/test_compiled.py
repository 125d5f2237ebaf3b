"""A compiled model's tensors have the names that they have without torch.compile."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import hvdtrain
from hvdtrain.adapter import State
from hvdtrain.callbacks import EMA
from hvdtrain.distributed import world
from hvdtrain.errors import NonFiniteError

X = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
Y = np.arange(12) % 3


@pytest.fixture(autouse=True)
def solo(hvd, monkeypatch):
    monkeypatch.setenv("HVDTRAIN_REDUCE_ALONE", "1")
    world.use(world.SoloWorld())
    yield
    world.use(None)


class Compiled(torch.nn.Module):
    """What torch.compile returns, as far as names go; to compile takes ten seconds to import."""

    def __init__(self, net):
        super().__init__()
        self._orig_mod = net

    def forward(self, inputs):
        return self._orig_mod(inputs)


def really_compiled(net):
    return torch.compile(net, backend="eager")


def plain(net):
    return net


def nested(net):
    net[0] = Compiled(net[0])
    return net


def trainer(how, **options):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3))
    net = how(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return hvdtrain.Trainer(net, optimizer=optimizer, loss=torch.nn.CrossEntropyLoss(), **options)


def fit(run, epochs, **options):
    run.fit((X, Y), epochs=epochs, batch_size=4, progress=False, run_dir=None, **options)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (Compiled, plain),
        (plain, nested),
        (nested, Compiled),
        pytest.param(really_compiled, Compiled, marks=pytest.mark.long),
    ],
)
def test_a_run_resumes_with_and_without_compilation(tmp_path, first, then):
    straight = trainer(plain)
    fit(straight, 3, callbacks=[EMA(0.9)])
    fit(trainer(first), 2, callbacks=[EMA(0.9)], checkpoint_dir=str(tmp_path))
    resumed = trainer(then)
    fit(resumed, 3, callbacks=[EMA(0.9)], checkpoint_dir=str(tmp_path))
    ours, expected = resumed.state(), straight.state()
    assert ours.arrays.keys() == expected.arrays.keys()
    assert (ours.per_rank, ours.trained) == (expected.per_rank, expected.trained)
    for name in expected.arrays:
        np.testing.assert_array_equal(ours.arrays[name], expected.arrays[name], err_msg=name)


def test_a_checkpoint_of_an_older_version_with_compiled_names_is_read():
    run = trainer(plain)
    state = run.state()
    older = {name.replace("model.", "model._orig_mod."): np.asarray(array + 1) for name, array in state.arrays.items()}
    run.load_state(State(older, state.meta))
    for name, array in run.state().arrays.items():
        np.testing.assert_array_equal(array, state.arrays[name] + 1)


def test_messages_have_plain_names():
    run = trainer(Compiled, nan_policy="raise")
    assert next(iter(run._adapter._update.optimizer._hvd_reducer.names.values())) == "0.weight"
    with pytest.raises(NonFiniteError, match=r"gradient of 0\.weight is not finite"):
        run.fit((X * np.nan, Y), batch_size=12, progress=False, run_dir=None)
