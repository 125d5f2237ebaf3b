"""Without Horovod, one process gives plain Keras's numbers, whatever the backend (KERAS_BACKEND chooses it)."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

BACKENDS = ("tensorflow", "torch", "jax")

SCRIPT = """
import keras, numpy as np
import hvdtrain.keras as hvd
from keras.ops import convert_to_numpy as to_numpy

hvd.init()
assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_size()) == (0, 1, 0, 1, 1)
assert hvd.is_initialized() and not hvd.mpi_built() and not hvd.nccl_built()

def make():
    kernel = keras.initializers.GlorotUniform(seed=1)
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, kernel_initializer=kernel)])

x = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")
y = np.random.default_rng(1).normal(size=(16, 3)).astype("float32")

def train(wrap, callbacks=()):
    model = make()
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.01, clipnorm=0.1)
    model.compile(optimizer=wrap(optimizer), loss="mse", metrics=["mae"])
    history = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=list(callbacks))
    return model, history.history

plain, plain_history = train(lambda o: o)
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
ours, history = train(hvd.DistributedOptimizer, callbacks)
assert all((a == b).all() for a, b in zip(plain.get_weights(), ours.get_weights()))
assert history == plain_history
assert isinstance(ours.optimizer, keras.optimizers.SGD)

# Sums of two passes: an optimizer's own averages times two.
doubled = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=2)
variable = keras.Variable(np.zeros(2, "float32"))
for gradient in ([1.0, 2.0], [3.0, 4.0]):
    doubled.apply([keras.ops.convert_to_tensor(np.array(gradient, "float32"))], [variable])
np.testing.assert_allclose(to_numpy(variable), [-0.4, -0.6], rtol=1e-6)

# A weight counts in one process too, and 0 silences NaN.
weighted = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
variable = keras.Variable(np.zeros(2, "float32"))
for weight, gradient in ((1.0, [1.0, 1.0]), (0.5, [1.0, 2.0]), (0.0, [np.nan, np.inf])):
    weighted.set_batch_weight(weight)
    weighted.apply([keras.ops.convert_to_tensor(np.array(gradient, "float32"))], [variable])
np.testing.assert_allclose(to_numpy(variable), [-1.5, -2.0], rtol=1e-6)

assert to_numpy(hvd.allreduce(np.array([2.0, 4.0]), op=hvd.Sum)).tolist() == [2.0, 4.0]
assert to_numpy(hvd.allgather(np.array([1, 2]))).tolist() == [1, 2]
assert to_numpy(hvd.broadcast(np.array([1, 2]), 0)).tolist() == [1, 2]
assert hvd.broadcast_object({"a": 1}) == {"a": 1} and hvd.allgather_object(3) == [3]
hvd.barrier()
state = hvd.elastic.KerasState(ours, epoch=1)
assert hvd.elastic.run(lambda state: state.epoch)(state) == 1
assert hvd.global_process_set.size() == 1 and hvd.ProcessSet([0]).included()
if keras.backend.backend() == "tensorflow":
    import tensorflow as tf
    import hvdtrain.tensorflow as taped

    x, y = tf.Variable([1.0, 2.0]), keras.Variable(np.array([3.0, 4.0], "float32"))
    with taped.DistributedGradientTape(tf.GradientTape(), compression=taped.Compression.fp16) as tape:
        loss = tf.reduce_sum(x * y)
    assert [each.numpy().tolist() for each in tape.gradient(loss, [x, y])] == [[3.0, 4.0], [1.0, 2.0]]

    @tf.function(autograph=False)
    def graph():
        taped.broadcast_variables([x, y], root_rank=0)
        scaled = taped.grouped_allreduce([x, y], op=taped.Sum, prescale_factor=2.0)
        part = taped.reducescatter(x, prescale_factor=2.0, postscale_factor=0.5)
        return *scaled, *taped.alltoall(x, [2]), part, taped.size_op(), taped.join()

    got = [each.numpy().tolist() for each in graph()]
    assert got == [[2.0, 4.0], [6.0, 8.0], [1.0, 2.0], [2], [1.0, 2.0], 1, 0]
    plain = tf.compat.v1.train.GradientDescentOptimizer(0.1)
    assert taped.DistributedOptimizer(plain) is plain
    assert taped.SyncBatchNormalization()(tf.ones((4, 3)), training=True).shape == (4, 3)
    assert taped.elastic.run(lambda state: state.batch)(taped.elastic.TensorFlowState([x, y], batch=5)) == 5
hvd.shutdown()
print("same numbers")
"""

FORGET_HOROVOD = """
import importlib.util, sys
sys.modules["horovod"] = None
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "horovod" else find_spec(name, package)
"""


def _run(script: str, backend: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HOROVOD", "OMPI_", "PMI", "SLURM"))}
    clean.update(KERAS_BACKEND=backend, TF_CPP_MIN_LOG_LEVEL="3", OMP_NUM_THREADS="1", **environment)
    return subprocess.run(
        [sys.executable, "-c", script], env=clean, capture_output=True, text=True, timeout=110, check=False
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_process_without_horovod_gives_kerass_numbers(backend: str) -> None:
    pytest.importorskip("keras")
    pytest.importorskip(backend)
    done = _run(FORGET_HOROVOD + SCRIPT, backend)
    assert done.returncode == 0, done.stderr
    assert "same numbers" in done.stdout


def test_several_processes_without_horovod_are_refused() -> None:
    pytest.importorskip("keras")
    pytest.importorskip("jax")
    done = _run(FORGET_HOROVOD + "import hvdtrain.keras as hvd; hvd.init()", "jax", OMPI_COMM_WORLD_SIZE="2")
    assert done.returncode != 0
    assert "HorovodMissingError" in done.stderr


# As horovod.keras's documentation has it, and nothing was distributed before.
COMPILE = """
import keras
import hvdtrain.keras as hvd

hvd.init()
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
options = {"loss": "mse", "jit_compile": True, "experimental_run_tf_function": False}
model.compile(optimizer=hvd.DistributedOptimizer("sgd"), **options)
print("jit_compile", model.jit_compile)
"""


def test_the_first_model_may_make_its_optimizer_in_the_call_of_compile() -> None:
    pytest.importorskip("keras")
    pytest.importorskip("torch")
    done = _run(COMPILE, "torch", HVDTRAIN_SOLO="1")
    assert done.stdout == "jit_compile False\n", done.stderr
