"""Modules whose activations backward computes again, on one process: the same training, with less memory."""

from __future__ import annotations

import copy
import logging
import pickle
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import hvdtrain
from hvdtrain.callbacks import Callback

pytestmark = pytest.mark.usefixtures("alone")

X = torch.randn(21, 4, generator=torch.Generator().manual_seed(1))  # the last of the batches of 4 has one sample
Y = torch.arange(21) % 3
WIDTH = 8


class Block(nn.Module):
    """Drops units by torch's numbers, rows by Python's, and scales by NumPy's."""

    def __init__(self, norm=None, width=WIDTH):
        super().__init__()
        self.norm = norm() if norm else nn.LayerNorm(width)
        self.up, self.down, self.drop = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(0.3)
        self.calls = 0

    def forward(self, x, *, scale=1.0):
        self.calls += torch.is_grad_enabled()
        hidden = self.drop(torch.tanh(self.up(self.norm(x))))
        if random.random() < 0.3:
            hidden = hidden * 0.5
        return x + self.down(hidden) * float(np.random.random()) * scale  # noqa: NPY002


class Net(nn.Module):
    def __init__(self, norm=None, make=Block):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(make(norm) for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.last(x)


def train(net, data=(X, Y), *, epochs=2, callbacks=(), batch_size=4, **options):
    options.setdefault("optimizer", torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    if "step" not in options:
        options.setdefault("loss", nn.CrossEntropyLoss())
        options.setdefault("metrics", ["accuracy"])
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002
    trainer = hvdtrain.Trainer(net, **options)
    fit = {"epochs": epochs, "batch_size": batch_size, "progress": False, "run_dir": None}
    return trainer.fit(data, validation=data, callbacks=callbacks, **fit)


def random_states():
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002


def assert_same_training(make, *, rule="blocks", blocks=lambda net: net.blocks, **options):
    """Train with and without the option; each bit of weights, buffers, metrics and random states is the same."""
    nets = make(), make()
    found = []
    for net, option in zip(nets, (False, rule), strict=True):
        made = {name: each(net) if name == "optimizer" else each for name, each in options.items()}
        history = train(net, checkpoint_activations=option, **made)
        found.append(({**history, "seconds": 0, "samples_per_s": 0}, random_states()))
    assert repr(found[0]) == repr(found[1])
    for (name, plain), again in zip(nets[0].state_dict().items(), nets[1].state_dict().values(), strict=True):
        assert torch.equal(plain, again), name
    counts = [sum(block.calls for block in blocks(net)) for net in nets]
    assert counts[1] == 2 * counts[0] > 0


def with_nan():
    x = X.clone()
    x[9] = torch.nan
    return x, Y


def own_step(net, batch):
    x, y = batch
    with torch.no_grad():
        net(x)  # a teacher's outputs, say
    return hvdtrain.Loss(nn.functional.cross_entropy(net(x), y))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate": 2, "clip_norm": 0.5},
        {"precision": "bf16"},
        {"precision": "fp16"},
        {"micro_batch": 2},
        {"micro_batch": "auto", "nan_policy": "skip"},
        {"nan_policy": "skip", "data": with_nan()},
        {"step": own_step},
        {"optimizer": lambda net: torch.optim.LBFGS(net.parameters(), max_iter=2)},
    ],
    ids=lambda options: " ".join(options) or "plain",
)
def test_training_is_the_same_bit_for_bit(options):
    assert_same_training(Net, **options)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, lambda width: nn.BatchNorm1d(width, momentum=None)])
@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}, {"nan_policy": "skip", "data": with_nan()}])
def test_running_statistics_count_each_batch_once(norm, options):
    """The last micro-batch has one sample, which the Trainer normalizes by the running statistics."""
    assert_same_training(lambda: Net(lambda: norm(WIDTH)), micro_batch=2, **options)


def test_a_frozen_part_in_eval_mode_stays_so():
    def make():
        net = Net(lambda: nn.BatchNorm1d(WIDTH))
        net.blocks[1].eval().requires_grad_(False)
        return net

    assert_same_training(make, micro_batch=2)


def test_modules_that_step_puts_into_eval_mode_are_computed_in_it_again():
    def step(net, batch):
        x, y = batch
        net.blocks[0].eval()
        outputs = net(x)
        net.blocks[0].train()
        return hvdtrain.Loss(nn.functional.cross_entropy(outputs, y))

    assert_same_training(Net, step=step)


