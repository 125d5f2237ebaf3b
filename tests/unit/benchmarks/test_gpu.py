"""The GPU set's work before and after it measures, which takes no GPU."""

from __future__ import annotations

import pytest

from benchmarks import gpu, targets
from benchmarks.workloads import GPU

torch = pytest.importorskip("torch")


@pytest.mark.parametrize(("memory_gib", "expected"), [(139.0, 128), (79.2, 128), (78.0, 128), (70.0, 64), (22.0, 32)])
def test_a_batch_is_halved_until_all_peers_fit_on_the_gpu_at_once(memory_gib: float, expected: int) -> None:
    assert gpu.batch_size(GPU[0], memory_gib) == expected


@pytest.mark.slow
@pytest.mark.tooling
@pytest.mark.parametrize("workload", GPU, ids=lambda each: each.name)
def test_both_models_take_a_step(workload, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import gpu_tasks

    monkeypatch.setattr(gpu_tasks, "_TRIAL", True)
    for name, value in {"BENCH_WORKLOAD": workload.name, "BENCH_DATA_RANKS": "1", "BENCH_GPU_BATCH": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    state = torch.get_rng_state()
    task = gpu_tasks.GpuTask()
    torch.set_rng_state(state)
    task.loss(task.model(task.inputs[:2]), task.targets[:2]).backward()
    assert all(parameter.grad is not None for parameter in task.model.parameters())


def test_a_gpu_result_is_held_against_plain_torch_and_ddp() -> None:
    times = {"single": 100.0, "ddp": 102.0, "trainer": 101.0, "hvdtrain": 103.0}
    peers = {name: {"status": "ok", "block_ms": [time]} for name, time in times.items()}
    result = {"workload": "gpu-resnet50", "ranks": 1, "machine": {"gpus": ["a GPU"]}, "peers": peers}
    assert all(each.measured is None for each in targets.check({"a trial": {**result, "machine": {"gpus": []}}}))
    met = {each.text.partition(": ")[2]: each.met for each in targets.check({"gpu-resnet50": result}) if each.measured}
    assert met == {
        "trainer / plain PyTorch, step time": True,
        "trainer / DDP, step time": True,
        "hvdtrain / plain PyTorch, step time": False,
        "hvdtrain / DDP, step time": False,
    }
