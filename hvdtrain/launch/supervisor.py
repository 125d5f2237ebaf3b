"""Start a job, restart it after a failure, and stop it in order on request."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hvdtrain.distributed import watchdog
from hvdtrain.distributed.watchdog import shared_facts
from hvdtrain.launch import exit_cause, job_folder, out_of_memory, ssh
from hvdtrain.launch.arguments import LaunchSpec
from hvdtrain.launch.exit_cause import LAST_WORDS_S, Cause, RankError
from hvdtrain.launch.job import Guard, Job, Launch
from hvdtrain.system import redact
from hvdtrain.system.settings import EXIT_STOPPED

_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.5
_TERM_S = 5.0  # from SIGTERM to SIGKILL
_UNDYING = "some processes of this job do not die, see ps: a device or file system may hang"
_ABORTED_S = 15.0  # for an mpirun that has aborted the job and waits for its daemons on other hosts
_STARTING_S = 30.0  # for hosts, before the first start
_AWAY_S = 600.0  # for hosts, before a restart; HVDTRAIN_STALL_S if that is shorter
_CLOSING_S = 5.0  # for a launcher whose ranks have ended: it reports their status
_REQUESTS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
# An attempt that reported no step counts as progress if it lasted this long.
LONG_S = 60.0
_ATTEMPTS_WITHOUT_PROGRESS = 3
_LONGEST_PAUSE_S = 30.0
# Errors that would occur in every attempt.
_PERMANENT_ERRORS = ("ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError")
# Without the retry: once the other run has ended, its checkpoint would be resumed as this run's, with status 0.
_FOLDER_IN_USE = "FolderInUseError"
_USAGE = (2, 126, 127)  # wrong arguments; no such program


class Signals:
    """Within the block, signals that request a stop are collected, and the end of a child ends `wait`."""

    def __init__(self) -> None:
        self.requests: list[signal.Signals] = []

    def __enter__(self) -> Signals:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for each in _REQUESTS:
            if signal.getsignal(each) is not signal.SIG_IGN:  # nohup's choice
                signal.signal(each, lambda number, frame: self.requests.append(signal.Signals(number)))
        self._child_before = signal.signal(signal.SIGCHLD, lambda number, frame: None)
        return self

    def __exit__(self, *_: object) -> None:
        """Ignore further requests: the job has ended, and its exit status must be returned."""
        for each in _REQUESTS:
            signal.signal(each, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, self._child_before)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._read)
        os.close(self._write)

    def wait(self, seconds: float) -> bool:
        """Wait for a signal, for at most `seconds`; return whether a stop was requested."""
        if select.select([self._read], [], [], max(0.0, seconds))[0]:
            with contextlib.suppress(BlockingIOError):
                while os.read(self._read, 512):
                    pass
        return bool(self.requests)

    def is_urgent(self) -> bool:
        """Return whether there was a second Ctrl-C."""
        return self.requests.count(signal.SIGINT) > 1


def run(launch: Launch, run_dir: Path) -> int:
    """Run the job to its end, remove its folder, and return the exit status: see `hvdtrain --help`."""
    with _supervision(run_dir, ssh.ending(launch.ssh, run_dir)) as (guard, signals):
        attempts: list[Attempt] = []
        while True:
            # A host that has just died may reboot, which takes minutes: wait as long as a rank may wait for others.
            limit_s = _STARTING_S if not attempts or launch.ssh is None else min(watchdog.limit_s(), _AWAY_S)
            unreachable = ssh.wait_for_hosts(launch.ssh, run_dir, limit_s=limit_s, wait=signals.wait, say=say)
            if signals.requests:
                say(f"stopped by {signals.requests[0].name} before the {'re' * bool(attempts)}start")
                return 128 + signals.requests[0]
            if unreachable:
                say(f"gave up: {unreachable}")
                return attempts[-1].cause.code if attempts else 1
            job = Job(launch, run_dir, guard)
            try:
                cause, seconds = _follow(job, launch, signals, guard)
            finally:
                gone = job.end()
            if not gone:
                say(_UNDYING)
                return cause.code or 1
            if cause.code == 0:
                return 0
            said, size = exit_cause.said_by_ranks(job.listener.text()), len(launch.by_rank)
            cause = exit_cause.root_cause(run_dir, cause, host=socket.gethostname(), said=said, size=size)
            requests = (*signals.requests,)  # a later one does not make this end a requested one
            error = exit_cause.first_error(run_dir, listener=job.listener, cause=cause)
            step = exit_cause.latest_step(run_dir, rank=cause.rank)
            attempts.append(Attempt(cause, seconds, step, error))
            decision = judge(attempts, max_restarts=launch.max_restarts)
            if cause.code == EXIT_STOPPED or requests or decision.pause_s is None:
                if launch.ssh is not None:  # a killed launcher leaves ranks running on other hosts
                    ssh.on_every_host(launch.ssh, "end", run_dir)
                _say_how_it_ended(attempts, decision, requests)
                return 128 + requests[0] if requests and cause.code != EXIT_STOPPED else cause.code
            how = f"{cause} after {_time(seconds)}" + (f", at step {step}" if step is not None else "")
            how += f" ({error.last_line})" if error else ""
            soon = f" in {_time(decision.pause_s)}" if decision.pause_s else ""
            say(f"restart {len(attempts)} of {launch.max_restarts}: {how}; starting it again{soon}")
            for path in run_dir.iterdir():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
            deadline = time.monotonic() + decision.pause_s
            while time.monotonic() < deadline and not signals.wait(deadline - time.monotonic()):
                pass


@contextlib.contextmanager
def _supervision(run_dir: Path, elsewhere: Sequence[str] = ()) -> Iterator[tuple[Guard, Signals]]:
    """Supervise all processes that a job starts, and end them all on exit."""
    # Become the parent of every orphan below this process: a rank whose launcher was killed is still found.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with Signals() as signals:
        guard = Guard(run_dir, elsewhere)
        try:
            yield guard, signals
        finally:
            guard.end()
            job_folder.remove(run_dir)
            guard.dismiss()


def _follow(job: Job, launch: Launch, signals: Signals, guard: Guard) -> tuple[Cause, float]:
    """Wait until the launcher has ended, or until the job must be ended; return what ended it, after how long."""
    requested_at = terminated_at = failed_at = aborted_at = 0.0  # 0: not yet
    ranks_at = 0.0  # after a request to stop: the last time at which there were ranks
    while (status := job.status()) is None:
        now = time.monotonic()
        guard.ensure()
        cause = job.listener.cause
        if signals.is_urgent():
            say("second Ctrl-C: ending everything at once")
            break
        if signals.requests and not requested_at:
            requested_at = ranks_at = now
            say(f"{signals.requests[0].name}: asking the ranks to stop; they get {_time(launch.grace_s)}")
            if launch.ssh is not None and not launch.spec.is_mpirun:  # mpirun forwards it itself
                ssh.on_every_host(
                    launch.ssh, "stop", job.run_dir, wait=lambda s: signals.wait(s) and signals.is_urgent()
                )
        if requested_at and not terminated_at:
            ranks = job.request_stop(shared_facts.read(job.run_dir, "pid"))
            ranks_at = now if ranks else ranks_at
            if now - requested_at > launch.grace_s if ranks else now - ranks_at > _CLOSING_S:
                terminated_at = now
                if ranks:
                    say(f"the ranks have not ended within {_time(launch.grace_s)}: ending them")
                job.send(signal.SIGTERM)
        elif terminated_at and now - terminated_at > _TERM_S:
            break
        if cause is not None and cause.code not in (0, EXIT_STOPPED) and not launch.spec.elastic:
            failed_at = failed_at or now
            if now - failed_at > LAST_WORDS_S and not requested_at:
                break
        if job.listener.is_aborted and not launch.spec.elastic:
            aborted_at = aborted_at or now
            if now - aborted_at > _ABORTED_S:
                break
        signals.wait(0.1 if requested_at or failed_at else _POLL_S)
    seconds = time.monotonic() - job.began
    job.end()  # only now is all of its output here
    cause = _cause(job, status, launch.spec.launcher)
    host = "" if cause.rank is None else job.listener.host_of(cause.rank) or cause.host
    if note := out_of_memory.note(job.run_dir, cause, host=host, kills_before=job.oom_kills, route=launch.ssh):
        say(note)
    return cause, seconds


def _cause(job: Job, status: int | None, launcher: str) -> Cause:
    found = job.listener.cause
    if status == 0 and (found is None or found.code != exit_cause.LOST):
        return Cause(launcher, 0)
    if status == EXIT_STOPPED:
        return Cause("the job", EXIT_STOPPED)
    if found is not None and found.code:
        return found
    if status is None:
        reported = exit_cause.reported_by_ranks(job.run_dir, host=socket.gethostname())
        return (reported if job.listener.is_aborted else None) or Cause(launcher, 128 + signal.SIGKILL)
    return Cause(launcher, 128 - status if status < 0 else status)


@dataclass(frozen=True)
class Attempt:
    """A start of the job that failed."""

    cause: Cause
    seconds: float
    step: int | None = None  # the last one that the failed rank reported, or any rank
    error: RankError | None = None


@dataclass(frozen=True)
class RestartDecision:
    """Restart after a pause, or give up for a reason."""

    pause_s: float | None  # None to give up
    reason: str
    first: Attempt  # whose error is the root cause


def judge(attempts: Sequence[Attempt], *, max_restarts: int) -> RestartDecision:
    """Decide what to do after `attempts`: all failed attempts, oldest first, at least one."""
    last = attempts[-1]
    name = last.error.name if last.error else ""
    if name == _FOLDER_IN_USE or (not last.step and (last.cause.code in _USAGE or name in _PERMANENT_ERRORS)):
        return RestartDecision(None, "it would end the same way again", last)
    stuck = _attempts_without_progress(attempts)
    before, now = (stuck[-2].error, stuck[-1].error) if len(stuck) > 1 else (None, None)
    is_same = before is not None and now is not None and now.is_like(before)
    if len(stuck) >= _ATTEMPTS_WITHOUT_PROGRESS or is_same:
        return RestartDecision(None, f"{len(stuck)} attempts in a row made no progress", stuck[0])
    if len(attempts) > max_restarts:
        used_up = {0: "--max-restarts is 0", 1: "its only restart is used up"}
        reason = used_up.get(max_restarts, f"all {max_restarts} restarts are used up")
        return RestartDecision(None, reason, stuck[0] if stuck else last)
    # After progress restart at once: the job itself works. Without progress double the pause.
    return RestartDecision(min(_LONGEST_PAUSE_S, 2.0 ** (len(stuck) - 1)) if stuck else 0.0, "", last)


def _attempts_without_progress(attempts: Sequence[Attempt]) -> list[Attempt]:
    """Return the attempts since the last progress, oldest first. Progress is a step beyond all earlier ones."""
    trailing: list[Attempt] = []
    best = 0
    for attempt in attempts:
        if attempt.step is not None and attempt.step > best:
            best, trailing = attempt.step, []
        elif not attempt.step and attempt.seconds >= LONG_S:
            trailing = []
        else:
            trailing.append(attempt)
    return trailing


def _say_how_it_ended(
    attempts: Sequence[Attempt], decision: RestartDecision, requests: Sequence[signal.Signals]
) -> None:
    last = attempts[-1]
    if last.cause.code == EXIT_STOPPED:
        say("stopped on request; the same command resumes from the script's checkpoint, if it wrote one")
        return
    first = last if requests else decision.first
    if (error := first.error) is not None:
        number = next(number for number, each in enumerate(attempts, 1) if each is first)
        when = f", in attempt {number} of {len(attempts)}" if len(attempts) > 1 else ""
        # Not the whole traceback again, if the rank, or a rank in the last attempt, has just printed it.
        is_above = last.error is not None and last.error.is_printed and error.is_like(last.error)
        text = f" (its traceback is above): {error.last_line}" if is_above else f":\n{error.text}"
        say(f"the first error, of rank {error.rank} on host {error.host}{when}{text}")
    if requests and last.cause.code == 128 + signal.SIGTERM and not last.step:
        say(f"stopped by {requests[0].name}; no rank had recorded a step")
        return
    if requests:
        say(f"stopped by {requests[0].name}, but not in order: {last.cause}; the last checkpoint remains")
        return
    tried = f"{len(attempts)} attempt{'s' * (len(attempts) > 1)}"
    which = "" if first is last else f"; the first of them: {first.cause}"
    say(f"gave up after {tried}, because {decision.reason}: {last.cause} after {_time(last.seconds)}{which}")


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 or seconds == round(seconds) else f"{seconds:.1f} s"


def say(text: str) -> None:
    """Print one line of hvdtrain's, without the secrets that a command line or a rank's error may contain."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"hvdtrain run: {redact.text(text)}\n")
        sys.stderr.flush()


def _once(report: str, grace_s: str, run_dir: str, launcher: str, *line: str) -> None:
    """Run a job once for `function_job`; the file descriptor `report` receives lines, then how it ended, as JSON."""
    # In a helper process: this adopts orphans, handles signals and ends its descendants, which a notebook must not do.
    sys.stderr = os.fdopen(int(report), "w", buffering=1, encoding="utf-8")
    os.set_inheritable(int(report), False)
    threading.Thread(target=_end_with_caller, daemon=True).start()
    launch = Launch(LaunchSpec(launcher), line, dict(os.environ), grace_s=float(grace_s))
    with _supervision(Path(run_dir)) as (guard, signals):
        job = Job(launch, Path(run_dir), guard)
        try:
            cause, seconds = _follow(job, launch, signals, guard)
        finally:
            if not job.end():
                say(_UNDYING)
    with contextlib.suppress(OSError):  # the caller has ended
        sys.stderr.write(json.dumps({**asdict(cause), "seconds": seconds}) + "\n")


def _end_with_caller() -> None:
    """Kill this process when the caller, which holds standard input, has ended; the guard then ends the job."""
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    _once(*sys.argv[1:])
