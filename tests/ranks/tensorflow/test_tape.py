"""A tape's gradients on several ranks are those of one process on all ranks' samples."""

from __future__ import annotations

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdtrain.tensorflow as hvd

pytestmark = [pytest.mark.world_size(2, 3), pytest.mark.in_graphs]

ROWS, WORDS = 13, 6  # of all ranks
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, 4)).astype("float32")
IDS = RNG.integers(0, WORDS, size=ROWS)
Y = RNG.normal(size=(ROWS, 2)).astype("float32")


def variables(make=tf.Variable):
    rng = np.random.default_rng(1)
    shapes = {"words": (WORDS, 4), "kernel": (4, 2), "bias": (2,), "unused": (3,)}
    return [make(rng.normal(size=shape).astype("float32"), name=name) for name, shape in shapes.items()]


def mine():
    """Return this rank's rows: most of them on rank 0."""
    edges = np.cumsum([0, ROWS - 2 * hvd.size() + 2, *[2] * (hvd.size() - 1)])
    return slice(*edges[hvd.rank() : hvd.rank() + 2].tolist())


def loss_of(them, rows):
    words, kernel, bias = them[:3]
    table = words.value if isinstance(words, keras.Variable) else words
    inputs = X[rows] + tf.nn.embedding_lookup(table, IDS[rows])
    return tf.reduce_sum((tf.tanh(inputs) @ tf.convert_to_tensor(kernel) + bias - Y[rows]) ** 2) / ROWS


def gradients_of(them, rows, wrap=lambda tape: tape):
    with tf.GradientTape() as tape:
        loss = loss_of(them, rows)
    return wrap(tape).gradient(loss, them)


def step(them, rows, wrap):
    gradients = gradients_of(them, rows, wrap)
    assert gradients[3] is None
    assert isinstance(gradients[0], tf.IndexedSlices)
    for variable, gradient in zip(them[:3], gradients, strict=False):
        variable.assign_sub(0.1 * tf.convert_to_tensor(gradient))


def summed(tape, **options):
    """Return the tape whose gradients are those of one process, whatever the lengths of shards."""
    return hvd.DistributedGradientTape(tape, op=hvd.Sum, **options)


def dense(gradients):
    return [tf.convert_to_tensor(g).numpy() for g in gradients if g is not None]


def assert_close(ours, theirs, tolerance=1e-6):
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance, rtol=0)


@pytest.mark.parametrize("make", [keras.Variable, tf.Variable])
@pytest.mark.parametrize("how", ["eager", "graph"])
def test_uneven_shards_train_the_weights_of_one_process(kit, make, how):
    ours, theirs = variables(make), variables()

    def train():
        step(ours, mine(), summed)

    train = tf.function(train, autograph=False) if how == "graph" else train
    for _ in range(3):
        train()
        step(theirs, slice(None), lambda tape: tape)
    assert_close([v.numpy() for v in ours], [v.numpy() for v in theirs])
    kit.assert_same_everywhere(ours)


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"sparse_as_dense": True}, 1e-6),
        ({"compression": hvd.Compression.fp16}, 3e-3),
        ({"compression": hvd.Compression.bf16}, 3e-2),
        ({"groups": 2}, 1e-6),
        ({"num_groups": 1}, 1e-6),
        ({"device_dense": "/CPU:0", "device_sparse": "/CPU:0"}, 1e-6),
    ],
)
def test_options_leave_gradients_what_they_are(options, tolerance):
    reduced = gradients_of(variables(), mine(), lambda tape: summed(tape, **options))
    assert_close(dense(reduced), dense(gradients_of(variables(), slice(None))), tolerance)
    assert isinstance(reduced[0], tf.IndexedSlices) is ("sparse_as_dense" not in options)


@pytest.mark.parametrize("options", [{}, {"gradient_predivide_factor": 2.0}])
def test_the_average_is_over_ranks_whatever_they_hold(options):
    local = dense(gradients_of(variables(), mine()))
    mean = [np.mean(each, axis=0) for each in zip(*hvd.allgather_object(local), strict=True)]
    reduced = gradients_of(variables(), mine(), lambda tape: hvd.DistributedGradientTape(tape, **options))
    assert_close(dense(reduced), mean)


