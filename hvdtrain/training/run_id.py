"""Which run this is: alike on all ranks, and in all starts that go on with it."""

from __future__ import annotations

import itertools
import os
import socket
import uuid
from dataclasses import asdict, dataclass

from hvdtrain.callbacks.run_folder import NAME, default_name
from hvdtrain.distributed.world import World

ID = "HVDTRAIN_RUN_ID"

_runs_here = itertools.count(1)  # of a job that has an id


@dataclass(frozen=True)
class Identity:
    """A run, as loggers know it; what ends with rank 0 must not hang on rank 0's word, so each rank has it.

    Attributes:
        id: a name that no other run has.
        name: for people: HVDTRAIN_RUN_NAME, or the script's and the time.
        goes_on: whether something may have been logged under this id before.
    """

    id: str
    name: str
    goes_on: bool = False


def meet(world: World) -> tuple[list[str], Identity]:
    """Return each rank's host, and the identity that a new run has; a collective call.

    A run that goes on has the one that its checkpoint names. All starts of one `hvdtrain run` are one run, of which
    there may be no checkpoint yet: their first run has one id, their second another, and so on.
    """
    job = os.environ.get(ID)
    own = Identity(
        id=f"{job}-{next(_runs_here)}" if job else uuid.uuid4().hex,
        name=os.environ.get(NAME) or default_name(),
        goes_on=bool(job),
    )
    everyones = world.allgather_object([socket.gethostname(), asdict(own)], name="hosts")
    return [str(host) for host, _ in everyones], Identity(**everyones[0][1])
