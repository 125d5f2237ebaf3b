"""The common part of the elastic scripts: SCRIPT FOLDER SCENARIO. They write facts, one file a host, a line a fact.

Scenarios: "kill-0" and "kill-1", in which the rank of that number of two is killed; "kill-3", the same of four; "grow",
in which a host comes to the one there is; "stillborn", in which its rank ends before it has met the other.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

FOLDER, SCENARIO = Path(sys.argv[1]), sys.argv[2]
HOST = os.environ.get("HOROVOD_HOSTNAME", "alone")
NEW_HOST = "127.0.0.1"


def say(fact: str, **what: Any) -> None:
    """Write a fact down; in one write, so that a kill leaves whole lines."""
    with (FOLDER / f"log-{HOST}").open("a") as log:
        log.write(json.dumps({"fact": fact, "host": HOST, **what}) + "\n")


def dies(*, rank: int, size: int) -> None:
    """Kill this process if it is the scenario's victim: the rank of a number, while nobody else is gone."""
    if size == (4 if SCENARIO == "kill-3" else 2) and f"kill-{rank}" == SCENARIO:
        say("killed")
        os.kill(os.getpid(), signal.SIGKILL)


def adds_host() -> bool:
    """Let the discovery script name one host more, in scenarios that have one; return whether this call has done it."""
    hosts, new = FOLDER / "hosts", FOLDER / "hosts.new"
    if SCENARIO not in ("grow", "stillborn") or NEW_HOST in hosts.read_text():
        return False
    new.write_text(hosts.read_text() + f"{NEW_HOST}:1\n")
    new.rename(hosts)
    say("host added")
    return True


if SCENARIO == "stillborn" and HOST == NEW_HOST:
    say("born")
    sys.exit(3)