def test_several_models_and_optimizers():
    def gan(models, batch):
        x, y = batch
        fake = models["g"](x)
        yield "d", hvdtrain.Loss(nn.functional.cross_entropy(models["d"](torch.cat([x, fake.detach()], 1)[:, :4]), y))
        yield "g", hvdtrain.Loss(nn.functional.cross_entropy(models["d"](torch.cat([fake, x], 1)[:, :4]), y))

    found = []
    for rule in (False, "blocks"):
        models = {"g": Net(), "d": Net()}
        optimizers = {name: torch.optim.SGD(net.parameters(), lr=0.1) for name, net in models.items()}
        trainer = hvdtrain.Trainer(models, optimizer=optimizers, step=gan, checkpoint_activations=rule)
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)  # noqa: NPY002
        trainer.fit((X, Y), epochs=2, batch_size=4, progress=False, run_dir=None)
        found.append([each.tolist() for net in models.values() for each in net.state_dict().values()])
    assert found[0] == found[1]


class Shared(Net):
    def __init__(self):
        super().__init__()
        self.blocks[2] = self.blocks[0]
        self.again = nn.Sequential(self.blocks[1], nn.Tanh())
        self.last.weight = nn.Parameter(self.last.weight[:, :WIDTH].clone())

    def forward(self, x):
        return super().forward(x) + self.last(self.again(self.first(x)))


def test_shared_modules_are_chosen_once():
    assert_same_training(Shared, blocks=lambda net: net.blocks[:2], rule=True)


class Memory(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, room):
        if len(x) > room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Hungry(Block):
    """Runs out of memory when it is computed again."""

    is_first = True

    def forward(self, x, *, scale=1.0):
        if torch.is_grad_enabled():
            Hungry.is_first = not Hungry.is_first
            x = Memory.apply(x, 2 if Hungry.is_first else 99)
        return super().forward(x, scale=scale)


class HungryNet(Net):
    def __init__(self):
        super().__init__(make=Hungry)
        self.blocks = self.blocks[:1]


def test_a_step_that_runs_out_of_memory_in_backward_is_repeated_in_smaller_parts():
    Hungry.is_first = True
    fixed, auto = HungryNet(), HungryNet()
    fixed.blocks[0].__class__ = Block
    train(fixed, checkpoint_activations="blocks", micro_batch=2)
    train(auto, checkpoint_activations="blocks", micro_batch="auto")
    for plain, again in zip(fixed.state_dict().values(), auto.state_dict().values(), strict=True):
        assert torch.equal(plain, again)


def saved_bytes(rule):
    """Return what a forward pass saves for backward, without what a chosen module saves inside."""
    found = []

    def pack(tensor):
        found.append(tensor.numel() * tensor.element_size())
        return tensor

    def step(net, batch):
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            return hvdtrain.Loss(nn.functional.cross_entropy(net(batch[0]), batch[1]))

    train(Net(), epochs=1, step=step, batch_size=21, checkpoint_activations=rule)
    return sum(found)


def test_fewer_bytes_are_saved_for_backward():
    """Of a block its input is saved, of 8 numbers a row; a plain one saves at least two tensors of 32 more."""
    rows, number, blocks = 21, 4, 3
    assert saved_bytes(False) - saved_bytes("blocks") >= rows * number * blocks * 2 * 32


class Watch(Callback):
    def __init__(self):
        self.seen = []

    def on_step_end(self, trainer, step):
        net = pickle.loads(pickle.dumps(copy.deepcopy(trainer.model)))  # noqa: S301
        self.seen.append((list(net.state_dict()), [list(vars(each)) for each in net.modules()]))


def test_the_model_stays_as_the_user_made_it():
    net, plain = Net(), Net()
    names = [list(vars(each)) for each in plain.modules()]
    train(net, checkpoint_activations="blocks", callbacks=[watch := Watch()])
    assert watch.seen
    assert all(seen == (list(plain.state_dict()), names) for seen in watch.seen)
    assert [list(vars(each)) for each in net.modules()] == names


def test_a_forward_of_the_modules_own_attributes_is_kept():
    net = Net()
    forward = net.blocks[0].forward
    net.blocks[0].forward = lambda *args, **kwargs: 2 * forward(*args, **kwargs)
    own, expected = net.blocks[0].forward, Net()
    expected.blocks[0].forward = lambda *args, **kwargs: 2 * Block.forward(expected.blocks[0], *args, **kwargs)
    train(net, checkpoint_activations="blocks")
    train(expected)
    assert net.blocks[0].forward is own
    assert torch.equal(net.last.weight, expected.last.weight)


