"""Optimizer state in shards: the bits of training without shards, on 1/N of the memory."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import trainer_kit as kit
from torch.multiprocessing.reductions import StorageWeakRef

import hvdtrain
from hvdtrain import checkpoint
from hvdtrain.callbacks import EMA, Callback, Checkpoint, EarlyStopping, SyncCheck
from hvdtrain.errors import HvdTrainError
from hvdtrain.torch.reduction import scattered
from hvdtrain.torch.reduction.shardable import ELEMENT_WISE

pytestmark = pytest.mark.world_size(2, 3)

OPTIONS = {
    torch.optim.SGD: {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    torch.optim.AdamW: {"lr": 0.01, "amsgrad": True},
    torch.optim.RMSprop: {"momentum": 0.5, "centered": True},
}


class Net(torch.nn.Module):
    """Weights of a few numbers and of thousands, and one that is not trained."""

    def __init__(self, features=6):
        super().__init__()
        torch.manual_seed(0)
        self.convolution = torch.nn.Conv2d(3, 7, 3)
        self.layers = torch.nn.Sequential(torch.nn.Linear(features, 147), torch.nn.Tanh(), torch.nn.Dropout(0.2))
        self.frozen = torch.nn.Linear(147, 147).requires_grad_(requires_grad=False)
        self.last, self.scale = torch.nn.Linear(7 * 25, 3), torch.nn.Parameter(torch.ones(()))

    def forward(self, x):
        image = self.frozen(self.layers(x)).view(-1, 3, 7, 7)
        return self.last(self.convolution(image).flatten(1)) * self.scale


def tensors(net):
    return [p.detach().clone() for p in net.parameters()]


def assert_equal(ours, theirs):
    for index, (mine, right) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(mine, right), index


def numbers(optimizer):
    """Return how many numbers a rank holds in the state of an optimizer, beside counts."""
    entries = [
        value for each in optimizer.state.values() for name, value in each.items() if name not in ("step", "mu", "eta")
    ]
    return sum(value.numel() for value in entries)


def trained(hvd, kind, steps=4, state=None, layout=torch.contiguous_format, **options):
    """Return a model after some steps of the drop-in, and its optimizer, which begins with a state_dict."""
    net = Net().to(memory_format=layout)
    plain = kind([p for p in net.parameters() if p.requires_grad], **OPTIONS.get(kind, {}))
    optimizer = hvd.DistributedOptimizer(plain, net.named_parameters(), **options)
    if state is not None:
        optimizer.load_state_dict(state)
    generator = torch.Generator().manual_seed(hvd.rank())
    torch.manual_seed(hvd.rank())
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(5, 6, generator=generator)).square().mean().backward()
        optimizer.step()
    return net, optimizer


@pytest.mark.parametrize("kind", ELEMENT_WISE)
def test_weights_and_state_have_the_bits_of_training_without_shards(hvd, rank, size, kind, assert_same_on_all_ranks):
    (net, plain), (sharded, optimizer) = (trained(hvd, kind, shard_state=shard) for shard in (False, True))
    assert_equal(tensors(sharded), tensors(net))
    assert_same_on_all_ranks(*sharded.parameters())
    weights = sum(1 for p in net.parameters() if p.requires_grad)
    kinds = numbers(plain) // sum(p.numel() for p in net.parameters() if p.requires_grad)
    assert numbers(optimizer) <= numbers(plain) / size + kinds * 64 * weights
    optimizer.consolidate_state_dict(to=size - 1)
    if rank == size - 1:
        ours, right = optimizer.state_dict(), plain.state_dict()
        assert ours["param_groups"] == right["param_groups"]
        assert ours["state"].keys() == right["state"].keys()
        for index, entries in right["state"].items():
            assert ours["state"][index].keys() == entries.keys()
            assert all(torch.equal(ours["state"][index][name], value) for name, value in entries.items())
        plain.load_state_dict(ours)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
def test_weights_in_another_order_of_memory_are_those_without_shards(hvd, rank, kind):
    """Without shards, a CPU does not fuse the update of such a weight; so the last bits may differ."""
    (net, plain), (sharded, optimizer) = (
        trained(hvd, kind, layout=torch.channels_last, shard_state=shard) for shard in (False, True)
    )
    assert not sharded.convolution.weight.is_contiguous()
    optimizer.consolidate_state_dict()
    for ours, right in zip(tensors(sharded), tensors(net), strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-6, atol=1e-6)
    if rank == 0:
        ours, right = optimizer.state_dict()["state"], plain.state_dict()["state"]
        for index, entries in right.items():
            for name, value in entries.items():
                torch.testing.assert_close(ours[index][name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.NAdam, torch.optim.ASGD])
def test_a_state_that_is_loaded_is_divided(hvd, rank, kind, everywhere):
    _, optimizer = trained(hvd, kind, shard_state=True)
    optimizer.consolidate_state_dict(None)
    state = copy.deepcopy(optimizer.state_dict())
    net, plain = trained(hvd, kind, state=copy.deepcopy(state))
    sharded, again = trained(hvd, kind, steps=0, state=state if everywhere or rank == 0 else None, shard_state=True)
    if not everywhere:
        hvd.broadcast_optimizer_state(again)
    generator = torch.Generator().manual_seed(rank)
    torch.manual_seed(rank)
    for _ in range(4):
        again.zero_grad()
        sharded(torch.randn(5, 6, generator=generator)).square().mean().backward()
        again.step()
    assert_equal(tensors(sharded), tensors(net))
    assert numbers(again) == numbers(optimizer) < numbers(plain)


def test_a_state_that_is_not_gathered_is_refused_with_the_way_out(hvd, rank, size):
    net, optimizer = trained(hvd, torch.optim.Adam, shard_state=True)
    with pytest.raises(RuntimeError, match=rf"consolidate_state_dict\(to=0\).*Received: state_dict\(\) on rank {rank}"):
        optimizer.state_dict()
    optimizer.consolidate_state_dict()
    if rank == 0:
        assert len(optimizer.state_dict()["state"]) == sum(1 for p in net.parameters() if p.requires_grad)
    else:
        with pytest.raises(RuntimeError, match="in shards"):
            optimizer.state_dict()
    with pytest.raises(RuntimeError, match="cannot be copied or pickled"):
        copy.deepcopy(optimizer)
    net(torch.randn(5, 6)).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="in shards"):  # it was of the step before
        optimizer.state_dict()
    with pytest.raises(ValueError, match=r"in shards already\. Received: shard_state=False"):
        hvd.DistributedOptimizer(optimizer, net.named_parameters())


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_a_small_weight_whose_first_gradient_comes_late_changes_no_bit(hvd, rank, kind):
    """Its state differs from the other weights': then no rank fuses the update, also one without a part of it."""
    found = []
    for shard in (False, True):
        torch.manual_seed(0)
        net = torch.nn.Linear(300, 40)
        options = OPTIONS.get(kind, {"lr": 0.01, "weight_decay": 0.1})
        optimizer = hvd.DistributedOptimizer(kind(net.parameters(), **options), shard_state=shard)
        generator = torch.Generator().manual_seed(rank)
        for step in range(6):
            optimizer.zero_grad()
            bias = net.bias if step > 2 else None
            output = torch.nn.functional.linear(torch.randn(5, 300, generator=generator), net.weight, bias)
            output.square().mean().backward()
            optimizer.step()
        found.append(tensors(net))
    assert_equal(found[1], found[0])


