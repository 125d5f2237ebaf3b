"""Batches computed in parts, and what happens when memory runs out, on one process."""

from __future__ import annotations

import gc
import logging
import random
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import hvdtrain

pytestmark = pytest.mark.usefixtures("alone")

X = torch.randn(22, 4, generator=torch.Generator().manual_seed(1))
Y = torch.arange(22) % 3
QUIET = {"progress": False, "run_dir": None}


class Memory:
    """Holds so many samples in forward or backward; more raise."""

    def __init__(self, room, *, backward=False):
        self.room, self.backward, self.seen, self.held = room, backward, [], []

    def take(self, x):
        if len(x) > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")


class Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, memory):
        ctx.memory = memory
        memory.seen.append(len(x))
        memory.held.append(weakref.ref(x))
        if not memory.backward:
            memory.take(x)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.memory.backward:
            ctx.memory.take(gradient)
        return gradient, None


class Net(nn.Module):
    def __init__(self, memory=None, *, dropout=0.0, norm=False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.dropout, self.memory = nn.Dropout(dropout), memory

    def forward(self, x):
        hidden = self.norm(self.first(x))
        hidden = hidden if self.memory is None else Take.apply(hidden, self.memory)
        return self.last(self.dropout(torch.tanh(hidden)))


def train(net, data=(X, Y), *, steps=None, batch_size=8, callbacks=(), **options):
    options.setdefault("optimizer", torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    if "step" not in options:
        options.setdefault("loss", nn.CrossEntropyLoss())
        options.setdefault("metrics", ["accuracy"])
    trainer = hvdtrain.Trainer(net, **options)
    torch.manual_seed(5)
    fit = {"steps": steps, "batch_size": batch_size, "callbacks": callbacks, **QUIET}
    return trainer.fit(data, epochs=2, **fit)


def assert_equal(one, two, atol=1e-6):
    for name, value in one.state_dict().items():
        torch.testing.assert_close(two.state_dict()[name], value, atol=atol, rtol=0, msg=name)


@pytest.mark.parametrize("micro_batch", [1, 3, 8])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_parts_of_a_batch_take_the_step_of_the_whole(micro_batch, accumulate):
    whole, parts, memory = Net(), Net(memory := Memory(99)), memory
    targets = Y.clone()
    targets[::4] = -100  # ignored: parts have unequal counts
    expected = train(whole, (X, targets), accumulate=accumulate)
    found = train(parts, (X, targets), accumulate=accumulate, micro_batch=micro_batch)
    assert_equal(whole, parts)
    assert max(memory.seen) <= micro_batch
    for name in ("loss", "accuracy"):
        assert found[name] == pytest.approx(expected[name], rel=1e-6)


def test_parts_of_an_own_step_weigh_their_counts():
    def step(model, batch):
        mask = batch["mask"][0]
        count = int(mask.sum())
        losses = nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        return hvdtrain.Loss((losses * mask).sum() / max(count, 1), count)

    rows = [{"x": X[i], "y": Y[i], "mask": (torch.tensor(i % 3 > 0),)} for i in range(22)]
    whole, parts = Net(), Net()
    train(whole, rows, step=step)
    train(parts, rows, step=step, micro_batch=3)
    assert_equal(whole, parts)


def test_parts_of_a_step_with_several_optimizers_advance_together():
    def step(models, batch):
        x, y = batch
        yield "d", hvdtrain.Loss(nn.functional.cross_entropy(models["d"](x), y))
        yield "g", hvdtrain.Loss(nn.functional.cross_entropy(models["d"](models["g"](x)), y))

    trained = []
    for micro_batch in (None, 3):
        models = {"d": Net(), "g": nn.Linear(4, 4)}
        with torch.no_grad():
            models["g"].weight.copy_(torch.eye(4)), models["g"].bias.zero_()
        optimizers = {name: torch.optim.SGD(each.parameters(), lr=0.1) for name, each in models.items()}
        trainer = hvdtrain.Trainer(models, optimizer=optimizers, step=step, micro_batch=micro_batch)
        trainer.fit((X, Y), batch_size=8, epochs=2, **QUIET)
        trained.append(nn.ModuleDict(models))
    assert_equal(*trained)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_that_runs_out_of_memory_is_repeated_in_smaller_parts(backward, accumulate, caplog):
    memory = Memory(3, backward=backward)
    whole, parts = Net(), Net(memory)
    expected = train(whole, accumulate=accumulate)
    with caplog.at_level(logging.WARNING, "hvdtrain"):
        found = train(parts, accumulate=accumulate, micro_batch="auto")
    assert_equal(whole, parts)
    assert memory.seen[:3] == [8, 4, 2]
    assert max(memory.seen[3:]) == 2
    for name in ("loss", "accuracy"):
        assert found[name] == pytest.approx(expected[name], rel=1e-6)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert told[1].startswith("rank 0 (")
    assert "ran out of memory with 4 samples at once" in told[1]
    assert "compute 2 at once from here on" in told[1]


@pytest.mark.parametrize("backward", [False, True])
def test_a_repeated_step_draws_the_same_numbers_and_counts_a_batch_once(backward, caplog):
    trained = []
    for memory, micro_batch in ((Memory(99), 2), (Memory(3, backward=backward), "auto")):
        net = Net(memory, dropout=0.5, norm=True)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002

        def step(model, batch):
            shift = random.random() + np.random.random()  # noqa: NPY002
            return hvdtrain.Loss(nn.functional.cross_entropy(model(batch[0] + shift), batch[1]))

        history = train(net, step=step, micro_batch=micro_batch)
        trained.append((net, history["loss"]))
    (fixed, loss), (auto, same_loss) = trained
    assert loss == same_loss
    assert_equal(fixed, auto, atol=0)  # BatchNorm's statistics and their count, too
    assert caplog.text.count("BatchNorm normalizes each micro-batch of up to") == 2  # once a Trainer


@pytest.mark.parametrize("micro_batch", [1, "auto"])
def test_statistics_that_single_samples_do_not_update_are_reported(micro_batch, caplog):
    net = Net(Memory(1), norm=True)
    train(net, micro_batch=micro_batch)
    assert net.norm.num_batches_tracked == 0
    assert caplog.text.count("BatchNorm1d cannot normalize a single sample") == 1
    assert "normalizes each micro-batch of up to 1 " not in caplog.text


class Centered(Net):
    """Puts a new tensor in a buffer's place in each forward pass, as many scripts do."""

    def __init__(self, memory=None):
        super().__init__(memory)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
        return super().forward(x - self.mean)


def test_a_repeated_step_begins_with_the_buffers_of_before():
    fixed, auto = Centered(), Centered(Memory(3))
    train(fixed, micro_batch=2)
    train(auto, micro_batch="auto")
    assert_equal(fixed, auto, atol=0)


def test_a_step_that_is_skipped_leaves_a_buffer_as_it_was():
    x, net = X.clone(), Centered()
    x[:] = float("nan")
    train(net, (x, Y), nan_policy="skip")
    assert torch.equal(net.mean, torch.zeros(4))


def test_metrics_with_state_count_a_repeated_batch_once():
    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows = []

        def update(self, outputs, targets):
            self.rows.append(len(targets))

        def compute(self):
            return float(sum(self.rows))

        def reset(self):
            self.rows = []

    found = train(Net(Memory(3, backward=True)), metrics={"rows": Rows()}, micro_batch="auto")
    assert found["rows"] == [22.0, 22.0]


def test_memory_of_the_failed_attempt_is_free_before_the_step_is_repeated():
    memory = Memory(3, backward=True)

    def alive():
        gc.collect()
        return sum(each() is not None for each in memory.held[:1])

    class Watched(Net):
        def forward(self, x):
            if len(memory.seen) == 1:
                watched.append(alive())
            return super().forward(x)

    watched = []
    train(Watched(memory), micro_batch="auto")
    assert watched == [0]


@pytest.mark.parametrize("options", [{"nan_policy": "skip"}, {"nan_policy": "raise", "clip_norm": 0.5}])
def test_other_options_of_a_step_hold(options):
    whole, parts = Net(), Net(Memory(3, backward=True))
    train(whole, **options)
    train(parts, micro_batch="auto", **options)
    assert_equal(whole, parts)


def test_a_sample_that_does_not_fit_alone_is_an_error():
    with pytest.raises(
        hvdtrain.errors.HvdTrainError, match=r"rank 0 \(.*\) ran out of memory with a single sample at once"
    ) as caught:
        train(Net(Memory(0)), micro_batch="auto")
    assert "Tried to allocate 2 GiB" in str(caught.value)


def test_without_the_option_the_error_names_it():
    with pytest.raises(torch.OutOfMemoryError, match=r'Tried to allocate 2 GiB.\n.*micro_batch="auto"'):
        train(Net(Memory(3)))


@pytest.mark.parametrize(
    "error", [RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), MemoryError(), RuntimeError("odd")]
)
def test_which_errors_are_of_memory(error):
    class Raising(Memory):
        def take(self, x):
            if len(x) > 3:
                raise error

    if str(error) == "odd":
        with pytest.raises(RuntimeError, match="odd"):
            train(Net(Raising(3)), micro_batch="auto")
    else:
        train(Net(Raising(3)), micro_batch="auto")


def test_an_error_of_the_optimizer_is_not_repeated():
    class Hungry(torch.optim.SGD):
        def step(self, closure=None):
            raise torch.OutOfMemoryError("CUDA out of memory.")

    net = Net()
    with pytest.raises(torch.OutOfMemoryError):
        train(net, optimizer=Hungry(net.parameters(), lr=0.1), micro_batch="auto")


@pytest.mark.parametrize("micro_batch", ["auto", 2])
@pytest.mark.parametrize("extra", [57, torch.tensor(57), torch.zeros(5, 5), "text", ["a", "b"]])
def test_a_batch_that_is_not_one_row_per_sample_is_refused(micro_batch, extra):
    def step(model, batch):
        return hvdtrain.Loss(nn.functional.cross_entropy(model(batch["x"]), batch["y"]))

    data = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(X, Y),
        batch_size=8,
        collate_fn=lambda rows: {
            "x": torch.stack([x for x, _ in rows]),
            "y": torch.stack([y for _, y in rows]),
            "extra": extra,
        },
    )
    with pytest.raises(TypeError, match=r"one row per sample.*a dict of x \(8, 4\) float32.*of 8 samples on rank 0"):
        train(Net(), data, step=step, micro_batch=micro_batch)


