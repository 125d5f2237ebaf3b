"""What a Trainer refuses, each with a message that shows what it was given."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import hvdtrain
from hvdtrain.callbacks import Callback, EarlyStopping
from hvdtrain.errors import HvdTrainError

X = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
Y = np.arange(12) % 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "fp8"}, "precision must be one of fp32, bf16, fp16. Received: precision='fp8'"),
        ({"compression": "zip"}, "compression='zip'"),
        ({"lr_scaling": "cubic"}, "lr_scaling='cubic'"),
        ({"accumulate": 0}, "accumulate=0"),
        ({"clip_norm": -1.0}, r"clip_norm=-1\.0"),
        ({"warmup_epochs": -1}, "warmup_epochs=-1"),
        ({"metrics": ["acuracy"]}, "'acuracy'"),
    ],
)
def test_an_option_outside_its_range_is_shown(make, options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


@pytest.mark.parametrize("model", [object(), "resnet", None])
def test_a_model_of_no_known_framework_is_shown(model):
    with pytest.raises(TypeError, match=r"a torch\.nn\.Module or a keras\.Model\. Received: "):
        hvdtrain.Trainer(model)


def test_a_model_without_trainable_parameters_is_refused(make, net):
    frozen = net().requires_grad_(False)
    for model in (torch.nn.Flatten(), frozen):
        with pytest.raises(ValueError, match="no trainable parameters"):
            make(model, optimizer=torch.optim.SGD(net().parameters(), lr=0.1))


def test_an_optimizer_over_other_parameters_is_refused(make, net):
    with pytest.raises(ValueError, match=r"model's own parameters.*group 0 with 4 others"):
        make(optimizer=torch.optim.SGD(net().parameters(), lr=0.1))


@pytest.mark.parametrize("wrong", [{"optimizer": "sgd"}, {"loss": "cross_entropy"}, {"loss": None}])
def test_an_optimizer_or_loss_that_is_not_torchs_is_shown(make, wrong):
    with pytest.raises(TypeError, match="Received: "):
        make(**wrong)


@pytest.mark.parametrize("batch_size", [0, -3, 2.5])
def test_a_batch_size_that_is_no_count_is_shown(make, batch_size):
    with pytest.raises(ValueError, match=f"batch_size={batch_size}"):
        make().fit((X, Y), batch_size=batch_size)


def test_class_weights_are_the_torch_losss_own(make):
    with pytest.raises(ValueError, match=r"CrossEntropyLoss\(weight=tensor\).*Received: class_weight={0: 2.0}"):
        make().fit((X, Y), class_weight={0: 2.0}, progress=False)


def test_no_data_is_refused(make):
    with pytest.raises(ValueError, match="no samples"):
        make().fit((X[:0], Y[:0]))


def test_labels_of_another_length_are_shown(make):
    with pytest.raises(ValueError, match="'inputs': 12, 'targets': 11"):
        make().fit((X, Y[:-1]))


@pytest.mark.parametrize(
    ("loss", "targets", "message"),
    [
        (torch.nn.CrossEntropyLoss(), Y[:, None], r"class indices of shape \(12,\).*targets \(12, 1\) on rank 0"),
        (torch.nn.CrossEntropyLoss(), Y + 1, r"Class indices must be in \[0, 3\). Received: 1 to 3"),
        (torch.nn.MSELoss(), X[:, 0], r"outputs' shape. Received: outputs \(12, 3\), targets \(12,\)"),
    ],
)
def test_labels_of_the_wrong_shape_are_shown_before_they_are_broadcast(make, loss, targets, message):
    with pytest.raises(ValueError, match=message):
        make(loss=loss).fit((X, targets), batch_size=12)


def test_warmup_over_data_of_unknown_length_is_refused(make):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(zip(X, Y, strict=True))

    with pytest.raises(ValueError, match="length is known"):
        make(warmup_epochs=1).fit(Stream())


def test_a_stream_that_can_be_iterated_once_is_an_error_in_its_second_epoch(make):
    class Once(torch.utils.data.IterableDataset):
        items = iter(list(zip(X, Y, strict=True)))

        def __iter__(self):
            return self.items

    with pytest.raises(ValueError, match=r"epoch 1.*iterated once per epoch"):
        make().fit(Once(), epochs=2, progress=False)


def test_predicting_from_a_stream_is_refused(make):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(X)

    with pytest.raises(TypeError, match="map-style"):
        make().predict(Stream())


def test_monitoring_an_unknown_metric_names_the_known_ones(make):
    with pytest.raises(ValueError, match=r"\['learning_rate', 'loss', 'samples_per_s', 'seconds'\].*'val_loss'"):
        make().fit((X, Y), callbacks=[EarlyStopping()], progress=False)


def test_something_that_is_no_callback_is_refused(make):
    with pytest.raises(TypeError, match="callback must be"):
        make().fit((X, Y), callbacks=[print])


def test_evaluating_within_an_epoch_is_refused_and_an_interrupted_epoch_leaves_nothing(make):
    class Peek(Callback):
        def on_step_end(self, trainer, step):
            trainer.evaluate((X, Y))

    trainer = make(metrics=["accuracy"])
    expected = trainer.evaluate((X, Y))
    with pytest.raises(HvdTrainError, match=r"middle of a training epoch.*on_epoch_end"):
        trainer.fit((X, Y), callbacks=[Peek()], batch_size=6, progress=False)
    trainer.model[0].weight.grad = None
    assert trainer.evaluate((X, Y)).keys() == expected.keys()
    history = trainer.fit((X[:6], Y[:6]), epochs=1, batch_size=6, progress=False)
    assert round(history["samples_per_s"][0] * history["seconds"][0]) == 6


def test_a_distributed_optimizer_is_refused(make, net, hvd):
    model = net()
    with pytest.raises(ValueError, match="must be the plain one"):
        make(model, optimizer=hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1)))


@pytest.mark.parametrize("as_class", [True, False])
def test_a_torch_scheduler_among_callbacks_is_told_to_be_a_schedule(make, net, as_class):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    kind = torch.optim.lr_scheduler.StepLR
    given, trainer = kind if as_class else kind(optimizer, 1), make(model, optimizer=optimizer)
    with pytest.raises(TypeError, match=r"Give hvdtrain.callbacks.Schedule\(StepLR\(...\)\), which steps it"):
        trainer.fit((X, Y), callbacks=[given])


@pytest.mark.parametrize(("sets", "name"), [([], "validation data holds"), ({"noisy": []}, "validation data 'noisy'")])
def test_an_empty_validation_set_is_named(make, sets, name):
    with pytest.raises(ValueError, match=name):
        make().fit((X, Y), validation=sets, run_dir=None, progress=False)
