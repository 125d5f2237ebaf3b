"""What a launcher needs of its host, checked before it starts anything: open files, and shared memory."""

from __future__ import annotations

import importlib
import os
import resource
from collections.abc import Mapping

SHARED_MEMORY = "/dev/shm"
# Measured: horovodrun and mpirun open so many files for themselves, and for each rank of their host.
_FILES, _FILES_A_RANK = 24, 6
# The segment that Open MPI makes for a rank, and some; it refuses to make one that is larger than what is free.
_LEAST_BYTES = 5 * 2**20
_BACKING = ("OMPI_MCA_btl_vader_backing_directory", "OMPI_MCA_btl_sm_backing_directory")
_MORE_MEMORY = "In a container: docker run --shm-size=1g"


class CannotStartError(RuntimeError):
    """This host lacks what a job needs; the message is one line that says what, how much, and what to do."""


def check_open_files(ranks: int) -> None:
    """Raise the limit of open files to what so many ranks of this host need, as far as it may be raised.

    Raises:
        CannotStartError: it may not.
    """
    needed = _FILES + _FILES_A_RANK * ranks
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        enough = max(1024, 1 << needed.bit_length())
        raise CannotStartError(
            f"{ranks} rank{'s' * (ranks > 1)} need about {needed} open files, and the hard limit is {hard} "
            f"(ulimit -Hn). As root: ulimit -n {enough}, or a line '* hard nofile {enough}' in "
            f"/etc/security/limits.conf and a new login. In a container: docker run --ulimit nofile={enough}"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def check_semaphores() -> None:
    """Make a semaphore, as horovodrun does for each rank.

    Raises:
        CannotStartError: there can be none, since /dev/shm is full, missing or cannot be written.
    """
    name = f"/hvdtrain-{os.getpid()}-{os.urandom(4).hex()}"
    try:
        importlib.import_module("_multiprocessing").SemLock(1, 1, 1, name, True)
    except OSError as problem:
        raise CannotStartError(
            f"horovodrun needs semaphores, and none can be made: {os.strerror(problem.errno or 0)} "
            f"({in_words(free_bytes())}). Delete files in {SHARED_MEMORY}. {_MORE_MEMORY}"
        ) from None


def check_shared_memory(environment: Mapping[str, str]) -> None:
    """Check the folder of the memory that Open MPI's ranks of one host share, unless the user has chosen another one.

    Raises:
        CannotStartError: there is too little room.
    """
    if not any(name in environment for name in _BACKING) and free_bytes() < _LEAST_BYTES:
        raise CannotStartError(
            f"Open MPI's ranks of one host share memory, for which they need {_LEAST_BYTES // 2**20} MiB or more "
            f"({in_words(free_bytes())}). Delete files in {SHARED_MEMORY}, or use --gloo. {_MORE_MEMORY}"
        )


def free_bytes() -> int:
    """Return what is free of /dev/shm for this user."""
    try:
        found = os.statvfs(SHARED_MEMORY)
    except OSError:
        return 0
    if not os.access(SHARED_MEMORY, os.W_OK | os.X_OK) or found.f_flag & os.ST_RDONLY:
        return 0
    # A tmpfs without a limit says that it has no blocks at all.
    return found.f_bavail * found.f_frsize if found.f_blocks else 2**62


def in_words(free: int) -> str:
    """Return /dev/shm's free memory in words."""
    if not os.path.isdir(SHARED_MEMORY):
        return f"{SHARED_MEMORY} does not exist"
    if os.statvfs(SHARED_MEMORY).f_flag & os.ST_RDONLY or not os.access(SHARED_MEMORY, os.W_OK | os.X_OK):
        return f"{SHARED_MEMORY} cannot be written"
    amount = f"{free // 2**10} KiB" if free < 2**20 else f"{free // 2**20} MiB"
    return f"{amount} of {SHARED_MEMORY} are free"
