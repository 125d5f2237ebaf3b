"""Batches that a thread gathers, and that are copied to the GPU on a stream of their own."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

import hvdtrain
from hvdtrain.callbacks import Callback
from hvdtrain.torch.ops import device_copies
from hvdtrain.torch.ops.device_copies import CudaDevice, DeviceCopies

SAMPLES, BATCH = 520, 32
_GENERATOR = np.random.default_rng(0)
X = _GENERATOR.normal(size=(SAMPLES, 3, 64, 64)).astype(np.float32)
Y = _GENERATOR.integers(0, 5, SAMPLES)
SLEEP = 20_000_000  # cycles: some ten milliseconds


def model():
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(3 * 64 * 64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 5)
    )


class Behind(Callback):
    """Keeps the stream that computes behind the host, and so behind the copies."""

    def on_step_begin(self, trainer, step):
        if trainer.world.device.startswith("cuda"):
            torch.cuda._sleep(SLEEP)


def train(data, **options):
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    trainer = hvdtrain.Trainer(net, optimizer=optimizer, loss=torch.nn.CrossEntropyLoss(), seed=3, **options)
    history = trainer.fit(
        data, epochs=2, batch_size=BATCH, validation=data, callbacks=[Behind()], progress=False, run_dir=None
    )
    return {name: value.cpu() for name, value in net.state_dict().items()}, history["loss"], history["val_loss"]


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return X[index], Y[index]


DATA = {
    "arrays": lambda: (X, Y),
    "float64": lambda: (X.astype(np.float64), Y),
    "dataset": Rows,
    "loader": lambda: torch.utils.data.DataLoader(Rows(), batch_size=BATCH, shuffle=True),
    "pinning loader": lambda: torch.utils.data.DataLoader(
        Rows(), batch_size=BATCH, shuffle=True, pin_memory=torch.cuda.is_available()
    ),
}


@pytest.mark.parametrize("options", [{}, {"accumulate": 3}, {"micro_batch": 8}], ids=str)
@pytest.mark.parametrize("kind", DATA)
@pytest.mark.usefixtures("world")
def test_weights_are_those_of_copies_for_which_the_host_waits(monkeypatch, kind, options):
    found = train(DATA[kind](), **options)
    monkeypatch.setattr(device_copies, "of", lambda device, dtype=None: None)
    expected = train(DATA[kind](), **options)
    assert found[1:] == expected[1:]
    for name, value in expected[0].items():
        assert torch.equal(found[0][name], value), name
    assert not [each for each in threading.enumerate() if each.name.startswith("hvdtrain-prefetch")]


@pytest.mark.cuda_only
def test_a_copy_does_not_wait_for_what_is_computed(device):
    copies = CudaDevice(torch.device(device))
    source = copies.pinned((64, 3, 64, 64), torch.float32).fill_(2.0)
    copies.begin(source).done.synchronize()  # allocates
    torch.cuda._sleep(50 * SLEEP)
    slept = torch.cuda.Event()
    slept.record()
    copy = copies.begin(source)
    copy.done.synchronize()
    assert not slept.query()
    copies.expect(copy)
    assert float(copy.tensor.sum()) == 2.0 * source.numel()


@pytest.mark.cuda_only
def test_memory_of_a_batch_is_not_used_again_while_the_gpu_reads_it(device):
    copies = DeviceCopies(CudaDevice(torch.device(device)))
    sums = []
    for number in range(20):
        place = copies.place(X, BATCH)
        place.fill_(float(number))
        copies.copy_ahead([place])
        batch = copies.to_device(place)
        del place
        torch.cuda._sleep(SLEEP)
        sums.append(batch.mean())
        del batch
    assert [float(each) for each in sums] == [float(number) for number in range(20)]


@pytest.mark.cuda_only
@pytest.mark.usefixtures("world")
def test_a_graph_is_captured_while_the_thread_gathers(device, monkeypatch):
    fill = DeviceCopies.fill
    gathering = threading.Event()

    def slowly(copies, place, array, rows):
        gathering.set()
        time.sleep(0.02)
        fill(copies, place, array, rows)

    class Capture(Callback):
        def on_step_begin(self, trainer, step):
            gathering.clear()
            value = torch.ones(4, device=device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):  # with CUDA's default, calls of other threads would end the capture
                doubled = value * 2
                gathering.wait(0.5)
                time.sleep(0.05)
            graph.replay()
            assert doubled.tolist() == [2.0] * 4

    monkeypatch.setattr(DeviceCopies, "fill", slowly)
    net = model()
    trainer = hvdtrain.Trainer(
        net, optimizer=torch.optim.SGD(net.parameters(), lr=0.01), loss=torch.nn.CrossEntropyLoss(), seed=3
    )
    trainer.fit((X, Y), steps=4, batch_size=BATCH, callbacks=[Capture()], progress=False, run_dir=None)
