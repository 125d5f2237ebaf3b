"""What the Trainer must get right in torch alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import hvdtrain
import hvdtrain.torch as hvd
from hvdtrain.callbacks import EarlyStopping, SyncCheck
from hvdtrain.torch.ops import engine

X = np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32)
Y = np.arange(9) % 3


pytestmark = pytest.mark.usefixtures("hvd")


def all_equal(model):
    flat = torch.cat([each.detach().double().reshape(-1) for each in (*model.parameters(), *model.buffers())])
    return all(torch.equal(each, flat) for each in hvd.allgather(flat[None]))


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("kind", [hvd.SyncBatchNorm, torch.nn.SyncBatchNorm], ids=["ours", "torch's"])
def test_sync_batch_norm_in_the_trainer_equals_one_process(kind):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), kind(5), torch.nn.Linear(5, 3))
    alone = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3))
    model.load_state_dict(alone.state_dict())
    x, y = X[:4], Y[:4]  # one step, shared out evenly or not
    loss = torch.nn.CrossEntropyLoss()
    trainer = hvdtrain.Trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=loss)
    trainer.fit((x, y), epochs=1, batch_size=4, progress=False)
    assert all_equal(model)
    line = "torch.nn.SyncBatchNorm -> hvdtrain.torch.SyncBatchNorm: 1 layer, 1 first"
    assert (line in trainer.decisions) == (kind is torch.nn.SyncBatchNorm and hvd.rank() == 0)
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    loss(alone(torch.from_numpy(x)), torch.from_numpy(y)).backward()
    plain.step()
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.world_size(2, 3)
def test_sync_batch_norm_with_an_empty_last_step_does_not_hang():
    model = torch.nn.Sequential(hvd.SyncBatchNorm(5), torch.nn.Flatten(), torch.nn.Linear(20, 3))
    trainer = hvdtrain.Trainer(
        model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=torch.nn.CrossEntropyLoss()
    )
    rows = 4 * hvd.size() + 1  # the last step has a sample for rank 0 alone
    x = np.random.default_rng(1).normal(size=(rows, 5, 4)).astype(np.float32)
    trainer.fit((x, np.zeros(rows, np.int64)), epochs=1, batch_size=4, progress=False)
    assert all_equal(model)


@pytest.mark.world_size(2)
def test_statistics_of_a_layer_that_comes_again_are_each_ranks_own_by_all_its_names():
    torch.manual_seed(0)
    norm = torch.nn.BatchNorm1d(4)
    norm.register_buffer("table", torch.ones(4), persistent=False)  # in no checkpoint
    net = torch.nn.Sequential(norm, torch.nn.Linear(4, 4), norm)
    trainer = hvdtrain.Trainer(net, optimizer=torch.optim.SGD(net.parameters(), 0.1), loss=torch.nn.MSELoss())
    best = EarlyStopping("val_loss", mode="max", patience=9, restore_best=True)  # that of the first step
    data = torch.randn(64, 4), torch.zeros(64, 4)
    of_fit = {"epochs": 1, "batch_size": 8, "run_dir": None, "progress": False, "callbacks": [best, SyncCheck(1)]}
    trainer.fit(data, validation=data, validate_every=1, **of_fit)
    losses = [each["val_loss"] for each in trainer.history.validations]
    assert losses[0] == max(losses)
    assert trainer.evaluate(data)["loss"] == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.world_size(2, 3)
def test_buffers_that_nothing_changes_stay_as_they_are():
    class Masked(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 3)
            self.register_buffer("mask", torch.full((3,), torch.finfo(torch.float32).min))
            self.register_buffer("third", torch.tensor(1 / 3), persistent=False)
            self.register_buffer("flag", torch.tensor(True))
            self.register_buffer("freqs", torch.polar(torch.ones(3), torch.arange(3.0)), persistent=False)
            self.register_buffer("tenth", torch.tensor(0.1, dtype=torch.float64))  # three of them have another mean

        def forward(self, x):
            return self.layer(x) + 0 * self.third

    model = Masked()
    with torch.no_grad():
        model.third += hvd.rank()
    trainer = hvdtrain.Trainer(
        model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=torch.nn.CrossEntropyLoss()
    )
    trainer.fit((X, Y), epochs=3, batch_size=2, progress=False)
    assert (model.mask == torch.finfo(torch.float32).min).all()
    assert model.third == torch.tensor(1 / 3)
    assert model.flag
    assert torch.equal(model.freqs, torch.polar(torch.ones(3), torch.arange(3.0)))
    assert model.tenth == torch.tensor(0.1, dtype=torch.float64)


class Rotated(torch.nn.Module):
    """Multiplies by complex weights, as layers in the frequency domain do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 6)
        self.single = torch.nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.wide = torch.nn.Parameter(torch.randn(3, dtype=torch.complex128))

    def forward(self, x):
        z = torch.view_as_complex(self.layer(x).view(-1, 3, 2))
        return (z * self.single * self.wide).abs().float()


