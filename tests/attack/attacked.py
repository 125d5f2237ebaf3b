"""Jobs that wait to be attacked, and what a stranger does to all that listens for them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvdtrain.system import process_tree, start_ranks

UID = 60_417  # of the other user, who owns nothing
# Begins that user's command on a host that is a namespace: Python with the standard library alone.
AS_STRANGER = (
    "setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "/usr/bin/python3", "-I", "-S", "-c",
)  # fmt: skip

# Each rank stops at a file, "rank-0" and so on, and the job ends with a sum that says who took part.
TRAIN = """
import os, sys, time
from pathlib import Path
folder, rank = Path(sys.argv[1]), os.environ["HOROVOD_RANK"]
(folder / f"began-{rank}").touch()
while rank != "0" and not (folder / "go").exists():
    time.sleep(0.02)
import horovod.torch as hvd, torch
hvd.init()
while not (folder / "go").exists():
    time.sleep(0.02)
total = hvd.allreduce(torch.full((1000,), 10.0 ** hvd.rank()), op=hvd.Sum).unique().tolist()
sys.stdout.write(f"rank {hvd.rank()} of {hvd.size()}: {total}\\n")
"""

# What a stranger has to do with ports: who listens at which everybody may read.
PORTS = r"""
import socket, sys, time
from pathlib import Path

def ports():
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A":
            words, port = fields[1].split(":")
            found.add((socket.inet_ntoa(bytes.fromhex(words)[::-1]), int(port, 16)))
    return {("127.0.0.1" if host == "0.0.0.0" else host, port) for host, port in found}

def say(address, data, limit_s=0.5):
    answer = b""
    try:
        with socket.create_connection(address, limit_s) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while more := connection.recv(65536):
                answer += more
    except OSError:
        pass
    return answer

def http(address, method, path, body=b""):
    head = f"{method} {path} HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n"
    return say(address, head.encode() + body)
"""


class Command:
    """A command that was started, with its files in a folder and all that it prints in one of them.

    Attributes:
        limit_s: how long its end is waited for.
    """

    limit_s = 60.0

    def __init__(self, folder: Path, process: subprocess.Popen[Any]) -> None:
        self.folder, self.process = folder, process

    def output(self) -> str:
        return (self.folder / "output").read_text(errors="replace")

    def wait_for(self, *names: str, limit_s: float = 60) -> None:
        """Wait for files."""
        until = time.monotonic() + limit_s
        while not all((self.folder / name).exists() for name in names):
            assert time.monotonic() < until, self.output()
            assert self.process.poll() is None, self.output()
            time.sleep(0.02)

    def end(self) -> str:
        """Let the ranks go on, and return what was printed; an end in error fails the test."""
        (self.folder / "go").touch()
        try:
            status = self.process.wait(self.limit_s)
        except subprocess.TimeoutExpired:
            status = None
            self.kill()
        assert status == 0, f"status {status} (None: no end)\n{self.output()}"
        return self.output()

    def kill(self) -> None:
        """End it at once, unless it has ended."""
        if self.process.poll() is None:
            self.process.kill()


class Job(Command):
    """A launcher's job on this host."""

    def __init__(self, folder: Path, command: Sequence[str], script: str = TRAIN, **variables: str) -> None:
        (folder / "train.py").write_text(script)
        bin_ = Path(sys.executable).parent
        line = [str(bin_ / command[0]), *command[1:], sys.executable, str(folder / "train.py"), str(folder)]
        with (folder / "output").open("w") as output:
            process = subprocess.Popen(
                line, cwd=folder, env={**start_ranks.rank_environment({"OMP_NUM_THREADS": "1"}), **variables},
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        super().__init__(folder, process)

    def kill(self) -> None:
        """End it at once with all that it started, unless it has ended."""
        if self.process.poll() is None:
            process_tree.end(None, below=self.process.pid)
            self.process.wait()


def total(ranks: int) -> str:
    """Return what each of the ranks prints of the sum at the end of TRAIN."""
    return str([float(sum(10**rank for rank in range(ranks)))])


def listening() -> set[tuple[str, int]]:
    """Return where somebody listens on this host."""
    code = f"{PORTS}\nimport json; print(json.dumps(sorted(ports())))"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    return {(host, port) for host, port in json.loads(done.stdout)}


def own_key(pid: int) -> str:
    """Return the key that a process has, as its owner may."""
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next((each.partition(b"=")[2].decode() for each in variables if each.startswith(b"HVDTRAIN_JOB_KEY=")), "")


def command_lines() -> list[str]:
    """Return all command lines of this host, as anybody may read them."""
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                found.append(Path(entry.path, "cmdline").read_bytes().decode(errors="replace"))
            except OSError:
                continue
    return found
