"""Preload the library that keeps Open MPI to some network interfaces, wherever it is installed."""

from __future__ import annotations

import os
import subprocess

# What ld.so splits LD_PRELOAD at, or replaces in it: it has no way to quote them.
_SPECIAL = " :$"
# The shell's own words alone: a shell that has the library among its mappings ends with status 0.
_LOOK = 'while read -r line; do case $line in *"$0"*) exit 0;; esac; done < /proc/self/maps; exit 1'
_LIMIT_S = 60

_open: dict[str, int] = {}


class LoopbackError(RuntimeError):
    """The sockets of a job of one host cannot be kept to the loopback interface.

    Attributes:
        why: the library is not loaded.
    """

    def __init__(self, why: str) -> None:
        super().__init__(
            f"a job of one host listens on loopback alone, and mpirun cannot be made to: {why}. Run `hvdtrain build` "
            "again, or accept with HVDTRAIN_LOOPBACK=0 that it listens on every interface"
        )
        self.why = why


def preload(library: str, before: str | None = None) -> str:
    """Return LD_PRELOAD for mpirun, after a look at whether ld.so takes the library by it.

    A path that LD_PRELOAD cannot hold is replaced by a name of the same file, open in this process, which must outlive
    mpirun's start.

    Args:
        library: the path of libhvdtrain_listen.so.
        before: LD_PRELOAD as it was.

    Raises:
        LoopbackError: it is not loaded; the message is one line that says what to do.
    """
    name = _name(library)
    environment = {"LD_PRELOAD": name, "PATH": os.defpath}
    if not name:
        why = f"{library} is missing"
    else:
        done = subprocess.run(
            ["/bin/sh", "-c", _LOOK, os.path.basename(library)],
            env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_LIMIT_S, check=False,
        )  # fmt: skip
        why = done.stderr.strip().partition("\n")[0] or f"{library} is not loaded" if done.returncode else ""
    if why:
        raise LoopbackError(why)
    return ":".join(filter(None, [name, before]))


def _name(library: str) -> str:
    """Return a path of `library` that LD_PRELOAD can hold, "" where there is no such file."""
    if not os.path.isfile(library):
        return ""
    if not any(character in library for character in _SPECIAL):
        return library
    if library not in _open:
        _open[library] = os.open(library, os.O_RDONLY | os.O_CLOEXEC)
    return f"/proc/{os.getpid()}/fd/{_open[library]}"
