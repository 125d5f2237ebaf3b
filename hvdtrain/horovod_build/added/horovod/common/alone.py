"""Start MPI in a process that no launcher started: without a socket, and without a trace in what it launches later."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count, takewhile

# Open MPI 4 starts a daemon for such a process, which listens on every interface; and no transport is needed.
_SETTINGS = {"OMPI_MCA_ess_singleton_isolated": "1", "OMPI_MCA_btl": "self"}
_LAUNCHED = ("OMPI_COMM_WORLD_", "PMIX_", "PMI_", "HOROVOD_RANK")


@contextmanager
def without_sockets() -> Iterator[None]:
    """While MPI starts, set what a lone process needs; what it launches later does not inherit it.

    Nor does it inherit what MPI sets for itself: with OMPI_MCA_ess=singleton an mpirun ends at once, without a word.
    Settings of the user's own stay. HVDTRAIN_LOOPBACK=0 leaves all of it to MPI.
    """
    is_launched = any(name.startswith(_LAUNCHED) for name in os.environ)
    if is_launched or os.environ.get("HVDTRAIN_LOOPBACK") == "0":
        yield
        return
    before = _names()
    ours = {name: value for name, value in _SETTINGS.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)
        for added in _names() - before:
            os.unsetenv(added)  # it is not in os.environ, which has what Python itself has set


def _names() -> set[bytes]:
    """Return the names in the environment of C, to which libraries add and which a child inherits."""
    entries = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    found = takewhile(lambda entry: entry is not None, map(entries.__getitem__, count()))
    return {entry.partition(b"=")[0] for entry in found}
