"""Steps that close before every rank is done: what is learned, what comes back, how a run is repeated and resumed.

No test waits for a time: a rank that stalls does so until the other ranks have closed its steps.
"""

from __future__ import annotations

import itertools
import re
import time

import numpy as np
import pytest
import torch
import trainer_kit as kit
from torch.nn.functional import cross_entropy, one_hot
from trainer_kit import BATCH, assert_close, data, model

import hvdtrain
import hvdtrain.torch as hvd
from hvdtrain import callbacks
from hvdtrain.callbacks import Callback, Checkpoint
from hvdtrain.errors import CheckpointError, HvdTrainError

ACCUMULATE, SAMPLES = 3, 131
STALLS = {1: 3, 5: 1, 8: 2}  # before this step of a fit, rank 1 stalls until so many steps have closed


class Rows(torch.utils.data.Dataset):
    """Samples by index; to read one may take a rank until other ranks have closed some steps without it."""

    def __init__(self, world, stalls):
        self.x, self.y = data(SAMPLES)
        self.world, self.stalls, self.trainer = world, dict(stalls), None
        self.is_read_by_steps = False  # ranks read some samples before, to compare them

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        if self.world.rank == 1 and self.is_read_by_steps:
            wait_for_others(self.trainer, self.stalls.pop(self.trainer.global_step, 0))
        return self.x[index], self.y[index]


class StepsBegin(Callback):
    def __init__(self, rows):
        self.rows = rows

    def on_epoch_begin(self, trainer, epoch):
        self.rows.is_read_by_steps = True


def wait_for_others(trainer, steps):
    if not steps:
        return
    exchange = trainer._adapter._open_steps._exchange
    behind = exchange._closed + steps
    until = time.monotonic() + 30
    while exchange._closed < behind:
        assert time.monotonic() < until, f"other ranks closed {exchange._closed} steps, and not {behind}"
        time.sleep(0.001)


def fit(net, world, *, stalls=STALLS, hooks=(), epochs=2, cutoff=0.5, rows=None, loader=None, where="data", **options):
    """Train; rank 1 stalls in its data, or in a forward pass, which it then leaves out."""
    rows = Rows(world, stalls if where == "data" else {}) if rows is None else rows
    in_forward = dict(stalls if where == "forward" and world.rank == 1 else {})
    net.register_forward_pre_hook(lambda *_: wait_for_others(rows.trainer, in_forward.pop(trainer.global_step, 0)))
    trainer = rows.trainer = kit.make_trainer(net, cutoff=cutoff, accumulate=ACCUMULATE, **options)
    trainer.taken = taken = []  # the samples that this rank has contributed, step by step
    whole = trainer._adapter.open_step

    def open_step(step):
        whole(step)
        taken.append([int(index) for batch in step.batches for index in batch.indices])

    trainer._adapter.open_step = open_step
    hooks = [StepsBegin(rows), *hooks]
    return kit.run(trainer, rows if loader is None else loader(rows), hooks=hooks, epochs=epochs)


def flat(lists):
    return list(itertools.chain.from_iterable(lists))


def everybodys_steps(world, trainer):
    """Return the samples of each step, over all ranks."""
    by_rank = world.allgather_object(trainer.taken, name="taken")
    return [flat(parts) for parts in zip(*by_rank, strict=True)]


def one_process(net, steps, *, weight=None, clip_norm=None):
    """Train on the samples of each step at once."""
    x, y = data(SAMPLES)
    optimizer = kit.OPTIMIZERS["momentum"](net)
    for rows in steps:
        loss, _ = kit.mean_loss(net, (x[rows], y[rows]), weight)
        kit.take_step(net, optimizer, loss, clip_norm)
    return net


def weights(net):
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()]).numpy()


