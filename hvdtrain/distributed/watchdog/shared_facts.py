"""Facts that ranks share without Horovod: which ranks exist, wait or failed first. One file per rank and fact.

`hvdtrain run` names a folder for them. Under plain launchers the ranks of one host share a private folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdtrain.system.process_tree import RUN_DIR

# Equal on all ranks of a job on one host, and different in every other current job.
_JOB_VARIABLES = ("PMIX_NAMESPACE", "PMIX_SERVER_URI2", "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")
_NOWHERE = Path(os.devnull)  # where ranks share nothing: no file can be below it
_FORGOTTEN_S = 60.0
_CLOCK_SLACK_S = 5.0


@dataclass
class SharedFacts:
    """Facts of ranks, as JSON files that are replaced whole."""

    directory: Path
    rank: int  # whose facts this process posts
    ours: bool = False  # the folder was made for this job by its ranks, which also remove it
    _began: float = field(default_factory=lambda: time.time() - _CLOCK_SLACK_S)

    def post(self, fact: str, content: dict[str, Any] | int) -> None:
        """Write a fact of this rank: <fact>-<rank>, with ".json" unless it is a number alone."""
        name = f"{fact}-{self.rank}" + ".json" * isinstance(content, dict)
        new = self.directory / f".{name}.{os.getpid()}"
        with contextlib.suppress(OSError):  # such as a full disk: it must not end the run
            new.write_text(json.dumps(content), encoding="utf-8")
            os.replace(new, self.directory / name)

    def counter(self, fact: str) -> Callable[[int], None]:
        """Return a function that replaces this rank's <fact>-<rank>.json by {"step": number}.

        It takes a few microseconds, so that each step can call it: a killed rank leaves its last number. The file is
        open for as long as the function lives.
        """
        path = self.directory / f"{fact}-{self.rank}.json"
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return lambda number: None

        def write(number: int) -> None:
            # Always as long as before, so that a larger number's last digits do not remain.
            with contextlib.suppress(OSError):
                os.pwrite(file, f'{{"step": {number:20}}}'.encode(), 0)

        weakref.finalize(write, os.close, file).atexit = False
        write(0)
        return write

    def all(self, fact: str) -> dict[int, Any]:
        """Return a fact of all ranks, by rank; what another job has left behind does not count."""
        return read(self.directory, fact, since=self._began)

    def others(self, fact: str) -> dict[int, Any]:
        """Return a fact of the other ranks, by rank."""
        return {rank: what for rank, what in self.all(fact).items() if rank != self.rank}

    def claim(self, what: str) -> bool:
        """Return whether this rank is the first to claim `what`; without a folder no other rank is known."""
        path = self.directory / f"claimed-{what}"
        try:
            if path.exists() and path.stat().st_mtime < self._began:
                path.unlink(missing_ok=True)
            path.touch(exist_ok=False)
        except OSError as error:
            return not isinstance(error, FileExistsError)
        return True

    def leave(self) -> None:
        """Remove this rank; the last one removes the folder, since others may want to read from it.

        What a killed rank wrote about its memory stays for `hvdtrain run` on another host, until the next job's sweep.
        """
        if self.ours:
            (self.directory / f"pid-{self.rank}").unlink(missing_ok=True)
            pids = self.all("pid")
            if all(process_state(int(pid)) for pid in pids.values()) and not pids.keys() & self.all("memory").keys():
                shutil.rmtree(self.directory, ignore_errors=True)


def read(directory: Path, fact: str, *, since: float = 0.0) -> dict[int, Any]:
    """Return a fact of all ranks, by rank, from files that are not older than `since`."""
    paths: list[Path] = []
    with contextlib.suppress(OSError):  # the last rank to leave has removed it in this moment
        paths = list(directory.glob(f"{fact}-*"))
    found = {}
    for path in paths:
        with contextlib.suppress(OSError, ValueError):  # gone, not whole, or no file of ours
            if path.stat().st_mtime >= since:
                found[int(path.stem.removeprefix(f"{fact}-"))] = json.loads(path.read_text(encoding="utf-8"))
    return dict(sorted(found.items()))


def open_facts(rank: int, *, elastic: bool = False) -> SharedFacts:
    """Return this job's facts; none where ranks have nothing in common, or change their numbers."""
    given = os.environ.get(RUN_DIR)
    if given and Path(given).is_dir():  # it is not where `hvdtrain run` runs on another host
        return SharedFacts(Path(given), rank)
    job = [os.environ[name] for name in _JOB_VARIABLES if os.environ.get(name)]
    if job and not elastic and (folder := _private_folder(job)):
        return SharedFacts(folder, rank, ours=True)
    return SharedFacts(_NOWHERE, rank)


def _private_folder(job: list[str]) -> Path | None:
    """Return a folder that this user's processes of one job share, and no other user can write to; None without one."""
    base = Path(tempfile.gettempdir()) / f"hvdtrain-{os.getuid()}"
    folder = base / hashlib.sha256("|".join(job).encode()).hexdigest()[:16]
    try:
        base.mkdir(mode=0o700, exist_ok=True)
        found = base.lstat()
        # In a folder that all users may write to, another user may have made it first.
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            return None
        for other in base.iterdir():
            _sweep(other)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError:
        return None
    return folder


def _sweep(folder: Path) -> None:
    """Remove what a killed job left behind."""
    with contextlib.suppress(OSError, ValueError):
        old = time.time() - folder.stat().st_mtime > _FORGOTTEN_S
        if old and all(process_state(int(path.read_text())) for path in folder.glob("pid-*")):
            shutil.rmtree(folder, ignore_errors=True)


def process_state(pid: int) -> str:
    """Return in words how a process of this host ended or stopped; "" if it runs."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "is gone: it was killed or it crashed"
    if state in "tT":
        return "is stopped (SIGSTOP, or a debugger)"
    return "has ended" if state in "ZX" else ""
