"""`hvdtrain run --config` on real ranks: what was run is kept where the run is."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None, reason="needs Horovod: install it with hvdtrain build"
)

SCRIPT = """
import os, sys
import torch
import hvdtrain

world = hvdtrain.init()
torch.manual_seed(0)
x = torch.rand(32, 4)
model = torch.nn.Linear(4, 1)
trainer = hvdtrain.Trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=torch.nn.MSELoss())
trainer.fit((x, x.sum(1, keepdim=True)), epochs=int(sys.argv[2]), batch_size=8)
if world.is_root:
    print("FOUND", world.size, os.environ["MODE"], sys.argv[1:])
"""

FILE = """
np: 2
launcher-options: [--gloo]
environment: {OMP_NUM_THREADS: 1, MODE: yes}
script: train.py
arguments: [--epochs, 1]
"""


def test_a_config_runs_the_script_and_is_kept_beside_what_the_run_keeps(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "train.yaml").write_text(FILE)
    done = subprocess.run(
        [str(Path(sys.executable).with_name("hvdtrain")), "run", "--config", "train.yaml", "--max-restarts", "0"],
        cwd=tmp_path,
        env={**os.environ, "HVDTRAIN_RUNS": "kept", "PYTHONUNBUFFERED": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FOUND 2 yes ['--epochs', '1']" in done.stdout
    (folder,) = (tmp_path / "kept").iterdir()
    assert json.loads((folder / "config.json").read_text())["epochs"] == 1
    assert yaml.safe_load((folder / "run.yaml").read_text()) == {
        "np": 2,
        "max-restarts": 0,
        "grace": 30,
        "launcher": "horovodrun",
        "launcher-options": ["--gloo"],
        "environment": {"OMP_NUM_THREADS": "1", "MODE": "yes"},
        "script": "train.py",
        "arguments": ["--epochs", "1"],
    }
    assert f"arguments --epochs 1 (saved in kept/{folder.name}/run.yaml)" in done.stderr
