"""One rank of a rank-test run: pytest, with its output in this rank's log and its progress in this rank's event file.

`run.py` starts it under horovodrun and reads the events. A rank that fails a test says so and then waits to be ended
by run.py: were it to go on or to exit, Horovod would fail the other ranks too and hide which one failed first.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ORPHAN_LIMIT_S = 60.0  # how long a rank waits for run.py, should run.py itself have died
POLL_S = 0.02


def _wait_for(path: Path | None, *, limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if path is not None and path.exists():
            return True
        time.sleep(POLL_S)
    return False


class RankEvents:
    """pytest plugin: writes this rank's events as JSON lines and keeps it in step with run.py."""

    def __init__(self, directory: Path, rank: int) -> None:
        self.directory = directory
        self.rank = rank
        self.done = frozenset(json.loads((directory / "done.json").read_text()))
        self.stream = (directory / f"events-{rank}.jsonl").open("a", buffering=1, encoding="utf-8")

    def emit(self, event: str, **fields: Any) -> None:
        self.stream.write(json.dumps({"event": event, "time": time.time(), **fields}) + "\n")

    def fail(self, event: str, **fields: Any) -> None:
        """Report a failure, then wait to be ended."""
        self.emit(event, **fields)
        self.stream.flush()
        _wait_for(None, limit_s=ORPHAN_LIMIT_S)
        os._exit(1)

    def pytest_addoption(self, parser: pytest.Parser) -> None:
        # pytest-timeout is not loaded here (run.py keeps the limits), but the project's settings may name its options.
        for name in ("timeout", "timeout_method"):
            parser.addini(name, "set for pytest-timeout; in rank tests run.py --test-limit holds")

    def pytest_configure(self, config: pytest.Config) -> None:
        config.addinivalue_line("markers", "timeout(seconds): this test's own limit, instead of run.py's --test-limit")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        # After a failure run.py starts fresh ranks for the tests that are left.
        finished = [item for item in items if item.nodeid in self.done]
        if finished:
            config.hook.pytest_deselected(items=finished)
            items[:] = [item for item in items if item.nodeid not in self.done]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.fail("collect_error", nodeid=report.nodeid, text=report.longreprtext)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.emit("collected", nodeids=[item.nodeid for item in session.items])
        # Ranks with different tests would meet in the wrong collectives: run.py compares before any test starts.
        if not _wait_for(self.directory / "go", limit_s=ORPHAN_LIMIT_S * 5):
            os._exit(1)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        mark = item.get_closest_marker("timeout")
        limit_s = None
        if mark is not None:
            limit_s = float(mark.args[0] if mark.args else mark.kwargs["timeout"])
        self.emit("test_start", nodeid=item.nodeid, limit_s=limit_s)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            sections = "".join(f"\n----- {title} -----\n{text}" for title, text in report.sections if text.strip())
            self.fail("test_failed", nodeid=report.nodeid, when=report.when, text=report.longreprtext + sections)
        if report.when == "teardown":
            self.emit("test_end", nodeid=report.nodeid)
        elif report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            self.emit("test_skipped", nodeid=report.nodeid, reason=reason)

    def pytest_warning_recorded(self, warning_message: Any, nodeid: str) -> None:
        self.emit("warning", nodeid=nodeid, text=f"{warning_message.category.__name__}: {warning_message.message}")


def main(arguments: list[str]) -> int:
    directory = Path(os.environ["HVDTRAIN_RANKS_DIR"])
    rank = int(os.environ.get("HOROVOD_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
    log = os.open(directory / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    # Native code writes to the file descriptors, so Python's sys.stdout alone would not catch everything.
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    faulthandler.enable()
    stacks = (directory / f"stacks-{rank}.log").open("w", encoding="utf-8")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    plugin = RankEvents(directory, rank)
    plugin.emit("begin", pid=os.getpid())
    # JAX compiles a step for a second, and the groups here compile the same ones; ranks do not share files.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(directory.parent / f"jax-{rank}"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    # A place of its own for temporary files: in a common one, ranks stumble over each other as they clean up.
    own = ["--import-mode=importlib", "-p", "no:cacheprovider", f"--basetemp={directory / f'tmp-{rank}'}"]
    status = pytest.main([*own, *arguments], plugins=[plugin])
    plugin.emit("end", status=int(status))
    plugin.stream.close()
    faulthandler.unregister(signal.SIGUSR1)
    stacks.close()
    return int(status)


if __name__ == "__main__":
    # This folder holds folders named torch and keras; they are no place to import from.
    sys.path.pop(0)
    sys.exit(main(sys.argv[1:]))
