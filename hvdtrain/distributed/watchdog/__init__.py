"""Nothing hangs: a rank that waits for others too long says so and ends, and a rank that fails says it first.

    HVDTRAIN_STALL_S   seconds a rank may wait for others; 600 by default, 0 without limit
    HVDTRAIN_DEBUG=1   every rank prints its whole traceback, also where another rank's end is the cause

A daemon thread checks about once a second what this process waits for. A step pays for one counter, and
under `hvdtrain run` for one small write to a file, about 5 microseconds.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import socket
import sys
import threading
import time
from types import ModuleType
from typing import Any, NoReturn

from hvdtrain.distributed import launch_environment
from hvdtrain.distributed.watchdog import rank_exit, tracebacks, waits
from hvdtrain.distributed.watchdog.rank_exit import STALLED, RankExit, say
from hvdtrain.distributed.watchdog.shared_facts import open_facts, process_state
from hvdtrain.distributed.watchdog.waits import forget_step, note_device, note_step, step_done
from hvdtrain.system.process_tree import RUN_DIR

__all__ = [
    "LIMIT", "STALLED", "alone", "begin", "forget_step", "horovods_limits", "is_failing", "joined", "leave", "limit_s",
    "note_device", "note_status", "note_step", "step_done",
]  # fmt: skip

log = logging.getLogger("hvdtrain")

LIMIT = "HVDTRAIN_STALL_S"
_DEFAULT_S = 600.0
_TICK_S = 1.0
_FIRST_TICK_S = 0.1  # until `hvdtrain run` knows of a step: a rank that dies soon after has made progress
_END_S = 30.0  # at most, for Horovod's shutdown at the end of a script: all ranks answer at once, or are dead
_LET_GO_S = 5.0  # at most, for a reported wait to end with an error, once Horovod was shut down

_ADVICE = (
    "What to do: every rank must call the same collectives, in the same number. Look at the ranks named above, or at "
    "those without a line of their own: uneven data (equal shards, or hvd.join), a collective under `if rank == 0`, a "
    "slow or stopped process. If so long a wait is right, set HVDTRAIN_STALL_S to more seconds, or to 0."
)
_ADVICE_START = "What to do: see whether every rank was started and reaches hvd.init; their messages come before this."

_watchdog: Watchdog | None = None


def limit_s() -> float:
    """Return how long a rank may wait for others, in seconds; infinite where HVDTRAIN_STALL_S is 0."""
    value = os.environ.get(LIMIT, "")
    try:
        limit = float(value) if value else _DEFAULT_S
    except ValueError:
        limit = -1.0
    if not limit >= 0:
        raise ValueError(f"{LIMIT} must be a number of seconds, 0 for no limit. Received: {LIMIT}={value!r}")
    return limit or float("inf")


def is_failing() -> bool:
    """Return True once an error ends this process, or a status that is not 0, such as that of `sys.exit(3)`."""
    return _watchdog is not None and _watchdog.exit is not None and _watchdog.exit.is_failing


def note_status(status: Any) -> None:
    """Note the status of a SystemExit that `sys.exit` has not raised."""
    if _watchdog is not None and _watchdog.exit is not None:
        _watchdog.exit.note_status(status)


def horovods_limits() -> dict[str, str]:
    """Return settings with which Horovod names stalled tensors before our limit, and ends what we miss after it."""
    limit = limit_s()
    if limit == float("inf"):
        return {}
    # Horovod checks as often, and restarts its count once for a cached tensor: it reports within three times this time.
    check = max(1, min(60, int(limit / 4)))
    own = os.environ.get("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "")
    if own.isdecimal() and int(own):
        check = min(check, int(own))  # Horovod ends only an operation of which it has warned
    return {
        "HOROVOD_STALL_CHECK_TIME_SECONDS": str(check),
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(int(limit) + check),
    }


def begin() -> None:
    """Start the watchdog, before Horovod starts: ranks wait for each other there too."""
    global _watchdog
    found = launch_environment.detect()
    if _watchdog is None and found is not None and found.size != 1:
        _watchdog = Watchdog(limit_s())


def alone() -> None:
    """Show this process's exceptions with the user's frames: it is the only rank."""
    tracebacks.install()


def leave(code: int) -> NoReturn:
    """End this process at once with `code`, as a failed process: other ranks do not wait for it."""
    rank_exit.leave(code, _watchdog.exit if _watchdog else None)


def joined(module: ModuleType) -> None:
    """Install the exit hooks of this rank, once Horovod has started; one rank alone needs none."""
    global _watchdog
    if module.size() == 1:
        alone()
        if _watchdog is not None:
            _watchdog.stopped.set()
            _watchdog = None
        return
    _watchdog = _watchdog or Watchdog(limit_s())
    _watchdog.joined(module)


class Watchdog:
    """Checks about once a second, in a separate thread, how long this process has waited for others."""

    def __init__(self, limit_s: float) -> None:
        self.exit: RankExit | None = None  # None before Horovod has started
        self.stopped = threading.Event()
        self._limit_s = limit_s
        self._basics: Any = None
        self._tick_s = min(_TICK_S, limit_s / 8)
        self._checked = time.monotonic()
        self._waited_s: dict[Any, float] = {}
        self._reported: set[Any] = set()
        self._idle_s = 0.0  # since this rank last waited or stepped
        self._steps = self._written = -1
        self._idle_reported = False
        threading.Thread(target=self._run, name="hvdtrain-watch", daemon=True).start()

    def joined(self, module: ModuleType) -> None:
        """Store this rank's number, and install its exit hooks; again after an elastic reset."""
        basics: Any = getattr(sys.modules.get(f"{module.__name__}.mpi_ops"), "_basics", None)
        if basics is None:  # not Horovod 0.28.1
            return
        rank, size = int(module.rank()), int(module.size())
        facts = open_facts(rank, elastic=launch_environment.is_elastic())
        # Our exit calls it, with a limit; Horovod registers it again in each init.
        atexit.unregister(basics.shutdown)
        if self.exit is None:
            self._basics = basics
            self.exit = RankExit(facts, rank, size, socket.gethostname(), basics.shutdown)
            self.exit.install()
        else:
            self.exit.facts, self.exit.rank, self.exit.size = facts, rank, size
        facts.post("pid", os.getpid())
        if RUN_DIR in os.environ:  # `hvdtrain run` judges by the step whether an attempt made progress
            waits.report_steps(facts.counter("progress"))
        self._idle_s, self._idle_reported = 0.0, False

    def _run(self) -> None:
        while not self.stopped.wait(self._next_tick_s()):
            try:
                self._check()
            except Exception:
                log.debug("the watchdog failed to check", exc_info=True)

    def _next_tick_s(self) -> float:
        first = RUN_DIR in os.environ and self._written <= 0
        return min(self._tick_s, _FIRST_TICK_S) if first else self._tick_s

    def _check(self) -> None:
        now = time.monotonic()
        # At most two ticks: while this process was stopped itself, it did not wait for others.
        passed, self._checked = min(now - self._checked, 2 * self._tick_s), now
        found = {wait.key: wait for wait in waits.find(besides=threading.get_ident())}
        done = waits.steps_done()
        moved = done != self._steps or any(key not in self._waited_s for key in found)
        self._idle_s = 0.0 if moved or found else self._idle_s + passed
        self._idle_reported = self._idle_reported and not moved
        self._steps = done
        self._waited_s = {key: self._waited_s[key] + passed if key in self._waited_s else 0.0 for key in found}
        if self.exit is not None and RUN_DIR in os.environ and self._written != done:
            self._written = done
            waits.report_counted()
        for key, waited_s in self._waited_s.items():
            limit_s = min(self._limit_s, _END_S) if found[key].kind == "end" else self._limit_s
            if waited_s >= limit_s and key not in self._reported:
                self._reported.add(key)
                self._report(found[key], waited_s)
                return
        is_idle = self._idle_s >= 0.9 * self._limit_s and not self._idle_reported
        if is_idle and self.exit is not None and self._others_wait(self.exit):
            self._idle_reported = True
            self._report_idle(self.exit)

    def _others_wait(self, this: RankExit) -> bool:
        """Return whether other ranks wait for this one: they report it, or have shut Horovod down."""
        if this.facts.others("waits"):
            return True
        ranks = (ctypes.c_int * this.size)()
        library = self._basics.MPI_LIB_CTYPES
        return bool(library.horovod_is_initialized() and library.horovod_process_set_ranks(0, ranks))

    def _report(self, wait: waits.Wait, waited_s: float) -> None:
        """Say what this rank waits for, and end the wait: by an error on all ranks, or else with the process."""
        this = self.exit
        if this is None:
            who = f"rank {launch_environment.rank()} (host {socket.gethostname()})"
            say(f"{who} has waited {waited_s:.0f} s in {wait.what}.\n{waits.stacks(wait.thread)}{_ADVICE_START}")
            os._exit(STALLED)
        what, place = wait.what, waits.place(waits.frames().get(wait.thread))
        this.facts.post("waits", {"what": what, "seconds": waited_s, "place": place})
        stack, pause_s = waits.stacks(wait.thread), 2 * self._tick_s
        this.stalled_s = 2 * pause_s  # the wait time if another rank's report ends the wait
        time.sleep(pause_s)  # the others check too, and report what they wait for or where they are
        others = this.facts.all("waits")
        if not _continues(wait) and set(others) <= {this.rank}:  # it ended in the last moment
            self._reported.discard(wait.key)
            this.stalled_s = 0.0
            return
        line = f"{this.who} has waited {waited_s + pause_s:.0f} s in {what} (step {waits.steps_done()})"
        line += f", at {place}" * bool(place)
        alike = [rank for rank, said in others.items() if said.get("what") == what]
        # One rank reports for all ranks of its host with the same wait. Only rank 0's host prints a stack.
        if this.rank == min(alike, default=this.rank):
            is_roots_host = this.rank == 0 or 0 in this.facts.all("pid")
            line = "\n".join([f"{line}.", *_missing(this, what), *([stack + _ADVICE] if is_roots_host else [])])
        say(line)
        this.stalled_s = pause_s  # other ranks may not have reported yet
        if wait.kind in ("collective", "graph", "device", "step"):
            # This makes Horovod raise an error on every rank that waits. If Horovod itself is stuck, it never returns.
            threading.Thread(target=self._basics.shutdown, name="hvdtrain-shutdown", daemon=True).start()
            until = time.monotonic() + min(_LET_GO_S, self._limit_s)
            while time.monotonic() < until:
                time.sleep(0.1)
                if not _continues(wait):
                    return
        say(f"{this.who}: Horovod itself is stuck: a rank no longer answers. This process ends, status {STALLED}.")
        os._exit(STALLED)

    def _report_idle(self, this: RankExit) -> None:
        this.facts.post("idle", {"place": waits.place(waits.frames().get(threading.main_thread().ident or 0))})
        dead = "".join(f" Its thread {thread} died." for thread in this.dead_threads)
        say(
            f"{this.who} has been in no collective for {self._idle_s:.0f} s (step {waits.steps_done()}), and other "
            f"ranks wait for it.{dead}\n{waits.stacks(besides=threading.get_ident())}"
        )


def _missing(this: RankExit, what: str) -> list[str]:
    """Return a line for each rank of this host that does not wait for `what`, as far as it is known."""
    waiting, idle = this.facts.all("waits"), this.facts.all("idle")
    there = {this.rank} | {rank for rank, said in waiting.items() if said.get("what") == what}
    lines = []
    for rank, pid in this.facts.all("pid").items():
        if rank in there:
            continue
        if rank in waiting:
            at = f", at {waiting[rank]['place']}" if waiting[rank].get("place") else ""
            lines.append(f"  rank {rank} waits in {waiting[rank].get('what')}{at}")
        elif rank in idle:
            at = idle[rank].get("place") or "no line of yours"
            lines.append(f"  rank {rank} is missing: it is at {at}, see its stack")
        else:
            state = process_state(int(pid)) or "says nothing"
            lines.append(f"  rank {rank} is missing: its process (pid {pid}) {state}")
    return lines


def _continues(wait: waits.Wait) -> bool:
    return any(other.key == wait.key for other in waits.find(besides=threading.get_ident()))
