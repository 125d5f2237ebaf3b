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

import hvdtrain
from hvdtrain import callbacks
from hvdtrain.callbacks import Callback, Checkpoint
from hvdtrain.errors import CheckpointError, HvdTrainError

BATCH, ACCUMULATE, SAMPLES = 4, 3, 131
STALLS = {1: 3, 5: 1, 8: 2}  # before this step of a fit, rank 1 stalls until so many steps have closed


@pytest.fixture
def world(hvd):
    return hvdtrain.init("torch")


def model(dropout=0.0):
    torch.manual_seed(0)
    layers = torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Dropout(dropout), torch.nn.Linear(16, 3)
    return torch.nn.Sequential(*layers)


def data(num_samples=SAMPLES):
    generator = np.random.default_rng(1)
    x = generator.normal(size=(num_samples, 6)).astype(np.float32)
    return torch.from_numpy(x), torch.from_numpy(generator.integers(0, 3, num_samples))


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


class Rows(torch.utils.data.Dataset):
    """Samples by index; to read one may take a rank until other ranks have closed some steps without it."""

    def __init__(self, world, stalls, num_samples=SAMPLES):
        self.x, self.y = data(num_samples)
        self.world, self.stalls, self.trainer = world, dict(stalls), None

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        if self.world.rank == 1 and self.trainer is not None:
            wait_for_others(self.trainer, self.stalls.pop(self.trainer.global_step, 0))
        return self.x[index], self.y[index]


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
    options.setdefault("loss", torch.nn.CrossEntropyLoss())
    options.setdefault("optimizer", sgd(net))
    trainer = rows.trainer = hvdtrain.Trainer(net, cutoff=cutoff, accumulate=ACCUMULATE, **options)
    trainer.taken = taken = []  # the samples that this rank has contributed, step by step
    whole = trainer._adapter.open_step

    def open_step(step):
        whole(step)
        taken.append([int(index) for batch in step.batches for index in batch.indices])

    trainer._adapter.open_step = open_step
    how = {"batch_size": BATCH, "progress": False, "run_dir": None, "callbacks": list(hooks)}
    trainer.fit(rows if loader is None else loader(rows), epochs=epochs, **how)
    return trainer


def flat(lists):
    return list(itertools.chain.from_iterable(lists))


def everybodys_steps(world, trainer):
    """Return the samples of each step, over all ranks."""
    by_rank = world.allgather_object(trainer.taken, name="taken")
    return [flat(parts) for parts in zip(*by_rank, strict=True)]


def one_process(net, steps, *, weight=None, clip_norm=None, ignore=None):
    """Train on the samples of each step at once."""
    x, y = data()
    optimizer = sgd(net)
    for rows in steps:
        losses = torch.nn.functional.cross_entropy(net(x[rows]), y[rows], reduction="none")
        counts = torch.ones(len(rows)) if weight is None else weight(y[rows])
        optimizer.zero_grad()
        ((losses * counts).sum() / counts.sum()).backward()
        if clip_norm:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip_norm)
        optimizer.step()
    return net


def assert_close(net, expected, atol=2e-6):
    for ours, theirs in zip(net.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.detach(), theirs.detach(), atol=atol, rtol=0)


def weights(net):
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()]).numpy()


def assert_equal_on_all_ranks(world, net):
    everybodys = world.allgather(weights(net)[None], name="weights")
    assert (everybodys == everybodys[0]).all()


def ignoring(labels):
    return (labels != 2).float()


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize(
    ("options", "how", "atol"),
    [
        ({}, {}, 2e-6),
        ({"clip_norm": 0.05}, {"clip_norm": 0.05}, 2e-6),
        ({"loss": torch.nn.CrossEntropyLoss(ignore_index=2)}, {"weight": ignoring}, 2e-6),
        ({"loss": lambda outputs, y: torch.nn.functional.cross_entropy(outputs, y)}, {}, 2e-6),  # a plain function
        ({"compression": "fp16"}, {}, 2e-3),
        ({"compression": "bf16"}, {}, 2e-2),
    ],
)
def test_the_mean_of_a_step_is_that_of_what_ranks_have_contributed(world, options, how, atol):
    net = model()
    trainer = fit(net, world, **options)
    steps = everybodys_steps(world, trainer)
    assert_close(net, one_process(model(), steps, **how), atol)
    assert_equal_on_all_ranks(world, net)
    assert {1, 2, 3, 5, 8, 9} <= set(trainer.history.cutoffs)  # those that closed while rank 1 stalled
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
    x, y = data()
    net, right = model(), []
    optimizer = sgd(net)
    for rows in steps[:first]:
        outputs = net(x[rows])
        right += (outputs.argmax(1) == y[rows]).tolist()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(outputs, y[rows]).backward()
        optimizer.step()
    assert trainer.history["accuracy"][0] == pytest.approx(np.mean(right))


