"""Optimizers that need a closure, such as LBFGS, on one process: they train as in plain torch, and resume."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import hvdtrain
from hvdtrain.callbacks import Callback, Checkpoint

pytestmark = pytest.mark.usefixtures("make")  # one process alone

GENERATOR = np.random.default_rng(0)
X, Y = GENERATOR.normal(size=(22, 4)), GENERATOR.integers(0, 3, 22)
QUIET = {"progress": False, "run_dir": None}
LOSS = torch.nn.CrossEntropyLoss()


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).double()


def lbfgs(net, **options):
    return torch.optim.LBFGS(net.parameters(), **{"lr": 0.5, "max_iter": 4, "history_size": 3, **options})


def trainer(net, **options):
    search = options.pop("line_search_fn", "strong_wolfe")
    return hvdtrain.Trainer(net, optimizer=lbfgs(net, line_search_fn=search), loss=LOSS, **options)


def plain(net, rows, epochs, **options):
    """Train in plain torch; return the losses that each step began with, of each epoch."""
    optimizer, losses = lbfgs(net, **options), []
    for epoch in range(epochs):
        order = hvdtrain.sampling.epoch_order(len(X), epoch=epoch)
        for chosen in np.split(order, range(rows, len(X), rows)):
            x, y = torch.from_numpy(X[chosen]), torch.from_numpy(Y[chosen])

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = LOSS(net(x), y)
                loss.backward()
                return loss

            losses.append((optimizer.step(closure).item(), len(x)))
    return losses


@pytest.mark.parametrize("line_search_fn", [None, "strong_wolfe"])
@pytest.mark.parametrize(("accumulate", "micro_batch"), [(1, None), (2, 3)])
def test_it_trains_as_in_plain_torch(line_search_fn, accumulate, micro_batch):
    ours, alone = model(), model()
    options = {"accumulate": accumulate, "micro_batch": micro_batch, "metrics": ["accuracy"]}
    run = trainer(ours, line_search_fn=line_search_fn, **options)
    history = run.fit((X, Y), epochs=3, batch_size=4, **QUIET)
    losses = plain(alone, 4 * accumulate, 3, line_search_fn=line_search_fn)
    for one, other in zip(ours.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-7)
    last = losses[-len(losses) // 3 :]  # metrics count the first evaluation of each step
    assert history["loss"][-1] == pytest.approx(sum(loss * count for loss, count in last) / len(X), rel=1e-6)


def test_a_run_that_stops_within_an_epoch_resumes_with_the_same_bits(tmp_path):
    class Stop(Callback):
        def on_step_end(self, trainer, step):
            if trainer.global_step == 8:
                raise KeyboardInterrupt

    straight, resumed = model(), model()
    trainer(straight).fit((X, Y), epochs=3, batch_size=4, **QUIET)
    saved = Checkpoint(tmp_path, every_steps=7)
    with pytest.raises(KeyboardInterrupt):
        trainer(model()).fit((X, Y), epochs=3, batch_size=4, callbacks=[saved, Stop()], **QUIET)
    trainer(resumed).fit((X, Y), epochs=3, batch_size=4, callbacks=[saved], **QUIET)
    assert all(map(torch.equal, resumed.parameters(), straight.parameters()))


def test_a_step_in_which_no_label_counts_changes_nothing():
    net = model()
    before = [each.detach().clone() for each in net.parameters()]
    trainer(net).fit((X, np.full_like(Y, -100)), batch_size=4, **QUIET)
    assert all(map(torch.equal, before, net.parameters()))


def test_any_optimizer_whose_step_needs_a_closure_gets_one():
    class Halve(torch.optim.Optimizer):
        """Halves weights as long as the loss falls."""

        def __init__(self, params):
            super().__init__(params, {"lr": 1.0})
            self.losses = []

        def step(self, closure):
            self.losses.append([float(closure()), float(closure())])
            assert self.param_groups[0]["params"][0].grad is not None

    net = model()
    optimizer = Halve(net.parameters())
    hvdtrain.Trainer(net, optimizer=optimizer, loss=LOSS).fit((X, Y), batch_size=22, **QUIET)
    expected = float(LOSS(net(torch.from_numpy(X)), torch.from_numpy(Y)).detach())
    assert optimizer.losses == [[pytest.approx(expected)] * 2]


@pytest.mark.parametrize(
    ("option", "received"),
    [
        ({"clip_norm": 1.0}, r"clip_norm=1\.0"),
        ({"nan_policy": "skip"}, "nan_policy='skip'"),
        ({"precision": "fp16"}, "precision='fp16'"),
        ({"micro_batch": "auto"}, "micro_batch='auto'"),
    ],
)
def test_what_it_cannot_be_combined_with_is_refused_with_the_reason(option, received):
    with pytest.raises(ValueError, match=f"LBFGS computes loss and gradient several times.*Received: {received}"):
        trainer(model(), **option)
    with pytest.raises(ValueError, match=r"step yields each loss once.*several optimizers"):
        hvdtrain.Trainer({"a": (net := model())}, optimizer={"a": lbfgs(net)}, step=lambda models, batch: None)
