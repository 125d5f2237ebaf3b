"""How tests compile a Keras model, whatever its backend."""

from __future__ import annotations

import keras

# For `compile(jit_compile=)`. Without it, JAX runs single operations, each compiled for each shape. With it, TensorFlow
# would use XLA, which Horovod's operations do not know.
JIT = keras.backend.backend() == "jax"