def test_a_closure_is_refused_on_every_rank(hvd, rank):
    net = Net()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), shard_state=True)
    before = tensors(net)

    def closure():
        optimizer.zero_grad()
        loss = net(torch.ones(5, 6)).square().mean()
        loss.backward()
        return loss

    for call in (lambda: optimizer.step(closure), lambda: optimizer.step(closure=closure)):
        with pytest.raises(ValueError, match=rf"step\(\) takes no closure.*Received: closure=.* on rank {rank}"):
            call()
    assert_equal(tensors(net), before)


def test_a_weight_with_gaps_in_memory_is_refused(hvd, world):
    def gaps():
        return torch.nn.Parameter(torch.ones(200, 4)[:, ::2])

    with pytest.raises(ValueError, match=r"must be dense in memory\. Received: shape \(200, 2\)"):
        hvd.DistributedOptimizer(torch.optim.SGD([gaps()], lr=0.1), shard_state=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(Net().parameters(), lr=0.1), shard_state=True)
    with pytest.raises(ValueError, match=r"must be dense in memory\. Received: shape \(200, 2\)"):
        optimizer.add_param_group({"params": [gaps()]})
    assert len(optimizer.param_groups) == 1


class Lamb(torch.optim.Adam):
    pass


def test_what_does_not_update_each_number_alone_is_refused_by_name(hvd, world):
    net = Net()
    for kind in (Lamb, torch.optim.Adafactor, torch.optim.LBFGS):
        with pytest.raises(ValueError, match=f"must not depend on others.*Received: .*{kind.__name__}"):
            hvd.DistributedOptimizer(kind(net.parameters()), net.named_parameters(), shard_state=True)
        with pytest.raises(ValueError, match=f"must not depend on others.*Received: .*{kind.__name__}"):
            kit.make_trainer(net, kind(net.parameters()), shard="optimizer")
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="shard_state=True with op=Adasum"):
        hvd.DistributedOptimizer(sgd, net.named_parameters(), op=hvd.Adasum, shard_state=True)


