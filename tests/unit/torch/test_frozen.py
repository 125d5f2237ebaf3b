"""Checkpoints without frozen weights, on one process."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import hvdtrain
from hvdtrain.callbacks import Callback, Checkpoint
from hvdtrain.errors import CheckpointError

GENERATOR = np.random.default_rng(0)
X, Y = GENERATOR.normal(size=(22, 4)).astype(np.float32), GENERATOR.integers(0, 3, 22)
QUIET = {"progress": False, "run_dir": None, "batch_size": 4}
LEFT_OUT = ["0.weight", "0.bias", "1.weight", "1.bias", "tied.weight", "tied.bias"]


class Adapted(torch.nn.Sequential):
    """A pretrained layer and BatchNorm, both frozen and one of them tied, below a layer that is trained."""

    def __init__(self, seed=0):
        torch.manual_seed(seed)
        super().__init__(torch.nn.Linear(4, 64), torch.nn.BatchNorm1d(64))
        self.requires_grad_(False)
        self.tied = self[0]
        torch.manual_seed(1)
        self.head = torch.nn.Linear(64, 3)

    def forward(self, x):
        return self.head(self[1](self[0](x)))


def trainer(model):
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=0.05)
    return hvdtrain.Trainer(model, optimizer=optimizer, loss=torch.nn.CrossEntropyLoss())


def assert_equal(one, other):
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


def test_a_run_resumes_with_the_same_bits_from_checkpoints_without_frozen_weights(make, tmp_path):
    class Stop(Callback):
        def on_step_end(self, trainer, step):
            if trainer.global_step == 8:
                raise KeyboardInterrupt

    straight, resumed, saved = Adapted(), Adapted(), Checkpoint(tmp_path, every_steps=7, keep_last=None, frozen=False)
    trainer(straight).fit((X, Y), epochs=3, **QUIET)
    with pytest.raises(KeyboardInterrupt):
        trainer(Adapted()).fit((X, Y), epochs=3, callbacks=[saved, Stop()], **QUIET)
    trainer(resumed).fit((X, Y), epochs=3, callbacks=[saved], **QUIET)
    assert_equal(resumed, straight)
    for each in tmp_path.glob("epoch-*"):
        held = load_file(each / "model.safetensors")  # running statistics are no weights
        assert sorted(held) == sorted({*straight.state_dict()} - {*LEFT_OUT})


def test_the_best_checkpoint_without_frozen_weights_is_loaded(make, tmp_path):
    run = trainer(Adapted())
    saved = Checkpoint(tmp_path, best="val_loss", frozen=False)
    history = run.fit((X, Y), validation=(X, Y), epochs=3, callbacks=[saved], **QUIET)
    for options in ({}, {"weights_only": True}):
        model = Adapted()
        optimizer = torch.optim.Adam(model.head.parameters(), lr=0.05)
        options |= {"optimizer": optimizer, "loss": torch.nn.CrossEntropyLoss()}
        best = hvdtrain.Trainer.load(str(tmp_path / "best"), model, **options)
        assert best.evaluate((X, Y))["loss"] == pytest.approx(min(history["val_loss"]), abs=1e-6)


@pytest.mark.parametrize("weights_only", [False, True])
def test_other_frozen_weights_are_refused_and_nothing_changes(make, tmp_path, weights_only):
    trainer(Adapted()).fit((X, Y), epochs=1, callbacks=[Checkpoint(tmp_path, frozen=False)], **QUIET)
    model = Adapted(seed=2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"holds no frozen weights.*0\.weight is another one"):
        hvdtrain.Trainer.load(
            str(tmp_path / "epoch-000001"), model, weights_only=weights_only,
            optimizer=torch.optim.Adam(model.head.parameters()), loss=torch.nn.CrossEntropyLoss(),
        )  # fmt: skip
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_weight_that_was_trained_for_a_while_is_saved(make, tmp_path):
    class Thaw(Callback):
        def on_epoch_begin(self, trainer, epoch):
            trainer.model[0].requires_grad_(epoch == 1)

    model = Adapted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = hvdtrain.Trainer(model, optimizer=optimizer, loss=torch.nn.CrossEntropyLoss())
    saved = Checkpoint(tmp_path, keep_last=None, frozen=False)
    run.fit((X, Y), epochs=3, callbacks=[saved, Thaw()], **QUIET)
    held = [load_file(tmp_path / f"epoch-00000{epoch}" / "model.safetensors") for epoch in (1, 2, 3)]
    assert ["0.weight" in each for each in held] == [False, True, True]
    again = Adapted()
    options = {"optimizer": torch.optim.SGD(again.parameters(), lr=0.1), "loss": torch.nn.CrossEntropyLoss()}
    hvdtrain.Trainer.load(str(tmp_path / "epoch-000003"), again, **options)
    assert_equal(again, model)
