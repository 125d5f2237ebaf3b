"""Lightning's strategies in one process, which needs no launcher, and what they refuse."""

from __future__ import annotations

import subprocess
import sys

import lightning
import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ParallelStrategy, SingleDeviceStrategy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hvdtrain
from hvdtrain.errors import HvdTrainError
from hvdtrain.lightning import HorovodFabricStrategy, HorovodStrategy, host

pytestmark = [
    pytest.mark.usefixtures("alone"),
    pytest.mark.filterwarnings("ignore:.*isinstance\\(treespec, LeafSpec\\)"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The `srun` command is available"),
]


class Model(LightningModule):
    def __init__(self, shared=False):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.shared = torch.nn.Linear(3, 1), shared

    def training_step(self, batch, batch_idx):
        loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self):
        self.automatic_optimization = not self.shared
        made = [torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9) for _ in range(1 + self.shared)]
        return made if self.shared else made[0]


def data():
    x = torch.rand(11, 3, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(1, keepdim=True))


def trainer_of(strategy, **options):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    return Trainer(strategy=strategy, accelerator="cpu", max_epochs=3, logger=False, **quiet, **options)


def test_one_process_trains_as_plain_lightning_does():
    ours, plain = Model(), Model()
    trainer = trainer_of("horovod")
    trainer.fit(ours, DataLoader(data(), batch_size=4, shuffle=True))
    there = trainer_of(SingleDeviceStrategy(device="cpu"), devices=1)
    order = DistributedSampler(data(), num_replicas=1, rank=0, shuffle=True)
    there.fit(plain, DataLoader(data(), batch_size=4, sampler=order))
    assert torch.equal(ours.net.weight, plain.net.weight)
    assert trainer.callback_metrics["loss"] == pytest.approx(float(there.callback_metrics["loss"]), abs=1e-7)
    assert (trainer.world_size, trainer.num_nodes, trainer.num_devices) == (1, 1, 1)


def test_devices_without_a_launcher_are_refused_with_the_command():
    with pytest.raises(ValueError, match=r"devices=2 and num_nodes=1 contradict.* launch with horovodrun -np 2 python"):
        trainer_of("horovod", devices=2)
    with pytest.raises(ValueError, match=r"devices=2 and num_nodes=3 contradict.* launch with horovodrun -np 6 python"):
        Fabric(strategy="horovod", accelerator="cpu", devices=2, num_nodes=3)


def test_torch_distributed_is_refused(tmp_path):
    trainer = trainer_of("horovod")
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for strategy in (HorovodStrategy, HorovodFabricStrategy):
            with pytest.raises(RuntimeError, match=r"torch\.distributed is initialized.*Remove init_process_group"):
                strategy()
        with pytest.raises(RuntimeError, match=r"torch\.distributed is initialized"):  # since the Trainer was made
            trainer.fit(Model(), DataLoader(data(), batch_size=4))
    finally:
        torch.distributed.destroy_process_group()


def test_a_grid_is_refused_by_its_name(monkeypatch):
    monkeypatch.setattr(hvdtrain.init("torch"), "grid", {"stages": 2})
    with pytest.raises(HvdTrainError, match=r"a Grid divides it\. Use hvdtrain\.Trainer, or a custom loop"):
        HorovodStrategy()


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (ParallelStrategy, "_configure_launcher"),
        (host._ResultCollection, "update_metrics"),
        (host.fabric, "_InfiniteBarrier"),
    ],
    ids=str,
)
def test_a_version_of_lightning_that_is_built_in_another_way_is_refused(monkeypatch, owner, name):
    for each in getattr(owner, "__mro__", [owner]):
        if name in vars(each):
            monkeypatch.delattr(each, name)
    with pytest.raises(HvdTrainError, match=f"Received: lightning .*, without .*{name}. Run: pip install"):
        host.check()


def test_a_trainer_without_what_the_strategy_reads_is_refused():
    trainer = trainer_of("horovod")
    del trainer.fit_loop._combined_loader
    with pytest.raises(HvdTrainError, match=r"without _FitLoop\._combined_loader"):
        trainer.strategy.setup(trainer)


def test_the_tested_version_is_the_one_that_is_installed_for_tests(caplog):
    assert lightning.__version__.startswith(f"{host.TESTED}.")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lightning, "__version__", "3.0")
        host.check()
    assert "Compare a short run with one process" in caplog.text


def test_a_parameter_in_two_optimizers_is_refused():
    with pytest.raises(ValueError, match="Two optimizers have a parameter in common"):
        trainer_of("horovod").fit(Model(shared=True), DataLoader(data(), batch_size=4))


def test_an_unknown_reduction_and_a_process_group_are_refused():
    strategy = HorovodStrategy()
    with pytest.raises(ValueError, match=r"one of mean, avg, sum, min, max, product\. Received: 'med'"):
        strategy.reduce(torch.ones(1), reduce_op="med")
    with pytest.raises(ValueError, match=r"Process groups are torch\.distributed's"):
        strategy.all_gather(torch.ones(1), group=object())


@pytest.mark.slow
def test_without_lightning_the_import_says_what_to_install():
    code = "import sys; sys.modules['lightning'] = None; import hvdtrain.lightning"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "PackageMissingError: hvdtrain.lightning needs Lightning" in done.stderr
    assert "pip install lightning" in done.stderr
