"""DistributedOptimizer of one rank that reduces: its steps are plain PyTorch's, and nothing leaves the device."""

from __future__ import annotations

import copy

import pytest
import torch

STEPS = 6
OUTPUTS = 36_000
# Relative to the largest weight: what a sum of one in a type of so many bits may change in six steps.
CLOSE = {"none": 1e-6, "fp16": 2e-3, "bf16": 2e-2}


def deep(device, width=64):
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh()) for _ in range(3)]
    # The last one, of 9 MB, is above what travels in buckets.
    net = torch.nn.Sequential(torch.nn.Linear(8, width), *layers, torch.nn.Linear(width, OUTPUTS))
    return net.to(device)


def convolutional(device):
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.Conv2d(16, 32, 3), torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(32, 5),
    )  # fmt: skip
    return net.to(device, memory_format=torch.channels_last)


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def batch(device, step, inputs=(8,), outputs=OUTPUTS):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(16, *inputs, generator=generator)
    return x.to(device), torch.randint(0, outputs, (16,), generator=generator).to(device)


def train(net, optimizer, device, *, steps=STEPS, passes=1, clip=None, **data):
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(passes):
            x, y = batch(device, passes * step + part, **data)
            torch.nn.functional.cross_entropy(net(x), y).backward()
        if clip is not None and hasattr(optimizer, "synchronize"):
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
            with optimizer.skip_synchronize():
                optimizer.step()
            continue
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()


def assert_close(ours, theirs, limit=1e-6):
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert a.device == b.device
        error = float((a - b).detach().abs().max() / b.detach().abs().max())
        assert error <= limit, f"{name}: {error:.1e}"


def pair(make, device, hvd, optimizer=sgd, **options):
    """Return a model that is trained by a DistributedOptimizer, its twin for plain PyTorch, and both optimizers."""
    ours = make(device)
    theirs = copy.deepcopy(ours)
    return (
        ours,
        theirs,
        hvd.DistributedOptimizer(optimizer(ours), ours.named_parameters(), **options),
        optimizer(theirs),
    )


@pytest.mark.parametrize("clip", [None, 0.1], ids=["", "clipped"])
@pytest.mark.parametrize("compression", CLOSE)
def test_steps_are_plain_torchs(hvd, device, sent, compression, clip):
    ours, theirs, optimizer, plain = pair(deep, device, hvd, compression=getattr(hvd.Compression, compression))
    train(ours, optimizer, device, clip=clip)
    assert {kind for kind, _ in sent.kinds(ours)} == {torch.device(device).type}
    train(theirs, plain, device, clip=clip)
    assert_close(ours, theirs, CLOSE[compression])


def test_the_reduction_is_forced_and_small_gradients_share_a_bucket(hvd, device, sent):
    ours, _, optimizer, _ = pair(deep, device, hvd)
    train(ours, optimizer, device, steps=1)
    assert len(sent.names(ours)) == len(list(ours.parameters()))
    sent.calls.clear()
    train(ours, optimizer, device, steps=1)
    assert sum(name.endswith(".bucket") for name in sent.names(ours)) in (1, 2)
    assert "4.weight" in sent.names(ours)
    assert len(sent.names(ours)) < 5


def test_without_the_variable_one_rank_sends_nothing(hvd, device, sent, monkeypatch):
    monkeypatch.delenv("HVDTRAIN_REDUCE_ALONE")
    ours, theirs, optimizer, plain = pair(deep, device, hvd)
    train(ours, optimizer, device)
    train(theirs, plain, device)
    assert sent.calls == []
    assert_close(ours, theirs)


@pytest.mark.parametrize("options", [{"groups": 2}, {"gradient_predivide_factor": 4.0}], ids=["groups", "predivide"])
def test_horovods_options_change_nothing(hvd, device, sent, options):
    ours, theirs, optimizer, plain = pair(deep, device, hvd, **options)
    train(ours, optimizer, device)
    train(theirs, plain, device)
    assert sent.names(ours) or "groups" in options  # groups take Horovod's grouped allreduce
    assert_close(ours, theirs)


def test_accumulated_passes_are_one_reduction(hvd, device, sent):
    ours, theirs, optimizer, plain = pair(deep, device, hvd, backward_passes_per_step=3)
    train(ours, optimizer, device, steps=2, passes=3)
    assert len(sent.names(ours)) < 2 * len(list(ours.parameters()))
    train(theirs, plain, device, steps=2, passes=3)
    assert_close(ours, theirs)


