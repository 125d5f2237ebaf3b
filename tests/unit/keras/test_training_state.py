"""What a rank of a Keras run holds of its own, on a GPU that is faked here."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("keras")
pytest.importorskip("torch")

CODE = """
import keras, numpy as np, torch
from hvdtrain.keras import training_state

keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((2,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
state = [torch.tensor([7], dtype=torch.uint8)]
torch.cuda.is_initialized = lambda: True
torch.cuda.get_rng_state = lambda: state[0]
torch.cuda.set_rng_state = lambda new: state.__setitem__(0, new)
held = training_state.rank_state(model, metrics=False)
assert held["random.cuda"].tolist() == [7], sorted(held)
state[0] = torch.tensor([8], dtype=torch.uint8)
training_state.set_rank_state(held, model)
assert state[0].tolist() == [7]
"""


@pytest.mark.slow
def test_kerass_torch_backend_keeps_the_gpus_generator():
    environment = os.environ | {"KERAS_BACKEND": "torch"}
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
