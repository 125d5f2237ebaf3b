"""Batches that are copied to a device ahead: the real thread, and a device on the host whose copies start late.

No GPU has run this; tests/gpu/test_prefetch.py is for one.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import traceback
import tracemalloc

import numpy as np
import pytest
import torch
from late_device import LateDevice, prefetch_threads, until, use
from stopping import StopAt, StoppedError
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import hvdtrain
from hvdtrain.callbacks import Callback, Checkpoint
from hvdtrain.data.prefetch import Prefetch
from hvdtrain.data.sources import ArraySource
from hvdtrain.distributed.data_ranks import DataRanks
from hvdtrain.distributed.world import SoloWorld
from hvdtrain.torch.ops.device_copies import CudaDevice, DeviceCopies
from hvdtrain.torch.steps.losses import as_tensor

pytestmark = pytest.mark.usefixtures("alone")

SAMPLES, BATCH, EPOCHS = 45, 4, 2
_GENERATOR = np.random.default_rng(0)
X, Y = _GENERATOR.normal(size=(SAMPLES, 6)).astype(np.float32), _GENERATOR.integers(0, 3, SAMPLES)
LATE = pytest.mark.parametrize("is_late", [True, False], ids=["late", "at once"])


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return X[index] + torch.rand(()).item(), Y[index]  # draws where the model's dropout draws


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(X, Y, strict=True))


DATA = {
    "arrays": lambda: (X, Y),
    "tensors": lambda: (torch.from_numpy(X), torch.from_numpy(Y)),
    "float64": lambda: (X.astype(np.float64), Y),
    "strided": lambda: (np.asarray(X.T, order="C").T, Y[:, None][:, 0]),
    "own part": lambda: hvdtrain.Sharded((X, Y)),
    "loader": lambda: DataLoader(TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)), batch_size=BATCH),
    "dataset": Rows,
    "stream": Stream,
}


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3))


def trainer_of(net, **options):
    if "step" not in options:
        options.setdefault("loss", nn.CrossEntropyLoss())
        options.setdefault("metrics", ["accuracy"])
    optimizer = options.pop("optimizer", None) or torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return hvdtrain.Trainer(net, optimizer=optimizer, seed=3, **options)


def train(data=None, *, callbacks=(), checkpoint_dir=None, epochs=EPOCHS, validation=None, **options):
    net = model()
    trainer = trainer_of(net, **options)
    torch.manual_seed(7)
    history = trainer.fit(
        (X, Y) if data is None else data, epochs=epochs, batch_size=BATCH, callbacks=callbacks, validation=validation,
        checkpoint_dir=checkpoint_dir, progress=False, run_dir=None,
    )  # fmt: skip
    return net.state_dict(), {name: history[name] for name in ("loss", "val_loss") if name in history}


def assert_same(found, expected):
    assert found[1] == expected[1]
    for name, value in expected[0].items():
        assert torch.equal(found[0][name], value), name


def named_step(net, batch):
    batch["x"] += 1.0  # a step may overwrite its batch
    return hvdtrain.Loss(nn.functional.cross_entropy(net(batch["x"]), batch["y"]))


OPTIONS = {
    "plain": {},
    "accumulate": {"accumulate": 3},
    "micro-batches": {"micro_batch": 3},
    "micro-batches, auto": {"micro_batch": "auto"},
    "nan_policy": {"nan_policy": "skip"},
    "weighted": {"loss": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5]))},
    "cutoff": {"cutoff": 0.5, "accumulate": 2},
}


@LATE
@pytest.mark.parametrize("kind", DATA)
def test_every_kind_of_data_trains_the_same_bits(monkeypatch, kind, is_late):
    expected = train(DATA[kind](), validation=DATA[kind]())
    use(monkeypatch, device := LateDevice(is_late=is_late))
    assert_same(train(DATA[kind](), validation=DATA[kind]()), expected)
    assert device.log
    assert not prefetch_threads()
    assert device.threads == {"MainThread"}


@LATE
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_trains_the_same_bits(monkeypatch, name, is_late):
    expected = train(**OPTIONS[name])
    use(monkeypatch, device := LateDevice(is_late=is_late))
    assert_same(train(**OPTIONS[name]), expected)
    assert device.log
    assert not prefetch_threads()


@LATE
def test_own_steps_of_named_arrays_train_the_same_bits(monkeypatch, is_late):
    data = {"x": X, "y": Y}
    expected = train(data, step=named_step)
    use(monkeypatch, LateDevice(is_late=is_late))
    assert_same(train(data, step=named_step), expected)


@LATE
def test_a_step_that_computes_its_batch_again_trains_the_same_bits(monkeypatch, is_late):
    def with_lbfgs():
        torch.manual_seed(0)
        net = nn.Linear(6, 3)
        trainer = trainer_of(net, optimizer=torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3), metrics=[])
        history = trainer.fit((X, Y), epochs=1, batch_size=BATCH, progress=False, run_dir=None)
        return net.state_dict(), {"loss": history["loss"]}

    expected = with_lbfgs()
    use(monkeypatch, LateDevice(is_late=is_late))
    assert_same(with_lbfgs(), expected)


@LATE
def test_predictions_and_evaluations_are_the_same(monkeypatch, is_late):
    def run():
        trainer = trainer_of(model())
        return trainer.predict(X, batch_size=BATCH), trainer.evaluate((X, Y), batch_size=BATCH)

    expected = run()
    use(monkeypatch, LateDevice(is_late=is_late))
    found = run()
    assert np.array_equal(found[0], expected[0])
    assert found[1] == expected[1]
    assert not prefetch_threads()


@pytest.mark.parametrize("step", [1, 7, 13])
@pytest.mark.parametrize("kind", ["arrays", "dataset", "loader"])
def test_a_run_that_was_stopped_resumes_as_if_nothing_was_read_ahead(monkeypatch, tmp_path, kind, step):
    expected = train(DATA[kind]())
    use(monkeypatch, LateDevice(is_late=True))
    files = tmp_path / "run"
    with pytest.raises(StoppedError):
        train(DATA[kind](), callbacks=[Checkpoint(str(files), every_steps=1, background=False), StopAt(step)])
    assert not prefetch_threads()
    found = train(DATA[kind](), checkpoint_dir=str(files))
    assert_same((found[0], {"loss": found[1]["loss"][-1:]}), (expected[0], {"loss": expected[1]["loss"][-1:]}))


class Ends(Callback):
    """Ends the run after so many steps, by `how`, and counts its steps."""

    def __init__(self, how="", at=99):
        self.how, self.at, self.steps = how, at, 0

    def on_step_end(self, trainer, step):
        self.steps += 1
        assert len(prefetch_threads()) == 1
        if self.steps == self.at and self.how == "stop":
            trainer.stop(within_epoch=True)
        if self.steps == self.at and self.how == "error":
            raise KeyError("of a callback")
        if self.steps == self.at and self.how == "exit":
            sys.exit(75)


@pytest.mark.parametrize(("how", "error"), [("stop", None), ("error", KeyError), ("exit", SystemExit)])
def test_the_thread_ends_with_the_run_however_that_ends(monkeypatch, how, error):
    use(monkeypatch, LateDevice(is_late=True))
    with pytest.raises(error) if error else contextlib.nullcontext():
        train(callbacks=[ends := Ends(how, 4)])
    assert ends.steps == 4
    assert not prefetch_threads()


def test_an_error_of_the_gathering_comes_at_the_step_of_its_batch(monkeypatch):
    fill, calls = DeviceCopies.fill, itertools.count()

    def failing(copies, place, array, rows):
        if next(calls) == 2 * 4 + 1:  # the targets of the fifth batch
            raise OSError("cannot be read")
        fill(copies, place, array, rows)

    use(monkeypatch, LateDevice(is_late=True))
    monkeypatch.setattr(DeviceCopies, "fill", failing)
    with pytest.raises(OSError, match="cannot be read") as caught:
        train(callbacks=[ends := Ends()])
    assert ends.steps == 4
    assert "in failing" in "".join(traceback.format_tb(caught.value.__traceback__))
    assert not prefetch_threads()


class Watch(Callback):
    """Waits at each step's end until `ahead` batches are gathered; notes the copies that have begun, and are used."""

    def __init__(self, device, monkeypatch, ahead):
        self.device, self.ahead, self.filled, self.begun, self.used = device, ahead, 0, [], []
        fill = DeviceCopies.fill

        def counted(copies, place, array, rows):
            fill(copies, place, array, rows)
            self.filled += 1

        monkeypatch.setattr(DeviceCopies, "fill", counted)

    def on_step_begin(self, trainer, step):
        kinds = [kind for kind, _ in self.device.log]
        self.begun.append(kinds.count("begin") // 2)  # inputs and targets
        self.used.append(kinds.count("expect") // 2)

    def on_step_end(self, trainer, step):
        until(lambda: self.filled == 2 * min(12, step + 1 + self.ahead))


def test_a_batch_is_copied_while_the_step_before_it_computes(monkeypatch):
    use(monkeypatch, device := LateDevice(is_late=True))
    train(epochs=1, callbacks=[watch := Watch(device, monkeypatch, 2)])
    assert watch.used == list(range(12))
    assert watch.begun[1:] == [min(12, step + 2) for step in range(1, 12)]


def test_a_batch_that_is_cut_into_parts_is_not_copied_ahead(monkeypatch):
    use(monkeypatch, device := LateDevice(is_late=True))
    train(epochs=1, callbacks=[watch := Watch(device, monkeypatch, 1)], micro_batch=4)
    assert watch.begun == watch.used == list(range(12))


def test_a_device_without_room_for_a_further_batch_gets_none(monkeypatch):
    expected = train(epochs=1)
    use(monkeypatch, device := LateDevice(is_late=True, room=2))
    found = train(epochs=1, callbacks=[watch := Watch(device, monkeypatch, 2)])
    assert_same(found, expected)
    assert watch.begun[-5:] == watch.used[-5:]


def test_another_error_of_a_copy_is_raised(monkeypatch):
    use(monkeypatch, device := LateDevice(is_late=True))
    monkeypatch.setattr(device, "begin", lambda tensor: (_ for _ in ()).throw(RuntimeError("an illegal address")))
    with pytest.raises(RuntimeError, match="illegal address"):
        train()
    assert not prefetch_threads()


def test_memory_is_used_again_but_not_that_of_a_batch_which_is_held(monkeypatch):
    device = LateDevice(is_late=True)
    how = {"batch_size": BATCH, "ranks": DataRanks(SoloWorld()), "seed": 0}
    copies = DeviceCopies(device)
    source = ArraySource([X, Y], **how, prefetch=Prefetch(copies, copies=True))
    expected = list(ArraySource([X, Y], **how).epoch(0, shuffle=True))
    held = list(source.epoch(0, shuffle=True))
    on_device = [copies.to_device(batch.inputs) for batch in held]
    for batch, given, plain in zip(held, on_device, expected, strict=True):
        assert np.array_equal(batch.inputs, plain.inputs)
        assert np.array_equal(given, plain.inputs)
        assert np.array_equal(batch.targets, plain.targets)
    del held, batch
    device.made = device.reused = 0
    for _ in range(5):
        for batch in source.epoch(0, shuffle=True):
            copies.to_device(batch.inputs)
            copies.to_device(batch.targets)
    assert not device.made
    assert device.reused


def test_a_tensor_that_was_used_is_copied_again():
    copies = DeviceCopies(LateDevice(is_late=True))
    place = copies.place(X, 2)
    copies.fill(place, X, np.arange(2))
    copies.copy_ahead([place])
    first = copies.to_device(place)
    assert np.array_equal(first, X[:2])
    first += 1
    assert np.array_equal(copies.to_device(place), X[:2])


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "bool", "complex64", "float16", ">f4", "<U2", "f16"])
@pytest.mark.parametrize("wanted", [torch.float32, torch.float64, torch.bfloat16])
def test_gathered_rows_are_those_that_a_step_would_get(dtype, wanted):
    array = (X * 3).astype("f8").astype(dtype)
    rows = np.array([7, 0, 7, 30])
    copies = DeviceCopies(LateDevice(is_late=False), wanted)
    place = copies.place(array, len(rows))
    copies.fill(place, array, rows)
    if dtype in (">f4", "<U2", "f16"):
        assert isinstance(place, np.ndarray)
        assert np.array_equal(place, array[rows])
        return
    expected = as_tensor(array[rows], torch.device("cpu"), wanted)
    assert place.dtype == expected.dtype
    assert torch.equal(place, expected)


