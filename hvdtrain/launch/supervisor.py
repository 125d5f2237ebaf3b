"""Start a job, restart it after a failure, and stop it in order on request."""

from __future__ import annotations

import contextlib
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
from hvdtrain.launch import exit_cause, job_folder, restarts, ssh
from hvdtrain.launch.exit_cause import Cause
from hvdtrain.launch.job import Guard, Job, Launch, adopt_orphans
from hvdtrain.launch.spec import LaunchSpec
from hvdtrain.system import process_tree, redact
from hvdtrain.system.settings import EXIT_STOPPED

_POLL_S = 0.5
_LAST_WORDS_S = 1.0  # for the other ranks to print, after a rank has failed
_TERM_S = 5.0  # from SIGTERM to SIGKILL
_UNDYING = "some processes of this job do not die, see ps: a device or file system may hang"
_ABORTED_S = 15.0  # for an mpirun that has aborted the job and waits for its daemons on other hosts
_STARTING_S = 30.0  # for hosts, before the first start
_AWAY_S = 600.0  # for hosts, before a restart; HVDTRAIN_STALL_S if that is shorter
_CLOSING_S = 5.0  # for a launcher whose ranks have ended: it reports their status
_REQUESTS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


@dataclass(frozen=True)
class Ending:
    """How one start of the job ended."""

    cause: Cause
    seconds: float
    requested: signal.Signals | None  # the first request to stop, if there was one


class Signals:
    """Within the block, signals that request a stop are collected, and the end of a child ends `wait`.

    After the block these signals are ignored: the job has ended, and its exit status must be returned.
    """

    def __init__(self) -> None:
        self.requests: list[signal.Signals] = []

    def __enter__(self) -> Signals:
        """Handle the signals."""
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
        """Ignore further requests."""
        for each in _REQUESTS:
            signal.signal(each, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, self._child_before)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._read)
        os.close(self._write)

    def wait(self, seconds: float) -> None:
        """Wait for a signal, for at most `seconds`."""
        if select.select([self._read], [], [], max(0.0, seconds))[0]:
            with contextlib.suppress(BlockingIOError):
                while os.read(self._read, 512):
                    pass

    def is_urgent(self) -> bool:
        """Return whether there was a second Ctrl-C."""
        return self.requests.count(signal.SIGINT) > 1


def run(launch: Launch, run_dir: Path) -> int:
    """Run the job to its end and return the exit status.

    0: every rank succeeded. 75: orderly stop. 128 + n: stopped by signal n, not in order. Else the status of the rank
    that ended first. `run_dir`, the job's private folder, is removed.
    """
    with _supervision(run_dir, ssh.ending(launch.ssh, run_dir)) as (guard, signals):
        return _run(launch, run_dir, guard, signals)


@contextlib.contextmanager
def _supervision(run_dir: Path, elsewhere: Sequence[str] = ()) -> Iterator[tuple[Guard, Signals]]:
    """Supervise all processes that a job starts; leave none behind."""
    adopt_orphans()
    with Signals() as signals:
        guard = Guard(run_dir, elsewhere)
        try:
            yield guard, signals
        finally:
            process_tree.end(str(run_dir), below=os.getpid(), without=(guard.pid,))
            job_folder.remove(run_dir)
            guard.dismiss()


