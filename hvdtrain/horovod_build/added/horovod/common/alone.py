"""Start MPI without a socket in a process that no launcher started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

# Open MPI 4 starts a daemon for such a process, which listens on every interface; and no transport is needed.
_SETTINGS = {"OMPI_MCA_ess_singleton_isolated": "1", "OMPI_MCA_btl": "self"}
_LAUNCHED = ("OMPI_COMM_WORLD_", "PMIX_", "PMI_", "HOROVOD_RANK")


@contextmanager
def without_sockets() -> Iterator[None]:
    """While MPI starts, set what a lone process needs; what it launches later does not inherit it.

    Settings of the user's own stay. HVDTRAIN_LOOPBACK=0 leaves all of it to MPI.
    """
    is_launched = any(name.startswith(_LAUNCHED) for name in os.environ)
    ours = {}
    if not is_launched and os.environ.get("HVDTRAIN_LOOPBACK") != "0":
        ours = {name: value for name, value in _SETTINGS.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)
