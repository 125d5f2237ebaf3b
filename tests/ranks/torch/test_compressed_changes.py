"""Compression with error feedback for ranks that step alone: of the changes of weights between two exchanges."""

from __future__ import annotations

import math
import socket

import numpy as np
import pytest
import torch
import trainer_kit as kit
from test_error_feedback import SCHEMES, Wide, flat

import hvdtrain
from hvdtrain.callbacks import Callback, Checkpoint
from hvdtrain.distributed import gradient_memory, rank_state
from hvdtrain.torch.reduction.weight_access import WeightAccess
from hvdtrain.training import elastic

SYNCS = {"LocalSGD": hvdtrain.LocalSGD(2), "DiLoCo": hvdtrain.DiLoCo(3, lr=0.7, momentum=0.9)}
STREAMING = hvdtrain.DiLoCo(4, lr=0.7, momentum=0.9, fragments=2, overlap=1)
CHANGED = "mean.error.sync/"


def fit(net, optimizer="sgd", train=None, **options):
    return kit.fit(net, optimizer, train, **options)


def memory(trainer):
    held = trainer._adapter.rank_state
    return {name: held[name] for name in held if ".sync/" in name}


def trained(net):
    return {name: p.detach().numpy() for name, p in net.named_parameters() if p.requires_grad}


# The formulas once more, in NumPy, of all ranks at once: `wholes` has a dict of arrays for each rank, and becomes what
# the ranks remember.


def int8(wholes, state):
    size, names = len(wholes), list(wholes[0])
    counts = [math.ceil(wholes[0][name].size / 256) for name in names]
    shard = math.ceil(sum(counts) / size)
    whole = np.zeros((size, size * shard, 256), np.float32)
    for mine, blocks in zip(wholes, whole, strict=True):
        begin = 0
        for name, count in zip(names, counts, strict=True):
            blocks[begin : begin + count].reshape(-1)[: mine[name].size] = mine[name].reshape(-1)
            begin += count

    def rounded(blocks):
        scales = np.maximum(np.abs(blocks).max(-1, keepdims=True) / np.float32(127), np.finfo(np.float32).tiny)
        return np.clip(np.rint(blocks / scales), -127, 127) * scales

    sent = rounded(whole)
    mean = sent.mean(0)
    shared = rounded(mean)
    left = whole - sent
    for rank in range(size):
        rows = slice(rank * shard, (rank + 1) * shard)
        left[rank, rows] += (mean - shared)[rows] * size
    means, begin = {}, 0
    for name, count in zip(names, counts, strict=True):
        like, rows = wholes[0][name], slice(begin, begin + count)
        means[name] = shared[rows].reshape(-1)[: like.size].reshape(like.shape)
        for mine, blocks in zip(wholes, left, strict=True):
            mine[name] = blocks[rows].reshape(-1)[: like.size].reshape(like.shape)
        begin += count
    return means


def topk(wholes, state):
    means = {}
    for name, like in wholes[0].items():
        sent = []
        for mine in wholes:
            k = math.ceil(0.1 * like.size)
            largest = np.argsort(-np.abs(mine[name]).reshape(-1), kind="stable")[:k]
            sparse = np.zeros(like.size, np.float32)
            sparse[largest] = mine[name].reshape(-1)[largest]
            sent.append(sparse.reshape(like.shape))
            mine[name] = mine[name] - sent[-1]
        means[name] = np.mean(sent, 0)
    return means


def powersgd(wholes, state):
    """Of rank 1, after two exchanges."""
    means = {}
    for name, like in wholes[0].items():
        rows, columns = like.shape if like.ndim == 2 else (1, 1)
        matrices = [mine[name] for mine in wholes]
        if rows + columns >= rows * columns or state["exchanges"] < 2:
            means[name] = np.mean(matrices, 0)
            for mine in wholes:
                mine[name] = np.zeros_like(like)
            continue
        q = state.get(name)
        q = gradient_memory.first_directions(f"sync/{name}", (columns, 1)) if q is None else q
        p = np.mean([each @ q for each in matrices], 0)
        p /= np.linalg.norm(p)
        own = [each.T @ p for each in matrices]
        q = np.mean(own, 0)
        means[name] = p @ q.T
        for mine, right in zip(wholes, own, strict=True):
            mine[name] = mine[name] - p @ right.T
        state[name] = q / np.linalg.norm(q)
    state["exchanges"] += 1
    return means


FORMULAS = dict(zip(SCHEMES, (int8, topk, powersgd), strict=True))


