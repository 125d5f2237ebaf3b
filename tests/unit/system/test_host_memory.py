from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from hvdtrain.system import host_memory


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host of 64 GB, on which the OOM killer has ended 7 processes; its files can be replaced."""
    monkeypatch.setattr(host_memory, "PROC", tmp_path / "proc")
    monkeypatch.setattr(host_memory, "CGROUPS", tmp_path / "cgroup")
    write(tmp_path, {"proc/meminfo": "MemTotal:   62500000 kB\nMemFree: 1 kB\n", "proc/vmstat": "oom_kill 7\n"})
    return tmp_path


def test_memory_of_this_process_rises_with_what_it_takes() -> None:
    before, most = host_memory.resident(), host_memory.peak()
    with mmap.mmap(-1, 64_000_000) as taken:  # malloc may hand out memory that earlier tests have left in the process
        for start in range(0, len(taken), mmap.PAGESIZE):
            taken[start] = 1
        assert host_memory.resident() - before > 50e6
        assert host_memory.peak() >= max(most, before + 50_000_000)


@pytest.mark.parametrize(
    ("files", "limit", "kills"),
    [
        ({}, 64_000_000_000, 7),
        ({"proc/self/cgroup": "0::/\n"}, 64_000_000_000, 7),
        (  # version 2, a Slurm job's step: the job has a limit
            {
                "proc/self/cgroup": "0::/job/step\n",
                "cgroup/job/memory.max": "8000000000\n",
                "cgroup/job/step/memory.max": "max\n",
                "cgroup/job/step/memory.events": "low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 0\n",
            },
            8_000_000_000,
            2,
        ),
        (  # a container that sees its own part only
            {
                "proc/self/cgroup": "0::/docker/abc\n",
                "cgroup/memory.max": "4000000000",
                "cgroup/memory.events": "oom_kill 1",
            },
            4_000_000_000,
            1,
        ),
        (  # version 1
            {
                "proc/self/cgroup": "9:name=systemd:/\n4:memory:/job\n0::/\n",
                "cgroup/memory/job/memory.limit_in_bytes": "2000000000\n",
                "cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "cgroup/memory/job/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n",
            },
            2_000_000_000,
            4,
        ),
    ],
    ids=["no cgroup", "root", "version 2", "container", "version 1"],
)
def test_limits_and_kills_are_those_of_the_cgroup(root: Path, files: dict[str, str], limit: int, kills: int) -> None:
    write(root, files)
    assert host_memory.limit() == limit
    assert host_memory.oom_kills() == kills


def test_a_host_without_these_files_has_no_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "PROC", tmp_path)
    assert (host_memory.resident(), host_memory.limit(), host_memory.oom_kills()) == (0, None, 0)
