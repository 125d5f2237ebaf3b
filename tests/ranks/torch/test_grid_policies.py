"""What the ranks of a Grid do together besides steps: leave out a step, and average weights over steps."""

from __future__ import annotations

import itertools
import logging
import math
import re
import shutil
from contextlib import suppress

import numpy as np
import pytest
import torch
from grid_kit import TOKENS, WIDTH, Block, divided, one_process, staged
from torch import nn
from torch.distributed.fsdp import fully_shard

import hvdtrain
import hvdtrain.torch
from hvdtrain.callbacks import EMA, Callback, Checkpoint, EarlyStopping, SyncCheck
from hvdtrain.checkpoint import scan
from hvdtrain.errors import NonFiniteError

pytestmark = pytest.mark.world_size(2)
CLASSES = 5
BATCH, SAMPLES = 12, 53  # of one process; the last step of an epoch has 5 samples
BAD = 17  # the sample that is not finite
FOUR = pytest.mark.world_size(4)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.linear(x.mean(1))


def model():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), Head())


def with_norms():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(TOKENS * WIDTH, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8),
        nn.Linear(8, CLASSES),
    )  # fmt: skip


def data(bad=(BAD,)):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(SAMPLES, TOKENS, WIDTH)).astype(np.float32)
    x[list(bad)] = np.nan
    return x, rng.integers(0, CLASSES, SAMPLES)


def sharded(net, grid):
    for layer in net.children():
        if isinstance(layer, Block):  # the head is left to the outermost module, which keeps it after evaluation
            fully_shard(layer, mesh=grid.mesh("shard"))
    return fully_shard(net, mesh=grid.mesh("shard"))


KINDS = {
    "stages": ({"stages": 2}, staged),
    "shards": ({"shard": 2}, sharded),
    "tensor parts": ({"tensor": 2}, divided),
    "stages of tensor parts": ({"stages": 2, "tensor": 2}, lambda net, grid: staged(divided(net, grid), grid)),
    "stages of shards": ({"stages": 2, "shard": 2}, lambda net, grid: sharded(staged(net, grid), grid)),
}
OF_TWO = ["stages", "shards", "tensor parts"]
OF_FOUR = [pytest.param(kind, marks=FOUR) for kind in KINDS if kind not in OF_TWO]
REPLICAS = [pytest.param(kind, marks=FOUR) for kind in OF_TWO]


@pytest.fixture
def make_grid(grid_of):
    def make(kind="stages", make_model=model):
        lengths, divide = KINDS[kind]
        grid = grid_of(**lengths)
        return grid, divide(make_model(), grid)

    return make


def trainer_of(net, **options):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    options = {"nan_policy": "skip"} | options
    return hvdtrain.Trainer(net, optimizer=optimizer, loss=nn.CrossEntropyLoss(), metrics=["accuracy"], **options)


