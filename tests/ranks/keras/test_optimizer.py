"""Ranks with batches of B give the weights of one process with batches of N * B."""

from __future__ import annotations

import json

import keras
import numpy as np
import pytest
from keras.ops import convert_to_numpy as to_numpy

import hvdtrain.keras as hvd

pytestmark = pytest.mark.world_size(2, 3)

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.01),
    "nesterov with clipnorm": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, clipnorm=0.01),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.01, global_clipnorm=0.05),
    "clipvalue": lambda: keras.optimizers.SGD(0.1, momentum=0.9, clipvalue=0.003),
    "accumulation": lambda: keras.optimizers.SGD(
        0.1, momentum=0.9, weight_decay=0.01, global_clipnorm=0.05, gradient_accumulation_steps=2
    ),
    "adamw with ema": lambda: keras.optimizers.AdamW(
        0.01, weight_decay=0.01, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=2
    ),
    "schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5), momentum=0.9),
}


_trained: dict[str, np.ndarray] = {}


def _one_process(kit, name):
    """Return the weights that one process trains, which it does once: compiling takes most of a test's time."""
    if name not in _trained:
        _trained[name] = kit.flat(kit.alone(kit.model(), OPTIMIZERS[name]()))
    return _trained[name]


EVERY_BACKEND = ("sgd", "accumulation")  # the others differ in what Keras itself does


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.every_backend] * (name in EVERY_BACKEND)) for name in OPTIMIZERS]
)
def test_ranks_equal_one_process(kit, name):
    alone = _one_process(kit, name)
    together = kit.together(kit.model(), hvd.DistributedOptimizer(OPTIMIZERS[name]()))
    kit.assert_close(together, alone)
    kit.assert_same_everywhere(together)
    start = kit.flat(kit.model())
    assert np.abs(kit.flat(together) - start).max() > 1e-3  # it did train


def test_without_averaging_ranks_would_differ(kit):
    together = kit.together(kit.model(), OPTIMIZERS["sgd"]())
    digests = hvd.allgather_object(kit.digest(together.weights))
    assert len(set(digests)) == hvd.size()


@pytest.mark.every_backend
def test_reductions_really_run(kit, monkeypatch):
    calls = kit.count_calls(monkeypatch)
    kit.together(kit.model(), hvd.DistributedOptimizer(OPTIMIZERS["sgd"]()), epochs=2)
    # 4 small gradients, sent as one; 4 steps. TensorFlow's graph names them once, in each trace of a first step.
    assert len(calls) in {"tensorflow": (1, 2), "torch": (4,), "jax": (4,)}[kit.backend]


@pytest.mark.every_backend
@pytest.mark.world_size(2)
def test_the_timeline_shows_gradients_and_nothing_between_updates(kit, tmp_path):
    file = tmp_path / f"timeline-{hvd.rank()}.json"
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.1), backward_passes_per_step=3, average_aggregated_gradients=True
    )
    hvd.start_timeline(str(file))
    kit.together(kit.model(), optimizer, epochs=3)  # 6 passes, 2 updates
    hvd.barrier()
    hvd.stop_timeline()
    if hvd.rank() == 0:
        text = file.read_text().rstrip().rstrip(",")
        events = json.loads(text if text.endswith("]") else text + "]")
        gradients = {e["pid"]: e["args"].get("name", "") for e in events if e.get("name") == "process_name"}
        gradients = {pid: name for pid, name in gradients.items() if "SGD" in name}
        reductions = [e for e in events if e.get("name") == "ALLREDUCE" and e.get("pid") in gradients]
        assert len(reductions) == 2 * len(gradients)
        assert len(gradients) == 1  # small ones travel together


@pytest.mark.every_backend
def test_sums_on_request(kit):
    rate = 0.1 / hvd.size()
    alone = kit.alone(kit.model(), keras.optimizers.SGD(0.1, momentum=0.9))
    together = kit.together(kit.model(), hvd.DistributedOptimizer(keras.optimizers.SGD(rate, momentum=0.9), op=hvd.Sum))
    kit.assert_close(together, alone)


@pytest.mark.parametrize(
    "average",
    [pytest.param(False, marks=pytest.mark.in_graphs), pytest.param(True, marks=pytest.mark.every_backend)],
)
def test_backward_passes_are_summed_or_averaged(kit, average):
    alone = kit.alone(kit.model(), keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2))
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.1 if average else 0.05, momentum=0.9),
        backward_passes_per_step=2,
        average_aggregated_gradients=average,
    )
    together = kit.together(kit.model(), optimizer)
    kit.assert_close(together, alone)
    kit.assert_same_everywhere(together)


@pytest.mark.in_graphs
def test_backward_passes_multiply_with_keras_accumulation(kit):
    alone = kit.alone(kit.model(), keras.optimizers.SGD(0.1, gradient_accumulation_steps=6))
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
        backward_passes_per_step=3,
        average_aggregated_gradients=True,
    )
    kit.assert_close(kit.together(kit.model(), optimizer), alone)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"groups": 2}, marks=pytest.mark.every_backend),
        pytest.param({"gradient_predivide_factor": 2.0}, marks=pytest.mark.every_backend),
        {"num_groups": 1},
    ],
)
def test_groups_and_predivision_change_nothing(kit, options):
    alone = _one_process(kit, "sgd")
    together = kit.together(kit.model(), hvd.DistributedOptimizer(OPTIMIZERS["sgd"](), **options))
    kit.assert_close(together, alone)


def test_groups_of_variables_change_nothing(kit):
    alone = _one_process(kit, "sgd")
    model = kit.model()
    groups = [model.get_layer("hidden").trainable_variables, model.get_layer("head").trainable_variables[:1]]
    kit.assert_close(kit.together(model, hvd.DistributedOptimizer(OPTIMIZERS["sgd"](), groups=groups)), alone)


