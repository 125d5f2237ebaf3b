"""The modules that hvdtrain adds to Horovod's launcher and uses itself, with Horovod installed or not."""

from __future__ import annotations

from hvdtrain.horovod_build.added.horovod.runner.common.util import (
    listen_on,
    loopback,
    proof,
    proven_server,
    start_checks,
)

__all__ = ["listen_on", "loopback", "proof", "proven_server", "start_checks"]
