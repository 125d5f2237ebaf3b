"""Several optimizers in one step: a GAN on ranks takes the steps of one process."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits as bce

import hvdtrain
import hvdtrain.torch as hvd
from hvdtrain.errors import DesyncError

pytestmark = pytest.mark.usefixtures("hvd")

BATCH = 3


def models(*, norm=False):
    torch.manual_seed(0)
    middle = hvd.SyncBatchNorm(8) if norm else torch.nn.Tanh()
    return {
        "g": torch.nn.Sequential(torch.nn.Linear(2, 8), middle, torch.nn.Linear(8, 4)),
        "d": torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)),
    }


def optimizers_of(made):
    momentum = torch.optim.SGD(made["d"].parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    return {"g": torch.optim.Adam(made["g"].parameters(), lr=0.02), "d": momentum}


def gan(made, batch):
    real, noise = batch
    fake = made["g"](noise)
    yield "d", hvdtrain.Loss(score(made, real, 1.0) + score(made, fake.detach(), 0.0))
    yield "g", hvdtrain.Loss(score(made, fake, 1.0), outputs=made["d"](real), targets=torch.ones(len(real), 1))


def score(made, x, wanted):
    scores = made["d"](x)
    return bce(scores, torch.full_like(scores, wanted))


def rows(count):
    random = np.random.default_rng(0)
    return random.normal(size=(count, 4)).astype(np.float32), random.normal(size=(count, 2)).astype(np.float32)


def make(made, **options):
    options.setdefault("step", gan)
    return hvdtrain.Trainer(made, optimizer=optimizers_of(made), **options)


def regression(made, batch):
    real, noise = batch
    outputs = made["d"](made["g"](noise))
    loss = torch.nn.functional.mse_loss(outputs, real[:, :1])
    yield ("d", "g"), hvdtrain.Loss(loss, outputs=outputs, targets=real[:, :1])


def one_process(data, *, epochs, accumulate=1, clip_norm=None, step=gan, made=None, optimizers_of=optimizers_of):
    made = made or models()
    optimizers = optimizers_of(made)
    for epoch in range(epochs):
        order = hvdtrain.sampling.epoch_order(len(data[0]), epoch=epoch)
        for start in range(0, len(order), chunk := hvd.size() * BATCH * accumulate):
            batch = [torch.from_numpy(each[order[start : start + chunk]]) for each in data]
            for names, loss in step(made, batch):
                names = [names] if isinstance(names, str) else names
                for name in names:
                    optimizers[name].zero_grad()
                loss.mean.backward()
                if clip_norm:
                    torch.nn.utils.clip_grad_norm_([p for name in names for p in made[name].parameters()], clip_norm)
                for name in names:
                    optimizers[name].step()
    return made


def parameters(made):
    return [p.detach() for each in made.values() for p in each.parameters()]


def assert_equal(made, other):
    for one, two in zip(parameters(made), parameters(other), strict=True):
        torch.testing.assert_close(one, two, atol=2e-6, rtol=0)


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize(("accumulate", "clip_norm"), [(1, None), (2, 0.1)])
def test_a_gan_equals_one_process(accumulate, clip_norm, assert_same_on_all_ranks):
    data = rows(hvd.size() * BATCH * 4 + 1)  # the last step has one sample, on rank 0
    made = models()
    trainer = make(made, accumulate=accumulate, clip_norm=clip_norm, metrics=["accuracy"])
    history = trainer.fit(data, epochs=2, batch_size=BATCH, progress=False)
    assert_equal(made, one_process(data, epochs=2, accumulate=accumulate, clip_norm=clip_norm))
    assert_same_on_all_ranks(*parameters(made))
    assert {"d_loss", "g_loss", "accuracy"} <= set(history)
    with torch.no_grad():
        expected = {name: float(loss.mean) for name, loss in gan(made, [torch.from_numpy(each) for each in data])}
    result = trainer.evaluate(data, batch_size=BATCH)
    assert {name: result[f"{name}_loss"] for name in ("d", "g")} == pytest.approx(expected, rel=1e-5)


def muon_and_adam(made):
    weights, others = [], []
    for p in (p for each in made.values() for p in each.parameters()):
        (weights if p.dim() == 2 else others).append(p)
    return {"g": torch.optim.Muon(weights, lr=0.02), "d": torch.optim.AdamW(others, lr=0.02)}


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize(("accumulate", "clip_norm"), [(1, None), (2, 0.05)])
@pytest.mark.parametrize("optimizers", [optimizers_of, muon_and_adam])
def test_one_loss_trains_two_optimizers_as_one_process_does(
    optimizers, accumulate, clip_norm, assert_same_on_all_ranks
):
    data = rows(hvd.size() * BATCH * 4 + 1)  # the last step has one sample, on rank 0
    made = models()
    how = {"accumulate": accumulate, "clip_norm": clip_norm}
    trainer = hvdtrain.Trainer(made, optimizer=optimizers(made), step=regression, metrics=["mse"], **how)
    history = trainer.fit(data, epochs=2, batch_size=BATCH, progress=False)
    assert_equal(made, one_process(data, epochs=2, step=regression, optimizers_of=optimizers, **how))
    assert_same_on_all_ranks(*parameters(made))
    assert history["d_loss"] == history["g_loss"] == pytest.approx(history["mse"])


@pytest.mark.world_size(2)
def test_one_loss_of_two_optimizers_takes_few_samples_norms_and_one_faulty_rank(assert_same_on_all_ranks):
    made = models()
    make(made, step=regression).fit(rows(1), epochs=2, batch_size=BATCH, progress=False)
    assert_equal(made, one_process(rows(1), epochs=2, step=regression))
    made = models(norm=True)
    make(made, step=regression).fit(rows(2 * BATCH + 3), batch_size=2 * BATCH, progress=False)
    assert_same_on_all_ranks(*parameters(made))
    for options in ({"nan_policy": "skip"}, {"precision": "fp16"}):
        calls, made = itertools.count(), models()

        def step(made, batch, calls=calls):
            bad = float("nan") if next(calls) == 1 and hvd.rank() else 1.0
            for names, loss in regression(made, batch):
                yield names, hvdtrain.Loss(loss.mean * bad)

        trainer = make(made, step=step, **options)
        trainer.fit(rows(6 * BATCH), batch_size=BATCH, progress=False)
        assert_same_on_all_ranks(*parameters(made))
        assert all(each.isfinite().all() for each in parameters(made))


@pytest.mark.world_size(2)
def test_ranks_that_train_one_loss_with_other_optimizers_are_told_so():
    def step(made, batch):
        for names, loss in regression(made, batch):
            yield (names if hvd.rank() else names[:1]), loss

    with pytest.raises(DesyncError, match=r"Received: 'd' on rank 0, \('d', 'g'\) on rank 1"):
        make(models(), step=step).fit(rows(6), batch_size=BATCH, progress=False)


@pytest.mark.world_size(2)
def test_a_step_may_yield_another_sequence_each_time():
    def several(calls):
        def step(made, batch):
            for _ in range(1 + next(calls) % 2):
                yield from itertools.islice(gan(made, batch), 1)
            yield from itertools.islice(gan(made, batch), 1, None)

        return step

    data, made = rows(6 * BATCH), models()
    make(made, step=several(itertools.count())).fit(data, batch_size=BATCH, progress=False)
    assert_equal(made, one_process(data, epochs=1, step=several(itertools.count())))


@pytest.mark.world_size(2)
def test_a_rank_without_samples_takes_every_step(assert_same_on_all_ranks):
    data, made = rows(1), models()
    make(made).fit(data, epochs=2, batch_size=BATCH, progress=False)
    assert_equal(made, one_process(data, epochs=2))
    made = models(norm=True)
    make(made).fit(rows(2 * BATCH + 2), batch_size=BATCH, progress=False)
    made = models(norm=True)
    make(made).fit(rows(2 * BATCH + 3), batch_size=2 * BATCH, progress=False)
    assert_same_on_all_ranks(*parameters(made))


@pytest.mark.world_size(2)
def test_a_yield_fills_and_sends_the_gradients_of_its_own_optimizer(native_calls):
    seen = []

    def step(made, batch):
        sequence = gan(made, batch)
        native_calls.names.clear()
        yield next(sequence)
        seen.append(all(p.grad is None for p in made["g"].parameters()))
        before = [p.grad.clone() for p in made["d"].parameters()]
        seen.append(not any("g." in name for name in native_calls.names))
        native_calls.names.clear()
        yield next(sequence)
        seen.append(not any("d." in name for name in native_calls.names))
        seen.append(all(map(torch.equal, before, [p.grad for p in made["d"].parameters()])))

    make(models(), step=step).fit(rows(2 * BATCH), batch_size=BATCH, progress=False)
    assert seen == [True] * 4


@pytest.mark.world_size(2)
def test_ranks_that_yield_in_another_order_are_told_so():
    def step(made, batch):
        pairs = list(gan(made, batch))
        yield from reversed(pairs) if hvd.rank() else pairs

    with pytest.raises(DesyncError, match=r"same names .*random.Random.*Received: 'd' on rank 0, 'g' on rank 1"):
        make(models(), step=step).fit(rows(6), batch_size=BATCH, progress=False)

    def short(made, batch):
        yield from itertools.islice(gan(made, batch), 2 - hvd.rank())

    with pytest.raises(DesyncError, match="Received: 'g' on rank 0, the end on rank 1"):
        make(models(), step=short).fit(rows(6), batch_size=BATCH, progress=False)


@pytest.mark.world_size(2)
def test_an_unknown_name_is_an_error_on_every_rank():
    def step(made, batch):
        yield "critic" if hvd.rank() else "d", hvdtrain.Loss(score(made, batch[0], 1.0))

    with pytest.raises(
        ValueError, match=r"name of an optimizer: 'g', 'd'. Received: 'd' on rank 0, 'critic' on rank 1"
    ):
        make(models(), step=step).fit(rows(6), batch_size=BATCH, progress=False)


@pytest.mark.world_size(2)
def test_a_non_finite_gradient_of_one_optimizer_ends_that_step_alone(assert_same_on_all_ranks):
    calls = itertools.count()

    def step(made, batch):
        bad = float("nan") if next(calls) == 1 and hvd.rank() else 1.0
        for name, loss in gan(made, batch):
            yield name, hvdtrain.Loss(loss.mean * (bad if name == "g" else 1.0))

    made = models()
    history = make(made, step=step, nan_policy="skip").fit(rows(6 * BATCH), batch_size=BATCH, progress=False)
    assert_same_on_all_ranks(*parameters(made))
    assert all(each.isfinite().all() for each in parameters(made))
    assert np.isfinite(history["g_loss"]).all()


@pytest.mark.world_size(2)
def test_a_run_that_stops_within_an_epoch_resumes_with_the_same_bits(tmp_path_factory):
    folder = hvd.broadcast_object(str(tmp_path_factory.mktemp("gan")), root_rank=0)
    data = rows(5 * 2 * BATCH)
    straight = models()
    make(straight).fit(data, epochs=2, batch_size=BATCH, progress=False)

    saved = [hvdtrain.callbacks.Checkpoint(folder, every_steps=7)]
    with pytest.raises(KeyboardInterrupt):
        make(models()).fit(data, epochs=2, batch_size=BATCH, callbacks=[*saved, StopAfter(8)], progress=False)
    made = models()
    make(made).fit(data, epochs=2, batch_size=BATCH, callbacks=saved, progress=False)
    assert all(map(torch.equal, parameters(made), parameters(straight)))


class StopAfter(hvdtrain.callbacks.Callback):
    """Raise after so many steps."""

    def __init__(self, steps):
        self.steps = steps

    def on_step_end(self, trainer, step):
        if trainer.global_step == self.steps:
            raise KeyboardInterrupt


@pytest.mark.world_size(2)
def test_the_drop_in_says_what_to_do_about_a_backward_through_another_optimizers_parameters():
    def run(*, restricted):
        made = models()
        optimizers = {name: hvd.DistributedOptimizer(each) for name, each in optimizers_of(made).items()}
        for _ in range(2):
            for name, loss in gan(made, [torch.from_numpy(each[hvd.rank() :: 2]) for each in rows(2 * BATCH)]):
                optimizers[name].zero_grad()
                loss.mean.backward(inputs=list(made[name].parameters()) if restricted else None)
                optimizers[name].step()
        return made

    with pytest.raises(AssertionError, match=r"loss.backward\(inputs=list\(generator.parameters\(\)\)\)"):
        run(restricted=False)
    made = run(restricted=True)
    alone = models()
    optimizers = optimizers_of(alone)
    for _ in range(2):
        for name, loss in gan(alone, [torch.from_numpy(each) for each in rows(2 * BATCH)]):
            optimizers[name].zero_grad()
            loss.mean.backward()
            optimizers[name].step()
    assert_equal(made, alone)
