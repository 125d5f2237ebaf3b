"""torch's default type and default device are the user's: the Trainer's results do not depend on them."""

from __future__ import annotations

import pytest
import torch
import trainer_kit as kit
from defaults_kit import DEFAULTS, assert_equal, default, tensors
from stopping import StopAt, StoppedError
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
)

import hvdtrain
from hvdtrain.callbacks import EMA, Checkpoint, SyncCheck

pytestmark = [pytest.mark.usefixtures("hvd"), pytest.mark.world_size(2)]
SETTABLE = ("meta", torch.float16)  # what a script sets once


@pytest.fixture(autouse=True)
def _same_kernels(monkeypatch):
    """Of another default type, the update is not fused, which differs by rounding."""
    monkeypatch.setenv("HVDTRAIN_FUSED_UPDATE", "0")


OPTIONS = [
    {"metrics": ["accuracy"], "clip_norm": 0.1},
    {"micro_batch": 2, "metrics": ["accuracy"]},
    {"nan_policy": "skip"},
    {"sync": hvdtrain.LocalSGD(2)},
    {"sync": hvdtrain.LocalSGD(2, within="host")},
    {"sync": hvdtrain.DiLoCo(3)},
    {"sync": hvdtrain.Delayed()},
    {"compression": "int8"},
    {"compression": "topk:0.3"},
    {"shard": "optimizer", "clip_norm": 0.1, "nan_policy": "skip"},
    {"shard": "gradients", "clip_norm": 0.1, "nan_policy": "skip"},
]


def fit(wanted, net, train, *, hooks=(), epochs=2, batch_size=kit.BATCH, predicted=None, **options):
    """Return weights, losses and predictions of a run under a default."""
    options.setdefault("loss", torch.nn.CrossEntropyLoss())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    how = {"batch_size": batch_size, "epochs": epochs, "callbacks": list(hooks), "progress": False, "run_dir": None}
    with default(wanted):
        trainer = hvdtrain.Trainer(net, optimizer=optimizer, **options)
        history = trainer.fit(train, validation=train, **how)
        evaluated = trainer.evaluate(train, batch_size=batch_size)
        outputs = None if predicted is None else trainer.predict(predicted)
    losses = [value for name in sorted(evaluated) for value in [evaluated[name], *history.get(name, ())]]
    found = [*tensors(net), torch.tensor(losses, dtype=torch.float64)]
    return found if outputs is None else [*found, torch.as_tensor(outputs)]


@pytest.mark.parametrize("wanted", SETTABLE, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(f"{k}={v}"[:24] for k, v in options.items()))
def test_the_trainer_fits_evaluates_and_predicts_the_same(rank, options, wanted):
    def run(wanted):
        net = kit.model()
        hooks = [EMA(0.9), SyncCheck()]
        if "nan_policy" in options:
            hooks.append(kit.Infinite(net[0].weight, {2}))
        return fit(wanted, net, kit.data(), hooks=hooks, predicted=kit.data()[0], **options)

    found = run(wanted)
    assert_equal(found, run(None))
    assert all(value.dtype == torch.float32 for value in found[:4])


class Endless(IterableDataset):
    """Draws its order from the seed that a worker has."""

    def __init__(self, x, y):
        self._x, self._y = x, y

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        rows = range(len(self._x)) if info is None else range(info.id, len(self._x), info.num_workers)
        drawn = torch.randperm(len(rows), device="cpu", generator=torch.Generator().manual_seed(torch.initial_seed()))
        for row in drawn.tolist():
            yield self._x[rows[row]], self._y[rows[row]]