@pytest.mark.world_size(2)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_by_element_is_a_mean_or_a_sum_of_what_came(world, reduction):
    class Numbers(Rows):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return x, torch.nn.functional.one_hot(y, 3).float()

    net = model()
    loss = torch.nn.MSELoss(reduction=reduction)
    how = {"optimizer": torch.optim.SGD(net.parameters(), lr=0.01)}
    trainer = fit(net, world, rows=Numbers(world, STALLS), loss=loss, **how)
    plain, (x, y) = model(), data()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    for rows in everybodys_steps(world, trainer):
        optimizer.zero_grad()
        loss(plain(x[rows]), torch.nn.functional.one_hot(y[rows], 3).float()).backward()
        optimizer.step()
    assert_close(net, plain)


@pytest.mark.world_size(2)
def test_samples_that_count_nothing_are_no_error_where_others_were_cut_off(world):
    """Rank 0's first step has no count, and rank 1, whose samples count, is cut off in it."""
    steps = iter(range(1000))

    def step(net, batch):
        x, y = batch
        count = 0.0 if world.rank == 0 and next(steps) < ACCUMULATE else float(len(y))
        return hvdtrain.Loss(torch.nn.functional.cross_entropy(net(x), y), count)

    trainer = fit(model(), world, loss=None, step=step, stalls={0: 1}, epochs=1)
    assert trainer.history.cutoffs[0] == [ACCUMULATE, 0]


@pytest.mark.world_size(2)
def test_parameters_that_are_added_during_a_fit_are_refused(world):
    net = model()
    optimizer = torch.optim.SGD(net[0].parameters(), lr=0.1)

    class Add(Callback):
        def on_step_end(self, trainer, step):
            if trainer.global_step == 2:
                optimizer.add_param_group({"params": list(net[3].parameters())})

    with pytest.raises(HvdTrainError, match=r"Received: 4 parameters on rank \d, 2 when it began"):
        fit(net, world, stalls={}, cutoff=1.0, optimizer=optimizer, hooks=[Add()])


@pytest.mark.world_size(2)
def test_counts_of_an_own_step_weigh_what_came(world):
    def count(labels):
        return 100.0 * (labels + 1).float()

    def step(net, batch):
        x, y = batch
        counts = count(y)
        losses = torch.nn.functional.cross_entropy(net(x), y, reduction="none")
        return hvdtrain.Loss((losses * counts).sum() / counts.sum(), float(counts.sum()))

    net = model()
    trainer = fit(net, world, loss=None, step=step)
    assert_close(net, one_process(model(), everybodys_steps(world, trainer), weight=count))


@pytest.mark.world_size(2, 3)
def test_without_a_stall_it_trains_the_weights_of_ordinary_steps(world):
    net, plain = model(), model()
    fit(net, world, stalls={}, cutoff=1.0)
    trainer = hvdtrain.Trainer(plain, optimizer=sgd(plain), loss=torch.nn.CrossEntropyLoss(), accumulate=ACCUMULATE)
    trainer.fit(data(), epochs=2, batch_size=BATCH, progress=False, run_dir=None)
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


class StopAt(Callback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, trainer, step):
        if trainer.global_step == self.step:
            raise KeyError("stopped")


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
    with pytest.raises(KeyError, match="stopped"):
        run(record, Checkpoint(shared_tmp_path, every_steps=1), StopAt(stop), seed=world.rank)
    resumed, last = run(record, Checkpoint(shared_tmp_path, every_steps=1), seed=99)
    assert np.array_equal(weights(resumed), weights(net))
    assert last.history.cutoffs == record
    assert last.history["loss"] == trainer.history["loss"]


