"""The caller's side of a function's run: gives ranks the task, shows what they print, takes their answers; its end."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from hvdtrain.errors import RankFailedError
from hvdtrain.launch import exchange
from hvdtrain.launch.arguments import LaunchSpec
from hvdtrain.launch.exchange import Message
from hvdtrain.launch.exit_cause import Cause
from hvdtrain.launch.rank_output import Line, OutputLines
from hvdtrain.system import process_tree
from hvdtrain.system.settings import DEBUG, EXIT_STOPPED

GRACE_S = 30.0  # as in `hvdtrain run`
_END_S = 10.0
_REFUSED = "refused a request from "  # how Horovod's servers report a stranger


def until_ended(follow: Callable[[], None], interrupt: Callable[[], None]) -> None:
    """Call `follow`, again after each KeyboardInterrupt and `interrupt`, until it returns; then raise the first one."""
    first: KeyboardInterrupt | None = None
    step = follow
    while True:
        try:
            step()
            if step is follow:
                break
            step = follow
        except KeyboardInterrupt as again:
            first, step = first or again, interrupt
    if first is not None:
        raise first.with_traceback(None)  # without the frames of this file


@dataclass
class Outcome:
    """The end of a function's run."""

    size: int  # number of ranks
    answers: dict[int, Message] = field(default_factory=dict)  # facts["kind"] is "result", "error" or "exit"
    cause: Cause | None = None  # what ended the job; None if it is not known
    seconds: float = 0.0
    tails: dict[int | None, list[str]] = field(default_factory=dict)  # a rank's last lines; None: the launcher's
    status: int = 0  # exit status of the process that ran the ranks

    def of_kind(self, kind: str) -> dict[int, Message]:
        """Return the answers of a kind, by rank."""
        return {rank: self.answers[rank] for rank in sorted(self.answers) if self.answers[rank].facts["kind"] == kind}

    def values(self, *, root_only: bool = False) -> list[Any]:
        """Return what each rank returned, or raise `problem`; with `root_only`, only rank 0's lines were shown."""
        if (problem := self.problem(root_only=root_only)) is not None:
            raise problem
        returned: list[Any] = []
        for rank in range(self.size):
            try:
                # A tuple of one, from a rank of this run.
                returned += pickle.loads(self.answers.pop(rank).pickled)  # noqa: S301
            except Exception as error:
                raise TypeError(f"what rank {rank} returned cannot be read here: {error}") from error
        return returned

    def problem(self, *, root_only: bool = False) -> Exception | None:
        """Return the exception to raise, a rank's own or a RankFailedError; None if every rank has returned."""
        failed, cause = self.of_kind("error"), self.cause
        own = {rank: answer for rank, answer in failed.items() if not answer.facts["others"]}
        # If a rank was killed or has left, the errors of other ranks are a consequence, not the cause.
        silent = cause if cause is not None and cause.rank not in self.answers else None
        killed = silent is not None and silent.killed
        left = killed or (silent is not None and silent.rank is not None) or self.of_kind("exit")
        first = min(own or failed, key=lambda rank: float(failed[rank].facts["time"]), default=None)
        if first is not None and ((first in own and not killed) or not left):
            return _raised(first, failed[first])
        return self._without_result(root_only=root_only) if len(self.of_kind("result")) < self.size else None

    def _without_result(self, *, root_only: bool) -> RankFailedError:
        """Return the error for ranks that ended without an answer."""
        if self.cause is None:
            return RankFailedError(f"the process that ran the ranks ended with status {self.status}; so did they")
        rank, code, text = self.cause.rank, self.cause.code, f"{self.cause} after {self.seconds:.0f} s"
        exits = {rank: answer.facts["code"] for rank, answer in self.of_kind("exit").items()}
        left = next((rank for rank in exits if exits[rank] == code), None)
        if rank is None and left is not None and code:  # Open MPI 5 does not always say which rank it was
            rank, text = left, f"rank {left} ended with status {code} after {self.seconds:.0f} s"
        elif code in (0, EXIT_STOPPED) or rank in self.of_kind("error"):  # that rank was not the first
            rank = next(iter([*exits, *(rank for rank in range(self.size) if rank not in self.answers)]))
            text = f"rank {rank} ended by itself, with status {exits.get(rank, code)}"
        # Lines that were not shown yet.
        lines = [line for line in self.tails.get(rank, ()) if line.strip() and (rank is None or (root_only and rank))]
        end = "; the end of what it printed:\n" + "\n".join(lines) if lines else ""
        return RankFailedError(f"{text}, before the function had returned{end}", rank=rank)


def _raised(rank: int, answer: Message) -> Exception:
    """Return what a rank raised: itself where it can be made again here."""
    facts = answer.facts
    where = RankFailedError(f"rank {rank} on host {facts['host']} {facts['what']}:\n{facts['text']}", rank=rank)
    try:
        error = pickle.loads(answer.pickled)  # noqa: S301 - from a rank of this run
    except Exception:  # noqa: BLE001 - its class may do or lack anything
        error = None
    if not isinstance(error, Exception):  # a rank's KeyboardInterrupt is not this process's
        return where
    error.__cause__ = where
    return error


