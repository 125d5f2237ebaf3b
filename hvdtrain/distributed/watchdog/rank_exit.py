"""End a rank: its own exception whole and first, an exception that another rank caused in one line, never a hang.

A rank that failed leaves without Horovod's shutdown, which would wait for others and give them an error of their own
while this rank still prints: the launcher ends them, or they find the connection closed.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NoReturn

from hvdtrain.distributed.launch_environment import named
from hvdtrain.distributed.watchdog import tracebacks, waits
from hvdtrain.distributed.watchdog.shared_facts import SharedFacts, process_state
from hvdtrain.errors import OtherRankError
from hvdtrain.system.settings import DEBUG

STALLED = 76  # exit status of a rank that had waited too long, or that others waited for

_EXIT_FUNCTIONS_S = 10.0
_FIRST_PRINTS_S = 2.0
_QUOTED = 200  # characters of another rank's error

# What Horovod, Gloo and MPI say where the cause is another process's end.
_CAUSED_BY_OTHERS = (
    "Horovod has been shut down", "Connection closed by peer", "Connection reset by peer", "Broken pipe",
    "Another rank's training has ended with an error",
    "Connection refused", "Timed out waiting", "Application timeout", "Read timeout", "Write timeout", "Socket closed",
)  # fmt: skip
_HOROVODS = ("HorovodInternalError", "UnknownError", "XlaRuntimeError", "JaxRuntimeError")
# What torch says where a DataLoader's workers were ended: mpirun ends all processes of a rank's group.
_LOST_WORKER = re.compile(r"DataLoader worker \(pid.*(killed by signal: Terminated|exited unexpectedly)")


@dataclass
class RankExit:
    """The work to do when this process ends."""

    facts: SharedFacts  # where ranks report that they failed
    rank: int
    size: int
    host: str
    shut_down: Callable[[], None]  # Horovod's
    stalled_s: float = 0.0  # > 0: this rank's stall was reported, and so long others have to report theirs
    dead_threads: list[str] = field(default_factory=list)
    _pid: int = field(default_factory=os.getpid)
    is_ending: bool = False
    _hook: Any = None
    _failed_at: int | None = None  # steps done when the script requested to exit with an error's status

    @property
    def who(self) -> str:
        """This rank, for messages."""
        return f"rank {self.rank} (host {self.host})"

    def install(self) -> None:
        """Set the hooks; previous hooks are still called."""
        hook, thread_hook = sys.excepthook, threading.excepthook

        def on_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if os.getpid() != self._pid or hasattr(sys, "ps1") or sys.flags.interactive:
                hook(kind, error, trace)
            else:
                self._fail(error, hook)

        def on_thread_exception(args: Any) -> None:
            if os.getpid() == self._pid and args.exc_type is not SystemExit:
                name = args.thread.name if args.thread else "?"
                self.dead_threads.append(f"{name} ({args.exc_type.__name__}: {args.exc_value})")
                say(f"{self.who}: the thread {name} died of an exception, the others continue:")
            thread_hook(args)

        end = sys.exit

        def on_exit(status: Any = None) -> NoReturn:
            if os.getpid() == self._pid and threading.current_thread() is threading.main_thread():
                self.note_status(status)
            end(status)

        sys.exit = on_exit
        self._hook = sys.excepthook = on_exception
        threading.excepthook = on_thread_exception
        atexit.register(self._at_exit)

    def note_status(self, status: Any) -> None:
        """Note the status with which the script requests to exit: Python tells it to no function that runs at exit."""
        self._failed_at = None if status is None or status == 0 else waits.steps_done()

    @property
    def is_failing(self) -> bool:
        """True once an error ends this process, or a status that is not 0.

        If steps were taken since, the script has caught the SystemExit.
        """
        return self.is_ending or (self._failed_at is not None and self._failed_at == waits.steps_done())

    def _fail(self, error: BaseException, hook: Callable[..., Any]) -> None:
        code, failed_at = 1, time.time()
        waits.report_counted()
        try:
            if isinstance(error, KeyboardInterrupt):
                say(f"{self.who}: interrupted")
                code = 130
            elif os.environ.get(DEBUG) != "1" and (is_consequence(error) or self._lost_workers(error)):
                code = self._follow(error)
            else:
                self._report(error, hook, failed_at)
        finally:
            leave(code, self)

    def _lost_workers(self, error: BaseException) -> bool:
        """Return whether the launcher ended this rank's DataLoader workers, because another rank has failed."""
        return any(_LOST_WORKER.search(str(each)) for each in _chain(error)) and bool(self.facts.others("error"))

    def _report(self, error: BaseException, hook: Callable[..., Any], failed_at: float) -> None:
        """Print this rank's exception: completely, unless another rank has just printed the same one."""
        tracebacks.explain(error)
        text = tracebacks.format_error(error)
        last = "".join(traceback.format_exception_only(error)).strip().partition("\n")[0]
        if not self.facts.claim("first") and os.environ.get(DEBUG) != "1":
            until = time.monotonic() + _FIRST_PRINTS_S
            while not (errors := self.facts.all("error")) and time.monotonic() < until:
                time.sleep(0.05)
            for rank, first in errors.items():
                if rank != self.rank and is_same(last, self.rank, str(first.get("last_line")), rank):
                    say(f"{self.who}: the same {last.partition(':')[0]} as on rank {rank}")
                    self.facts.post("followed", {"rank": self.rank, "time": failed_at})
                    return
        heading = f"{self.who} failed after {waits.steps_done()} steps:"
        is_pythons = hook is sys.__excepthook__
        say(f"{heading}\n{text}" if is_pythons else heading)
        if not is_pythons:
            hook(type(error), error, error.__traceback__)
        what = {"rank": self.rank, "host": self.host, "time": failed_at, "text": text, "last_line": last}
        self.facts.post("followed" if is_consequence(error) else "error", what)

    def _follow(self, error: BaseException) -> int:
        """Say in one line why another rank's end ends this one; return the exit status."""
        time.sleep(self.stalled_s)
        stalled = list(self.facts.others("waits"))
        if self.stalled_s or stalled:
            reported = "reported above" if self.stalled_s else f"that {named(stalled)} reported"
            say(f"{self.who}: ended after the stall {reported}")
            return STALLED
        self.facts.post("followed", {"rank": self.rank, "time": time.time()})
        places = [place for frame, _ in traceback.walk_tb(error.__traceback__) if (place := waits.place(frame))]
        where = f"at {places[-1]}" if places else "for others"
        say(f"{self.who}: ended because {self._cause(error)}. It waited {where}; {DEBUG}=1 shows its traceback.")
        return 1

    def _cause(self, error: BaseException) -> str:
        if isinstance(error, OtherRankError):
            return f"rank {error.rank} failed first ({error.quoted[:_QUOTED]}); see its message"
        time.sleep(0.2)  # what the other rank writes down comes right after what it prints
        errors, ended = self.facts.others("error"), self.facts.others("ended")
        if errors:
            rank, first = min(errors.items(), key=lambda item: float(item[1].get("time", 0)))
            return f"rank {rank} failed first ({str(first.get('last_line', ''))[:_QUOTED]}); see its message"
        if ended:
            return f"{named(list(ended))} ended early, by sys.exit or at the end of the script, while others continued"
        followed = self.facts.all("followed")  # what they waited for is the cause, and may be on another host
        for rank, pid in self.facts.all("pid").items():
            state = process_state(int(pid)) if rank not in followed else ""
            if state:
                return f"rank {rank} (pid {pid}) {state}"
        return "another rank failed or ended first; its message, if it left one, comes before this line"

    def _at_exit(self) -> None:
        if os.getpid() != self._pid or self.is_ending:
            return
        if sys.excepthook is not self._hook and getattr(sys, "last_value", None) is not None:
            # A hook that took our place has shown the exception that ends this process.
            _flush_and_exit(1)
        self.facts.post("ended", {"rank": self.rank, "time": time.time()})
        self.shut_down()
        self.facts.leave()


