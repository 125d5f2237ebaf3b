"""Compressors with a memory, by their formulas. Ranks are threads, and collectives are NumPy's."""

from __future__ import annotations

import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from thread_ranks import FakeProcessSet, Meeting

from hvdtrain.distributed import compression, rank_state
from hvdtrain.distributed.compression import Int8
from hvdtrain.torch.ops import engine
from hvdtrain.torch.ops.compression import resolve, topk
from hvdtrain.torch.ops.submit import Reduction

SCHEMES = ["int8", "topk:0.1", "powersgd:2:0"]
SHAPES = {"weight": (12, 30), "bias": (12,), "kernel": (8, 3, 5, 5), "scalar": ()}


class FakeNative:
    """The collectives that compressors start, at once; and the bytes that they give Horovod."""

    def __init__(self):
        self.bytes, self.calls = Counter(), Counter()

    def _everyones(self, kind, tensor, process_set):
        self.bytes[kind] += tensor.nbytes  # of all ranks
        self.calls[kind] += 1
        return [torch.from_numpy(each) for each in process_set.meeting.exchange(process_set._rank, tensor.numpy())]

    def allreduce_async_(self, tensor, *, name, op, prescale_factor, postscale_factor, process_set):
        assert op == engine.Average
        assert prescale_factor == postscale_factor == 1.0
        tensor.copy_(torch.stack(self._everyones("allreduce", tensor, process_set)).mean(0))
        return lambda: tensor

    def allgather_async(self, tensor, *, name, process_set):
        gathered = torch.cat(self._everyones("allgather", tensor, process_set))
        return lambda: gathered

    def alltoall_async(self, tensor, *, name, process_set):
        rows = [each.view(process_set.size(), -1) for each in self._everyones("alltoall", tensor, process_set)]
        received = torch.cat([each[process_set.rank()] for each in rows])
        return lambda: (received, None)


class Ranks:
    """A compressor on each rank, and what they exchange."""

    def __init__(self, monkeypatch, scheme, size=2, shapes=SHAPES, op=engine.Average):
        self.names, self.size, self.op, self.native = list(shapes), size, op, FakeNative()
        monkeypatch.setattr(engine, "native", lambda: self.native)
        self.compressors = [resolve(scheme).bind(self.names) for _ in range(size)]

    def exchange(self, gradients, **how):
        """Return the result on rank 0 for gradients by rank and name; all ranks must get the same bits."""
        meeting = Meeting(range(self.size))

        def run(rank):
            how_ = Reduction(self.op, process_set=FakeProcessSet(meeting, rank), **how)
            given = [gradients[rank][name].clone() for name in self.names]
            return self.compressors[rank].exchange(given, how_, "test", self.names).wait()

        with ThreadPoolExecutor(self.size) as pool:
            results = list(pool.map(run, range(self.size)))
        for other in results[1:]:
            for ours, theirs in zip(results[0], other, strict=True):
                assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))
        return dict(zip(self.names, results[0], strict=True))

    def commit(self):
        for each in self.compressors:
            each.commit()

    def step(self, gradients, **how):
        found = self.exchange(gradients, **how)
        self.commit()
        return found

    def errors(self, name):
        """Return the errors of a parameter, by rank."""
        return [each.state()[f"mean.error.{name}"] for each in self.compressors]


def gradients(size=2, seed=0, shapes=SHAPES, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [
        {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in shapes.items()}
        for _ in range(size)
    ]


def assert_equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name])


def mean_of(given):
    return {name: torch.stack([each[name] for each in given]).mean(0) for name in given[0]}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_sent_and_what_is_remembered_add_up_to_the_gradients(monkeypatch, scheme, size):
    ranks, given, steps = Ranks(monkeypatch, scheme, size), gradients(size), 100
    total = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for step in range(steps):
        for name, each in ranks.step(given).items():
            total[name] += each
        if step == 0:
            worst = {name: (total[name] - each).norm() / each.norm() for name, each in mean_of(given).items()}
    for name, mean in mean_of(given).items():
        state = ranks.compressors[0].state()
        left = (
            torch.from_numpy(np.asarray(np.mean(ranks.errors(name), axis=0))) if f"mean.error.{name}" in state else 0.0
        )
        torch.testing.assert_close(total[name] + left, steps * mean, rtol=1e-4, atol=1e-3)
        lost = (total[name] / steps - mean).norm() / mean.norm()
        assert lost < max(0.1 * worst[name], 1e-5)  # error feedback: what is missing does not grow with the steps


