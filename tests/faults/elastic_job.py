"""The common part of the elastic scripts: SCRIPT FOLDER SCENARIO. They write facts, one file a host, a line a fact.

Scenarios: "kill-0" and "kill-1", in which the rank of that number of two is killed; "kill-3", the same of four;
"kill-0-of-3"; "kill-1+2-of-3", in which both are; "grow", in which a host comes to the one there is; "grow-to-3", to
two; "leave-of-3", in which a host of three leaves; "stillborn", in which a new host's rank ends before it has met the
other; "error", in which no rank of two ends.
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
NEW_HOST = "127.0.1" if SCENARIO == "grow-to-3" else "127.0.0.1"


def say(fact: str, **what: Any) -> None:
    """Write a fact down; in one write, so that a kill leaves whole lines."""
    with (FOLDER / f"log-{HOST}").open("a") as log:
        log.write(json.dumps({"fact": fact, "host": HOST, **what}) + "\n")


def dies(*, rank: int, size: int) -> None:
    """Kill this process if it is the scenario's victim: the rank of a number, while nobody else is gone."""
    victim, _, of = SCENARIO.removeprefix("kill-").partition("-of-")
    if size == (4 if SCENARIO == "kill-3" else int(of or 2)) and str(rank) in victim.split("+"):
        say("killed")
        os.kill(os.getpid(), signal.SIGKILL)


def changes_hosts() -> bool:
    """Let the discovery script name one host more or less, as the scenario says; return whether this call has."""
    hosts, new, named = FOLDER / "hosts", FOLDER / "hosts.new", (FOLDER / "hosts").read_text()
    if SCENARIO == "leave-of-3":
        changed = named.replace("127.0.0.1:1\n", "")
    elif SCENARIO in ("grow", "grow-to-3", "stillborn") and f"{NEW_HOST}:" not in named:
        changed = named + f"{NEW_HOST}:1\n"
    else:
        return False
    new.write_text(changed)
    new.rename(hosts)
    if changed != named:
        say("hosts changed")
    return changed != named


if SCENARIO == "stillborn" and HOST == NEW_HOST:
    say("born")
    sys.exit(3)