def leave(code: int, this: RankExit | None = None) -> NoReturn:
    """End this process at once with `code`, after what was registered for its exit."""
    if this is not None:
        this.is_ending = True
    guard = threading.Timer(_EXIT_FUNCTIONS_S, os._exit, (code,))
    guard.daemon = True
    guard.start()
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
        if this is not None:
            this.facts.leave()
    _flush_and_exit(code)


def _flush_and_exit(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def say(text: str) -> None:
    """Print `text` to standard error, in one piece."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()  # what was printed before comes before
    with contextlib.suppress(Exception):
        sys.stderr.write(text.rstrip("\n") + "\n")
        sys.stderr.flush()


def is_caused_by_others(error: BaseException) -> bool:
    """Return whether an exception, or its cause, says that another process's end is the reason."""
    return any(
        type(each).__name__ in _HOROVODS and any(words in str(each) for words in _CAUSED_BY_OTHERS)
        for each in _chain(error)
    )


def is_consequence(error: BaseException) -> bool:
    """Return whether an exception only says that another rank has failed or ended."""
    return isinstance(error, OtherRankError) or is_caused_by_others(error)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Return an exception, and those that it was raised from."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)


def is_same(message: str, rank: int, other: str, other_rank: int) -> bool:
    """Return whether two ranks' exceptions are the same, though each may name its own rank."""
    one, two = (re.sub(rf"\brank {who}\b", "rank", text) for text, who in ((message, rank), (other, other_rank)))
    return message == other or one == two