def ignoring(labels):
    return (labels != 2).float()


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize(
    ("options", "how", "atol"),
    [
        ({}, {}, 2e-6),
        ({"clip_norm": 0.05}, {"clip_norm": 0.05}, 2e-6),
        ({"loss": torch.nn.CrossEntropyLoss(ignore_index=2)}, {"weight": ignoring}, 2e-6),
        ({"loss": lambda outputs, y: cross_entropy(outputs, y)}, {}, 2e-6),  # a plain function
        ({"compression": "fp16"}, {}, 2e-3),
        ({"compression": "bf16"}, {}, 2e-2),
    ],
)
def test_the_mean_of_a_step_is_that_of_what_ranks_have_contributed(world, options, how, atol, assert_same_on_all_ranks):
    net = model()
    trainer = fit(net, world, **options)
    steps = everybodys_steps(world, trainer)
    assert_close(net, one_process(model(), steps, **how), atol)
    assert_same_on_all_ranks(*net.parameters())
    # Those that closed while rank 1 stalled. A slow machine cuts other steps too, and later stalls come elsewhere.
    assert {1, 2, 3} <= set(trainer.history.cutoffs)
    assert trainer.history.cutoffs[2][1] == 0


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("where", ["data", "forward"])
def test_every_sample_is_used_once_an_epoch_and_counted_once(world, where):
    trainer = fit(model(), world, metrics=["accuracy"], where=where)
    assert trainer.history.cutoffs
    steps = everybodys_steps(world, trainer)
    epochs = np.cumsum([len(rows) for rows in steps])
    assert (epochs == SAMPLES).sum() == 1
    first = int(np.flatnonzero(epochs == SAMPLES)[0]) + 1
    for used in (steps[:first], steps[first:]):
        assert sorted(flat(used)) == list(range(SAMPLES))
    x, y = data(SAMPLES)
    net, right = model(), []
    optimizer = kit.OPTIMIZERS["momentum"](net)
    for rows in steps[:first]:
        outputs = net(x[rows])
        right += (outputs.argmax(1) == y[rows]).tolist()
        kit.take_step(net, optimizer, cross_entropy(outputs, y[rows]))
    assert trainer.history["accuracy"][0] == pytest.approx(np.mean(right))


@pytest.mark.world_size(2)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_by_element_is_a_mean_or_a_sum_of_what_came(world, reduction):
    class Numbers(Rows):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return x, one_hot(y, 3).float()

    net = model()
    loss = torch.nn.MSELoss(reduction=reduction)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    trainer = fit(net, world, rows=Numbers(world, STALLS), loss=loss, optimizer=optimizer)
    plain, (x, y) = model(), data(SAMPLES)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    for rows in everybodys_steps(world, trainer):
        kit.take_step(plain, optimizer, loss(plain(x[rows]), one_hot(y[rows], 3).float()))
    assert_close(net, plain)


@pytest.mark.world_size(2)
def test_no_step_keeps_the_losses_of_those_before(world):
    trainer = kit.fit(model(), "sgd", data(96), accumulate=2, cutoff=1.0)
    assert len(trainer._adapter._update.step.losses) <= 2


@pytest.mark.world_size(2)
def test_samples_that_count_nothing_are_no_error_where_others_were_cut_off(world):
    """Rank 0's first step has no count, and rank 1, whose samples count, is cut off in it."""
    steps = iter(range(1000))

    def step(net, batch):
        x, y = batch
        count = 0.0 if world.rank == 0 and next(steps) < ACCUMULATE else float(len(y))
        return hvdtrain.Loss(cross_entropy(net(x), y), count)

    trainer = fit(model(), world, loss=None, step=step, stalls={0: 1}, epochs=1)
    assert trainer.history.cutoffs[0] == [ACCUMULATE, 0]


@pytest.mark.world_size(2)
def test_parameters_that_are_added_during_a_fit_are_refused(world):
    net = model()
    optimizer = torch.optim.SGD(net[0].parameters(), lr=0.1)

    class Add(Callback):
        def on_step_end(self, trainer, step):
            if trainer.global_step == 2:
                optimizer.add_param_group({"params": list(net[-1].parameters())})

    with pytest.raises(HvdTrainError, match=r"Received: 4 parameters on rank \d, 2 when it began"):
        fit(net, world, stalls={}, cutoff=1.0, optimizer=optimizer, hooks=[Add()])


