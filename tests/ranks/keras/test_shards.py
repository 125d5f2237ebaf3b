"""Optimizer state in shards on Keras: the weights of training without shards, with 1/N of the slot variables."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import hvdtrain
import hvdtrain.keras as hvd
from hvdtrain.callbacks import Checkpoint, SyncCheck
from hvdtrain.keras import basics, shards, variables
from hvdtrain.keras.shards import Shards, Slot

BACKEND = keras.backend.backend()
# Where XLA or TensorFlow fuses the update of a part in another way, last bits differ.
ATOL = 0.0 if BACKEND == "torch" else 1e-6
OPTIMIZERS = keras.optimizers

pytestmark = pytest.mark.world_size(2, 3)
everywhere = pytest.mark.every_backend


def data(samples=22, columns=6):
    generator = np.random.default_rng(0)
    return [generator.normal(size=(samples, count)).astype(np.float32) for count in (columns, 3)]


def model(*, units=147, frozen=True):
    """Weights of a few numbers and of thousands, and one that is not trained."""
    layers = [
        keras.layers.Dense(units, activation="tanh"), keras.layers.Dense(units, name="frozen", trainable=not frozen),
        keras.layers.Dense(3),
    ]  # fmt: skip
    net = keras.Sequential([keras.Input((6,)), *layers])
    generator = np.random.default_rng(0)
    net.set_weights([0.1 * generator.normal(size=w.shape).astype(np.float32) for w in net.get_weights()])
    return net


def adam():
    return OPTIMIZERS.Adam(0.01)


def fit(net, optimizer, *, shard="optimizer", epochs=2, callbacks=(), **options):
    trainer = hvdtrain.Trainer(net, optimizer=optimizer, loss="mse", shard=shard, **options)
    x, y = data()
    if "nan_policy" in options:
        x[5] = np.nan  # one step of each epoch is skipped
    trainer.fit((x, y), epochs=epochs, batch_size=4, callbacks=callbacks, progress=False, run_dir=None)
    return trainer


def slots(trainer):
    inner = getattr(trainer.model.optimizer, "inner_optimizer", trainer.model.optimizer)
    return [v for v in inner.variables if isinstance(v, Slot)]


def arrays(state, kind="optimizer."):
    state = state.copied()
    return {name: np.asarray(array) for name, array in state.arrays.items() if name.startswith(kind)}


def assert_equal(ours, right, atol=ATOL):
    assert len(ours) == len(right)
    for mine, theirs in zip(ours, right, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=atol)


CASES = {
    "momentum": (lambda: OPTIMIZERS.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01), {"accumulate": 3}),
    "adam": (adam, {"clip_norm": 0.05}),
    "adamw": (
        lambda: OPTIMIZERS.AdamW(OPTIMIZERS.schedules.ExponentialDecay(0.01, 2, 0.9), amsgrad=True),
        {"nan_policy": "skip"},
    ),
    "fp16": (lambda: OPTIMIZERS.Adam(0.01, clipvalue=0.01), {"precision": "fp16"}),
    "topk": (
        lambda: OPTIMIZERS.Adagrad(0.01, clipnorm=0.1),
        {"compression": "topk:0.1", "lr_scaling": "linear", "warmup_epochs": 1.5},
    ),
}


@pytest.mark.three_ranks
@pytest.mark.parametrize(
    "case", [pytest.param(each, marks=everywhere) if each in ("momentum", "adamw", "fp16") else each for each in CASES]
)
def test_the_trainer_has_the_weights_of_training_without_shards(case):
    make, options = CASES[case]
    nets = [model(), model()]
    plain = fit(nets[0], make(), shard=None, **options)
    trainer = fit(nets[1], make(), callbacks=[SyncCheck(every=1)], **options)
    # Half precision makes steps of a last bit; so does what is left out of a gradient.
    atol = 2e-3 if case in ("fp16", "topk") and BACKEND != "torch" else ATOL
    assert_equal(nets[1].get_weights(), nets[0].get_weights(), atol)
    ours, right = arrays(trainer.state()), arrays(plain.state())
    assert ours.keys() == right.keys()
    assert np.isfinite(nets[1].get_weights()[0]).all()
    assert_equal(ours.values(), right.values(), atol)
    whole = sum(v.nbytes for name, v in right.items() if v.ndim)
    held = sum(np.prod(v.shape) * 4 for v in slots(trainer))
    assert held <= whole / trainer.world.size + 64 * 4 * len(slots(trainer))


KINDS = {
    "SGD": {"momentum": 0.9}, "Adam": {"amsgrad": True}, "AdamW": {}, "Nadam": {}, "Adamax": {}, "Adadelta": {},
    "Adagrad": {}, "RMSprop": {"momentum": 0.5, "centered": True}, "Ftrl": {}, "Lion": {},
}  # fmt: skip

if BACKEND == "torch":
    from hvdtrain.torch.reduction import publish

    GATHERS = [(publish, "broadcast_async_"), (publish, "allgather_async")]
elif BACKEND == "tensorflow":
    from hvdtrain.keras.backends import tensorflow

    GATHERS = [(tensorflow, "allgather")]
else:
    from hvdtrain.keras import ops
    from hvdtrain.keras.shards import jax

    GATHERS = [(ops, "broadcast_in_place"), (jax, "_gather_small")]


def applied(kind, *, steps=3, shapes=((300, 7), (11,)), **options):
    """Return weights, and the distributed optimizer, after steps by hand."""
    generator, own = np.random.default_rng(0), np.random.default_rng(hvd.rank())
    variables = [keras.Variable(generator.normal(size=shape).astype(np.float32), name="w") for shape in shapes]
    optimizer = hvd.DistributedOptimizer(getattr(OPTIMIZERS, kind)(0.01, **KINDS[kind]), **options)
    for _ in range(steps):
        gradients = [keras.ops.convert_to_tensor(own.normal(size=shape).astype(np.float32)) for shape in shapes]
        optimizer.apply(gradients, variables)
    return [keras.ops.convert_to_numpy(v) for v in variables], optimizer


@pytest.mark.parametrize("kind", [pytest.param(each, marks=everywhere) if each == "Ftrl" else each for each in KINDS])
def test_each_element_wise_optimizer_has_the_weights_of_training_without_shards(kind):
    right, plain = applied(kind)
    ours, optimizer = applied(kind, shard_state=True)
    assert_equal(ours, right)
    optimizer.consolidate_state_dict(None)
    assert_equal([v.numpy() for v in optimizer.variables], [v.numpy() for v in plain.variables])


def _counted(plain, calls):
    def counted(*args, **options):
        calls.append(plain.__name__)
        return plain(*args, **options)

    return counted


@everywhere
def test_each_part_is_gathered_once_in_a_step(monkeypatch):
    """Small weights together. A large one by a broadcast of each part; on TensorFlow alone, which copies it less."""
    calls = []
    for place, name in GATHERS:
        monkeypatch.setattr(place, name, _counted(getattr(place, name), calls))
    applied("Adam", steps=1)
    assert calls == []
    applied("Adam", steps=1, shapes=((300, 300), (11,), (5, 5)), shard_state=True)
    *broadcast, gather = (name for _, name in GATHERS)
    large = broadcast * hvd.size() or [gather]
    assert calls == [*large, gather]


PARTS = {
    "sum": {"op": hvd.Sum},
    "bf16": {"compression": hvd.Compression.bf16},
    "passes": {"backward_passes_per_step": 2},
}
WHOLE = {
    "fp16": {"compression": hvd.Compression.fp16},
    "groups": {"groups": 1},
    "predivided": {"gradient_predivide_factor": 2.0},
}


@everywhere
@pytest.mark.three_ranks
@pytest.mark.parametrize("case", [*PARTS, *WHOLE])
def test_a_rank_gets_its_part_of_gradients_where_nothing_needs_whole_ones(case, monkeypatch):
    """Of two parts each, small and large; the last weight is too small for the last ranks."""
    options = {"shapes": ((300, 300), (11,), (130,)), **PARTS.get(case, {}), **WHOLE.get(case, {})}
    right, _ = applied("SGD", **options)
    calls = []
    monkeypatch.setattr(Shards, "reduced_parts", _counted(Shards.reduced_parts, calls))
    ours, _ = applied("SGD", shard_state=True, **options)
    assert bool(calls) == (case in PARTS and BACKEND != "torch")
    assert_equal(ours, right)


@everywhere
def test_norms_and_reports_are_of_whole_gradients(monkeypatch):
    monkeypatch.setattr(Shards, "reduced_parts", None)
    for options in ({"clipnorm": 0.1}, {"global_clipnorm": 0.1}):
        net, plain = model(), model()
        for each, shard in ((net, True), (plain, False)):
            each.compile(hvd.DistributedOptimizer(OPTIMIZERS.SGD(0.1, **options), shard_state=shard), loss="mse")
            each.fit(*data(8), batch_size=8, shuffle=False, verbose=0)
        assert_equal(net.get_weights(), plain.get_weights())
    fit(model(), adam(), nan_policy="skip")


@everywhere
@pytest.mark.parametrize("options", [{}, {"sparse_as_dense": True}])
def test_rows_of_an_embedding_are_sent_as_rows_unless_dense_ones_are_wanted(options, monkeypatch):
    """TensorFlow's sparse gradient has few numbers; whole ones, and parts of them, have many."""
    calls = []
    if BACKEND == "tensorflow":
        monkeypatch.setattr(tensorflow, "reduce_sparse", _counted(tensorflow.reduce_sparse, calls))
    nets = []
    for shard in (False, True):
        calls.clear()
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Embedding(300, 20), keras.layers.Flatten(), keras.layers.Dense(3)]
        nets.append(keras.Sequential([keras.Input((4,)), *layers]))
        # Of sparse gradients, Keras's Adam squares each occurrence of a row alone; of whole ones, their sum.
        optimizer = OPTIMIZERS.SGD(0.1, momentum=0.9)
        nets[-1].compile(hvd.DistributedOptimizer(optimizer, shard_state=shard, **options), loss="mse")
        words = np.random.default_rng(hvd.rank()).integers(0, 300, (8, 4))
        nets[-1].fit(words, data(8)[1], batch_size=4, shuffle=False, verbose=0)
    assert bool(calls) == (BACKEND == "tensorflow" and not options)
    assert_equal(nets[1].get_weights(), nets[0].get_weights())