@pytest.mark.in_graphs
def test_eager_steps_equal_compiled_ones(kit):
    alone = _one_process(kit, "accumulation")
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["accumulation"]())
    kit.assert_close(kit.together(kit.model(), optimizer, run_eagerly=True), alone)


@pytest.mark.every_backend
def test_xla_is_turned_off_where_horovod_does_not_compile(kit):
    model = kit.together(kit.model(), hvd.DistributedOptimizer(OPTIMIZERS["sgd"]()), jit_compile=True)
    assert bool(model.jit_compile) == (kit.backend == "jax")
    kit.assert_same_everywhere(model)


@pytest.mark.every_backend
def test_several_steps_an_execution_equal_single_steps(kit):
    if kit.backend == "torch":
        pytest.skip("Keras has no steps_per_execution on torch")
    alone = _one_process(kit, "sgd")
    together = kit.together(kit.model(), hvd.DistributedOptimizer(OPTIMIZERS["sgd"]()), steps_per_execution=2)
    kit.assert_close(together, alone)


@pytest.mark.parametrize("as_dense", [pytest.param(each, marks=pytest.mark.every_backend) for each in (False, True)])
def test_embedding_gradients_equal_one_process(kit, as_dense):
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, 11, size=(48, 4))
    labels = rng.normal(size=(48, 2)).astype("float32")

    def train(optimizer, x, y, batch):
        start = [keras.initializers.RandomUniform(seed=1), keras.initializers.RandomUniform(seed=2)]
        model = keras.Sequential(
            [
                keras.Input((4,), dtype="int32"),
                keras.layers.Embedding(11, 6, embeddings_initializer=start[0]),
                keras.layers.Flatten(),
                keras.layers.Dense(2, kernel_initializer=start[1]),
            ]
        )
        model.compile(optimizer=optimizer, loss="mse")
        model.fit(x, y, batch_size=batch, epochs=3, shuffle=False, verbose=0)
        return model

    alone = train(keras.optimizers.SGD(0.5), tokens, labels, 24)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5), sparse_as_dense=as_dense)
    together = train(optimizer, kit.shard(tokens), kit.shard(labels), 24 // hvd.size())
    kit.assert_close(together, alone)
    kit.assert_same_everywhere(together)


def test_local_layers_keep_their_own_gradients(kit):
    model = kit.model()
    optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=model.get_layer("head"))
    kit.together(model, optimizer)
    shared = hvd.allgather_object(kit.digest(model.get_layer("hidden").weights))
    own = hvd.allgather_object(kit.digest(model.get_layer("head").weights))
    # The hidden layer's gradients are averaged, though through different heads.
    assert len(set(shared)) == 1
    assert len(set(own)) == hvd.size()


@pytest.mark.every_backend
def test_two_optimizers_do_not_meet(kit):
    alone = [_one_process(kit, "sgd"), kit.alone(kit.model(5), OPTIMIZERS["sgd"]())]
    together = [kit.together(kit.model(s), hvd.DistributedOptimizer(OPTIMIZERS["sgd"]())) for s in (1, 5)]
    for one, other in zip(together, alone, strict=True):
        kit.assert_close(one, other)


def test_ranks_that_counted_differently_still_train(kit):
    """A rank that made more layers and optimizers before has other names in its model."""
    if hvd.rank() == 0:
        spare = kit.model()
        hvd.DistributedOptimizer("sgd").build(spare.trainable_variables)
    alone = _one_process(kit, "sgd")
    kit.assert_close(kit.together(kit.model(), hvd.DistributedOptimizer(OPTIMIZERS["sgd"]())), alone)


def test_a_copied_optimizer_is_distributed_too(kit):
    import copy

    alone = _one_process(kit, "sgd")
    original = hvd.DistributedOptimizer(OPTIMIZERS["sgd"]())
    for duplicate in (copy.deepcopy(original), type(original).from_config(original.get_config())):
        kit.assert_close(kit.together(kit.model(), duplicate), alone)


def test_an_optimizer_mid_training_keeps_its_state(kit):
    """Two epochs, then distributed, then one more: equal to three epochs of one process."""
    for passes in (1, 2):
        alone = kit.alone(kit.model(), OPTIMIZERS["sgd"](), epochs=2)
        model = kit.alone(kit.model(), OPTIMIZERS["sgd"](), epochs=2)
        optimizer = hvd.DistributedOptimizer(
            model.optimizer, backward_passes_per_step=passes, average_aggregated_gradients=True
        )
        momentum = {v.path: v for v in optimizer.variables}
        assert all(any(v is w for w in optimizer.variables) for v in model.optimizer.variables)
        assert float(to_numpy(optimizer.iterations)) == 4 // passes
        if passes == 1:
            kit.together(model, optimizer, epochs=1)
            kit.alone(alone, alone.optimizer, epochs=1)
            kit.assert_close(model, alone)
        else:
            kit.together(model, optimizer, epochs=1)
            assert any("gradient_accumulator" in p for p in momentum)
        kit.assert_same_everywhere(model)


@pytest.mark.three_ranks
@pytest.mark.world_size(3)
def test_process_sets_train_apart(kit):
    pair = hvd.add_process_set(hvd.ProcessSet([0, 1]))
    try:
        model = kit.together(kit.model(), hvd.DistributedOptimizer(OPTIMIZERS["sgd"](), process_set=pair))
        digests = hvd.allgather_object(kit.digest(model.weights))
        assert digests[0] == digests[1] != digests[2]
    finally:
        hvd.barrier()
        hvd.remove_process_set(pair)
