"""Saved models are the user's: plain Keras loads it, state and all, where Horovod and hvdtrain cannot be imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile

import keras
import numpy as np
import pytest

import hvdtrain.keras as hvd

pytestmark = pytest.mark.world_size(2)

PLAIN_KERAS = """
import importlib.abc, json, sys

class Forbidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("horovod", "hvdtrain"):
            raise ImportError(f"{name} is forbidden here")

sys.meta_path.insert(0, Forbidden())
import keras
import numpy as np

model = keras.models.load_model(sys.argv[1])
x, y = (np.load(sys.argv[2])[name] for name in ("x", "y"))
model.fit(x, y, batch_size=24, epochs=1, shuffle=False, verbose=0)
np.savez(sys.argv[3], *[np.asarray(w) for w in model.get_weights()])
print(json.dumps([type(model.optimizer).__name__, type(model.optimizer).__module__]))
"""


def _optimizer():
    return keras.optimizers.Adam(0.01, clipnorm=0.1, gradient_accumulation_steps=2)


def test_plain_keras_goes_on_where_ranks_stopped(kit, tmp_path):
    alone = kit.alone(kit.model(), _optimizer(), epochs=3)
    model = kit.together(kit.model(), hvd.DistributedOptimizer(_optimizer(), name="mine"), epochs=2)
    path = tmp_path / f"model-{hvd.rank()}.keras"
    model.save(path)
    with zipfile.ZipFile(path) as archive:
        text = b"".join(archive.read(name) for name in archive.namelist())
    assert b"horovod" not in text.lower()
    assert b"hvd" not in text.lower()

    kit.assert_same_everywhere(model)
    if hvd.rank() == 0:  # for all: their files hold the same, and a process that imports Keras takes long
        assert np.abs(_trained_by_plain_keras(kit, tmp_path, path) - kit.flat(alone)).max() < 1e-6
    hvd.barrier()


def _trained_by_plain_keras(kit, folder, path):
    """Load the model where neither Horovod nor hvdtrain can be imported, train an epoch and return the weights."""
    x, y = kit.data()
    np.savez(folder / "data.npz", x=x, y=y)
    script = folder / "plain.py"
    script.write_text(PLAIN_KERAS)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HOROVOD", "OMPI", "PMIX", "PYTHONPATH"))}
    command = [sys.executable, str(script), str(path), str(folder / "data.npz"), str(folder / "out.npz")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    name, module = json.loads(done.stdout.strip().splitlines()[-1])
    assert name == "Adam"
    assert module.startswith("keras.")
    weights = np.load(folder / "out.npz")
    return np.concatenate([weights[f"arr_{i}"].astype("float64").ravel() for i in range(len(weights.files))])


@pytest.mark.parametrize("suffix", [".keras", ".h5"])
@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file")
def test_load_model_goes_on_with_ranks(kit, tmp_path, suffix):
    loss = keras.losses.MeanSquaredError()  # Keras cannot load an HDF5 file that says just "mse"
    alone = kit.alone(kit.model(), _optimizer(), epochs=3, loss=loss)
    model = kit.together(kit.model(), hvd.DistributedOptimizer(_optimizer()), epochs=2, loss=loss)
    path = tmp_path / f"model-{hvd.rank()}{suffix}"
    model.save(path)
    loaded = hvd.load_model(path)
    assert hvd.distributed_part(loaded.optimizer) is not None
    assert isinstance(loaded.optimizer, keras.optimizers.Adam)
    x, y = kit.data()
    loaded.fit(kit.shard(x), kit.shard(y), batch_size=12, epochs=1, shuffle=False, verbose=0)
    kit.assert_close(loaded, alone)
    kit.assert_same_everywhere(loaded)


class Halved(keras.optimizers.SGD):
    """A class of the user's own."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, learning_rate * 0.5)


def test_an_optimizer_of_ones_own_comes_back(kit, tmp_path):
    model = kit.together(kit.model(), hvd.DistributedOptimizer(Halved(0.2, momentum=0.9)), epochs=1)
    path = tmp_path / f"model-{hvd.rank()}.keras"
    model.save(path)
    loaded = hvd.load_model(path, custom_optimizers=[Halved], compression=hvd.Compression.fp16)
    assert isinstance(loaded.optimizer, Halved)
    assert kit.digest(loaded.optimizer.variables) == kit.digest(model.optimizer.variables)
    x, y = kit.data()
    loaded.fit(kit.shard(x), kit.shard(y), batch_size=12, epochs=1, verbose=0)
    kit.assert_same_everywhere(loaded)
