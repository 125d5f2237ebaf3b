"""What it takes to start ranks on behalf of a user: the command, their environment, and an end to them."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdtrain.system import open_mpi

# A launcher's mark around this process would make the new ranks think they belong to that launch.
_MARKS = (
    "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL", "HOROVOD_CROSS", "OMPI_COMM_", "PMIX_", "PMI_",
    "PRTE_LAUNCHED", "SLURM_STEP",
)  # fmt: skip


def horovodrun(python: Path) -> list[str]:
    """Return the beginning of a command line that starts ranks in the environment of `python`."""
    beside = python.parent / "horovodrun"
    return [str(beside)] if beside.exists() else [str(python), "-m", "horovod.runner.launch"]


def rank_environment(chosen: Mapping[str, str], *, without: tuple[str, ...] = ()) -> dict[str, str]:
    """Return the environment for ranks: this process's own, without a launcher's marks, and `chosen` on top.

    Args:
        chosen: variables that win.
        without: beginnings of further names to leave out.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith((*_MARKS, *without))}
    # The package's parent comes first, so that the ranks import this hvdtrain from wherever they start.
    paths = [str(Path(__file__).resolve().parents[2]), kept.get("PYTHONPATH", "")]
    # More ranks than cores is the caller's decision.
    found = {"OMPI_MCA_rmaps_base_oversubscribe": "1", **kept, "PATH": open_mpi.search_path()}
    return open_mpi.for_both(found | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), **chosen})


def end_family(process: subprocess.Popen[bytes]) -> None:
    """End the launcher and every process below it; mpirun's ranks have process groups of their own."""
    psutil = importlib.import_module("psutil")
    family = {process.pid: psutil.Process(process.pid)}
    stopped: set[int] = set()
    # Stopped first, from the launcher down: one that starts ranks at this moment would leave them behind.
    while new := [member for pid, member in family.items() if pid not in stopped]:
        for member in new:
            _send(member, signal.SIGSTOP)
            stopped.add(member.pid)
        try:
            family |= {member.pid: member for member in family[process.pid].children(recursive=True)}
        except psutil.NoSuchProcess:
            break
    for member in family.values():
        _send(member, signal.SIGKILL)
    process.kill()
    process.wait()


def _send(member: Any, number: int) -> None:
    try:
        member.send_signal(number)
    except importlib.import_module("psutil").NoSuchProcess:
        pass