class Pair(nn.Module):
    def __init__(self, *modules):
        super().__init__()
        self.first, self.second = modules

    def forward(self, x):
        return self.second(self.first(x))


def layers(*sizes):
    return nn.Sequential(nn.Linear(*sizes), nn.Tanh())


def out():
    return nn.Linear(WIDTH, 3)


CHOICES = [
    (Net, "blocks", "3 Block (blocks.0 to blocks.2)"),
    (Net, True, "3 Block (blocks.0 to blocks.2)"),
    (Net, lambda module: isinstance(module, nn.Dropout), "3 Dropout (blocks.0.drop to blocks.2.drop)"),
    (Net, lambda module: isinstance(module, Block | nn.Dropout), "3 Block (blocks.0 to blocks.2)"),
    (lambda: nn.Sequential(layers(4, 8), layers(8, 8), Pair(nn.Tanh(), out())), "blocks", "2 Sequential (0 to 1)"),
    (lambda: nn.Sequential(layers(4, 8), Pair(nn.Tanh(), out())), True, "1 Sequential (0), 1 Pair (1)"),
    (lambda: nn.Sequential(nn.Sequential(layers(4, 8), layers(8, 8)), out()), True, "2 Sequential (0.0 to 0.1)"),
    (lambda: Pair(Pair(nn.Linear(4, 8), nn.Tanh()), Pair(nn.Tanh(), out())), "blocks", "2 Pair (first to second)"),
    (
        lambda: nn.Sequential(nn.Linear(4, 8), nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2), 2), out()),
        "blocks",
        "2 TransformerEncoderLayer (1.layers.0 to 1.layers.1)",
    ),
]


@pytest.mark.parametrize(("make", "rule", "chosen"), CHOICES)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_what_is_chosen_is_logged(make, rule, chosen, caplog):
    with caplog.at_level(logging.INFO, "hvdtrain"):
        train(make(), epochs=1, checkpoint_activations=rule)
    assert f"activations that backward computes again: {chosen}" in caplog.text


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (
            "blocks",
            "found no module that consists of others. Received: checkpoint_activations='blocks', for Sequential",
        ),
        (True, "found no module that consists of others. Received: checkpoint_activations=True, for Sequential"),
        (lambda module: False, "is True for no module. Received: checkpoint_activations=<lambda>, for Sequential"),
        ("block", "must be False, True, 'blocks', or a function (module) -> bool. Received: checkpoint_activations="),
        (2, "Received: checkpoint_activations=2"),
        (Block, "or a function (module) -> bool. Received: checkpoint_activations=<class"),
    ],
)
def test_a_rule_that_chooses_nothing_is_an_error(rule, message):
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    with pytest.raises(ValueError, match=r"(?s).*") as raised:
        train(net, checkpoint_activations=rule)
    assert message.split("<lambda>")[0] in str(raised.value)


def compiled(net):
    return torch.compile(net, backend="eager")


def compiled_block(net):
    net.blocks[1] = torch.compile(net.blocks[1], backend="eager")
    return net


def compiled_in_place(net):
    net.blocks[1].compile(backend="eager")
    return net


def checkpointing(net):
    net.gradient_checkpointing = True
    return net


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (compiled, "torch.compile decides by itself.*and the model, which is compiled"),
        (compiled_block, "torch.compile decides by itself.*and blocks.1, which is compiled"),
        (compiled_in_place, "torch.compile decides by itself.*and blocks.1, which is compiled"),
        (checkpointing, "checkpoints its activations by itself.*for Net, and the model, which does so"),
    ],
)
def test_what_would_be_computed_a_third_time_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        train(change(Net()), checkpoint_activations="blocks")


class Counting(nn.LayerNorm):
    def __init__(self):
        super().__init__(WIDTH)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return super().forward(x) * self.count


def test_a_module_that_changes_a_buffer_is_refused_by_name():
    with pytest.raises(
        ValueError, match=r"forward of blocks.0 changes a buffer: count of a Counting.*Leave this module"
    ):
        train(Net(Counting), checkpoint_activations="blocks")
    train(Net(Counting), checkpoint_activations=lambda module: isinstance(module, nn.Dropout))
