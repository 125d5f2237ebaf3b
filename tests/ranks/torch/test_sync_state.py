"""Optimizer state and weights that ranks which step alone do not all have, or train."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from trainer_kit import BATCH, Infinite, assert_close, data, fit, make_trainer, model, run, sparse_data, sparse_model

import hvdtrain
from hvdtrain.callbacks import EMA, Callback, Checkpoint
from hvdtrain.errors import HvdTrainError
from hvdtrain.torch.ops import engine
from hvdtrain.torch.reduction.weight_access import Changes, WeightAccess


@pytest.mark.world_size(2)
@pytest.mark.parametrize("options", [{"nan_policy": "skip"}, {"precision": "fp16"}], ids=["skip", "loss-scale"])
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_a_rank_that_took_no_step_yet_gets_the_optimizer_state_of_the_others(
    world, options, optimizer, assert_same_on_all_ranks
):
    """Else ranks would average different numbers of tensors, and wait for each other for ever."""
    net = model()
    infinite = Infinite(next(net.parameters()), [0])
    trainer = fit(net, optimizer, sync=hvdtrain.LocalSGD(1), hooks=[infinite], epochs=1, **options)
    assert_same_on_all_ranks(*net.parameters())
    names = world.allgather_object(sorted(trainer.state().arrays), name="names")
    assert names[0] == names[1]


@pytest.mark.world_size(2)
def test_a_rank_without_samples_steps_with_sparse_gradients_as_the_others(assert_same_on_all_ranks):
    net, rows = sparse_model(), sparse_data(BATCH * 2 + 1)  # one sample is left for a step of two ranks
    fit(net, torch.optim.SparseAdam([net[0].weight]), rows, sync=hvdtrain.LocalSGD(2))
    assert_same_on_all_ranks(*net.parameters())


class Turned(torch.nn.Module):
    """Has a complex weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(6, 3)
        self.turn = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))

    def forward(self, x):
        return (self.linear(x) * self.turn).imag


@pytest.mark.world_size(2)
def test_complex_weights_and_their_momentum_are_averaged_as_their_parts(world):
    """With SGD and every=1, that is synchronous training."""
    net, reference = Turned(), Turned()
    fit(net, sync=hvdtrain.LocalSGD(1))
    fit(reference)
    assert_close(net, reference)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("strategy", [hvdtrain.DiLoCo(4, fragments=2, overlap=1), hvdtrain.Delayed()], ids=str)
def test_complex_weights_of_ranks_are_equal_under_each_strategy(strategy, assert_same_on_all_ranks):
    net = Turned()
    before = net.turn.detach().clone()
    fit(net, "adam", sync=strategy)
    assert_same_on_all_ranks(net.linear.weight, torch.view_as_real(net.turn.detach()))
    assert ((net.turn - before).imag != 0).all()


