"""`make gpus`'s script: how many ranks there are, and one file that holds what each step found."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def gpus(load_script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.delenv("HVDTRAIN_TEST_GPU", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return load_script("../scripts/gpus.py")


def run(gpus: ModuleType, monkeypatch: pytest.MonkeyPatch, out: Path, *steps: str) -> tuple[int, dict[str, Any]]:
    monkeypatch.setattr(sys, "argv", ["gpus.py", "--out", str(out), *steps])
    status = gpus.main()
    return status, json.loads(out.read_text())["steps"]


@pytest.mark.parametrize(
    ("there", "sizes"), [(2, [2]), (3, [2, 3]), (4, [2, 4]), (6, [2, 4, 6]), (8, [2, 4, 8]), (16, [2, 4, 8])]
)
def test_comparisons_are_at_2_4_and_8_ranks_as_far_as_there_are_gpus(
    gpus: ModuleType, nvidia_smi: Callable[..., None], there: int, sizes: list[int]
) -> None:
    nvidia_smi(there)
    assert gpus.sizes() == sizes
    first, *_, last = gpus.comparisons()
    assert (first, last) == ((sizes[-1], "gpus-resnet50-bf16"), (2, "gpus-gpt-fp32"))


def test_one_gpu_is_sent_to_make_gpu(
    gpus: ModuleType,
    nvidia_smi: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    nvidia_smi(4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setattr(sys, "argv", ["gpus.py"])
    assert gpus.main() == 1
    assert capsys.readouterr().err == "gpus: 1 GPU is visible, and ranks want one each: `make gpu` is for one GPU\n"


@pytest.fixture
def four(gpus: ModuleType, nvidia_smi: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A machine with four GPUs, on which nothing is started; the commands that would be."""
    nvidia_smi(4)
    started: list[list[str]] = []
    monkeypatch.setattr(gpus.gpu, "build", lambda *, through_host: None)
    monkeypatch.setattr(gpus, "start", lambda command, **_: started.append(command) or '{"failures": []}')
    monkeypatch.setattr(gpus, "figures", lambda path: {"hvdtrain": {"met": True}})
    return started


def test_each_step_starts_its_commands_and_is_written_down(
    gpus: ModuleType, four: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    status, steps = run(gpus, monkeypatch, tmp_path / "gpus.json")
    assert (status, list(steps), {each["ok"] for each in steps.values()}) == (0, list(gpus.STEPS), {True})
    proof, *others = four
    assert proof[-2:] == ["4", "cuda"]
    ranks = [each for each in others if "tests/ranks/run.py" in each]
    assert [each[each.index("--np") + 1] for each in ranks] == ["2", "3"]
    compared = [(each[each.index("--np") + 1], each[each.index("--workload") + 1]) for each in others[len(ranks) :]]
    assert compared == [(size, workload) for size in ("4", "2") for workload in gpus.WORKLOADS]
    assert len([name for name in steps["compare"] if name.startswith("gpus-")]) == 12


def test_a_step_that_fails_is_written_down_and_the_next_ones_are_taken(
    gpus: ModuleType, four: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(command: list[str], **_: object) -> str:
        four.append(command)
        raise gpus.StepError("exit status 1\nwhat it said last")

    monkeypatch.setattr(gpus, "start", fail)
    status, steps = run(gpus, monkeypatch, tmp_path / "gpus.json")
    assert status == 1
    assert [steps[step]["ok"] for step in gpus.STEPS] == [True, False, False, False]
    assert steps["prove"]["error"] == "exit status 1\nwhat it said last"
    assert steps["compare"]["gpus-gpt-fp32-2"].startswith("FAILED: exit status 1")


def test_without_a_build_nothing_else_is_tried(
    gpus: ModuleType, four: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*, through_host: bool) -> None:
        raise gpus.gpu.GpuError("no nvcc")

    def no_horovod(command: list[str], **_: object) -> str:
        four.append(command)
        raise gpus.StepError("No module named horovod")

    monkeypatch.setattr(gpus.gpu, "build", fail)
    monkeypatch.setattr(gpus, "start", no_horovod)
    status, steps = run(gpus, monkeypatch, tmp_path / "gpus.json")
    assert (status, list(steps), steps["build"]["error"]) == (1, ["build"], "no nvcc")
    assert len(four) == 1


def test_a_build_that_trains_wrong_is_looked_into_by_the_other_steps(
    gpus: ModuleType, four: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*, through_host: bool) -> None:
        raise gpus.gpu.GpuError("exit status 1: hvdtrain build")

    def start(command: list[str], **_: object) -> str:
        return '{"failures": ["blocking, plain: 0.bias of rank 1 differs"]}'

    monkeypatch.setattr(gpus.gpu, "build", fail)
    monkeypatch.setattr(gpus, "start", start)
    status, steps = run(gpus, monkeypatch, tmp_path / "gpus.json")
    assert (status, list(steps)) == (1, list(gpus.STEPS))
    assert steps["build"]["error"] == "built, but not proven: exit status 1: hvdtrain build"
    assert steps["prove"]["error"] == "blocking, plain: 0.bias of rank 1 differs"
    assert steps["prove"]["proof"]["failures"] == ["blocking, plain: 0.bias of rank 1 differs"]


def test_what_no_time_is_left_for_is_called_not_measured(
    gpus: ModuleType, four: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpus, "BEGUN", -gpus.LIMIT_S)
    status, steps = run(gpus, monkeypatch, tmp_path / "gpus.json", "compare")
    assert (status, four) == (0, [])
    assert steps["compare"]["gpus-resnet50-bf16-4"] == "not measured: no time left"


def test_a_command_that_hangs_is_ended_and_what_it_said_is_kept(
    gpus: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "environment", dict)
    with pytest.raises(gpus.StepError, match=r"no end within 1 s\nhello"):
        gpus.start([sys.executable, "-c", "import time; print('hello', flush=True); time.sleep(60)"], limit_s=1)


def test_workloads_are_those_of_the_benchmarks(gpus: ModuleType) -> None:
    from benchmarks.workloads import GPUS

    assert sorted(gpus.WORKLOADS) == sorted(each.name for each in GPUS)