def test_what_cannot_be_repeated_is_refused():
    nets = {"d": Net(), "g": Net()}
    optimizers = {name: torch.optim.SGD(each.parameters(), lr=0.1) for name, each in nets.items()}
    with pytest.raises(ValueError, match=r"With several optimizers a step cannot be repeated.*Use micro_batch=N"):
        hvdtrain.Trainer(nets, optimizer=optimizers, step=lambda models, batch: None, micro_batch="auto")
    net = nn.Sequential(nn.Linear(4, 3), hvdtrain.torch.SyncBatchNorm(3))
    with pytest.raises(ValueError, match=r"With SyncBatchNorm a step cannot be repeated.*Use micro_batch=N"):
        train(net, micro_batch="auto")


def test_parts_of_a_step_with_a_closure_take_the_step_of_the_whole():
    whole, parts = Net(), Net()
    for net, micro_batch in ((whole, None), (parts, 3)):
        train(net, optimizer=torch.optim.LBFGS(net.parameters(), max_iter=3), micro_batch=micro_batch)
    assert_equal(whole, parts, atol=1e-5)
    with pytest.raises(ValueError, match=r"LBFGS computes loss and gradient several times.*micro_batch='auto'"):
        train(parts, optimizer=torch.optim.LBFGS(parts.parameters()), micro_batch="auto")


@pytest.mark.parametrize("value", ["all", 0, 1.5, True])
def test_a_size_that_is_none_is_refused(value):
    with pytest.raises(ValueError, match=r"micro_batch must be"):
        train(Net(), micro_batch=value)


def test_a_resumed_run_keeps_the_size_that_fits(tmp_path):
    straight, stopped, resumed = Memory(3), Memory(3), Memory(3)
    saved = [hvdtrain.callbacks.Checkpoint(str(tmp_path), every_steps=1)]
    nets = Net(straight, dropout=0.5), Net(stopped, dropout=0.5), Net(resumed, dropout=0.5)
    train(nets[0], micro_batch="auto")
    train(nets[1], micro_batch="auto", callbacks=saved, steps=2)
    train(nets[2], micro_batch="auto", callbacks=saved)
    assert_equal(nets[0], nets[2], atol=0)
    assert max(resumed.seen) == 2  # memory does not run out again
