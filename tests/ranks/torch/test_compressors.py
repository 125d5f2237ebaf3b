"""A compressor with a memory and two collectives, written against the contract alone: see CONTRIBUTING.md."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import trainer_kit as kit

import hvdtrain
from hvdtrain.callbacks import Checkpoint
from hvdtrain.torch.ops.compression import Compression, Compressor
from hvdtrain.torch.ops.engine import Average, Staged, Sum
from hvdtrain.torch.ops.submit import submit

pytestmark = pytest.mark.world_size(2, 3)


class Signs(Compressor):
    """Sends signs times their mean size, and remembers what that leaves out: first all sizes, then all signs."""

    name = "signs"
    has_memory = True

    def __init__(self, names=()):
        self.names, self.errors = list(names), {}

    def bind(self, names):
        return Signs(names)

    def exchange(self, tensors, how, name, names=()):
        assert set(names) <= set(self.names)
        return Staged(self._stages(tensors, how, name, names), name)

    def _stages(self, tensors, how, name, names):
        whole = [
            tensor.detach() * how.prescale_factor + self.errors.get(each, 0.0)
            for tensor, each in zip(tensors, names, strict=True)
        ]
        sizes = torch.stack([each.abs().mean() for each in whole])
        add = type(how)(Sum, process_set=how.process_set)
        (total,) = yield submit([sizes], add, f"{name}.sizes", in_place=True, counted=False)
        size = total / how.process_set.size()
        sent = [each.sign() * scale for each, scale in zip(whole, size, strict=True)]
        self.errors |= {each: a - b for each, a, b in zip(names, whole, sent, strict=True)}
        summed = yield submit(sent, add, f"{name}.signs", in_place=True, counted=False)
        factor = how.postscale_factor / (how.process_set.size() if how.op == Average else 1)
        return [each * factor for each in summed]

    def state(self):
        return {f"mean.error.{name}": error.numpy().copy() for name, error in self.errors.items()}

    def load(self, arrays):
        found = {name: arrays.get(f"mean.error.{name}") for name in self.names}
        self.errors |= {name: torch.from_numpy(each.copy()) for name, each in found.items() if each is not None}


class Forgetful(Signs):
    def bind(self, names):
        return Forgetful(names)

    def load(self, arrays):
        pass


def weights(net):
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()]).numpy()


@pytest.fixture
def train(monkeypatch):
    def train(compressor, *hooks, **options):
        monkeypatch.setattr(Compression, "fp16", compressor)
        net = kit.model()
        trainer = kit.make_trainer(net, compression="fp16", **options)
        return net, kit.run(trainer, hooks=hooks)

    return train


@pytest.mark.parametrize("how", ["overlapped", "delayed", "cutoff"])
def test_a_run_with_a_compressors_memory_resumes_bit_for_bit(
    world, how, train, shared_tmp_path, assert_same_on_all_ranks
):
    options = {"overlapped": {}, "delayed": {"sync": hvdtrain.Delayed()}, "cutoff": {"cutoff": 0.5, "accumulate": 2}}[
        how
    ]
    net, trainer = train(Signs(), **options)
    assert_same_on_all_ranks(*net.parameters())
    if how == "cutoff":  # what is cut depends on time: repeat it
        options["cutoff"] = trainer.history.cutoffs
    held = trainer._adapter.rank_state
    errors = [name for name in held if name.startswith("mean.error.")]
    assert len(errors) == 4
    assert all(np.abs(held[name]).max() > 0 for name in errors)
    stop = 4 if how == "cutoff" else 8
    with pytest.raises(kit.StoppedError):
        train(Signs(), Checkpoint(shared_tmp_path / "whole", every_steps=1), kit.StopAt(stop), **options)
    with pytest.raises(kit.StoppedError):
        train(Signs(), Checkpoint(shared_tmp_path / "lossy", every_steps=1), kit.StopAt(stop), **options)
    resumed, _ = train(Signs(), Checkpoint(shared_tmp_path / "whole"), **options)
    assert np.array_equal(weights(resumed), weights(net))
    without, _ = train(Forgetful(), Checkpoint(shared_tmp_path / "lossy"), **options)
    assert not np.array_equal(weights(without), weights(net))


def test_two_optimizers_share_no_memory_of_one_compressor(hvd):
    given, bound = Signs(), []
    for _ in range(2):
        net = torch.nn.Linear(2, 1)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1), net.named_parameters(), given)
        net(torch.ones(1, 2) * (1 + hvd.rank())).sum().backward()
        optimizer.step()
        bound.append(optimizer._hvd_reducer.options.compression)
    assert not given.errors
    assert bound[0].errors.keys() == bound[1].errors.keys() == {"weight", "bias"}


def test_a_class_with_own_static_methods_is_a_compressor(hvd):
    class Halved(hvd.Compression.fp16):
        @staticmethod
        def compress(tensor):
            return tensor / 2, None

        @staticmethod
        def decompress(tensor, ctx):
            return tensor * 2

    for compression in (Halved, Halved()):
        assert hvd.allreduce(torch.ones(3), op=hvd.Sum, compression=compression).tolist() == [hvd.size()] * 3
    assert hvd.Compression.fp16.compress(torch.ones(1))[0].dtype == torch.float16


@pytest.mark.over_gloo
def test_a_large_tensor_is_added_up_from_bf16_in_float32_in_each_slice(hvd, rank, size, native_calls):
    numbers = 400_001  # more than two slices
    mine = torch.randn(numbers, generator=torch.Generator().manual_seed(rank))
    everyones = hvd.allgather(mine[None].bfloat16()).float()
    found = hvd.allreduce(mine, op=hvd.Sum, compression=hvd.Compression.bf16)
    assert torch.equal(found, everyones.sum(0).bfloat16().float())
    native_calls.bytes_sent.clear()
    hvd.allreduce(mine, compression=hvd.Compression.bf16)
    shard = -(-numbers // size)
    assert native_calls.bytes_sent["alltoall"] == 2 * size * shard
    assert native_calls.bytes_sent["allgather"] == 2 * shard


@pytest.mark.world_size(2)
def test_a_minimum_is_not_compressed_to_bf16(hvd, rank):
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([parameter], lr=1.0), [("w", parameter)], compression=hvd.Compression.bf16, op=hvd.Min
    )
    (parameter * float(rank + 1)).sum().backward()
    optimizer.step()
    assert parameter.tolist() == [-1.0] * 3


def test_compressions_are_classes_as_horovods_are(hvd):
    class Mine(hvd.Compression.fp16):
        """A user's own."""

    assert Mine.__mro__[1].__name__ == "FP16Compressor"
    assert hvd.Compression.fp16.compress(torch.ones(2))[0].dtype is torch.float16
