"""Groups of processes that are started once, told when to train, and stopped in between."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks.catalog import Peer
from benchmarks.turns import SOCKET_VARIABLE
from benchmarks.workloads import EVERY, Workload

ROOT = Path(__file__).resolve().parents[1]
_TAIL_LINES = 12
# Settings of the caller's shell, or of a launcher around us, that would make peers unequal.
_NOT_PASSED_ON = (
    "HOROVOD_", "OMPI_", "PMI_", "PMIX_", "SLURM_", "OMP_", "MKL_", "KMP_", "GOMP_", "TF_", "XLA_", "MALLOC_", "KERAS_",
    "LD_PRELOAD", "GLIBC_TUNABLES", "NPROC", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "HVDTRAIN_",
)  # fmt: skip


class GroupError(Exception):
    """A peer did not start, did not answer, or ended too early; holds the end of its output."""


class Group:
    """All processes of one peer.

    Args:
        peer: what to start.
        workload: what it trains.
        ranks: number of processes, where the peer does not fix it.
        data_ranks: for how many ranks there is data.
        horovod_python: interpreter whose Horovod the plain Horovod peers use; ours by default.
        folder: where the group's own one is made, with a short path.

    Attributes:
        started_at: time.monotonic() before the launch.
    """

    def __init__(
        self,
        peer: Peer,
        workload: Workload,
        *,
        ranks: int,
        data_ranks: int,
        horovod_python: str | None = None,
        folder: Path = Path("/tmp"),
    ) -> None:
        self.peer = peer
        self.workload = EVERY[peer.workload] if peer.workload else workload
        self.ranks = peer.ranks or ranks
        # Not in $TMPDIR: a socket's path may have 107 characters.
        self._folder = Path(tempfile.mkdtemp(prefix="bench-", dir=folder))
        self._python = horovod_python if horovod_python and peer.script == "horovod" else sys.executable
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._folder / "s"))
        self._listener.listen(self.ranks)
        self._connections: list[socket.socket] = []
        self._stopped: list[psutil.Process] = []
        self._environment = self._make_environment(data_ranks)
        self.started_at = time.monotonic()
        with (self._folder / "log").open("wb") as log:
            self._processes = [
                subprocess.Popen(
                    command, env=self._environment, cwd=self._folder,
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                )
                for command in self._commands()
            ]  # fmt: skip

    def connect(self, *, timeout_s: float = 120) -> list[dict[str, Any]]:
        """Wait until every rank is before its first step, and return what each says then. Raises GroupError."""
        limit = time.monotonic() + timeout_s
        found: list[tuple[dict[str, Any], socket.socket]] = []
        while len(found) < self.ranks:
            self._await(self._listener, limit)
            connection, _ = self._listener.accept()
            found.append((self._receive(connection, limit), connection))
        found.sort(key=lambda each: (each[0]["rank"], each[0]["pid"]))
        self._connections = [connection for _, connection in found]
        return [hello for hello, _ in found]

    def turn(self, op: str, *, steps: int = 0, timeout_s: float = 240) -> list[dict[str, Any]]:
        """Let every rank do `op` and return their answers, by rank. Raises GroupError."""
        message = json.dumps({"op": op, "steps": steps}).encode() + b"\n"
        try:
            for connection in self._connections:
                connection.sendall(message)
        except OSError:
            raise self._error("a rank has ended") from None
        limit = time.monotonic() + timeout_s
        return [self._receive(connection, limit) for connection in self._connections]

    def pause(self) -> None:
        """Stop every process of the group, so that nothing of it runs: no polling thread, no launcher."""
        self._stopped = self._family()
        for process in self._stopped:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused group go on."""
        for process in reversed(self._stopped):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)
        self._stopped = []

    def close(self, *, grace_s: float = 10) -> None:
        """End every process, those that do not end by themselves in time by force, and remove the group's files."""
        for connection in self._connections:
            connection.close()
        if self._connections and grace_s:
            self.resume()
            limit = time.monotonic() + grace_s
            for process in self._processes:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, limit - time.monotonic()))
        for member in self._family():
            with suppress(psutil.NoSuchProcess):
                member.kill()
        for process in self._processes:
            process.wait()
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _family(self) -> list[psutil.Process]:
        """Return the launchers and all that they started; mpirun's ranks have process groups of their own."""
        found: list[psutil.Process] = []
        for process in self._processes:
            with suppress(psutil.NoSuchProcess):
                parent = psutil.Process(process.pid)
                found += [parent, *parent.children(recursive=True)]
        return found

    def _commands(self) -> list[list[str]]:
        script = ["-m", f"benchmarks.peers.{self.workload.framework}_{self.peer.script}"]
        python = [self._python]
        if self.peer.launcher == "torchrun":
            launcher = [*python, "-m", "torch.distributed.run", "--nproc-per-node", str(self.ranks)]
            return [[*launcher, "--master-port", str(_free_port()), *self.peer.options, *script]]
        if self.peer.launcher == "horovodrun":
            launcher = [str(Path(self._python).parent / "horovodrun"), "-np", str(self.ranks), *self.peer.options]
            return [[*launcher, *python, *script]]
        return [[*python, *script]] * (self.ranks if self.peer.launcher == "copies" else 1)

    def _make_environment(self, data_ranks: int) -> dict[str, str]:
        kept = clean_environment()
        kept |= {
            "PATH": os.pathsep.join([str(Path(self._python).parent), kept.get("PATH", "")]),
            "PYTHONPATH": str(ROOT),
            "TF_CPP_MIN_LOG_LEVEL": "3",
            SOCKET_VARIABLE: str(self._folder / "s"),
            "BENCH_WORKLOAD": self.workload.name,
            "BENCH_DATA_RANKS": str(data_ranks),
        }
        if self.workload.backend:
            kept["KERAS_BACKEND"] = self.workload.backend
        return kept | self.peer.environment

    def _receive(self, connection: socket.socket, limit: float) -> dict[str, Any]:
        """Return one message: a line of JSON."""
        line = b""
        while not line.endswith(b"\n"):
            self._await(connection, limit)
            part = connection.recv(1 << 16)
            if not part:
                raise self._error("a rank has ended")
            line += part
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _await(self, connection: socket.socket, limit: float) -> None:
        while not select.select([connection], [], [], 0.2)[0]:
            if any(process.poll() not in (None, 0) for process in self._processes):
                raise self._error(f"ended with status {[process.poll() for process in self._processes]}")
            if time.monotonic() > limit:
                raise self._error("no answer in time")

    def _error(self, what: str) -> GroupError:
        time.sleep(0.5)  # what the ranks say last is on its way
        lines = (self._folder / "log").read_text(errors="replace").splitlines()
        return GroupError("\n".join([what, *lines[-_TAIL_LINES:]]))


def clean_environment() -> dict[str, str]:
    """Return this process's environment without what would make peers unequal."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_NOT_PASSED_ON)}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