@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
@pytest.mark.parametrize(
    "options",
    [
        {"sync": hvdtrain.LocalSGD(every=2)},
        {"sync": hvdtrain.DiLoCo(every=2)},
        {"sync": hvdtrain.Delayed()},
        {"cutoff": 0.5, "accumulate": 2},
    ],
)
def test_strategies_are_refused_with_the_reason(world, options, shard):
    with pytest.raises(ValueError, match=f"Received: shard='{shard}': ranks update parts of the weights"):
        kit.make_trainer(Net(), shard=shard, **options)


def test_an_unknown_shard_says_what_there_is(world):
    with pytest.raises(ValueError, match=r"shard must be one of optimizer, gradients\. Received: shard='weights'"):
        kit.make_trainer(Net(), shard="weights")


@pytest.mark.parametrize("compression", ["bf16", "topk:0.1", hvdtrain.PowerSGD(rank=1)])
def test_sharded_gradients_refuse_compression_that_needs_whole_ones(world, compression):
    with pytest.raises(ValueError, match=r"Use shard='optimizer'.*Received: compression="):
        kit.make_trainer(Net(), shard="gradients", compression=compression)


def test_sharded_gradients_refuse_several_optimizers(world):
    nets = {"a": Net(), "b": Net()}
    optimizers = {name: torch.optim.SGD(net.parameters(), lr=0.1) for name, net in nets.items()}
    with pytest.raises(ValueError, match="Received: the optimizers a, b"):
        hvdtrain.Trainer(nets, optimizer=optimizers, step=lambda models, batch: None, shard="gradients")


def test_sparse_gradients_are_refused(hvd, rank):
    model = torch.nn.Embedding(200, 4, sparse=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), shard_state=True)
    model(torch.tensor([rank])).sum().backward()
    with pytest.raises(HvdTrainError, match=rf"Received: a sparse gradient.*\(200, 4\) on rank {rank}"):
        optimizer.step()


def groups(net):
    slow = [p for name, p in net.named_parameters() if name.startswith("layers")]
    others = [p for name, p in net.named_parameters() if not name.startswith("layers") and p.requires_grad]
    return torch.optim.Adam([{"params": slow, "lr": 0.001}, {"params": others, "weight_decay": 0.01}], lr=0.01)


TRAINERS = {
    "plain": {},
    "clipped": {"accumulate": 3, "clip_norm": 0.05},
    "fp16": {"precision": "fp16", "clip_norm": 0.5},
    "bf16": {"precision": "bf16", "compression": "bf16"},
    "warm-up": {"lr_scaling": "linear", "warmup_epochs": 1.5},
    "micro-batches": {"micro_batch": 2},
    "error feedback": {"compression": "topk:0.1"},
}


@pytest.mark.parametrize("how", TRAINERS)
@pytest.mark.parametrize("optimizer", ["momentum", groups])
def test_the_trainer_has_the_bits_of_training_without_shards(world, how, optimizer, assert_same_on_all_ranks):
    nets = []
    for shard in (None, "optimizer"):
        nets.append(net := Net())
        made = optimizer if isinstance(optimizer, str) else optimizer(net)
        kit.fit(net, made, shard=shard, hooks=[SyncCheck(every=1)], **TRAINERS[how])
    assert_equal(tensors(nets[1]), tensors(nets[0]))
    assert_same_on_all_ranks(*nets[1].parameters())


