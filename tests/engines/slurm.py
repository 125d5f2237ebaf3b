"""A private Slurm cluster of two nodes on this machine: its own munge key, ports and folder, gone at the end."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.hosts import path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
NODES = ("hvdtrain-n1", "hvdtrain-n2")
CPUS = 2

_CONFIGURATION = """
ClusterName=hvdtrain-test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
TmpFS={folder}/tmp-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=100000,batch_sched_delay=0
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=10
{nodes}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=9 PreemptMode=OFF
"""


def missing() -> str:
    """Return why there can be no cluster here, "" if there can."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=path()) is None]
    if absent:
        return f"no {', '.join(absent)}: apt-get install slurmctld slurmd slurm-client munge"
    return "" if os.geteuid() == 0 else "Slurm's daemons need root"


class Cluster:
    """munged, slurmctld and a slurmd for each node."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))},
            "PATH": path(),
            "SLURM_CONF": str(folder / "slurm.conf"),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }

    def start(self) -> None:
        """Start the daemons, and wait until the nodes are idle."""
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        controller, *ports = _free_ports(1 + len(NODES))
        host = socket.gethostname().partition(".")[0]
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS} State=UNKNOWN"
            for name, port in zip(NODES, ports, strict=True)
        )
        for name in ("state", *(f"{kind}-{node}" for kind in ("spool", "tmp") for node in NODES)):
            (self.folder / name).mkdir()
        text = _CONFIGURATION.format(folder=self.folder, host=host, controller=controller, nodes=nodes)
        (self.folder / "slurm.conf").write_text(text)
        self._daemon("munged", "--foreground", "--force", f"--key-file={key}", *(
            f"--{what}-file={self.folder}/munge.{what}" for what in ("pid", "log", "seed")
        ), f"--socket={self.folder}/munge.socket")  # fmt: skip
        self.wait_for((self.folder / "munge.socket").exists)
        self._daemon("slurmctld", "-D")
        for node in NODES:
            self._daemon("slurmd", "-D", "-N", node)
        self.wait_for(lambda: self.run("sinfo", "-h", "-t", "idle", "-o", "%D", check=False).strip() == str(len(NODES)))

    def stop(self) -> None:
        """Cancel every job and end the daemons, the controller last but one."""
        try:
            if len(self._daemons) > 1:
                self.run("scancel", "--user=root", check=False)
                self.wait_for(lambda: not self.run("squeue", "-h", check=False).strip())
        finally:
            for daemon in reversed(self._daemons):
                daemon.terminate()
                try:
                    daemon.wait(10)
                except subprocess.TimeoutExpired:
                    daemon.kill()
                    daemon.wait()

    def run(self, *command: str, cwd: Path | None = None, check: bool = True, **variables: str) -> str:
        """Run one of Slurm's commands to its end and return what it printed."""
        done = subprocess.run(
            command, cwd=cwd, env={**self.environment, **variables}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0 or not check, f"{command}: {done.stdout}"
        return done.stdout

    def state(self, job: str) -> str:
        """Return a job's state, as RUNNING."""
        shown = self.run("scontrol", "show", "job", job)
        return shown.partition("JobState=")[2].split()[0]

    def wait_for(self, condition: Callable[[], object], limit_s: float = 90) -> None:
        """Wait until `condition` holds."""
        deadline = time.monotonic() + limit_s
        while not condition():
            ended = [str(daemon.args) for daemon in self._daemons if daemon.poll() is not None]
            assert not ended, f"{ended} ended; see {self.folder}"
            assert time.monotonic() < deadline, f"waited {limit_s} s; see {self.folder}"
            time.sleep(0.1)

    def _daemon(self, name: str, *arguments: str) -> None:
        program = shutil.which(name, path=self.environment["PATH"])
        assert program is not None
        with (self.folder / f"{name}-{len(self._daemons)}.log").open("wb") as log:
            self._daemons.append(
                subprocess.Popen(
                    [program, *arguments], env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )
            )


def _free_ports(count: int) -> list[int]:
    """Return ports of loopback that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