COMPLEX = [
    ({}, 1e-6),
    ({"clip_norm": 0.1, "nan_policy": "skip"}, 1e-6),
    ({"compression": "bf16"}, 1e-2),
    ({"sync": hvdtrain.LocalSGD(2, within="host")}, 1e-6),
]


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("number", range(len(COMPLEX)))
def test_complex_weights_train_as_in_one_process(number):
    options, near = COMPLEX[number]
    model, alone = Rotated(), Rotated()
    trainer = hvdtrain.Trainer(
        model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=torch.nn.CrossEntropyLoss(), **options
    )
    trainer.fit((X, Y), epochs=3, batch_size=9, progress=False)  # one step an epoch, of uneven shares
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    for _ in range(3):
        plain.zero_grad()
        torch.nn.CrossEntropyLoss()(alone(torch.from_numpy(X)), torch.from_numpy(Y)).backward()
        if "clip_norm" in options:
            torch.nn.utils.clip_grad_norm_(alone.parameters(), options["clip_norm"])
        plain.step()
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=near, rtol=1e-5)
    weights = torch.cat([torch.view_as_real(model.single.detach()).double(), torch.view_as_real(model.wide.detach())])
    assert all(torch.equal(each, weights) for each in hvd.allgather(weights[None]))


@pytest.mark.world_size(2, 3)
def test_targets_that_do_not_count_weigh_nothing_on_any_rank():
    targets = np.where(np.arange(9) < 5, -100, Y)
    torch.manual_seed(0)
    model, alone = (torch.nn.Linear(4, 3) for _ in range(2))
    alone.load_state_dict(model.state_dict())
    weight = torch.tensor([1.0, 2.0, 0.5])
    options = {"lr": 0.1, "momentum": 0.9}
    trainer = hvdtrain.Trainer(
        model, optimizer=torch.optim.SGD(model.parameters(), **options), loss=torch.nn.CrossEntropyLoss(weight=weight)
    )
    trainer.fit((X, targets), epochs=2, batch_size=9, progress=False)
    plain = torch.optim.SGD(alone.parameters(), **options)
    for _ in range(2):
        plain.zero_grad()
        torch.nn.CrossEntropyLoss(weight=weight)(alone(torch.from_numpy(X)), torch.from_numpy(targets)).backward()
        plain.step()
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)


class Shared(torch.nn.Module):
    """Uses one layer three times, each time in a reentrant checkpoint: backward adds to its gradient three times."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.block, self.last = torch.nn.Linear(4, 300), torch.nn.Linear(300, 300), torch.nn.Linear(300, 3)

    def forward(self, x):
        x = self.first(x)
        for _ in range(3):
            x = torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=True)
        return self.last(x)


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_layer_in_several_reentrant_checkpoints_trains_as_in_one_process(accumulate):
    model, alone = Shared(), Shared()
    trainer = hvdtrain.Trainer(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        loss=torch.nn.CrossEntropyLoss(),
        accumulate=accumulate,
    )
    batch_size = 9 if accumulate == 1 else 3  # one step an epoch, of uneven shares
    trainer.fit((X, Y), epochs=4, batch_size=batch_size, progress=False)
    plain = torch.optim.SGD(alone.parameters(), lr=0.01, momentum=0.9)
    for _ in range(4):
        plain.zero_grad()
        torch.nn.CrossEntropyLoss()(alone(torch.from_numpy(X)), torch.from_numpy(Y)).backward()
        plain.step()
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
    assert all_equal(model)


@pytest.mark.world_size(2)
def test_the_trainer_sends_gradients_during_backward_from_the_third_step_on(monkeypatch):
    model = torch.nn.Sequential(*(torch.nn.Linear(*sizes) for sizes in ((4, 400), (400, 400), (400, 3))))
    trainer = hvdtrain.Trainer(
        model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=torch.nn.CrossEntropyLoss()
    )
    native, sent, seen = engine.native(), [], []
    send = native.allreduce_async_

    def record(tensor, name=None, **options):
        sent.append(name)
        return send(tensor, name=name, **options)

    class Clear(hvdtrain.callbacks.Callback):
        def on_step_begin(self, trainer, step):
            sent.clear()

    def first_layer(gradient):  # backward makes its gradient last
        seen.append("1.weight" in sent)
        return gradient

    monkeypatch.setattr(native, "allreduce_async_", record)
    model[0].weight.register_hook(first_layer)
    trainer.fit((X[:8], Y[:8]), epochs=1, batch_size=1, progress=False, callbacks=[Clear()])
    assert seen == [False, False, True, True]  # hooks come after the first, and count in the second


@pytest.mark.world_size(2)
def test_without_the_trainer_such_a_layer_is_an_error_with_the_way_that_works():
    model = Shared()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    with pytest.raises(AssertionError, match=r"The gradient of block\.\w+ was computed.*use_reentrant=False"):
        model(torch.from_numpy(X)).sum().backward()
    optimizer._hvd_reducer.forget()


def head_trainer(model, parameters):
    return hvdtrain.Trainer(
        model, optimizer=torch.optim.SGD(parameters, lr=0.1), loss=torch.nn.CrossEntropyLoss(), seed=0
    )


@pytest.mark.world_size(2)
def test_two_trainers_train_one_model_in_turn_and_between_fits_a_rank_may_compute_gradients_alone():
    """As transfer learning does: the head first, then all layers."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    alone = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    alone.load_state_dict(model.state_dict())
    x, y = X[:8], Y[:8]  # each epoch is one step
    head, whole = head_trainer(model, model[2].parameters()), head_trainer(model, model.parameters())
    for trainer in (head, whole, head):
        trainer.fit((x, y), epochs=2, batch_size=4, progress=False)
        if hvd.rank() == 0:
            for _ in range(2):
                model(torch.from_numpy(x)).sum().backward()
            model.zero_grad()
    for parameters in (alone[2].parameters(), alone.parameters(), alone[2].parameters()):
        plain = torch.optim.SGD(parameters, lr=0.1)
        for _ in range(2):
            alone.zero_grad()
            torch.nn.CrossEntropyLoss()(alone(torch.from_numpy(x)), torch.from_numpy(y)).backward()
            plain.step()
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
    assert all_equal(model)
