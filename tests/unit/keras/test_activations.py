"""Keras layers whose activations backward computes again, in one process (KERAS_BACKEND sets the backend)."""

from __future__ import annotations

import functools
import gc
import logging
import weakref

import pytest

keras = pytest.importorskip("keras")

import numpy as np  # noqa: E402

import hvdtrain  # noqa: E402

pytestmark = pytest.mark.usefixtures("solo")

BACKEND = keras.backend.backend()
ON_TORCH = pytest.mark.skipif(BACKEND != "torch", reason="other backends compile a step, and round in another order")
ON_JAX = pytest.mark.skipif(BACKEND != "jax", reason="XLA compiles steps on JAX alone")
X = np.random.default_rng(0).normal(size=(10, 6)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(10, 3)).astype(np.float32)


class Block(keras.layers.Layer):
    """Its Dropout asks the call's context whether it trains; its norm changes running statistics."""

    def __init__(self, width=16, norm=keras.layers.BatchNormalization):
        super().__init__()
        self.norm, self.drop = norm(), keras.layers.Dropout(0.3)
        self.up, self.down = keras.layers.Dense(4 * width, activation="gelu"), keras.layers.Dense(width)

    def call(self, x):
        return x + self.down(self.drop(self.up(self.norm(x))))


def blocks(make=Block, count=2):
    keras.utils.set_random_seed(0)
    inner = [make() for _ in range(count)]
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(16), *inner, keras.layers.Dense(3)])


def train(net, rule, data=(X, Y), validation=None, **options):
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    trainer = hvdtrain.Trainer(net, optimizer=optimizer, loss="mse", checkpoint_activations=rule, **options)
    keras.utils.set_random_seed(1)
    history = trainer.fit(data, validation=validation, epochs=2, batch_size=4, progress=False, run_dir=None)
    losses = np.array(history["loss"] + history.get("val_loss", []))
    return [*(keras.ops.convert_to_numpy(v) for v in net.variables), losses]


def assert_same_training(make, rule="blocks", **options):
    """Train with and without the option; weights, statistics, seeds and losses are the same.

    Bit for bit on torch. The compilers of TensorFlow and JAX add and fuse in another order.
    """
    plain, again = (train(make(), each, **options) for each in (False, rule))
    for one, two in zip(plain, again, strict=True):
        np.testing.assert_allclose(one, two, rtol=0, atol=0 if BACKEND == "torch" else 2e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"validation": (X, Y)},
        {"accumulate": 2, "nan_policy": "skip", "clip_norm": 1.0},
        pytest.param({"precision": "bf16"}, marks=ON_TORCH),
        pytest.param({"precision": "fp16"}, marks=ON_TORCH),
    ],
    ids=lambda options: " ".join(options) or "plain",
)
def test_training_is_the_same(options):
    assert_same_training(blocks, **options)


class Outputs(Block):
    """Takes and returns more than one tensor, and an argument that is none."""

    def call(self, x, others=None, scale=1.0):
        outputs = super().call(x) * scale
        return {
            "x": outputs,
            "rows": keras.ops.shape(x),
            "signs": keras.ops.cast(outputs > 0, "int32"),
            "others": [outputs * 0.5, None] if others is None else [others[0] + x, None],
        }


class Nest(keras.Model):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.blocks = keras.layers.Dense(16), keras.layers.Dense(3), [Outputs(), Outputs()]

    def call(self, x):
        found = self.blocks[0](self.first(x), scale=0.5)
        found = self.blocks[1](found["x"], others=found["others"])
        signs = keras.ops.cast(found["signs"], found["x"].dtype)
        return self.last(found["x"] + found["others"][0] * signs)


@pytest.mark.parametrize("is_built", [True, False])
def test_a_call_may_take_and_return_nested_values(is_built):
    def make():
        keras.utils.set_random_seed(0)
        net = Nest()
        if is_built:
            net(X)
        return net

    assert_same_training(make)


def attention():
    """A functional model with masks: two layers of attention beside each other, made of other layers."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((5,), dtype="int32")
    x = keras.layers.Embedding(7, 8, mask_zero=True)(inputs)
    for _ in range(2):
        x = keras.layers.LayerNormalization()(x + keras.layers.MultiHeadAttention(2, 4, dropout=0.3)(x, x))
    return keras.Model(inputs, keras.layers.Dense(3)(keras.layers.GlobalAveragePooling1D()(x)))


def test_attention_with_masks():
    tokens = np.random.default_rng(2).integers(0, 7, (10, 5)).astype(np.int32)
    tokens[:, 0] = 1
    assert_same_training(attention, data=(tokens, Y))


def saved_bytes(rule):
    from torch.autograd.graph import saved_tensors_hooks

    found = []

    def pack(tensor):
        found.append(tensor.numel() * tensor.element_size())
        return tensor

    net = blocks(lambda: Block(norm=keras.layers.LayerNormalization))
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        train(net, rule)
    return sum(found)


@pytest.mark.skipif(BACKEND != "torch", reason="the other backends do not show what they save")
def test_fewer_bytes_are_saved_for_backward():
    """Of a block its input is saved, of 16 numbers a row; a plain one saves at least two tensors of 64 more."""
    rows, number, epochs, count = 10, 4, 2, 2
    assert saved_bytes(False) - saved_bytes("blocks") >= rows * number * epochs * count * 2 * 64


@pytest.mark.skipif(BACKEND != "torch", reason="the other backends trace a step, and run no Python in it")
def test_what_is_computed_again_is_freed_without_the_garbage_collector():
    found, alive = [], []

    class Recording(Block):
        def call(self, x):
            hidden = self.up(self.norm(x))
            found.append(weakref.ref(hidden))
            alive.append(sum(each() is not None for each in found))
            return x + self.down(self.drop(hidden))

    net = blocks(Recording)
    gc.disable()
    try:
        train(net, "blocks")
    finally:
        gc.enable()
    steps, count = 6, 2
    assert len(found) >= 2 * steps * count
    assert max(alive) == 1  # of all blocks, that of the present one


def temporary_bytes(monkeypatch, rule):
    """Return what a step that JAX has compiled takes beside its arguments and results."""
    import jax
    from keras.src.backend.jax import trainer

    found, real = {}, jax.jit

    def jit(function, **options):
        jitted = real(function, **options)

        def call(*args):
            shapes = str(keras.tree.map_structure(np.shape, args))
            if shapes not in found:
                found[shapes] = jitted.lower(*args).compile().memory_analysis().temp_size_in_bytes
            return jitted(*args)

        return call

    with monkeypatch.context() as patched:
        patched.setattr(jax, "jit", jit)
        patched.setattr(trainer, "jit", jit)
        train(blocks(functools.partial(Block, 16, keras.layers.LayerNormalization), count=8), rule)
        assert trainer.jit is jit
    return max(found.values())


@ON_JAX
def test_xla_computes_again_what_it_would_find_to_be_the_same(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_disable_hlo_passes=dce")  # stays disabled
    assert temporary_bytes(monkeypatch, "blocks") < 0.7 * temporary_bytes(monkeypatch, False)


@ON_JAX
def test_keras_compiles_as_before_after_a_step_that_fails():
    from keras.src.backend.jax import trainer

    jit, net = trainer.jit, blocks()
    with pytest.raises(TypeError, match="incompatible shapes"):
        train(net, "blocks", data=(X, np.ones((10, 7), np.float32)))
    assert trainer.jit is jit
    assert all("call" not in vars(layer) for layer in net.layers)


@ON_JAX
@pytest.mark.parametrize("why", ["Flax", "JAX", "Flax, but the user set the flag", "Flax, but nothing is compiled"])
def test_a_compiler_that_cannot_be_told_is_reported_once(why, monkeypatch, caplog):
    import jax
    from keras.src.backend.jax import trainer

    if why == "JAX":
        monkeypatch.setattr(jax, "__version__", "0.5.3")
    else:
        monkeypatch.setattr(trainer, "jit", functools.partial(jax.jit))
    if "flag" in why:
        monkeypatch.setenv("XLA_FLAGS", "--xla_disable_hlo_passes=cse_barrier_expander")
    net = blocks()
    net.compile("sgd", "mse", run_eagerly="nothing" in why)
    with caplog.at_level(logging.INFO, logger="hvdtrain"):
        trainer = hvdtrain.Trainer(net, checkpoint_activations="blocks")
        trainer.fit((X, Y), epochs=2, batch_size=4, progress=False, run_dir=None)
    assert caplog.text.count("checkpoint_activations saves no memory with JAX on CPUs here") == ("but" not in why)


def test_the_model_stays_as_the_user_made_it():
    net = blocks()
    names = [sorted(set(vars(each)) & {"call", "_remat_mode"}) for each in net._flatten_layers()]
    train(net, "blocks")
    assert [sorted(set(vars(each)) & {"call", "_remat_mode"}) for each in net._flatten_layers()] == names


def pairs():
    inner = [keras.Sequential([keras.layers.Dense(6), keras.layers.ReLU()], name=name) for name in ("a", "b")]
    return keras.Sequential([keras.Input((6,)), keras.Sequential(inner, name="ab"), keras.layers.Dense(3)])


CHOICES = [
    (blocks, "blocks", "2 Block (block"),
    (blocks, True, "2 Block (block"),
    (lambda: blocks(count=1), True, "1 Block (block"),
    (blocks, lambda layer: isinstance(layer, keras.layers.Dropout), "2 Dropout (dropout"),
    (blocks, lambda layer: isinstance(layer, Block | keras.layers.Dropout), "2 Block (block"),
    (pairs, True, "2 Sequential (a to b)"),
    (attention, "blocks", "2 MultiHeadAttention (multi_head_attention"),
]


@pytest.mark.skipif(BACKEND != "torch", reason="the other backends choose the same layers")
@pytest.mark.parametrize(("make", "rule", "chosen"), CHOICES)
def test_what_is_chosen_is_logged(make, rule, chosen, caplog):
    with caplog.at_level(logging.INFO, "hvdtrain"):
        train(make(), rule, data=(np.ones((4, 5), np.int32), Y[:4]) if make is attention else (X, Y))
    assert f"activations that backward computes again: {chosen}" in caplog.text


def with_loss():
    class Losing(Block):
        def call(self, x):
            self.add_loss(keras.ops.mean(x))
            return super().call(x)

    return blocks(Losing)


def with_foreign_variable():
    other = keras.Variable(np.zeros(()), trainable=False, name="other")

    class Counting(Block):
        def call(self, x):
            holder[0].assign(holder[0] + 1)
            return super().call(x)

    holder = (other,)
    return blocks(Counting)


def in_scope():
    with keras.RematScope("full"):
        inner = keras.layers.Dense(3)
    return keras.Sequential([keras.Input((6,)), inner])


def with_sync_norm():
    class SyncBatchNormalization(keras.layers.BatchNormalization):
        __module__ = "hvdtrain.tensorflow"  # where TensorFlow alone can import it

    return blocks(lambda: Block(norm=SyncBatchNormalization))


@pytest.mark.parametrize(
    ("make", "rule", "message"),
    [
        (with_loss, "blocks", "adds a loss .*Leave this layer out"),
        (with_foreign_variable, "blocks", "changes other, which is no variable of its own. Leave this layer out"),
        (
            in_scope,
            lambda layer: True,
            "made in keras.RematScope.*Make the model without the scope",
        ),
        (with_sync_norm, "blocks", "exchanges statistics with other ranks in each call.*chooses block"),
        (lambda: blocks(count=1), "blocks", "found no layer that consists of others. Received: .*='blocks', for seq"),
        (blocks, lambda layer: False, "is True for no layer. Received: checkpoint_activations=.*, for sequential"),
    ],
)
def test_what_cannot_be_computed_again_is_refused_with_the_reason(make, rule, message):
    with pytest.raises(ValueError, match=message):
        train(make(), rule)