@pytest.mark.world_size(2)
def test_counts_of_an_own_step_weigh_what_came(world):
    def count(labels):
        return 100.0 * (labels + 1).float()

    net = model()
    trainer = fit(net, world, loss=None, step=kit.own_step(count))
    assert_close(net, one_process(model(), everybodys_steps(world, trainer), weight=count))


@pytest.mark.world_size(2, 3)
def test_without_a_stall_it_trains_the_weights_of_ordinary_steps(world):
    net, plain = model(), model()
    fit(net, world, stalls={}, cutoff=1.0)
    kit.fit(plain, train=data(SAMPLES), accumulate=ACCUMULATE)
    assert_close(net, plain)


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("where", ["data", "forward"])
def test_the_record_of_a_run_repeats_it_bit_for_bit(world, where):
    def run(cutoff, stalls):
        net = model(dropout=0.3)
        torch.manual_seed(world.rank)
        return net, fit(net, world, cutoff=cutoff, stalls=stalls, where=where)

    net, trainer = run(0.5, STALLS)
    again, repeated = run(trainer.history.cutoffs, {})
    assert np.array_equal(weights(again), weights(net))
    assert repeated.history.cutoffs == trainer.history.cutoffs
    assert repeated.history["loss"] == trainer.history["loss"]


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("stop", [2, 6, 11])
def test_a_run_that_was_stopped_ends_as_if_it_never_was(world, shared_tmp_path, stop):
    """Resumed with the record of the run that was not stopped: what is cut depends on time."""

    def run(cutoff, *hooks, stalls=(), seed):
        net = model(dropout=0.3)
        torch.manual_seed(seed)
        return net, fit(net, world, cutoff=cutoff, stalls=dict(stalls), hooks=hooks)

    net, trainer = run(0.5, stalls=STALLS, seed=world.rank)
    record = trainer.history.cutoffs
    with pytest.raises(kit.StoppedError):
        run(record, Checkpoint(shared_tmp_path, every_steps=1), kit.StopAt(stop), seed=world.rank)
    resumed, last = run(record, Checkpoint(shared_tmp_path, every_steps=1), seed=99)
    assert np.array_equal(weights(resumed), weights(net))
    assert last.history.cutoffs == record
    assert last.history["loss"] == trainer.history["loss"]


@pytest.mark.world_size(2)
def test_an_epoch_that_began_with_a_cutoff_is_not_resumed_without_one(world, shared_tmp_path):
    with pytest.raises(kit.StoppedError):
        fit(model(), world, stalls={}, hooks=[Checkpoint(shared_tmp_path, every_steps=1), kit.StopAt(2)])
    trainer = kit.make_trainer(model(), accumulate=ACCUMULATE)
    with pytest.raises(CheckpointError, match=r"where ranks have different samples left\. Received: cutoff=None"):
        kit.run(trainer, Rows(world, {}), hooks=[Checkpoint(shared_tmp_path)])


@pytest.mark.world_size(2)
def test_a_rank_whose_gradient_is_not_finite_is_named_and_no_rank_takes_the_step(world, caplog):
    net = model()
    infinite = kit.Infinite(net[-1].bias, [2])
    fit(net, world, stalls={}, hooks=[infinite], nan_policy="skip", epochs=1)
    assert infinite.taken.count(False) == 1
    assert not infinite.taken[2]
    assert np.isfinite(weights(net)).all()
    assert not world.is_root or re.search(r"Step 3 of epoch 1: on rank 1 \(.*3\.bias", caplog.text)