@pytest.mark.parametrize("how", [each for each in TRAINERS if each not in ("bf16", "error feedback")])
@pytest.mark.parametrize("optimizer", ["momentum", groups])
def test_sharded_gradients_give_the_weights_of_whole_ones(world, size, how, optimizer, assert_same_on_all_ranks):
    """Over two ranks a sum has one order only. Norms of parts add up to the norm but for rounding."""
    nets = []
    for shard in (None, "gradients"):
        nets.append(net := Net())
        made = optimizer if isinstance(optimizer, str) else optimizer(net)
        kit.fit(net, made, shard=shard, hooks=[SyncCheck(every=1)], **TRAINERS[how])
    assert_same_on_all_ranks(*nets[1].parameters())
    if size == 2 and "clip_norm" not in TRAINERS[how]:
        assert_equal(tensors(nets[1]), tensors(nets[0]))
    rounding = 1e-4 if TRAINERS[how].get("precision") == "fp16" else 2e-6  # half precision makes steps of a last bit
    for ours, right in zip(tensors(nets[1]), tensors(nets[0]), strict=True):
        torch.testing.assert_close(ours, right, rtol=rounding, atol=rounding)


class OneInfinite(kit.Infinite):
    """Makes the first number of a gradient infinite, which is in the first rank's part."""

    def _poison(self, grad):
        poisoned = super()._poison(grad)
        return grad if poisoned is grad else torch.cat([poisoned.flatten()[:1], grad.flatten()[1:]]).view_as(grad)


def test_loss_scaling_skips_a_step_on_all_ranks_if_one_ranks_part_is_infinite(world, size):
    nets = []
    for shard in (None, "gradients"):
        nets.append(net := Net())
        faulty = OneInfinite(net.last.weight, [3, 4])
        kit.run(kit.make_trainer(net, "adam", shard=shard, precision="fp16"), hooks=[faulty])
        assert [step for step, taken in enumerate(faulty.taken) if not taken] == [3, 4]
    if size == 2:
        assert_equal(tensors(nets[1]), tensors(nets[0]))


def test_a_fault_names_the_parameter_on_every_rank(world):
    net = Net()
    faulty = kit.Infinite(net.last.weight, [2])
    with pytest.raises(HvdTrainError, match=r"last\.weight"):
        kit.run(kit.make_trainer(net, "adam", shard="gradients", nan_policy="raise"), hooks=[faulty])


class Seen(Callback):
    """Counts the numbers of gradients that a rank holds after backward and before the update."""

    def on_fit_begin(self, trainer):
        self.whole, self.parts = [], []
        optimizer = trainer._adapter._update.optimizer
        plain = optimizer.synchronize

        def synchronize(**options):
            total = plain(**options)
            whole = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            self.whole.append(sum(p.grad.numel() for p in whole))
            self.parts.append(sum(part.numel() for part in optimizer._hvd_shards.gradients.values()))
            return total

        optimizer.synchronize = synchronize


def test_a_rank_holds_its_part_of_large_gradients_only(world, size):
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(6, 512), torch.nn.Tanh(), torch.nn.Linear(512, 512))
    seen = Seen()
    kit.fit(net, "adam", shard="gradients", hooks=[seen])
    large, all_numbers = 512 * 512, sum(p.numel() for p in net.parameters())
    assert seen.whole[0] == 0
    assert seen.parts[0] <= all_numbers / size + 64 * 4
    # From the second step on, small gradients travel in one bucket, and stay whole.
    assert seen.whole[-1] == all_numbers - large
    assert seen.parts[-1] <= large / size + 64


def test_sharded_gradients_are_weighed_by_what_counts(world, size, assert_same_on_all_ranks):
    def step(model, batch):
        x, y = batch
        counts = y > 0
        return hvdtrain.Loss(torch.nn.functional.cross_entropy(model(x)[counts], y[counts]), counts.sum())

    nets = []
    for shard in (None, "gradients"):
        nets.append(net := Layers(range(4)))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        kit.run(hvdtrain.Trainer(net, optimizer=optimizer, step=step, shard=shard))
    assert_same_on_all_ranks(*nets[1].parameters())
    for ours, right in zip(tensors(nets[1]), tensors(nets[0]), strict=True):
        torch.testing.assert_close(ours, right, rtol=2e-6, atol=0.0 if size == 2 else 2e-6)


