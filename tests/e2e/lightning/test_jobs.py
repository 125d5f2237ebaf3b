"""A job of Lightning's Trainer in which one rank fails ends, and says why."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import torch
import lightning
import hvdtrain.lightning
from torch.utils.data import DataLoader

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and batch_idx == 3 and "step" in "WHERE":
            raise ValueError("broken on purpose")
        return self.net(batch).mean()

    def validation_step(self, batch, batch_idx):
        if self.global_rank == 1 and "validation" in "WHERE":
            raise ValueError("broken on purpose")
        self.log("value", self.net(batch).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "enable_checkpointing": False}
data = DataLoader(torch.rand(40, 3), batch_size=4)
lightning.Trainer(strategy="horovod", accelerator="cpu", num_sanity_val_steps=0, **quiet).fit(Model(), data, data)
"""


@pytest.mark.parametrize("where", ["step", "validation"])
def test_an_exception_on_one_rank_ends_the_job(tmp_path: Path, where: str) -> None:
    script = tmp_path / "broken.py"
    script.write_text(SCRIPT.replace("WHERE", where))
    command = ["horovodrun", "-np", "2", sys.executable, str(script)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode != 0
    assert "ValueError: broken on purpose" in done.stdout + done.stderr
