"""The process between `hvdtrain.run` and a launcher: runs a job a single time, and ends it when its caller ends.

A process of its own, since it becomes the parent of all orphans, takes over signals, and ends whatever is below it:
none of this may happen to a notebook. Started as

    python -m hvdtrain.launch.helper_process REPORT GRACE RUN_DIR LAUNCHER COMMAND...

Standard output and error are the launcher's. What this process has to say goes through the file descriptor REPORT:
lines for people, then one of JSON on how the job ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from hvdtrain.launch import supervisor
from hvdtrain.launch.spec import LaunchSpec


def main(arguments: Sequence[str]) -> None:
    """Run the job; see above."""
    report, grace_s, run_dir, launcher, *line = arguments
    sys.stderr = os.fdopen(int(report), "w", buffering=1, encoding="utf-8")
    os.set_inheritable(int(report), False)
    threading.Thread(target=_end_with_caller, daemon=True).start()
    launch = supervisor.Launch(LaunchSpec(launcher), line, dict(os.environ), 0, float(grace_s))
    ending = supervisor.once(launch, Path(run_dir))
    cause = ending.cause
    told = {"who": cause.who, "code": cause.code, "rank": cause.rank, "seconds": ending.seconds}
    try:
        sys.stderr.write(json.dumps(told) + "\n")
    except OSError:
        pass  # the caller is gone


def _end_with_caller() -> None:
    """Wait for the end of standard input, which the caller holds; what remains of the job is the guard's to end."""
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
