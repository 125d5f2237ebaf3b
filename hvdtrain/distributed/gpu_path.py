"""Decide, alike on all ranks, if the host waits for its GPU in each step of PyTorch.

HVDTRAIN_GPU_ASYNC says so, else the proof of this host's GPUs (`horovod_build.gpu_record`). If one rank has to wait,
all ranks wait. In elastic jobs all wait: NCCL's errors must reach the host.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

from hvdtrain.distributed import launch_environment
from hvdtrain.errors import HorovodMismatchError
from hvdtrain.horovod_build import installed

GPU_ASYNC = "HVDTRAIN_GPU_ASYNC"
ASYNC_COMPLETION = "HOROVOD_ENABLE_ASYNC_COMPLETION"  # Horovod's own, which it reads when it starts

_is_async: bool | None = None  # None before `take`


class Choice(NamedTuple):
    """What one rank would do, and why."""

    is_async: bool
    why: str
    host: str = ""


def asked() -> bool | None:
    """Return what HVDTRAIN_GPU_ASYNC says; None where it is not set."""
    value = os.environ.get(GPU_ASYNC, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{GPU_ASYNC} must be 0 or 1. Received: {GPU_ASYNC}={value!r}")
    return value == "1" if value else None


def check() -> None:
    """Raise HorovodMismatchError if the user requests what the installed Horovod cannot do."""
    # As Horovod comes, another stream waits than the one that should.
    if asked() and not launch_environment.is_elastic() and not installed.has_these_changes():
        raise HorovodMismatchError(
            f"{GPU_ASYNC}=1 needs this version's Horovod. Run `hvdtrain build`, or unset {GPU_ASYNC}."
        )


def own_choice(*, has_gpu: bool) -> Choice:
    """Return what this rank would do."""
    requested = asked()
    if launch_environment.is_elastic():
        return Choice(False, "an elastic job")
    if requested is not None:
        return Choice(requested, f"{GPU_ASYNC}={int(requested)}")
    if not has_gpu:
        return Choice(False, "no GPU")
    from hvdtrain.horovod_build import gpu_record  # only for ranks on GPUs

    return Choice(*gpu_record.answer())


def agreed(choices: Sequence[Choice]) -> Choice:
    """Return what all ranks do: if one has to wait, all wait, for its reason."""
    waits = [each for each in choices if not each.is_async]
    if not waits:
        return choices[0]
    somewhere = len(waits) < len(choices)
    return waits[0]._replace(why=f"host {waits[0].host}: {waits[0].why}") if somewhere else waits[0]


def take(choice: Choice, module: ModuleType) -> str:
    """Do what all ranks have agreed on, before the first operation on a GPU; return it in words."""
    global _is_async
    _is_async = choice.is_async
    basics: Any = sys.modules[f"{module.__name__}.mpi_ops"]._basics
    if os.environ.get(ASYNC_COMPLETION) is None and hasattr(basics.MPI_LIB_CTYPES, "horovod_set_async_completion"):
        basics.MPI_LIB_CTYPES.horovod_set_async_completion(choice.is_async)
    return f"the host {'runs ahead of' if choice.is_async else 'waits for'} the GPU ({choice.why})"


def is_async() -> bool:
    """Return whether the host runs ahead of its GPU; before `init`, whether that is requested."""
    return bool(asked()) and not launch_environment.is_elastic() if _is_async is None else _is_async
