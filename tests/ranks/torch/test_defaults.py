"""torch's default type and default device are the user's: the results of the drop-in do not depend on them."""

from __future__ import annotations

import pytest
import torch
from defaults_kit import DEFAULTS, assert_equal, default, tensors

COUNT = 3000  # samples: float16 counts to 2048 only
WEIGHT = 70000.0  # above float16's largest number


@pytest.fixture(autouse=True)
def _same_kernels(monkeypatch):
    """Of another default type, the update is not fused, which differs by rounding."""
    monkeypatch.setenv("HVDTRAIN_FUSED_UPDATE", "0")


class Net(torch.nn.Module):
    """A convolution, a norm, a layer for the last rank only, and one that is not used."""

    def __init__(self, rank=0, size=1):
        super().__init__()
        torch.manual_seed(0)
        self.convolution, self.norm = torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)
        self.sometimes, self.never, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(2, 2), torch.nn.Linear(4, 3)
        self._is_last = rank == size - 1

    def forward(self, x):
        features = self.norm(self.convolution(x)).mean((2, 3))
        return self.last(self.sometimes(features) if self._is_last else features)


def drop_in(hvd, wanted, *, passes=1, clip=None, weigh=None, sync_norm=False, steps=4, kind=torch.optim.SGD, **options):
    """Return weights, buffers and optimizer state after some steps of the drop-in under a default."""
    rank, size = hvd.rank(), hvd.size()
    net = Net(rank, size)
    net = hvd.convert_sync_batchnorm(net) if sync_norm else net
    how = {"lr": 0.1, "momentum": 0.9} if kind is torch.optim.SGD else {"lr": 0.01}
    generator = torch.Generator().manual_seed(rank)
    batches = [torch.randn(5 - rank, 3, 5, 5, generator=generator) for _ in range(steps * passes)]
    weights = [WEIGHT * (rank + 1) + COUNT + step for step in range(steps)]
    total = sum(WEIGHT * (each + 1) + COUNT for each in range(size))
    with default(wanted):
        optimizer = hvd.DistributedOptimizer(
            kind(net.parameters(), **how), net.named_parameters(), backward_passes_per_step=passes, **options
        )
        hvd.broadcast_parameters(net.state_dict(), root_rank=0)
        found = []
        for step in range(steps):
            optimizer.zero_grad()
            for x in batches[step * passes : (step + 1) * passes]:
                (net(x).square().mean() * (weights[step] * size / total if weigh else 1.0)).backward()
            if weigh:
                found.append(optimizer.synchronize(weight=weights[step], expected=total))
            if clip:
                if not weigh:
                    optimizer.synchronize()
                torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
            if weigh or clip:
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        if options.get("shard_state"):
            optimizer.consolidate_state_dict(to=None)
        state = optimizer.state_dict()["state"]
    moments = [entry for each in state.values() for entry in each.values() if isinstance(entry, torch.Tensor)]
    return [*found, *tensors(net), *moments]


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("wanted", DEFAULTS, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compression": "fp16"},
        {"compression": "bf16"},
        {"compression": "powersgd"},
        {"passes": 2, "average_aggregated_gradients": True},
        {"weigh": True},
        {"weigh": True, "compression": "fp16"},
        {"clip": 0.05},
        {"shard_state": True},
        {"sync_norm": True},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_the_drop_in_trains_the_same_weights(hvd, options, wanted):
    names = {"fp16": hvd.Compression.fp16, "bf16": hvd.Compression.bf16, "powersgd": hvd.Compression.powersgd(2)}
    options = options | ({"compression": names[options["compression"]]} if "compression" in options else {})
    assert_equal(drop_in(hvd, wanted, **options), drop_in(hvd, None, **options))


@pytest.mark.world_size(2)
@pytest.mark.parametrize("wanted", ["meta", "with meta"])
@pytest.mark.parametrize("shard_state", [False, True])
def test_adam_counts_its_steps_beside_the_weights(hvd, wanted, shard_state, monkeypatch):
    monkeypatch.delenv("HVDTRAIN_FUSED_UPDATE")  # torch's own code makes the counts on the default device
    options = {"kind": torch.optim.AdamW, "shard_state": shard_state}
    assert_equal(drop_in(hvd, wanted, **options), drop_in(hvd, None, **options))


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("wanted", [None, *DEFAULTS], ids=str)
def test_large_weights_come_with_gradients_exactly(hvd, size, rank, wanted):
    """In float16 the sum of weights would be infinite, and so all gradients zeros."""
    net = torch.nn.Linear(2, 1)
    x = torch.full((1, 2), float(rank + 1))
    total = sum(WEIGHT + each for each in range(size))
    with default(wanted):
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), net.named_parameters())
        for _ in range(2):  # alone, and in a bucket that carries the weight
            optimizer.zero_grad()
            (net(x).sum() * ((WEIGHT + rank) * size / (2 * total))).backward()
            assert optimizer.synchronize(weight=WEIGHT + rank, expected=2 * total) == total
            expected = sum((WEIGHT + each) * (each + 1) for each in range(size)) / total
            assert net.weight.grad.tolist() == [pytest.approx([expected] * 2, rel=1e-6)]
            with optimizer.skip_synchronize():
                optimizer.step()