def rounded(blocks):
    scales = np.abs(blocks).max(1, keepdims=True) / 127
    return np.round(blocks / scales) * scales


def test_int8_rounds_blocks_and_the_mean_and_remembers_both(monkeypatch):
    size, numel = 2, 700  # three blocks: two of rank 0, and of rank 1 one and one that is empty
    ranks = Ranks(monkeypatch, "int8", size, {"w": (numel,)})
    given = gradients(size, shapes={"w": (numel,)})
    got = ranks.step(given)["w"]
    blocks = [np.pad(each["w"].numpy(), (0, 768 - numel)).reshape(3, 256) for each in given]
    sent = [rounded(each) for each in blocks]
    mean = (sent[0] + sent[1]) / 2
    np.testing.assert_allclose(got, rounded(mean).reshape(-1)[:numel], atol=1e-6)
    errors = [before - after for before, after in zip(blocks, sent, strict=True)]
    errors[0][:2] += size * (mean - rounded(mean))[:2]
    errors[1][2:] += size * (mean - rounded(mean))[2:]
    for ours, right in zip(ranks.errors("w"), errors, strict=True):
        np.testing.assert_allclose(ours, right.reshape(-1)[:numel], atol=1e-6)


@pytest.mark.parametrize("ranks", [2, 3, 64, 1000])
def test_int8_exchanges_slices_that_are_small_and_together_the_whole(ranks):
    for blocks in (0, 1, 5, 2047, 2049, 78_272, 2_000_000):
        shards = Int8.shards(blocks, ranks)
        assert sum(shards) == max(1, -(-blocks // ranks))
        assert min(shards) >= 1
        assert 260 * max(shards) <= max(2**14, 2**19 // ranks)
        assert len(set(shards[:-1])) <= 1


def test_int8_in_slices_gives_the_same_means_and_loses_nothing(monkeypatch):
    size, numel = 2, 256 * 9 + 3  # ten blocks: slices of four, four and two
    shapes = {"w": (numel,)}
    whole = Ranks(monkeypatch, "int8", size, shapes).step(gradients(size, shapes=shapes))["w"]
    monkeypatch.setattr(compression, "_SLICE_BYTES", 4 * 260)
    monkeypatch.setattr(compression, "_LEAST_BYTES", 260)
    ranks, given = Ranks(monkeypatch, "int8", size, shapes), gradients(size, shapes=shapes)
    assert torch.equal(ranks.step(given)["w"], whole)
    assert ranks.native.calls == {"alltoall": 3 * size, "allgather": 3 * size}
    for step in range(20):
        given = gradients(size, seed=step, shapes=shapes)
        before = sum(torch.from_numpy(each) for each in ranks.errors("w")) / size
        got = ranks.step(given)["w"]
        after = sum(torch.from_numpy(each) for each in ranks.errors("w")) / size
        torch.testing.assert_close(got + after, mean_of(given)["w"] + before, rtol=0, atol=1e-5)


def test_topk_sends_the_largest_and_remembers_the_others(monkeypatch):
    ranks = Ranks(monkeypatch, "topk:0.25", 2, {"w": (2, 4)})
    a = torch.tensor([[1.0, -9.0, 2.0, 3.0], [0.5, 8.0, -1.0, 0.0]])
    b = torch.tensor([[7.0, 5.0, 1.0, 1.25], [1.5, 1.75, 1.0, 2.0]])
    got = ranks.step([{"w": a}, {"w": b}])["w"]
    assert got.tolist() == [[3.5, -2.0, 0.0, 0.0], [0.0, 4.0, 0.0, 0.0]]
    left = [[[1.0, 0.0, 2.0, 3.0], [0.5, 0.0, -1.0, 0.0]], [[0.0, 0.0, 1.0, 1.25], [1.5, 1.75, 1.0, 2.0]]]
    assert [each.tolist() for each in ranks.errors("w")] == left
    nothing = torch.zeros(2, 4)
    second = ranks.step([{"w": nothing}, {"w": nothing}])["w"]
    assert second.tolist() == [[0.0, 0.0, 1.0, 1.5], [0.0, 0.875, 0.0, 1.0]]


def test_powersgd_projects_the_mean_onto_the_last_directions(monkeypatch):
    shapes = {"w": (10, 20)}
    ranks = Ranks(monkeypatch, "powersgd:3:0", 2, shapes)
    ranks.step(gradients(seed=0, shapes=shapes))
    states = [each.state() for each in ranks.compressors]
    q = states[0]["max.powersgd_q.w"]
    assert np.array_equal(q, states[1]["max.powersgd_q.w"])
    np.testing.assert_allclose(q.T @ q, np.eye(3), atol=1e-5)
    given = gradients(seed=1, shapes=shapes)
    whole = [each["w"].numpy() + error for each, error in zip(given, ranks.errors("w"), strict=True)]
    mean = (whole[0] + whole[1]) / 2
    p, _ = np.linalg.qr(mean @ q)
    np.testing.assert_allclose(ranks.step(given)["w"], p @ p.T @ mean, atol=1e-5)
    for ours, matrix in zip(ranks.errors("w"), whole, strict=True):
        np.testing.assert_allclose(ours, matrix - p @ p.T @ matrix, atol=1e-5)


def test_powersgd_of_full_rank_loses_nothing(monkeypatch):
    generator = torch.Generator().manual_seed(0)

    def matrix():  # of rank 2, so that the mean over two ranks has rank 4
        return torch.randn(20, 2, generator=generator) @ torch.randn(2, 30, generator=generator)

    ranks = Ranks(monkeypatch, "powersgd:4:0", 2, {"w": (20, 30), "kernel": (20, 5, 6)})
    for _ in range(3):
        given = [{"w": matrix(), "kernel": matrix().view(20, 5, 6)} for _ in range(2)]
        for name, got in ranks.step(given).items():
            mean = mean_of(given)[name]
            assert (got - mean).norm() < 1e-4 * mean.norm()
    assert ranks.native.calls == {"allreduce": 2 * 2 * 3}  # two a step, of each rank: none was sent as it is


def test_powersgd_finds_directions_again_after_gradients_of_zeros(monkeypatch):
    shapes = {"w": (10, 20)}
    ranks, nothing = Ranks(monkeypatch, "powersgd:1:0", 2, shapes), [{"w": torch.zeros(10, 20)}] * 2
    for _ in range(2):
        assert not ranks.step(nothing)["w"].any()
    one = torch.outer(torch.arange(10.0), torch.arange(20.0))
    torch.testing.assert_close(ranks.step([{"w": one}, {"w": one}])["w"], one)


def test_powersgd_sends_its_first_steps_as_they_are(monkeypatch):
    ranks = Ranks(monkeypatch, "powersgd:2:2")
    for seed in range(2):
        given = gradients(seed=seed)
        for name, got in ranks.step(given).items():
            assert torch.equal(got, mean_of(given)[name])
    given = gradients(seed=2)
    ranks.exchange(given)  # a step that is not taken does not count
    for each in ranks.compressors:
        each.rollback()
    assert ranks.native.calls == {"allreduce": 2 * (1 + 1 + 2)}
    assert not torch.equal(ranks.step(given)["weight"], mean_of(given)["weight"])


def test_what_would_not_get_smaller_is_sent_as_it_is(monkeypatch):
    shapes = {"flat": (3, 400), "bias": (7,), "scalar": (), "empty": (0, 5)}
    ranks, given = Ranks(monkeypatch, "powersgd:4:0", shapes=shapes), gradients(shapes=shapes)
    for name, got in ranks.step(given).items():
        torch.testing.assert_close(got, mean_of(given)[name], rtol=0, atol=0)
    assert ranks.native.calls == {"allreduce": 2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [2, 3])
def test_bytes_are_those_of_the_formula(monkeypatch, size, dtype):
    sizes = {name: math.prod(shape) for name, shape in SHAPES.items()}
    bytes_each = dtype.itemsize
    given = gradients(size, dtype=dtype)

    def sent(scheme):
        ranks = Ranks(monkeypatch, scheme, size)
        ranks.step(given)
        return {kind: number / size for kind, number in ranks.native.bytes.items()}

    blocks, block = sum(-(-numel // 256) for numel in sizes.values()), 256 + bytes_each
    shard = -(-blocks // size)
    assert sent("int8") == {"alltoall": size * shard * block, "allgather": shard * block}
    numbers = sum(math.ceil(0.1 * numel) for numel in sizes.values())
    assert sent("topk:0.1") == {"allgather": numbers * (bytes_each + 4)}
    narrow = 2 * (12 + 30) + 2 * (8 + 75)
    assert sent("powersgd:2:0") == {"allreduce": bytes_each * (narrow + 12 + 1)}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_number_that_is_not_finite_is_seen_and_not_remembered(monkeypatch, scheme, everywhere, bad):
    ranks = Ranks(monkeypatch, scheme)
    ranks.step(gradients(seed=1))
    before = [each.state() for each in ranks.compressors]
    given = gradients(seed=2)
    for name in ("weight", "bias"):
        given[1][name].view(-1)[...] = bad if everywhere else given[1][name].view(-1)
        given[1][name].view(-1)[3] = bad
    got = ranks.step(given)
    assert {name: bool(each.isfinite().all()) for name, each in got.items()} == {
        "weight": False, "bias": False, "kernel": True, "scalar": True
    }  # fmt: skip
    for now, then in zip([each.state() for each in ranks.compressors], before, strict=True):
        assert now.keys() == then.keys()
        assert all(np.isfinite(array).all() for array in now.values())
        for name in now:
            if name.endswith((".weight", ".bias")):
                assert np.array_equal(now[name], then[name])
    again = ranks.step(gradients(seed=3))
    assert all(each.isfinite().all() for each in again.values())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_step_that_is_not_taken_leaves_the_memory_as_it_was(monkeypatch, scheme):
    ranks, others = Ranks(monkeypatch, scheme), Ranks(monkeypatch, scheme)
    others.native = ranks.native
    for seed in (1, 2):
        ranks.step(gradients(seed=seed))
        others.step(gradients(seed=seed))
    ranks.exchange(gradients(seed=3))
    before = [each.state() for each in others.compressors]
    for ours, theirs in zip(ranks.compressors, before, strict=True):
        ours.rollback()
        ours.commit()
        assert {name: array.tobytes() for name, array in ours.state().items()} == {
            name: array.tobytes() for name, array in theirs.items()
        }
    assert_equal(ranks.step(gradients(seed=4)), others.step(gradients(seed=4)))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_parameter_whose_result_is_not_used_keeps_its_error(monkeypatch, scheme):
    ranks = Ranks(monkeypatch, scheme)
    ranks.step(gradients(seed=1))
    before = ranks.compressors[0].state()
    ranks.exchange(gradients(seed=2))
    for each in ranks.compressors:
        each.rollback(["weight"])
    ranks.commit()
    after = ranks.compressors[0].state()
    assert np.array_equal(after["mean.error.weight"], before["mean.error.weight"])
    assert not np.array_equal(after["mean.error.kernel"], before["mean.error.kernel"])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_state_restores_the_memory(monkeypatch, scheme):
    ranks, resumed = Ranks(monkeypatch, scheme), Ranks(monkeypatch, scheme)
    for seed in range(3):
        ranks.step(gradients(seed=seed))
    for ours, theirs in zip(resumed.compressors, ranks.compressors, strict=True):
        ours.load({"mean.error.others": np.zeros(3), **theirs.state()})
    assert_equal(resumed.step(gradients(seed=5)), ranks.step(gradients(seed=5)))
    for each in resumed.compressors:
        each.reset()
        assert each.state() == {}


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_errors_keep_their_part_in_the_mean_when_the_number_of_ranks_changes(monkeypatch, scheme, before, after):
    earlier = Ranks(monkeypatch, scheme, before)
    for seed in range(2):
        earlier.step(gradients(before, seed=seed))
    states = [each.state() for each in earlier.compressors]
    later = Ranks(monkeypatch, scheme, after)
    for rank, each in enumerate(later.compressors):
        each.load(rank_state.combine(states, rank=rank, size=after))
    for name in ("weight", "kernel"):
        torch.testing.assert_close(np.mean(later.errors(name), axis=0), np.mean(earlier.errors(name), axis=0))
    later.step(gradients(after, seed=3))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_sum_is_the_mean_times_the_ranks(monkeypatch, scheme):
    mean, total = Ranks(monkeypatch, scheme), Ranks(monkeypatch, scheme, op=engine.Sum)
    total.native = mean.native
    for seed in range(3):
        halves = [{name: g / 2 for name, g in each.items()} for each in gradients(seed=seed)]
        assert_equal(mean.step(gradients(seed=seed)), total.step(halves))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_factors_before_and_after_the_sum_cancel(monkeypatch, scheme):
    plain, predivided = Ranks(monkeypatch, scheme), Ranks(monkeypatch, scheme)
    for seed in range(2):
        a = plain.step(gradients(seed=seed))
        b = predivided.step(gradients(seed=seed), prescale_factor=0.5, postscale_factor=2.0)
        for name in a:
            torch.testing.assert_close(a[name], b[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_errors_do_not_depend_on_the_scale_of_the_loss(monkeypatch, scheme):
    plain, scaled = Ranks(monkeypatch, scheme), Ranks(monkeypatch, scheme)
    for seed, scale in enumerate((1024.0, 1024.0, 512.0)):
        a = plain.step(gradients(seed=seed))
        for each in scaled.compressors:
            each.loss_scale = scale
        b = scaled.step([{name: g * scale for name, g in each.items()} for each in gradients(seed=seed)])
        for name in a:
            torch.testing.assert_close(b[name] / scale, a[name], rtol=1e-5, atol=1e-5)
    for name in ("weight", "kernel"):
        for a, b in zip(plain.errors(name), scaled.errors(name), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.complex128])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_gradients_keep_their_type(monkeypatch, scheme, dtype):
    shapes = {"w": (16, 40), "b": (16,)}
    ranks, total = Ranks(monkeypatch, scheme, shapes=shapes), {name: torch.zeros(s) for name, s in shapes.items()}
    given = [{name: g.to(dtype) for name, g in each.items()} for each in gradients(shapes=shapes)]
    for _ in range(20):
        got = ranks.step(given)
        assert {each.dtype for each in got.values()} == {dtype}
        total = {name: total[name] + got[name] for name in total}
    for name, mean in mean_of(given).items():
        assert float((total[name] / 20 - mean).abs().mean() / mean.abs().mean()) < 0.35


@pytest.mark.parametrize("fraction", [1e-4, 0.01, 0.5, 1.0])
@pytest.mark.parametrize("kind", ["normal", "rare", "equal", "in order", "NaN", "infinite"])
def test_topk_takes_the_largest_numbers_of_a_large_gradient(kind, fraction):
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randn(100_000, generator=generator).abs()
    if kind == "rare":  # a sample of every so many numbers sees none of them
        sizes = torch.zeros(100_000)
        sizes[1001:1101] = torch.arange(1.0, 101.0)
    elif kind == "equal":
        sizes = torch.ones(100_000)
    elif kind == "in order":
        sizes = torch.arange(100_000.0)
    elif kind in ("NaN", "infinite"):
        sizes[[0, 77_777]] = float(kind[:3])
    k = math.ceil(fraction * len(sizes))
    places = topk._largest(sizes, k)
    assert len(places.unique()) == k
    assert torch.equal(
        sizes[places].sort().values.nan_to_num(-1.0), sizes.topk(k).values.sort().values.nan_to_num(-1.0)
    )
