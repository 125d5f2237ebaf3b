"""The peers: how each is launched, with what environment, and what it needs to be there."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Literal

from benchmarks.workloads import Workload

Launcher = Literal["python", "copies", "torchrun", "horovodrun"]

# What one thread a rank takes in each framework. hvdtrain's peers get none of it: `hvdtrain.init` decides for itself.
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
    "NPROC": "1",  # XLA's pool, on JAX
}
# glibc's malloc told to keep what is freed, about as `hvdtrain.init` does: tells its share of a gain.
KEPT = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}


@dataclass(frozen=True)
class Peer:
    """One way to train.

    Attributes:
        name: as on the command line.
        title: for people.
        script: module in benchmarks.peers, after the framework's name and "_".
        launcher: "copies" are independent processes at once.
        options: for the launcher.
        environment: on top of a clean one.
        needs: packages without which the peer is skipped.
        ranks: fixed number of processes; None for the number asked for.
        averages: whether its ranks must equal one process with all ranks' batches.
        has_reference: whether there is such a process; else ranks must equal each other.
        workload: name of another workload that it trains instead; "" for the one asked for.
        cycle: after how many steps its ranks have synchronized once; a turn has a multiple of them, and counts by mean.
    """

    name: str
    title: str
    script: str
    launcher: Launcher
    options: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    ranks: int | None = None
    averages: bool = True
    has_reference: bool = True
    workload: str = ""
    cycle: int = 1

    def missing(self) -> str:
        """Return why the peer cannot run here, or ""."""
        absent = [name for name in self.needs if importlib.util.find_spec(name) is None]
        hint = " (`hvdtrain build` makes it)" if "horovod" in absent else ""
        return f"not installed: {', '.join(absent)}{hint}" if absent else ""


_HOROVOD = ("horovod",)
TORCH = (
    Peer("single", "one process", "plain", "python", environment=ONE_THREAD, ranks=1, averages=False),
    Peer("alone", "as many processes, no exchange", "plain", "copies", environment=ONE_THREAD, averages=False),
    Peer("alone-kept", "the same, freed memory kept", "plain", "copies",
         environment={**ONE_THREAD, **KEPT}, averages=False),
    Peer("ddp", "torch DDP, gloo", "ddp", "torchrun", environment=ONE_THREAD),
    Peer("ddp-tuned", "torch DDP, bucket views, static graph", "ddp", "torchrun",
         environment={**ONE_THREAD, "BENCH_DDP_TUNED": "1"}),
    Peer("ddp-kept", "torch DDP, freed memory kept", "ddp", "torchrun", environment={**ONE_THREAD, **KEPT}),
    Peer("accelerate", "Accelerate", "accelerate", "torchrun", environment=ONE_THREAD, needs=("accelerate",)),
    Peer("fabric", "Lightning Fabric", "fabric", "torchrun", environment=ONE_THREAD, needs=("lightning_fabric",)),
    # Stopped between its turns, Gloo would count the pause as a dead peer's after 30 s.
    Peer("horovod", "plain Horovod, default (Gloo)", "horovod", "horovodrun", ("--gloo",),
         {**ONE_THREAD, "HOROVOD_GLOO_TIMEOUT_SECONDS": "3600"}, _HOROVOD),
    Peer("horovod-tuned", "plain Horovod, hand-tuned", "horovod", "horovodrun", ("--mpi",),
         {**ONE_THREAD, **KEPT}, _HOROVOD),
    Peer("hvdtrain", "hvdtrain, drop-in", "hvdtrain", "horovodrun", needs=_HOROVOD),
    Peer("trainer", "hvdtrain, Trainer", "trainer", "horovodrun", needs=_HOROVOD),
)  # fmt: skip
KERAS = (
    Peer("single", "one process, plain Keras", "plain", "python", environment=ONE_THREAD, ranks=1, averages=False),
    Peer("alone", "as many processes, no exchange", "plain", "copies", environment=ONE_THREAD, averages=False),
    Peer("hvdtrain", "hvdtrain, drop-in", "hvdtrain", "horovodrun", needs=_HOROVOD),
    Peer("trainer", "hvdtrain, Trainer", "trainer", "horovodrun", needs=_HOROVOD),
)
REFERENCE = Peer("reference", "one process, all batches", "reference", "python", environment=ONE_THREAD, ranks=1)
NAMES = (*dict.fromkeys(peer.name for peer in (*TORCH, *KERAS)), "torch-trainer")

# What a Horovod expert would try, on Horovod's own terms, beside keeping freed memory: makes "hand-tuned" honest.
YIELD = {"OMPI_MCA_mpi_yield_when_idle": "1"}
SWEEP = {
    "HOROVOD_FUSION_THRESHOLD": ("0", str(1 << 20), str(128 << 20)),  # bytes; the last is Horovod's default
    "HOROVOD_CYCLE_TIME": ("0.1", "0.5", "1"),  # ms; the last is Horovod's default
}


def peers_of(workload: Workload) -> tuple[Peer, ...]:
    """Return the peers that can be compared on a workload."""
    if workload.framework == "torch":
        return TORCH
    if workload.backend == "torch":
        plain = next(peer for peer in TORCH if peer.name == "trainer")
        return (*KERAS, replace(plain, name="torch-trainer", title="hvdtrain, Trainer, the model in plain PyTorch",
                                workload=workload.model))  # fmt: skip
    return KERAS


def sweep_of(peer: Peer) -> list[Peer]:
    """Return the candidates for the hand-tuned peer, each named after its settings."""
    candidates = []
    for values in product(*SWEEP.values()):
        settings = dict(zip(SWEEP, values, strict=True))
        name = " ".join(f"{key.removeprefix('HOROVOD_').lower()}={value}" for key, value in settings.items())
        candidates.append(replace(peer, name=name, environment={**peer.environment, **YIELD, **settings}))
    return candidates
