"""Open MPI 4 and 5: where their programs are, and each version's names of a setting; each ignores the other's."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

SUPPORTED = (4, 5)
_LIMIT_S = 10
_VERSION = re.compile(r"\((?:Open MPI|OpenRTE)\)\s*(\d+\.\d+\S*)")

# OpenPMIx before 5.0.11, as in Debian 13's Open MPI 5.0.7, puts a line that is not complete before any rank's next one.
# Its raw output marks each piece instead. From 5.0.11 on lines are right, and raw output lacks marks.
ASK_VERSIONS = "mpirun --version && prte_info"
MIXES_LINES = r"Open MPI\) 5\..* OpenPMIx (4\.|5\.0\.(\d|10)(?!\d))"
MARK_PIECES = ("--output", ":raw")


def search_path() -> str:
    """Return where programs are looked for: PATH, behind this environment's own Open MPI where it is not activated."""
    beside, path = Path(sys.executable).parent, os.environ.get("PATH", os.defpath)
    if str(beside) in path.split(os.pathsep) or not (beside / "mpirun").exists():
        return path
    return f"{beside}{os.pathsep}{path}"


def program(name: str) -> str | None:
    """Return the path of one of Open MPI's programs, None where there is none."""
    return shutil.which(name, path=search_path())


def version_in(text: str) -> str:
    """Return the version in what `mpirun --version` prints, "" where that is no Open MPI."""
    found = _VERSION.search(text)
    return found.group(1) if found else ""


def other_in(text: str) -> str:
    """Return in words what `mpirun --version` prints of another MPI."""
    hydra = re.search(r"HYDRA build details:\s*Version:\s*(\S+)", text)
    if hydra:
        return f"MPICH {hydra.group(1)}"  # or what was made from it, which calls its launcher the same
    return text.strip().splitlines()[0] if text.strip() else "an mpirun whose --version fails"


def major(version: str) -> int:
    """Return the first number of a version."""
    return int(version.partition(".")[0])


# More ranks than slots. Not in the table below: 5 would fill the first host with ranks that others have slots for.
OVERSUBSCRIBE_IN_5 = {"PRTE_MCA_rmaps_default_mapping_policy": ":OVERSUBSCRIBE"}

# What 5 calls a variable of 4, and its values where those differ too.
_IN_5 = {
    "OMPI_MCA_hwloc_base_binding_policy": "PRTE_MCA_hwloc_default_binding_policy",
    "OMPI_MCA_orte_tmpdir_base": "PRTE_MCA_prte_tmpdir_base",
    "OMPI_MCA_oob_tcp_keepalive_time": "PRTE_MCA_oob_tcp_keepalive_time",
    "OMPI_MCA_oob_tcp_keepalive_intvl": "PRTE_MCA_oob_tcp_keepalive_intvl",
    "OMPI_MCA_oob_tcp_keepalive_probes": "PRTE_MCA_oob_tcp_keepalive_probes",
    "OMPI_MCA_plm_rsh_args": "PRTE_MCA_plm_ssh_args",
    "OMPI_MCA_plm_rsh_agent": "PRTE_MCA_plm_ssh_agent",
    "OMPI_MCA_btl_vader_backing_directory": "OMPI_MCA_btl_sm_backing_directory",
    "OMPI_MCA_btl_vader_single_copy_mechanism": "OMPI_MCA_smsc",
}
_VALUES_IN_5 = {"OMPI_MCA_smsc": {"none": "^cma,knem,xpmem", "cma": "cma"}}


def for_both(variables: Mapping[str, str]) -> dict[str, str]:
    """Return `variables`; Open MPI 4's are added under Open MPI 5's names where these are not set."""
    found = dict(variables)
    for name, in_5 in _IN_5.items():
        text, values = variables.get(name), _VALUES_IN_5.get(in_5)
        if text is not None and (values is None or text in values):
            found.setdefault(in_5, values[text] if values else text)
    return found


@functools.cache
def spaces_marks() -> bool:
    """Return whether mpirun puts a space behind the mark of a rank's line, as 5 does: a line may begin with its own."""
    return major(version_in(said_by("mpirun", "--version")) or "0") >= 5


@functools.cache
def mixes_lines() -> bool:
    """Return whether mpirun needs `MARK_PIECES` beside its marks, or one rank's line becomes part of another's."""
    return re.search(MIXES_LINES, said_by("/bin/sh", "-c", ASK_VERSIONS), re.DOTALL) is not None


def said_by(*command: str) -> str:
    """Return the standard output of one of Open MPI's programs; "" where there is none, or it takes too long."""
    environment = {**os.environ, "PATH": search_path()}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False, env=environment)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout
