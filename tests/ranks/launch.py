"""Start one set of ranks under horovodrun, follow their events, and end all of them when one fails or hangs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TOKEN = "HVDTRAIN_RANKS_TOKEN"  # marks every process of one launch, also those that left its process group
POLL_S = 0.05
FAILURE_GRACE_S = 3.0  # the time that other ranks get to report the same failure
EXIT_LIMIT_S = 90.0  # a busy machine takes most of it to end a process that has compiled a lot
TAIL_LINES = 60


@dataclass(frozen=True)
class Limits:
    """Limits in seconds: of one test, of import and collection, and of a whole group."""

    test_s: float = 120.0
    start_s: float = 180.0
    group_s: float = 900.0


@dataclass
class Failure:
    """One failure: the test (or None), the ranks that reported it, and what they said."""

    nodeid: str | None
    ranks: list[int]
    text: str


@dataclass
class RankState:
    """The output of one rank so far."""

    offset: int = 0
    pid: int | None = None
    collected: list[str] | None = None
    running: str | None = None
    running_since: float = 0.0
    limit_s: float | None = None
    ended: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    failure: dict[str, Any] | None = None
    status: int | None = None


@dataclass
class Outcome:
    """The results of one launch. `done` lists the tests that a further launch need not repeat."""

    passed: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    warnings: set[str] = field(default_factory=set)
    collected: int = 0
    done: list[str] = field(default_factory=list)
    repeatable: bool = False


def rank_environment(own: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of ranks that share two cores: this process's, what is `own`, and one thread a rank."""
    environment = {
        **os.environ,
        **own,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    # The ranks decide by these names whether they are ranks: none may leak in from outside.
    leaks = ("HOROVOD_RANK", "HOROVOD_SIZE", "OMPI_COMM_", "PYTEST_CURRENT_TEST")
    return {name: value for name, value in environment.items() if not name.startswith(leaks)}


class Launch:
    """The ranks of one launch, from horovodrun's start to the end of the last process."""

    def __init__(
        self,
        *,
        size: int,
        targets: Sequence[Path],
        directory: Path,
        environment: dict[str, str],
        launcher_options: Sequence[str] = (),
        pytest_arguments: Sequence[str] = (),
        done: Sequence[str] = (),
        limits: Limits,
        on_test: Callable[[str, bool], None],
    ) -> None:
        self.size = size
        self.directory = directory
        self.limits = limits
        self.on_test = on_test
        self.ranks = [RankState() for _ in range(size)]
        self.outcome = Outcome()
        self.token = uuid.uuid4().hex
        directory.mkdir(parents=True)
        (directory / "done.json").write_text(json.dumps(list(done)))
        self.command = [
            str(Path(sys.executable).parent / "horovodrun"),
            *("-np", str(size), "-H", f"localhost:{size}", *launcher_options),
            *(sys.executable, str(HERE / "worker.py"), *map(str, targets), *pytest_arguments),
        ]
        of_pytest = {"HVDTRAIN_RANKS_DIR": str(directory), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        self.environment = rank_environment({**environment, TOKEN: self.token, **of_pytest})

    def run(self) -> Outcome:
        """Run the ranks to their end and return what they found."""
        self.started = time.time()
        with (self.directory / "launcher.log").open("wb") as log:
            self.process = subprocess.Popen(
                self.command, cwd=ROOT, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
            try:
                self._watch()
            finally:
                self._end_processes()
        self._conclude()
        return self.outcome

    # --- following the ranks -------------------------------------------------------------------------------------

    def _watch(self) -> None:
        all_ended_since: float | None = None
        while True:
            exited = self.process.poll() is not None
            self._read_events()
            if self._failed() or self._agreed_on_nothing() or self._too_long():
                return
            if exited:
                self._explain_exit()
                return
            if all(rank.status is not None for rank in self.ranks):
                all_ended_since = all_ended_since or time.time()
                if time.time() - all_ended_since > EXIT_LIMIT_S:
                    self._fail_hang(f"the ranks ran their tests, but had not exited {EXIT_LIMIT_S:.0f} s later")
                    return
            time.sleep(POLL_S)

    def _read_events(self) -> None:
        for number, rank in enumerate(self.ranks):
            path = self.directory / f"events-{number}.jsonl"
            if not path.exists():
                continue
            with path.open("rb") as stream:
                stream.seek(rank.offset)
                for line in stream:
                    if not line.endswith(b"\n"):
                        break  # half a line: the rest comes with the next poll
                    rank.offset += len(line)
                    self._take(number, rank, json.loads(line))

    def _take(self, number: int, rank: RankState, event: dict[str, Any]) -> None:
        match event["event"]:
            case "begin":
                rank.pid = event["pid"]
            case "collected":
                rank.collected = event["nodeids"]
            case "test_start":
                rank.running, rank.running_since = event["nodeid"], event["time"]
                rank.limit_s = event["limit_s"]
            case "test_skipped":
                rank.skipped[event["nodeid"]] = event["reason"]
            case "test_end":
                rank.running = None
                rank.ended.append(event["nodeid"])
                if number == 0:
                    self.on_test(event["nodeid"], event["nodeid"] in rank.skipped)
            case "warning":
                self.outcome.warnings.add(event["text"])
            case "test_failed" | "collect_error":
                rank.failure = event
            case "end":
                rank.status = event["status"]

    def _failed(self) -> bool:
        failed = [number for number, rank in enumerate(self.ranks) if rank.failure]
        if not failed:
            return False
        deadline = time.time() + FAILURE_GRACE_S
        while len(failed) < self.size and time.time() < deadline and self.process.poll() is None:
            time.sleep(POLL_S)
            self._read_events()
            failed = [number for number, rank in enumerate(self.ranks) if rank.failure]
        reports: dict[tuple[str, str], list[int]] = {}
        for number in failed:
            event = self.ranks[number].failure or {}
            reports.setdefault((event["nodeid"], event["text"]), []).append(number)
        for (nodeid, text), ranks in reports.items():
            self.outcome.failures.append(Failure(nodeid, ranks, text))
        for number, rank in enumerate(self.ranks):
            if number not in failed:
                where = f"in {rank.running}" if rank.running else "between tests"
                self.outcome.failures[-1].text += f"\n(rank {number} was {where})"
        self._repeat_after([self.ranks[number].running for number in failed])
        return True

    def _agreed_on_nothing(self) -> bool:
        """Compare the ranks' tests and let them start; True if they must not."""
        go = self.directory / "go"
        lists = [rank.collected for rank in self.ranks]
        if go.exists() or any(nodeids is None for nodeids in lists):
            return False
        first = lists[0] or []
        self.outcome.collected = len(first)
        for number, nodeids in enumerate(lists):
            if nodeids != first:
                only = sorted(set(nodeids or []) ^ set(first))
                what = f"only on one of them: {', '.join(only)}" if only else "the same tests in another order"
                self._fail(f"rank 0 and rank {number} would run different tests; {what}", [0, number])
                return True
        if not first:
            return True
        go.touch()
        return False

    def _too_long(self) -> bool:
        now = time.time()
        for number, rank in enumerate(self.ranks):
            limit_s = rank.limit_s or self.limits.test_s
            if rank.running and now - rank.running_since > limit_s:
                self._fail_hang(f"rank {number} was still in {rank.running} after {limit_s:g} s", rank.running)
                return True
            if rank.collected is None and now - self.started > self.limits.start_s:
                self._fail_hang(f"rank {number} had not collected its tests after {self.limits.start_s:g} s")
                return True
        if now - self.started > self.limits.group_s:
            self._fail_hang(f"the group was not through after {self.limits.group_s:g} s")
            return True
        return False

    # --- saying what went wrong ----------------------------------------------------------------------------------

    def _fail(self, text: str, ranks: Sequence[int] = (), nodeid: str | None = None) -> None:
        self.outcome.failures.append(Failure(nodeid, list(ranks), text))

    def _fail_hang(self, text: str, nodeid: str | None = None) -> None:
        parts = [text]
        for rank in self.ranks:
            if rank.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.pid, signal.SIGUSR1)
        time.sleep(0.5)
        for number in range(self.size):
            parts += [f"----- rank {number}: stacks -----", self._read(f"stacks-{number}.log")]
            parts += [f"----- rank {number}: end of its output -----", self._read(f"rank-{number}.log", 20)]
        self._fail("\n".join(parts), range(self.size), nodeid)
        if nodeid is not None:
            self._repeat_after([nodeid])

    def _explain_exit(self) -> None:
        """Explain ranks that are gone without having said how their tests went."""
        lost = [number for number, rank in enumerate(self.ranks) if rank.status not in (0, 5)]
        status = self.process.returncode
        if not lost and status == 0:
            return
        if not lost:
            self._fail(f"all tests ran, but horovodrun exited with status {status}\n" + self._read("launcher.log"))
            return
        running = [self.ranks[number].running for number in lost]
        parts = [f"horovodrun exited with status {status}"]
        for number in lost:
            rank = self.ranks[number]
            how = "without a report" if rank.status is None else f"with pytest's status {rank.status}"
            where = f"in {rank.running}" if rank.running else "outside a test"
            parts += [f"----- rank {number} ended {how}, {where}; end of its output -----"]
            parts += [self._read(f"rank-{number}.log")]
        parts += ["----- end of horovodrun's output -----", self._read("launcher.log")]
        self._fail("\n".join(parts), lost, next((nodeid for nodeid in running if nodeid), None))
        self._repeat_after(running)

    def _read(self, name: str, lines: int = TAIL_LINES) -> str:
        path = self.directory / name
        if not path.exists():
            return "(nothing)"
        return (
            "\n".join(path.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()[-lines:]) or "(nothing)"
        )

    def _repeat_after(self, nodeids: Sequence[str | None]) -> None:
        """Let a further launch go on after the first of `nodeids`, if a test was what failed."""
        order = self.ranks[0].collected or []
        places = [order.index(nodeid) for nodeid in nodeids if nodeid in order]
        if places:
            self.outcome.done = order[: min(places) + 1]
            self.outcome.repeatable = len(self.outcome.done) < len(order)

    def _conclude(self) -> None:
        outcome = self.outcome
        failed = {failure.nodeid for failure in outcome.failures}
        order = self.ranks[0].collected or []
        for nodeid in outcome.done or order:
            ran = [number for number, rank in enumerate(self.ranks) if nodeid in rank.ended]
            skipped = [number for number in ran if nodeid in self.ranks[number].skipped]
            if nodeid in failed or len(ran) < self.size:
                if not outcome.failures:
                    missing = sorted(set(range(self.size)) - set(ran))
                    self._fail(f"{nodeid} never ran on ranks {missing}", missing, nodeid)
            elif len(skipped) == self.size:
                outcome.skipped[nodeid] = self.ranks[0].skipped[nodeid]
            elif skipped:
                self._fail(f"{nodeid} was skipped on ranks {skipped} of {self.size} only", skipped, nodeid)
            else:
                outcome.passed.append(nodeid)

    # --- ending the processes ------------------------------------------------------------------------------------

    def _end_processes(self) -> None:
        """Kill the ranks, then horovodrun and everything else that this launch started."""
        if self.process.poll() is None:
            for rank in self.ranks:
                if rank.pid is not None and rank.status is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(rank.pid, signal.SIGKILL)
            # mpirun removes its session folder if it may end by itself.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=5)
        killed = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(TOKEN) == self.token:
                    process.kill()
                    killed.append(process)
        self.process.wait()
        psutil.wait_procs(killed, timeout=10)  # they are gone when they get a processor once more