class Scaled(torch.nn.Module):
    """A linear layer, and a weight without dimensions, as CLIP has one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.scale = torch.nn.Linear(6, 3), torch.nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return self.linear(x) * self.scale


@pytest.mark.world_size(2)
def test_the_momentum_of_a_scalar_weight_is_averaged_too(world):
    """With SGD and every=1, averaged momentum is that of synchronous training."""
    net, reference = Scaled(), Scaled()
    fit(net, sync=hvdtrain.LocalSGD(1))
    fit(reference)
    assert_close(net, reference)


class Thaw(Callback):
    """Trains the first layer too, from epoch 1 on, or after step `at` of it."""

    def __init__(self, net, at=None):
        self._layer, self._at = net[0], at
        self._layer.requires_grad_(False)

    def on_epoch_begin(self, trainer, epoch):
        self._layer.requires_grad_(epoch > 0 and self._at is None)

    def on_step_end(self, trainer, step):
        if self._at is not None and trainer.global_step == self._at:
            self._layer.requires_grad_(True)


class ThawOnce(Thaw):
    """Trains the first layer too, from epoch 1 on, and says so once: a resumed run knows it from its checkpoint."""

    def on_epoch_begin(self, trainer, epoch):
        if epoch == 1:
            self._layer.requires_grad_(True)


THAWED = {
    "every step": None,
    "LocalSGD": hvdtrain.LocalSGD(2),
    "DiLoCo": hvdtrain.DiLoCo(2),
    "streaming": hvdtrain.DiLoCo(4, fragments=2, overlap=1),
    "host": hvdtrain.LocalSGD(2, within="host"),
    "Delayed": hvdtrain.Delayed(),
}


@pytest.mark.world_size(2)
@pytest.mark.parametrize("strategy", THAWED)
def test_weights_that_are_trained_from_a_later_epoch_on_are_synchronized(strategy, assert_same_on_all_ranks):
    net = model()
    before = net[0].weight.detach().clone()
    fit(net, "adam", sync=THAWED[strategy], hooks=[Thaw(net)], epochs=3)
    assert not torch.equal(net[0].weight, before)
    assert_same_on_all_ranks(*net.parameters())


@pytest.mark.world_size(2)
def test_weights_that_are_trained_anew_between_synchronizations_are_refused(world):
    net = model()
    with pytest.raises(HvdTrainError, match=r"Weights were frozen, or are trained again, between two synchronizations"):
        fit(net, "sgd", sync=hvdtrain.DiLoCo(4), hooks=[Thaw(net, at=2)], epochs=1)


def assert_resumes_bit_for_bit(train, folder, *, stop_after, epochs):
    """Run `train(folder, epochs)`, which returns arrays, straight, and stopped after some epochs."""
    straight = train(folder / "straight", epochs)
    train(folder / "stopped", stop_after)
    for ours, theirs in zip(train(folder / "stopped", epochs), straight, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("strategy", "thaw"),
    [
        ("DiLoCo", Thaw),
        ("streaming", Thaw),
        *((each, ThawOnce) for each in ("every step", "DiLoCo", "host", "Delayed")),
    ],
)
def test_a_run_in_which_weights_were_thawed_resumes_bit_for_bit(strategy, thaw, shared_tmp_path):
    """The script begins with the frozen layer, and on_epoch_begin trains it again."""

    def train(folder, epochs):
        net = model()
        fit(net, "sgd", sync=THAWED[strategy], hooks=[thaw(net), Checkpoint(folder)], epochs=epochs)
        return [p.detach().numpy().copy() for p in net.parameters()]

    assert_resumes_bit_for_bit(train, shared_tmp_path, stop_after=3, epochs=5)


@pytest.mark.world_size(2)
def test_all_ranks_begin_without_a_velocity_where_the_roots_checkpoint_has_none(
    shared_tmp_path, assert_same_on_all_ranks
):
    fit(model(), "sgd", hooks=[Checkpoint(shared_tmp_path)], epochs=1)
    net = model()
    trainer = make_trainer(net, "sgd", sync=hvdtrain.DiLoCo(2))
    run(trainer, epochs=1)
    run(trainer, hooks=[Checkpoint(shared_tmp_path)], epochs=2)
    assert_same_on_all_ranks(*net.parameters())


class InSync(Callback):
    def __init__(self):
        self.seen = []

    def on_step_end(self, trainer, step):
        self.seen.append(trainer.in_sync)


@pytest.mark.world_size(2)
def test_a_second_fit_begins_with_its_synchronous_steps(world):
    trainer, first, second = make_trainer(model(), "sgd", sync=hvdtrain.LocalSGD(3, after_steps=2)), InSync(), InSync()
    run(trainer, hooks=[first], epochs=1)
    run(trainer, hooks=[second], epochs=1)
    assert first.seen == second.seen
    assert first.seen[:5] == [True, True, False, False, True]


@pytest.mark.world_size(2)
def test_evaluate_is_refused_where_ranks_hold_different_weights(world):
    class Interrupt(Callback):
        def on_step_end(self, trainer, step):
            raise KeyboardInterrupt

    trainer = make_trainer(model(), "sgd", sync=hvdtrain.LocalSGD(8))
    with pytest.raises(KeyboardInterrupt):
        run(trainer, hooks=[Interrupt()], epochs=1)
    with pytest.raises(HvdTrainError, match=r"evaluate\(\) was called between two synchronizations"):
        trainer.evaluate(data())


@pytest.mark.world_size(2)
def test_a_model_in_half_precision_resumes_bit_for_bit(world, shared_tmp_path):
    """What ranks agree on is rounded to the weights' type, in the checkpoint as in the run that continues."""

    def train(folder, epochs):
        net = model().bfloat16()
        net.register_forward_pre_hook(lambda _, inputs: tuple(each.bfloat16() for each in inputs))
        fit(net, "sgd", sync=hvdtrain.DiLoCo(2), hooks=[Checkpoint(folder)], epochs=epochs)
        return [p.detach().float().numpy() for p in net.parameters()]

    assert_resumes_bit_for_bit(train, shared_tmp_path, stop_after=1, epochs=4)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("sync", [hvdtrain.LocalSGD(100), hvdtrain.DiLoCo(4, fragments=2, overlap=1)], ids=str)
def test_averages_of_weights_are_updated_where_ranks_synchronize_after_an_epoch(world, sync):
    net, average = model(), EMA(0.0, every=1)  # retains nothing: equal to the weights once it is updated
    before = net[0].weight.detach().clone()
    trainer = fit(net, "sgd", sync=sync, hooks=[average], epochs=1)
    weights = {name: value.clone() for name, value in net.state_dict().items()}
    with average.averaged():
        for name, value in net.state_dict().items():
            torch.testing.assert_close(value, weights[name], atol=0, rtol=0)
    assert trainer.in_sync
    assert not torch.equal(net[0].weight, before)


@pytest.mark.world_size(2)
def test_both_halves_of_a_bf16_mean_are_sent_while_the_rank_does_something_else(world, monkeypatch):
    net, native, second_half = model(), engine.native(), threading.Event()
    gather = native.allgather_async

    def sends(*args, **kwargs):
        second_half.set()
        return gather(*args, **kwargs)

    monkeypatch.setattr(native, "allgather_async", sends)
    optimizers = {"": (torch.optim.SGD(net.parameters(), lr=0.1), torch.amp.GradScaler(enabled=False))}
    access = WeightAccess(optimizers, world, Changes({}, "none"))
    mean = access.mean([torch.full((1000,), 1.0 + world.rank)], name="mean", compression="bf16")
    assert second_half.wait(20)
    assert mean()[0].unique().tolist() == [1.5]
