"""Keras on torch and on JAX, a process each: one rank that reduces equals plain Keras."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=pytest.mark.needs("jax"))])
def test_one_rank_that_reduces_is_plain_keras(device, backend):
    where = torch.device(device).type
    if backend == "jax" and where == "cuda":
        # JAX may be there for CPUs alone, which is no fault of this machine's.
        code = "import jax; print(jax.default_backend())"
        asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
        where = "cuda" if asked.stdout.split()[-1] == "gpu" else "cpu"
    environment = {
        **os.environ,
        "KERAS_BACKEND": backend,
        "HVDTRAIN_RUNS": "",
        "PYTHONPATH": str(HERE.parents[1]),
        # Of the GPU's memory JAX takes most at once, and this process has some of it.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    command = [sys.executable, str(HERE / "keras_rank.py"), where]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "equal to plain Keras: " in result.stdout
    print(result.stdout)
