"""Compression with error feedback on the host, whose formulas are those of `hvdtrain.torch`."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
keras = pytest.importorskip("keras")

import hvdtrain  # noqa: E402
import hvdtrain.keras as hvd  # noqa: E402
from hvdtrain.distributed import compression as distributed_schemes  # noqa: E402
from hvdtrain.distributed import rank_state  # noqa: E402
from hvdtrain.distributed.compression import parse  # noqa: E402
from hvdtrain.keras import ops  # noqa: E402
from hvdtrain.keras.error_feedback import ErrorFeedback, host, matrix_shape, schemes  # noqa: E402
from hvdtrain.keras.reduction import GradientReduction  # noqa: E402
from hvdtrain.keras.reduction import resolve as resolve_keras  # noqa: E402
from hvdtrain.torch.ops import engine  # noqa: E402
from hvdtrain.torch.ops.compression import Compression, resolve  # noqa: E402
from hvdtrain.torch.ops.submit import Reduction  # noqa: E402

SCHEMES = ["int8", "topk:0.1", "topk:1.0", "powersgd:2:0", "powersgd:2:2"]
SHAPES = {"weight": (12, 30), "bias": (12,), "kernel": (40, 25), "narrow": (3, 2), "scalar": (), "empty": (0, 5)}


class Board:
    """Collectives of ranks that one thread steps in turn: a result is there when all ranks have begun."""

    def __init__(self, size):
        self.size, self.rank, self._slots = size, 0, {}

    def begin(self, kind, array, *, name, op=None, process_set=None):
        rank, slot = self.rank, self._slots.setdefault(name, {})
        if len(slot) == self.size:
            slot = self._slots[name] = {}
        slot[rank] = np.array(array)

        def wait():
            everyones = [slot[each] for each in range(self.size)]
            if kind == "allreduce":
                assert op in (None, engine.Average)
                return np.asarray(sum(everyones) * everyones[0].dtype.type(1 / self.size))
            if kind == "allgather":
                return np.concatenate(everyones)
            return np.concatenate([each.reshape(self.size, -1)[rank] for each in everyones])

        return wait


class FakeNative:
    """The part of horovod.torch that compressors use, over a board."""

    def __init__(self, board):
        self.board = board

    def _begin(self, kind, tensor, name):
        wait = self.board.begin(kind, tensor.numpy(), name=name)
        return lambda: torch.from_numpy(np.array(wait()))

    def allreduce_async_(self, tensor, *, name, op, prescale_factor, postscale_factor, process_set):
        wait = self._begin("allreduce", tensor, name)
        return lambda: tensor.copy_(wait())

    def allgather_async(self, tensor, *, name, process_set):
        return self._begin("allgather", tensor, name)

    def alltoall_async(self, tensor, *, name, process_set):
        wait = self._begin("alltoall", tensor, name)
        return lambda: (wait(), None)


class FakeSet:
    """All ranks, as the board's present rank sees them."""

    process_set_id = 1

    def __init__(self, board):
        self._board = board

    def size(self):
        return self._board.size

    def rank(self):
        return self._board.rank


class OnTorch:
    """The compressors of hvdtrain.torch, one for each rank."""

    def __init__(self, monkeypatch, scheme, size):
        self.board, self.names = Board(size), list(SHAPES)
        self.memories = [resolve(scheme).bind(self.names) for _ in range(size)]
        monkeypatch.setattr(engine, "native", lambda: FakeNative(self.board))

    def exchange(self, gradients, **how):
        handles = []
        for self.board.rank, mine in enumerate(gradients):
            reduction = Reduction(engine.Average, process_set=FakeSet(self.board), **how)
            tensors = [torch.from_numpy(mine[name].copy()) for name in self.names]
            handles.append(self.memories[self.board.rank].exchange(tensors, reduction, "test", self.names))
        going = True
        while going:
            for self.board.rank, handle in enumerate(handles):
                going = handle.advance()
        return [dict(zip(self.names, (t.numpy() for t in handle.wait()), strict=True)) for handle in handles]

    def commit(self):
        for each in self.memories:
            each.commit()

    def rollback(self):
        for each in self.memories:
            each.rollback()

    def states(self):
        return [each.state() for each in self.memories]


class OnHost:
    """The compressors in NumPy, one for each rank."""

    def __init__(self, scheme, size):
        self.board, self.names = Board(size), list(SHAPES)
        self.memories = [schemes.compressor_of(parse(scheme)) for _ in range(size)]
        for each in self.memories:
            each.memory.know(self.names)

    def exchange(self, gradients, *, prescale_factor=1.0, postscale_factor=1.0):
        running = []
        for self.board.rank, mine in enumerate(gradients):
            ranks = schemes.Ranks(self.board.rank, self.board.size, self.board.begin)
            given, factors = [mine[name] for name in self.names], {"before": prescale_factor, "after": postscale_factor}
            stages = self.memories[self.board.rank].exchange(given, self.names, ranks, "test", **factors)
            with np.errstate(all="ignore"):
                running.append((stages, next(stages)))
        results = {}
        while not results:
            received = [wait() for _, wait in running]
            for self.board.rank, (stages, _) in enumerate(running):
                try:
                    with np.errstate(all="ignore"):
                        running[self.board.rank] = stages, stages.send(received[self.board.rank])
                except StopIteration as end:
                    results[self.board.rank] = dict(zip(self.names, end.value, strict=True))
        return [results[rank] for rank in range(self.board.size)]

    def commit(self):
        for each in self.memories:
            each.memory.commit()

    def rollback(self):
        for each in self.memories:
            each.memory.rollback()

    def states(self):
        return [each.memory.state() for each in self.memories]


