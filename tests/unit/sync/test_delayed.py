"""The gradient of the step before, in one process; tests/ranks/torch/test_trainer_delayed.py has several ranks."""

from __future__ import annotations

import re

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import hvdtrain  # noqa: E402
import hvdtrain.torch as hvd  # noqa: E402
from hvdtrain.callbacks import Callback, Checkpoint, EarlyStopping  # noqa: E402
from hvdtrain.data import sharding  # noqa: E402
from hvdtrain.errors import HvdTrainError, NonFiniteError  # noqa: E402
from hvdtrain.sync import as_strategy  # noqa: E402

pytestmark = pytest.mark.usefixtures("alone")

SAMPLES, BATCH = 22, 4


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(SAMPLES, 4, generator=generator), torch.arange(SAMPLES) % 3


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


def fit(net, train=None, *, epochs=2, callbacks=(), **options):
    options.setdefault("optimizer", torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    options.setdefault("loss", torch.nn.CrossEntropyLoss())
    trainer = hvdtrain.Trainer(net, sync=hvdtrain.Delayed(), **options)
    how = {"batch_size": BATCH, "progress": False, "run_dir": None, "callbacks": callbacks}
    trainer.fit(train or data(), epochs=epochs, **how)
    return trainer


def delayed_loop(net, *, epochs=2, leave_out=()):
    """Apply each gradient one step late; `leave_out` holds the numbers of gradients that are not applied."""
    x, y = data()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    before, number = None, 0

    def apply(gradients):
        if gradients is not None:
            for parameter, gradient in zip(net.parameters(), gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()

    for epoch in range(epochs):
        order = sharding.epoch_order(SAMPLES, epoch=epoch, seed=0)
        for begin in range(0, SAMPLES, BATCH):
            rows = order[begin : begin + BATCH]
            loss = torch.nn.functional.cross_entropy(net(x[rows]), y[rows])
            gradients = torch.autograd.grad(loss, list(net.parameters()))
            apply(before)
            before = None if number in leave_out else gradients
            number += 1
    apply(before)
    return list(net.parameters())


def assert_close(net, expected):
    for ours, theirs in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_one_process_delays_each_gradient_by_a_step(precision):
    net = model()
    fit(net, precision=precision)
    if precision == "fp32":
        assert_close(net, delayed_loop(model()))
    else:
        for ours, theirs in zip(net.parameters(), delayed_loop(model()), strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=0)


def test_the_first_step_changes_nothing_and_the_last_gradient_is_applied_at_the_end():
    net, seen = model(), []

    class Weights(Callback):
        def on_step_end(self, trainer, step):
            seen.append(net[0].weight.detach().clone())

    first = net[0].weight.detach().clone()
    trainer = fit(net, epochs=1, callbacks=[Weights()])
    assert torch.equal(seen[0], first)
    assert not torch.equal(seen[1], first)
    assert not torch.equal(net[0].weight, seen[-1])
    assert not any(name.startswith("sync.") for name in trainer.state().arrays)


def test_a_gradient_is_unscaled_by_the_loss_scale_that_it_was_made_with():
    """The scale falls when a gradient is not finite, and the next gradient is already made with the old one."""
    net = model()
    steps = iter(range(100))

    def step(model, batch):
        inputs, targets = batch
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        if next(steps) == 3:  # forward is finite, the gradient is not
            loss = loss + (model[0].weight * 0.0).sqrt().sum() * 0.0 + _overflow(loss)
        return hvdtrain.Loss(loss)

    trainer = fit(net, loss=None, step=step, precision="fp16")
    assert trainer._adapter._update.scaler.get_scale() < 65536.0
    for ours, theirs in zip(net.parameters(), delayed_loop(model(), leave_out=(3,)), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=0)


def _overflow(loss):
    huge = torch.ones((), requires_grad=True)
    return loss * 0.0 + (loss * 1e38).detach() * 0.0 + huge * 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"micro_batch": "auto"}, "With sync=Delayed, no step waits for other ranks. Received: micro_batch='auto'"),
        ({"net": torch.nn.Sequential(torch.nn.Linear(4, 3), hvd.SyncBatchNorm(3))}, "Received: SyncBatchNorm: "),
    ],
)
def test_what_makes_ranks_wait_within_a_step_is_refused(options, message):
    net = options.pop("net", None) or model()
    with pytest.raises(ValueError, match=re.escape(message)):
        fit(net, **options)


def test_an_optimizer_with_a_closure_is_refused():
    net = model()
    with pytest.raises(ValueError, match=r"With sync=Delayed.*an optimizer that needs a closure"):
        fit(net, optimizer=torch.optim.LBFGS(net.parameters()))


