"""Decisions of init; the user's own settings stay."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from hvdtrain.distributed import gpu_path, launch_environment, tuning

ONE_HOST = {"HOROVOD_SIZE": "2", "HOROVOD_LOCAL_SIZE": "2"}
TWO_HOSTS = {"HOROVOD_SIZE": "4", "HOROVOD_LOCAL_SIZE": "2"}
COPY = "OMPI_MCA_btl_vader_single_copy_mechanism"
YIELD = "OMPI_MCA_mpi_yield_when_idle"
TRANSPORTS = "OMPI_MCA_btl"
COPY_IN_5 = "OMPI_MCA_smsc"
SEGMENT_IN_5 = "OMPI_MCA_btl_sm_segment_size"
PLUGINS = "HWLOC_PLUGINS_BLACKLIST"
TCP = "OMPI_MCA_btl_tcp_flags"


@pytest.fixture(autouse=True)
def nothing_decided(monkeypatch):
    """A clean environment; malloc is left alone, since this process goes on to run other tests."""
    for name in (
        *ONE_HOST,
        "HOROVOD_AUTOTUNE",
        "HOROVOD_ELASTIC",
        COPY,
        YIELD,
        TRANSPORTS,
        SEGMENT_IN_5,
        COPY_IN_5,
        PLUGINS,
        TCP,
        tuning.PIECES,
        tuning.FUSION,
        tuning.CYCLE,
        gpu_path.GPU_ASYNC,
        "OMP_NUM_THREADS",
    ):
        monkeypatch.setenv(name, "")  # so that what the code sets is undone afterwards
        monkeypatch.delenv(name)
    monkeypatch.setenv(tuning.KEEP_MEMORY, "0")
    monkeypatch.setattr(tuning, "_ours", {})
    monkeypatch.setattr(tuning, "_said", False)


def launched(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def horovod(*, rank=0, size=2, local_size=2, mpi=True, nccl=False):
    facts = {"rank": rank, "size": size, "local_size": local_size, "mpi_enabled": mpi, "nccl_built": nccl}
    return SimpleNamespace(**{name: (lambda value=value: value) for name, value in facts.items()})


class Host:
    """A framework without a GPU, on ranks that may all use the same cores."""

    def __init__(self, ranks=1, gpu=False):
        self.ranks, self.gpu, self.given = ranks, gpu, []

    def has_gpu(self):
        return self.gpu

    def put_off_loading(self):
        return ""

    def starts_with_threads(self):
        return False

    def set_threads(self, threads):
        self.given.append(threads)
        return threads

    def run(self, horovod, kind, array, name):
        return np.concatenate([array] * self.ranks)


def prepare(engine="torch", host=None, *, nccl=False):
    return tuning.prepare(engine, host or Host(), nccl=nccl)


def test_ranks_of_one_host_copy_small_pieces_through_shared_memory(monkeypatch):
    launched(monkeypatch, ONE_HOST)
    prepare()
    assert os.environ[YIELD] == "1"
    assert os.environ[COPY] == "none"
    assert int(os.environ[tuning.PIECES]) > 0
    assert os.environ[tuning.FUSION] == "0"


def test_ranks_of_several_hosts_send_whole_tensors(monkeypatch):
    launched(monkeypatch, TWO_HOSTS)
    prepare()
    assert tuning.PIECES not in os.environ
    assert COPY not in os.environ


def test_ranks_of_several_hosts_send_in_both_directions_at_once(monkeypatch):
    launched(monkeypatch, TWO_HOSTS)
    prepare()
    assert os.environ[TCP] == "send"


def test_ranks_of_several_hosts_keep_the_users_way_to_send(monkeypatch):
    launched(monkeypatch, {**TWO_HOSTS, TCP: "send,put"})
    assert prepare().yours == [f"{TCP}=send,put"]
    assert os.environ[TCP] == "send,put"


@pytest.mark.parametrize("gpu", [True, False])
@pytest.mark.parametrize(("engine", "fused"), [("torch", "0"), ("tensorflow", None)])
def test_a_build_with_nccl_fuses_alike_on_every_rank_and_nothing_of_torch(gpu, engine, fused, monkeypatch):
    launched(monkeypatch, ONE_HOST)
    prepare(engine, Host(gpu=gpu), nccl=True)
    assert os.environ.get(tuning.FUSION) == fused


@pytest.mark.parametrize(
    ("engine", "nccl", "on_jax", "chooses"),
    [
        ("torch", True, False, True),
        ("torch", False, False, False),
        ("tensorflow", True, False, False),
        ("torch", True, True, False),
    ],
)
def test_torch_with_nccl_chooses_if_the_host_waits_for_its_gpu(engine, nccl, on_jax, chooses, monkeypatch):
    launched(monkeypatch, ONE_HOST)
    assert tuning.prepare(engine, Host(), nccl=nccl, on_jax=on_jax).chooses_gpu_path is chooses
    launched(monkeypatch, {gpu_path.GPU_ASYNC: "maybe"})
    with pytest.raises(ValueError, match="HVDTRAIN_GPU_ASYNC") if chooses else contextlib.nullcontext():
        tuning.prepare(engine, Host(), nccl=nccl, on_jax=on_jax)


def test_the_one_line_says_on_gpus_if_the_host_waits_for_them(monkeypatch):
    launched(monkeypatch, ONE_HOST)
    said = "the host runs ahead of the GPU (proven here on 2026-11-28)"
    for gpu in (True, False):
        decided = prepare(host=Host(gpu=gpu), nccl=True)
        decided.gpu_path = said
        assert (said in tuning.describe(decided, horovod(), 1)) is gpu


def test_horovods_own_tuning_is_left_its_fusion_threshold(monkeypatch):
    launched(monkeypatch, {**ONE_HOST, "HOROVOD_AUTOTUNE": "1"})
    prepare()
    assert tuning.FUSION not in os.environ


@pytest.mark.parametrize("by_horovodrun", [{}, {TRANSPORTS: "^openib"}])
def test_ranks_of_one_host_load_nothing_that_reaches_other_hosts(by_horovodrun, monkeypatch):
    launched(monkeypatch, {**ONE_HOST, **by_horovodrun})
    decided = prepare()
    assert "tcp" in os.environ[TRANSPORTS].removeprefix("^").split(",")
    assert os.environ[TRANSPORTS].startswith("^")
    assert PLUGINS in os.environ
    assert decided.yours == []


@pytest.mark.parametrize("why", ["several hosts", "a GPU", "little shared memory"])
def test_transports_stay_where_they_may_be_needed(why, monkeypatch):
    launched(monkeypatch, TWO_HOSTS if why == "several hosts" else ONE_HOST)
    if why == "little shared memory":
        monkeypatch.setattr(tuning.shutil, "disk_usage", lambda _: SimpleNamespace(free=2**20))
    prepare(host=Host(gpu=why == "a GPU"))
    assert TRANSPORTS not in os.environ
    assert PLUGINS not in os.environ


def test_open_mpi_5_gets_the_same_settings_by_its_own_names(monkeypatch):
    launched(monkeypatch, ONE_HOST)
    prepare()
    assert os.environ[COPY_IN_5] == "^cma,knem,xpmem"
    assert os.environ[SEGMENT_IN_5] == str(4 * 2**20)


@pytest.mark.parametrize("variable", [YIELD, COPY, TRANSPORTS, SEGMENT_IN_5, PLUGINS, tuning.PIECES, tuning.FUSION])
def test_what_the_user_set_stays_and_is_said(variable, monkeypatch):
    launched(monkeypatch, {**ONE_HOST, variable: "7"})
    decided = prepare()
    assert os.environ[variable] == "7"
    assert f"yours: {variable}=7" in tuning.describe(decided, horovod(), 1)


def test_a_second_init_does_not_take_its_own_choices_for_the_users(monkeypatch):
    launched(monkeypatch, ONE_HOST)
    prepare()
    assert prepare().yours == []


def test_pieces_that_are_no_number_are_refused(monkeypatch):
    monkeypatch.setenv(tuning.PIECES, "1MB")
    with pytest.raises(ValueError, match=r"HVDTRAIN_MPI_PIECE_BYTES='1MB'"):
        prepare()


@pytest.mark.parametrize(("cores", "ranks", "threads"), [(2, 2, 1), (16, 4, 4), (2, 4, 1), (7, 2, 3)])
def test_cores_are_shared_out_over_the_ranks_that_may_use_them(cores, ranks, threads, monkeypatch):
    monkeypatch.setattr(tuning.os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(tuning, "_time_limit", lambda: float("inf"))
    host = Host(ranks)
    tuning.share_cores(tuning.Tuning(True), horovod(size=ranks, local_size=ranks), host)
    assert host.given == [threads]


def test_cores_that_a_launcher_gave_to_one_rank_alone_are_not_divided_again(monkeypatch):
    monkeypatch.setattr(tuning.os, "sched_getaffinity", lambda _: {4, 5, 6, 7})
    monkeypatch.setattr(tuning, "_time_limit", lambda: float("inf"))

    class Bound(Host):
        def run(self, horovod, kind, array, name):
            other = array.copy()
            other[16:] = np.roll(array[16:], 4)  # the next four cores
            return np.concatenate([array, other])

    assert tuning.share_of_cores(horovod(local_size=2), Bound()) == 4


def test_a_framework_that_starts_with_its_threads_is_given_them_before_any_collective(monkeypatch):
    monkeypatch.setattr(tuning, "usable_cores", lambda: 8)

    class Early(Host):
        def starts_with_threads(self):
            return True

        def run(self, horovod, kind, array, name):
            raise AssertionError("its threads are running now")

    host = Early(2)
    tuning.share_cores(tuning.Tuning(True), horovod(), host)
    assert host.given == [4]


def test_ranks_of_another_host_share_no_core(monkeypatch):
    monkeypatch.setattr(tuning.os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(tuning, "_time_limit", lambda: float("inf"))

    class Far(Host):
        def run(self, horovod, kind, array, name):
            other = array.copy()
            other[0] ^= 1
            return np.concatenate([array, other])

    assert tuning.share_of_cores(horovod(local_size=1), Far()) == 2


def test_a_containers_limit_on_processor_time_is_shared(monkeypatch):
    monkeypatch.setattr(tuning.os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(tuning, "_time_limit", lambda: 8.0)
    assert tuning.share_of_cores(horovod(local_size=2), Host(2)) == 4


def test_threads_that_the_user_set_and_those_of_one_rank_are_left_alone(monkeypatch):
    host = Host(2)
    tuning.share_cores(tuning.Tuning(True), horovod(size=1, local_size=1), host)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    tuning.share_cores(tuning.Tuning(True), horovod(), host)
    assert host.given == []


def test_what_was_decided_is_said_once_on_rank_0(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "hvdtrain")
    launched(monkeypatch, ONE_HOST)
    monkeypatch.setattr(tuning, "share_of_cores", lambda module, host: 1)
    decided = prepare()
    tuning.share_cores(decided, horovod(rank=1), Host(2))
    assert caplog.messages == []
    for _ in range(2):
        tuning.share_cores(decided, horovod(), Host(2))
    (line,) = caplog.messages
    assert line == (
        "2 ranks on 1 host, Open MPI, shared memory in pieces of 512 KiB, 1 thread a rank, cycle 1 ms, no fusion"
    )


@pytest.mark.parametrize(
    ("ranks", "cores", "run_dir", "said"),
    [
        (9, 2, "", ["9 ranks share 2 cores of this host"]),
        (3, 1.5, "", ["3 ranks share 1.5 cores of this host"]),
        (2, 1, "", ["2 ranks share 1 core of this host"]),
        (2, 2, "", []),
        (9, 2, "/tmp/run", []),  # `hvdtrain run` has said it
    ],
)
def test_more_ranks_than_cores_are_told_of_once_on_rank_0(ranks, cores, run_dir, said, monkeypatch, caplog):
    monkeypatch.setattr(tuning, "share_of_cores", lambda module, host: cores / ranks)
    monkeypatch.setattr(tuning, "_said", False)
    monkeypatch.delenv(tuning.RUN_DIR, raising=False)
    if run_dir:
        monkeypatch.setenv(tuning.RUN_DIR, run_dir)
    for rank in (1, 0, 0):
        tuning.share_cores(tuning.Tuning(True), horovod(rank=rank, size=ranks, local_size=ranks), Host(2))
    assert [message.partition(":")[0] for message in caplog.messages] == said


def test_gloo_on_one_host_is_advised_to_use_open_mpi(monkeypatch):
    launched(monkeypatch, ONE_HOST)
    decided = prepare()
    assert "hvdtrain build" in tuning.describe(decided, horovod(mpi=False), 1)


@pytest.mark.parametrize(
    ("variables", "one"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, False),
        ({"SLURM_STEP_NUM_NODES": "1"}, True),
        ({"SLURM_STEP_NUM_NODES": "2"}, False),
        ({}, False),
    ],
)
def test_the_launcher_says_whether_ranks_share_a_host(variables, one, monkeypatch):
    for name in ("OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_NODES"):
        monkeypatch.delenv(name, raising=False)
    launched(monkeypatch, variables)
    assert launch_environment.on_one_host() is one


FREED = """
import resource
import numpy as np
from hvdtrain.distributed import tuning
print(int(tuning.keep_freed_memory(torch=False)))
for _ in range(2):
    np.ones(10_000_000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    np.ones(10_000_000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
@pytest.mark.parametrize(
    ("variables", "kept"),
    [({}, True), ({"HVDTRAIN_KEEP_MEMORY": "0"}, False), ({"MALLOC_TRIM_THRESHOLD_": "131072"}, False)],
)
def test_freed_memory_is_used_again_without_page_faults_unless_the_user_says_no(variables, kept):
    clean = {name: value for name, value in os.environ.items() if name != tuning.KEEP_MEMORY}
    clean["NUMPY_MADVISE_HUGEPAGE"] = "0"  # which would hide the faults that are counted
    run = subprocess.run(
        [sys.executable, "-c", FREED], env=clean | variables, capture_output=True, text=True, check=True
    )
    done, faults = map(int, run.stdout.split())
    assert bool(done) is kept
    pages = 5 * 80_000_000 // os.sysconf("SC_PAGESIZE")
    assert (faults < pages // 100) is kept


RETURNED = """
import os
import numpy as np
from hvdtrain.distributed import tuning
from hvdtrain.system import host_memory
tuning.keep_freed_memory(torch=True)
if int(os.environ["RETURNS"]):
    tuning.return_large_blocks()
first = [np.ones(1_250_000) for _ in range(8)]  # of 10 MB
small = bytearray(1000)  # beside them
before = host_memory.resident()
first.clear()
print(before - host_memory.resident())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
@pytest.mark.parametrize("returns", [True, False])
def test_large_blocks_that_a_step_frees_are_returned_where_gradients_are_freed_in_it(returns):
    clean = {name: value for name, value in os.environ.items() if name != tuning.KEEP_MEMORY}
    run = subprocess.run(
        [sys.executable, "-c", RETURNED],
        env=clean | {"RETURNS": str(int(returns))}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert (int(run.stdout) > 70_000_000) is returns