def _run(launch: Launch, run_dir: Path, guard: Guard, signals: Signals) -> int:
    attempts: list[restarts.Attempt] = []
    while True:
        unreachable = _reach(launch, run_dir, signals, is_first=not attempts)
        if signals.requests:
            say(f"stopped by {signals.requests[0].name} before the {'re' * bool(attempts)}start")
            return 128 + signals.requests[0]
        if unreachable:
            say(f"gave up: {unreachable}")
            return attempts[-1].cause.code if attempts else 1
        job = Job(launch, run_dir, guard)
        try:
            ending = _follow(job, launch, signals, guard)
        finally:
            gone = job.end()
        if not gone:
            say(_UNDYING)
            return ending.cause.code or 1
        if ending.cause.code == 0:
            return 0
        if ending.cause.code == EXIT_STOPPED:
            _end_elsewhere(launch, run_dir)
            say("stopped on request; the same command resumes from the script's checkpoint, if it wrote one")
            return EXIT_STOPPED
        if ending.requested is not None:
            _end_elsewhere(launch, run_dir)
            return _stopped_hard(ending, run_dir, job)
        error = exit_cause.first_error(run_dir, listener=job.listener, cause=ending.cause)
        step = exit_cause.latest_step(run_dir, rank=ending.cause.rank)
        attempts.append(restarts.Attempt(ending.cause, ending.seconds, step, error))
        decision = restarts.judge(attempts, max_restarts=launch.max_restarts)
        if decision.pause_s is None:
            _end_elsewhere(launch, run_dir)
            return _give_up(attempts, decision)
        say(
            f"restart {len(attempts)} of {launch.max_restarts}: {ending.cause} after {_time(ending.seconds)}"
            + (f", at step {step}" if step is not None else "")
            + (f" ({error.last_line})" if error else "")
            + "; starting it again"
            + (f" in {_time(decision.pause_s)}" if decision.pause_s else "")
        )
        _empty(run_dir)
        deadline = time.monotonic() + decision.pause_s
        while not signals.requests and time.monotonic() < deadline:
            signals.wait(deadline - time.monotonic())


def _end_elsewhere(launch: Launch, run_dir: Path) -> None:
    """End the ranks on other hosts, when there is no restart: a killed launcher leaves them running."""
    if launch.ssh is not None:
        ssh.on_every_host(launch.ssh, "end", run_dir)


def _reach(launch: Launch, run_dir: Path, signals: Signals, *, is_first: bool) -> str:
    """Wait until the job's other hosts can be reached; return why one cannot, else "".

    A host that has just died may reboot, which takes minutes. So wait as long as a rank may wait for others.
    """
    if launch.ssh is None:
        return ""

    def wait(seconds: float) -> bool:
        signals.wait(seconds)
        return bool(signals.requests)

    limit_s = _STARTING_S if is_first else min(watchdog.limit_s(), _AWAY_S)
    return ssh.wait_for_hosts(launch.ssh, run_dir, limit_s=limit_s, wait=wait, say=say)


def _follow(job: Job, launch: Launch, signals: Signals, guard: Guard) -> Ending:
    """Wait until the launcher has ended, or until the job must be ended."""
    requested_at: float | None = None
    ranks_at = 0.0  # after a request to stop: the last time at which there were ranks
    terminated_at: float | None = None
    failed_at: float | None = None
    aborted_at: float | None = None

    def wait(seconds: float) -> bool:
        signals.wait(seconds)
        return signals.is_urgent()

    while (status := job.status()) is None:
        now = time.monotonic()
        guard.ensure()
        cause = job.listener.cause()
        if signals.is_urgent():
            say("second Ctrl-C: ending everything at once")
            break
        if signals.requests and requested_at is None:
            requested_at = ranks_at = now
            say(f"{signals.requests[0].name}: asking the ranks to stop; they get {_time(launch.grace_s)}")
            if launch.ssh is not None and not launch.spec.is_mpirun:  # mpirun forwards it itself
                ssh.on_every_host(launch.ssh, "stop", job.run_dir, wait=wait)
        if requested_at is not None and terminated_at is None:
            ranks = job.request_stop(exit_cause.rank_pids(job.run_dir))
            if ranks:
                ranks_at = now
            if now - requested_at > launch.grace_s if ranks else now - ranks_at > _CLOSING_S:
                terminated_at = now
                if ranks:
                    say(f"the ranks have not ended within {_time(launch.grace_s)}: ending them")
                job.send(signal.SIGTERM)
        elif terminated_at is not None and now - terminated_at > _TERM_S:
            break
        if cause is not None and cause.code not in (0, EXIT_STOPPED) and not launch.spec.elastic:
            failed_at = failed_at or now
            if now - failed_at > _LAST_WORDS_S and requested_at is None:
                break
        if job.listener.is_aborted() and not launch.spec.elastic:
            aborted_at = aborted_at or now
            if now - aborted_at > _ABORTED_S:
                break
        signals.wait(_POLL_S if requested_at is None and failed_at is None else 0.1)
    seconds = job.seconds()
    job.end()  # only now is all of its output here
    cause = _cause(job, status, launch.spec.launcher)
    return Ending(cause, seconds, signals.requests[0] if signals.requests else None)