class Exchanges:
    """Notes what is given to each exchange that is compressed, and what it returns."""

    def __init__(self, monkeypatch, net):
        self.given, self.found = [], []
        self._shapes = {name: each.shape for name, each in trained(net).items()}
        mean = WeightAccess.mean

        def noted(access, arrays, *, name, compression):
            if compression not in FORMULAS:
                return mean(access, arrays, name=name, compression=compression)
            self.given.append(self._parts(arrays))
            wait = mean(access, arrays, name=name, compression=compression)

            def waiting():
                means = wait()
                self.found.append(self._parts(means))
                return means

            return waiting

        monkeypatch.setattr(WeightAccess, "mean", noted)

    def _parts(self, arrays):
        (array,) = (each.numpy().copy() for each in arrays)
        parts = np.split(array, np.cumsum([math.prod(shape) for shape in self._shapes.values()])[:-1])
        return {name: part.reshape(shape) for part, (name, shape) in zip(parts, self._shapes.items(), strict=True)}


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_changes_and_errors_are_those_of_numpy(world, scheme, sync, monkeypatch, assert_same_on_all_ranks):
    net = Wide()
    exchanges = Exchanges(monkeypatch, net)
    anchor = {name: each.copy() for name, each in trained(net).items()}
    trainer = fit(net, sync=SYNCS[sync], compression=scheme)
    assert_same_on_all_ranks(*net.parameters())

    everyones = world.allgather_object([{k: v.tolist() for k, v in each.items()} for each in exchanges.given], name="x")
    velocity = {name: np.zeros_like(each) for name, each in anchor.items()}
    errors = [{name: np.zeros_like(each) for name, each in anchor.items()} for _ in range(world.size)]
    lr, momentum = (0.7, 0.9) if sync == "DiLoCo" else (1.0, 0.0)
    state = {"exchanges": 0}
    assert len(exchanges.given) >= 4
    for number, found in enumerate(exchanges.found):
        for rank, mine in enumerate(errors):
            for name in mine:
                mine[name] = np.array(everyones[rank][number][name], np.float32) + mine[name]
        means = FORMULAS[scheme](errors, state)
        for name, mean in means.items():
            np.testing.assert_allclose(found[name], mean, atol=1e-6, err_msg=f"exchange {number}, {name}")
            velocity[name] = momentum * velocity[name] + mean
            anchor[name] = anchor[name] + lr * (mean + momentum * velocity[name])
    for name, weight in trained(net).items():
        np.testing.assert_allclose(weight, anchor[name], atol=1e-6)
    held = memory(trainer)
    assert max(np.abs(each).max() for name, each in held.items() if name.startswith(CHANGED)) > 0
    for name, error in errors[world.rank].items():
        np.testing.assert_allclose(held.get(CHANGED + name, np.zeros_like(error)), error, atol=1e-6, err_msg=name)


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("sync", [*SYNCS.values(), hvdtrain.LocalSGD(2, after_steps=3), STREAMING])
@pytest.mark.parametrize("scheme", ["topk:1.0", "powersgd:16:0"])
def test_without_loss_the_weights_are_those_without_compression(world, scheme, sync):
    """All numbers are sent: of matrices with rank 16, none would get smaller."""
    nets = []
    for each in ("none", scheme):
        nets.append(Wide())
        fit(nets[-1], sync=sync, compression=each)
    np.testing.assert_allclose(flat(nets[1]), flat(nets[0]), atol=1e-5)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("sync", [hvdtrain.LocalSGD(2), STREAMING])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_half_and_double_weights_are_compressed_too(world, scheme, sync, assert_same_on_all_ranks):
    class Cast(Wide):
        def forward(self, x):
            return super().forward(x.to(self.frozen.dtype)).float()

    for dtype in (torch.bfloat16, torch.float64):
        net = Cast().to(dtype)
        trainer = fit(net, sync=sync, compression=scheme)
        assert_same_on_all_ranks(*(p.float() for p in net.parameters()))
        assert all(np.isfinite(each).all() for each in memory(trainer).values())
        assert any(name.startswith(CHANGED) for name in memory(trainer))


