"""The average of a model's weights: its numbers, where it is used, and what does not change it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import hvdtrain
from hvdtrain.callbacks import EMA, Callback, Checkpoint, EarlyStopping
from hvdtrain.distributed import world
from hvdtrain.errors import CheckpointError
from hvdtrain.torch.averaging import AveragedWeights

X = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
Y = np.arange(12) % 3
QUIET = {"batch_size": 2, "progress": False, "run_dir": None}


@pytest.fixture(autouse=True)
def solo():
    world.use(world.SoloWorld())
    yield
    world.use(None)


def make(dtype=torch.float32, **options):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return hvdtrain.Trainer(model, optimizer=optimizer, loss=torch.nn.CrossEntropyLoss(), **options)


class Weights(Callback):
    """The weights after each step."""

    def __init__(self):
        self.seen = []

    def on_fit_begin(self, trainer):
        self.seen.append(trainer.model.weight.detach().double())

    def on_step_end(self, trainer, step):
        self.seen.append(trainer.model.weight.detach().double())


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_moving_average_of_the_weights(every, dtype):
    trainer, ema, weights = make(dtype), EMA(0.9, every=every), Weights()
    trainer.fit((X.astype(np.float64), Y), epochs=2, callbacks=[weights, ema], **QUIET)
    first, *steps = weights.seen
    expected = first
    for each in steps[every - 1 :: every]:
        expected = 0.9**every * expected + (1 - 0.9**every) * each
    trained = trainer.model.weight.detach().clone()
    with ema.averaged():
        torch.testing.assert_close(trainer.model.weight.detach(), expected.to(dtype), atol=1e-6, rtol=0)
    assert torch.equal(trainer.model.weight, trained)
    assert not torch.equal(trained.double(), expected)


def test_validation_has_the_averages_and_training_the_weights():
    straight = make()
    straight.fit((X, Y), epochs=2, **QUIET)
    trainer, ema = make(), EMA(0.5, every=1)
    history = trainer.fit((X, Y), validation=(X, Y), epochs=2, callbacks=[ema], **QUIET)
    assert torch.equal(trainer.model.weight, straight.model.weight)
    with ema.averaged():
        assert trainer.evaluate((X, Y), batch_size=2)["loss"] == history["val_loss"][-1]
    assert trainer.evaluate((X, Y), batch_size=2)["loss"] != history["val_loss"][-1]


@pytest.mark.parametrize("ema_is_first", [True, False])
def test_the_best_weights_come_back_whichever_callback_is_first(ema_is_first):
    stop = EarlyStopping("val_loss", patience=0, mode="max", restore_best=True)  # the first validation is the best
    weights, ema = Weights(), EMA(0.5, every=1)
    pair = [ema, stop] if ema_is_first else [stop, ema]
    trainer = make()
    trainer.fit((X, Y), validation=(X, Y), validate_every=2, epochs=5, callbacks=[weights, *pair], **QUIET)
    assert torch.equal(trainer.model.weight.detach().double(), weights.seen[2])


class FailInValidation(Callback):
    def on_validation_begin(self, trainer):
        self.weight = trainer.model.weight.detach().clone()
        raise RuntimeError


def test_an_error_in_validation_leaves_the_weights_in_the_model():
    trainer, fails, weights = make(), FailInValidation(), Weights()
    with pytest.raises(RuntimeError):
        trainer.fit((X, Y), validation=(X, Y), callbacks=[weights, EMA(0.5, every=1), fails], **QUIET)
    assert torch.equal(trainer.model.weight.double(), weights.seen[-1])
    assert not torch.equal(fails.weight.double(), weights.seen[-1])


def test_a_step_that_is_skipped_changes_nothing():
    holed = X.copy()
    holed[4:6] = np.nan
    kept = np.r_[0:4, 6:12]

    def run(x, y):
        trainer, ema = make(nan_policy="skip"), EMA(0.9, every=2)
        rows = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
        trainer.fit(torch.utils.data.DataLoader(rows, batch_size=2), callbacks=[ema], **QUIET)
        return ema.state()

    ours, expected = run(holed, Y), run(X[kept], Y[kept])
    assert ours.keys() == expected.keys()
    for name in ours:
        np.testing.assert_array_equal(ours[name], expected[name])


def test_a_checkpoints_averages_are_loaded_into_a_model(tmp_path):
    trainer, ema = make(), EMA(0.9, every=1)
    trainer.fit((X, Y), callbacks=[ema, Checkpoint(tmp_path)], **QUIET)
    model = torch.nn.Linear(4, 3)
    EMA.load(tmp_path / "epoch-000001", model)
    with ema.averaged():
        for ours, theirs in zip(model.parameters(), trainer.model.parameters(), strict=True):
            assert torch.equal(ours, theirs)
    with pytest.raises(CheckpointError, match=r"the average of weight is \(3, 4\) in the checkpoint and \(2, 4\)"):
        EMA.load(tmp_path / "epoch-000001", torch.nn.Linear(4, 2))


def test_models_in_a_dict_are_averaged_under_their_names():
    models = {"g": torch.nn.Linear(1, 1), "d": torch.nn.Linear(1, 1)}
    averages = AveragedWeights(models)
    with torch.no_grad():
        models["d"].weight += 1.0
    averages.update(0.25)
    arrays = averages.arrays()
    assert list(arrays) == ["g.weight", "g.bias", "d.weight", "d.bias"]
    assert arrays["d.weight"].item() == pytest.approx(models["d"].weight.item() - 0.75)


def test_a_checkpoint_without_averages_is_named(tmp_path):
    make().fit((X, Y), checkpoint_dir=str(tmp_path), **QUIET)
    with pytest.raises(CheckpointError, match="epoch-000001 has no averages"):
        EMA.load(tmp_path / "epoch-000001", torch.nn.Linear(4, 3))


def test_a_keras_model_is_refused_with_keras_own_way():
    class Model:
        __module__ = "keras.models"

    class Context:
        model = Model()

    with pytest.raises(TypeError, match="use_ema=True"):
        EMA().on_fit_begin(Context())


@pytest.mark.parametrize("wrong", [{"decay": 1.0}, {"decay": -0.1}, {"every": 0}, {"every": 2.5}])
def test_an_option_out_of_range_is_shown(wrong):
    with pytest.raises(ValueError, match="Received: decay="):
        EMA(**wrong)