@pytest.mark.parametrize("layout", ["contiguous", "strided", "cast"])
def test_gathering_copies_no_more_than_its_rows(layout):
    array = np.zeros((64, 500_000), np.float64 if layout == "cast" else np.float32)
    array = array.T if layout == "strided" else array.reshape(500_000, 64)
    copies = DeviceCopies(LateDevice(is_late=False))
    place = copies.place(array, 10)
    tracemalloc.start()
    copies.fill(place, array, np.arange(10))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


def test_an_error_within_an_evaluation_ends_the_thread(monkeypatch):
    use(monkeypatch, LateDevice(is_late=True))
    trainer = trainer_of(model())
    monkeypatch.setattr(trainer._adapter, "eval_step", lambda batch: (_ for _ in ()).throw(ValueError("failed")))
    monkeypatch.setattr(trainer._adapter, "predict_step", trainer._adapter.eval_step)
    for run in (trainer.evaluate, trainer.predict):
        with pytest.raises(ValueError, match="failed") as caught:
            run((X, Y), batch_size=BATCH)
        assert not prefetch_threads()
        assert caught.value.__traceback__ is not None  # whose frames hold the batches


class Calls:
    """The functions of torch.cuda that a copy calls, and a tensor; each call is noted."""

    def __init__(self, monkeypatch):
        self.made, calls = [], self

        class Stream:
            def __init__(self, device):
                self.name = "copies" if isinstance(device, torch.device) else device

            def record_event(self):
                calls.made.append(f"event in {self.name}")
                return f"event in {self.name}"

            def wait_event(self, event):
                calls.made.append(f"{self.name} waits for {event}")

        @contextlib.contextmanager
        def on(stream):
            calls.made.append(f"on {stream.name}")
            yield
            calls.made.append(f"no longer on {stream.name}")

        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "stream", on)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("compute"))

    def to(self, device, non_blocking):
        self.made.append(f"to {device}, non_blocking={non_blocking}")
        return self

    def record_stream(self, stream):
        self.made.append(f"memory belongs to {stream.name}, too")


def test_copies_have_a_stream_for_which_the_current_one_waits(monkeypatch):
    calls = Calls(monkeypatch)
    device = CudaDevice(torch.device("cuda:1"))
    device.expect(device.begin(calls))
    begun = ["on copies", "to cuda:1, non_blocking=True", "event in copies", "no longer on copies"]
    assert calls.made == [*begun, "compute waits for event in copies", "memory belongs to compute, too"]
