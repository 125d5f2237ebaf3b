"""A command that starts ranks, as a person types it: what it prints, its processes, and its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

BIN = Path(sys.executable).parent


class Run:
    """One command, its ranks' logs, and every process that it started."""

    def __init__(self, folder: Path, command: list[str], script: str, *arguments: str, **env: str) -> None:
        self.folder = folder
        (folder / "train.py").write_text(script)
        self._output = (folder / "output").open("w")
        settings = {"OMP_NUM_THREADS": "1", "HVDTRAIN_TEST_MARK": str(folder), "PYTHONUNBUFFERED": "1"}
        program = [*([sys.executable] if command[0] != "hvdtrain" else []), "train.py", str(folder), *arguments]
        self.process = subprocess.Popen(
            [str(BIN / command[0]), *command[1:], *program],
            cwd=folder,
            env={**os.environ, **settings, **env},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def output(self) -> str:
        return (self.folder / "output").read_text()

    def said(self) -> list[str]:
        """Return the lines of hvdtrain run's own, after the one that says what is run."""
        return [line for line in self.output().splitlines() if line.startswith("hvdtrain run: ")][1:]

    def log(self, rank: int, key: str) -> list[dict[str, Any]]:
        """Return the facts with `key` that a rank has written."""
        path = self.folder / f"log-{rank}"
        lines = path.read_text().splitlines() if path.exists() else []
        facts = [json.loads(line) for line in lines if line.endswith("}")]
        return [fact for fact in facts if key in fact]

    def pid(self, rank: int) -> int:
        return int(self.log(rank, "pid")[-1]["pid"])

    def launcher(self) -> psutil.Process:
        """Return horovodrun or mpirun, which in Open MPI 5 becomes prterun, as hvdtrain run's child."""
        for child in psutil.Process(self.process.pid).children():
            if any(name in " ".join(child.cmdline()) for name in ("horovodrun", "mpirun", "prterun")):
                return child
        raise AssertionError("no launcher")

    def family(self, name: str | None = None) -> list[psutil.Process]:
        """Return what lives of all that was started, whoever its parent is, or what bears a name."""
        found = []
        for process in psutil.process_iter():
            try:
                mine = process.environ().get("HVDTRAIN_TEST_MARK") == str(self.folder)
                if mine and process.status() != psutil.STATUS_ZOMBIE and name in (None, process.name()):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def wait_for(self, condition: Callable[[], object], limit_s: float = 120) -> None:
        deadline = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < deadline, self.output()[-3000:]
            time.sleep(0.02)

    def wait_for_steps(self, times: int = 1) -> None:
        """Wait until both ranks have taken a step, in so many attempts."""
        self.wait_for(lambda: all(len(self.log(rank, "step")) >= times for rank in (0, 1)))

    def ends(self, limit_s: float = 120) -> int:
        """Wait for the end and return the status; no process may be left behind."""
        status = self.process.wait(limit_s)
        self.wait_for(lambda: not self.family(), 10)
        return status

    def run_dir(self) -> Path:
        """Return the job's private folder."""
        return Path(psutil.Process(self.pid(0)).environ()["HVDTRAIN_RUN_DIR"])

    def clean_up(self) -> None:
        self.process.kill()
        self.process.wait()
        deadline = time.monotonic() + 5  # the guard removes the job's folder, if it may
        while self.family() and time.monotonic() < deadline:
            time.sleep(0.05)
        for process in self.family():
            process.kill()
        self._output.close()