def gradients(size, seed, dtype=np.float32):
    generator = np.random.default_rng(seed)
    return [{name: np.asarray(generator.normal(size=s), dtype) for name, s in SHAPES.items()} for _ in range(size)]


def assert_same(ours, theirs, atol):
    for mine, right in zip(ours, theirs, strict=True):
        assert mine.keys() == right.keys()
        for name in mine:
            assert mine[name].dtype == right[name].dtype
            np.testing.assert_allclose(mine[name], right[name], atol=atol, rtol=0, err_msg=name)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_means_and_memory_are_those_of_torch(monkeypatch, scheme, size, dtype):
    ours, theirs = OnHost(scheme, size), OnTorch(monkeypatch, scheme, size)
    for step in range(20):
        given = gradients(size, step, dtype)
        kept = [{name: array.copy() for name, array in each.items()} for each in given]
        means = ours.exchange(given)
        assert_same(given, kept, 0.0)
        assert_same(means, [means[0]] * size, 0.0)  # all ranks get the same bits
        assert_same(means, theirs.exchange(given), 1e-3 if dtype is np.float32 else 1e-11)
        if step == 7:  # a step that is not taken
            ours.rollback()
            theirs.rollback()
        ours.commit()
        theirs.commit()
        assert_same(ours.states(), theirs.states(), 1e-3 if dtype is np.float32 else 1e-11)


@pytest.mark.parametrize("size", [2, 3])
def test_slices_of_int8_are_those_of_torch(monkeypatch, size):
    monkeypatch.setattr(distributed_schemes, "_SLICE_BYTES", 4 * 260)
    monkeypatch.setattr(distributed_schemes, "_LEAST_BYTES", 260)
    ours, theirs = OnHost("int8", size), OnTorch(monkeypatch, "int8", size)
    for step in range(6):
        given = gradients(size, step)
        assert_same(ours.exchange(given), theirs.exchange(given), 1e-3)
        ours.commit()
        theirs.commit()
        assert_same(ours.states(), theirs.states(), 1e-3)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_factors_of_the_sum_are_those_of_torch(monkeypatch, scheme):
    ours, theirs = OnHost(scheme, 2), OnTorch(monkeypatch, scheme, 2)
    factors = {"prescale_factor": 0.5, "postscale_factor": 3.0}
    for step in range(4):
        given = gradients(2, step)
        assert_same(ours.exchange(given, **factors), theirs.exchange(given, **factors), 1e-5)
        ours.commit()
        theirs.commit()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_number_that_is_not_finite_is_seen_and_not_remembered(monkeypatch, scheme, bad):
    ours, theirs = OnHost(scheme, 2), OnTorch(monkeypatch, scheme, 2)
    for step in range(4):
        given = gradients(2, step)
        if step in (0, 3):
            given[1]["weight"][3, 4] = given[0]["bias"][2] = bad
        means, right = ours.exchange(given), theirs.exchange(given)
        is_finite = {name: bool(np.isfinite(each).all()) for name, each in means[0].items()}
        assert is_finite == {name: step not in (0, 3) or name not in ("weight", "bias") for name in SHAPES}
        assert_same(means, right, 1e-5)
        ours.commit()
        theirs.commit()
        assert all(np.isfinite(array).all() for state in ours.states() for array in state.values())
        assert_same(ours.states(), theirs.states(), 1e-5)


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_errors_keep_their_part_in_the_mean_when_the_number_of_ranks_changes(scheme, before, after):
    earlier, later = OnHost(scheme, before), OnHost(scheme, after)
    for step in range(3):
        earlier.exchange(gradients(before, step))
        earlier.commit()
    states = earlier.states()
    for rank, each in enumerate(later.memories):
        each.memory.load(rank_state.combine(states, rank=rank, size=after))
    found = later.states()
    assert found[0].keys() == states[0].keys()
    for name in found[0]:
        old, new = (np.mean([state[name] for state in some], axis=0) for some in (states, found))
        np.testing.assert_allclose(new, old, atol=1e-6)
    later.exchange(gradients(after, 9))