class Layers(torch.nn.Module):
    """Large layers beside each other; a rank uses `order` of them, in this order."""

    def __init__(self, order):
        super().__init__()
        torch.manual_seed(0)
        self.layers, self._order = torch.nn.ModuleList(torch.nn.Linear(6, 20000) for _ in range(4)), order
        self.last = torch.nn.Linear(20000, 3)

    def forward(self, x):
        hidden = x.flatten(1)
        for index in self._order:  # backward goes through them one after the other
            hidden = self.layers[index](hidden[:, :6]).tanh()
        return self.last(hidden) / 100


def test_backward_frees_gradients_that_were_sent(world, monkeypatch):
    monkeypatch.setattr(scattered, "_MOST_BYTES", 1)
    net, held, alive = Layers(range(4)), [], []
    for layer in net.layers:  # before the Trainer's own hooks, which send the gradients
        hook = lambda p: held.append(StorageWeakRef(p.grad.untyped_storage()))  # noqa: E731
        layer.weight.register_post_accumulate_grad_hook(hook)

    class Watch(Callback):
        def on_fit_begin(self, trainer):
            optimizer = trainer._adapter._update.optimizer
            plain = optimizer.synchronize

            def synchronize(**options):
                alive.append(sum(not each.expired() for each in held))
                held.clear()
                return plain(**options)

            optimizer.synchronize = synchronize

    kit.fit(net, "adam", shard="gradients", hooks=[Watch()])
    assert max(alive) <= 2  # the last one may be in flight, and Horovod's thread may still drop the one before


def test_a_layer_in_several_reentrant_checkpoints_is_refused_with_the_way_out(world):
    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.shared, self.last = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6), torch.nn.Linear(6, 3)

        def forward(self, x):
            hidden = self.first(x.flatten(1))
            for _ in range(2):
                hidden = torch.utils.checkpoint.checkpoint(self.shared, hidden, use_reentrant=True)
            return self.last(hidden)

    with pytest.raises(AssertionError, match="use_reentrant=False"):
        kit.fit(Twice(), "adam", shard="gradients")


