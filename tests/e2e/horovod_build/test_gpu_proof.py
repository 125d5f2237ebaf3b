"""The proof that a host's GPUs train right, on CPUs: it holds, and with a defect it names what differed.

Only the device is another one: launches, trainings, the death of a rank and comparisons are those of GPUs, which no GPU
has run.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.horovod_build import gpu_proof, gpu_record
from hvdtrain.horovod_build.gpu_proof import ELASTIC, PROGRAM

DEFECTIVE = str(Path(__file__).with_name("gpu_proof_with_defect.py"))
CASES = ("plain", "buckets", "fp16", "bf16", "SyncBatchNorm")


def tried(path: str, *program: str, device: str = "cpu", ranks: int = 2) -> list[str]:
    return gpu_proof.try_path(path, ranks=ranks, device=device, program=program or PROGRAM, timeout_s=100)


@pytest.mark.timeout(300)
def test_ranks_train_one_processs_weights_on_each_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proof = gpu_proof.prove(ranks=3, device="cpu", timeout_s=100)
    assert proof.failures == ()
    assert str(proof).startswith("equal bits on all ranks and one process's weights, blocking, asynchronous, elastic")
    monkeypatch.setenv("HVDTRAIN_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match="cpu"):
        gpu_record.keep(proof)
    assert not gpu_record.answer().holds


def test_an_average_that_is_a_sum_is_found_in_each_training() -> None:
    found = tried("blocking", DEFECTIVE, "a sum")
    assert [each.partition(":")[0] for each in found] == [f"blocking, {case}" for case in CASES]
    assert all("from one process's, and" in each for each in found)


def test_a_rank_that_steps_with_its_own_gradients_is_named() -> None:
    found = tried("asynchronous", DEFECTIVE, "ignores")
    assert [each.partition(":")[0] for each in found] == [f"asynchronous, {case}" for case in CASES]
    assert all("of rank 1 differs from rank 0's in" in each for each in found)


def test_a_rank_that_skips_its_reductions_is_an_end_with_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVDTRAIN_STALL_S", "8")
    (said,) = tried("blocking", DEFECTIVE, "skips")
    assert said.startswith("blocking, ")
    assert "rank 0" in said


def test_an_error_of_a_rank_is_its_own() -> None:
    (said,) = tried("blocking", DEFECTIVE, "raises")
    assert said == "blocking, rank 1: TypeError: 'NoneType' object is not callable"


@pytest.mark.timeout(200)
def test_a_job_that_does_not_go_back_to_its_last_commit_is_found() -> None:
    (said,) = tried(ELASTIC, DEFECTIVE, "does not go back")
    assert said.startswith("elastic, a rank that dies: ")
    assert "from one process's" in said


def test_ranks_that_see_no_gpu_prove_nothing_about_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = tried("blocking", device="cuda")
    assert found == [f"blocking, rank {rank} computed on cpu, not on cuda" for rank in range(2)]


def test_one_rank_proves_nothing() -> None:
    with pytest.raises(ValueError, match="one rank reduces nothing"):
        gpu_proof.prove(ranks=1, device="cpu")