@pytest.mark.world_size(2, 3)
def test_an_exchange_sends_the_bytes_of_the_formula(world, native_calls):
    numbers = {"layers.0.weight": 96, "layers.0.bias": 16, "layers.2.weight": 256, "layers.2.bias": 16,
               "head.weight": 48, "head.bias": 3}  # fmt: skip
    blocks = sum(-(-each // 256) for each in numbers.values())
    shard = -(-blocks // world.size)
    kept = sum(math.ceil(0.1 * each) for each in numbers.values())
    expected = {
        "int8": {"alltoall": 260 * world.size * shard, "allgather": 260 * shard},
        "topk:0.1": {"alltoall": 0, "allgather": 8 * kept},
        "powersgd:1:0": {"allreduce": 4 * ((16 + 6) + (16 + 16) + (3 + 16) + 16 + 16 + 3)},
    }

    def sent(scheme, every):
        native_calls.bytes_sent.clear()
        kit.run(kit.make_trainer(Wide(), "sgd", sync=hvdtrain.LocalSGD(every), compression=scheme), kit.data(40),
                epochs=None, steps=4, batch_size=40 // world.size // 4)  # fmt: skip
        return dict(native_calls.bytes_sent)

    for scheme, each in expected.items():
        one, two = sent(scheme, 4), sent(scheme, 2)
        for kind, number in each.items():
            flags = 8 * 2 * len(numbers) if kind == "allreduce" else 0  # of the optimizer state that ranks have
            assert two.get(kind, 0) - one.get(kind, 0) == number + flags, (scheme, kind)


class Memories(Callback):
    """Notes the memory where ranks are equal."""

    def __init__(self):
        self.held = []

    def on_step_end(self, trainer, step):
        if trainer.in_sync:
            self.held.append(memory(trainer))


@pytest.mark.world_size(2)
def test_powersgd_counts_exchanges(world, caplog):
    notes = Memories()
    with caplog.at_level("INFO", logger="hvdtrain"):
        fit(Wide(), sync=hvdtrain.LocalSGD(2), compression="powersgd:1:2", hooks=[notes])
    counts = [int(held["max.powersgd_steps.sync/layers.2.weight"][0]) for held in notes.held]
    assert counts[:2] == [1, 2]
    assert set(counts[2:]) == {2}
    assert "max.powersgd_q.sync/layers.2.weight" not in notes.held[1]
    assert "max.powersgd_q.sync/layers.2.weight" in notes.held[2]
    said = "changes of weights are sent as they are in the first 2 exchanges"
    assert not world.is_root or said in caplog.text


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("scheme", "how"),
    [
        *((scheme, how) for scheme in SCHEMES for how in ("LocalSGD", "streaming")),
        *(("topk:0.1", how) for how in ("DiLoCo", "accumulate", "skip", "fp16")),
        ("powersgd:1:2", "post-local"),
    ],
)
def test_a_compressed_run_resumes_bit_for_bit(world, scheme, how, shared_tmp_path, assert_same_on_all_ranks):
    others = {
        "post-local": {"sync": hvdtrain.LocalSGD(2, after_steps=3)},
        "streaming": {"sync": STREAMING},
        "accumulate": {"sync": hvdtrain.LocalSGD(2), "accumulate": 2, "clip_norm": 0.5},
        "skip": {"sync": hvdtrain.DiLoCo(2), "nan_policy": "skip"},
        "fp16": {"sync": hvdtrain.LocalSGD(2), "precision": "fp16"},
    }
    options = others.get(how) or {"sync": SYNCS[how]}
    every = 5 if how == "streaming" else 1  # where ranks are equal only when asked to, checkpoints are part of it

    def train(folder, *hooks):
        net, saving = Wide(), Checkpoint(shared_tmp_path / folder, every_steps=every)
        return net, fit(net, "momentum", compression=scheme, hooks=[saving, *hooks], **options)

    net, trainer = train("straight")
    assert_same_on_all_ranks(*net.parameters())
    held = memory(trainer)
    assert held
    with pytest.raises(kit.StoppedError):
        train("stopped", kit.StopAt(4 if how == "accumulate" else 8))
    resumed, again = train("stopped")
    assert np.array_equal(flat(resumed), flat(net))
    found = memory(again)
    assert found.keys() == held.keys()
    assert all(np.array_equal(found[name], held[name]) for name in held)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_on_another_number_of_ranks_the_errors_part_of_a_mean_stays(world, scheme):
    trainer = fit(Wide(), sync=hvdtrain.LocalSGD(2), compression=scheme)
    ranks = [{}, {}]
    for name, array in rank_state.gather(memory(trainer), world=world, everywhere=True).items():
        rank, _, rest = name.partition("/")
        ranks[int(rank)][rest] = array
    ranks[1] = {name: array for name, array in ranks[0].items() if name not in ranks[1]} | ranks[1]
    names = [name for name in ranks[0] if name.startswith(CHANGED)]
    assert names
    for size in (1, 3):
        new = [rank_state.combine(ranks, rank=rank, size=size) for rank in range(size)]
        for name in names:
            before, after = (np.mean([each[name] for each in some], 0) for some in (ranks, new))
            np.testing.assert_allclose(after, before, atol=1e-7)


@pytest.mark.world_size(2)
def test_a_commit_of_an_elastic_job_holds_the_errors_of_all_ranks(world):
    trainer = fit(Wide(), sync=hvdtrain.DiLoCo(2), compression="topk:0.1")
    commits = elastic.FitState(trainer._sync, world)
    commits.commit(trainer._loop.snapshot())
    names = [name for group in commits._saved.arrays.values() for name in group]
    assert len({name.partition(CHANGED)[0] for name in names if CHANGED in name}) == world.size
    mine = memory(trainer)
    trainer._adapter.rank_state = {name: np.zeros_like(each) for name, each in mine.items()}
    found = commits.find(lr_factor=1.0)
    for name, each in mine.items():
        np.testing.assert_array_equal(found.arrays[name], each)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("sync", [*SYNCS.values(), STREAMING])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_that_are_not_finite_leave_no_nan_in_the_memory(world, scheme, sync):
    class Poison(Callback):
        def on_step_end(self, trainer, step):
            if trainer.global_step == 7 and world.rank == 1:
                with torch.no_grad():
                    net.layers[2].weight[3, 3] = torch.nan

    net = Wide()
    trainer = fit(net, sync=sync, compression=scheme, hooks=[Poison()])
    assert not np.isfinite(flat(net)).all()  # as without compression, and on each rank
    held = memory(trainer)
    assert any(name.startswith(CHANGED) for name in held)
    assert all(np.isfinite(each).all() for each in held.values())


@pytest.mark.world_size(2)
def test_a_rank_that_leaves_out_a_step_leaves_no_nan(world, assert_same_on_all_ranks):
    net = Wide()
    faulty = kit.Infinite(net.layers[2].weight, [3])
    trainer = fit(net, sync=hvdtrain.LocalSGD(2), compression="topk:0.1", nan_policy="skip", hooks=[faulty])
    assert False in faulty.taken
    assert np.isfinite(flat(net)).all()
    assert all(np.isfinite(each).all() for each in memory(trainer).values())
    assert_same_on_all_ranks(*net.parameters())


@pytest.mark.world_size(2)
def test_running_statistics_are_averaged_as_without_compression(world, assert_same_on_all_ranks):
    nets = []
    for scheme in ("none", "topk:1.0"):
        net = torch.nn.Sequential(kit.model()[0], torch.nn.BatchNorm1d(16), kit.model()[3])
        fit(net, sync=hvdtrain.LocalSGD(2), compression=scheme)
        assert_same_on_all_ranks(*net.parameters(), *(each.float() for each in net.buffers()))
        nets.append(net)
    for ours, theirs in zip(nets[1].buffers(), nets[0].buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


@pytest.mark.world_size(3)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_ranks_of_a_host_step_together_with_compressed_changes(world, scheme, monkeypatch, assert_same_on_all_ranks):
    monkeypatch.setattr(socket, "gethostname", lambda: "aab"[world.rank])
    nets = []
    for each in ("none", "topk:1.0", scheme):
        nets.append(Wide())
        trainer = fit(nets[-1], sync=hvdtrain.LocalSGD(3, within="host"), compression=each)
        assert_same_on_all_ranks(*nets[-1].parameters())
    np.testing.assert_allclose(flat(nets[1]), flat(nets[0]), atol=1e-5)
    assert np.abs(flat(nets[2]) - flat(nets[0])).max() > 3e-5  # it was compressed
    sums = world.allgather_object({name: float(np.abs(each).sum()) for name, each in memory(trainer).items()}, name="e")
    if scheme == "topk:0.1":  # with int8, the rank that has rounded a mean remembers it
        assert sums[0] == sums[1] != sums[2]


@pytest.mark.world_size(2)
def test_unequal_shares_count_as_without_compression(world):
    nets = []
    for scheme in ("none", "topk:1.0"):
        nets.append(Wide())
        trainer = kit.make_trainer(nets[-1], "sgd", sync=hvdtrain.LocalSGD(2), compression=scheme)
        kit.run(trainer, balance=[3, 1])
    np.testing.assert_allclose(flat(nets[1]), flat(nets[0]), atol=1e-5)


@pytest.mark.world_size(2)
def test_a_frozen_weight_keeps_what_was_not_sent_of_it(world, assert_same_on_all_ranks):
    class Freeze(Callback):
        def __init__(self):
            self.held = []

        def on_epoch_begin(self, trainer, epoch):
            net.layers[2].weight.requires_grad_(epoch != 1)
            self.held.append(memory(trainer).get(f"{CHANGED}layers.2.weight"))

    net, freeze = Wide(), Freeze()
    fit(net, sync=hvdtrain.LocalSGD(2), compression="topk:0.1", hooks=[freeze], epochs=4)
    _, second, third, fourth = freeze.held
    assert np.abs(second).max() > 0
    assert np.array_equal(second, third)
    assert not np.array_equal(third, fourth)
    assert_same_on_all_ranks(*net.parameters())


@pytest.mark.world_size(2)
def test_the_trainer_says_what_is_remembered(world):
    trainer = fit(Wide(), sync=hvdtrain.LocalSGD(2), compression="topk:0.1")
    errors = sum(each.nbytes for name, each in memory(trainer).items())
    assert errors >= 4 * 435
    assert trainer._adapter.memory().parts.buckets >= errors
