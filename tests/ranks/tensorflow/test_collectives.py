"""Collectives, broadcasts and batch statistics on tensors, tf.Variables and Keras variables."""

from __future__ import annotations

from fractions import Fraction

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdtrain.keras
import hvdtrain.tensorflow as hvd
from hvdtrain.errors import DesyncError, NotInitializedError
from hvdtrain.keras import basics

pytestmark = [pytest.mark.world_size(2, 3), pytest.mark.in_graphs]

RANKS = range(hvd.size())
TOTAL = sum(rank + 1.0 for rank in RANKS)


def collect(x):
    """Return every collective's result on `x`, a vector as long as there are ranks."""
    slices = tf.IndexedSlices(tf.convert_to_tensor(x)[:1], tf.constant([hvd.rank()]), tf.constant([5]))
    counts = tf.cast(tf.convert_to_tensor(x), tf.int32)
    return {
        "mean": hvd.allreduce(x),
        "sum": hvd.allreduce(x, average=False),
        "fp16": hvd.allreduce(x, op=hvd.Sum, compression=hvd.Compression.fp16),
        "scaled": hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5),
        "bf16": hvd.allreduce(x, op=hvd.Sum, compression=hvd.Compression.bf16),
        "max": hvd.allreduce(x, op=hvd.Max, name="greatest"),
        "slices": tf.convert_to_tensor(hvd.allreduce(slices, op=hvd.Sum)),
        "group": hvd.grouped_allreduce([x, counts, slices], op=hvd.Sum),
        "gathered": hvd.allgather(x),
        "gathered_group": hvd.grouped_allgather([x, counts]),
        "root": hvd.broadcast(x, root_rank=1),
        "sent": hvd.alltoall(x),
        "split": hvd.alltoall(x, splits=[1] * hvd.size()),
        "part": hvd.reducescatter(x, op=hvd.Sum),
        "part_scaled": hvd.reducescatter(x, op=hvd.Sum, prescale_factor=0.25, postscale_factor=4.0),
        "part_group": hvd.grouped_reducescatter([x, counts], op=hvd.Sum, prescale_factor=2.0),
        "ranks": [hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op()],
        "included": hvd.process_set_included_op(),
    }  # fmt: skip


@pytest.mark.parametrize("how", ["eager", "graph"])
def test_every_collective_takes_variables_of_both_kinds(how):
    own = np.full(hvd.size(), hvd.rank() + 1, "float32")
    full, all_of_them = [TOTAL] * hvd.size(), [rank + 1.0 for rank in RANKS]
    everyone = np.repeat(all_of_them, hvd.size()).tolist()
    rows = [rank + 1.0 for rank in RANKS] + [0.0] * (5 - hvd.size())
    ranks = [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()]
    run = tf.function(collect, autograph=False) if how == "graph" else collect
    for make in (keras.Variable,) if how == "graph" else (keras.Variable, tf.Variable):  # tracing takes seconds
        x = make(own)
        got = run(x)
        slices = got["group"].pop()
        got = tf.nest.map_structure(lambda each: each.numpy().tolist(), got)
        assert got["mean"] == [TOTAL / hvd.size()] * hvd.size()
        assert got["sum"] == got["scaled"] == got["fp16"] == got["bf16"] == full
        assert got["max"] == [hvd.size()] * hvd.size()
        assert got["slices"] == rows
        assert got["gathered"] == everyone
        assert got["gathered_group"] == [everyone, everyone]
        assert got["root"] == [2.0] * hvd.size()
        assert got["sent"] == all_of_them
        assert got["split"] == (all_of_them, [1] * hvd.size())
        assert got["part"] == got["part_scaled"] == [TOTAL]
        assert got["part_group"] == [[2 * TOTAL], [2 * TOTAL]]
        assert got["ranks"] == ranks
        assert got["included"] == 1
        assert got["group"] == [full, full]
        assert tf.convert_to_tensor(slices).numpy().tolist() == rows


def test_a_tape_differentiates_collectives():
    x = tf.Variable([hvd.rank() + 1.0])
    with tf.GradientTape(persistent=True) as tape:
        total = hvd.allreduce(x, op=hvd.Sum)
        root = hvd.broadcast(x, 0)
    assert tape.gradient(total, x).numpy() == [hvd.size()]
    assert tape.gradient(root, x).numpy() == [1.0 if hvd.rank() == 0 else 0.0]
    rows = tf.Variable([1.0] * hvd.size())
    with tf.GradientTape() as tape:
        part = hvd.reducescatter(rows, op=hvd.Sum, prescale_factor=3.0, postscale_factor=2.0)
    assert tape.gradient(part, rows).numpy().tolist() == [6.0 * hvd.size()] * hvd.size()  # as Horovod defines it


