"""What Lightning's users log and gather: values and metrics of ranks are those of one process, or are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
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
from torch.nn.functional import cross_entropy

import hvdtrain.torch as hvd

pytestmark = [pytest.mark.world_size(2, 3), *MARKS]


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


@pytest.mark.world_size(2)
def test_the_learning_rate_is_logged_once_for_each_optimizer(world, shared_tmp_path):
    monitor = LearningRateMonitor()
    logger = CSVLogger(shared_tmp_path)
    trainer_of(logger=logger, callbacks=[monitor]).fit(Model(schedule="step"), *loaders())
    assert list(monitor.lrs) == ["lr-SGD"]


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
    value = torch.tensor(float(world.rank))
    assert (
        float(strategy.reduce(value, reduce_op="sum")) == float(value) == sum(range(world.size))
    )  # in place, as by DDP
    assert float(strategy.reduce(torch.tensor(world.rank), reduce_op="mean")) == (world.size - 1) / 2
    assert int(strategy.reduce(torch.tensor(world.rank), reduce_op=torch.distributed.ReduceOp.MAX)) == world.size - 1
    assert strategy.broadcast(f"from {world.rank}", src=1) == "from 1"
    assert strategy.reduce_boolean_decision(world.rank == 0, all=False)
    assert not strategy.reduce_boolean_decision(world.rank == 0)
    with pytest.raises(ValueError, match=r"Process groups are torch\.distributed's"):
        strategy.reduce(torch.ones(1), group="tensor_parallel")


@pytest.mark.world_size(2)
def test_values_of_steps_are_those_of_one_process(world):
    class Steps(Model):
        """Logs a value of each step, and trains by the last one of an epoch."""

        def __init__(self, **options):
            super().__init__(schedule="plateau", **options)
            self.seen = []

        def training_step(self, batch, batch_idx):
            loss = cross_entropy(self.net(batch[0]), batch[1])
            self.log("shared", loss, sync_dist=True)
            self.log("own", loss)
            return loss

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.seen.append(float(self.trainer.callback_metrics["shared"]))

        def configure_optimizers(self):
            made = super().configure_optimizers()
            made["lr_scheduler"]["monitor"] = "own"
            return made

    # The last batch has unequal parts; in the other run, one rank has none of it.
    for samples in (53, 49):
        ours, alone = Steps(seed=world.rank), Steps()
        trainer = trainer_of(epochs=6)
        trainer.fit(ours, *loaders(samples=samples))
        there = train_alone(alone, samples=samples, epochs=6)
        assert ours.seen == pytest.approx(alone.seen, abs=1e-6)
        assert trainer.optimizers[0].param_groups[0]["lr"] == there.optimizers[0].param_groups[0]["lr"] < 0.1
        assert_equal(ours, alone)


@pytest.mark.world_size(2)
def test_a_value_of_an_epochs_end_is_refused_where_ranks_have_others(world):
    class AtTheEnd(Model):
        how = {}

        def validation_step(self, batch, batch_idx):
            self.right = self.net(batch[0]).argmax(1) == batch[1]

        def on_train_epoch_end(self):  # after a batch of which one rank has none
            self.log("trained", float(self.global_rank), **self.how)

        def on_validation_epoch_end(self):
            self.log("equal", 3.0, reduce_fx="sum")
            self.log("rank", float(self.global_rank), **self.how)

    with pytest.raises(ValueError, match=r"self\.log\('rank'\) in on_validation_epoch_end differs between ranks"):
        trainer_of().fit(AtTheEnd(), *loaders())
    model, trainer = AtTheEnd(), trainer_of()
    model.how = {"sync_dist": True}
    trainer.fit(model, *loaders())
    assert trainer.callback_metrics["rank"] == trainer.callback_metrics["trained"] == 0.5
    assert trainer.callback_metrics["equal"] == 3.0


@pytest.mark.world_size(2)
def test_metrics_in_training_do_not_count_a_repeated_sample(world):
    class Counting(Model):
        def training_step(self, batch, batch_idx):
            logits = self.net(batch[0])
            self.accuracy(logits, batch[1])
            self.curve.update(logits.detach().softmax(1), batch[1])
            self.log_dict({"accuracy": self.accuracy, "curve": self.curve}, on_step=False, on_epoch=True)
            return cross_entropy(logits, batch[1])

    ours, alone = Counting(seed=world.rank), Counting()
    ours.validation_step = alone.validation_step = None
    trainer = trainer_of()
    trainer.fit(ours, *loaders())
    there = train_alone(alone)
    for name in ("accuracy", "curve"):
        assert float(trainer.callback_metrics[name]) == pytest.approx(float(there.callback_metrics[name]), abs=1e-6)


@pytest.mark.world_size(2)
def test_fewer_samples_than_ranks_are_refused(world):
    with pytest.raises(ValueError, match="A DataLoader needs a sample for each rank"):
        trainer_of().fit(Model(), loaders()[0], loaders(samples=1)[1])
