"""Steps that may close early, in one process: nobody closes them."""

from __future__ import annotations

import pytest
import torch

import hvdtrain
from hvdtrain.callbacks import Callback, Checkpoint
from hvdtrain.checkpoint.store import Store
from hvdtrain.data import sharding
from hvdtrain.data.assignment import Assignment
from hvdtrain.data.sources import Consumed
from hvdtrain.training.progress import RunProgress

pytestmark = pytest.mark.usefixtures("alone")

X = torch.randn(50, 4, generator=torch.Generator().manual_seed(1))
Y = torch.arange(50) % 3


def fit(*hooks, data=(X, Y), resume="auto", **options):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 3))
    how = {"optimizer": torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), "loss": torch.nn.CrossEntropyLoss()}
    trainer = hvdtrain.Trainer(net, **how, accumulate=3, metrics=["accuracy"], **options)
    trainer.fit(data, epochs=2, batch_size=4, callbacks=hooks, resume=resume, progress=False, run_dir=None)
    return trainer


def assert_same(trainer, other):
    for ours, theirs in zip(trainer.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert trainer.history["loss"] == other.history["loss"]


def test_one_process_takes_the_steps_that_it_takes_without_a_cutoff(caplog):
    trainer = fit(cutoff=0.75)
    assert_same(trainer, fit())
    assert trainer.history.cutoffs == {}
    assert "waits for all of them" not in caplog.text


class Rows(torch.utils.data.Dataset):
    def __init__(self):
        self.read = []

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        self.read.append(int(index))
        return X[index], Y[index]


class StopAt(Callback):
    def on_step_end(self, trainer, step):
        if trainer.global_step == 2:
            raise KeyError("stopped")


class SaveAtBegin(Callback):
    """Saves before an epoch's first step, and stops there."""

    def __init__(self, folder, epoch):
        self.inner, self.epoch = Checkpoint(folder), epoch
        self.checkpoint = self.inner.checkpoint

    def on_step_begin(self, trainer, step):
        if (trainer.epoch, step) == (self.epoch, 0):
            self.inner.save(trainer)
            raise KeyError("stopped")


@pytest.mark.parametrize("cutoff", [0.5, None])
def test_an_epoch_of_which_no_step_is_taken_resumes_with_and_without_a_cutoff(tmp_path, cutoff):
    with pytest.raises(KeyError, match="stopped"):
        fit(SaveAtBegin(tmp_path, 1), cutoff=0.5)
    assert Store(tmp_path).newest_whole()[1].meta["position"]["consumed"]["assignment"] is None
    assert_same(fit(Checkpoint(tmp_path), cutoff=cutoff), fit(cutoff=0.5))


def test_data_that_no_step_can_be_cut_from_is_refused_before_checkpoints_are_moved(tmp_path):
    fit(Checkpoint(tmp_path))
    with pytest.raises(TypeError, match="cutoff gives samples that were cut off to other ranks"):
        fit(Checkpoint(tmp_path), data=hvdtrain.Sharded([(X, Y)]), cutoff=0.5, resume="never")
    assert not list(tmp_path.glob("old-*"))
    assert Store(tmp_path).newest_whole() is not None


def test_one_process_takes_what_two_ranks_have_left_of_an_epoch(tmp_path):
    """Rank 1 is behind: the checkpoint says that it has used 4 of its 25 samples, and rank 0 has used 20."""
    with pytest.raises(KeyError, match="stopped"):
        fit(Checkpoint(tmp_path, every_steps=1, background=False), StopAt(), data=Rows(), cutoff=0.5)
    assert Store(tmp_path).newest_whole()[1].meta["position"]["consumed"]["assignment"]["taken"] == [12]
    read = RunProgress.from_json

    def of_two_ranks(value):
        found = read(value)
        found.consumed = Consumed(24, 8, 2, Assignment((20, 4)))
        return found

    rows = Rows()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunProgress, "from_json", of_two_ranks)
        fit(Checkpoint(tmp_path), data=rows, cutoff=0.5)
    order = sharding.epoch_order(50)
    left = [*order[1::2][4:].tolist(), *order[0::2][20:].tolist()]
    assert sorted(rows.read[: len(left)]) == sorted(left)
    assert sorted(rows.read[len(left) :]) == list(range(50))
