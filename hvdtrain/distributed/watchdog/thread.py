"""The thread that looks at what this process waits for, and what it says and does when that takes too long."""

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
from hvdtrain.distributed.watchdog import step_count, waits
from hvdtrain.distributed.watchdog.rank_exit import STALLED, Endings, leave, say
from hvdtrain.distributed.watchdog.shared_facts import open_board, process_state
from hvdtrain.system.process_tree import RUN_DIR

log = logging.getLogger("hvdtrain")

_TICK_S = 1.0
_FIRST_TICK_S = 0.1  # until `hvdtrain run` knows of a step: one that dies soon after has got somewhere
_END_S = 30.0  # at most, for Horovod's shutdown at the end of a script: all ranks answer at once, or are dead
_LET_GO_S = 5.0  # at most, for a reported wait to end with an error, once Horovod was shut down

_ADVICE = (
    "What to do: every rank must call the same collectives, in the same number. Look at the ranks named above, or at "
    "those without a line of their own: uneven data (equal shards, or hvd.join), a collective under `if rank == 0`, a "
    "slow or stopped process. If so long a wait is right, set HVDTRAIN_STALL_S to more seconds, or to 0."
)
_ADVICE_START = (
    "What to do: see whether every rank was started and reaches hvd.init; their own messages come before this one."
)