@pytest.mark.parametrize("order", [[3, 2, 1, 0], [0, 1]])
def test_ranks_with_gradients_in_another_order_or_without_some_do_not_wait_for_ever(
    world, rank, size, order, monkeypatch, assert_same_on_all_ranks
):
    monkeypatch.setattr(scattered, "_MOST_BYTES", 1)
    monkeypatch.setattr(scattered, "_WAIT_S", 0.2)
    nets = []
    for shard in (None, "gradients"):
        nets.append(net := Layers(order if rank == size - 1 else range(4)))
        kit.fit(net, "momentum", shard=shard)
    assert_same_on_all_ranks(*nets[1].parameters())
    for ours, right in zip(tensors(nets[1]), tensors(nets[0]), strict=True):
        torch.testing.assert_close(ours, right, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
def test_a_refused_step_changes_nothing(world, size, shard):
    nets = []
    for each in (None, shard):
        nets.append(net := Net())
        faulty = kit.Infinite(net.last.weight, [3, 4])
        kit.run(kit.make_trainer(net, "adam", shard=each, nan_policy="skip"), hooks=[faulty])
        assert [step for step, taken in enumerate(faulty.taken) if not taken] == [3, 4]
    for ours, right in zip(tensors(nets[1]), tensors(nets[0]), strict=True):
        torch.testing.assert_close(ours, right, rtol=2e-6, atol=2e-6)
    if size == 2 or shard == "optimizer":
        assert_equal(tensors(nets[1]), tensors(nets[0]))


class Schedule(Callback):
    """Uses a scheduler of torch's."""

    def on_fit_begin(self, trainer):
        self._scheduler = torch.optim.lr_scheduler.StepLR(trainer._adapter._update.optimizer, 2, gamma=0.5)

    def on_step_end(self, trainer, step):
        self._scheduler.step()


@pytest.mark.parametrize("name", ["EMA", "EarlyStopping", "scheduler"])
def test_callbacks_see_the_same(world, name):
    made = {
        "EMA": lambda: EMA(decay=0.9),
        "EarlyStopping": lambda: EarlyStopping("loss", patience=1, min_delta=10.0, restore_best=True),
        "scheduler": Schedule,
    }[name]
    nets = []
    for shard in (None, "optimizer"):
        nets.append(net := Net())
        kit.fit(net, "adam", shard=shard, hooks=[made()], epochs=4)
    assert_equal(tensors(nets[1]), tensors(nets[0]))


@pytest.mark.parametrize("options", [{}, {"accumulate": 2, "precision": "bf16"}])
def test_a_checkpoint_has_the_bytes_of_one_without_shards(world, rank, options, shared_tmp_path):
    for shard in (None, "optimizer"):
        kit.fit(Net(), "adam", shard=shard, hooks=[Checkpoint(shared_tmp_path / str(shard))], **options)
    if rank == 0:
        found = []
        for shard in ("None", "optimizer"):
            folder = sorted((shared_tmp_path / shard).glob("epoch*"))[-1]
            found.append(checkpoint.read(folder).arrays)
        whole, sharded = found
        assert whole["optimizer"].keys() == sharded["optimizer"].keys()
        assert whole["optimizer"]
        for part in ("model", "optimizer"):
            assert all(np.array_equal(sharded[part][name], each) for name, each in whole[part].items())


@pytest.mark.parametrize(
    ("first", "second"),
    [("optimizer", "optimizer"), ("optimizer", None), (None, "optimizer"), ("gradients", "gradients")],
)
def test_a_run_resumes_bit_for_bit_with_and_without_shards(world, first, second, shared_tmp_path):
    straight, resumed = Net(), Net()
    kit.fit(straight, "adam", shard="gradients" if first == "gradients" else None)
    hooks = [Checkpoint(shared_tmp_path, every_steps=2), kit.StopAt(4)]
    with pytest.raises(kit.StoppedError):
        kit.fit(Net(), "adam", shard=first, hooks=hooks)
    kit.fit(resumed, "adam", shard=second, hooks=[Checkpoint(shared_tmp_path), SyncCheck(every=1)])
    assert_equal(tensors(resumed), tensors(straight))


def test_a_second_fit_and_a_loaded_trainer_continue(world, rank, shared_tmp_path):
    nets = []
    for shard in (None, "optimizer"):
        net, again, folder = Net(), Net(), shared_tmp_path / str(shard)
        trainer = kit.make_trainer(net, "adam", shard=shard)
        kit.run(trainer, epochs=1)
        kit.run(trainer, epochs=1)
        trainer.save(folder / "first")
        options = {"optimizer": kit.OPTIMIZERS["adam"](again), "loss": torch.nn.CrossEntropyLoss(), "shard": shard}
        loaded = hvdtrain.Trainer.load(folder / "first", again, **options)
        loaded.save(folder / "second")  # before a step has divided what was loaded
        kit.run(loaded, epochs=1)
        nets += [net, again]
        if rank == 0:
            first, second = (checkpoint.read(folder / name).arrays["optimizer"] for name in ("first", "second"))
            assert first.keys() == second.keys()
            assert all(np.array_equal(second[name], each) for name, each in first.items())
    assert_equal(tensors(nets[2]), tensors(nets[0]))
    assert_equal(tensors(nets[3]), tensors(nets[1]))


def test_two_optimizers_are_sharded(world):
    def step(models, batch):
        x, y = batch
        yield "first", hvdtrain.Loss(torch.nn.functional.cross_entropy(models["first"](x), y))
        yield "second", hvdtrain.Loss(torch.nn.functional.cross_entropy(models["second"](x), y))

    found = []
    for shard in (None, "optimizer"):
        models = {"first": Net(), "second": kit.model()}
        optimizers = {
            "first": torch.optim.Adam([p for p in models["first"].parameters() if p.requires_grad], lr=0.01),
            "second": torch.optim.SGD(models["second"].parameters(), lr=0.1, momentum=0.9),
        }
        kit.run(hvdtrain.Trainer(models, optimizer=optimizers, step=step, shard=shard))
        found.append([p for net in models.values() for p in tensors(net)])
    assert_equal(found[1], found[0])
