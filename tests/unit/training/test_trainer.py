"""What a Trainer keeps: checkpoints that go on where it stopped, and what is the user's left theirs."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

import hvdtrain
from hvdtrain.callbacks import Callback, EarlyStopping
from hvdtrain.callbacks.sync_check import digests
from hvdtrain.distributed import checksums
from hvdtrain.errors import CheckpointError
from hvdtrain.torch.ops import dtypes

X = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
Y = np.arange(12) % 3


def test_what_the_user_passed_in_stays_theirs(make, net):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    make(model, optimizer=optimizer).fit((X, Y), progress=False)
    assert type(optimizer) is torch.optim.SGD
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_save_and_load_go_on_where_it_stopped(make, net, tmp_path):
    model = net()
    straight = copy.deepcopy(model)
    trainer = make(model, optimizer=torch.optim.Adam(model.parameters()))
    trainer.fit((X, Y), epochs=2, progress=False)
    trainer.save(str(tmp_path / "one"))
    other = net()
    adam = torch.optim.Adam(other.parameters())
    loaded = hvdtrain.Trainer.load(str(tmp_path / "one"), other, optimizer=adam, loss=torch.nn.CrossEntropyLoss())
    history = loaded.fit((X, Y), epochs=3, progress=False)
    assert len(history["loss"]) == 3
    make(straight, optimizer=torch.optim.Adam(straight.parameters())).fit((X, Y), epochs=3, progress=False)
    for one, two in zip(straight.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def test_a_checkpoint_loads_in_plain_torch(make, net, tmp_path):
    from safetensors.torch import load_file

    trainer = make()
    trainer.save(str(tmp_path / "one"))
    plain = net()
    plain.load_state_dict(load_file(tmp_path / "one" / "model.safetensors"))
    assert torch.equal(plain[0].weight, trainer.model[0].weight)


def test_a_loaded_state_is_the_callers_own(make, net):
    model = net()
    trainer = make(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    trainer.fit((X, Y), progress=False)
    state = trainer.state()
    before = {name: array.copy() for name, array in state.arrays.items()}
    trainer.load_state(state)
    trainer.fit((X, Y), progress=False)
    assert all((state.arrays[name] == array).all() for name, array in before.items())


def test_looking_at_the_state_to_check_or_save_it_copies_no_weights(make, net):
    model = net()
    trainer = make(model)
    weight = model[0].weight.detach().numpy()
    assert np.shares_memory(trainer._adapter.state().arrays["model.0.weight"], weight)
    assert not np.shares_memory(trainer.state().arrays["model.0.weight"], weight)


def test_a_state_copies_an_array_when_it_is_read_and_a_check_copies_none(make, net, monkeypatch):
    trainer, copied, to_array = make(net().to(torch.bfloat16)), [], dtypes.to_array
    monkeypatch.setattr(dtypes, "to_array", lambda tensor: copied.append(tensor) or to_array(tensor))
    state = trainer.state(copy=False)
    found = digests(state, settled=True)
    assert "model.0.weight" in state.arrays
    assert copied == []
    assert found.keys() > state.arrays.keys()
    assert state.arrays["model.0.weight"].dtype == np.float32
    assert len(copied) == 1
    more = state.arrays | {"sync.x": np.ones(2)}
    assert list(more) == [*state.arrays, "sync.x"]
    assert more.digest("model.0.weight") == found["model.0.weight"]
    assert more.digest("sync.x") == checksums.of_array(np.ones(2))


def test_resume_never_moves_older_checkpoints_aside(make, tmp_path):
    options = {"checkpoint_dir": str(tmp_path), "progress": False}
    make().fit((X, Y), epochs=3, **options)
    make().fit((X, Y), epochs=1, resume="never", **options)
    assert {path.name for path in tmp_path.iterdir()} == {"epoch-000001", "old-1"}
    assert len(make().fit((X, Y), epochs=2, **options)["loss"]) == 2


@pytest.mark.parametrize("options", [{}, {"clip_norm": 1.0}])
def test_fp16_bears_a_checkpoint_of_fp32_and_batches_in_which_nothing_counts(make, net, tmp_path, options):
    make().save(str(tmp_path / "one"))
    model = net()
    trainer = hvdtrain.Trainer.load(
        str(tmp_path / "one"), model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=torch.nn.CrossEntropyLoss(), precision="fp16", **options,
    )  # fmt: skip
    before = model[0].weight.detach().clone()
    trainer.fit((X, np.full(12, -100)), progress=False)
    assert torch.equal(before, model[0].weight)


def test_a_checkpoint_of_another_optimizer_is_refused_before_anything_changes(make, net, tmp_path):
    make().save(str(tmp_path / "one"))
    model = net()
    before = model[0].weight.detach().clone()
    with pytest.raises(CheckpointError, match=r"'SGD'.*'Adam'"):
        hvdtrain.Trainer.load(
            str(tmp_path / "one"), model, optimizer=torch.optim.Adam(model.parameters()), loss=torch.nn.MSELoss()
        )
    assert torch.equal(before, model[0].weight)


def test_what_is_loaded_and_saved_again_is_the_run_as_it_was(make, net, tmp_path):
    def load(name):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return hvdtrain.Trainer.load(str(tmp_path / name), model, optimizer=optimizer, loss=torch.nn.CrossEntropyLoss())

    model = net()
    first = make(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    stopping = EarlyStopping("loss", patience=5, restore_best=True)
    history = first.fit((X, Y), epochs=2, callbacks=[stopping], progress=False)
    best = stopping.state()
    first.save(str(tmp_path / "a"))
    load("a").save(str(tmp_path / "b"))
    again = load("b")
    assert again.history == history
    assert again.global_step == first.global_step
    goes_on = EarlyStopping("loss", patience=5, restore_best=True)
    assert len(again.fit((X, Y), epochs=2, callbacks=[goes_on], progress=False)["loss"]) == 2
    assert goes_on.state().keys() == best.keys()


def test_early_stopping_knows_the_epochs_before_a_resume(make, tmp_path):
    class Worse(Callback):
        def on_epoch_end(self, trainer, epoch, logs):
            logs["score"] = float(epoch)
            trainer.history["score"] = [float(each) for each in range(epoch + 1)]

    options = {"checkpoint_dir": str(tmp_path), "progress": False}
    stopping = EarlyStopping("score", patience=2, mode="min")
    first = make().fit((X, Y), epochs=10, callbacks=[Worse(), stopping], **options)
    again = make().fit(
        (X, Y), epochs=10, callbacks=[Worse(), EarlyStopping("score", patience=2, mode="min")], **options
    )
    assert len(first["loss"]) == len(again["loss"]) == 4
