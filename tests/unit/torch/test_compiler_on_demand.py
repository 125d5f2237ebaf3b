"""torch's optimizers leave the compiler out of a process that compiles nothing, and change nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

SCRIPT = """
import json, sys
import torch
import hvdtrain

hvdtrain.init("torch")
optimizers = {kind: vars(torch.optim)[kind] for kind in sorted(vars(torch.optim)) if kind[0].isupper()}
weights, loaded = {}, []
for name, kind in optimizers.items():
    if not issubclass(kind, torch.optim.Optimizer) or name in ("Optimizer", "SparseAdam"):
        continue
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2, bias=False)
    optimizer = kind(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).square().sum()
        loss.backward()
        return loss
    for _ in range(3):
        optimizer.step(closure)
        schedule.step()
        optimizer.load_state_dict(optimizer.state_dict())
    weights[name] = model.weight.tolist()
    if "torch._dynamo" in sys.modules:
        loaded.append(name)
print(json.dumps({"weights": weights, "loaded": loaded}))
"""

COMPILED = """
import json, sys
import torch
import hvdtrain

hvdtrain.init("torch")

def trained(compile):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    net, step = compile(model), compile(optimizer.step)
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.ones(2, 3)).square().sum().backward()
        step()
    return model.weight.tolist()

plain = trained(lambda each: each)
before = "torch._dynamo" in sys.modules
compiled = trained(lambda each: torch.compile(each, backend="eager"))
from torch._dynamo.utils import counters
print(json.dumps([before, plain, compiled, counters["stats"]["unique_graphs"]]))
"""


def run(script, **variables):
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_no_optimizer_of_torch_loads_it_and_all_step_as_before():
    ours, theirs = run(SCRIPT), run(SCRIPT, HVDTRAIN_COMPILER_ON_DEMAND="0")
    assert len(ours["weights"]) >= 14
    assert ours["weights"] == theirs["weights"]
    assert ours["loaded"] == []
    assert theirs["loaded"]  # so that there is something to gain


def test_what_is_compiled_after_steps_without_the_compiler_is_compiled():
    before, plain, compiled, graphs = run(COMPILED)
    assert not before
    assert compiled == plain
    assert graphs >= 2  # of the model and of the optimizer's step


def test_gradients_flow_through_a_differentiable_step():
    script = SCRIPT.partition("optimizers =")[0] + (
        "x = torch.ones(2, requires_grad=True); w = (x * 1).clone()\n"
        "optimizer = torch.optim.SGD([w], lr=0.1, differentiable=True)\n"
        "w.grad = x * 2; optimizer.step(); w.sum().backward()\n"
        "print(json.dumps(x.grad.tolist()))"
    )
    assert run(script) == pytest.approx([0.8, 0.8])