def fit(trainer, *, replicas=1, bad=(BAD,), epochs=2, samples=SAMPLES, **options):
    rows = tuple(each[:samples] for each in data(bad))
    how = {"batch_size": BATCH // replicas, "run_dir": None, "progress": False}
    return trainer.fit(rows, epochs=epochs, validation=data(()), **how, **options)


def alone(make_model=model, *, prepare=lambda trainer: None, of_fit=None, **options):
    """Return the state and history of one process."""
    with one_process():
        trainer = trainer_of(make_model(), **options)
        prepare(trainer)
        history = fit(trainer, **(of_fit or {}))
        return trainer.state(), history


def assert_equal(state, expected, *, atol=1e-6):
    assert sorted(state.arrays) == sorted(expected.arrays)
    for name in expected.arrays:
        assert np.isfinite(expected.arrays[name]).all()
        np.testing.assert_allclose(state.arrays[name], expected.arrays[name], rtol=0, atol=atol, err_msg=name)


def assert_same_history(history, expected):
    for name in ("loss", "accuracy", "val_loss", "val_accuracy"):
        assert history[name] == pytest.approx(expected[name], rel=1e-5), name


class Taken(Callback):
    """Notes which steps were taken."""

    def __init__(self):
        self.steps = []

    def on_step_end(self, trainer, step):
        self.steps.append(trainer.step_taken)


@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.5, "accumulate": 2}], ids=str)
@pytest.mark.parametrize("kind", [*OF_TWO, *OF_FOUR, *REPLICAS])
def test_a_grid_skips_the_step_that_one_process_skips(make_grid, hvd, kind, options):
    state, expected = alone(**options)
    grid, net = make_grid(kind)
    trainer, taken = trainer_of(net, **options), Taken()
    history = fit(trainer, replicas=grid.data_size, callbacks=[taken, SyncCheck(1)])
    assert taken.steps.count(False) == 2  # one in each epoch
    assert hvd.allgather_object(taken.steps) == [taken.steps] * hvd.size()
    assert_same_history(history, expected)
    assert_equal(trainer.state(), state)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_stages_in_mixed_precision_skip_as_one_process_does(make_grid, precision):
    # From a scale of 1 on, loss scaling skips no step by itself.
    def scale(trainer):
        scaler = trainer._adapter._update.scaler
        scaler.load_state_dict(scaler.state_dict() | ({"scale": 1.0} if precision == "fp16" else {}))

    whole = {"samples": 4 * BATCH}  # a short step would be cut into other micro-batches
    options = {"precision": precision}
    state, expected = alone(prepare=scale, of_fit=whole, micro_batch=BATCH // 3, **options)
    _, net = make_grid()
    trainer, taken = trainer_of(net, **options), Taken()
    scale(trainer)
    assert_same_history(fit(trainer, callbacks=[taken], **whole), expected)
    assert taken.steps.count(False) == 2
    assert_equal(trainer.state(), state, atol=0)


@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_loss_scaling_lowers_its_scale_before_stages_report_a_fault(make_grid, policy):
    _, net = make_grid()
    trainer, taken = trainer_of(net, precision="fp16", nan_policy=policy), Taken()
    fit(trainer, callbacks=[taken])
    assert taken.steps.count(False) == 2
    assert trainer.state().meta["scaler"]["scale"] == 2.0**14


def test_a_skipped_step_leaves_running_statistics_of_stages_alone(make_grid):
    whole = {"samples": 4 * BATCH}
    state, expected = alone(with_norms, micro_batch=BATCH // 3, of_fit=whole)
    _, net = make_grid(make_model=with_norms)
    trainer = trainer_of(net)
    assert_same_history(fit(trainer, **whole), expected)
    assert_equal(trainer.state(), state)
    assert state.arrays["model.2.num_batches_tracked"] == 3 * 2 * 3  # steps, epochs, micro-batches


@pytest.mark.parametrize("kind", [*OF_TWO, *OF_FOUR, REPLICAS[0]])
def test_raise_names_weight_part_and_samples_alike_on_every_rank(make_grid, hvd, kind):
    grid, net = make_grid(kind)
    with pytest.raises(NonFiniteError) as caught:
        fit(trainer_of(net, nan_policy="raise"), replicas=grid.data_size)
    message = str(caught.value)
    assert hvd.allgather_object(message) == [message] * hvd.size()
    samples, _, rest = message.partition("the loss of the samples ")[2].partition(" is not finite, and ")
    assert str(BAD) in samples.partition(" and ")[0].split(", ")
    first = "stage 0" if "stages" in kind else "shard 0" if kind == "shards" else "tensor part 0"
    assert rest.startswith("the gradient of 0.norms.0.weight (" + first)
    teller = int(message.partition("on rank ")[2].split()[0])
    assert hvd.allgather_object(grid.stage == grid.stages - 1 and grid.tensor == 0)[teller]


class Overflow:
    """Makes one gradient of one rank infinite, in one step."""

    def __init__(self, net, name, *, on):
        calls = itertools.count()
        if on and name in dict(net.named_parameters()):
            net.get_parameter(name).register_hook(lambda grad: grad * (math.inf if next(calls) == 4 else 1))


@pytest.mark.parametrize("name", ["0.up.weight", "2.linear.bias"])
def test_a_gradient_that_overflows_in_one_stage_is_skipped_in_all(make_grid, name, caplog, rank):
    def trained(net, **options):
        Overflow(net, name, on=True)
        trainer, taken = trainer_of(net, **options), Taken()
        fit(trainer, bad=(), callbacks=[taken], samples=4 * BATCH)
        return trainer.state(), taken.steps

    with one_process():
        expected, steps = trained(model(), micro_batch=BATCH // 3)
    _, net = make_grid()
    caplog.clear()
    with caplog.at_level(logging.WARNING, "hvdtrain"):
        found, taken = trained(net)
    assert taken == steps
    assert taken.count(False) == 1
    assert_equal(found, expected)
    stage = 0 if name[0] == "0" else 1
    if rank == 0:  # one replica: only its samples can be the cause
        text = f"is [0-9.]+, and the gradient of {name} \\(stage {stage} on rank {stage}\\) is not finite"
        assert re.search(text, caplog.text)


@FOUR
def test_a_gradient_that_overflows_although_losses_are_finite_has_no_culprit(make_grid, hvd):
    grid, net = make_grid()
    Overflow(net, "0.up.weight", on=grid.replica == 1)
    with pytest.raises(NonFiniteError, match=r"0\.up\.weight \(stage 0 on rank 0\) is not finite, though") as caught:
        fit(trainer_of(net, nan_policy="raise"), replicas=2, bad=())
    message = str(caught.value)
    assert hvd.allgather_object(message) == [message] * 4


@pytest.mark.parametrize("kind", [*OF_TWO, *OF_FOUR])
def test_stop_ends_a_grid_with_a_finite_checkpoint_that_one_process_loads(make_grid, shared_tmp_path, kind):
    folder = str(shared_tmp_path / "checkpoints")
    grid, net = make_grid(kind)
    trainer, taken = trainer_of(net, nan_policy="stop"), Taken()
    fit(trainer, replicas=grid.data_size, checkpoint_dir=folder, callbacks=[taken])
    step = len(taken.steps)
    assert step == 3
    saved, expected = f"{folder}/epoch-000000-step-{step:08d}", trainer.state()
    assert scan(saved).finite
    with one_process():
        found = model()
        optimizer = torch.optim.SGD(found.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        loaded = hvdtrain.Trainer.load(saved, found, optimizer=optimizer, loss=nn.CrossEntropyLoss())
        assert_equal(loaded.state(), expected, atol=0)


STEPS_ALONE = [
    ("stages", hvdtrain.LocalSGD(every=3)),
    ("shards", hvdtrain.DiLoCo(every=3)),
    ("tensor parts", hvdtrain.LocalSGD(every=3)),
]


@FOUR
@pytest.mark.parametrize(("kind", "sync"), STEPS_ALONE, ids=str)
def test_replicas_that_step_alone_skip_alone(make_grid, hvd, kind, sync, caplog):
    grid, net = make_grid(kind)
    trainer = trainer_of(net, sync=sync)
    with caplog.at_level(logging.WARNING, "hvdtrain"):
        history = fit(trainer, replicas=grid.data_size, callbacks=[SyncCheck(1)])
    assert all(np.isfinite(each).all() for each in history.values())
    assert all(np.isfinite(each).all() for each in trainer.state().arrays.values())
    text = hvd.broadcast_object(caplog.text if hvd.rank() == 0 else None, 0)
    assert text.count("Skipped.") == 2
    assert "the gradient of 0.norms.0.weight (" in text


@FOUR
def test_replicas_that_step_alone_report_another_replicas_overflow(make_grid, hvd):
    grid, net = make_grid("shards")
    calls = itertools.count()

    def overflow(block, args, output):
        if grid.data_rank == 3 and output.requires_grad and next(calls) == 1:
            output.register_hook(lambda grad: grad * math.inf)

    net[0].register_forward_hook(overflow)
    with pytest.raises(NonFiniteError, match="though the losses") as caught:
        fit(trainer_of(net, nan_policy="raise", sync=hvdtrain.LocalSGD(every=3)), replicas=4, bad=())
    message = str(caught.value)
    assert "the gradient of 0." in message
    assert hvd.allgather_object(message) == [message] * 4


# Averages of weights


def averages_of(trainer, ema):
    """Return the whole model's averages, on all ranks."""
    with ema.averaged():
        return {name: each for name, each in trainer.state().arrays.items() if name.startswith("model.")}


def trained_with_averages(net, *, replicas, epochs=2, callbacks=(), **options):
    trainer, ema = trainer_of(net, nan_policy=None, **options), EMA(0.8, every=2)
    history = fit(trainer, replicas=replicas, bad=(), epochs=epochs, callbacks=[ema, *callbacks])
    return trainer, ema, history


@pytest.mark.parametrize("kind", [*OF_TWO, *OF_FOUR, REPLICAS[1]])
def test_averages_of_a_grid_are_those_of_one_process(make_grid, kind):
    with one_process():
        trainer, ema, expected = trained_with_averages(model(), replicas=1)
        state, averages = trainer.state(), averages_of(trainer, ema)
        (loss,) = evaluated(trainer, ema)
    grid, net = make_grid(kind)
    trainer, ema, history = trained_with_averages(net, replicas=grid.data_size, callbacks=[SyncCheck(1)])
    assert_same_history(history, expected)
    found = averages_of(trainer, ema)
    assert sorted(found) == sorted(averages)
    for name, each in averages.items():
        np.testing.assert_allclose(found[name], each, rtol=0, atol=1e-6, err_msg=name)
        assert not np.allclose(each, state.arrays[name], rtol=0, atol=1e-6), name
    assert evaluated(trainer, ema) == pytest.approx([loss], rel=1e-5)
    assert_equal(trainer.state(), state)  # the weights are back


def evaluated(trainer, ema):
    with ema.averaged():
        return [trainer.evaluate(data(()))["loss"]]


def test_weights_gathered_for_averages_are_not_trained(make_grid):
    with one_process():
        trainer = trainer_of(model(), nan_policy=None)
        fit(trainer, bad=())
        expected = trainer.state()
    _, net = make_grid("shards")
    trainer, ema = trainer_of(net, nan_policy=None), EMA(0.5, every=1)
    rows = data(())
    how = {"batch_size": BATCH // 2, "run_dir": None, "progress": False, "validation": rows, "validate_every": 2}
    trainer.fit(rows, epochs=2, callbacks=[ema], **how)
    with ema.averaged():
        trainer.predict(rows[0])
    assert_equal(trainer.state(), expected)


class StopError(Exception):
    """Ends a fit in the middle."""


class StopAt(Callback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, trainer, step):
        if trainer.global_step == self.step:
            raise StopError


RESUMES = [
    *((kind, None) for kind in OF_TWO),
    pytest.param("shards", None, marks=FOUR),
    pytest.param("stages of shards", None, marks=FOUR),
    pytest.param("shards", hvdtrain.DiLoCo(every=2), marks=FOUR),
    pytest.param("stages", hvdtrain.LocalSGD(every=3), marks=FOUR),
]


@pytest.mark.parametrize(("kind", "sync"), RESUMES, ids=str)
def test_a_resumed_grid_has_the_averages_of_one_that_never_stopped(make_grid, shared_tmp_path, kind, sync):
    grid, _ = make_grid(kind)
    found = []
    for stops in (None, 5):
        folder = str(shared_tmp_path / str(stops))
        for stop in [stops, None] if stops else [None]:
            callbacks = [Checkpoint(folder, every_steps=2), *([StopAt(stop)] if stop else [])]
            net = KINDS[kind][1](model(), grid)
            with suppress(StopError):
                trainer, ema, history = trained_with_averages(
                    net, replicas=grid.data_size, callbacks=callbacks, sync=sync, clip_norm=0.5
                )
        found.append((averages_of(trainer, ema), history["val_loss"]))
    (averages, losses), (again, resumed) = found
    assert resumed == losses
    for name, each in averages.items():
        np.testing.assert_array_equal(again[name], each, err_msg=name)


@pytest.mark.parametrize("kind", [*OF_TWO, *OF_FOUR])
def test_averages_go_from_a_grid_to_one_process_and_back(make_grid, shared_tmp_path, world, kind):
    folder, mine = str(shared_tmp_path / "grid"), str(shared_tmp_path / f"alone-{world.rank}")
    with one_process():
        trainer, ema, _ = trained_with_averages(model(), replicas=1, epochs=3)
        expected = averages_of(trainer, ema)
    grid, net = make_grid(kind)
    trainer, ema, _ = trained_with_averages(net, replicas=grid.data_size, epochs=1, callbacks=[Checkpoint(folder)])
    saved = averages_of(trainer, ema)
    with one_process():
        exported = model()
        EMA.load(f"{folder}/epoch-000001", exported)  # the whole model's averages, without the Trainer
        for name, each in exported.state_dict().items():
            np.testing.assert_array_equal(each.numpy(), saved[f"model.{name}"], err_msg=name)
        if world.rank == 0:
            shutil.copytree(folder, mine)
            trained_with_averages(model(), replicas=1, epochs=2, callbacks=[Checkpoint(mine)])
    world.barrier()
    net, back = KINDS[kind][1](model(), grid), Checkpoint(str(shared_tmp_path / "alone-0"))
    trainer, ema, _ = trained_with_averages(net, replicas=grid.data_size, epochs=3, callbacks=[back])
    assert trainer.global_step == 3 * 5
    found = averages_of(trainer, ema)
    for name, each in expected.items():
        np.testing.assert_allclose(found[name], each, rtol=0, atol=1e-6, err_msg=name)


class Counts(Callback):
    """Counts steps, in an array."""

    def __init__(self):
        self.steps = np.zeros(3, np.int64)

    def on_step_end(self, trainer, step):
        self.steps = self.steps + 1

    def state(self):
        return {"steps": self.steps}

    def load_state(self, state):
        self.steps = state["steps"]


def test_a_callback_of_rank_0_alone_resumes_with_its_array_beside_averages(make_grid, shared_tmp_path, rank):
    grid, _ = make_grid()
    for epochs in (1, 2):
        counts = [Counts()] if rank == 0 else []
        trainer = trainer_of(KINDS["stages"][1](model(), grid), nan_policy=None)
        callbacks = [*counts, EMA(0.8, every=2), Checkpoint(str(shared_tmp_path))]  # the root counts others first
        fit(trainer, bad=(), epochs=epochs, callbacks=callbacks)
    assert [each.steps.tolist() for each in counts] == ([[10, 10, 10]] if rank == 0 else [])


@pytest.mark.parametrize("kind", OF_TWO)
def test_averages_leave_out_skipped_steps_of_a_grid_that_resumes(make_grid, shared_tmp_path, rank, kind):
    def trained(net, replicas, folder, stop=None):
        trainer, ema = trainer_of(net, clip_norm=0.5), EMA(0.8, every=1)
        callbacks = [ema, Checkpoint(folder, every_steps=1), *([StopAt(stop)] if stop else [])]
        with suppress(StopError):
            fit(trainer, replicas=replicas, callbacks=callbacks)
        return averages_of(trainer, ema)

    with one_process():
        expected = trained(model(), 1, str(shared_tmp_path / f"alone-{rank}"))
    grid, _ = make_grid(kind)
    for stop in (5, None):  # one of the first five steps is skipped
        found = trained(KINDS[kind][1](model(), grid), grid.data_size, str(shared_tmp_path / "grid"), stop)
    for name, each in expected.items():
        np.testing.assert_allclose(found[name], each, rtol=0, atol=1e-6, err_msg=name)


def test_a_stage_whose_layers_are_all_frozen_has_no_averages(make_grid):
    grid, _ = make_grid()
    net = KINDS["stages"][1](model(), grid)
    if grid.stage == 0:
        net.requires_grad_(False)
    trainer, ema, _ = trained_with_averages(net, replicas=1)
    assert averages_of(trainer, ema)


def test_averages_of_another_model_are_one_error_on_every_rank(make_grid, shared_tmp_path):
    grid, _ = make_grid()
    folder = str(shared_tmp_path)
    for frozen in ((), ("0.up.weight",)):
        net = KINDS["stages"][1](model(), grid)
        for name, each in net.named_parameters():
            each.requires_grad_(name not in frozen)
        callbacks = [Checkpoint(folder)]
        if frozen:
            with pytest.raises(ValueError, match=r"the average of 0\.up\.weight is .* and missing in the model"):
                trained_with_averages(net, replicas=1, epochs=2, callbacks=callbacks)
        else:
            trained_with_averages(net, replicas=1, epochs=1, callbacks=callbacks)


def test_the_best_weights_come_back_beside_averages_after_a_resume(make_grid, shared_tmp_path):
    def best(net, replicas, folder):
        stopping = EarlyStopping("val_loss", patience=1, restore_best=True)
        for epochs in (2, 6):
            trainer, _, history = trained_with_averages(
                net(), replicas=replicas, epochs=epochs, callbacks=[stopping, Checkpoint(folder)]
            )
        return trainer.state(), history["val_loss"]

    grid, _ = make_grid("stages")
    found, losses = best(lambda: KINDS["stages"][1](model(), grid), 1, str(shared_tmp_path / "grid"))
    with one_process():
        expected, all_losses = best(model, 1, str(shared_tmp_path / f"alone-{grid.stage}"))
    assert losses == pytest.approx(all_losses, rel=1e-5)
    assert_equal(found, expected, atol=1e-5)
