"""Several optimizers in one step, on one process."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import mse_loss

import hvdtrain
from hvdtrain.callbacks import Schedule
from hvdtrain.errors import CheckpointError, HvdTrainError

X, Y = torch.arange(24.0).reshape(8, 3) / 24, torch.arange(8.0)[:, None] / 8
QUIET = {"progress": False, "run_dir": None}


def pair():
    torch.manual_seed(0)
    return {"a": torch.nn.Linear(3, 2), "b": torch.nn.Linear(2, 1)}


def optimizers_of(models):
    return {
        "b": torch.optim.Adam(models["b"].parameters(), lr=0.1),
        "a": torch.optim.SGD(models["a"].parameters(), 0.2),
    }


def step(models, batch):
    x, y = batch
    yield "a", hvdtrain.Loss(mse_loss(models["b"](models["a"](x)), y))
    outputs = models["b"](models["a"](x))
    yield "b", hvdtrain.Loss(mse_loss(outputs, y), outputs=outputs, targets=y)


@pytest.fixture
def own(make):
    """Return what makes a Trainer of two models, or of what is given."""

    def trainer(models=None, **options):
        models = models or pair()
        options.setdefault("optimizer", optimizers_of(models))
        options.setdefault("step", step)
        return make(models, loss=None, **options)

    return trainer


def plain(models, epochs):
    optimizers = optimizers_of(models)
    for epoch in range(epochs):
        order = hvdtrain.sampling.epoch_order(8, epoch=epoch)
        for start in (0, 4):
            for name, loss in step(models, (X[order[start : start + 4]], Y[order[start : start + 4]])):
                optimizers[name].zero_grad()
                loss.mean.backward()
                optimizers[name].step()
    return models


def values(models):
    return [p.detach().clone() for each in models.values() for p in each.parameters()]


def assert_same(models, others):
    for one, other in zip(values(models), values(others), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-7)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_two_optimizers_take_the_steps_of_a_plain_loop(own, accumulate):
    models = pair()
    trainer = own(models, metrics=["mse"], accumulate=accumulate)
    history = trainer.fit((X, Y), epochs=2, batch_size=4 // accumulate, **QUIET)
    assert_same(models, plain(pair(), 2))
    assert {"a_loss", "b_loss", "mse"} <= set(history)
    assert set(trainer.evaluate((X, Y))) == {"a_loss", "b_loss", "mse"}


def test_optimizers_may_share_one_model(own):
    torch.manual_seed(0)
    one = torch.nn.ModuleDict(pair())
    models = {"a": one["a"], "b": one["b"]}
    own(one, optimizer=optimizers_of(models)).fit((X, Y), epochs=2, batch_size=4, **QUIET)
    assert_same(models, plain(pair(), 2))


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_each_optimizer_has_a_loss_scale_of_its_own(own, precision):
    trainer = own(precision=precision, clip_norm=1.0)
    trainer.fit((X, Y), epochs=1, batch_size=4, **QUIET)
    scalers = [update.scaler for update in trainer._adapter._updates.values()]
    assert len(set(map(id, scalers))) == 2
    assert all(scaler.is_enabled() == (precision == "fp16") for scaler in scalers)


def test_rates_are_those_of_all_groups_and_schedules_step_each(own):
    models = pair()
    optimizers = optimizers_of(models)
    trainer = own(models, optimizer=optimizers, lr_scaling="none")
    assert trainer._adapter.learning_rates == [0.1, 0.2]
    schedules = [Schedule(torch.optim.lr_scheduler.StepLR(each, 1, gamma=0.5)) for each in optimizers.values()]
    trainer.fit((X, Y), epochs=2, callbacks=schedules, **QUIET)
    assert trainer._adapter.learning_rates == [0.025, 0.05]


def test_a_checkpoint_holds_every_optimizer_by_name(own, tmp_path):
    straight = pair()
    own(straight).fit((X, Y), epochs=3, batch_size=4, **QUIET)
    first = own()
    first.fit((X, Y), epochs=1, batch_size=4, checkpoint_dir=str(tmp_path), **QUIET)
    assert {name.split(".")[1] for name in first.state().arrays if name.startswith("optimizer.")} == {"b"}
    models = pair()
    own(models).fit((X, Y), epochs=3, batch_size=4, checkpoint_dir=str(tmp_path), **QUIET)
    assert all(map(torch.equal, values(models), values(straight)))
    other = torch.optim.SGD([*models["a"].parameters(), *models["b"].parameters()], 0.1)
    with pytest.raises(CheckpointError, match=r"has the optimizers \['a', 'b'\], and here are \['x'\]"):
        own(models, optimizer={"x": other}).fit((X, Y), epochs=4, checkpoint_dir=str(tmp_path), **QUIET)


@pytest.mark.parametrize(
    ("yielded", "message"),
    [
        (lambda m, b: iter([hvdtrain.Loss(m["a"](b[0]).mean())]), "must yield pairs .*Received: a Loss on rank 0"),
        (lambda m, b: hvdtrain.Loss(m["a"](b[0]).mean()), r"must yield pairs .*Received: a Loss(.|\n)*yield \"d\""),
        (
            lambda m, b: iter([("c", hvdtrain.Loss(m["a"](b[0]).mean()))]),
            "of an optimizer: 'b', 'a'.*'c' on rank 0",
        ),
        (lambda m, b: iter([]), "of an optimizer: 'b', 'a'. Received: no yield on any rank"),
        (lambda m, b: iter([("a", 1.0)]), "must return a hvdtrain.Loss. Received: a float"),
        (
            lambda m, b: iter([((), hvdtrain.Loss(m["a"](b[0]).mean()))]),
            "must yield pairs .*, or .names, hvdtrain.Loss",
        ),
        (
            lambda m, b: iter([(("a", "c"), hvdtrain.Loss(m["a"](b[0]).mean()))]),
            r"of an optimizer: 'b', 'a'.*\('a', 'c'\) on rank 0",
        ),
    ],
)
def test_what_a_step_must_yield(own, yielded, message):
    with pytest.raises((TypeError, ValueError), match=message):
        own(step=yielded).fit((X, Y), **QUIET)


def test_batches_of_one_step_must_yield_alike(own):
    def uneven(models, batch):
        yield from list(step(models, batch))[: 1 + int(batch[0].sum() > 6)]

    with pytest.raises(hvdtrain.errors.DesyncError, match="for every batch"):
        own(step=uneven, accumulate=2).fit((X, Y), batch_size=4, **QUIET)


def test_what_several_optimizers_need(own, make):
    models = pair()
    with pytest.raises(ValueError, match="Several optimizers need step="):
        make(models, optimizer=optimizers_of(models))
    shared = torch.optim.SGD([*models["a"].parameters(), *models["b"].parameters()], 0.1)
    with pytest.raises(ValueError, match=r"must have one optimizer. Received: one of shape .* in 'a' and 'c'"):
        own(models, optimizer={**optimizers_of(models), "c": shared})
    with pytest.raises(ValueError, match=r"without dots. Received: 'a.b'"):
        own(models, optimizer={"a.b": shared})
    with pytest.raises(ValueError, match="at least one optimizer"):
        own(models, optimizer={})
    with pytest.raises(TypeError, match=r"optimizer\['a'\] must be a torch.optim.Optimizer"):
        own(models, optimizer={"a": 3})
    with pytest.raises(ValueError, match="made from this model's own parameters"):
        own(models, optimizer={"a": torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), 0.1)})
    with pytest.raises(TypeError, match=r"predict needs one model. Received: a Trainer of a, b"):
        own(models).predict(X)
    with pytest.raises(TypeError, match="model must be"):
        make({"a": 3}, optimizer=shared)


def test_metrics_need_outputs_of_one_of_the_yields(own):
    def bare(models, batch):
        yield from ((name, hvdtrain.Loss(loss.mean)) for name, loss in step(models, batch))

    with pytest.raises(ValueError, match="Metrics take outputs and targets"):
        own(metrics=["mse"], step=bare).fit((X, Y), **QUIET)


def test_one_optimizer_of_several_models(own):
    models = pair()
    shared = torch.optim.SGD([*models["a"].parameters(), *models["b"].parameters()], 0.1)
    own(models, optimizer=shared, step=lambda m, b: next(step(m, b))[1]).fit((X, Y), **QUIET)


def test_a_loss_of_one_optimizer_that_is_not_finite_is_reported(own, caplog):
    def bad(models, batch):
        for name, loss in step(models, batch):
            yield name, hvdtrain.Loss(loss.mean * (float("nan") if name == "a" else 1.0), 1)

    own(step=bad).fit((X, Y), **QUIET)
    assert "Epoch 1: b_loss is nan" in caplog.text


def test_a_loss_that_reaches_none_of_its_optimizers_parameters_is_refused(own):
    def swapped(models, batch):
        x, y = batch
        yield "b", hvdtrain.Loss(mse_loss(models["a"](x).sum(1, keepdim=True), y))

    with pytest.raises(ValueError, match=r"step yields a loss for 'b' that reaches no parameter of this optimizer"):
        own(step=swapped).fit((X, Y), batch_size=4, **QUIET)


def joined(models, batch):
    x, y = batch
    outputs = models["b"](models["a"](x).tanh())
    yield ("a", "b"), hvdtrain.Loss(mse_loss(outputs, y), outputs=outputs, targets=y)


def plain_joined(models, *, epochs=2, clip_norm=None):
    optimizers = optimizers_of(models)
    for epoch in range(epochs):
        order = hvdtrain.sampling.epoch_order(8, epoch=epoch)
        for start in (0, 4):
            ((_, loss),) = joined(models, (X[order[start : start + 4]], Y[order[start : start + 4]]))
            for each in optimizers.values():
                each.zero_grad()
            loss.mean.backward()
            if clip_norm:
                torch.nn.utils.clip_grad_norm_([p for m in models.values() for p in m.parameters()], clip_norm)
            for each in optimizers.values():
                each.step()
    return models


@pytest.mark.parametrize(("accumulate", "clip_norm", "micro_batch"), [(1, None, None), (2, 0.05, None), (1, 0.05, 2)])
def test_one_loss_trains_several_optimizers_as_a_plain_loop_does(own, accumulate, clip_norm, micro_batch):
    models = pair()
    options = {"accumulate": accumulate, "clip_norm": clip_norm, "micro_batch": micro_batch}
    trainer = own(models, metrics=["mse"], step=joined, **options)
    history = trainer.fit((X, Y), epochs=2, batch_size=4 // accumulate, **QUIET)
    assert_same(models, plain_joined(pair(), clip_norm=clip_norm))
    assert history["a_loss"] == history["b_loss"] == pytest.approx(history["mse"])
    assert set(trainer.evaluate((X, Y))) == {"a_loss", "b_loss", "mse"}


@pytest.mark.parametrize(("bad", "options"), [("a", {"nan_policy": "skip"}), ("b", {"precision": "fp16"})])
def test_several_optimizers_of_one_loss_all_take_the_step_or_none_does(own, bad, options):
    models, before = pair(), values(pair())
    for parameter in models[bad].parameters():
        parameter.register_hook(lambda grad: grad * float("inf"))
    trainer = own(models, step=joined, **options)
    trainer.fit((X, Y), epochs=1, batch_size=8, **QUIET)
    assert all(map(torch.equal, values(models), before))
    assert not trainer._adapter.step_taken
    scales = [update.scaler.get_scale() for update in trainer._adapter._updates.values()]
    assert scales[0] == (2.0**15 if "precision" in options else 1.0)  # of the first optimizer, for both


def test_a_step_may_yield_several_names_and_then_one(own):
    def both(models, batch):
        yield from joined(models, batch)
        yield "b", next(joined(models, batch))[1]

    models, other = pair(), pair()
    own(models, step=both).fit((X, Y), epochs=1, batch_size=8, **QUIET)
    optimizers = optimizers_of(other)
    order = hvdtrain.sampling.epoch_order(8, epoch=0)
    for names, loss in both(other, (X[order], Y[order])):
        for each in optimizers.values():
            each.zero_grad()
        loss.mean.backward()
        for name in names:
            optimizers[name].step()
    assert_same(models, other)


def test_a_loss_that_is_yielded_again_is_told_to_be_yielded_once(own):
    def twice(models, batch):
        loss = next(joined(models, batch))[1]
        yield "b", loss
        yield "a", loss

    with pytest.raises(HvdTrainError, match=r"a loss for 'a' .*on rank 0.*`yield \('b', 'a'\), hvdtrain.Loss"):
        own(step=twice).fit((X, Y), batch_size=4, **QUIET)


def test_a_loss_of_several_optimizers_must_reach_each(own):
    def short(models, batch):
        yield ("a", "b"), hvdtrain.Loss(models["a"](batch[0]).square().mean())

    with pytest.raises(ValueError, match=r"a loss for 'b' that reaches no parameter of this optimizer"):
        own(step=short).fit((X, Y), batch_size=4, **QUIET)
