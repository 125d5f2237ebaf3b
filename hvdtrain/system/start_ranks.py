"""Prepare the start of ranks: the beginning of the command, and their environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

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
    """Return the environment for ranks: this process's own, without a launcher's marks, and `chosen`, which wins.

    `without` has prefixes of further names to leave out.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith((*_MARKS, *without))}
    # The package's parent comes first, so that the ranks import this hvdtrain from wherever they start.
    paths = [str(Path(__file__).resolve().parents[2]), kept.get("PYTHONPATH", "")]
    # More ranks than cores is the caller's decision.
    found = {"OMPI_MCA_rmaps_base_oversubscribe": "1", **kept, "PATH": open_mpi.search_path()}
    return open_mpi.for_both(found | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), **chosen})