def test_a_tape_that_is_distributed_before_it_records_is_one_tape():
    x = tf.Variable([hvd.rank() + 1.0])
    plain = tf.GradientTape(persistent=True)
    with hvd.DistributedGradientTape(plain, op=hvd.Sum) as tape:
        y, z = x * 2.0, tf.reduce_sum(x**2)
    total = sum(2.0 * (rank + 1) for rank in range(hvd.size()))
    assert tape.gradient(z, {"a": [x], "b": ()})["a"][0].numpy() == total  # in the structure of the sources
    assert tape.gradient(y, x).numpy() == 2.0 * hvd.size()
    assert plain.gradient(y, x).numpy() == 2.0
    assert tape.watched_variables() == plain.watched_variables() == (x,)
    assert isinstance(tape, tf.GradientTape)
    with hvd.DistributedGradientTape(tf.GradientTape(watch_accessed_variables=False)) as tape:
        y = x * 2.0
    assert tape.gradient(y, x, unconnected_gradients=tf.UnconnectedGradients.ZERO).numpy() == 0.0


@pytest.mark.parametrize("scale", [True, False])
def test_gradients_of_local_sources_stay_this_ranks(scale):
    layers = [keras.layers.Embedding(WORDS, 3), keras.layers.Dense(2)]
    x = keras.Sequential(layers)(tf.constant([[hvd.rank()]]))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layers[1](layers[0](tf.constant([[hvd.rank()]]))) - x) * (hvd.rank() + 1.0)
    tape = hvd.PartialDistributedGradientTape(tape, local_layers=layers[0], scale_local_gradients=scale)
    sources = layers[0].trainable_weights + layers[1].trainable_weights
    ((word, rows),), ((_, kernel), (_, bias)) = tape.get_local_and_global_gradients(loss, sources)
    assert word is sources[0]
    assert isinstance(rows, tf.IndexedSlices)
    own = layers[1].kernel.numpy().sum(1) * (hvd.rank() + 1.0) / (hvd.size() if scale else 1)
    np.testing.assert_allclose(rows.values[0].numpy(), own, rtol=1e-6)
    assert hvd.allgather_object(bias.numpy().tolist()) == [[(hvd.size() + 1) / 2] * 2] * hvd.size()
    assert hvd.allgather_object(kernel.numpy().tolist()) == [kernel.numpy().tolist()] * hvd.size()
    with pytest.raises(ValueError, match="local_layers must be keras layers"):
        hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=[3])


def test_only_ranks_of_the_process_set_reduce():
    some = hvd.add_process_set(range(hvd.size() - 1))
    reduced = gradients_of(variables(), mine(), lambda tape: summed(tape, process_set=some))
    rows = slice(0, ROWS - 2) if some.included() else mine()
    assert_close(dense(reduced), dense(gradients_of(variables(), rows)))
    hvd.remove_process_set(some)


def test_functions_in_one_graph_reduce_gradients_of_the_same_variables():
    """As a GAN does: their operations have the same names, and nothing else keeps them in order."""
    x = tf.Variable(tf.ones([50]))

    @tf.function(autograph=False)
    def gradient(factor):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(x * factor)
        return hvd.DistributedGradientTape(tape, op=hvd.Sum).gradient(loss, x)

    @tf.function(autograph=False)
    def both(factor):
        return gradient(factor), gradient(factor * 10.0)

    expected = sum(range(1, hvd.size() + 1))
    for _ in range(5):
        first, second = both(tf.constant(hvd.rank() + 1.0))
        assert (first[0].numpy(), second[0].numpy()) == (expected, 10 * expected)


def test_a_function_may_reduce_when_it_is_traced_again_and_not_before():
    """As Horovod's elastic example does: its first step, which only makes variables, sends nothing."""
    x = tf.Variable(1.0)

    @tf.function(autograph=False)
    def gradient(reduce):
        with tf.GradientTape() as tape:
            loss = x * 2.0
        tape = hvd.DistributedGradientTape(tape, op=hvd.Sum) if reduce else tape
        return tape.gradient(loss, [x])[0]

    assert [gradient(reduce).numpy() for reduce in (False, True)] == [2.0, 2.0 * hvd.size()]


