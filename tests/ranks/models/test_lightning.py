"""Lightning's Trainer and Fabric, as their users train with them: N ranks train the weights of one process."""

from __future__ import annotations

import math
import runpy
from pathlib import Path

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, Callback, EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, WeightedRandomSampler
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

import hvdtrain.torch as hvd
from hvdtrain.lightning import HorovodFabricStrategy, HorovodStrategy

pytestmark = [
    pytest.mark.world_size(2, 3),
    pytest.mark.filterwarnings("ignore:.*isinstance\\(treespec, LeafSpec\\)"),  # Lightning asks torch so
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The `srun` command is available"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:.*were returned from `configure_optimizers`"),
]

BATCH, SAMPLES, CLASSES = 4, 49, 3  # 49 leaves one sample for the last batch of 2 and of 3 ranks, 53 leaves five


def data(samples=SAMPLES, seed=0):
    """Return features (samples, 6) and classes (samples,)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(samples, 6, generator=generator)
    return TensorDataset(x, (x.sum(1) * 10).long() % CLASSES)


class Model(LightningModule):
    def __init__(self, optimizer="sgd", norm=False, seed=0, schedule=None):
        super().__init__()
        torch.manual_seed(seed)
        hidden = [torch.nn.BatchNorm1d(16)] if norm else []
        self.net = torch.nn.Sequential(torch.nn.Linear(6, 16), *hidden, torch.nn.Tanh(), torch.nn.Linear(16, CLASSES))
        self.kind, self.schedule = optimizer, schedule
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.curve = MulticlassAUROC(CLASSES)

    def training_step(self, batch, batch_idx):
        loss = cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        logits = self.net(batch[0]).float()
        self.log("val_loss", cross_entropy(logits, batch[1]))
        self.log("val_synced", cross_entropy(logits, batch[1]), sync_dist=True)
        self.log("val_count", float(len(batch[0])), reduce_fx="sum")
        self.log("val_max", logits.max(), reduce_fx="max")
        self.accuracy.update(logits, batch[1])
        self.curve.update(logits.softmax(1), batch[1])
        self.log_dict({"val_accuracy": self.accuracy, "val_curve": self.curve})

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return batch[0]

    def configure_optimizers(self):
        made = {
            "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
            "adam": lambda p: torch.optim.Adam(p, lr=0.02),
            "lbfgs": lambda p: torch.optim.LBFGS(p, max_iter=3, line_search_fn="strong_wolfe"),
        }[self.kind](self.parameters())
        if self.schedule == "step":
            schedule = torch.optim.lr_scheduler.ExponentialLR(made, 0.9)
            return {"optimizer": made, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
        if self.schedule == "plateau":
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(made, patience=0, threshold=0.5)
            return {"optimizer": made, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}
        return made


def trainer_of(strategy="horovod", *, epochs=2, **options):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "log_every_n_steps": 1}
    options = {**quiet, "enable_checkpointing": False, "num_sanity_val_steps": 0, **options}
    return Trainer(strategy=strategy, max_epochs=epochs, accelerator="cpu", **options)


def loaders(batch=BATCH, samples=SAMPLES, **options):
    held_out = data(samples, seed=1)
    return DataLoader(data(samples), batch_size=batch, **options), DataLoader(held_out, batch_size=batch)


def train_alone(model, *, samples=SAMPLES, epochs=2, **options):
    """Train with plain Lightning in this process: batches of all ranks, in the order in which ranks share them."""
    batch = BATCH * hvd.size()
    order = DistributedSampler(data(samples), num_replicas=1, rank=0, shuffle=True)
    trainer = trainer_of(SingleDeviceStrategy(device="cpu"), epochs=epochs, devices=1, **options)
    trainer.fit(model, DataLoader(data(samples), batch_size=batch, sampler=order), loaders(batch, samples)[1])
    return trainer


def assert_equal(ours, alone, tolerance=1e-6):
    for (name, mine), theirs in zip(ours.state_dict().items(), alone.state_dict().values(), strict=True):
        torch.testing.assert_close(
            mine, theirs, rtol=1e-5, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_same_on_ranks(model):
    for held in hvd.allgather_object([each.clone() for each in model.state_dict().values()]):
        assert all(torch.equal(a, b) for a, b in zip(held, model.state_dict().values(), strict=True))


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
    step = "loss_step"  # of this rank's last batch
    found = {name: float(value) for name, value in trainer.callback_metrics.items() if name not in (step, "loss")}
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
def test_a_plain_backward_by_hand_is_averaged_before_the_step(world):
    class Plain(Model):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()

            def closure():
                optimizer.zero_grad()
                cross_entropy(self.net(batch[0]), batch[1]).backward()

            optimizer.step(closure)

    ours, alone = Plain(seed=world.rank), Plain()
    trainer_of().fit(ours, *loaders(samples=48))
    train_alone(alone, samples=48)
    assert_equal(ours, alone)
    with pytest.raises(RuntimeError, match=r"Call self\.manual_backward\(loss\)"):
        trainer_of().fit(Plain(), *loaders())


def test_a_run_from_a_checkpoint_ends_as_one_that_never_stopped(world, shared_tmp_path):
    straight, first, second = (Model("adam", schedule="step", seed=world.rank) for _ in range(3))
    trainer_of(epochs=4).fit(straight, *loaders())
    saved = ModelCheckpoint(dirpath=shared_tmp_path, filename="half", save_weights_only=False)
    trainer_of(epochs=2, enable_checkpointing=True, callbacks=[saved]).fit(first, *loaders())
    assert [each.name for each in shared_tmp_path.iterdir()] == ["half.ckpt"]
    trainer_of(epochs=4).fit(second, *loaders(), ckpt_path=shared_tmp_path / "half.ckpt")
    assert all(torch.equal(a, b) for a, b in zip(second.parameters(), straight.parameters(), strict=True))


@pytest.mark.world_size(2)
def test_a_checkpoint_goes_on_in_plain_lightning_in_one_process(world, shared_tmp_path):
    ours, alone, again = Model("adam", seed=world.rank), Model("adam"), Model("adam", seed=7)
    saved = ModelCheckpoint(dirpath=shared_tmp_path, filename="half")
    trainer_of(epochs=2, enable_checkpointing=True, callbacks=[saved]).fit(ours, *loaders())
    train_alone(alone, epochs=4)
    held = torch.load(shared_tmp_path / "half.ckpt", weights_only=True)
    plain = torch.optim.Adam(Model().parameters())
    plain.load_state_dict(held["optimizer_states"][0])
    batch = BATCH * world.size
    order = DistributedSampler(data(), num_replicas=1, rank=0, shuffle=True)
    trainer = trainer_of(SingleDeviceStrategy(device="cpu"), epochs=4, devices=1)
    alone_data = DataLoader(data(), batch_size=batch, sampler=order), loaders(batch)[1]
    trainer.fit(again, *alone_data, ckpt_path=shared_tmp_path / "half.ckpt")
    assert_equal(again, alone)


@pytest.mark.world_size(2)
def test_ranks_stop_and_save_alike_by_a_value_logged_without_sync_dist(world, shared_tmp_path):
    class Worse(Model):
        """Its values improve on rank 0 alone, and get worse on average."""

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", -self.current_epoch * 1.0 if self.global_rank == 0 else self.current_epoch * 9.0)

    model = Worse(schedule="plateau", seed=world.rank)
    saved = ModelCheckpoint(dirpath=shared_tmp_path, monitor="val_loss", filename="{epoch}", save_top_k=1)
    callbacks = [EarlyStopping("val_loss", patience=2), saved]
    trainer = trainer_of(epochs=9, enable_checkpointing=True, callbacks=callbacks)
    trainer.fit(model, *loaders())
    found = (trainer.current_epoch, trainer.optimizers[0].param_groups[0]["lr"], Path(saved.best_model_path).name)
    assert hvd.allgather_object(found) == [(3, pytest.approx(0.001), "epoch=0.ckpt")] * world.size
    assert_same_on_ranks(model)


def test_running_statistics_are_equal_on_all_ranks_and_in_checkpoints(world, shared_tmp_path):
    model = Model(norm=True, seed=world.rank)
    saved = ModelCheckpoint(dirpath=shared_tmp_path, filename="norm")
    trainer_of(callbacks=[saved], enable_checkpointing=True).fit(model, *loaders(samples=48))
    assert_same_on_ranks(model)
    held = torch.load(shared_tmp_path / "norm.ckpt", weights_only=True)["state_dict"]
    assert torch.equal(held["net.1.running_mean"], model.net[1].running_mean)


@pytest.mark.parametrize("flag", [True, False])
def test_sync_batchnorm_and_torchs_layers_train_the_weights_of_one_process(world, flag):
    ours, alone = Model(norm=True, seed=world.rank), Model(norm=True)
    ours = ours if flag else torch.nn.SyncBatchNorm.convert_sync_batchnorm(ours)
    samples = 53 if world.size == 2 else 50  # the last batch has unequal parts; at 3 ranks, none for one of them
    trainer_of(sync_batchnorm=flag).fit(ours, *loaders(samples=samples))
    train_alone(alone, samples=samples)
    assert_equal(ours, alone, 2e-6)
    assert type(ours.net[1]) is (torch.nn.BatchNorm1d if flag else hvd.SyncBatchNorm)


def test_test_and_predict_take_each_sample_once(world):
    model, trainer = Model(seed=world.rank), trainer_of()
    (found,) = trainer.test(model, loaders()[1])
    with torch.no_grad():
        whole = data(seed=1)[:]
        logits = model.eval().net(whole[0])
    assert found["val_count"] == SAMPLES
    assert found["val_loss"] == pytest.approx(float(cross_entropy(logits, whole[1])), abs=1e-6)
    assert found["val_accuracy"] == pytest.approx(float((logits.argmax(1) == whole[1]).float().mean()), abs=1e-6)
    mine = torch.cat(trainer.predict(model, loaders()[1]))
    everyones = torch.cat(hvd.allgather_object(mine))
    assert len(everyones) == SAMPLES
    assert torch.equal(everyones[everyones.sum(1).argsort()], whole[0][whole[0].sum(1).argsort()])


def test_collectives_have_lightnings_shapes_and_the_gradient_of_one_process(world):
    class Gathering(Model):
        def training_step(self, batch, batch_idx):
            logits, targets = self.all_gather(self.net(batch[0]), sync_grads=True), self.all_gather(batch[1])
            assert logits.shape == (world.size, BATCH, CLASSES)
            return (cross_entropy(logits.flatten(0, 1), targets.flatten()) ** 2).mean()

    class Squared(Model):
        def training_step(self, batch, batch_idx):
            return cross_entropy(self.net(batch[0]), batch[1]) ** 2

    ours, alone = Gathering(seed=world.rank), Squared()
    trainer = trainer_of()
    trainer.fit(ours, *loaders(samples=48))
    train_alone(alone, samples=48)
    assert_equal(ours, alone)
    strategy = trainer.strategy
    assert float(strategy.reduce(torch.tensor(world.rank), reduce_op="mean")) == (world.size - 1) / 2
    assert int(strategy.reduce(torch.tensor(world.rank), reduce_op=torch.distributed.ReduceOp.MAX)) == world.size - 1
    assert strategy.broadcast(f"from {world.rank}", src=1) == "from 1"
    assert strategy.reduce_boolean_decision(world.rank == 0, all=False)
    assert not strategy.reduce_boolean_decision(world.rank == 0)
    with pytest.raises(ValueError, match=r"Process groups are torch\.distributed's"):
        strategy.reduce(torch.ones(1), group="tensor_parallel")


@pytest.mark.world_size(2)
def test_a_progress_bar_on_rank_0_does_not_wait_for_other_ranks_in_a_hook(world):
    class Hooked(Model):
        def on_train_epoch_end(self):
            self.gathered = self.all_gather(torch.tensor(self.global_rank))

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("bar", loss, on_epoch=True, prog_bar=True)
            return loss

    model = Hooked(seed=world.rank)
    trainer_of(enable_progress_bar=True).fit(model, *loaders())
    assert model.gathered.tolist() == list(range(world.size))


@pytest.mark.world_size(2)
def test_a_value_that_one_rank_logs_is_refused_unless_it_says_so(world):
    class OnRank0(Model):
        says_so = False

        def validation_step(self, batch, batch_idx):
            if self.global_rank == 0:
                self.log("mine", batch[0].mean(), rank_zero_only=self.says_so)

    with pytest.raises(ValueError, match=r"Received: \[('mine')?\] on rank \d, \[('mine')?\] on rank"):
        trainer_of().fit(OnRank0(), *loaders())
    model, trainer = OnRank0(), trainer_of()
    model.says_so = True
    trainer.fit(model, *loaders())
    assert ("mine" in trainer.callback_metrics) == world.is_root


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


@pytest.mark.world_size(2)
def test_the_learning_rate_is_logged_once_for_each_optimizer(world, shared_tmp_path):
    monitor = LearningRateMonitor()
    logger = CSVLogger(shared_tmp_path)
    trainer_of(logger=logger, callbacks=[monitor]).fit(Model(schedule="step"), *loaders())
    assert list(monitor.lrs) == ["lr-SGD"]


def fabric_run(fabric, model, *, batch, accumulate=1, epochs=2):
    """Train as a user of Fabric does; return the optimizer, and a gradient before it is averaged."""
    local = None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = fabric.setup(model, optimizer)
    order = DistributedSampler(data(48), num_replicas=fabric.world_size, rank=fabric.global_rank, shuffle=True)
    loader = fabric.setup_dataloaders(DataLoader(data(48), batch_size=batch, sampler=order))
    for _ in range(epochs):
        for index, (x, y) in enumerate(loader):
            is_last = (index + 1) % accumulate == 0
            with fabric.no_backward_sync(model, enabled=not is_last):
                fabric.backward(cross_entropy(model(x), y) / accumulate)
            if not is_last:
                local = next(model.parameters()).grad.clone()
            else:
                fabric.clip_gradients(model, optimizer, max_norm=0.1)
                optimizer.step()
                optimizer.zero_grad()
    return optimizer, local


@pytest.mark.parametrize("accumulate", [1, 2])
def test_fabric_trains_the_weights_of_one_process(world, shared_tmp_path, accumulate):
    def net(seed):
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, CLASSES))

    ours, alone = net(world.rank), net(0)
    fabric = Fabric(strategy="horovod", accelerator="cpu")
    fabric.launch()
    assert (fabric.global_rank, fabric.world_size) == (world.rank, world.size)
    optimizer, local = fabric_run(fabric, ours, batch=BATCH, accumulate=accumulate)
    fabric_run(Fabric(accelerator="cpu", devices=1), alone, batch=BATCH * world.size, accumulate=accumulate)
    assert_equal(ours, alone)
    assert accumulate == 1 or len({str(each) for each in hvd.allgather_object(local)}) == world.size
    fabric.save(shared_tmp_path / "fabric.ckpt", {"model": ours, "optimizer": optimizer})
    fabric.barrier()
    held = torch.load(shared_tmp_path / "fabric.ckpt", weights_only=True)
    torch.optim.SGD(alone.parameters()).load_state_dict(held["optimizer"])
    metric = MeanMetric()
    assert float(fabric.all_reduce(torch.tensor(float(world.rank)), reduce_op="sum")) == sum(range(world.size))
    fabric.strategy.setup_module(metric)
    metric.update(world.rank)
    assert float(metric.compute()) == (world.size - 1) / 2


def test_several_uneven_training_loaders_are_refused_on_every_rank(world):
    class Both(Model):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch[0], batch_idx)

    with pytest.raises(ValueError, match="Of several training DataLoaders"):
        trainer_of().fit(Both(), [loaders()[0], loaders(samples=48)[0]])
    trainer_of().fit(Both(), [loaders(samples=48)[0], loaders(samples=48)[0]])


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
