"""HVDTRAIN_GPU_ASYNC=1: the host waits for nothing in a step, and weights are those of the path that waits.

Horovod reads the setting when it starts, so each run is a process of its own. No GPU has run these yet.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

KINDS = ("plain", "clipped", "ignored", "weighted", "accumulated", "bf16", "sync_norm", "adamw")

TRAIN = """
import json, sys
import numpy as np, torch
import hvdtrain, hvdtrain.torch as hvd
from hvdtrain.callbacks import Callback

out, kind, watch = sys.argv[1:]
torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic = False, True
torch.manual_seed(1)
norm = hvd.SyncBatchNorm if kind == "sync_norm" else torch.nn.BatchNorm2d
net = torch.nn.Sequential(
    torch.nn.Conv2d(3, 8, 3, bias=False), norm(8), torch.nn.ReLU(), torch.nn.Flatten(),
    torch.nn.Linear(8 * 36, 400), torch.nn.Tanh(), torch.nn.Linear(400, 5),
)
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
if kind == "adamw":
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
generator = np.random.default_rng(0)
x, y = generator.normal(size=(96, 3, 8, 8)).astype("float32"), generator.integers(0, 5, 96)
if kind == "ignored":
    y[::7] = -100
loss = torch.nn.CrossEntropyLoss(weight=torch.arange(1.0, 6.0) if kind == "weighted" else None)
options = {"clipped": {"clip_norm": 0.1}, "accumulated": {"accumulate": 2}, "bf16": {"precision": "bf16"}}.get(kind, {})
seen = {"ahead": []}

class Watch(Callback):
    def on_step_begin(self, trainer, step):
        self.watched = watch and trainer.global_step >= 4
        if self.watched and watch == "sync":
            torch.cuda.set_sync_debug_mode("error")
        if self.watched and watch == "ahead":
            torch.cuda._sleep(1_000_000_000)  # half a second or so of the device's time
            self.slept = torch.cuda.Event()
            self.slept.record()

    def on_step_end(self, trainer, step):
        if self.watched and watch == "sync":
            torch.cuda.set_sync_debug_mode("default")
        if self.watched and watch == "ahead":
            seen["ahead"].append(not self.slept.query())  # whether the step was given away before the sleep ended

world = hvdtrain.init("torch", seed=0)
trainer = hvdtrain.Trainer(net, optimizer=optimizer, loss=loss, metrics=["accuracy"], seed=3, **options)
history = trainer.fit((x, y), epochs=2, batch_size=16, callbacks=[Watch()], progress=False, run_dir=None)
seen |= {"device": world.device, "loss": history["loss"], "accuracy": history["accuracy"]}
steps = [state["step"].device.type for state in optimizer.state.values() if "step" in state]
seen["counts"] = sorted(set(steps))
torch.save(net.state_dict(), out)
print(json.dumps(seen))
"""


def run(script: str, *arguments: str, asked: bool, fused: bool = False) -> dict[str, Any]:
    variables = {"HVDTRAIN_GPU_ASYNC": str(int(asked)), "HVDTRAIN_FUSED_UPDATE": str(int(fused))}
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, **variables, "HVDTRAIN_REDUCE_ALONE": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def trained(folder: Path, kind: str, *, asked: bool, watch: str = "", fused: bool = False) -> dict[str, Any]:
    file = folder / f"{kind}-{asked}-{fused}.pt"
    found = run(TRAIN, str(file), kind, watch, asked=asked, fused=fused)
    return found | {"weights": torch.load(file, map_location="cpu")}


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_the_path_that_waits(kind: str, tmp_path: Path, device: str) -> None:
    waits, runs_on = (trained(tmp_path, kind, asked=asked) for asked in (False, True))
    assert waits["device"] == runs_on["device"] == device
    assert (waits["loss"], waits["accuracy"]) == (runs_on["loss"], runs_on["accuracy"])
    for name, tensor in waits["weights"].items():
        assert torch.equal(tensor, runs_on["weights"][name]), name


@pytest.mark.cuda_only
@pytest.mark.parametrize("kind", KINDS)
def test_no_step_after_the_first_ones_waits_for_the_device(kind: str, tmp_path: Path) -> None:
    trained(tmp_path, kind, asked=True, watch="sync")
    assert all(trained(tmp_path, kind, asked=True, watch="ahead")["ahead"])


@pytest.mark.cuda_only
def test_a_step_of_the_path_that_waits_is_seen_to_wait(tmp_path: Path) -> None:
    assert not any(trained(tmp_path, "plain", asked=False, watch="ahead")["ahead"])


@pytest.mark.cuda_only
@pytest.mark.parametrize("kind", ["plain", "adamw"])
def test_fused_updates_are_torchs_to_rounding(kind: str, tmp_path: Path) -> None:
    theirs = trained(tmp_path, kind, asked=True)
    ours = trained(tmp_path, kind, asked=True, fused=True)
    assert ours["counts"] == (["cuda"] if kind == "adamw" else [])
    for name, tensor in theirs["weights"].items():
        torch.testing.assert_close(ours["weights"][name], tensor, rtol=1e-4, atol=1e-5, msg=name)


SIDE = """
import copy, json, sys
import torch, hvdtrain.torch as hvd

hvd.init()
torch.manual_seed(0)
ours = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4000)).cuda()
theirs = copy.deepcopy(ours)
plain = torch.optim.SGD(theirs.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(ours.parameters(), lr=0.1), ours.named_parameters(), op=hvd.Sum,
    backward_passes_per_step=2, average_aggregated_gradients=True,  # Horovod's stream halves the sum
)
side, x = torch.cuda.Stream(), torch.randn(16, 64, device="cuda")
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(5):
        optimizer.zero_grad()
        for _ in range(2):
            torch.cuda._sleep(100_000_000)
            ours(x).square().mean().backward()
        optimizer.step()
torch.cuda.synchronize()
for _ in range(5):
    plain.zero_grad()
    for _ in range(2):
        (theirs(x).square().mean() / 2).backward()
    plain.step()
worst = max(float((a - b).detach().abs().max()) for a, b in zip(ours.parameters(), theirs.parameters()))
print(json.dumps({"worst": worst}))
"""


@pytest.mark.cuda_only
def test_the_stream_that_asks_is_the_one_that_waits() -> None:
    assert run(SIDE, asked=True)["worst"] < 1e-6
