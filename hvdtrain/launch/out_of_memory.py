"""Say that the kernel killed a rank because its host's memory ran out, and what the rank held."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

from hvdtrain.distributed.watchdog import shared_facts
from hvdtrain.launch import ssh
from hvdtrain.launch.exit_cause import SSH_FAILED, Cause
from hvdtrain.launch.ssh import SshRoute
from hvdtrain.system import host_memory, network
from hvdtrain.system.quantities import format_size

_KILLED = 128 + signal.SIGKILL


def note(run_dir: Path, cause: Cause, *, host: str, kills_before: int, route: SshRoute | None) -> str:
    """Return a sentence if the OOM killer ended a rank, or may have ended a rank of another host; else "".

    `host` is the rank's, "" if it is not known. `kills_before` is `host_memory.oom_kills` from before the rank was
    killed. A rank writes what it holds on its own host; `route` leads there.
    """
    is_here = host in ("", socket.gethostname()) or network.is_here([host])
    if cause.rank is not None and not is_here:
        return _note_elsewhere(run_dir, cause, cause.rank, host=host, route=route)
    if cause.code != _KILLED or host_memory.oom_kills() <= kills_before:
        return ""
    limit = host_memory.limit()
    within = f", which is limited to {format_size(limit)}" if limit else ""
    rank = -1 if cause.rank is None else cause.rank
    what = "it had not begun to train: look at how it makes the model and reads data"
    if held := _held(run_dir).get(rank):
        what = f"it held {held}"
    elif shared_facts.read(run_dir, "progress").get(rank, {}).get("step"):
        what = "it did not say what it held"
    return f"memory ran out on this host{within}, so the kernel ended {cause.who}; {what}"


def _note_elsewhere(run_dir: Path, cause: Cause, rank: int, *, host: str, route: SshRoute | None) -> str:
    if cause.code not in (_KILLED, SSH_FAILED):
        return ""
    found = ssh.memory_of(route, host, run_dir, rank=rank)
    if "text" in found:
        text = f"memory ran out on host {host}, so the kernel ended {cause.who}; it held {found['text']}"
        return text if found.get("oom_kills_since", 0) > 0 else ""
    if cause.code != _KILLED:  # the connection broke, as far as it is known
        return ""
    look = f"`ssh {host} dmesg` or `ssh {host} journalctl -k` shows if it did"
    return f"memory ran out on host {host}, probably, and the kernel ended {cause.who}: {look}{_example(run_dir, rank)}"


def _example(run_dir: Path, rank: int) -> str:
    """Return in words what the rank held, or another rank, as far as this host knows it."""
    texts = _held(run_dir)
    if rank in texts:  # the job's folder is on a disk that hosts share
        return f"; it held {texts[rank]}"
    other = next(iter(texts), None)
    return "" if other is None else f". Every rank holds about the same: rank {other} held {texts[other]}"


def _held(run_dir: Path) -> dict[int, str]:
    return {rank: str(found["text"]) for rank, found in shared_facts.read(run_dir, "memory").items()}
