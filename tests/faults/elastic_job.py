"""What the elastic scripts share: SCRIPT FOLDER SCENARIO. They write down what happens, one file a host, a line a fact.

Scenarios: "kill", in which one of two hosts' ranks is killed, and "grow", in which a host comes to the one there is.
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
    """Kill this process if it is the scenario's victim: the rank of a number, while there are two."""
    if size == 2 and f"kill-{rank}" == SCENARIO:
        say("killed")
        os.kill(os.getpid(), signal.SIGKILL)


def add_host() -> None:
    """Let the discovery script name one host more."""
    new = FOLDER / "hosts.new"
    new.write_text((FOLDER / "hosts").read_text() + f"{NEW_HOST}:1\n")
    new.rename(FOLDER / "hosts")
    say("host added")