class Watch:
    """Looks from its making on, about once a second, until `stop`.

    Args:
        limit_s: how long this process may wait for others; may be infinite.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._endings: Endings | None = None
        self._basics: Any = None
        self._tick_s = min(_TICK_S, limit_s / 8)
        self._looked = time.monotonic()
        self._waited_s: dict[Any, float] = {}
        self._reported: set[Any] = set()
        self._idle_s = 0.0  # since this rank last waited or stepped
        self._steps = self._written = -1
        self._told = False
        self._stopped = threading.Event()
        self._pid = os.getpid()
        threading.Thread(target=self._run, name="hvdtrain-watch", daemon=True).start()

    def stop(self) -> None:
        """Look no more."""
        self._stopped.set()

    def joined(self, module: ModuleType) -> None:
        """Note who this rank is, and take over its end; again after an elastic reset.

        Args:
            module: Horovod's, initialised.
        """
        basics = getattr(sys.modules.get(f"{module.__name__}.mpi_ops"), "_basics", None)
        if basics is None:  # not Horovod 0.28.1
            return
        rank, size = int(module.rank()), int(module.size())
        board = open_board(rank, elastic=launch_environment.is_elastic())
        # Our exit calls it, with a limit; Horovod registers it again in each init.
        atexit.unregister(basics.shutdown)
        if self._endings is None:
            self._basics = basics
            self._endings = Endings(
                board, rank=rank, size=size, host=socket.gethostname(), step=step_count.done, shut_down=basics.shutdown
            )
            self._endings.install()
        else:
            self._endings.board, self._endings.rank, self._endings.size = board, rank, size
        board.post("pid", os.getpid())
        self._idle_s, self._told = 0.0, False

    def leave(self, code: int) -> NoReturn:
        """End this process as one that failed: without Horovod's shutdown, which would wait for others."""
        if self._endings is not None:
            self._endings.leave(code)
        leave(code)

    def _run(self) -> None:
        while not self._stopped.wait(self._next_tick_s()):
            if os.getpid() != self._pid:
                return
            try:
                self._look()
            except Exception:
                log.debug("the watch failed to look", exc_info=True)

    def _next_tick_s(self) -> float:
        first = RUN_DIR in os.environ and self._written <= 0
        return min(self._tick_s, _FIRST_TICK_S) if first else self._tick_s

    def _look(self) -> None:
        now = time.monotonic()
        # At most two ticks: a process that was stopped itself has not waited for others meanwhile.
        passed, self._looked = min(now - self._looked, 2 * self._tick_s), now
        found = {wait.key: wait for wait in waits.find(besides=threading.get_ident())}
        done = step_count.done()
        moved = done != self._steps or any(key not in self._waited_s for key in found)
        self._idle_s = 0.0 if moved or found else self._idle_s + passed
        self._told = self._told and not moved
        self._steps = done
        self._waited_s = {key: self._waited_s[key] + passed if key in self._waited_s else 0.0 for key in found}
        self._write_progress()
        for key, waited_s in self._waited_s.items():
            limit_s = min(self._limit_s, _END_S) if found[key].kind == "end" else self._limit_s
            if waited_s >= limit_s and key not in self._reported:
                self._reported.add(key)
                self._report(found[key], waited_s)
                return
        if self._idle_s >= 0.9 * self._limit_s and not self._told and self._others_wait():
            self._told = True
            self._tell_own_place()

    def _write_progress(self) -> None:
        if self._endings is not None and RUN_DIR in os.environ and self._written != self._steps:
            self._written = self._steps
            self._endings.board.post("progress", {"step": self._steps, "time": time.time()})

    def _others_wait(self) -> bool:
        """Return whether other ranks wait for this one: they say so, or have shut Horovod down under it."""
        if self._endings is None:
            return False
        if any(rank != self._endings.rank for rank in self._endings.board.all("waits")):
            return True
        ranks = (ctypes.c_int * self._endings.size)()
        library = self._basics.MPI_LIB_CTYPES
        return bool(library.horovod_is_initialized() and library.horovod_process_set_ranks(0, ranks))

    def _report(self, wait: waits.Wait, waited_s: float) -> None:
        """Say what this rank waits for, and end the wait: by an error on all ranks, or else with the process."""
        if self._endings is None:
            _say_start(wait, waited_s)
            os._exit(STALLED)
        endings = self._endings
        what, place = wait.what, waits.place(waits.frames().get(wait.thread))
        endings.board.post("waits", {"what": what, "seconds": waited_s, "place": place})
        stack, pause_s = waits.stacks(wait.thread), 2 * self._tick_s
        endings.stalled_s = 2 * pause_s  # for this, should another rank's report end the wait
        time.sleep(pause_s)  # the others look too, and say what they wait for or where they are
        others = endings.board.all("waits")
        if not _goes_on(wait) and set(others) <= {endings.rank}:  # it ended in the last moment
            self._reported.discard(wait.key)
            endings.stalled_s = 0.0
            return
        line = f"{endings.who} has waited {waited_s + pause_s:.0f} s in {what} (step {step_count.done()})"
        line += f", at {place}" * bool(place)
        alike = [rank for rank, said in others.items() if said.get("what") == what]
        # One says it for all of its host that wait for the same. One stack: of several hosts, on rank 0's.
        if endings.rank == min(alike, default=endings.rank):
            is_roots_host = endings.rank == 0 or 0 in endings.board.all("pid")
            line = "\n".join([f"{line}.", *self._missing(endings, what), *([stack + _ADVICE] if is_roots_host else [])])
        say(line)
        endings.stalled_s = pause_s  # others may not have spoken yet
        if wait.kind in ("collective", "graph", "device"):
            # Then Horovod gives an error to whoever waits, on all ranks. Where it is stuck itself, this never returns.
            threading.Thread(target=self._basics.shutdown, name="hvdtrain-shutdown", daemon=True).start()
            until = time.monotonic() + min(_LET_GO_S, self._limit_s)
            while time.monotonic() < until:
                time.sleep(0.1)
                if not _goes_on(wait):
                    return
        say(f"{endings.who}: Horovod itself is stuck: a rank no longer answers. This process ends, status {STALLED}.")
        os._exit(STALLED)

    def _missing(self, endings: Endings, what: str) -> list[str]:
        """Return a line for each rank of this host that does not wait for `what`, as far as it is known."""
        waiting, idle = endings.board.all("waits"), endings.board.all("idle")
        lines = []
        for rank, pid in endings.board.all("pid").items():
            said = waiting.get(rank)
            if rank == endings.rank or (said is not None and said.get("what") == what):
                continue
            if said is not None:
                at = f", at {said['place']}" if said.get("place") else ""
                lines.append(f"  rank {rank} waits in {said.get('what')}{at}")
            elif rank in idle:
                at = idle[rank].get("place") or "no line of yours"
                lines.append(f"  rank {rank} is missing: it is at {at}, see its stack")
            else:
                state = process_state(int(pid)) or "says nothing"
                lines.append(f"  rank {rank} is missing: its process (pid {pid}) {state}")
        return lines

    def _tell_own_place(self) -> None:
        endings = self._endings
        if endings is None:
            return
        endings.board.post("idle", {"place": waits.place(waits.frames().get(threading.main_thread().ident or 0))})
        dead = "".join(f" Its thread {thread} died." for thread in endings.dead_threads)
        say(
            f"{endings.who} has been in no collective for {self._idle_s:.0f} s (step {step_count.done()}), and other "
            "ranks "
            f"wait for it.{dead}\n{waits.stacks(besides=threading.get_ident())}"
        )


def _goes_on(wait: waits.Wait) -> bool:
    return any(other.key == wait.key for other in waits.find(besides=threading.get_ident()))


def _say_start(wait: waits.Wait, waited_s: float) -> None:
    line = f"rank {launch_environment.rank()} (host {socket.gethostname()}) has waited {waited_s:.0f} s in {wait.what}."
    say("\n".join([line, waits.stacks(wait.thread) + _ADVICE_START]))
