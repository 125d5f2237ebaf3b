"""A small model of Lightning's, its data, and Trainers for ranks and for one process."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

import hvdtrain.torch as hvd

MARKS = [
    pytest.mark.filterwarnings("ignore:.*isinstance\\(treespec, LeafSpec\\)"),  # Lightning asks torch so
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The `srun` command is available"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:.*`dataloader_iter`"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
    pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader` but have no"),
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


def train_alone(model, *, samples=SAMPLES, epochs=2, ckpt_path=None, **options):
    """Train with plain Lightning in this process: batches of all ranks, in the order in which ranks share them."""
    batch = BATCH * hvd.size()
    order = DistributedSampler(data(samples), num_replicas=1, rank=0, shuffle=True)
    trainer = trainer_of(SingleDeviceStrategy(device="cpu"), epochs=epochs, devices=1, **options)
    trainer.fit(
        model,
        DataLoader(data(samples), batch_size=batch, sampler=order),
        loaders(batch, samples)[1],
        ckpt_path=ckpt_path,
    )
    return trainer


def assert_equal(ours, alone, tolerance=1e-6):
    for (name, mine), theirs in zip(ours.state_dict().items(), alone.state_dict().values(), strict=True):
        torch.testing.assert_close(
            mine, theirs, rtol=1e-5, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_same_on_ranks(model):
    for held in hvd.allgather_object([each.clone() for each in model.state_dict().values()]):
        assert all(torch.equal(a, b) for a, b in zip(held, model.state_dict().values(), strict=True))
