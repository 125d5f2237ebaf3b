"""Lightning's Trainer, as its users train with it: N ranks train the weights of one process."""

from __future__ import annotations

import math
import runpy
from pathlib import Path

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins import MixedPrecision
from lightning_kit import (
    BATCH,
    CLASSES,
    MARKS,
    SAMPLES,
    Model,
    assert_equal,
    assert_same_on_ranks,
    data,
    loaders,
    train_alone,
    trainer_of,
)
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, WeightedRandomSampler

import hvdtrain.torch as hvd
from hvdtrain.lightning import HorovodFabricStrategy, HorovodStrategy

pytestmark = [pytest.mark.world_size(2, 3), *MARKS]


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ({}, {}),
        ({"optimizer": "adam", "schedule": "step"}, {"gradient_clip_val": 0.05}),
        ({}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
        ({}, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05}),
        ({"optimizer": "lbfgs"}, {"precision": "64-true"}),  # its steps enlarge rounding
        ({"schedule": "plateau"}, {}),
    ],
    ids=["sgd", "adam-clip-norm-schedule", "clip-value", "accumulate", "lbfgs", "plateau"],
)
@pytest.mark.parametrize("samples", [SAMPLES, 53])
def test_ranks_train_the_weights_and_log_the_values_of_one_process(world, model, options, samples):
    ours, alone = Model(seed=world.rank, **model), Model(**model)
    trainer = trainer_of(epochs=3, **options)
    trainer.fit(ours, *loaders(samples=samples))
    there = train_alone(alone, samples=samples, epochs=3, **options)
    assert_equal(ours, alone)
    assert_same_on_ranks(ours)
    assert trainer.callback_metrics["val_count"] == samples
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    wanted = {name: float(value) for name, value in there.callback_metrics.items() if name in found}
    assert found == pytest.approx(wanted, abs=1e-5)
    assert {"val_loss", "val_accuracy", "val_curve", "loss_epoch"} <= found.keys()
    assert trainer.global_step == there.global_step
    assert trainer.optimizers[0].param_groups[0]["lr"] == there.optimizers[0].param_groups[0]["lr"]


@pytest.mark.world_size(2)
def test_workers_that_read_ahead_keep_the_weights_of_short_batches(world):
    ours, alone = Model(seed=world.rank), Model()
    train, held_out = loaders(num_workers=1, persistent_workers=True)
    trainer_of(epochs=3, val_check_interval=0.5).fit(ours, train, held_out)
    train_alone(alone, epochs=3, val_check_interval=0.5)
    assert_equal(ours, alone)


@pytest.mark.world_size(2)
def test_hooks_after_backward_see_the_mean_gradient(world):
    class Noting(Model):
        def on_after_backward(self):
            gradients = [each.grad.clone() for each in self.parameters()]
            for others in hvd.allgather_object(gradients):
                assert all(torch.equal(a, b) for a, b in zip(others, gradients, strict=True))
            self.noted = True

    model = Noting(seed=world.rank)
    trainer_of(epochs=1).fit(model, *loaders())
    assert model.noted


@pytest.mark.world_size(2)
def test_bf16_mixed_and_a_grad_scaler_train_as_in_one_process(world):
    for precision in ("bf16-mixed", MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**8))):
        ours, alone = Model(seed=world.rank), Model()
        options = {"plugins": precision} if isinstance(precision, MixedPrecision) else {"precision": precision}
        trainer_of(gradient_clip_val=0.5, **options).fit(ours, *loaders(samples=48))
        train_alone(alone, samples=48, gradient_clip_val=0.5, **options)
        assert_equal(ours, alone, 2e-3)
        assert_same_on_ranks(ours)


@pytest.mark.world_size(2)
def test_an_infinity_on_one_rank_lets_all_ranks_skip_the_step(world):
    class Overflowing(Model):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * math.inf if batch_idx == 1 and self.global_rank == 1 else loss

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    model = Overflowing()
    trainer_of(plugins=MixedPrecision("16-mixed", "cpu", scaler)).fit(model, *loaders(samples=48))
    assert all(torch.isfinite(each).all() for each in model.parameters())
    assert hvd.allgather_object(scaler.get_scale()) == [2.0**6] * world.size  # halved in each epoch
    assert_same_on_ranks(model)


