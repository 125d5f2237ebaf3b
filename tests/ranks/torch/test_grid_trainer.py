"""The Trainer on a Grid: models in stages, shards and tensor parts train as one process does."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from contextlib import suppress

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from grid_kit import TOKENS, WIDTH, Block, divided, one_process, staged
from torch import nn
from torch.distributed.fsdp import fully_shard

import hvdtrain
import hvdtrain.torch
from hvdtrain.callbacks import Callback, Checkpoint, EarlyStopping, SyncCheck
from hvdtrain.data.sharding import epoch_order
from hvdtrain.errors import DesyncError, HvdTrainError

pytestmark = pytest.mark.world_size(2)
CLASSES = 5
BATCH, SAMPLES = 12, 101  # of one process; the last step of an epoch has 5 samples


class Embed(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(7, WIDTH)
        self.register_buffer("places", torch.linspace(-1, 1, TOKENS * WIDTH).view(TOKENS, WIDTH))

    def forward(self, ids):
        return self.tokens(ids) + self.places


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.linear(x).transpose(1, 2).clone()  # (batch, classes, tokens); fully_shard warns of a view


def model():
    torch.manual_seed(0)
    return nn.Sequential(Embed(), Block(), Block(), Head())


def tokens(*, ignored=0.2):
    """Return ids and labels, of which a part is ignored: ranks have other numbers of labels."""
    rng = np.random.default_rng(1)
    labels = rng.integers(0, CLASSES, (SAMPLES, TOKENS))
    labels[rng.random(labels.shape) < ignored] = -100
    return rng.integers(0, 7, (SAMPLES, TOKENS)), labels


def sharded(net, grid):
    for layer in net.children():
        fully_shard(layer, mesh=grid.mesh("shard"))
    return fully_shard(net, mesh=grid.mesh("shard"))


KINDS = {
    "1f1b": ({"stages": 2}, staged),
    "gpipe": ({"stages": 2}, lambda net, grid: staged(net, grid, "gpipe")),
    "shard": ({"shard": 2}, sharded),
    "tensor": ({"tensor": 2}, divided),
    "stages of tensors": ({"stages": 2, "tensor": 2}, lambda net, grid: staged(divided(net, grid), grid)),
    "stages of shards": ({"stages": 2, "shard": 2}, lambda net, grid: sharded(staged(net, grid), grid)),
    "shards of tensors": ({"shard": 2, "tensor": 2}, lambda net, grid: sharded(divided(net, grid), grid)),
    "gpipe of shards": ({"stages": 2, "shard": 2}, lambda net, grid: sharded(staged(net, grid, "gpipe"), grid)),
}
FOUR = pytest.mark.world_size(4)
OF_FOUR = [pytest.param(f"stages of {parts}", marks=FOUR) for parts in ("tensors", "shards")]


@pytest.fixture
def make_grid(grid_of):
    def make(kind="1f1b"):
        lengths, divide = KINDS[kind]
        grid = grid_of(**lengths)
        return grid, divide(model(), grid)

    return make


def optimizer_of(net, **options):
    return torch.optim.SGD(net.parameters(), **{"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01} | options)


def adam_of(net):
    # A large eps: the gradient of a key's bias is zero up to rounding, which Adam would make large.
    return torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1, eps=1e-2)


def trainer_of(net, *, make=optimizer_of, **options):
    return hvdtrain.Trainer(net, optimizer=make(net), loss=nn.CrossEntropyLoss(), metrics=["accuracy"], **options)


def load(directory, net):
    optimizer = adam_of(net)
    return hvdtrain.Trainer.load(directory, net, optimizer=optimizer, loss=nn.CrossEntropyLoss(), metrics=["accuracy"])


def fit(trainer, *, replicas, epochs=2, samples=SAMPLES, ignored=0.2, **options):
    x, y = (each[:samples] for each in tokens(ignored=ignored))
    return trainer.fit(
        (x, y), epochs=epochs, batch_size=BATCH // replicas, run_dir=None, progress=False, validation=(x, y), **options
    )


def alone(**options):
    """Return the state, history and predictions of one process."""
    of_fit = {name: options.pop(name) for name in ("epochs", "samples", "ignored") if name in options}
    with one_process():
        trainer = trainer_of(model(), **options)
        history = fit(trainer, replicas=1, **of_fit)
        return trainer.state(), history, trainer.predict(tokens()[0])


def assert_equal(state, expected, *, atol=1e-6):
    assert sorted(state.arrays) == sorted(expected.arrays)
    for name in expected.arrays:
        bounds = {"rtol": min(1e-6, atol), "atol": atol}
        np.testing.assert_allclose(state.arrays[name], expected.arrays[name], **bounds, err_msg=name)


def assert_same_history(history, expected):
    for name in ("loss", "accuracy", "val_loss", "val_accuracy"):
        assert history[name] == pytest.approx(expected[name], rel=1e-5), name


@pytest.mark.parametrize("kind", ["1f1b", "shard", "tensor"])
def test_a_grid_trains_the_model_of_one_process(make_grid, kind):
    assert_equal_to_one_process(make_grid, kind, SAMPLES)


@FOUR
@pytest.mark.parametrize("kind", KINDS)
def test_replicas_of_which_some_have_no_sample_train_the_model_of_one_process(make_grid, kind):
    assert_equal_to_one_process(make_grid, kind, 97)  # the last step of an epoch has one sample


def assert_equal_to_one_process(make_grid, kind, samples, **of_fit):
    options = {"clip_norm": 0.5, "accumulate": 2}
    of_fit = {"samples": samples} | of_fit
    state, history, predicted = alone(**options, **of_fit)
    grid, net = make_grid(kind)
    trainer = trainer_of(net, **options)
    found = fit(trainer, replicas=grid.data_size, **of_fit)
    assert_same_history(found, history)
    assert_equal(trainer.state(), state)
    np.testing.assert_allclose(trainer.predict(tokens()[0]), predicted, atol=1e-5)
    assert trainer.state().meta["layout"] == state.meta["layout"]


@FOUR
@pytest.mark.parametrize("kind", ["stages of shards", "gpipe of shards"])
def test_twenty_steps_in_stages_of_shards_equal_one_process(make_grid, kind):
    # Some micro-batches of a rank have no label.
    assert_equal_to_one_process(make_grid, kind, 97, epochs=4, ignored=0.6)


@pytest.mark.parametrize("kind", ["1f1b", "shard", *OF_FOUR])
def test_predict_takes_batches_of_which_a_rank_has_no_sample(make_grid, kind):
    x = np.resize(tokens()[0], (65, TOKENS))  # in batches of 32 on each of two ranks: the second one has no more
    with one_process():
        expected = trainer_of(model()).predict(x)
    _, net = make_grid(kind)
    trainer = trainer_of(net)
    for samples in (65, 1):
        np.testing.assert_allclose(trainer.predict(x[:samples]), expected[:samples], atol=1e-5)


@pytest.mark.parametrize("kind", ["shard", *OF_FOUR])
def test_evaluate_takes_batches_of_which_a_rank_has_no_sample(make_grid, kind):
    x, y = (each[:65] for each in tokens())
    with one_process():
        expected = trainer_of(model()).evaluate((x, y))
    _, net = make_grid(kind)
    trainer = trainer_of(net)
    for _ in range(2):
        assert trainer.evaluate((x, y)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", ["shard", *OF_FOUR])
def test_a_run_of_one_sample_does_not_wait_for_ranks_without_any(make_grid, kind):
    assert_equal_to_one_process(make_grid, kind, 1, ignored=0.0)


def mean_of_labels(model, batch):
    inputs, labels = batch
    return hvdtrain.Loss(F.cross_entropy(model(inputs), labels), count=(labels != -100).sum())


@pytest.mark.parametrize("kind", ["shard", pytest.param("shards of tensors", marks=FOUR)])
def test_a_step_whose_loss_is_nan_where_nothing_counts_equals_one_process(make_grid, kind):
    x, y = (each[:49] for each in tokens(ignored=0.0))  # the last step of an epoch has one sample
    y[epoch_order(49, epoch=0, seed=0)[1:BATCH:2]] = -100  # the second rank's in the first step

    def fitted(net, replicas):
        trainer = hvdtrain.Trainer(net, optimizer=optimizer_of(net), step=mean_of_labels)
        trainer.fit((x, y), batch_size=BATCH // replicas, epochs=2, run_dir=None, progress=False)
        return trainer.state()

    with one_process():
        expected = fitted(model(), 1)
    grid, net = make_grid(kind)
    assert_equal(fitted(net, grid.data_size), expected)


@FOUR
def test_repeated_blocks_are_found_in_stages_of_shards(make_grid):
    _, net = make_grid("stages of shards")  # one block a stage
    trainer_of(net, checkpoint_activations="blocks")


@FOUR
@pytest.mark.parametrize("kind", ["1f1b", "shard", "tensor"])
def test_replicas_that_average_weights_after_each_step_equal_one_process(make_grid, kind):
    plain = {"make": lambda net: optimizer_of(net, momentum=0.0)}
    state, history, _ = alone(**plain, ignored=0.0)  # ranks that step alone count samples, not labels
    grid, net = make_grid(kind)
    trainer = trainer_of(net, sync=hvdtrain.LocalSGD(every=1), **plain)
    found = fit(trainer, replicas=grid.data_size, ignored=0.0)
    assert found["val_loss"] == pytest.approx(history["val_loss"], rel=1e-5)
    assert_equal(trainer.state(), state)


@FOUR
@pytest.mark.parametrize("kind", ["1f1b", "shard"])
def test_a_replica_that_never_had_a_sample_gets_the_momentum_of_others(make_grid, kind):
    few = {"samples": 1, "ignored": 0.0}
    state, _, _ = alone(**few)
    grid, net = make_grid(kind)
    trainer = trainer_of(net, sync=hvdtrain.LocalSGD(every=1))
    fit(trainer, replicas=grid.data_size, **few)
    assert_equal(trainer.state(), state)


# Without clipping no number is rounded otherwise. The norm is: stages add their parts of it. A weight's last bit may
# then be another one, which bf16 or fp16 rounds up rather than down.
@pytest.mark.parametrize(("clip_norm", "atol"), [(None, 0.0), (0.5, 1e-5)])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_stages_in_mixed_precision_equal_one_process_with_the_same_micro_batches(make_grid, precision, clip_norm, atol):
    whole = {"samples": 8 * BATCH}  # a short step would be cut into other micro-batches
    state, _, _ = alone(precision=precision, micro_batch=BATCH // 3, clip_norm=clip_norm, **whole)
    _, net = make_grid()
    trainer = trainer_of(net, precision=precision, clip_norm=clip_norm)
    fit(trainer, replicas=1, **whole)
    assert_equal(trainer.state(), state, atol=atol)


@pytest.mark.parametrize("place", ["0", "3"])
def test_a_gradient_that_overflows_on_one_stage_is_skipped_on_all(make_grid, place):
    def trained(net, **options):
        calls = itertools.count()
        for name, each in net.named_parameters():
            if name.startswith(place):
                each.register_hook(lambda grad: grad * (math.inf if next(calls) == 10 else 1))
        trainer = trainer_of(net, precision="fp16", **options)
        fit(trainer, replicas=1, samples=8 * BATCH)
        return trainer.state()

    with one_process():
        expected = trained(model(), micro_batch=BATCH // 3)
    _, net = make_grid()
    found = trained(net)
    assert found.meta["scaler"] == expected.meta["scaler"]
    assert found.meta["scaler"]["scale"] == 2.0**15  # one step was skipped
    assert_equal(found, expected, atol=0)


@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        ("shard", "bf16"),
        ("shard", "fp16"),
        ("tensor", "bf16"),
        pytest.param("stages of shards", "bf16", marks=FOUR),
        pytest.param("stages of shards", "fp16", marks=FOUR),
    ],
)
def test_divided_weights_in_mixed_precision_are_near_one_process(make_grid, kind, precision):
    options = {"precision": precision, "clip_norm": 0.5}
    state, history, _ = alone(**options)
    grid, net = make_grid(kind)
    trainer = trainer_of(net, **options)
    found = fit(trainer, replicas=grid.data_size)
    assert found["val_loss"] == pytest.approx(history["val_loss"], rel=1e-3)
    assert_equal(trainer.state(), state, atol=2e-3)  # ranks round other sums


@pytest.mark.parametrize("kind", ["1f1b", "shard", *OF_FOUR])
def test_a_checkpoint_of_a_grid_is_one_of_a_single_process_and_back(make_grid, shared_tmp_path, world, kind):
    state, _, _ = alone(make=adam_of, epochs=3)
    folder = str(shared_tmp_path / "checkpoints")
    grid, net = make_grid(kind)
    fit(trainer_of(net, make=adam_of), replicas=grid.data_size, epochs=1, checkpoint_dir=folder)
    copy = str(shared_tmp_path / f"alone-{world.rank}")
    with one_process():  # reads what the grid has written, and writes what the grid reads
        found = load(f"{folder}/epoch-000001", model())
        fit(found, replicas=1, epochs=2)
        found.save(copy)
    net = KINDS[kind][1](model(), grid)
    again = load(str(shared_tmp_path / "alone-0"), net)
    fit(again, replicas=grid.data_size, epochs=3)
    assert_equal(again.state(), state)


def test_a_whole_models_weights_file_is_read_by_torch_alone(make_grid, shared_tmp_path, world):
    from safetensors.torch import load_file

    grid, net = make_grid()
    trainer = trainer_of(net)
    fit(trainer, replicas=grid.data_size, epochs=1)
    trainer.save(str(shared_tmp_path / "saved"))
    whole = model()
    whole.load_state_dict(load_file(shared_tmp_path / "saved" / "model.safetensors"))
    x, _ = tokens()
    with torch.no_grad():
        expected = whole.eval()(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(trainer.predict(x), expected, atol=1e-6)


@pytest.mark.parametrize("kind", ["1f1b", "shard"])
def test_early_stopping_gives_each_part_its_best_weights_back(make_grid, kind):
    def best(trainer, replicas):
        stopping = EarlyStopping("val_loss", patience=0, restore_best=True)
        history = fit(trainer, replicas=replicas, epochs=6, callbacks=[stopping])
        assert len(history["val_loss"]) < 6
        return trainer.state()

    options = {"make": lambda net: optimizer_of(net, lr=1.0)}
    with one_process():
        state = best(trainer_of(model(), **options), 1)
    grid, net = make_grid(kind)
    assert_equal(best(trainer_of(net, **options), grid.data_size), state, atol=1e-4)


@FOUR
@pytest.mark.parametrize("kind", ["1f1b", "shard"])
def test_the_velocities_of_the_best_weights_come_back_to_each_part(make_grid, kind):
    grid, _ = make_grid(kind)

    def trained(epochs):
        options = {"make": lambda net: optimizer_of(net, lr=0.01), "sync": hvdtrain.DiLoCo(every=2)}
        trainer = trainer_of(KINDS[kind][1](model(), grid), **options)
        stopping = EarlyStopping("loss", mode="max", patience=9, restore_best=True)
        history = fit(trainer, replicas=grid.data_size, epochs=epochs, callbacks=[stopping])
        assert max(history["loss"]) == history["loss"][0]  # the best epoch is the first
        fit(trainer, replicas=grid.data_size, epochs=1)
        return trainer.state()

    assert_equal(trained(2), trained(1), atol=0)


@FOUR
@pytest.mark.parametrize("kind", ["1f1b", "shard"])
def test_each_part_continues_with_its_own_velocities_of_a_loaded_checkpoint(make_grid, shared_tmp_path, kind):
    grid, _ = make_grid(kind)
    sync, folder = {"sync": hvdtrain.DiLoCo(every=2)}, str(shared_tmp_path / "saved")

    def trained(trainer, epochs):
        fit(trainer, replicas=grid.data_size, epochs=epochs)
        return trainer

    straight = trained(trainer_of(KINDS[kind][1](model(), grid), **sync), 2)
    trained(trainer_of(KINDS[kind][1](model(), grid), **sync), 1).save(folder)
    net = KINDS[kind][1](model(), grid)
    how = {"optimizer": optimizer_of(net), "loss": nn.CrossEntropyLoss(), "metrics": ["accuracy"], **sync}
    assert_equal(trained(hvdtrain.Trainer.load(folder, net, **how), 2).state(), straight.state(), atol=0)


@pytest.mark.parametrize("kind", ["shard", pytest.param("1f1b", marks=FOUR)])
def test_the_best_running_statistics_within_an_epoch_are_the_mean_of_ranks(grid_of, kind):
    lengths, divide = KINDS[kind]
    grid = grid_of(**lengths)
    torch.manual_seed(0)
    net = divide(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4)), grid)
    trainer = hvdtrain.Trainer(net, optimizer=torch.optim.SGD(net.parameters(), 1.0), loss=nn.MSELoss())
    stopping = EarlyStopping("val_loss", mode="max", patience=9, restore_best=True)
    data = torch.randn(64, 4), torch.zeros(64, 4)
    of_fit = {"epochs": 1, "batch_size": 16 // grid.data_size, "run_dir": None, "progress": False}
    trainer.fit(data, validation=data, validate_every=1, callbacks=[stopping], **of_fit)
    losses = [each["val_loss"] for each in trainer.history.validations]
    assert losses[0] == max(losses) > 2 * losses[1]
    assert trainer.evaluate(data)["loss"] == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.parametrize("kind", ["1f1b", "shard"])
def test_weights_alone_are_loaded_beside_the_optimizers_own_state(make_grid, shared_tmp_path, kind):
    grid, net = make_grid(kind)
    trainer = trainer_of(net)
    fit(trainer, replicas=grid.data_size, epochs=1)
    trainer.save(str(shared_tmp_path / "saved"))
    saved = trainer.state()
    other = KINDS[kind][1](model(), grid)
    how = {"optimizer": adam_of(other), "loss": nn.CrossEntropyLoss()}
    loaded = hvdtrain.Trainer.load(str(shared_tmp_path / "saved"), other, weights_only=True, **how)
    found = {name: array for name, array in loaded.state().arrays.items() if name.startswith("model.")}
    assert found
    assert all(np.array_equal(array, saved.arrays[name]) for name, array in found.items())


def test_a_weight_of_the_last_stage_that_is_infinite_marks_the_checkpoint(make_grid, shared_tmp_path):
    from hvdtrain.checkpoint import scan

    grid, net = make_grid()
    trainer = trainer_of(net)
    found = []
    for value in (1.0, float("inf")):
        if grid.stage == 1:
            with torch.no_grad():
                next(net.parameters()).fill_(value)
        trainer.save(str(shared_tmp_path / str(value)))
        found.append(scan(str(shared_tmp_path / str(value))).finite)
    assert found == [True, False]


class StopError(Exception):
    """Ends a fit in the middle."""


class StopAt(Callback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, trainer, step):
        if trainer.global_step == self.step:
            raise StopError


@pytest.mark.parametrize(
    ("kind", "sync"),
    [
        ("1f1b", None),
        ("shard", None),
        *(pytest.param(kind, None, marks=FOUR) for kind in ("shard", "tensor", "stages of shards")),
        pytest.param("1f1b", hvdtrain.DiLoCo(every=2), marks=FOUR),
        pytest.param("shard", hvdtrain.DiLoCo(every=2), marks=FOUR),
    ],
    ids=str,
)
def test_a_run_that_resumes_within_an_epoch_equals_one_that_never_stopped(make_grid, shared_tmp_path, kind, sync):
    grid, _ = make_grid(kind)
    states = []
    for stops in (None, 5):
        folder = str(shared_tmp_path / str(stops))
        for stop in [stops, None] if stops else [None]:
            trainer = trainer_of(KINDS[kind][1](model(), grid), make=adam_of, sync=sync, clip_norm=0.5)
            callbacks = [Checkpoint(folder, every_steps=4), *([StopAt(stop)] if stop else [])]
            with suppress(StopError):
                history = fit(trainer, replicas=grid.data_size, callbacks=callbacks)
        states.append((trainer.state(), {k: v for k, v in history.items() if k not in ("seconds", "samples_per_s")}))
    (state, history), (again, resumed) = states
    assert resumed == history
    for name in state.arrays:
        assert np.array_equal(state.arrays[name], again.arrays[name]), name


@FOUR
def test_replicas_of_a_part_are_compared_and_the_difference_is_named(make_grid, rank):
    grid, net = make_grid()

    class Damage(Callback):
        def on_step_end(self, trainer, step):
            if rank == 3 and step == 1:
                with torch.no_grad():
                    next(net.parameters()).add_(1e-3)

    with pytest.raises(DesyncError, match=r"differs between rank 1 \(.*\) and rank 3 .*after step 2 of epoch 1"):
        fit(trainer_of(net), replicas=grid.data_size, callbacks=[SyncCheck(1), Damage()])


def test_ranks_of_a_replica_see_the_same_samples_and_replicas_each_sample_once(make_grid, hvd):
    grid, _ = make_grid()
    net = grid.pipeline(nn.Sequential(nn.Linear(1, 4), nn.Linear(4, 1)), micro_batches=2)
    seen = []

    def mse(outputs, targets):
        seen.extend(targets.reshape(-1).tolist())
        return F.mse_loss(outputs, targets)

    x = np.arange(30, dtype=np.float32)[:, None]
    trainer = hvdtrain.Trainer(net, optimizer=torch.optim.SGD(net.parameters(), 1e-6), loss=mse, metrics=["mae"])
    trainer.fit((x, x), batch_size=4, run_dir=None, progress=False, epochs=1)
    everyones = hvd.allgather_object(seen)
    checked = {float(each) for each in itertools.chain(*everyones)}
    assert checked == set(map(float, range(30)))


REFUSALS = {
    "the model is a stage": ("1f1b", lambda net, grid: trainer_of(model())),
    "the model is divided before": ("shard", lambda net, grid: trainer_of(model())),
    "own parameters": ("1f1b", lambda net, grid: trainer_of(net, make=lambda _: optimizer_of(model()))),
    "Received: micro_batch=2": ("1f1b", lambda net, grid: trainer_of(net, micro_batch=2)),
    "Received: shard='optimizer'": ("1f1b", lambda net, grid: trainer_of(net, shard="optimizer")),
    "Received: compression='fp16'": ("shard", lambda net, grid: trainer_of(net, compression="fp16")),
    "takes its steps in every rank": ("1f1b", lambda net, grid: trainer_of(net, sync=hvdtrain.Delayed())),
    "the speed of one is not known": (
        "1f1b",
        lambda net, grid: fit(trainer_of(net), replicas=grid.data_size, balance="speed"),
    ),
    "on one replica of": ("shard", lambda net, grid: trainer_of(net, sync=hvdtrain.DiLoCo(every=2))),
    "rename the layer. Received: 'outputs'": (
        "shard",
        lambda net, grid: grid.pipeline(nn.Sequential(OrderedDict(outputs=nn.Linear(1, 1))), micro_batches=1),
    ),
    "such as AdamW. Received: an optimizer that needs a closure": (
        "shard",
        lambda net, grid: trainer_of(net, make=lambda net: torch.optim.LBFGS(net.parameters())),
    ),
    "all divided, or all whole": ("tensor", lambda net, grid: trainer_of(net, precision="fp16")),
    "stages compute layer by layer": (
        "1f1b",
        lambda net, grid: hvdtrain.Trainer(net, optimizer=optimizer_of(net), step=lambda model, batch: None),
    ),
}


@FOUR
def test_replicas_over_which_torch_averages_in_each_step_cannot_step_alone(grid_of):
    grid = grid_of(shard=2)
    net = fully_shard(model(), mesh=grid.mesh("replica", "shard"))
    with pytest.raises((ValueError, HvdTrainError), match="torch averages over replicas in every step"):
        trainer_of(net, sync=hvdtrain.LocalSGD(every=2))


@pytest.mark.parametrize("name", ["requires_gradient_sync", "reshard_after_backward", "is_last_backward"])
def test_what_an_earlier_loop_left_out_of_backward_is_in_each_step(make_grid, name):
    state, _, _ = alone()
    grid, net = make_grid("shard")
    getattr(net, f"set_{name}")(False)
    trainer = trainer_of(net)
    fit(trainer, replicas=grid.data_size)
    assert_equal(trainer.state(), state)


@FOUR
def test_layers_whose_statistics_would_count_added_rows_are_refused(make_grid):
    grid, _ = make_grid("stages of shards")
    norms = nn.Sequential(nn.BatchNorm1d(1), nn.BatchNorm1d(1))
    stage = sharded(grid.pipeline(norms, micro_batches=2), grid)
    with pytest.raises((ValueError, HvdTrainError), match=r"use LayerNorm or GroupNorm\. Received: BatchNorm"):
        trainer_of(stage)


@FOUR
def test_a_stage_whose_layers_alone_are_sharded_is_refused(make_grid):
    grid, _ = make_grid("stages of shards")
    stage = staged(model(), grid)
    for layer in stage.children():
        fully_shard(layer, mesh=grid.mesh("shard"))
    with pytest.raises((ValueError, HvdTrainError), match="divide the stage itself too, after its layers"):
        trainer_of(stage)


@FOUR
def test_samples_of_unequal_shapes_in_stages_of_shards_are_an_error_on_all(make_grid):
    grid, net = make_grid("stages of shards")
    trainer = trainer_of(net)
    x = np.zeros((4, TOKENS - grid.shard), np.int64)
    with pytest.raises(HvdTrainError, match=r"samples need one shape.*Received: samples of shapes \[3\] and \[2\]"):
        trainer._adapter.predict_step(x)


@pytest.mark.parametrize("message", REFUSALS)
def test_what_a_grid_cannot_do_is_one_error_on_every_rank(make_grid, message):
    kind, make = REFUSALS[message]
    grid, net = make_grid(kind)
    with pytest.raises((ValueError, HvdTrainError), match=message):
        make(net, grid)


def test_an_optimizer_of_one_stage_over_other_parameters_is_an_error_on_all(make_grid, rank):
    grid, net = make_grid()
    with pytest.raises((ValueError, HvdTrainError), match="own parameters"):
        trainer_of(net, make=lambda net: optimizer_of(model() if grid.stage else net))


def test_layers_made_on_the_meta_device_get_memory_on_the_ranks_of_their_stage(make_grid):
    grid, _ = make_grid()
    with torch.device("meta"):
        stage = grid.pipeline(nn.Sequential(Embed(), Block(), Block(), Head()), micro_batches=3)
    with pytest.raises((ValueError, HvdTrainError), match=r"give this rank.s part values: stage\.to_empty"):
        trainer_of(stage)
    stage.to_empty(device="cpu")
    stage.load_state_dict({name: value for name, value in model().state_dict().items() if name in stage.state_dict()})
    trainer = trainer_of(stage)
    fit(trainer, replicas=grid.data_size)
    assert_equal(trainer.state(), alone()[0])


def test_a_stage_alone_computes_nothing(make_grid):
    _, net = make_grid()
    with pytest.raises(HvdTrainError, match=r"its output is no prediction. Received: a call of stage \d of 2"):
        net(torch.zeros(1, TOKENS, dtype=torch.long))


def test_inputs_that_are_not_one_tensor_are_refused(make_grid):
    _, net = make_grid()
    with pytest.raises(TypeError, match=r"inputs that are one tensor.* Received: dict"):
        net.outputs({"ids": torch.zeros(1)})


@pytest.mark.parametrize(
    ("frozen", "options", "atol"), [(0, {}, 1e-6), (1, {}, 1e-6), (0, {"precision": "fp16"}, 1e-5)], ids=str
)
def test_a_frozen_stage_trains_as_in_one_process(make_grid, frozen, options, atol):
    def freeze(net):
        for name, each in net.named_parameters():
            each.requires_grad_((name[0] not in "01") == (frozen == 0))
        return net

    with one_process():
        trainer = trainer_of(freeze(model()), clip_norm=0.5, micro_batch=BATCH // 3, **options)
        history, state = fit(trainer, replicas=1, samples=8 * BATCH), trainer.state()
    _, net = make_grid()
    trainer = trainer_of(freeze(net), clip_norm=0.5, **options)
    assert_same_history(fit(trainer, replicas=1, samples=8 * BATCH), history)
    assert_equal(trainer.state(), state, atol=atol)


@FOUR
@pytest.mark.parametrize("frozen", ["01", "23"])
@pytest.mark.parametrize("sync", [None, hvdtrain.LocalSGD(every=1)], ids=["all", "LocalSGD"])
def test_replicas_of_a_stage_whose_optimizer_has_no_weight_train_as_one_process(make_grid, frozen, sync):
    options = {"momentum": 0.9, "ignored": 0.4} if sync is None else {"momentum": 0.0, "ignored": 0.0}

    def trained(net, replicas, *, momentum, ignored, **options):
        for name, each in net.named_parameters():
            each.requires_grad_(name[0] not in frozen)
        groups = [{"params": [each for each in net.parameters() if each.requires_grad]}]
        trainer = trainer_of(net, make=lambda _: torch.optim.SGD(groups, lr=0.1, momentum=momentum), **options)
        return fit(trainer, replicas=replicas, epochs=1, ignored=ignored), trainer.state()

    with one_process():
        history, state = trained(model(), 1, **options)
    grid, net = make_grid()
    found, own = trained(net, grid.replicas, sync=sync, **options)
    assert found["val_loss"] == pytest.approx(history["val_loss"], rel=1e-5)
    assert_equal(own, state)


def test_stages_of_which_none_is_trained_are_refused(make_grid):
    _, net = make_grid()
    with pytest.raises(ValueError, match="No stage of the model has trainable parameters"):
        trainer_of(net.requires_grad_(False))