@pytest.mark.world_size(2)  # at 3, the order of a sum differs
def test_tensors_are_scaled_before_a_reducescatter_with_the_bits_of_allreduce():
    for dtype in ("float16", "float32", "float64", "int32", "int64"):
        x = tf.cast([7.3 + hvd.rank()] * hvd.size(), dtype)
        options = {"op": hvd.Sum, "prescale_factor": 0.7, "postscale_factor": 1.3}
        whole = hvd.allreduce(x, **options).numpy()[:1]
        part = hvd.reducescatter(x, **options).numpy()
        if dtype == "float64":  # allreduce takes its factors as float32
            np.testing.assert_allclose(part, whole, rtol=1e-6)
        else:
            np.testing.assert_array_equal(part, whole)


@pytest.mark.parametrize("factor", [3.0, 1 / 3, -1 / 49])
def test_whole_numbers_are_scaled_exactly_before_a_reducescatter(factor):
    large = 2**53 + 49
    x = tf.constant([large if hvd.rank() == 0 else 0] * hvd.size(), tf.int64)
    expected = large * 3 if factor == 3.0 else int(large / Fraction(round(1 / factor)))
    for run in (hvd.reducescatter, tf.function(hvd.reducescatter, autograph=False)):
        assert run(x, op=hvd.Sum, prescale_factor=factor).numpy().tolist() == [expected]
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"above 2\^53 must be whole"):
            run(tf.constant([large] * hvd.size(), tf.int64), op=hvd.Sum, prescale_factor=0.7)


@pytest.mark.world_size(2)
def test_a_group_is_combined_by_adasum_as_each_of_its_tensors():
    if not hvd.mpi_enabled():
        with pytest.raises(ValueError, match="Adasum needs MPI"):
            hvd.grouped_allreduce([tf.ones(2)], op=hvd.Adasum)
        return
    tensors = [tf.constant([1.0 + hvd.rank(), 2.0, -3.0 * hvd.rank()]), tf.constant([[0.5 - hvd.rank()]], tf.float64)]
    each = [hvd.allreduce(tensor, op=hvd.Adasum).numpy().tolist() for tensor in tensors]
    for run in (hvd.grouped_allreduce, tf.function(hvd.grouped_allreduce, autograph=False)):
        assert [t.numpy().tolist() for t in run(tensors, op=hvd.Adasum, name="combined")] == each
    assert each[0] != hvd.allreduce(tensors[0]).numpy().tolist()


def test_what_horovod_cannot_reduce_is_refused_before_anything_is_sent():
    slices = tf.IndexedSlices(tf.ones((1, 2)), tf.constant([0]), tf.constant([5, 2]))
    for options in ({"op": hvd.Max}, {"op": hvd.Adasum}, {"prescale_factor": 2.0}):
        with pytest.raises(NotImplementedError, match=r"tf\.IndexedSlices c"):
            hvd.grouped_allreduce([tf.ones(2), slices], **options)
    if hvd.size() == 2 and hvd.mpi_enabled():
        with pytest.raises(TypeError, match="Adasum combines floats"):
            hvd.allreduce(tf.constant([1]), op=hvd.Adasum)
    if hvd.size() == 3 and hvd.mpi_enabled():
        with pytest.raises(NotImplementedError, match="power of 2"):
            hvd.allreduce(tf.ones(1), op=hvd.Adasum)
    assert hvd.allreduce(tf.constant([1.0])).numpy() == [1.0]  # ranks are still in step


def different_values():
    """Return variables of every size and kind; on rank 1, a NaN that carries bits of its own."""
    number = hvd.rank() + 3
    odd = np.array([0x7FC00000 + number, 0x3F800000], "uint32").view("float32")
    values = [odd, np.array([number % 2 == 0, True]), np.uint32(number), np.int64([number]), np.int8([[-number]])]
    return [
        *(tf.Variable(value) for value in values),
        tf.Variable(tf.cast([1.5 * number], tf.bfloat16)),
        keras.Variable(np.full((2, 3), number, "float64"), dtype="float64", trainable=False),
        keras.random.SeedGenerator(number).state,
    ]


@pytest.mark.parametrize("how", ["eager", "graph"])
def test_a_broadcast_carries_every_bit_of_every_dtype(kit, how):
    them = different_values()
    root = hvd.size() - 1
    (expected,) = {digest for rank, digest in enumerate(hvd.allgather_object(kit.digest(them))) if rank == root}

    def broadcast():
        hvd.broadcast_variables(them, root_rank=root, inplace=True)

    (tf.function(broadcast, autograph=False) if how == "graph" else broadcast)()
    assert kit.digest(them) == expected
    assert float(hvd.broadcast_(them[3:4], 0)[0].numpy()[0]) == root + 3
    with pytest.raises(ValueError, match="root_rank must be a rank"):
        hvd.broadcast_variables(them, root_rank=hvd.size())


def test_ranks_with_different_variables_are_told_before_anything_is_sent():
    them = [tf.Variable(np.zeros(2 + (hvd.rank() == 1)), name="kernel")]
    with pytest.raises(DesyncError, match="kernel"):
        hvd.broadcast_variables(them, root_rank=0)
    with pytest.raises(RuntimeError, match="no global variables"):
        hvd.broadcast_global_variables(0)


