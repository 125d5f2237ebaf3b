"""Every peer trains on the same data, down to the layout in memory."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from benchmarks.torch_tasks import Task  # noqa: E402
from hvdtrain.data.reading import as_source  # noqa: E402
from hvdtrain.distributed.world import SoloWorld  # noqa: E402


@pytest.mark.parametrize("workload", ["lenet", "convnet"])
def test_the_trainers_batches_and_those_of_a_loop_have_one_memory_format(
    workload: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BENCH_WORKLOAD", workload)
    monkeypatch.setenv("BENCH_DATA_RANKS", "1")
    state = torch.get_rng_state()
    task = Task()
    torch.set_rng_state(state)
    source = as_source((task.inputs, task.targets), batch_size=4, world=SoloWorld())
    batch = torch.as_tensor(next(iter(source.epoch(0, shuffle=True))).inputs)
    looped = task.inputs[torch.arange(4)]
    formats = [task.model[0](images).stride() for images in (batch, looped)]
    assert formats[0] == formats[1]


@pytest.mark.slow
@pytest.mark.tooling
@pytest.mark.parametrize("workload", ["convnet", "transformer"])
def test_the_check_takes_no_more_samples_at_once_than_a_step(workload: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_WORKLOAD", workload)
    monkeypatch.setenv("BENCH_DATA_RANKS", "1")
    state = torch.get_rng_state()
    task = Task()
    torch.set_rng_state(state)
    taken: list[int] = []
    task.model.register_forward_pre_hook(lambda _, inputs: taken.append(len(inputs[0])))
    loss = task._check_loss()
    assert max(taken) <= task.workload.batch_size
    with torch.no_grad():
        whole = task.loss(task.model(task.inputs[:64]), task.targets[:64])
    assert loss == pytest.approx(float(whole), rel=1e-5)