def _cause(job: Job, status: int | None, launcher: str) -> Cause:
    found = job.listener.cause()
    if status == 0 and (found is None or found.code != exit_cause.LOST):
        return Cause(launcher, 0)
    if status == EXIT_STOPPED:
        return Cause("the job", EXIT_STOPPED)
    if found is not None and found.code:
        return found
    if status is None:
        reported = exit_cause.reported_by_ranks(job.run_dir, host=socket.gethostname())
        return (reported if job.listener.is_aborted() else None) or Cause(launcher, 128 + signal.SIGKILL)
    return Cause(launcher, 128 - status if status < 0 else status)


def _stopped_hard(ending: Ending, run_dir: Path, job: Job) -> int:
    assert ending.requested is not None
    error = exit_cause.first_error(run_dir, listener=job.listener, cause=ending.cause)
    if error is not None:
        _show(error)
    say(f"stopped by {ending.requested.name}, but not in order: {ending.cause}; the last checkpoint remains")
    return 128 + ending.requested


def _give_up(attempts: Sequence[restarts.Attempt], decision: restarts.RestartDecision) -> int:
    last, first = attempts[-1], decision.first
    if first.error is not None:
        _show(first.error)
    tried = f"{len(attempts)} attempt{'s' * (len(attempts) > 1)}"
    which = "" if first is last else f"; the first of them: {first.cause}"
    say(f"gave up after {tried}, because {decision.reason}: {last.cause} after {_time(last.seconds)}{which}")
    return last.cause.code


def _show(error: exit_cause.RankError) -> None:
    say(f"the first error, of rank {error.rank} on host {error.host}:\n{error.text}")


def _empty(run_dir: Path) -> None:
    """Remove what the last attempt left in the job's folder."""
    for path in run_dir.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 or seconds == round(seconds) else f"{seconds:.1f} s"


def say(text: str) -> None:
    """Print one line of hvdtrain's, without the secrets that a command line or a rank's error may contain."""
    try:
        sys.stderr.write(f"hvdtrain run: {redact.text(text)}\n")
        sys.stderr.flush()
    except OSError:
        pass


def _once(report: str, grace_s: str, run_dir: str, launcher: str, *line: str) -> None:
    """Run a job once for `hvdtrain.launch.function_job`, and end it when the calling process ends.

    In a helper process, because this adopts orphans, handles signals and ends all its descendants, which must not
    happen to a notebook. The launcher's output goes to this process's output. The file descriptor `report` receives
    lines for people, then one line of JSON: how the job ended.
    """
    sys.stderr = os.fdopen(int(report), "w", buffering=1, encoding="utf-8")
    os.set_inheritable(int(report), False)
    threading.Thread(target=_end_with_caller, daemon=True).start()
    launch = Launch(LaunchSpec(launcher), line, dict(os.environ), grace_s=float(grace_s))
    with _supervision(Path(run_dir)) as (guard, signals):
        job = Job(launch, Path(run_dir), guard)
        try:
            ending = _follow(job, launch, signals, guard)
        finally:
            if not job.end():
                say(_UNDYING)
    with contextlib.suppress(OSError):  # the caller has ended
        sys.stderr.write(json.dumps({**asdict(ending.cause), "seconds": ending.seconds}) + "\n")


def _end_with_caller() -> None:
    """Kill this process when the caller, which holds standard input, has ended; the guard then ends the job."""
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    _once(*sys.argv[1:])
