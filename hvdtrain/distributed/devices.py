"""Compare the devices that ranks compute on, after init, and name the ranks that share a GPU."""

from __future__ import annotations

import functools
import json
import logging
import os
import platform
import socket
import uuid as uuids
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvdtrain.distributed.gpu_path import Choice
from hvdtrain.distributed.launch_environment import named
from hvdtrain.errors import LaunchError
from hvdtrain.system import gpus

log = logging.getLogger("hvdtrain")

Bytes = NDArray[np.uint8]

picked = ""  # what this process computes on, "cuda:0" or "cpu"; "" where its script chooses by itself
_compare: Callable[[], list[RankDevice]] | None = None


class RankDevice(NamedTuple):
    """The device that one rank computes on."""

    kind: str  # "cuda", "cpu", or "" where the script chooses by itself
    host_id: str  # see `host_id`
    host: str  # its name, for messages
    uuid: str = ""  # of the GPU, or of the MIG instance; "" where it is unknown
    name: str = ""  # what the GPU is: "NVIDIA H100 80GB HBM3"
    is_async: bool = False  # see `gpu_path`, as is
    why: str = ""

    @property
    def choice(self) -> Choice:
        """What this rank would do with its GPU."""
        return Choice(self.is_async, self.why, self.host)

    def to_bytes(self) -> Bytes:
        """Return it as one line of JSON."""
        return np.frombuffer(json.dumps(self).encode() + b"\n", np.uint8)

    def __str__(self) -> str:
        return f"{self.uuid}: {self.name}" if self.uuid else self.kind


def gpu_of(local_rank: int, count: int) -> int:
    """Return which of the `count` GPUs that this process sees belongs to `local_rank`."""
    # With CUDA_VISIBLE_DEVICES, or one GPU, the launcher (Slurm, Kubernetes) may have given each rank GPUs of its own:
    # one, or several. `compare` finds ranks that share one.
    if local_rank < count or count == 1 or gpus.VISIBLE in os.environ:
        return local_rank % count
    why = gpus.lost() or f"Launch at most {count} ranks on it"
    raise RuntimeError(f"local rank {local_rank} has no GPU: this host shows {count}. {why[0].upper()}{why[1:]}.")


def introduce(
    module: ModuleType,
    run: Callable[..., Bytes],
    *,
    gpu: Callable[[int], tuple[str, str]],
    nccl: bool,
    choice: Choice | None = None,
) -> str:
    """Return in words what this rank computes on; `gpu` returns UUID and name of a GPU, `run` reduces host arrays."""
    global _compare
    if module.size() == 1:
        return picked
    kind, _, index = picked.partition(":")
    uuid, name = gpu(int(index)) if kind == "cuda" else ("", "")
    mine = RankDevice(kind, host_id().hex(), socket.gethostname(), uuid, name, *(choice or ())[:2])
    _compare = functools.partial(compare, mine, module, run, nccl=nccl)
    return f"{picked} ({name})" if name else picked


def compare_once() -> list[RankDevice]:
    """Compare devices, once after `hvd.init`: a collective, on TensorFlow just before the World's first.

    Returns:
        every rank's device; [] where there is one rank, or they were compared before.
    """
    global _compare
    compare_now, _compare = _compare, None
    return compare_now() if compare_now is not None else []


def host_id() -> bytes:
    """Return 16 bytes that are equal for all processes of this host, also in containers, and differ between hosts."""
    try:
        return uuids.UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).bytes
    except (OSError, ValueError):
        return uuids.uuid5(uuids.NAMESPACE_DNS, platform.node()).bytes


def compare(mine: RankDevice, module: ModuleType, run: Callable[..., Bytes], *, nccl: bool) -> list[RankDevice]:
    """Name the ranks that share a GPU; a LaunchError with NCCL, which needs a GPU per rank. A collective.

    Returns:
        every rank's device.
    """
    lines = run(module, "allgather", mine.to_bytes(), name="hvdtrain.devices").tobytes().splitlines()
    ranks = [RankDevice(*json.loads(line)) for line in lines]
    shared = in_words(ranks)
    if shared and nccl:
        raise LaunchError(
            f"{shared}. NCCL takes one rank a GPU. Launch at most as many ranks on a host as it has GPUs, or show each "
            f"rank one of its own (CUDA_VISIBLE_DEVICES).{_advice(ranks)}"
        )
    without = [rank for rank, each in enumerate(ranks) if each.kind == "cpu"]
    if nccl and without and any(each.kind == "cuda" for each in ranks):
        raise LaunchError(
            f"No GPU is visible to {named(without)} on host {ranks[without[0]].host}, and others have one. With NCCL "
            'all have one, or none: launch on hosts with GPUs only, or train on CPUs with CUDA_VISIBLE_DEVICES="".'
        )
    if shared and module.rank() == 0:
        log.warning("%s. They take turns on it, and its memory must hold them all.", shared)
    return ranks


def _advice(ranks: Sequence[RankDevice]) -> str:
    """Return what else helps where MIG instances are shared."""
    if not any(each.uuid.startswith("MIG-") for each in ranks):
        return ""
    return " Of several MIG instances in it, CUDA shows a process the first one alone."


def in_words(ranks: Sequence[RankDevice]) -> str:
    """Return which ranks share a GPU: "ranks 0 and 1 on host x share GPU-...: NVIDIA H100; ..."; "" if no ranks do."""
    homes: dict[tuple[str, str], list[int]] = {}
    for rank, each in enumerate(ranks):
        if each.uuid:
            homes.setdefault((each.host_id, each.uuid), []).append(rank)
    several = [members for members in homes.values() if len(members) > 1]
    return "; ".join(f"{named(m)} on host {ranks[m[0]].host} share {ranks[m[0]]}" for m in several)


def from_driver(index: int) -> tuple[str, str]:
    """Return UUID and name of the GPU that CUDA will call `index` in this process; ("", "") where it is unknown.

    For frameworks that know it only once they run.
    """
    shown = gpus.visible()
    return (shown[index].uuid, shown[index].name) if index < len(shown) else ("", "")
