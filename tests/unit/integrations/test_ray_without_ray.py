"""The part of `hvdtrain.integrations.ray` before and after Ray: checks, settings, messages."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from hvdtrain.errors import PackageMissingError, UsageError
from hvdtrain.integrations import rendezvous
from hvdtrain.integrations.ray import cluster, job, run
from hvdtrain.launch.exchange import Message
from hvdtrain.launch.exit_cause import Cause
from hvdtrain.system import network


def nothing() -> None:
    pass


def test_the_module_is_there_without_ray_and_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr("hvdtrain.launch.job_environment.check_place", lambda who: None)
    with pytest.raises(PackageMissingError, match="Type: pip install ray"):
        run(nothing, np=2)


def test_importing_it_imports_neither_ray_nor_a_framework() -> None:
    code = "import sys, hvdtrain.integrations.ray; print({'ray', 'torch', 'tensorflow', 'horovod'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"np": 0}, "np=0"),
        ({"np": 2, "cpus_per_rank": -1}, "cpus_per_rank=-1"),
        ({"np": 2, "cpus_per_rank": float("nan")}, "cpus_per_rank=nan"),
        ({"np": 2, "gpus_per_rank": 0.5}, "gpus_per_rank=0.5"),
        ({"np": 2, "start_timeout_s": 0}, "start_timeout_s"),
        ({"np": 2, "min_np": 3}, "min_np=3, np=2, max_np=2"),
        ({"np": 2, "max_np": 1}, "min_np=1, np=2, max_np=1"),
        ({"np": 2, "min_np": 1, "reset_limit": -1}, "reset_limit=-1"),
    ],
)
def test_a_number_out_of_range_is_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        run(nothing, **options)


def test_a_rank_starts_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    with pytest.raises(UsageError, match=r"hvdtrain\.integrations\.ray\.run starts the ranks itself"):
        run(nothing, np=2)


def test_ranks_get_what_concerns_them_of_this_environment_and_no_launchers_marks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("HVDTRAIN_STALL_S", "KERAS_BACKEND", "HOROVOD_LOCAL_RANK", "HVDTRAIN_RUN_DIR", "SECRET_TOKEN"):
        monkeypatch.setenv(name, "17")
    found = job._environment("fn", 2.5, {"OMP_NUM_THREADS": "5"})
    assert (found["HVDTRAIN_STALL_S"], found["KERAS_BACKEND"]) == ("17", "17")
    assert not {"HOROVOD_LOCAL_RANK", "HVDTRAIN_RUN_DIR", "SECRET_TOKEN"} & set(found)
    assert (found["OMP_NUM_THREADS"], found["TF_NUM_INTRAOP_THREADS"]) == ("5", "2")


def test_the_interface_of_an_address_is_found() -> None:
    assert network.interface("127.0.0.1") == "lo"
    assert network.interface("203.0.113.9") == ""


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        (
            "The actor died.\nWorker exit detail: Worker ended\n with code 2. End of file. Some common causes include",
            "Worker ended with code 2. End of file",
        ),
        ("The actor died.\n  its node is gone \n", "its node is gone"),
    ],
)
def test_of_what_ray_says_of_a_death_its_guesses_are_left_out(said: str, kept: str) -> None:
    assert cluster._how(said) == kept


def test_a_death_is_told_in_rays_words() -> None:
    assert str(DEATH) == "rank 1 died (gone)"


def test_why_a_rank_did_not_start_is_told_in_the_nodes_own_words() -> None:
    said = """Traceback (most recent call last):
  File "worker.py", line 1, in load
RuntimeError: The actor failed to import:

    ModuleNotFoundError: No module named 'hvdtrain'

An unexpected internal error occurred."""
    assert cluster._why(RuntimeError(said)) == "ModuleNotFoundError: No module named 'hvdtrain'"
    assert cluster._why(RuntimeError("no node\nis left")) == "is left"


def test_each_local_rank_finds_its_own_gpu_in_its_place_and_sees_the_others() -> None:
    assert rendezvous.visible_gpus([["4", "5"], ["6", "7"]]) == {"CUDA_VISIBLE_DEVICES": "4,6,5,7"}
    assert rendezvous.visible_gpus([[], []]) == {}


WORKER = cluster.Worker(None, None, {"host": "h", "pid": 5})
OWN = Message({"kind": "error", "others": False})
CAUSED = Message({"kind": "error", "others": True})
DEATH = Cause("rank 1", 137, 1, "died (gone)")


@pytest.mark.parametrize(
    ("answers", "failed", "explained", "cause"),
    [
        ([Message({"kind": "result"})], False, False, None),
        ([CAUSED], True, False, None),
        ([CAUSED, DEATH], True, True, DEATH),
        ([OWN, DEATH], True, True, None),
        ([Message({"kind": "exit", "code": 0})], False, True, Cause("rank 0 on host h (pid 5)", 0, 0)),
        ([Message({"kind": "exit", "code": 3})], True, True, Cause("rank 0 on host h (pid 5)", 3, 0)),
        ([Message({"kind": "exit", "code": 75})], False, True, Cause("rank 0 on host h (pid 5)", 75, 0)),
    ],
)
def test_what_ended_a_job_is_what_came_first_unless_others_caused_it(
    answers: list[Any], failed: bool, explained: bool, cause: Cause | None
) -> None:
    outcome = cluster.RayOutcome(2)
    for rank, answer in enumerate(answers):
        outcome.take(rank, answer, WORKER)
    assert (outcome.has_failed, outcome.is_explained, outcome.cause) == (failed, explained, cause)