class TwoOptimizers(Model):
    """Steps by hand, each with a loss of its own, the second's through the first's weights too."""

    def __init__(self, seed=0, toggles=False):
        super().__init__(seed=seed)
        self.automatic_optimization, self.toggles = False, toggles
        self.critic = torch.nn.Linear(CLASSES, 1)

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        if self.toggles:
            self.toggle_optimizer(first)
        first.zero_grad()
        self.manual_backward(cross_entropy(self.net(batch[0]), batch[1]) + self.critic(self.net(batch[0])).mean())
        self.clip_gradients(first, gradient_clip_val=0.05)
        first.step()
        if self.toggles:
            self.untoggle_optimizer(first)
        second.zero_grad()
        self.manual_backward(mse_loss(self.critic(self.net(batch[0]).detach()), batch[1][:, None].float()))
        second.step()

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9), torch.optim.Adam(self.critic.parameters())


@pytest.mark.parametrize("toggles", [False, True])
def test_two_optimizers_by_hand_train_as_in_one_process(world, toggles):
    torch.manual_seed(world.rank)
    ours, alone = TwoOptimizers(seed=world.rank, toggles=toggles), TwoOptimizers(toggles=toggles)
    trainer_of().fit(ours, *loaders())
    train_alone(alone)
    assert_equal(ours, alone)
    assert_same_on_ranks(ours)


@pytest.mark.world_size(2)
def test_a_plain_backward_by_hand_is_refused_because_clipping_would_not_see_the_mean(world):
    class Plain(Model):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            cross_entropy(self.net(batch[0]), batch[1]).backward()
            self.clip_gradients(optimizer, gradient_clip_val=0.05)
            optimizer.step()

    with pytest.raises(RuntimeError, match=r"Call self\.manual_backward\(loss\)"):
        trainer_of().fit(Plain(), *loaders(samples=48))


@pytest.mark.world_size(2)
def test_a_callback_may_read_training_data_within_an_epoch(world):
    class Looking(Model):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if batch_idx == 3:
                next(iter(self.trainer.train_dataloader))

    ours, alone = Looking(seed=world.rank), Looking()
    trainer_of().fit(ours, *loaders(samples=53))
    train_alone(alone, samples=53)
    assert_equal(ours, alone)


@pytest.mark.world_size(2)
@pytest.mark.filterwarnings("ignore:Swapping scheduler")
@pytest.mark.parametrize(
    ("callback", "options"),
    [
        (lambda: StochasticWeightAveraging(0.05, swa_epoch_start=1), {}),
        (lambda: EMAWeightAveraging(decay=0.8), {}),
        (lambda: GradientAccumulationScheduler({0: 2, 1: 3}), {}),
        (Callback, {"limit_train_batches": 0.5, "limit_val_batches": 0.5, "accumulate_grad_batches": 2}),
    ],
    ids=["swa", "ema", "accumulation-schedule", "limits"],
)
def test_callbacks_and_limits_train_and_evaluate_as_in_one_process(world, callback, options):
    samples = 8 * 3 + 1  # one sample in the last batch: one rank has none
    ours, alone = Model(seed=world.rank), Model()
    trainer = trainer_of(epochs=3, callbacks=[callback()], **options)
    trainer.fit(ours, *loaders(samples=samples))
    there = train_alone(alone, samples=samples, epochs=3, callbacks=[callback()], **options)
    assert_equal(ours, alone)
    for name in ("val_count", "val_loss", "val_accuracy"):
        assert float(trainer.callback_metrics[name]) == pytest.approx(float(there.callback_metrics[name]), abs=1e-6)


@pytest.mark.parametrize("flag", [True, False])
def test_sync_batchnorm_and_torchs_layers_train_the_weights_of_one_process(world, flag):
    ours, alone = Model(norm=True, seed=world.rank), Model(norm=True)
    ours = ours if flag else torch.nn.SyncBatchNorm.convert_sync_batchnorm(ours)
    samples = 53 if world.size == 2 else 50  # the last batch has unequal parts; at 3 ranks, none for one of them
    trainer_of(sync_batchnorm=flag).fit(ours, *loaders(samples=samples))
    train_alone(alone, samples=samples)
    assert_equal(ours, alone, 2e-6)
    assert type(ours.net[1]) is (torch.nn.BatchNorm1d if flag else hvd.SyncBatchNorm)


def test_a_sampler_that_draws_gives_each_batch_of_one_draw(world):
    seen = []

    class Noting(Model):
        def training_step(self, batch, batch_idx):
            seen.append(batch[0].clone())
            return super().training_step(batch, batch_idx)

    torch.manual_seed(world.rank)
    sampler = WeightedRandomSampler([1.0] * SAMPLES, 24, replacement=False)
    model = Noting(seed=world.rank)
    trainer_of(epochs=1).fit(model, DataLoader(data(), batch_size=BATCH, sampler=sampler))
    everyones = torch.cat(hvd.allgather_object(torch.cat(seen)))
    assert len(everyones) == 24
    assert len(everyones.unique(dim=0)) == 24


