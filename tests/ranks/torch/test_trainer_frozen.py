"""Frozen weights, as below a LoRA adapter: nothing of them is sent in steps, and checkpoints may leave them out."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import hvdtrain
from hvdtrain.callbacks import Callback, Checkpoint
from hvdtrain.errors import CheckpointError, HvdTrainError

pytestmark = pytest.mark.world_size(2)
X = np.random.default_rng(0).normal(size=(24, 4)).astype(np.float32)
Y = np.arange(24) % 3
OPTIONS = {"batch_size": 4, "progress": False}


class Adapted(torch.nn.Module):
    """A large frozen layer in parallel with two small ones, as peft's LoRA is."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.base = torch.nn.Linear(4, 10_000).requires_grad_(False)
        self.down, self.up = torch.nn.Linear(4, 2, bias=False), torch.nn.Linear(2, 10_000, bias=False)
        self.head = torch.nn.Linear(10_000, 3).requires_grad_(False)

    def forward(self, x):
        return self.head(torch.tanh(self.base(x) + self.up(self.down(x))))


def trainer(model, *, everything=True):
    trained = [each for each in model.parameters() if everything or each.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
    return hvdtrain.Trainer(model, optimizer=optimizer, loss=torch.nn.CrossEntropyLoss())


@pytest.mark.parametrize("everything", [True, False])
def test_frozen_weights_are_not_sent(hvd, monkeypatch, everything):
    from hvdtrain.torch.ops import engine

    native, sent = engine.native(), {}
    send = native.allreduce_async_

    def count(tensor, name=None, **options):
        sent.setdefault(name, []).append(tensor.numel())
        return send(tensor, name=name, **options)

    model = Adapted()
    run = trainer(model, everything=everything)
    monkeypatch.setattr(native, "allreduce_async_", count)
    run.fit((X, Y), epochs=2, **OPTIONS)
    gradients = {name: sizes for name, sizes in sent.items() if not name.startswith(("hvdtrain.", "gradients."))}
    assert {name.partition(".")[0] for name in gradients} == {"up", "down"}
    # Two numbers and two flags a parameter travel with the bucket.
    room = 2 + 2 * sum(len(group["params"]) for group in run._adapter._update.optimizer.param_groups)
    assert sum(map(sum, gradients.values())) <= 6 * (model.up.weight.numel() + model.down.weight.numel() + room)


class Stop(Callback):
    def on_step_end(self, trainer, step):
        if trainer.global_step == 4:
            raise KeyboardInterrupt


def test_a_run_without_frozen_weights_in_its_checkpoints_resumes_with_the_same_bits(
    hvd, rank, shared_tmp_path, assert_same_on_all_ranks
):
    straight, resumed = Adapted(), Adapted(seed=10 * rank)
    saved = Checkpoint(shared_tmp_path, every_steps=4, frozen=False)
    trainer(straight).fit((X, Y), epochs=2, **OPTIONS)
    with pytest.raises(KeyboardInterrupt):
        trainer(Adapted()).fit((X, Y), epochs=2, callbacks=[saved, Stop()], **OPTIONS)
    trainer(resumed).fit((X, Y), epochs=2, callbacks=[saved], **OPTIONS)
    assert all(map(torch.equal, straight.state_dict().values(), resumed.state_dict().values()))
    size = sum(each.stat().st_size for each in (shared_tmp_path / "epoch-000002").iterdir())
    assert size < 3 * 4 * (straight.up.weight.numel() + straight.down.weight.numel())  # weights and momentum
    with pytest.raises((CheckpointError, HvdTrainError), match=r"base\.weight is another one"):
        trainer(Adapted(seed=3)).fit((X, Y), epochs=3, callbacks=[saved], **OPTIONS)
