"""Weights of a checkpoint load in plain torch and plain Keras, with nothing of hvdtrain."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from hvdtrain.checkpoint import Contents, write


def test_plain_torch_loads_the_models_file(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    def net():
        return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))

    model, plain = net(), net()
    arrays = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    write(tmp_path / "one", Contents({"model": arrays, "optimizer": {}}, {}))
    plain.load_state_dict(load_file(tmp_path / "one" / "model.safetensors"))
    for one, two in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(one, two)


KERAS = """
import sys, keras
from safetensors.numpy import load_file
model = keras.Sequential([keras.Input((4,)), *(keras.layers.Dense(4) for _ in range(6))])
arrays = load_file(sys.argv[1])
model.set_weights([arrays[name] for name in sorted(arrays)])
assert not any(name.split(".")[0] == "hvdtrain" for name in sys.modules)
print(*(float(weights.sum()) for weights in model.get_weights()))
"""


@pytest.mark.slow
def test_plain_keras_sets_the_models_weights_in_the_order_of_their_names(tmp_path):
    pytest.importorskip("keras")
    shapes = [(4, 4), (4,)] * 6  # more than ten: names must sort as numbers do
    arrays = {f"{i:04d}.kernel": np.full(shape, i, np.float32) for i, shape in enumerate(shapes)}
    write(tmp_path / "one", Contents({"model": dict(reversed(arrays.items())), "optimizer": {}}, {}))
    command = [sys.executable, "-c", KERAS, str(tmp_path / "one" / "model.safetensors")]
    environment = {**os.environ, "KERAS_BACKEND": "torch", "TF_CPP_MIN_LOG_LEVEL": "3"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert result.returncode == 0, result.stderr
    assert [float(each) for each in result.stdout.split()] == [float(array.sum()) for array in arrays.values()]
