"""Ranks that read arrays ahead, and copy batches late, train the weights of ranks that do not."""

from __future__ import annotations

import pytest
import torch
import trainer_kit as kit
from late_device import LateDevice, prefetch_threads, use
from stopping import StopAt, StoppedError

import hvdtrain
from hvdtrain.callbacks import Checkpoint

pytestmark = [pytest.mark.usefixtures("hvd"), pytest.mark.world_size(2)]

OPTIONS = {
    "uneven": {},
    "accumulated": {"accumulate": 3},
    "divided by shares": {},
    "open steps": {"cutoff": 1.0, "accumulate": 2},
    "ranks step alone": {"sync": hvdtrain.LocalSGD(every=2)},
}


def train(options=None, **fit):
    net = kit.model(dropout=0.2)
    x, y = kit.data(41)  # rank 1 has none in the last step
    trainer = kit.make_trainer(net, **(options or {}))
    torch.manual_seed(9)
    quiet = {"progress": False, "run_dir": None}
    trainer.fit((x.double().numpy(), y), epochs=2, batch_size=kit.BATCH, validation=(x, y), **quiet, **fit)
    return net.state_dict()


def assert_same(found, expected):
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("is_late", [True, False], ids=["late", "at once"])
@pytest.mark.parametrize("name", OPTIONS)
def test_weights_are_those_of_ranks_that_read_nothing_ahead(monkeypatch, size, name, is_late):
    shares = {"balance": [1.0] * (size - 1) + [2.0]} if name == "divided by shares" else {}
    expected = train(OPTIONS[name], **shares)
    use(monkeypatch, device := LateDevice(is_late=is_late))
    assert_same(train(OPTIONS[name], **shares), expected)
    assert device.log
    assert not prefetch_threads()


def test_ranks_that_were_stopped_resume_as_if_nothing_was_read_ahead(monkeypatch, shared_tmp_path):
    expected = train()
    use(monkeypatch, LateDevice(is_late=True))
    files = str(shared_tmp_path / "run")
    with pytest.raises(StoppedError):
        train(callbacks=[Checkpoint(files, every_steps=1, background=False), StopAt(8)])
    assert not prefetch_threads()
    assert_same(train(checkpoint_dir=files), expected)