class TaskServer:
    """Gives each of `size` ranks the task, and takes its answer; the socket is in `folder`, this user's alone."""

    def __init__(self, folder: Path, task: Message, *, size: int) -> None:
        self.answers: dict[int, Message] = {}
        self._task, self._missing, self._key = task, size, secrets.token_bytes(32)
        # What ranks need to find this server, and to trust each other.
        self.environment = {exchange.ADDRESS: str(folder / "call"), exchange.KEY: self._key.hex()}
        self._ranks: dict[Connection, int] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(self.environment[exchange.ADDRESS])
            self._listener.listen(128)
        except OSError:
            self._listener.close()
            raise

    def sources(self) -> list[socket.socket | Connection]:
        """Return what to wait for: `take` it once it is ready."""
        return [*([self._listener] if self._listener.fileno() >= 0 else []), *self._ranks]

    def take(self, source: object) -> None:
        """Let a rank in, or read its answer."""
        if source is self._listener:
            self._let_in()
        elif isinstance(source, Connection):
            with contextlib.suppress(EOFError, OSError):  # it has ended, perhaps in its answer: the launcher says how
                self.answers[self._ranks[source]] = Message.receive(source)
            del self._ranks[source]
            source.close()

    def drain(self) -> None:
        """Read the answers of ranks that have ended."""
        while ready := wait(list(self._ranks), timeout=0):
            for connection in ready:
                self.take(connection)

    def close(self) -> None:
        """Take no more answers: a rank that sends one gets an error."""
        for connection in self._ranks:
            connection.close()
        self._ranks.clear()
        self._listener.close()

    def _let_in(self) -> None:
        connection = Connection(self._listener.accept()[0].detach())
        try:
            exchange.prove_caller(connection, self._key)
            rank = int(json.loads(connection.recv_bytes())["rank"])
            self._task.send(connection)
        except (AuthenticationError, EOFError, OSError):  # a stranger, or one that was killed
            connection.close()
            return
        self._ranks[connection] = rank
        self._missing -= 1
        if not self._missing:  # nobody else is let in; the task may be large
            self._task = Message({})
            self._listener.close()


class FunctionJob:
    """A job that runs a function. All happens in the calling thread, so an interrupt may come at any moment."""

    def __init__(
        self,
        spec: LaunchSpec,
        line: Sequence[str],
        *,
        environment: Mapping[str, str],  # of the launcher and its ranks
        run_dir: Path,
        task: Message,  # the function, for `hvdtrain.launch.rank`
        show: Callable[[Sequence[Line]], None],  # takes what ranks print; with rank None what is said about the job
        rank: int | None = None,  # the one that the line starts, where it is no launcher's; what it prints has no mark
    ) -> None:
        self._run_dir, self._show, self._rank = run_dir, show, rank
        self._output = [OutputLines(), OutputLines()]
        self._unfinished = b""
        self._server = TaskServer(run_dir, task, size=spec.ranks)
        self.outcome = Outcome(spec.ranks, self._server.answers)
        self._report, write_end = os.pipe()
        supervisor = ["-m", "hvdtrain.launch.supervisor", str(write_end), str(GRACE_S), str(run_dir), spec.launcher]
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                [sys.executable, *supervisor, *line], env={**environment, **self._server.environment},
                stdin=pipe, stdout=pipe, stderr=pipe, pass_fds=(write_end,),
                start_new_session=True,  # an interrupt comes through this process alone
            )  # fmt: skip
        except BaseException:
            os.close(self._report)
            self._server.close()
            raise
        finally:
            os.close(write_end)
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        first, second = self._output
        self._open: dict[int, Callable[[bytes], None]] = {
            self._process.stdout.fileno(): lambda data: self._print(first.feed(data)),
            self._process.stderr.fileno(): lambda data: self._print(second.feed(data)),
            self._report: self._read_report,
        }

    def follow(self, also: Mapping[Connection, Callable[[], None]] | None = None) -> None:
        """Show what ranks print and take their answers until the job has ended; may be called again.

        `also` maps connections to what is called when one is ready.
        """
        also = also or {}
        while self._open:
            found = wait([*self._open, *self._server.sources(), *also])
            for ready in [each for each in also if each in found] or found:  # first: it may close the others
                if isinstance(ready, Connection) and ready in also:
                    also[ready]()
                elif not isinstance(ready, int):
                    self._server.take(ready)
                elif data := os.read(ready, 2**16):
                    self._open[ready](data)
                else:
                    del self._open[ready]
        for output in self._output:
            self._print(output.end())
        self._server.drain()

    def interrupt(self) -> None:
        """Ask the ranks to stop, and take no more answers; the second time, end them at once."""
        self._server.close()
        self._process.send_signal(signal.SIGINT)

    def close(self) -> None:
        """End all processes of the job, and store how it ended."""
        self._server.close()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()  # the first of them ends the helper process, and with it its job
        os.close(self._report)
        try:
            self.outcome.status = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self.outcome.status = self._process.wait()
        first, second = (output.tails for output in self._output)
        self.outcome.tails = {rank: [*first.get(rank, ()), *second.get(rank, ())] for rank in {*first, *second}}
        if self.outcome.cause is None:
            process_tree.end(str(self._run_dir))

    def _read_report(self, data: bytes) -> None:
        *whole, self._unfinished = (self._unfinished + data).split(b"\n")
        for line in whole:
            if line.startswith(b"{"):
                report = json.loads(line)
                self.outcome.seconds = report.pop("seconds")
                self.outcome.cause = Cause(**report)
            else:
                self._show([(None, line.decode(errors="replace"))])

    def _print(self, lines: Sequence[Line]) -> None:
        lines = [(self._rank if rank is None else rank, text) for rank, text in lines]
        # A launcher's lines are shown at the end, if no rank is the cause; a refused connection is shown at once.
        is_debug = os.environ.get(DEBUG) == "1"
        wanted = [(rank, text) for rank, text in lines if rank is not None or is_debug or text.startswith(_REFUSED)]
        if wanted:
            self._show(wanted)