@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
def test_adams_steps_are_plain_torchs(hvd, device, kind):
    def adam(net):
        return getattr(torch.optim, kind)(net.parameters(), lr=1e-3)

    ours, theirs, optimizer, plain = pair(deep, device, hvd, adam)
    train(ours, optimizer, device)
    train(theirs, plain, device)
    assert_close(ours, theirs, 1e-5)


def test_channels_last_gradients_keep_their_layout(hvd, device, sent, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    ours, theirs, optimizer, plain = pair(convolutional, device, hvd)
    data = {"inputs": (3, 12, 12), "outputs": 5}
    train(ours, optimizer, device, **data)
    train(theirs, plain, device, **data)
    assert sent.names(ours)
    weights = [p for p in ours.parameters() if p.dim() == 4]
    assert all(p.grad.is_contiguous(memory_format=torch.channels_last) for p in weights)
    assert_close(ours, theirs, 1e-5)


def test_bf16_parameters_take_the_steps_of_one_process(hvd, device, sent):
    ours, theirs, optimizer, plain = pair(lambda where: deep(where).bfloat16(), device, hvd)
    for net, own in ((ours, optimizer), (theirs, plain)):
        for step in range(STEPS):
            own.zero_grad()
            x, y = batch(device, step)
            torch.nn.functional.cross_entropy(net(x.bfloat16()), y).backward()
            own.step()
    assert sent.names(ours)
    assert_close(ours, theirs, CLOSE["bf16"])


def test_gradscaler_skips_what_plain_torch_skips(hvd, device):
    ours, theirs, optimizer, plain = pair(deep, device, hvd)
    kind = torch.device(device).type
    scalers = [torch.amp.GradScaler(kind, init_scale=256.0, growth_interval=2) for _ in range(2)]
    scales = []
    for net, own, scaler in zip((ours, theirs), (optimizer, plain), scalers, strict=True):
        for step in range(STEPS):
            own.zero_grad()
            x, y = batch(device, step)
            with torch.autocast(kind, dtype=torch.float16):
                loss = torch.nn.functional.cross_entropy(net(x).float(), y)
            scaler.scale(loss * (float("inf") if step == 2 else 1.0)).backward()
            if own is optimizer:
                own.synchronize()
            scaler.unscale_(own)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            if own is optimizer:
                with own.skip_synchronize():
                    scaler.step(own)
            else:
                scaler.step(own)
            scaler.update()
        scales.append(scaler.get_scale())
    assert scales[0] == scales[1] != 256.0
    assert_close(ours, theirs, 1e-4)


def test_a_rows_gradient_stays_sparse(hvd, device):
    def embedding(where):
        torch.manual_seed(0)
        return torch.nn.EmbeddingBag(50, 6, sparse=True, mode="sum").to(where)

    ours, theirs, optimizer, plain = pair(embedding, device, hvd, lambda net: torch.optim.SGD(net.parameters(), lr=0.1))
    for net, own in ((ours, optimizer), (theirs, plain)):
        for step in range(2):
            own.zero_grad()
            net(torch.tensor([[step, 3, 3], [step + 7, 1, 3]], device=device)).square().sum().backward()
            own.step()
            assert next(net.parameters()).grad.is_sparse
    assert_close(ours, theirs)


def test_sync_batch_norm_is_batch_norm(hvd, device):
    torch.manual_seed(0)
    ours, theirs = hvd.SyncBatchNorm(6).to(device), torch.nn.BatchNorm2d(6).to(device)
    x = torch.randn(4, 6, 5, 5, device=device)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for norm, own in zip((ours, theirs), inputs, strict=True):
        for _ in range(2):
            (norm(own).sin() * torch.linspace(0, 1, 5, device=device)).sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-4, atol=1e-5)
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int64], ids=str)
def test_collectives_of_one_rank_return_what_they_were_given(hvd, device, dtype):
    x = torch.arange(12, device=device).reshape(4, 3).to(dtype)
    results = {
        "allreduce": hvd.allreduce(x, op=hvd.Sum),
        "grouped": hvd.grouped_allreduce([x, x], op=hvd.Sum)[1],
        "allgather": hvd.allgather(x),
        "broadcast": hvd.broadcast(x, 0),
        "alltoall": hvd.alltoall(x),
        "reducescatter": hvd.reducescatter(x, op=hvd.Sum),
    }
    for name, got in results.items():
        assert got.device == x.device, name
        assert torch.equal(got, x), name
    hvd.barrier()
    assert hvd.join() == 0


def test_broadcasts_change_nothing(hvd, device):
    net = deep(device)
    optimizer = torch.optim.Adam(net.parameters())
    train(net, optimizer, device, steps=1)
    before = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[0][name]), name
    for index, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            assert torch.equal(value, before[1]["state"][index][name]), (index, name)