def test_a_rank_that_traces_again_alone_stays_in_step():
    x, traces = tf.Variable(1.0), []

    @tf.function(autograph=False)
    def gradient(batch):
        traces.append(batch.shape)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(x * batch)
        return hvd.DistributedGradientTape(tape, op=hvd.Sum).gradient(loss, x)

    assert gradient(tf.ones([4])).numpy() == 4.0 * hvd.size()
    assert gradient(tf.ones([1 if hvd.rank() else 4])).numpy() == 4.0 + hvd.size() - 1
    assert len(traces) == (2 if hvd.rank() else 1)


def test_a_distributed_optimizer_accumulates_in_a_loop_with_a_plain_tape():
    def sgd():
        return keras.optimizers.SGD(0.1, momentum=0.9)

    def model():
        start = keras.initializers.GlorotUniform(seed=1)
        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, kernel_initializer=start)])

    def train(optimizer, model, batches, *, traced=False):
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        step = tf.function(step, autograph=False) if traced else step
        for rows in batches:
            step(X[rows], Y[rows])
        return model.get_weights()

    size = hvd.size()
    parts = [slice(6 * n + 6 // size * hvd.rank(), 6 * n + 6 // size * (hvd.rank() + 1)) for n in (0, 1, 1, 0)]
    optimizer = hvd.DistributedOptimizer(
        sgd(), backward_passes_per_step=2, average_aggregated_gradients=True, use_locking=False
    )
    ours = train(optimizer, model(), parts, traced=True)
    assert_close(ours, train(sgd(), model(), [slice(0, 12)] * 2))


def test_autograph_converts_the_users_code_and_not_ours():
    """It would warn of what it cannot convert, and take longer to trace."""
    x, warnings = tf.Variable(1.0), []

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = x * 2.0
        tape = hvd.DistributedGradientTape(tape, op=hvd.Sum)
        hvd.broadcast_variables([x], root_rank=0)
        return tape.gradient(loss, [x]), hvd.allreduce(loss), hvd.keras.allreduce(loss)

    handler = logging.Handler()
    handler.emit = warnings.append
    tf.get_logger().addHandler(handler)
    step()
    tf.get_logger().removeHandler(handler)
    assert [warning.getMessage() for warning in warnings] == []


def test_ranks_that_have_joined_add_nothing():
    x = tf.Variable(1.0)
    for _ in range(1 + hvd.rank()):
        with tf.GradientTape() as tape:
            loss = x * 3.0
        gradient = hvd.DistributedGradientTape(tape, op=hvd.Sum).gradient(loss, [x])[0]
    assert int(hvd.join()) == hvd.size() - 1
    assert gradient.numpy() == 3.0 * (hvd.size() - hvd.rank())


def test_what_cannot_work_says_so_on_every_rank():
    x = tf.Variable([1.0])

    @tf.function(jit_compile=True, autograph=False)
    def compiled():
        with tf.GradientTape() as tape:
            loss = x * 2.0
        return hvd.DistributedGradientTape(tape).gradient(loss, x)

    with pytest.raises(RuntimeError, match="jit_compile=False"):
        compiled()
    tape = tf.GradientTape()
    for bad in ({"op": hvd.Max}, {"groups": 0}, {"gradient_predivide_factor": 2.0, "op": hvd.Sum}):
        with pytest.raises(ValueError, match="Received"):
            hvd.DistributedGradientTape(tape, **bad)
    with pytest.raises(ValueError, match=r"is for DistributedOptimizer and the Trainer only. Received: topk:0.1"):
        hvd.DistributedGradientTape(tape, compression=hvd.Compression.topk(0.1))
    with pytest.raises(ValueError, match="already distributed"):
        hvd.DistributedGradientTape(hvd.DistributedGradientTape(tape))
    with pytest.raises(TypeError, match=r"must be a tf\.GradientTape"):
        hvd.DistributedGradientTape(x)
