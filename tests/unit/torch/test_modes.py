"""Which modules train in train mode, which layers are trained, and what a resumed run makes of both."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import hvdtrain
from hvdtrain.callbacks import Callback
from hvdtrain.errors import CheckpointError

GENERATOR = np.random.default_rng(0)
X, Y = GENERATOR.normal(size=(22, 4)).astype(np.float32), GENERATOR.integers(0, 3, 22)
QUIET = {"progress": False, "run_dir": None, "batch_size": 4}


class Watched(nn.Module):
    """Passes its input on, and notes in which mode it was called."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append(self.training)
        return x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), Watched())
        self.head = nn.Sequential(Watched(), nn.Linear(8, 3))

    def forward(self, x):
        return self.head(self.backbone(x))

    @property
    def seen(self):
        """Return the modes of backbone and head in the steps: (True, True) where both trained."""
        return list(zip(self.backbone[-1].seen, self.head[0].seen, strict=True))


def modes(model):
    return [module.training for module in model.modules()]


class Call(Callback):
    """Calls a function in one hook; `when` is its name."""

    def __init__(self, when, function):
        setattr(self, when, lambda *args: function(*args))


def test_a_part_in_eval_mode_stays_so_in_training_and_after_validation(make):
    net = Net()
    net.backbone.eval()
    before, mean = modes(net), net.backbone[1].running_mean.clone()
    trainer = make(net)
    trainer.fit((X, Y), epochs=2, validation=(X, Y), validate_every=2, **QUIET)
    assert modes(net) == before
    assert torch.equal(net.backbone[1].running_mean, mean)
    assert (False, True) in net.seen
    assert (False, False) in net.seen  # in validation
    assert not any(backbone for backbone, _ in net.seen)
    said = "kept in eval mode: backbone (weights are trained there: 4); to train all in train mode, call model.train()"
    assert f"{said} before fit" in trainer.decisions


@pytest.mark.parametrize("mode", ["train", "part", "eval"])
def test_evaluate_and_predict_compute_in_eval_mode_and_give_each_module_its_own_back(make, mode):
    net = Net()
    {"train": net, "part": net.head, "eval": net}[mode].train(mode == "train")
    before, trainer = modes(net), make(net)
    for act in (lambda: trainer.evaluate((X, Y)), lambda: trainer.predict(X)):
        act()
        assert modes(net) == before
    assert set(net.seen) == {(False, False)}


def test_a_model_in_eval_mode_as_a_whole_is_trained_in_train_mode_and_that_is_said(make):
    """As pretrained models are loaded."""
    net, other = Net().eval(), Net()
    trainer = make(net)
    trainer.fit((X, Y), epochs=2, **QUIET)
    assert set(net.seen) == {(True, True)}
    assert any(
        line.startswith("the model was in eval mode, and is trained in train mode") for line in trainer.decisions
    )
    plain = make(other)
    plain.fit((X, Y), epochs=2, **QUIET)
    assert not any("eval mode" in line for line in plain.decisions)


@pytest.mark.parametrize("when", ["on_fit_begin", "on_epoch_begin", "on_validation_end", "on_step_begin"])
def test_a_mode_that_a_callback_sets_is_kept(make, when):
    net = Net()
    hook = Call(when, lambda *_: net.backbone.eval())
    make(net).fit((X, Y), epochs=3, validation=(X, Y), validate_every=3, callbacks=[hook], **QUIET)
    assert not net.backbone.training
    assert net.head.training
    assert net.seen[-20:].count((True, True)) == 0


def test_a_model_that_a_callback_leaves_in_eval_mode_is_trained_as_before(make):
    net = Net()
    net.backbone.eval()
    make(net).fit((X, Y), epochs=2, callbacks=[Call("on_step_end", lambda *_: net.eval())], **QUIET)
    assert set(net.seen) == {(False, True)}


