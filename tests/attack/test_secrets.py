"""A run's files, as another user of the host finds them: nothing that he may open, and no secret for who may."""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Stranger

pytest.importorskip("torch")

TRAIN = """
import argparse, importlib.util, json, os, pathlib, sys
import numpy, torch, hvdtrain
from hvdtrain.callbacks import CSVLogger, RunFolder, TensorBoardLogger

parser = argparse.ArgumentParser()
for name in ("--pat", "--cfg", "--override", "--vault"):
    parser.add_argument(name)
given, password = parser.parse_args(), pathlib.Path(os.environ["PLANTED"], "password").read_text()
options = {"password": password, "nested": [{"auth": {"user": password}}], "given": vars(given)}
options["said"] = os.environ["OTHER"]
callbacks = [CSVLogger("logs/log.csv")]
if importlib.util.find_spec("tensorboard"):
    callbacks.append(TensorBoardLogger("logs/board", options=options))
callbacks.append(RunFolder(options=options))
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
trainer = hvdtrain.Trainer(model, optimizer=optimizer, loss=torch.nn.CrossEntropyLoss())
key = os.environ.get("HVDTRAIN_JOB_KEY", "")
pathlib.Path(os.environ["PLANTED"], f"key-{os.getpid()}").write_text(key)
data = numpy.ones((64, 4), "float32"), numpy.zeros(64, "int64")
trainer.fit(data, epochs=2, batch_size=8, checkpoint_dir="checkpoints", callbacks=callbacks)
"""
HVDTRAIN = "import sys; from hvdtrain.cli.program import main; sys.argv[0] = 'hvdtrain'; main()"

READS = """
import os, sys
for folder, _, names in os.walk(sys.argv[1]):
    for name in names:
        try:
            open(os.path.join(folder, name), "rb").close()
        except OSError:
            continue
        print(os.path.relpath(os.path.join(folder, name), sys.argv[1]))
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user of the host may enter, as homes often are."""
    with tempfile.TemporaryDirectory(prefix="hvdtrain-attack-") as made:
        os.chmod(made, 0o755)
        yield Path(made)


def run(folder: Path, *words: str, **env: str) -> str:
    """Run Python to its end there, with a umask that lets everybody read; return all that it printed."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "HVDTRAIN_RUNS": "runs", "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        umask=0o022,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_planted_secret_is_in_no_file_of_a_run_and_no_other_user_can_read_one(
    folder: Path, stranger: Stranger, tmp_path: Path
) -> None:
    (folder / "train.py").write_text(TRAIN)
    planted = {
        name: f"{name}-{secrets.token_urlsafe(12)}" for name in ("pat", "cfg", "over", "url", "env", "own", "pass")
    }
    (tmp_path / "password").write_text(planted["pass"])
    said = run(
        folder, "-c", HVDTRAIN, "run", "-np", "2", "train.py", "--pat", planted["pat"],
        "--cfg=" + json.dumps({"lr": 1, "logger": {"api_key": planted["cfg"]}}),
        f"--override=logger.api_key={planted['over']}", "--vault", f"https://me:{planted['url']}@host/x",
        PLANTED=str(tmp_path), WANDB_API_KEY=planted["env"], HVDTRAIN_MY_TOKEN=planted["own"],
        OTHER=f"{planted['env']} and {planted['own']}",
    )  # fmt: skip
    keys = [path.read_text() for path in tmp_path.glob("key-*")]
    assert len(keys) == 2
    (planted["job key"],) = set(keys)
    assert re.fullmatch("[0-9a-f]{64}", planted["job key"])
    (written,) = (folder / "runs").iterdir()
    said += run(folder, "-c", HVDTRAIN, "report", str(written))
    found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    names = {name.rpartition("/")[2] for name in found}
    assert {
        "run.yaml",
        "config.json",
        "environment.json",
        "metrics.jsonl",
        "report.html",
        "log.csv",
        "meta.json",
    } <= names
    found["what was printed"] = said.encode()
    assert [
        (name, where) for name, secret in planted.items() for where in found if secret.encode() in found[where]
    ] == []
    assert "(hidden)" in (written / "run.yaml").read_text()

    readable = set(stranger.run(READS, folder).split("\n")) - {""}
    assert readable == {"train.py"}


def test_a_run_that_is_shared_can_be_read_by_others(folder: Path, stranger: Stranger, tmp_path: Path) -> None:
    (folder / "train.py").write_text(TRAIN)
    (tmp_path / "password").write_text("unknown")
    run(folder, "train.py", HVDTRAIN_SHARE_FILES="1", PLANTED=str(tmp_path), OTHER="")
    readable = set(stranger.run(READS, folder).split())
    written = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert {"config.json", "log.csv", "meta.json"} <= {name.rpartition("/")[2] for name in written}
    assert readable == written
