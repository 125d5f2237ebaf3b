"""The host runs ahead of its GPU only if the user requests that, or a proof holds on every host of the job."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from hvdtrain.distributed import devices, gpu_path, launch_environment
from hvdtrain.distributed.gpu_path import Choice
from hvdtrain.errors import HorovodMismatchError
from hvdtrain.horovod_build import gpu_record, installed

PROVEN, NOT_PROVEN = (True, "proven here on 2026-11-28"), (False, "no proof for this host's GPUs")


@pytest.fixture(autouse=True)
def nothing_decided(monkeypatch):
    for name in (gpu_path.GPU_ASYNC, gpu_path.ASYNC_COMPLETION, "HOROVOD_ELASTIC"):
        monkeypatch.setenv(name, "")  # so that it is undone afterwards
        monkeypatch.delenv(name)
    monkeypatch.setattr(gpu_path, "_is_async", None)
    monkeypatch.setattr(gpu_record, "answer", lambda: gpu_record.Answer(*PROVEN))


def horovod(monkeypatch, *, has_function=True):
    """Return a module with Horovod's library, which notes what it was told."""
    told = []
    library = SimpleNamespace(**({"horovod_set_async_completion": told.append} if has_function else {}))
    monkeypatch.setitem(sys.modules, "fake.mpi_ops", SimpleNamespace(_basics=SimpleNamespace(MPI_LIB_CTYPES=library)))
    return SimpleNamespace(__name__="fake"), told


@pytest.mark.parametrize("answer", [PROVEN, NOT_PROVEN])
def test_the_proof_of_the_host_decides(answer, monkeypatch):
    monkeypatch.setattr(gpu_record, "answer", lambda: gpu_record.Answer(*answer))
    assert gpu_path.own_choice(has_gpu=True)[:2] == answer


@pytest.mark.parametrize("answer", [PROVEN, NOT_PROVEN])
@pytest.mark.parametrize("asked", ["0", "1"])
def test_the_users_word_wins(asked, answer, monkeypatch):
    monkeypatch.setattr(gpu_record, "answer", lambda: gpu_record.Answer(*answer))
    monkeypatch.setenv(gpu_path.GPU_ASYNC, asked)
    assert gpu_path.own_choice(has_gpu=True)[:2] == (asked == "1", f"HVDTRAIN_GPU_ASYNC={asked}")


def test_a_word_that_is_neither_yes_nor_no_is_refused(monkeypatch):
    monkeypatch.setenv(gpu_path.GPU_ASYNC, "yes")
    with pytest.raises(ValueError, match=r"must be 0 or 1\. Received: HVDTRAIN_GPU_ASYNC='yes'"):
        gpu_path.check()


@pytest.mark.parametrize("asked", ["", "1"])
def test_hosts_of_an_elastic_job_wait(asked, monkeypatch):
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    monkeypatch.setenv(gpu_path.GPU_ASYNC, asked)
    assert gpu_path.own_choice(has_gpu=True)[:2] == (False, "an elastic job")
    assert not gpu_path.is_async()


def test_a_rank_without_a_gpu_asks_for_no_proof(monkeypatch):
    monkeypatch.setattr(gpu_record, "answer", lambda: pytest.fail("nvidia-smi was asked"))
    assert not gpu_path.own_choice(has_gpu=False).is_async


def test_a_horovod_that_makes_another_stream_wait_is_refused(monkeypatch):
    monkeypatch.setenv(gpu_path.GPU_ASYNC, "1")
    monkeypatch.setattr(installed, "metadata", lambda: {"pytorch": "2.13.0"})
    with pytest.raises(HorovodMismatchError, match="hvdtrain build"):
        gpu_path.check()
    monkeypatch.setenv(gpu_path.GPU_ASYNC, "0")
    gpu_path.check()


@pytest.mark.parametrize("there", [NOT_PROVEN, (False, "HVDTRAIN_GPU_ASYNC=0")])
def test_all_ranks_wait_if_one_host_has_to(there):
    choices = [Choice(*PROVEN, "a"), Choice(*PROVEN, "a"), Choice(*there, "b"), Choice(*there, "b")]
    assert {gpu_path.agreed(choices), gpu_path.agreed(choices)} == {Choice(False, f"host b: {there[1]}", "b")}
    assert gpu_path.agreed(choices[:2]) == choices[0]
    assert gpu_path.agreed(choices[2:]) == choices[2]


def test_choices_travel_with_the_devices_of_the_ranks(monkeypatch):
    there = devices.RankDevice("cuda", "f" * 32, "b", "GPU-1", "NVIDIA H100", *PROVEN)
    assert there.choice == Choice(*PROVEN, "b")
    assert devices.RankDevice(*__import__("json").loads(there.to_bytes().tobytes())) == there


@pytest.mark.parametrize("choice", [Choice(*PROVEN), Choice(*NOT_PROVEN)])
def test_horovod_is_told_what_was_agreed_and_it_is_said(choice, monkeypatch):
    module, told = horovod(monkeypatch)
    said = gpu_path.take(choice, module)
    assert (told, gpu_path.is_async()) == ([choice.is_async], choice.is_async)
    assert said == f"the host {'runs ahead of' if choice.is_async else 'waits for'} the GPU ({choice.why})"


def test_horovods_own_variable_is_the_users(monkeypatch):
    monkeypatch.setenv(gpu_path.ASYNC_COMPLETION, "1")
    module, told = horovod(monkeypatch)
    gpu_path.take(Choice(*NOT_PROVEN), module)
    assert told == []


def test_a_horovod_of_another_build_waits(monkeypatch):
    module, _ = horovod(monkeypatch, has_function=False)
    gpu_path.take(Choice(*NOT_PROVEN), module)
    assert not gpu_path.is_async()


def test_before_init_a_request_counts_alone(monkeypatch):
    assert not gpu_path.is_async()
    monkeypatch.setenv(gpu_path.GPU_ASYNC, "1")
    assert gpu_path.is_async()
    assert launch_environment.is_elastic() is False