@everywhere
@pytest.mark.parametrize("local_size", [1, 4])
def test_hosts_of_many_ranks_reduce_whole_gradients(local_size, monkeypatch):
    """Of two hosts with four ranks each, an alltoall would send more than an allreduce."""
    calls = []
    monkeypatch.setattr(basics, "local_size", lambda: local_size)
    monkeypatch.setattr(Shards, "reduced_parts", _counted(Shards.reduced_parts, calls))
    applied("Adam", shard_state=True)
    assert bool(calls) == (local_size == 1 and BACKEND != "torch")


@pytest.mark.three_ranks
def test_checkpoints_are_those_of_training_without_shards(shared_tmp_path):
    """Saved with shards and loaded without, and the other way round; each resumes bit for bit."""
    kinds = [(None, "optimizer"), ("optimizer", None), ("optimizer", "optimizer")]
    nets = []
    for first, then in kinds:
        folder = shared_tmp_path / f"{first}-{then}"
        fit(model(), adam(), shard=first, epochs=1, callbacks=[Checkpoint(folder)])
        nets.append(model())
        trainer = fit(nets[-1], adam(), shard=then, epochs=2, callbacks=[Checkpoint(folder)])
        assert trainer.global_step == -(-22 // (4 * hvd.size())) * 2
    straight = model()
    fit(straight, adam(), epochs=2)
    for net in nets:
        assert_equal(net.get_weights(), straight.get_weights())


def test_a_state_that_the_root_loads_is_divided_among_all_ranks(shared_tmp_path):
    """As any number of ranks, or one process, has saved it."""
    trainer = fit(model(), adam(), shard=None, epochs=1)
    state = trainer.state()
    net = model()
    again = hvdtrain.Trainer(net, optimizer=adam(), loss="mse", shard="optimizer")
    if again.world.is_root:
        again.load_state(state)
    again._sync.start()
    assert_equal(arrays(again.state()).values(), arrays(state).values(), 0)


@everywhere
@pytest.mark.three_ranks
def test_values_that_are_sent_in_many_pieces_are_the_same(shared_tmp_path, monkeypatch):
    trainer = fit(model(), adam(), epochs=1)
    right = arrays(trainer.state(), "")
    monkeypatch.setattr(shards, "_PIECE_BYTES", 400)
    monkeypatch.setattr(variables, "_PIECE_BYTES", 400)
    trainer.save(shared_tmp_path / "one")
    options = {"optimizer": adam(), "loss": "mse", "shard": "optimizer"}
    loaded = hvdtrain.Trainer.load(shared_tmp_path / "one", model(), **options)
    for found in (arrays(trainer.state(), ""), arrays(loaded.state(), "")):
        assert found.keys() == right.keys()
        assert_equal(found.values(), right.values(), 0)


def test_an_optimizer_with_a_state_keeps_it_when_weights_alone_are_loaded(shared_tmp_path, monkeypatch):
    fit(model(), adam(), epochs=1).save(shared_tmp_path / "one")
    net, optimizer = model(), adam()
    optimizer.build(net.trainable_variables)
    for variable in optimizer.variables[2:]:  # after the counter and the learning rate
        variable.assign(np.full(variable.shape, 0.5, np.float32))
    options = {"optimizer": optimizer, "loss": "mse", "shard": "optimizer"}
    with monkeypatch.context() as patched:
        patched.setattr(Shards, "whole", None)  # no rank gathers the state: it may have no room for it
        trainer = hvdtrain.Trainer.load(shared_tmp_path / "one", net, weights_only=True, **options)
    held = [array for array in arrays(trainer.state()).values() if array.ndim]
    assert held
    assert all((array == 0.5).all() for array in held)


@everywhere
def test_what_is_saved_is_whole_or_refused(shared_tmp_path):
    net = model(frozen=False)
    net.compile(hvd.DistributedOptimizer(adam(), shard_state=True), loss="mse")
    x, y = data(8)
    net.fit(x, y, batch_size=8, epochs=2, verbose=0)
    with pytest.raises(RuntimeError, match=rf"consolidate_state_dict\(to=0\).* on rank {hvd.rank()}"):
        net.save(shared_tmp_path / f"{hvd.rank()}.keras")
    with pytest.raises(RuntimeError, match=r"in shards.*\.keras"):
        net.save(shared_tmp_path / f"{hvd.rank()}.h5")
    net.optimizer.consolidate_state_dict()
    if hvd.rank() == 0:
        net.save(shared_tmp_path / "model.keras")
    hvd.allgather_object(None)
    loaded = keras.models.load_model(shared_tmp_path / "model.keras")  # plain Keras
    plain = [v.numpy() for v in loaded.optimizer.variables]
    held = [keras.ops.convert_to_numpy(v) for v in net.optimizer.variables]
    bounds = net.optimizer._hvd_shards.bounds
    assert_equal(held, [v.reshape(-1)[slice(*bounds(v.size))] if v.shape else v for v in plain], 0)
    # A built optimizer is divided when it is wrapped, and loading divides, too.
    again = hvd.DistributedOptimizer(loaded.optimizer, shard_state=True)
    fresh = model(frozen=False)
    fresh.compile(hvd.DistributedOptimizer(adam(), shard_state=True), loss="mse")
    fresh.optimizer.build(fresh.trainable_variables)
    fresh.load_weights(shared_tmp_path / "model.keras")
    for other in (again, fresh.optimizer):
        ours = [keras.ops.convert_to_numpy(v) for v in other.variables]
        assert_equal(ours, held, 0)
    net.fit(x, y, batch_size=8, verbose=0)
    if hvd.rank() == 0:
        with pytest.raises(RuntimeError, match="in shards"):  # it was of the step before
            net.optimizer.variables[-1].numpy()


class Own(OPTIMIZERS.Adam):
    pass


@everywhere
@pytest.mark.three_ranks
def test_a_state_that_is_restored_has_this_ranks_parts_of_the_commit():
    net = model()
    net.compile(hvd.DistributedOptimizer(adam(), shard_state=True), loss="mse")
    state = hvd.elastic.KerasState(net, batch=0)
    x, y = data()

    def held():
        hvd.elastic.KerasState(net)  # on JAX, while fit runs, values are elsewhere
        return [np.array(keras.ops.convert_to_numpy(v)) for v in [*net.weights, *net.optimizer.variables]]

    state.sync()
    net.fit(x, y, batch_size=11, verbose=0)
    state.commit()
    committed = held()
    net.fit(x, y, batch_size=11, verbose=0)
    assert any((mine != before).any() for mine, before in zip(held(), committed, strict=True))
    state.restore()
    assert_equal(held(), committed, 0.0)
    net.fit(x, y, batch_size=11, verbose=0)
    assert len(slots(state)) == 2 * 4, "two moments of each weight that is trained"


def test_what_does_not_update_each_number_alone_is_refused_by_name():
    kinds = [Own(), OPTIMIZERS.Adafactor(), OPTIMIZERS.Lamb(), OPTIMIZERS.Muon()]
    for optimizer in kinds:
        with pytest.raises(ValueError, match=f"must not depend on others.*Received: .*{type(optimizer).__name__}"):
            hvd.DistributedOptimizer(optimizer, shard_state=True)
        with pytest.raises(ValueError, match=f"must not depend on others.*Received: .*{type(optimizer).__name__}"):
            hvdtrain.Trainer(model(), optimizer=optimizer, loss="mse", shard="optimizer")
    with pytest.raises(ValueError, match=r"Adam\(use_ema=True\)\. Use no shards"):
        hvd.DistributedOptimizer(OPTIMIZERS.Adam(use_ema=True), shard_state=True)
    with pytest.raises(ValueError, match="local variable w with shard_state=True"):
        hvd.DistributedOptimizer(adam(), shard_state=True).register_local_var(keras.Variable(1.0, name="w"))


@pytest.mark.parametrize(
    "options",
    [
        {"sync": hvdtrain.LocalSGD(every=2)},
        {"sync": hvdtrain.DiLoCo(every=2)},
        {"sync": hvdtrain.Delayed()},
        {"cutoff": 0.5, "accumulate": 2},
    ],
)
def test_strategies_are_refused_with_the_reason(options):
    with pytest.raises(ValueError, match="Received: shard='optimizer': ranks update parts of the weights"):
        hvdtrain.Trainer(model(), optimizer="adam", loss="mse", shard="optimizer", **options)


def test_sharded_gradients_are_refused():
    with pytest.raises(ValueError, match=r"Use shard='optimizer'\. Received: shard='gradients'"):
        hvdtrain.Trainer(model(), optimizer="adam", loss="mse", shard="gradients")


@pytest.mark.three_ranks
@pytest.mark.world_size(3)
def test_ranks_of_a_process_set_share_a_state():
    pair = hvd.add_process_set(hvd.ProcessSet([0, 2]))
    try:
        right, plain = applied("Adam", process_set=pair)
        ours, optimizer = applied("Adam", process_set=pair, shard_state=True)
        assert_equal(ours, right)
        optimizer.consolidate_state_dict(None)
        assert_equal([v.numpy() for v in optimizer.variables], [v.numpy() for v in plain.variables])
        assert (hvd.rank() == 1) == (not any(isinstance(v, Slot) for v in optimizer.variables))
    finally:
        hvd.barrier()
        hvd.remove_process_set(pair)