def test_what_cannot_be_part_of_a_graph_says_so_on_every_rank():
    variable = tf.Variable([1.0])
    for call in (
        lambda: hvdtrain.keras.broadcast_variables([variable]),
        lambda: hvdtrain.keras.broadcast_object({"epoch": 1}),
        lambda: hvdtrain.keras.allgather_object(1),
        lambda: hvd.broadcast_object({"epoch": 1}),
        lambda: hvd.allgather_object(1),
    ):
        with pytest.raises(RuntimeError, match=r"Received: a call in a tf\.function\. Call it outside"):
            tf.function(call, autograph=False)()


def test_batches_of_any_length_are_normalized_as_one():
    rows = np.random.default_rng(0).normal(100.0, 1.0, size=(7, 2, 3)).astype("float32")
    factors = np.random.default_rng(1).normal(size=rows.shape).astype("float32")
    ends = np.cumsum([0, 7 - 2 * (hvd.size() - 1), *[2] * (hvd.size() - 1)])
    mine = slice(*ends[hvd.rank() : hvd.rank() + 2])

    def run(layer, part, wrap):
        with tf.GradientTape() as tape:
            x = tf.constant(rows[part])
            tape.watch(x)
            out = layer(x, training=True)
            loss = tf.reduce_sum(out * factors[part])
        tape = wrap(tape)
        to_weights = tape.gradient(loss, layer.trainable_variables)
        return out, to_weights, [v.numpy() for v in layer.non_trainable_variables]

    def to_inputs(layer, part):
        with tf.GradientTape() as tape:
            x = tf.constant(rows[part])
            tape.watch(x)
            loss = tf.reduce_sum(layer(x, training=True) * factors[part])
        return tape.gradient(loss, x)

    plain = keras.layers.BatchNormalization()
    out, gradients, moving = run(plain, slice(None), lambda tape: tape)
    layer = hvd.SyncBatchNormalization(fused=False)
    ours, ours_gradients, ours_moving = run(layer, mine, lambda t: hvd.DistributedGradientTape(t, op=hvd.Sum))
    for a, b in [
        (ours, out[mine]),
        *zip(ours_gradients, gradients, strict=True),
        *zip(ours_moving, moving, strict=True),
    ]:
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(to_inputs(layer, mine), to_inputs(plain, slice(None))[mine], rtol=1e-3, atol=1e-3)
    assert hvd.SyncBatchNormalization.from_config(layer.get_config()).momentum == layer.momentum
    with pytest.raises(ValueError, match="no fused form"):
        hvd.SyncBatchNormalization(fused=True)


def test_a_session_of_tensorflow_1_broadcasts_reference_variables_and_objects():
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        for dtype in (tf.float32, tf.float16, tf.int64, tf.bool):
            kinds = [
                v1.Variable(tf.cast([hvd.rank(), 1], dtype), use_resource=use_resource)
                for use_resource in (False, True)
            ]
            session.run(v1.variables_initializer(kinds))
            returned = session.run(hvd.broadcast_(kinds, root_rank=1))
            for value in [*returned, *session.run(kinds)]:
                assert value.tolist() == [1, 1]
        assert hvd.broadcast_object({"of": hvd.rank()}, root_rank=1) == {"of": 1}
        assert hvd.allgather_object(hvd.rank(), session=session) == [*RANKS]
    with pytest.raises(ValueError, match="Sessions are TensorFlow 1's"):
        hvd.broadcast_object(1, session=session)


@pytest.mark.long
def test_a_session_of_tensorflow_1_trains_the_weights_of_one_process():
    v1 = tf.compat.v1

    def train(rows, wrap):
        with tf.Graph().as_default(), v1.Session() as session:
            x = v1.get_variable("x", initializer=tf.constant([float(rows[0])] * 2), use_resource=True)
            loss = tf.reduce_mean(tf.reduce_sum((x - tf.constant(rows)[:, None]) ** 2, axis=1))
            train = wrap(v1.train.GradientDescentOptimizer(0.1)).minimize(loss)
            session.run(v1.global_variables_initializer())
            session.run(hvd.broadcast_global_variables(0))
            for _ in range(3):
                session.run(train)
            return session.run(x)

    rows = np.arange(2.0 * hvd.size(), dtype="float32") + 1
    alone = train(rows, lambda optimizer: optimizer)
    mine = rows[2 * hvd.rank() : 2 * hvd.rank() + 2]
    ours = train(mine, lambda optimizer: hvd.DistributedOptimizer(optimizer, compression=hvd.Compression.none))
    np.testing.assert_allclose(ours, alone, rtol=1e-6)


def test_is_homogeneous_needs_init(monkeypatch):
    assert hvd.is_homogeneous()
    monkeypatch.setattr(basics.engine(), "is_initialized", lambda: False)
    with pytest.raises(NotInitializedError):  # Horovod's own ends the process
        hvd.is_homogeneous()