def loaders(x, y):
    """Return DataLoaders, each of which torch lets draw on the default device."""
    data = TensorDataset(x, y)
    seeded = torch.Generator().manual_seed(5)
    return {
        "shuffled": DataLoader(data, batch_size=4, shuffle=True),
        "generator": DataLoader(data, batch_size=4, shuffle=True, generator=seeded),
        "replacement": DataLoader(data, batch_size=4, sampler=RandomSampler(data, replacement=True)),
        "subset": DataLoader(data, batch_size=4, sampler=SubsetRandomSampler(range(30), generator=seeded)),
        "batches": DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data, num_samples=32), 4, drop_last=True)),
        "workers": DataLoader(data, batch_size=4, shuffle=True, num_workers=1),
        "iterated": DataLoader(Endless(x, y), batch_size=4, num_workers=2),
        "iterated with a generator": DataLoader(Endless(x, y), batch_size=4, generator=seeded),
    }


@pytest.mark.parametrize("kind", loaders(*kit.data()))
def test_dataloaders_draw_the_same_samples_under_a_default_device(kind):
    def run(wanted):
        torch.manual_seed(7)
        return fit(wanted, kit.model(), loaders(*kit.data(32))[kind], epochs=1)

    assert_equal(run("meta"), run(None))


@pytest.mark.parametrize("wanted", SETTABLE, ids=str)
def test_a_prepared_loop_trains_the_same(wanted):
    def run(wanted):
        net, data = kit.model(), TensorDataset(*kit.data())
        loader = DataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator())
        with default(wanted):
            model, optimizer, batches = hvdtrain.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), loader)
            for _ in range(2):
                for x, y in batches:
                    optimizer.zero_grad()
                    torch.nn.functional.cross_entropy(model(x), y).backward()
                    optimizer.step()
        return tensors(net)

    assert_equal(run(wanted), run(None))


@pytest.mark.parametrize("wanted", SETTABLE, ids=str)
@pytest.mark.parametrize("options", [{}, {"sync": hvdtrain.Delayed()}, {"shard": "optimizer"}], ids=str)
def test_a_stopped_run_resumes_to_the_same_weights(shared_tmp_path, options, wanted):
    def run(wanted, *hooks):
        options_of_run = options | {"metrics": ["accuracy"]}
        return fit(wanted, kit.model(dropout=0.3), kit.data(), hooks=hooks, **options_of_run)

    with pytest.raises(StoppedError):
        run(wanted, Checkpoint(shared_tmp_path, every_steps=2), StopAt(9))  # within the second epoch
    assert_equal(run(wanted, Checkpoint(shared_tmp_path, every_steps=2)), run(None))


def exact(outputs, targets):
    """Return one value a sample; of a single one, a number of Python's that no half type holds."""
    return 70000.123 if len(targets) == 1 else torch.full((len(targets),), 70000.123, dtype=torch.float64)


@pytest.mark.parametrize("wanted", DEFAULTS, ids=str)
def test_a_metric_of_pythons_own_numbers_is_exact(world, wanted):
    net, data = kit.model(), (torch.zeros(3, 6), torch.zeros(3, 3))
    with default(wanted):
        trainer = hvdtrain.Trainer(
            net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), loss=torch.nn.MSELoss(), metrics={"exact": exact}
        )
        found = trainer.evaluate(data, batch_size=1)
    assert found["exact"] == pytest.approx(70000.123, abs=1e-9)


@pytest.mark.parametrize("samples", [3001, 70001])
@pytest.mark.parametrize("own", [False, True], ids=["loss", "step"])
def test_large_counts_of_labels_weigh_exactly_under_float16(size, samples, own):
    """There are more labels in a step than float16 counts, or holds; how many count, a rank knows of its own only."""

    def run(wanted, step=own):
        x, y = kit.data(samples * size)
        y[torch.arange(len(y)) % 5 == 0] = -100
        options = {"step": own_step, "loss": None} if step else {"metrics": ["accuracy"]}
        return fit(wanted, kit.model(), (x, y), batch_size=samples, **options)

    def own_step(net, batch):
        x, y = batch
        kept = y != -100
        mean = torch.nn.functional.cross_entropy(net(x), y)
        return hvdtrain.Loss(mean, count=int(kept.sum()))

    found = run(torch.float16)
    assert_equal(found, run(None))
    assert (found[0] - kit.model()[0].weight).abs().max() > 1e-4  # gradients were no zeros