@pytest.mark.world_size(2)
@pytest.mark.parametrize("wanted", DEFAULTS, ids=str)
def test_sparse_gradients_and_those_of_some_ranks_are_reduced(hvd, rank, wanted):
    def train(wanted):
        torch.manual_seed(0)
        net = torch.nn.ModuleList([torch.nn.Embedding(6, 2, sparse=True), torch.nn.Embedding(6, 2, sparse=True)])
        rows = torch.tensor([rank, 3, 5])
        with default(wanted):
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
            for _ in range(3):
                optimizer.zero_grad()
                loss = net[0](rows).square().sum()
                (loss if rank else loss + net[1](rows).square().sum()).backward()
                optimizer.step()
        return tensors(net)

    assert_equal(train(wanted), train(None))


@pytest.mark.world_size(2)
@pytest.mark.parametrize("wanted", DEFAULTS, ids=str)
def test_collectives_move_and_add_up_what_they_are_given(hvd, rank, size, wanted):
    def results(wanted):
        mine = torch.arange(6.0).reshape(3, 2) + rank
        sparse = mine.T.contiguous().to_sparse(1)
        leaf, whole = mine.clone().requires_grad_(), torch.tensor([rank + 1, 5])
        with default(wanted):
            gathered = hvd.allgather(leaf[: rank + 1])
            received, splits = hvd.alltoall(leaf, splits=[2, 1] if rank else [1, 2])
            mean = hvd.allreduce(leaf, op=hvd.Average)
            scattered = hvd.reducescatter(leaf[:2])
            sent = hvd.broadcast(leaf, root_rank=1)
            (gathered.square().sum() + (received.square().sum() + mean.sum() + scattered.sum() + sent.sum())).backward()
            handle = hvd.sparse_allreduce_async(sparse, name="defaults.sparse", op=hvd.Sum)
            objects = hvd.allgather_object({"rank": rank, "text": "x" * (5000 * (rank + 1))})
            objects.append(hvd.broadcast_object(objects if rank == 1 else None, root_rank=1))
            total = hvd.allreduce(whole, op=hvd.Average)
            reduced = handle.wait().to_dense()
            active = hvd.join()
        assert [len(each["text"]) for each in objects[:2]] == [5000, 10000]
        assert active in range(size)
        assert objects[2][0] == objects[0]
        return [gathered, received, splits, mean, scattered, sent, leaf.grad, total, reduced]

    assert_equal(results(wanted), results(None))


@pytest.mark.world_size(2)
@pytest.mark.parametrize("wanted", DEFAULTS, ids=str)
@pytest.mark.parametrize("shard_state", [False, True])
def test_an_elastic_state_is_synchronized_and_restored(hvd, rank, wanted, shard_state):
    def run(wanted):
        torch.manual_seed(rank)
        net = torch.nn.Linear(3, 2)
        x = torch.randn(4, 3)
        with default(wanted):
            plain = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
            optimizer = hvd.DistributedOptimizer(plain, net.named_parameters(), shard_state=shard_state)
            state = hvd.elastic.TorchState(model=net, optimizer=optimizer, epoch=rank)
            state.sync()
            found = []
            for _ in range(3):
                optimizer.zero_grad()
                net(x).square().mean().backward()
                optimizer.step()
                state.commit()
                found += tensors(net)
            with torch.no_grad():
                net.weight.zero_()
            state.restore()
            state.sync()
        assert state.epoch == 0
        return [*found, *tensors(net)]

    assert_equal(run(wanted), run(None))


@pytest.mark.world_size(2)
@pytest.mark.parametrize("wanted", DEFAULTS, ids=str)
def test_a_closures_loss_is_the_mean_exactly(hvd, rank, wanted):
    def run(wanted):
        torch.manual_seed(0)
        net, losses = torch.nn.Linear(3, 1), []
        x = torch.randn(4, 3) + rank
        with default(wanted):
            optimizer = hvd.DistributedOptimizer(
                torch.optim.LBFGS(net.parameters(), max_iter=3), net.named_parameters()
            )

            def closure():
                optimizer.zero_grad()
                loss = net(x).square().mean()
                loss.backward()
                return loss.item() + WEIGHT * 2 * rank + 0.25  # a number of Python's

            for _ in range(2):
                losses.append(optimizer.step(closure))
        assert all(WEIGHT < loss < WEIGHT + 10 for loss in losses)
        return [*tensors(net), torch.tensor(losses, dtype=torch.float64)]

    assert_equal(run(wanted), run(None))
