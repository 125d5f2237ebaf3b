"""Compression with error feedback on Keras: what ranks train, send and remember, and what a checkpoint holds of it."""

from __future__ import annotations

import math
from collections import Counter

import keras
import numpy as np
import pytest

import hvdtrain
import hvdtrain.keras as hvd
from hvdtrain.callbacks import Callback, Checkpoint, SyncCheck
from hvdtrain.data import sharding
from hvdtrain.distributed.gradient_memory import first_directions
from hvdtrain.errors import NonFiniteError
from hvdtrain.keras.weight_access import WeightAccess

BACKEND = keras.backend.backend()
SCHEMES = ["int8", "topk:0.1", "powersgd:2:2"]
BATCH, LR, SMALL_LR = 4, 0.1, 0.005
INPUTS, OUTPUTS = 40, 8
KERNEL, BIAS = (f"0000{number}.sequential/dense/{name}" for number, name in enumerate(("kernel", "bias")))

pytestmark = pytest.mark.world_size(2)


def everywhere(*values):
    """Return parameters of a test that runs on every backend; torch alone is the cheapest."""
    return pytest.param(*values, marks=pytest.mark.every_backend)


def numbers(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def product(y, outputs):
    """A loss whose gradient does not depend on weights."""
    return keras.ops.mean(y * outputs, axis=-1)


def memory(trainer):
    names = ("mean.error.", "max.powersgd_")
    return {name: array for name, array in trainer._adapter.rank_state.items() if name.startswith(names)}


def part(blocks, row, shape):
    return blocks[row:].reshape(-1)[: math.prod(shape)].reshape(shape)


def simulated_int8(given, errors):
    size, blocks = len(given), []
    shapes = {name: g.shape for name, g in given[0].items()}
    for mine, left in zip(given, errors, strict=True):
        whole = [(mine[name] + left.get(name, 0)).reshape(-1) for name in shapes]
        blocks.append(np.concatenate([np.pad(each, (0, -each.size % 256)) for each in whole]).reshape(-1, 256))

    def rounded(block):
        scales = np.abs(block).max(1, keepdims=True) / np.float32(127)
        return np.rint(block / np.maximum(scales, np.float32(1e-30))) * scales

    sent = [rounded(each) for each in blocks]
    mean = np.mean(sent, axis=0, dtype=np.float32)
    shared, results = rounded(mean), {}
    left = [before - after for before, after in zip(blocks, sent, strict=True)]
    shard = -(-len(mean) // size)
    for rank in range(size):
        mine = slice(rank * shard, (rank + 1) * shard)
        left[rank][mine] += size * (mean - shared)[mine]
    row = 0
    for name, shape in shapes.items():
        count = -(-math.prod(shape) // 256)
        results[name] = part(shared, row, shape)
        for error, whole in zip(errors, left, strict=True):
            error[name] = part(whole, row, shape)
        row += count
    return results


def simulated_topk(given, errors, fraction):
    results = {}
    for name in given[0]:
        total = 0
        for mine, left in zip(given, errors, strict=True):
            whole = mine[name] + left.get(name, 0)
            count = math.ceil(fraction * whole.size)
            sent = np.zeros_like(whole).reshape(-1)
            places = np.argsort(-np.abs(whole).reshape(-1), kind="stable")[:count]
            sent[places] = whole.reshape(-1)[places]
            left[name] = whole - sent.reshape(whole.shape)
            total = total + sent.reshape(whole.shape)
        results[name] = total / np.float32(len(given))
    return results


def simulated_powersgd(given, errors, q, rank):
    mean = {name: np.mean([each[name] for each in given], axis=0) for name in given[0]}
    if q is None:
        return mean, None
    whole = [each[KERNEL] + left.get(KERNEL, 0) for each, left in zip(given, errors, strict=True)]
    p = np.linalg.qr(np.mean(whole, axis=0) @ q)[0]
    for each, left in zip(whole, errors, strict=True):
        left[KERNEL] = each - p @ (p.T @ each)
    new = np.mean(whole, axis=0).T @ p
    return {KERNEL: p @ new.T, BIAS: mean[BIAS]}, np.linalg.qr(new)[0]


def formula(scheme):
    """Return a function (what ranks send, their errors) -> what they get, of changes of weights."""
    name, *options = scheme.split(":")
    held = {"q": None, "number": 0}

    def powersgd(given, errors):
        rank, after = map(int, options)
        if held["number"] == after:
            held["q"] = first_directions(f"sync/{KERNEL}", (OUTPUTS, rank))
        held["number"] += 1
        plain = [{each.removeprefix("sync/"): values for each, values in mine.items()} for mine in given]
        left = [{each.removeprefix("sync/"): values for each, values in mine.items()} for mine in errors]
        means, held["q"] = simulated_powersgd(plain, left, held["q"], rank)
        for mine, new in zip(errors, left, strict=True):
            mine.update({f"sync/{each}": values for each, values in new.items()})
        return {f"sync/{each}": values for each, values in means.items()}

    if name == "topk":
        return lambda given, errors: simulated_topk(given, errors, float(options[0]))
    return simulated_int8 if name == "int8" else powersgd


def simulate(scheme, steps, size):
    """Return the weights after SGD with what `size` ranks make of their gradients, by the formulas."""
    weights = {KERNEL: np.zeros((INPUTS, OUTPUTS), np.float32), BIAS: np.zeros(OUTPUTS, np.float32)}
    errors, q = [{} for _ in range(size)], None
    name, *numbers = scheme.split(":")
    for step, given in enumerate(steps):
        if name == "int8":
            means = simulated_int8(given, errors)
        elif name == "topk":
            means = simulated_topk(given, errors, float(numbers[0]))
        else:
            if step == int(numbers[1]):
                q = first_directions(KERNEL, (OUTPUTS, int(numbers[0])))
            means, q = simulated_powersgd(given, errors, q, int(numbers[0]))
        for each in weights:
            weights[each] = weights[each] - np.float32(SMALL_LR) * means[each]
    return weights, errors


def local_gradients(x, y, epochs, size):
    """Yield what each rank adds to the mean of a step: uneven shares in the last step of an epoch."""
    for epoch in range(epochs):
        order = sharding.epoch_order(len(x), epoch=epoch, seed=0)
        for begin in range(0, len(x), BATCH * size):
            rows = order[begin : begin + BATCH * size]
            given = []
            for rank in range(size):
                mine = rows[rank::size]
                share = np.float32(size / len(rows) / OUTPUTS)
                given.append({KERNEL: x[mine].T @ y[mine] * share, BIAS: y[mine].sum(0) * share})
            yield given


@pytest.mark.world_size(2, 3)
@pytest.mark.three_ranks
@pytest.mark.parametrize("sync", [everywhere(None), hvdtrain.Delayed()], ids=["every step", "delayed"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_ranks_train_the_weights_of_a_simulation(scheme, sync):
    x, y = numbers(1, 47, INPUTS), numbers(2, 47, OUTPUTS)
    net = keras.Sequential([keras.Input((INPUTS,)), keras.layers.Dense(OUTPUTS, kernel_initializer="zeros")])
    trainer = hvdtrain.Trainer(
        net,
        optimizer=keras.optimizers.SGD(SMALL_LR),
        loss=product,
        compression=scheme,
        **({"sync": sync} if sync else {}),
    )
    trainer.fit((x, y), epochs=5, batch_size=BATCH, progress=False, run_dir=None, callbacks=[SyncCheck(every=1)])
    size = trainer.world.size
    steps = list(local_gradients(x, y, 5, size))
    assert len(steps) == trainer.global_step >= 20
    weights, errors = simulate(scheme, steps, size)
    for ours, right in zip(net.get_weights(), weights.values(), strict=True):
        np.testing.assert_allclose(ours, right, atol=1e-6)
    held = memory(trainer)
    for name, error in errors[trainer.world.rank].items():
        # Another order of additions rounds a few numbers otherwise.
        assert (np.abs(held[f"mean.error.{name}"] - error) > 1e-4).mean() < 0.01


class Wide(keras.layers.Layer):
    """Layers with matrices, and a weight of its own whose gradient alone overflows if a spike is large."""

    def build(self, shape):
        self.hidden = keras.layers.Dense(16, activation="tanh", name="hidden")
        self.middle = keras.layers.Dense(16, activation="tanh", name="middle")
        self.head = keras.layers.Dense(3, name="head")
        for layer, width in ((self.hidden, 6), (self.middle, 16), (self.head, 16)):
            layer.build((None, width))
        small = keras.initializers.Constant(2e-38)
        self.small = self.add_weight(shape=(1,), initializer=small, name="small", dtype="float32", autocast=False)

    def call(self, inputs):
        outputs = keras.ops.cast(self.head(self.middle(self.hidden(inputs[:, :6]))), "float32")
        return outputs + keras.ops.cast(inputs[:, 6:], "float32") * self.small


def data(samples=22):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(samples, 7)).astype(np.float32)
    x[:, 6] = 0
    return x, generator.normal(size=(samples, 3)).astype(np.float32)


def model():
    inputs = keras.Input((7,), dtype="float32")
    net = keras.Model(inputs, Wide(dtype=keras.config.dtype_policy())(inputs))
    generator = np.random.default_rng(0)
    values = net.get_weights()
    net.set_weights([w if w.size == 1 else 0.3 * generator.normal(size=w.shape).astype(np.float32) for w in values])
    return net


def fit(net, given=None, *, callbacks=(), epochs=2, **options):
    trainer = hvdtrain.Trainer(net, optimizer=keras.optimizers.SGD(LR, momentum=0.9), loss="mse", **options)
    trainer.fit(
        data() if given is None else given, epochs=epochs, batch_size=BATCH, callbacks=callbacks, progress=False,
        run_dir=None,
    )  # fmt: skip
    return trainer


def assert_same(ours, theirs):
    for a, b in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.world_size(2, 3)
@pytest.mark.three_ranks
@pytest.mark.parametrize(
    ("scheme", "samples"),
    [("topk:1.0", 22), ("topk:1.0", 1), everywhere("powersgd:16:0", 22), ("powersgd:16:0", 1)],
)
def test_without_loss_the_weights_are_those_without_compression(scheme, samples):
    """All numbers are sent: of matrices with rank 16, none would get smaller."""
    nets = [model(), model()]
    for net, compression in zip(nets, ("none", scheme), strict=True):
        fit(net, data(samples), compression=compression)
    for a, b in zip(*(net.get_weights() for net in nets), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.every_backend
def test_sparse_gradients_become_dense_ones():
    x, y = np.arange(20)[:, None] % 7, data(20)[1]
    nets = []
    for compression in ("none", "topk:1.0"):
        nets.append(keras.Sequential([keras.Input((1,)), keras.layers.Embedding(9, 3), keras.layers.Flatten()]))
        nets[-1].set_weights([numbers(3, 9, 3)])
        optimizer = keras.optimizers.SGD(LR)
        trainer = hvdtrain.Trainer(nets[-1], optimizer=optimizer, loss="mse", compression=compression)
        trainer.fit((x, y), epochs=2, batch_size=BATCH, progress=False, run_dir=None)
    np.testing.assert_allclose(nets[1].get_weights()[0], nets[0].get_weights()[0], atol=1e-5)


HOWS = {
    "every step": {},
    "accumulate": {"accumulate": 2, "clip_norm": 0.5},
    "delayed": {"sync": hvdtrain.Delayed()},
    "fp16": {"precision": "fp16"},
    "delayed bf16": {"precision": "bf16", "sync": hvdtrain.Delayed()},
    "alone": {"sync": hvdtrain.LocalSGD(2, after_steps=1)},
    "outer": {"sync": hvdtrain.DiLoCo(2), "precision": "fp16"},
}


class StoppedError(Exception):
    pass


class StopAt(Callback):
    def on_step_end(self, trainer, step):
        if trainer.global_step == 5:
            raise StoppedError


@pytest.mark.parametrize(
    ("scheme", "how"),
    [
        ("int8", "every step"),
        ("powersgd:2:2", "every step"),
        everywhere("powersgd:2:2", "accumulate"),
        everywhere("topk:0.1", "delayed"),
        ("int8", "delayed"),
        ("topk:0.1", "fp16"),
        ("int8", "fp16"),
        ("powersgd:2:2", "delayed bf16"),
        ("int8", "alone"),
        ("powersgd:2:1", "outer"),
        ("topk:0.1", "outer"),
    ],
)
def test_a_compressed_run_resumes_bit_for_bit(shared_tmp_path, scheme, how):
    def train(*hooks):
        keras.config.set_dtype_policy("float32")
        net = model()
        return net, fit(net, data(38), compression=scheme, callbacks=hooks, **HOWS[how])

    net, trainer = train(SyncCheck(every=1))
    held = memory(trainer)
    assert max(np.abs(each).max() for name, each in held.items() if name.startswith("mean.error")) > 0
    with pytest.raises(StoppedError):
        train(Checkpoint(shared_tmp_path, every_steps=1), StopAt())
    resumed, again = train(Checkpoint(shared_tmp_path))
    assert_same(resumed, net)
    found = memory(again)
    assert found.keys() == held.keys()
    for name, each in found.items():
        np.testing.assert_array_equal(each, held[name], err_msg=name)


class Memories(Callback):
    """Notes the memory after each step, and whether the step was taken."""

    def __init__(self):
        self.taken, self.held = [], []

    def on_step_end(self, trainer, step):
        self.taken.append(trainer.step_taken)
        self.held.append(memory(trainer))


def with_spike(value=3e38):
    x, y = data(38)
    x[5, 6] = value
    return x, y


SKIPS, SCALES = {"nan_policy": "skip"}, {"precision": "fp16"}


@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        ("int8", SKIPS),
        everywhere("topk:0.1", SKIPS),
        ("powersgd:2:2", SKIPS),
        ("int8", SCALES),
        everywhere("topk:0.1", SCALES),
        ("powersgd:2:2", SCALES),
    ],
    ids=str,
)
def test_a_step_that_ranks_refuse_leaves_the_memory_as_it_was(scheme, options):
    net, notes = model(), Memories()
    fit(net, with_spike(), compression=scheme, callbacks=[notes], epochs=3, **options)
    refused = [step for step, was_taken in enumerate(notes.taken) if not was_taken]
    assert len(refused) == 3, notes.taken
    for step in refused:
        before, after = notes.held[step - 1] if step else {}, notes.held[step]
        assert before.keys() == after.keys()
        assert all(np.array_equal(before[name], after[name]) for name in before)
    changed = [step for step in range(3, len(notes.taken)) if step not in refused]
    for step in changed:
        before, after = notes.held[step - 1], notes.held[step]
        assert any(name not in before or not np.array_equal(before[name], after[name]) for name in after)
    assert all(np.isfinite(each).all() for held in notes.held for each in held.values())
    assert all(np.isfinite(each).all() for each in net.get_weights())


@pytest.mark.parametrize("scheme", [everywhere("int8"), *SCHEMES[1:]])
def test_a_gradient_that_is_not_finite_is_an_error_on_every_rank(scheme):
    with pytest.raises(NonFiniteError, match=r"the gradient of .*small.* is not finite"):
        fit(model(), with_spike(), compression=scheme, nan_policy="raise")


class Begins(Callback):
    def __init__(self):
        self.held = []

    def on_epoch_begin(self, trainer, epoch):
        self.held.append(memory(trainer))


def test_a_later_fit_begins_without_errors():
    begins = Begins()
    trainer = hvdtrain.Trainer(model(), optimizer="sgd", loss="mse", compression="topk:0.1")
    for _ in range(2):
        trainer.fit(data(), epochs=1, batch_size=BATCH, callbacks=[begins], progress=False, run_dir=None)
        assert memory(trainer)
    assert begins.held == [{}, {}]


def test_ranks_that_have_changed_begin_without_errors():
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), compression="topk:0.1")
    optimizer.apply([keras.ops.ones((4, 6))], [keras.Variable(np.zeros((4, 6), "float32"))])
    part = hvd.distributed_part(optimizer)
    assert part._hvd_memory.state()
    part.agree_on_model()  # as hvd.elastic does
    assert part._hvd_memory.state() == {}


def noted_exchanges(monkeypatch, net, given, found):
    """Note what is given to each exchange of changes, and what it returns."""
    shapes = {f"sync/{name}": w.shape for name, w in zip((KERNEL, BIAS), net.get_weights(), strict=True)}
    mean = WeightAccess.mean

    def by_name(arrays):
        (array,) = arrays
        parts = np.split(array.copy(), np.cumsum([math.prod(shape) for shape in shapes.values()])[:-1])
        return {name: each.reshape(shape) for each, (name, shape) in zip(parts, shapes.items(), strict=True)}

    def noted(access, arrays, *, name, compression):
        if name == "sync.moments":
            return mean(access, arrays, name=name, compression=compression)
        given.append(by_name(arrays))
        means = mean(access, arrays, name=name, compression=compression)()
        found.append(by_name(means))
        return lambda: means

    monkeypatch.setattr(WeightAccess, "mean", noted)


@pytest.mark.world_size(2, 3)
@pytest.mark.three_ranks
@pytest.mark.parametrize("sync", [hvdtrain.LocalSGD(2), hvdtrain.DiLoCo(2, lr=0.7, momentum=0.9)])
@pytest.mark.parametrize("scheme", [everywhere("int8"), *SCHEMES[1:]])
def test_ranks_that_step_alone_send_changes_as_in_a_simulation(scheme, sync, monkeypatch, collectives):
    x, y = numbers(1, 47, INPUTS), numbers(2, 47, OUTPUTS)
    net = keras.Sequential([keras.Input((INPUTS,)), keras.layers.Dense(OUTPUTS)])
    given, found = [], []
    noted_exchanges(monkeypatch, net, given, found)
    weights = dict(zip((f"sync/{KERNEL}", f"sync/{BIAS}"), net.get_weights(), strict=True))
    sgd = keras.optimizers.SGD(LR)
    trainer = hvdtrain.Trainer(net, optimizer=sgd, loss=product, compression=scheme, sync=sync)
    weights = dict(zip(weights, net.get_weights(), strict=True))  # the root's
    trainer.fit((x, y), epochs=3, batch_size=BATCH, progress=False, run_dir=None, callbacks=[SyncCheck(every=1)])
    shard = -(-3 // hvd.size())  # of 2 blocks and 1
    of_each = {"int8": 260 * (hvd.size() * shard + shard), "topk:0.1": 8 * (32 + 1), "powersgd:2:2": 4 * (2 * 48 + 8)}
    whole = 4 * (INPUTS * OUTPUTS + OUTPUTS) - of_each[scheme] if scheme == "powersgd:2:2" else 0
    sent = sum(nbytes for _, name, nbytes in collectives if name.startswith("sync.0"))
    assert sent == len(found) * of_each[scheme] + 2 * whole  # PowerSGD sends two exchanges as they are
    everyones = hvd.allgather_object(given)
    assert len(found) >= 6
    errors, velocity = [{} for _ in everyones], dict.fromkeys(weights, 0.0)
    lr, momentum = (0.7, 0.9) if isinstance(sync, hvdtrain.DiLoCo) else (1.0, 0.0)
    means_of = formula(scheme)
    for mine, of_ranks in zip(found, zip(*everyones, strict=True), strict=True):
        for name, mean in means_of(of_ranks, errors).items():
            np.testing.assert_allclose(mine[name], mean, atol=1e-6)
            velocity[name] = momentum * velocity[name] + mean
            weights[name] = weights[name] + lr * (mean + momentum * velocity[name])
    for ours, right in zip(net.get_weights(), weights.values(), strict=True):
        np.testing.assert_allclose(ours, right, atol=1e-6)
    held = memory(trainer)
    for name, error in errors[trainer.world.rank].items():
        np.testing.assert_allclose(held[f"mean.error.{name}"], error, atol=1e-6)
    assert max(np.abs(each).max() for name, each in held.items() if "error" in name) > 0


@pytest.mark.parametrize("sync", [hvdtrain.LocalSGD(2, after_steps=1), hvdtrain.DiLoCo(2)])
@pytest.mark.parametrize("scheme", ["topk:1.0", "powersgd:16:0"])
def test_without_loss_ranks_that_step_alone_train_the_weights_without_compression(scheme, sync):
    nets = [model(), model()]
    for net, compression in zip(nets, ("none", scheme), strict=True):
        sgd = keras.optimizers.SGD(LR)
        trainer = hvdtrain.Trainer(net, optimizer=sgd, loss="mse", compression=compression, sync=sync)
        trainer.fit(data(), epochs=2, batch_size=BATCH, progress=False, run_dir=None)
    for a, b in zip(*(net.get_weights() for net in nets), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_that_are_not_finite_leave_no_nan_in_the_memory(scheme):
    class Poison(Callback):
        def on_step_end(self, trainer, step):
            if trainer.global_step == 5 and trainer.world.rank == 1:
                weights = net.get_weights()
                weights[0][...] = np.nan
                net.set_weights(weights)

    net = model()
    trainer = fit(net, data(38), compression=scheme, callbacks=[Poison()], sync=hvdtrain.LocalSGD(2))
    assert not all(np.isfinite(each).all() for each in net.get_weights())  # as without compression, on each rank
    held = memory(trainer)
    assert any(name.startswith("mean.error.sync/") for name in held)
    assert all(np.isfinite(each).all() for each in held.values())
    assert trainer._adapter.memory().parts.buckets >= sum(each.nbytes for name, each in held.items() if "error" in name)


@pytest.fixture
def collectives(monkeypatch):
    """Each collective of compressors on this rank: its kind, name and bytes."""
    found = []

    def counted(kind, function):
        def begin(array, *args, name, **options):
            found.append((kind, name, array.nbytes))
            return function(array, *args, name=name, **options)

        return begin

    if BACKEND == "torch":
        import horovod.torch as native

        for kind in ("alltoall_async", "allgather_async", "allreduce_async_"):
            monkeypatch.setattr(native, kind, counted(kind.partition("_")[0], getattr(native, kind)))
    else:
        from hvdtrain.keras import ops

        begin = ops.begin
        monkeypatch.setattr(
            ops, "begin", lambda kind, array, **how: counted(kind, lambda a, **h: begin(kind, a, **h))(array, **how)
        )
    return found


def made(scheme):
    """Return what the drop-in takes for a name of the Trainer's."""
    name, *numbers = scheme.split(":")
    kind = getattr(hvd.Compression, name)
    return kind(*(float(n) if name == "topk" else int(n) for n in numbers)) if numbers else kind


@pytest.mark.every_backend
@pytest.mark.world_size(2, 3)
@pytest.mark.three_ranks
def test_a_step_sends_the_bytes_of_the_formula_in_one_order(collectives):
    size = hvd.size()
    numbers = [INPUTS * 25, 25, 3 * 3 * 4 * 6]  # of a matrix, a vector, a convolution's kernel
    blocks = sum(-(-n // 256) for n in numbers)
    shard = -(-blocks // size)
    narrow = 2 * (INPUTS + 25) + 2 * (9 + 24)
    expected = {
        "int8": {"alltoall": 260 * size * shard, "allgather": 260 * shard},
        "topk:0.1": {"allgather": 8 * sum(math.ceil(0.1 * n) for n in numbers)},
        "powersgd:2:0": {"allreduce": 4 * (narrow + 25)},
    }
    for scheme, sent in expected.items():
        shapes = [(INPUTS, 25), (25,), (3, 3, 4, 6)]
        variables = [keras.Variable(np.zeros(shape, "float32")) for shape in shapes]
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=made(scheme))
        optimizer.apply([keras.ops.ones(shape) for shape in shapes], variables)
        collectives.clear()
        optimizer.apply([keras.ops.ones(shape) * hvd.rank() for shape in shapes], variables)
        found = Counter()
        for kind, _, nbytes in collectives:
            found[kind] += nbytes
        assert found == sent
        assert hvd.allgather_object(list(collectives)) == [collectives] * size


@pytest.mark.parametrize("scheme", [*SCHEMES[:2], everywhere(SCHEMES[2])])
def test_a_constant_gradient_arrives_as_a_whole(scheme):
    generator = np.random.default_rng(hvd.rank())
    mine = generator.normal(size=(20, 30)).astype("float32")
    mean = np.asarray(keras.ops.convert_to_numpy(hvd.allreduce(mine)))
    variable = keras.Variable(np.zeros((20, 30), "float32"))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=made(scheme))
    lost = []
    for step in range(1, 61):
        optimizer.apply([keras.ops.convert_to_tensor(mine)], [variable])
        moved = -np.asarray(keras.ops.convert_to_numpy(variable)) / step
        lost.append(np.linalg.norm(moved - mean) / np.linalg.norm(mean))
    assert max(lost) > 1e-3  # it was compressed
    assert lost[-1] < 0.3 * max(lost)
    everyone = hvd.allgather_object(moved.tobytes())
    assert everyone == [everyone[0]] * hvd.size()


@pytest.mark.every_backend
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_sums_predivided_and_accumulated_gradients_have_their_factors(op):
    """With all numbers sent, the result is that without compression."""
    options = {"op": op, "backward_passes_per_step": 2, **({"gradient_predivide_factor": 4.0} if op == 0 else {})}
    generator = np.random.default_rng(hvd.rank())
    given = [generator.normal(size=(4, 6)).astype("float32") for _ in range(4)]
    results = []
    for compression in ("none", "topk:1.0"):
        variable = keras.Variable(np.zeros((4, 6), "float32"))
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=compression, **options)
        for gradient in given:
            optimizer.apply([keras.ops.convert_to_tensor(gradient)], [variable])
        results.append(np.asarray(keras.ops.convert_to_numpy(variable)))
    np.testing.assert_allclose(results[1], results[0], atol=1e-5)


@pytest.mark.every_backend
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_gradients_keep_their_type(dtype):
    if BACKEND == "jax" and dtype == "float64":
        pytest.skip("JAX has no float64 by default")
    variable = keras.Variable(np.zeros((8, 40)), dtype=dtype)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), compression="topk:0.5")
    gradient = keras.ops.cast(np.arange(320).reshape(8, 40) / 64, dtype)
    for _ in range(6):
        optimizer.apply([gradient], [variable])
    moved = -np.asarray(keras.ops.convert_to_numpy(keras.ops.cast(variable, "float32")))
    np.testing.assert_allclose(moved, np.arange(320).reshape(8, 40) / 64 * 6, atol=6)


@pytest.mark.skipif(BACKEND == "jax", reason="JAX has one optimizer")
def test_each_optimizer_remembers_the_gradients_of_its_weights():
    class Two(keras.Model):
        def compile(self, **options):
            super().compile(**options)
            self.other = keras.optimizers.SGD(0.1)
            self.other.build(self.trainable_variables)

    inputs = keras.Input((7,))
    net = Two(inputs, keras.layers.Dense(3)(inputs))
    net.compile(optimizer="sgd", loss="mse")
    trainer = hvdtrain.Trainer(net, compression="topk:0.1")
    trainer.fit(data(), epochs=1, batch_size=BATCH, progress=False, run_dir=None)
    own, other = (hvd.distributed_part(each)._hvd_memory for each in (net.optimizer, net.other))
    assert set(own.state()) == {f"mean.error.0000{n}.dense/{name}" for n, name in enumerate(("kernel", "bias"))}
    other.load({f"mean.error.other.{name.removeprefix('mean.error.')}": a for name, a in own.state().items()})
    assert len(memory(trainer)) == 4
