"""The Trainer on one rank that reduces: a plain loop's weights, whatever is switched on, and after a resume."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import numpy as np
import pytest
import torch

import hvdtrain
from hvdtrain.callbacks import Callback
from hvdtrain.data import sharding

SAMPLES, BATCH, EPOCHS, SEED = 40, 8, 2, 3
CLOSE = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 5e-3}


def arrays():
    generator = np.random.default_rng(0)
    return generator.normal(size=(SAMPLES, 3, 8, 8)).astype(np.float32), generator.integers(0, 5, SAMPLES)


def model():
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, bias=False), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Flatten(),
        torch.nn.Linear(8 * 36, 64), torch.nn.Tanh(), torch.nn.Linear(64, 5),
    )  # fmt: skip


def optimizer_of(net, kind):
    if kind == "adamw":
        return torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.01)
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def plain(net, device, *, kind, precision="fp32", accumulate=1, clip_norm=None):
    """A plain loop over the samples in the Trainer's order."""
    net = net.to(device).train()
    optimizer = optimizer_of(net, kind)
    x, y = (torch.from_numpy(array).to(device) for array in arrays())
    where = torch.device(device).type
    scaler = torch.amp.GradScaler(where, enabled=precision == "fp16")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    for epoch in range(EPOCHS):
        indices = sharding.shard_indices(SAMPLES, rank=0, size=1, epoch=epoch, seed=SEED)
        parts = [indices[start : start + BATCH] for start in range(0, SAMPLES, BATCH)]
        for start in range(0, len(parts), accumulate):
            optimizer.zero_grad()
            group = parts[start : start + accumulate]
            for part in group:
                chosen = torch.from_numpy(part).to(device)
                with torch.autocast(where, dtype=dtype) if dtype else nullcontext():
                    loss = torch.nn.functional.cross_entropy(net(x[chosen]), y[chosen])
                scaler.scale(loss / len(group)).backward()
            if clip_norm is not None:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(net.parameters(), clip_norm)
            scaler.step(optimizer)
            scaler.update()
    return net


def fit(net, *, kind="sgd", callbacks=(), epochs=EPOCHS, checkpoint_dir=None, **options):
    options.setdefault("seed", SEED)
    trainer = hvdtrain.Trainer(
        net, optimizer=optimizer_of(net, kind), loss=torch.nn.CrossEntropyLoss(), metrics=["accuracy"], **options
    )
    history = trainer.fit(
        arrays(), epochs=epochs, batch_size=BATCH, callbacks=callbacks, checkpoint_dir=checkpoint_dir,
        progress=False, run_dir=None,
    )  # fmt: skip
    return trainer, history


@pytest.fixture(autouse=True)
def _same_convolutions(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kind": "adamw"},
        {"clip_norm": 0.1},
        {"accumulate": 2},
        {"precision": "bf16"},
        {"precision": "fp16", "clip_norm": 0.5},
    ],
    ids=["sgd", "adamw", "clipped", "accumulated", "bf16", "fp16"],
)
def test_the_trainers_weights_are_a_plain_loops(world, device, sent, options):
    assert world.device == device
    net = model()
    twin = copy.deepcopy(net)
    options = {"kind": "sgd", **options}
    _, history = fit(net, **options)
    assert {where for where, _ in sent.kinds(net)} == {torch.device(device).type}
    assert all(np.isfinite(history["loss"]))
    plain(twin, device, **options)
    limit = CLOSE[options.get("precision", "fp32")]
    for (name, a), b in zip(net.state_dict().items(), twin.state_dict().values(), strict=True):
        error = float((a - b).abs().max() / b.abs().max().clamp(min=1e-3))
        assert error <= limit, f"{name}: {error:.1e}"


@pytest.mark.parametrize("compression", ["fp16", "bf16"])
def test_compressed_gradients_travel_in_half_as_many_bits(world, device, sent, compression):
    net = model()
    fit(net, compression=compression)
    kinds = sent.kinds(net)
    assert kinds
    assert {where for where, _ in kinds} == {torch.device(device).type}
    assert all(torch.empty(0, dtype=getattr(torch, kind)).element_size() == 2 for _, kind in kinds), kinds


class StoppedError(Exception):
    """Stands for a kill."""


class StopAt(Callback):
    def __init__(self, step):
        self._step = step

    def on_step_begin(self, trainer, step):
        if trainer.global_step == self._step:
            raise StoppedError


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_resumed_run_ends_as_one_that_was_never_stopped(world, device, tmp_path, precision):
    with_dropout = {"kind": "adamw", "precision": precision}

    def random_model():
        return torch.nn.Sequential(model(), torch.nn.Dropout(0.3))

    torch.manual_seed(7)
    straight, _ = fit(random_model(), epochs=3, **with_dropout)
    torch.manual_seed(7)
    with pytest.raises(StoppedError):
        fit(random_model(), epochs=3, callbacks=[StopAt(7)], checkpoint_dir=str(tmp_path), **with_dropout)
    torch.manual_seed(99)
    resumed, _ = fit(random_model(), epochs=3, checkpoint_dir=str(tmp_path), **with_dropout)
    ours, theirs = resumed.state(), straight.state()
    assert ours.arrays.keys() == theirs.arrays.keys()
    for name, value in ours.arrays.items():
        np.testing.assert_array_equal(value, theirs.arrays[name], err_msg=name)
    assert ours.meta == theirs.meta


def test_a_gradient_that_is_not_finite_is_found(world, device):
    class Bad(Callback):
        def on_step_begin(self, trainer, step):
            if trainer.global_step == 2:
                with torch.no_grad():
                    next(trainer.model.parameters()).fill_(float("inf"))

    with pytest.raises(hvdtrain.errors.HvdTrainError, match="not finite"):
        fit(model(), nan_policy="raise", callbacks=[Bad()])


def test_predictions_come_back_to_the_host(world, device):
    trainer, _ = fit(model())
    found = trainer.predict(arrays()[0], batch_size=BATCH)
    trainer.model.eval()
    with torch.no_grad():
        expected = trainer.model(torch.from_numpy(arrays()[0]).to(device)).cpu().numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
