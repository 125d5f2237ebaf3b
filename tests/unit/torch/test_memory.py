"""The sizes of what a rank holds, as they are said before the first step and after it, in one process."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch

import hvdtrain
import hvdtrain.torch as hvd
from hvdtrain.distributed.watchdog import tracebacks
from hvdtrain.telemetry import rank_memory
from hvdtrain.torch.reduction import memory
from hvdtrain.torch.reduction.memory import held_by

STATES = [
    (torch.optim.SGD, {}), (torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
    *[(getattr(torch.optim, name), {}) for name in ("AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "Rprop", "ASGD")],
    (torch.optim.Adagrad, {}), (torch.optim.RMSprop, {}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "options"), STATES, ids=[f"{kind.__name__}-{len(options)}" for kind, options in STATES]
)
def test_the_state_of_an_optimizer_is_known_before_it_exists(kind, options):
    model = torch.nn.Linear(30, 40)
    optimizer = kind(model.parameters(), lr=0.1, **options)
    before = held_by(model.parameters(), [optimizer])
    model(torch.ones(1, 30)).sum().backward()
    optimizer.step()
    after = held_by(model.parameters(), [optimizer])
    counts = 64  # a few numbers for a whole weight
    assert before.parts.optimizer == pytest.approx(after.parts.optimizer, abs=counts)
    coming = 0 if kind is torch.optim.Adagrad else after.parts.optimizer  # which makes its state at once
    assert before.missing == pytest.approx(coming + 31 * 40 * 4, abs=counts)
    assert after.missing == pytest.approx(0, abs=counts)


def test_frozen_weights_have_no_gradient_and_lazy_ones_no_size():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LazyLinear(5), torch.nn.BatchNorm1d(5))
    model[0].requires_grad_(requires_grad=False)
    optimizer = torch.optim.Adam(model.parameters())
    parts = held_by([*model.parameters(), *model.buffers()], [optimizer]).parts
    assert parts.weights == 4 * (16 + 10 + 10) + 8  # the norm's count is an int64
    assert (parts.gradients, parts.optimizer) == (4 * 10, 2 * 4 * 10)


pytestmark = pytest.mark.usefixtures("alone")


class Hungry(torch.nn.Module):
    def __init__(self, error=None):
        super().__init__()
        self.layer, self.error = torch.nn.Linear(4, 4), error

    def forward(self, x):
        if self.error is not None:
            raise self.error
        return self.layer(x)


def fit(model, **options):
    optimizer = torch.optim.Adam(model.parameters())
    trainer = hvdtrain.Trainer(model, optimizer=optimizer, loss=torch.nn.MSELoss(), **options)
    x = np.ones((8, 4), np.float32)
    trainer.fit((x, x), batch_size=4, progress=False, run_dir=None)
    return trainer


def test_the_trainer_says_what_it_holds():
    memory = fit(Hungry()).memory
    assert memory == {
        "weights": 80,
        "gradients": 80,
        "optimizer": 168,
        "buckets": 0,
        "activations": memory["activations"],
    }


@pytest.mark.parametrize(
    ("error", "options", "advice"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."), {}, 'activations: micro_batch="auto"'),
        (MemoryError(), {}, "The largest is "),
        (
            RuntimeError("not enough memory: you tried to allocate 99999 bytes."),
            {"micro_batch": 2},
            'The largest is activations: checkpoint_activations="blocks" computes them again',
        ),
    ],
    ids=["gpu", "python", "host"],
)
def test_an_error_of_memory_says_what_takes_it_and_what_shrinks_it(error, options, advice):
    text = str(error)
    with pytest.raises(type(error)) as caught:
        fit(Hungry(error), **options)
    first, note = str(caught.value).rsplit("\n", 1)
    assert first == text
    assert note.startswith("hvdtrain: memory of rank 0: ")
    assert "weights 80 B" in note
    assert advice in note


def test_an_error_whose_class_makes_its_message_gets_a_note():
    error = np._core._exceptions._ArrayMemoryError((4, 4), np.dtype("float32"))
    with pytest.raises(MemoryError) as caught:
        fit(Hungry(error))
    notes = getattr(caught.value, "__notes__", None)  # from Python 3.11
    assert notes is None or notes[0].startswith("hvdtrain: memory of rank 0: ")


def test_other_errors_stay_as_they_are():
    with pytest.raises(RuntimeError) as caught:
        fit(Hungry(RuntimeError("shapes differ")))
    assert str(caught.value) == "shapes differ"


def test_a_run_that_cannot_be_measured_runs(monkeypatch):
    monkeypatch.setattr("hvdtrain.torch.adapter.held_by", lambda *args, **options: 1 / 0)
    assert fit(Hungry()).memory == {}


@pytest.fixture
def alone_in_script(monkeypatch):
    """Let nothing speak for this process, before and afterwards, nor count optimizers that other tests have left."""
    monkeypatch.setattr(memory, "_of_script", weakref.WeakSet())
    rank_memory.forget()
    yield
    rank_memory.forget()


@pytest.mark.usefixtures("alone_in_script")
def test_an_error_that_ends_a_script_without_a_trainer_says_what_takes_the_memory():
    nets = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4).requires_grad_(requires_grad=False)
    named = [(f"{i}.{name}", p) for i, net in enumerate(nets) for name, p in net.named_parameters()]
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(nets[0].parameters()), named)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
    tracebacks.explain(error)
    note = str(error).splitlines()[1]
    assert note.startswith("hvdtrain: memory of rank 0: activations 2.")
    assert "weights 160 B, " in note, "frozen ones count"
    assert "gradients 80 B. " in note
    assert note.endswith("computes a batch in parts, or torch.utils.checkpoint computes them again in backward")
    assert not optimizer.state


@pytest.mark.usefixtures("alone_in_script")
def test_a_script_whose_optimizer_is_gone_says_nothing_of_it():
    net = torch.nn.Linear(4, 4)
    hvd.DistributedOptimizer(torch.optim.Adam(net.parameters()), net.named_parameters())
    del net
    error = MemoryError()
    tracebacks.explain(error)
    assert "weights" not in str(error)