def test_a_module_with_a_train_method_of_its_own_keeps_what_that_does(make):
    class NormEval(Net):
        def train(self, mode=True):
            super().train(mode)
            self.backbone.eval()
            return self

    net = NormEval().train()
    make(net).fit((X, Y), epochs=2, validation=(X, Y), **QUIET)
    assert {backbone for backbone, _ in net.seen} == {False}
    assert (False, True) in net.seen


@pytest.mark.parametrize("teacher", [False, True])
def test_a_model_of_several_is_kept_in_eval_mode_beside_others_that_train(make, teacher):
    models = {"student": Net().train(teacher), "teacher": Net().eval()}

    def step(models, batch):
        x, y = batch
        models["teacher"](x)
        yield "student", hvdtrain.Loss(nn.functional.cross_entropy(models["student"](x), y))

    trainer = make(
        models, optimizer={"student": torch.optim.SGD(models["student"].parameters(), lr=0.1)}, loss=None, step=step
    )
    trainer.fit((X, Y), epochs=1, **QUIET)
    assert set(models["student"].seen) == {(True, True)}
    assert set(models["teacher"].seen) == {(not teacher, not teacher)}  # all are in eval mode: see Modes


def test_steps_walk_over_no_modules(make):
    class Counting(Net):
        walks = 0

        def named_modules(self, *args, **options):
            self.walks += 1
            return super().named_modules(*args, **options)

    walks = []
    for samples in (8, 22):
        net = Counting()
        trainer = make(net)
        net.walks = 0
        trainer.fit((X[:samples], Y[:samples]), **QUIET)
        walks.append(net.walks)
    assert walks[0] == walks[1]


class StopError(Exception):
    pass


def stop_at(step):
    def look(trainer, _):
        if trainer.global_step == step:
            raise StopError

    return Call("on_step_end", look)


class Unfreeze(Callback):
    """Freezes the backbone and its statistics when fit begins, and gives it back to training once, after a step."""

    def __init__(self, net, at):
        self._net, self._at = net, at

    def on_fit_begin(self, trainer):
        self._net.backbone.requires_grad_(False).eval()

    def on_step_end(self, trainer, step):
        if trainer.global_step == self._at:
            self._net.backbone.requires_grad_(True).train()


@pytest.mark.parametrize("stop", [8, 11, 12, 14])  # within an epoch and at its end; 6 steps each
def test_layers_that_a_callback_has_unfrozen_are_trained_after_a_resume(make, tmp_path, stop):
    straight, first, resumed = Net(), Net(), Net()
    fit = {"epochs": 3, "validation": (X, Y), **QUIET}
    torch.manual_seed(0)
    make(straight).fit((X, Y), callbacks=[Unfreeze(straight, 7)], **fit)
    hooks = [hvdtrain.callbacks.Checkpoint(tmp_path, every_steps=1)]
    torch.manual_seed(0)
    with pytest.raises(StopError):
        make(first).fit((X, Y), callbacks=[Unfreeze(first, 7), *hooks, stop_at(stop)], **fit)
    trainer = make(resumed)
    trainer.fit((X, Y), callbacks=[Unfreeze(resumed, 7), *hooks], **fit)
    for name, value in straight.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    assert modes(resumed) == modes(straight)
    assert "requires_grad is as in the checkpoint: changed for 4 parameters, the first is backbone.0.weight" in (
        trainer.decisions
    )
    assert "train and eval modes are as in the checkpoint: changed for 5 of 9 modules" in trainer.decisions


def test_parameter_groups_that_a_callback_added_are_named_when_they_lack(make, tmp_path):
    net, again = Net(), Net()
    optimizer, other = (torch.optim.SGD(each.head.parameters(), lr=0.1) for each in (net, again))
    add = Call("on_epoch_end", lambda *_: optimizer.add_param_group({"params": net.backbone.parameters()}))
    make(net, optimizer=optimizer).fit((X, Y), epochs=1, callbacks=[add], checkpoint_dir=tmp_path, **QUIET)
    with pytest.raises(CheckpointError, match=r"2 parameter groups in the checkpoint and 1 here.*Add the groups"):
        make(again, optimizer=other).fit((X, Y), epochs=2, checkpoint_dir=tmp_path, **QUIET)