def test_sparse_gradients_are_refused_by_name():
    net = torch.nn.Sequential(torch.nn.Embedding(8, 4, sparse=True), torch.nn.Flatten(), torch.nn.Linear(4, 3))
    x = np.arange(8)[:, None]
    with pytest.raises(HvdTrainError, match=r"sync=Delayed\(\) averages dense.*sparse gradient of 0\.weight on rank 0"):
        fit(net, (torch.from_numpy(x), torch.arange(8) % 3), optimizer=torch.optim.SGD(net.parameters(), lr=0.1))


def test_it_comes_back_from_the_options_of_a_checkpoint():
    assert as_strategy(hvdtrain.Delayed().config) == hvdtrain.Delayed()


class Poison(Callback):
    """Makes the gradient of one step infinite."""

    def __init__(self, net, at):
        self.taken, self.faults = [], 0
        net[2].bias.register_hook(lambda grad: grad * float("inf") if self.trainer.global_step == at else grad)

    def on_fit_begin(self, trainer):
        self.trainer = trainer

    def on_step_end(self, trainer, step):
        self.taken.append(trainer.step_taken)


@pytest.mark.parametrize("at", [2, 11])  # within the run, and in its last step, whose gradient `finish` applies
def test_a_gradient_that_is_not_finite_is_left_out_one_step_later(at, caplog):
    net = model()
    poison = Poison(net, at)
    fit(net, nan_policy="skip", callbacks=[poison])
    assert_close(net, delayed_loop(model(), leave_out=(at,)))
    assert [index for index, taken in enumerate(poison.taken) if not taken] == ([at + 1] if at < 11 else [])
    assert "Skipped" in caplog.text
    assert ("The last step: on rank 0 (" in caplog.text) == (at == 11)


def test_the_error_after_a_resume_says_that_the_checkpoint_held_the_gradient(tmp_path):
    def train():
        net = model()
        fit(net, nan_policy="raise", callbacks=[Poison(net, 2), Checkpoint(tmp_path, every_steps=1, keep_last=None)])

    with pytest.raises(NonFiniteError, match="on rank 0"):
        train()
    with pytest.raises(NonFiniteError, match=r"2.bias is not finite. It was in flight when the checkpoint was saved"):
        train()


def test_a_layer_that_is_frozen_does_not_move_by_a_gradient_of_before():
    net, weights = model(), []

    class Freeze(Callback):
        def on_step_end(self, trainer, step):
            if trainer.global_step >= 3:
                net[0].requires_grad_(False)
                weights.append(net[0].weight.detach().clone())

    fit(net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), callbacks=[Freeze()])
    assert all(torch.equal(each, weights[0]) for each in weights)
    assert torch.equal(net[0].weight, weights[0])


def test_the_error_names_the_samples_of_the_step_before():
    net = model()
    order = sharding.epoch_order(SAMPLES, epoch=0, seed=0)
    samples = ", ".join(map(str, order[8:12]))
    with pytest.raises(NonFiniteError, match=f"a step later: on rank 0 .*2.bias is not finite, .*{samples}"):
        fit(net, nan_policy="raise", callbacks=[Poison(net, 2)])


def test_a_step_that_is_skipped_leaves_running_statistics_finite():
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))
    x, y = data()
    x[0] = float("nan")
    trainer = fit(net, (x, y), nan_policy="skip", epochs=1)
    assert all(bool(each.isfinite().all()) for each in net.state_dict().values())
    assert np.isfinite(trainer.history["loss"]).all()


@pytest.mark.parametrize("epochs", [20, 2])  # patience ends the first run; the second one's last epoch is the best
def test_the_best_weights_are_restored_without_the_gradient_that_was_in_flight(epochs):
    net, held_out = model(), tuple(each[:7] for each in data())
    trainer = hvdtrain.Trainer(
        net, optimizer=torch.optim.SGD(net.parameters(), lr=3.0, momentum=0.9), loss=torch.nn.CrossEntropyLoss(),
        sync=hvdtrain.Delayed(),
    )  # fmt: skip
    stop = EarlyStopping("val_loss", patience=1, restore_best=True)
    options = {"epochs": epochs, "batch_size": BATCH, "progress": False, "run_dir": None, "callbacks": [stop]}
    history = trainer.fit(data(), validation=held_out, **options)
    assert len(history["val_loss"]) < 20
    assert trainer.evaluate(held_out)["loss"] == pytest.approx(min(history["val_loss"]), rel=1e-5)
