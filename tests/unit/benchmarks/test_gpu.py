"""The GPU set's work before and after it measures, which takes no GPU."""

from __future__ import annotations

import pytest

from benchmarks import __main__ as command
from benchmarks import gpu, steps, targets
from benchmarks.groups import GroupError
from benchmarks.workloads import GPU, GPUS

torch = pytest.importorskip("torch")


@pytest.mark.parametrize(("memory_gib", "expected"), [(139.0, 128), (79.2, 128), (78.0, 128), (70.0, 64), (22.0, 32)])
def test_a_batch_is_halved_until_all_peers_fit_on_the_gpu_at_once(memory_gib: float, expected: int) -> None:
    assert gpu.batch_size(GPU[0], memory_gib) == expected


@pytest.mark.parametrize(
    ("precision", "memory_gib", "expected"), [("bf16", 79.2, 8), ("fp32", 79.2, 8), ("fp32", 40.0, 4)]
)
def test_fewer_peers_of_several_gpus_fit_with_whole_batches(precision: str, memory_gib: float, expected: int) -> None:
    workload = next(each for each in GPUS if each.name == f"gpus-gpt-{precision}")
    assert gpu.batch_size(workload, memory_gib, len(gpu.SEVERAL)) == expected


def test_ranks_of_several_gpus_that_hold_different_bits_are_a_failure() -> None:
    answers = [{"loss": 0.0, "digest": "a"}, {"loss": 0.0, "digest": "b"}]
    for peer in gpu.SEVERAL:
        with pytest.raises(GroupError, match="its ranks hold different weights"):
            steps.compare(peer, answers, None)
        assert steps.compare(peer, answers[:1] * 2, None)["ranks_equal"]


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("BENCH_GPU_TRIAL", raising=False)
    monkeypatch.setattr(gpu, "hardware", lambda: {"gpus": ["a GPU"] * 2})
    assert command.main(["--gpu", "--np", "4"]) == 1
    assert capsys.readouterr().err == "benchmarks: --gpu: 2 of 4 GPUs are here, so nothing was measured\n"


@pytest.mark.slow
@pytest.mark.tooling
@pytest.mark.parametrize("workload", [*GPU, *GPUS], ids=lambda each: each.name)
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


def test_a_result_of_several_gpus_is_held_against_ddp_on_as_many() -> None:
    times = {"ddp": 100.0, "hvdtrain": 103.0, "hvdtrain-async": 99.0}
    peers = {name: {"status": "ok", "block_ms": [time]} for name, time in times.items()}
    result = {"workload": "gpus-gpt-bf16", "ranks": 4, "machine": {"gpus": ["a GPU"] * 4}, "peers": peers}
    met = {each.text: each.met for each in targets.check({"gpus-gpt-bf16-4": result}) if each.measured}
    assert met == {
        "gpus-gpt-bf16, 4 GPUs: hvdtrain / DDP, step time": False,
        "gpus-gpt-bf16, 4 GPUs: hvdtrain-async / DDP, step time": True,
    }
