"""Lightning's strategies in one process, which needs no launcher, and what they refuse."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from hvdtrain.lightning import HorovodFabricStrategy, HorovodStrategy

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
