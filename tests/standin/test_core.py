"""Horovod's core for GPUs on the stand-in, and what happens to it with a defect. See README.md."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from core import Core

from hvdtrain.system import start_ranks

ASYNC = {"HOROVOD_ENABLE_ASYNC_COMPLETION": "1"}
# As `hvdtrain.init` does it, once ranks have agreed: only then can the defect "nobody waits" be found.
AGREED = {"HVDTRAIN_STANDIN_ASYNC_LATER": "1"}
TWO_STREAMS = {"HOROVOD_NUM_NCCL_STREAMS": "2"}
TIMELINE = {"HOROVOD_TIMELINE": os.devnull}
# How people run it: each of these is another path through the core.
WAYS: dict[str, dict[str, str]] = {
    "blocking": {},
    "async": ASYNC,
    "async-once-agreed": AGREED,
    "two-streams": TWO_STREAMS | ASYNC,
    "single-copies": {"HOROVOD_BATCH_D2D_MEMCOPIES": "0"},
    "timeline": TIMELINE,
    "async-timeline": TIMELINE | ASYNC,
    "torus": {"HOROVOD_TORUS_ALLREDUCE": "1"},
}
COLLECTIVES = ("reduces", "gathers", "scatters", "exchanges", "joins", "large-integers", "process-sets")
# Without what is compiled for all tests first, which takes minutes on a busy host.
pytestmark = pytest.mark.timeout(120, func_only=True)

NCCL, GPU = "horovod/common/ops/nccl_operations.cc", "horovod/common/ops/gpu_operations.cc"


@pytest.fixture(scope="session")
def core(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Core:
    return Core(folder, tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="session")
def harness(core: Core) -> Path:
    return core.program()


def run(harness: Path, scenario: str, settings: Mapping[str, str], *, size: int = 3) -> tuple[int, str]:
    """Return how many ranks came to the end of a scenario, and what they and the launcher wrote."""
    limits = {
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "20",
        "HVDTRAIN_STANDIN_SEED": os.environ.get("HVDTRAIN_STANDIN_SEED", "1"),
    }
    environment = start_ranks.rank_environment({**limits, **settings})
    command = [*start_ranks.horovodrun(Path(sys.executable)), "--gloo", "-np", str(size), str(harness), scenario]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)
    said = done.stdout + done.stderr
    return sum(line.endswith("ok") for line in said.splitlines()), said


@pytest.mark.parametrize("scenario", COLLECTIVES)
@pytest.mark.parametrize("way", WAYS)
def test_numbers_are_right_and_every_access_is_ordered(harness: Path, way: str, scenario: str) -> None:
    ended, said = run(harness, scenario, WAYS[way])
    assert ended == 3, said


def test_many_ranks_reduce(harness: Path) -> None:
    ended, said = run(harness, "reduces", ASYNC, size=8)
    assert ended == 8, said


def test_a_gather_of_more_bytes_than_an_int_holds(harness: Path) -> None:
    ended, said = run(harness, "large-gather", {}, size=2)
    assert ended == 2, said


@pytest.mark.parametrize("way", ["blocking", "two-streams"])
def test_a_rank_without_memory_for_the_fusion_buffer_is_an_error_on_each_rank(harness: Path, way: str) -> None:
    ended, said = run(harness, "no-memory", WAYS[way])
    assert ended == 3, said


@pytest.mark.parametrize("what", ["gather", "exchange"])
def test_a_rank_without_memory_for_what_it_receives_is_an_error_on_each_rank(harness: Path, what: str) -> None:
    ended, said = run(harness, f"no-memory-to-{what}", {})
    assert ended == 3, said


@pytest.mark.parametrize("elastic", ["0", "1"])
def test_a_broken_device_is_an_error_of_its_rank_and_ends_no_process(harness: Path, elastic: str) -> None:
    ended, said = run(harness, "broken-device", {"HOROVOD_ELASTIC": elastic})
    assert ended == 3, said


@pytest.mark.parametrize("elastic", ["0", "1"])
def test_nothing_is_taken_for_a_mean_where_a_rank_has_died(harness: Path, elastic: str) -> None:
    ended, said = run(harness, "dead-peer", {"HOROVOD_ELASTIC": elastic})
    assert ended == 2, said


def after(text: str, old: str, new: str = "") -> tuple[str, str]:
    """Return a text with its end, which occurs often, and with another end."""
    return text + old, text + new


DEFECTS: dict[str, tuple[str, Mapping[str, str], str, str, str]] = {
    "the reduction does not wait for gradients": (
        "reduces", {}, NCCL,
        *after("response.devices());\n  gpu_op_context_.InitGPUQueue(entries, response);\n\n",
               "  WaitForData(entries);\n\n  ncclRedOp_t", "  ncclRedOp_t"),
    ),
    "nobody waits for the reduction": ("reduces", AGREED, GPU, "          status.event = event;\n", ""),
    "in a timeline nobody waits for the end of the reduction": (
        "reduces", TIMELINE | ASYNC, GPU,
        "  } else {\n    gpu_context_->RecordEvent(event_queue, \"\", *stream);", "  } else if (0) {",
    ),
    "reductions are on another stream than their copies": (
        "reduces", TWO_STREAMS | ASYNC, GPU,
        *after("  stream =\n      &gpu_context_\n           ->streams[", "global_state_->current_nccl_stream]", "0]"),
    ),
    "each rank counts streams for itself": (
        "process-sets", TWO_STREAMS, "horovod/common/operations.cc",
        "process_set.device_operations++ %", "horovod_global.process_set_table.Get(0).device_operations++ %",
    ),
    "streams share a fusion buffer": (
        "reduces", TWO_STREAMS | ASYNC, "horovod/common/fusion_buffer_manager.cc",
        "return tensor_fusion_buffers_[std::make_tuple(device, framework, stream_id)].first;",
        "return tensor_fusion_buffers_[std::make_tuple(device, framework, 0)].first;",
    ),
    "a joined rank's zeros are freed early": ("joins", ASYNC, GPU, "return !e.callback;", "return false;"),
    "joined ranks need another communicator": (
        "joins", {}, "horovod/common/controller.cc", "devices[joined.first] = joined.second;", ";",
    ),
    "ranks do not agree on their fusion buffers": (
        "no-memory", {}, "horovod/common/operations.cc", "process_set.controller->CrossRankBitwiseAnd(have, 1);", "",
    ),
    "ranks do not hear that one has no memory for what it receives": (
        "no-memory-to-gather", {}, "horovod/common/ops/collective_operations.cc",
        "    global_state_->shut_down = true;\n", "",
    ),
    "whole numbers pass through a double": (
        "large-integers", {}, "horovod/common/ops/collective_operations.cc",
        "(int64_t*)buffer_data,\n                       num_elements, WholeFactor(scale_factor)",
        "(int64_t*)buffer_data,\n                       num_elements, scale_factor",
    ),
    "an aborted communicator is like any other": (
        "dead-peer", {"HOROVOD_ELASTIC": "1"}, NCCL,
        *after("NCCLCommState::Check() {\n  std::lock_guard<std::mutex> guard(mutex_);\n  if (", "is_aborted_)", "0)"),
    ),
    "a failed device is none": (
        "broken-device", {}, GPU, "status = Status::UnknownError(gpu_evt_err_msg);", "status = Status::OK();",
    ),
    "work is dropped at the end": (
        "dead-peer", {}, "horovod/common/thread_pool.cc", "if (work_queue_.empty()) break;", "if (!running_) break;",
    ),
    "a wait keeps a core busy": (
        "reduces", {}, "horovod/common/ops/cuda_operations.cc",
        *after("i < N_CUDA_EVENTS_PREPOPULATE; ++i) {\n          cudaEvent_t ev;\n          status = "
               "cudaEventCreateWithFlags(&ev, cudaEventDisableTiming", " | cudaEventBlockingSync);", ");"),
    ),
    "a part is put where another one is": (
        "scatters", {}, NCCL, "std::accumulate(recvcounts.begin(), recvcounts.begin() + process_set_rank, size_t(0))",
        "process_set_rank * recvcounts[0]",
    ),
    "an int holds the bytes": ("large-gather", {}, NCCL, "  auto element_size = Data", "  int element_size = Data"),
}  # fmt: skip


@pytest.mark.usefixtures("harness")  # compiled once, before several workers compile defects
@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_found(core: Core, defect: str) -> None:
    scenario, settings, file, old, new = DEFECTS[defect]
    assert new != old
    ended, said = run(core.defective(file, old, new), scenario, settings)
    whole = 2 if scenario == "dead-peer" else 3
    assert ended < whole, said
