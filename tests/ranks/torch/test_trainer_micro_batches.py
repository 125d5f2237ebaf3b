"""When one rank runs out of memory, all ranks undo the step and repeat it in smaller parts."""

from __future__ import annotations

import itertools
import logging

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import hvdtrain
import hvdtrain.torch as hvd
from hvdtrain.distributed import world

pytestmark = pytest.mark.usefixtures("hvd")

QUIET = {"progress": False, "run_dir": None}
BATCH = 6


class Take(torch.autograd.Function):
    """Raises on the last rank, in forward or backward, for more than `room` samples."""

    @staticmethod
    def forward(ctx, x, room, in_backward):
        ctx.room = room if in_backward else None
        if not in_backward:
            check(len(x), room)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.room is not None:
            check(len(gradient), ctx.room)
        return gradient, None, None


def check(rows, room):
    if rows > room:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")


class Net(nn.Module):
    """In backward, `last` has its gradient, which is sent at once, when memory runs out."""

    def __init__(self, room=None, *, in_backward=False, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.dropout = nn.Dropout(dropout)
        self.room, self.in_backward, self.seen = room, in_backward, []

    def forward(self, x):
        self.seen.append(len(x))
        hidden = torch.tanh(self.first(x))
        if self.room is not None and hvd.rank() == hvd.size() - 1:
            hidden = Take.apply(hidden, self.room, self.in_backward)
        return self.last(self.dropout(hidden))


def token_step(model, batch):
    """A mean over as many samples as the weights say; some batches have none."""
    x, y = batch
    count = int((y != 0).sum())
    losses = functional.cross_entropy(model(x), y, reduction="none") * (y != 0)
    return hvdtrain.Loss(losses.sum() / max(count, 1), count)


def data(rows):
    random = np.random.default_rng(0)
    return random.normal(size=(rows, 4)).astype(np.float32), random.integers(0, 3, rows)


def train(net, rows, *, batch_size=BATCH, callbacks=(), steps=None, source=None, **options):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    trainer = hvdtrain.Trainer(net, optimizer=optimizer, **options)
    source = data(rows) if source is None else source
    fit = {"batch_size": batch_size, "callbacks": callbacks, "steps": steps, **QUIET}
    return trainer.fit(source, epochs=2, **fit)


def alone(net, rows, **options):
    """Train one process on the global batches."""
    ranks = hvdtrain.init()
    world.use(world.SoloWorld())
    try:
        return train(net, rows, batch_size=BATCH * ranks.size, **options)
    finally:
        world.use(ranks)


def assert_equal(one, two, atol=1e-6):
    for name, value in one.state_dict().items():
        torch.testing.assert_close(two.state_dict()[name], value, atol=atol, rtol=0, msg=name)


class Shrink(hvdtrain.callbacks.Callback):
    """Leaves room for 2 samples from a step on: in the first step gradients travel alone, later in buckets."""

    def __init__(self, net, *, step):
        self.net, self.step = net, step

    def on_step_begin(self, trainer, step):
        self.net.room = 2 if trainer.global_step >= self.step else None


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize(
    ("options", "in_backward", "first"),
    [
        ({}, True, 0),
        ({"accumulate": 2, "clip_norm": 0.5}, False, 2),
        ({"step": token_step}, False, 0),
        ({"step": token_step, "accumulate": 2}, True, 2),
    ],
)
def test_a_rank_out_of_memory_changes_no_weight(assert_same_on_all_ranks, caplog, options, in_backward, first):
    rows = hvd.size() * BATCH * 2 + 4  # the last step has one or two samples a rank
    if "step" not in options:
        options = {"loss": nn.CrossEntropyLoss(), "metrics": ["accuracy"], **options}
    whole, parts = Net(), Net(in_backward=in_backward)
    expected = alone(whole, rows, **options)
    with caplog.at_level(logging.WARNING, "hvdtrain"):
        found = train(parts, rows, callbacks=[Shrink(parts, step=first)], micro_batch="auto", **options)
    assert_equal(whole, parts)
    assert_same_on_all_ranks(*parts.parameters())
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert "accuracy" not in expected or found["accuracy"] == pytest.approx(expected["accuracy"])
    told = [each.getMessage() for each in caplog.records if "out of memory" in each.getMessage()]
    if hvd.rank():
        assert not told
    else:
        assert [text.partition(" (")[0] for text in told] == [f"rank {hvd.size() - 1}"] * 2
        assert "6 samples at once. Ranks repeat the step, and compute 3 at once" in told[0]
    settled = len(parts.seen) - parts.seen[::-1].index(3)
    assert set(parts.seen[settled:]) == {1}  # of 6, then 3, on every rank


@pytest.mark.world_size(2)
def test_a_repeated_step_draws_the_same_numbers(assert_same_on_all_ranks):
    fixed, auto = Net(dropout=0.5), Net(3, in_backward=True, dropout=0.5)
    for net, micro_batch in ((fixed, 3), (auto, "auto")):
        torch.manual_seed(hvd.rank())
        train(net, 40, micro_batch=micro_batch, loss=nn.CrossEntropyLoss())
    assert_equal(fixed, auto, atol=0)
    assert_same_on_all_ranks(*auto.parameters())


@pytest.mark.world_size(2, 3)
def test_ranks_of_unequal_batches_split_alike():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            x, y = data(27)
            return iter([(x[:11], y[:11]), (x[11:12], y[11:12]), (x[12:20], y[12:20]), (x[20:], y[20:])])

    def one_process(net):
        x, y = map(torch.from_numpy, data(27))
        ends = {2: [0, 12, 27], 3: [0, 20, 27]}[hvd.size()]
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        for first, end in [*itertools.pairwise(ends)] * 2:
            optimizer.zero_grad()
            functional.cross_entropy(net(x[first:end]), y[first:end]).backward()
            optimizer.step()

    whole, parts = Net(), Net(4, in_backward=True)
    one_process(whole)
    stream = torch.utils.data.DataLoader(Stream(), batch_size=None)
    train(parts, 27, source=stream, micro_batch="auto", loss=nn.CrossEntropyLoss())
    assert_equal(whole, parts)
    assert max(hvd.allgather_object(max(parts.seen[2:]))) <= 6  # of 11 at once


@pytest.mark.world_size(2)
def test_a_run_that_resumes_within_an_epoch_keeps_the_size(tmp_path_factory):
    folder = hvd.broadcast_object(str(tmp_path_factory.mktemp("micro_batches")), root_rank=0)
    saved = [hvdtrain.callbacks.Checkpoint(folder, every_steps=1)]
    nets = [Net(3, in_backward=True, dropout=0.5) for _ in range(3)]
    options = {"micro_batch": "auto", "loss": nn.CrossEntropyLoss()}
    for net, steps, callbacks in zip(nets, (None, 2, None), ((), saved, saved), strict=True):
        torch.manual_seed(hvd.rank())
        train(net, 40, callbacks=callbacks, steps=steps, **options)
    assert_equal(nets[0], nets[2], atol=0)
    assert max(nets[2].seen) == 3


@pytest.mark.world_size(2)
def test_a_sample_that_does_not_fit_alone_is_one_error_on_every_rank():
    with pytest.raises(
        hvdtrain.errors.HvdTrainError, match=r"rank 1 \(.*\) ran out of memory with a single sample at once.*2 GiB"
    ) as caught:
        train(Net(0), 24, micro_batch="auto", loss=nn.CrossEntropyLoss())
    assert len(set(hvd.allgather_object(str(caught.value)))) == 1