def test_gradients_travel_in_buckets_in_the_same_order_on_all_ranks(monkeypatch):
    """More than 25 MiB are several exchanges; the result is the same."""
    monkeypatch.setattr(host, "_BUCKET_BYTES", 1500)
    begun = []

    def begin(kind, array, *, name, process_set=None):
        begun.append(f"{name} {array.nbytes}")
        return lambda: array

    monkeypatch.setattr(ops, "begin", begin)
    monkeypatch.setattr(GradientReduction, "size", lambda self: 1)
    monkeypatch.setattr(GradientReduction, "rank", lambda self: 0)
    arrays = [np.arange(n, dtype=t) for n, t in ((300, "f4"), (100, "f8"), (50, "f4"), (2000, "f4"), (9, "f4"))]
    compressor = host.compressor_of(parse("topk:1.0"))
    means = host.start(compressor, arrays, [*"abcde"], "x", GradientReduction())()
    for mean, array in zip(means, arrays, strict=True):
        np.testing.assert_array_equal(mean, array)
    assert begun == ["x.0.topk 2400", "x.1.topk 400", "x.2.topk 1200", "x.3.topk 16000", "x.4.topk 72"]


def test_an_error_in_an_exchange_reaches_the_step(monkeypatch):
    monkeypatch.setattr(ops, "begin", lambda *args, **options: 1 / 0)
    monkeypatch.setattr(GradientReduction, "size", lambda self: 1)
    monkeypatch.setattr(GradientReduction, "rank", lambda self: 0)
    wait = host.start(host.compressor_of(parse("int8")), [np.ones(3, "f4")], ["w"], "x", GradientReduction())
    with pytest.raises(ZeroDivisionError):
        wait()


@pytest.mark.parametrize(
    ("shape", "matrix"),
    [
        ((), ()),
        ((5,), (5,)),
        ((4, 6), (4, 6)),
        ((3, 3, 64, 128), (576, 128)),  # a convolution: height, width, inputs, outputs
        ((512, 8, 64), (512, 512)),  # attention's queries: width, heads, width of a head
        ((8, 64, 512), (512, 512)),
        ((0, 3, 2), (0, 2)),
    ],
)
def test_kernels_are_matrices_with_their_inputs_first(shape, matrix):
    assert matrix_shape(shape) == matrix


def test_memory_is_kept_when_the_next_step_begins_unless_it_was_refused(monkeypatch):
    memory = ErrorFeedback(parse("topk:0.5")).of(["w"])
    put = memory._compressor.memory.put

    def start(value):
        memory._compressor.memory.commit()
        put("mean.error", "w", torch.full((2,), value) if keras.backend.backend() == "torch" else np.full(2, value))

    start(1.0)
    assert memory.state()["mean.error.w"].tolist() == [1.0, 1.0]
    start(2.0)
    memory.refuse()
    assert memory.state()["mean.error.w"].tolist() == [1.0, 1.0]
    start(3.0)
    start(4.0)
    memory.refuse()
    assert memory.state()["mean.error.w"].tolist() == [3.0, 3.0]
    other = ErrorFeedback(parse("topk:0.5"))
    other.load(memory.state())
    assert other.state() == {}, "it knows no weight of this name"
    other.know(["w"])
    other.load(memory.state())
    assert other.state()["mean.error.w"].tolist() == [3.0, 3.0]
    other.reset()
    assert other.state() == {}


def test_names_and_objects_mean_the_same():
    for given, name in {
        "int8": "int8", "topk:0.1": "topk:0.1", "powersgd:3": "powersgd:3", "none": "none", "bf16": "bf16",
        hvdtrain.Int8(): "int8", hvdtrain.TopK(0.1): "topk:0.1", hvdtrain.PowerSGD(3, 7): "powersgd:3:7",
        hvd.Compression.int8: "int8", hvd.Compression.topk(0.1): "topk:0.1", hvd.Compression.powersgd(3): "powersgd:3",
        Compression.int8: "int8", Compression.topk(0.1): "topk:0.1", Compression.powersgd(3, 7): "powersgd:3:7",
        Compression.fp16: "fp16",
    }.items():  # fmt: skip
        assert resolve_keras(given).name == name


@pytest.mark.parametrize(
    ("compression", "message"),
    [
        ("int9", "compression must be one of none, fp16, .* Received: compression='int9'"),
        ("topk:1.5", r"fraction must be a number > 0 and <= 1. Received: fraction=1.5"),
        ("powersgd:0", "PowerSGD: rank must be an int >= 1. Received: rank=0"),
        (3, r"compression must be Compression.none, .*\.powersgd\(4\).* Received: 3"),
    ],
)
def test_what_is_no_scheme_is_refused_with_the_choices(alone, compression, message):
    with pytest.raises(ValueError, match=message):
        hvd.DistributedOptimizer(keras.optimizers.SGD(), compression=compression)


def test_what_has_no_next_step_or_groups_is_refused_with_the_reason(alone):
    for compression in ("int8", hvd.Compression.topk(0.1)):
        with pytest.raises(ValueError, match=r"remembers what it has left out.*is for DistributedOptimizer"):
            hvd.allreduce(np.ones(3, "f4"), compression=compression)
    with pytest.raises(ValueError, match=r"compression=int8 sends all gradients together. Leave out groups.*groups=2"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(), compression="int8", groups=2)