@pytest.mark.world_size(2)
def test_an_epoch_that_began_with_a_cutoff_is_not_resumed_without_one(world, shared_tmp_path):
    with pytest.raises(KeyError, match="stopped"):
        fit(model(), world, stalls={}, hooks=[Checkpoint(shared_tmp_path, every_steps=1), StopAt(2)])
    net = model()
    trainer = hvdtrain.Trainer(net, optimizer=sgd(net), loss=torch.nn.CrossEntropyLoss(), accumulate=ACCUMULATE)
    with pytest.raises(CheckpointError, match=r"where ranks have different samples left\. Received: cutoff=None"):
        trainer.fit(
            Rows(world, {}), epochs=2, batch_size=BATCH, progress=False, run_dir=None,
            callbacks=[Checkpoint(shared_tmp_path)],
        )  # fmt: skip


@pytest.mark.world_size(2)
def test_a_rank_whose_gradient_is_not_finite_is_named_and_no_rank_takes_the_step(world, caplog):
    net, taken = model(), []
    steps = iter(range(1000))

    class Note(Callback):
        def on_step_end(self, trainer, step):
            taken.append(trainer.step_taken)

    def poison(grad):
        return grad * float("inf") if world.rank == 1 and next(steps) == 2 * ACCUMULATE else grad

    net[3].bias.register_hook(poison)
    fit(net, world, stalls={}, hooks=[Note()], nan_policy="skip", epochs=1)
    assert taken.count(False) == 1
    assert not taken[2]
    assert np.isfinite(weights(net)).all()
    assert not world.is_root or re.search(r"Step 3 of epoch 1: on rank 1 \(.*3\.bias", caplog.text)


@pytest.mark.world_size(2)
def test_a_rank_that_fails_ends_the_steps_of_all_and_the_next_fit_trains(world):
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
    assert_equal_on_all_ranks(world, net)


@pytest.mark.world_size(2)
def test_a_parameter_that_one_rank_uses_gets_the_mean_and_one_that_none_uses_stays(world):
    class Partly(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.always, self.sometimes, self.never = (torch.nn.Linear(6, 3) for _ in range(3))

        def forward(self, x):
            return self.always(x) + (self.sometimes(x) if world.rank == 1 else 0.0)

    net = Partly()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    fit(net, world, stalls={})
    assert torch.equal(net.never.weight, before["never.weight"])
    assert not torch.equal(net.sometimes.weight, before["sometimes.weight"])
    assert_equal_on_all_ranks(world, net)


@pytest.mark.world_size(2)
def test_checkpoints_validation_and_checks_within_an_epoch_wait_for_all_ranks(world, shared_tmp_path):
    net, rows = model(), Rows(world, STALLS)
    options = {"optimizer": sgd(net), "loss": torch.nn.CrossEntropyLoss(), "cutoff": 0.5, "accumulate": ACCUMULATE}
    trainer = rows.trainer = hvdtrain.Trainer(net, **options)
    hooks = [callbacks.SyncCheck(every=3), Checkpoint(shared_tmp_path, every_steps=4), callbacks.EMA(0.9, every=1)]
    how = {"batch_size": BATCH, "progress": False, "run_dir": None, "callbacks": hooks}
    history = trainer.fit(rows, validation=data(20), validate_every=5, epochs=2, **how)
    assert [each["global_step"] for each in history.validations][:2] == [5, 10]
    assert_equal_on_all_ranks(world, net)


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
    net = model()
    trainer = hvdtrain.Trainer(net, optimizer=sgd(net), loss=torch.nn.CrossEntropyLoss(), cutoff=0.5)
    with pytest.raises(ValueError, match="balance and cutoff cannot be combined"):
        trainer.fit(data(), balance="speed", progress=False, run_dir=None)

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return zip(*data(), strict=True)

    with pytest.raises(TypeError, match="cutoff gives samples that were cut off to other ranks"):
        trainer.fit(Stream(), batch_size=BATCH, progress=False, run_dir=None)
    net = torch.nn.Sequential(torch.nn.Embedding(8, 4, sparse=True), torch.nn.Flatten(), torch.nn.Linear(4, 3))
    trainer = hvdtrain.Trainer(
        net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), loss=torch.nn.CrossEntropyLoss(), cutoff=0.5
    )
    rows = torch.arange(16)[:, None] % 8, torch.arange(16) % 3
    with pytest.raises(HvdTrainError, match=r"cutoff averages dense.*sparse gradient of 0\.weight on rank \d"):
        trainer.fit(rows, batch_size=BATCH, progress=False, run_dir=None)