@pytest.mark.world_size(2)
def test_weights_that_are_unfrozen_later_are_averaged(world):
    class Unfreeze(BaseFinetuning):
        def freeze_before_training(self, pl_module):
            self.freeze(pl_module.net[0])

        def finetune_function(self, pl_module, current_epoch, optimizer):
            if current_epoch == 1:
                self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=0.05)

    class Head(Model):
        def configure_optimizers(self):
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    ours, alone = Head(seed=world.rank), Head()
    trainer_of(epochs=3, callbacks=[Unfreeze()]).fit(ours, *loaders())
    train_alone(alone, epochs=3, callbacks=[Unfreeze()])
    assert_equal(ours, alone)
    assert not torch.equal(ours.net[0].weight, Head().net[0].weight)


@pytest.mark.world_size(2)
def test_a_second_fit_of_the_same_model_averages_once(world):
    class Rates(Callback):
        def on_train_end(self, trainer, pl_module):
            self.names = list(pl_module.trainer.callback_metrics)

    ours, alone = Model(seed=world.rank), Model()
    kept = []
    for _ in range(2):
        trainer = trainer_of(epochs=1)
        trainer.fit(ours, *loaders())
        kept += trainer.optimizers  # as a script may keep them
        train_alone(alone, epochs=1)
    assert_equal(ours, alone)


def test_several_uneven_training_loaders_are_refused_on_every_rank(world):
    class Both(Model):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch[0], batch_idx)

    class Fetching(Model):
        validation_step = None

        def training_step(self, dataloader_iter):
            return super().training_step(next(dataloader_iter)[0], 0)

    with pytest.raises(ValueError, match="With several training DataLoaders"):
        trainer_of().fit(Both(), [loaders()[0], loaders(samples=48)[0]])
    trainer_of().fit(Both(), [loaders(samples=48)[0], loaders(samples=48)[0]])
    with pytest.raises(ValueError, match="where training_step takes dataloader_iter"):
        trainer_of().fit(Fetching(), loaders()[0])


@pytest.mark.world_size(2)
def test_what_ranks_would_decide_alone_is_refused(world):
    with pytest.raises(ValueError, match="val_check_interval as a time"):
        trainer_of(val_check_interval={"seconds": 1}).fit(Model(), *loaders())

    class Plateau(Model):
        def configure_optimizers(self):
            made = super().configure_optimizers()
            made["lr_scheduler"] |= {"interval": "step", "monitor": "loss"}
            return made

    with pytest.raises(ValueError, match="would read this rank's 'loss'"):
        trainer_of().fit(Plateau(schedule="plateau"), *loaders())


@pytest.mark.world_size(2)
def test_data_that_ranks_do_not_share_are_named(world, caplog):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([data()[number] for number in range(8)])

    class Batches(BatchSampler):
        pass

    trainer_of(epochs=1).fit(Model(), DataLoader(Stream(), batch_size=4))
    order = Batches(SequentialSampler(data()), BATCH, False)
    trainer_of(epochs=1).fit(Model(), DataLoader(data(), batch_sampler=order))
    found = [
        each for each in caplog.messages if each.startswith(("Ranks do not share", "A DistributedSampler repeats 1"))
    ]
    assert len(found) == 2 * world.is_root
    (tested,) = trainer_of().test(Model(), DataLoader(data(), batch_sampler=order))
    assert tested["val_count"] == SAMPLES


@pytest.mark.world_size(2)
def test_what_contradicts_the_launcher_is_refused(world):
    with pytest.raises(
        ValueError, match=f"devices=7 and num_nodes=1 contradict the launcher, which started {world.size}"
    ):
        trainer_of(devices=7)
    with pytest.raises(ValueError, match="num_nodes=5 contradict the launcher"):
        Fabric(strategy=HorovodFabricStrategy(), accelerator="cpu", num_nodes=5)
    assert trainer_of(HorovodStrategy(), devices=world.size).num_devices == world.size


@pytest.mark.world_size(2)
def test_the_script_of_the_page_trains(world, shared_tmp_path, tmp_path, monkeypatch):
    page = (Path(__file__).parents[3] / "docs/pages/lightning.md").read_text(encoding="utf-8")
    script = tmp_path / "train_lightning.py"
    script.write_text(page.partition("```python\n")[2].partition("```")[0])
    monkeypatch.chdir(shared_tmp_path)
    names = runpy.run_path(str(script))
    assert names["trainer"].callback_metrics["val_accuracy"] > 0.6
    assert_same_on_ranks(names["model"])
