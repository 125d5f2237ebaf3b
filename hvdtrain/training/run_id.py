"""Which run this is: equal on all ranks, and in all starts that resume it."""

from __future__ import annotations

import itertools
import os
import socket
import uuid
from dataclasses import asdict

from hvdtrain.callbacks.base import RunId
from hvdtrain.callbacks.run_folder import default_name
from hvdtrain.distributed.world import World
from hvdtrain.system.settings import RUN_ID, RUN_NAME

_runs_here = itertools.count(1)  # of a job that has an id


def agree(world: World) -> tuple[list[str], RunId]:
    """Return each rank's host, and a new run's id; a collective call.

    A resumed run has the id in its checkpoint. All starts of one `hvdtrain run` are one run, of which
    there may be no checkpoint yet: their first run has one id, their second another, and so on.
    """
    job = os.environ.get(RUN_ID)
    own = RunId(
        id=f"{job}-{next(_runs_here)}" if job else uuid.uuid4().hex,
        name=os.environ.get(RUN_NAME) or default_name(),
        resumed=bool(job),
    )
    everyones = world.allgather_object([socket.gethostname(), asdict(own)], name="hosts")
    return [str(host) for host, _ in everyones], RunId(**everyones[0][1])
