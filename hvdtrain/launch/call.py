"""The caller's side of a function's run: its output as it comes, its answers, and its end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path

from hvdtrain.launch.exchange import Exchange, Message
from hvdtrain.launch.exit_cause import Cause
from hvdtrain.launch.rank_output import Line, Lines
from hvdtrain.launch.spec import LaunchSpec
from hvdtrain.system import process_tree
from hvdtrain.system.settings import DEBUG

_END_S = 10.0
_REFUSED = "refused a request from "  # so Horovod's servers begin to tell of a stranger


class Call:
    """A job that runs a function. Everything happens in the calling thread: an interrupt reaches it at any moment.

    Args:
        spec: what is launched.
        line: the launcher's command line.
        environment: of the launcher and its ranks.
        run_dir: the job's private folder.
        task: the function, for `hvdtrain.launch.rank`.
        grace_s: what ranks get to stop in order after an interrupt.
        show: takes lines that ranks print as they come, and with rank None what is said about the job.
        rank: the one that the command line is, where it is no launcher; its lines have no mark.

    Attributes:
        cause: what ended the job; None where nobody can tell.
        seconds: how long it ran.
    """

    def __init__(
        self,
        spec: LaunchSpec,
        line: Sequence[str],
        *,
        environment: Mapping[str, str],
        run_dir: Path,
        task: Message,
        grace_s: float,
        show: Callable[[Sequence[Line]], None],
        rank: int | None = None,
    ) -> None:
        self.cause: Cause | None = None
        self.seconds = 0.0
        self._run_dir, self._show, self._rank = run_dir, show, rank
        self._output = [Lines(), Lines()]
        self._said = b""
        self._exchange = Exchange(run_dir, task, size=spec.ranks)
        report, write_end = os.pipe()
        try:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "hvdtrain.launch.helper_process",
                    str(write_end),
                    str(grace_s),
                    str(run_dir),
                    spec.launcher,
                    *line,
                ],
                env={**environment, **self._exchange.environment()},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(write_end,),
                start_new_session=True,  # an interrupt comes through this process alone
            )
        except BaseException:
            os.close(report)
            self._exchange.close()
            raise
        finally:
            os.close(write_end)
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        first, second = self._output
        self._handlers: dict[int, Callable[[bytes], None]] = {
            self._process.stdout.fileno(): lambda data: self._print(first.feed(data)),
            self._process.stderr.fileno(): lambda data: self._print(second.feed(data)),
            report: self._hear,
        }
        self._report = report
        self._open = list(self._handlers)

    def follow(self, also: Mapping[Connection, Callable[[], None]] | None = None) -> None:
        """Show what ranks print and take what they answer, until the job has ended; may be begun again.

        Args:
            also: what else to wait for meanwhile, and whom to call when it is ready.
        """
        also = also or {}
        while self._open:
            found = wait([*self._open, *self._exchange.sources(), *also])
            for ready in [each for each in also if each in found] or found:  # first: it may close the others
                if isinstance(ready, Connection) and ready in also:
                    also[ready]()
                elif isinstance(ready, int):
                    data = os.read(ready, 2**16)
                    if data:
                        self._handlers[ready](data)
                    else:
                        self._open.remove(ready)
                else:
                    self._exchange.take(ready)
        for output in self._output:
            self._print(output.end())
        self._exchange.drain()

    def interrupt(self) -> None:
        """Ask the ranks to stop, and take no answers any more; the second time, end them at once."""
        self._exchange.close()
        self._process.send_signal(signal.SIGINT)

    @property
    def answers(self) -> dict[int, Message]:
        """What ranks have answered."""
        return self._exchange.answers

    def tail(self, rank: int | None) -> list[str]:
        """Return the last lines that a rank printed; the launcher's for None."""
        return [line for output in self._output for line in output.tails.get(rank, ())]

    def status(self) -> int:
        """Return the exit status of the process between."""
        return self._process.wait()

    def close(self) -> None:
        """Leave nothing behind, however it ended."""
        self._exchange.close()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()  # the first of them ends the process between, and with it its job
        os.close(self._report)
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self.cause is None:
            process_tree.end(str(self._run_dir))
            shutil.rmtree(self._run_dir, ignore_errors=True)

    def _hear(self, data: bytes) -> None:
        *whole, self._said = (self._said + data).split(b"\n")
        for line in whole:
            if line.startswith(b"{"):
                told = json.loads(line)
                self.cause = Cause(told["who"], told["code"], told["rank"])
                self.seconds = told["seconds"]
            else:
                self._show([(None, line.decode(errors="replace"))])

    def _print(self, lines: Sequence[Line]) -> None:
        lines = [(self._rank if rank is None else rank, text) for rank, text in lines]
        # A launcher's own words are told where no rank is to blame, but who is refused is named at once.
        is_debug = os.environ.get(DEBUG) == "1"
        wanted = [(rank, text) for rank, text in lines if rank is not None or is_debug or text.startswith(_REFUSED)]
        if wanted:
            self._show(wanted)