@pytest.mark.world_size(2)
def test_a_rank_that_fails_ends_the_steps_of_all_and_the_next_fit_trains(world, assert_same_on_all_ranks):
    class Fails(Rows):
        def __getitem__(self, index):
            if world.rank == 1 and self.trainer.global_step == 2:
                raise OSError("no such sample")
            return super().__getitem__(index)

    expected = {0: "Another rank's training has ended with an error", 1: "no such sample"}[world.rank]
    with pytest.raises(Exception, match=expected):
        fit(model(), world, rows=Fails(world, {}))
    net = model()
    fit(net, world, stalls={}, cutoff=1.0)
    assert_same_on_all_ranks(*net.parameters())


@pytest.mark.world_size(2)
def test_a_parameter_that_one_rank_uses_gets_the_mean_and_one_that_none_uses_stays(world, assert_same_on_all_ranks):
    net = kit.Partly(world.rank)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    fit(net, world, stalls={})
    assert torch.equal(net.never.weight, before["never.weight"])
    assert not torch.equal(net.sometimes.weight, before["sometimes.weight"])
    assert_same_on_all_ranks(*net.parameters())


@pytest.mark.world_size(2)
def test_checkpoints_validation_and_checks_within_an_epoch_wait_for_all_ranks(
    world, shared_tmp_path, assert_same_on_all_ranks
):
    net, rows = model(), Rows(world, STALLS)
    trainer = rows.trainer = kit.make_trainer(net, cutoff=0.5, accumulate=ACCUMULATE)
    hooks = [callbacks.SyncCheck(every=3), Checkpoint(shared_tmp_path, every_steps=4), callbacks.EMA(0.9, every=1)]
    kit.run(trainer, rows, hooks=hooks, validation=data(20), validate_every=5)
    assert [each["global_step"] for each in trainer.history.validations][:2] == [5, 10]
    assert_same_on_all_ranks(*net.parameters())


@pytest.mark.world_size(2)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_keeps_its_batches_and_its_workers(world, workers):
    def loader(rows):
        return torch.utils.data.DataLoader(data_of(rows), batch_size=BATCH, shuffle=True, num_workers=workers)

    def data_of(rows):
        return rows if not workers else list(zip(rows.x, rows.y, strict=True))

    trainer = fit(model(), world, loader=loader, epochs=1)
    assert sorted(flat(everybodys_steps(world, trainer))) == list(range(SAMPLES))


def batch_norm():
    return torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("net", "options", "message"),
    [
        (batch_norm, {}, "With cutoff, ranks contribute different batches to a step. Received: BatchNorm: "),
        (model, {"micro_batch": 2}, "Received: micro_batch=2: batches are cut off whole"),
        (model, {"sync": hvdtrain.LocalSGD(every=2)}, "Received: cutoff and sync=LocalSGD(every=2"),
        (model, {"optimizer": "LBFGS"}, "Received: an optimizer that needs a closure"),
        (model, {"cutoff": 1.2}, "cutoff must be a share of the ranks, in (0, 1]"),
    ],
)
def test_what_cannot_be_cut_off_is_refused(world, net, options, message):
    net = net()
    if "optimizer" in options:
        options = {"optimizer": torch.optim.LBFGS(net.parameters())}
    with pytest.raises(ValueError, match=re.escape(message)):
        fit(net, world, **options)


@pytest.mark.world_size(2)
def test_what_only_fit_knows_is_refused_there(world):
    trainer = kit.make_trainer(model(), cutoff=0.5)
    with pytest.raises(ValueError, match="balance and cutoff cannot be combined"):
        kit.run(trainer, balance="speed")

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return zip(*data(), strict=True)

    with pytest.raises(TypeError, match="cutoff gives samples that were cut off to other ranks"):
        kit.run(trainer, Stream())
    # The rank that raises first ends the steps of the other one, perhaps before its own gradient is there.
    with pytest.raises((HvdTrainError, hvd.HorovodInternalError)) as raised:
        kit.fit(kit.sparse_model(), "sgd", kit.sparse_data(16), cutoff=0.5)
    said = "".join(world.allgather_object(str(raised.value), name="said"))
    assert re.search(r"cutoff averages dense.*sparse gradient of 0\.weight on rank \d", said)
