"""Step times of two hosts with a slow link between them: torch DDP, hvdtrain on each data plane, its strategies; Keras.

The hosts are network namespaces of this machine (`benchmarks/hosts.py`) with a rank each, and tc limits what each may
send. What matters then is the link: two ranks need 8 x (bytes of the gradients) / rate seconds for an allreduce, which
a step cannot be faster than, nor than its own computing. Each peer is compared with the larger of the two.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks import catalog, facts, hosts, steps
from benchmarks.catalog import Peer
from benchmarks.groups import Group, GroupError
from benchmarks.stats import ratio
from benchmarks.turns import SOCKET_VARIABLE
from benchmarks.workloads import LINK_MLP, Workload

HOSTS = ("hvlinka", "hvlinkb")
PARAMETERS = 20_037_642  # of the MLP
_INTERFACE = "eth0"
_COLUMNS = ("peer", "ms a step", "MB sent", "/ max(T_comp, link)", "/ max(T_comp, T_sync)", "samples/s", "x DDP")
_TUN = Path("/dev/net/tun")


@dataclass(frozen=True)
class Link:
    """The link between the two hosts.

    Attributes:
        name: as on the command line.
        bits_per_s: in each direction, Ethernet's headers included.
        delay_ms: one way; 0 for this machine's own.
    """

    name: str
    bits_per_s: float
    delay_ms: float = 0.0

    def qdisc(self) -> list[str]:
        """Return how tc makes its rate, for each end; its delay is made by `hosts.Hosts.delay`."""
        rate = f"{self.bits_per_s:.0f}bit"
        burst = max(2**18, int(self.bits_per_s / 8 / 1000))  # bytes; of a millisecond
        return ["tbf", "rate", rate, "burst", str(burst), "latency", "100ms"]

    def seconds(self, count: int) -> float:
        """Return how long so many bytes take, without any headers."""
        return 8 * count / self.bits_per_s


LINKS = {
    link.name: link
    for link in (Link("10gbit", 1e10), Link("1gbit", 1e9), Link("100mbit", 1e8), Link("50ms", 1e9, delay_ms=25))
}

_DDP = {**catalog.ONE_THREAD, "GLOO_SOCKET_IFNAME": _INTERFACE}
_FP16 = {"BENCH_COMPRESSION": "fp16"}
_GLOO = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "3600"}  # stopped between its turns, it would count as dead after 30 s
_OURS = ("horovod",)
PEERS: tuple[Peer, ...] = (
    Peer("alone", "no exchange", "plain", "copies", environment=catalog.ONE_THREAD, averages=False),
    Peer("ddp", "torch DDP, Gloo", "ddp", "torchrun", environment=_DDP),
    Peer("ddp-fp16", "torch DDP, Gloo, fp16 hook", "ddp", "torchrun", environment={**_DDP, **_FP16}),
    Peer("gloo", "hvdtrain, Gloo", "hvdtrain", "horovodrun", ("--gloo",), _GLOO, _OURS),
    Peer("gloo-fp16", "hvdtrain, Gloo, fp16", "hvdtrain", "horovodrun", ("--gloo",), {**_GLOO, **_FP16}, _OURS),
    Peer("mpi", "hvdtrain, Open MPI", "hvdtrain", "horovodrun", ("--mpi",), {}, _OURS),
    Peer("mpi-fp16", "hvdtrain, Open MPI, fp16", "hvdtrain", "horovodrun", ("--mpi",), _FP16, _OURS),
    Peer("gloo-int8", "hvdtrain, Gloo, int8", "hvdtrain", "horovodrun", ("--gloo",),
         {**_GLOO, "BENCH_COMPRESSION": "int8"}, _OURS, averages=False),
    Peer("gloo-topk", "hvdtrain, Gloo, topk:0.01", "hvdtrain", "horovodrun", ("--gloo",),
         {**_GLOO, "BENCH_COMPRESSION": "topk:0.01"}, _OURS, averages=False),
    Peer("gloo-powersgd", "hvdtrain, Gloo, powersgd:4:0", "hvdtrain", "horovodrun", ("--gloo",),
         {**_GLOO, "BENCH_COMPRESSION": "powersgd:4:0"}, _OURS, averages=False),
    Peer("gloo-exchange", "the reduction alone, Gloo", "exchange", "horovodrun", ("--gloo",), _GLOO, _OURS,
         averages=False),
    Peer("mpi-exchange", "the reduction alone, Open MPI", "exchange", "horovodrun", ("--mpi",), {}, _OURS,
         averages=False),
    Peer("delayed", "Trainer, Delayed()", "trainer", "horovodrun", ("--mpi",),
         {"BENCH_SYNC": "Delayed"}, _OURS, averages=False),
    Peer("delayed-gloo", "Trainer, Delayed(), Gloo", "trainer", "horovodrun", ("--gloo",),
         {**_GLOO, "BENCH_SYNC": "Delayed"}, _OURS, averages=False),
    Peer("local-sgd", "Trainer, LocalSGD(every=8)", "trainer", "horovodrun", ("--mpi",),
         {"BENCH_SYNC": "LocalSGD:8"}, _OURS, averages=False, cycle=8),
    Peer("diloco", "Trainer, DiLoCo(every=100)", "trainer", "horovodrun", ("--mpi",),
         {"BENCH_SYNC": "DiLoCo:100"}, _OURS, averages=False, cycle=100),
)  # fmt: skip
_SCHEMES = {"none": "none", "int8": "int8", "topk": "topk:0.01", "powersgd": "powersgd:4:0"}
# Changes of weights in fewer bytes. Plain SGD: nothing else is sent.
PEERS += tuple(
    Peer(f"{name}-{each}", f"Trainer, {title}, plain SGD, Gloo, {scheme}", "trainer", "horovodrun", ("--gloo",),
         {**_GLOO, "BENCH_SYNC": sync, "BENCH_MOMENTUM": "0", "BENCH_COMPRESSION": scheme}, _OURS,
         averages=False, cycle=cycle)
    for name, title, sync, cycle in (
        ("local-sgd", "LocalSGD(every=8)", "LocalSGD:8", 8), ("diloco", "DiLoCo(every=100)", "DiLoCo:100", 100)
    )
    for each, scheme in _SCHEMES.items()
)  # fmt: skip
# On Keras, of each backend: the Trainer in every step, with compression too, and `Delayed`.
KERAS_PEERS = (
    PEERS[0],
    Peer("keras", "Trainer, Gloo", "trainer", "horovodrun", ("--gloo",), _GLOO, _OURS),
    Peer("keras-delayed", "Trainer, Delayed(), Gloo", "trainer", "horovodrun", ("--gloo",),
         {**_GLOO, "BENCH_SYNC": "Delayed"}, _OURS, averages=False),
    *(
        Peer(f"keras-{each}", f"Trainer, Gloo, {scheme}", "trainer", "horovodrun", ("--gloo",),
             {**_GLOO, "BENCH_COMPRESSION": scheme}, _OURS, averages=False)
        for each, scheme in _SCHEMES.items() if each != "none"
    ),
)  # fmt: skip
# The peer whose step is T_sync of another one's: the same bytes over the same data plane, and nothing else.
_REDUCTIONS = {
    "gloo": "gloo-exchange", "delayed-gloo": "gloo-exchange", "mpi": "mpi-exchange", "delayed": "mpi-exchange",
}  # fmt: skip


def peers_of(workload: Workload) -> tuple[Peer, ...]:
    """Return the peers that are compared on a workload of `LINK_MLPS`."""
    return PEERS if workload is LINK_MLP else KERAS_PEERS


def result_name(link: Link, workload: Workload) -> str:
    """Return the name of the file of results."""
    return f"link-{link.name}" + ("" if workload is LINK_MLP else f"-{workload.backend}")


def why_not(names: Sequence[str]) -> str:
    """Return why these links cannot be made here, "" if they can."""
    if why := hosts.missing():
        return why
    if shutil.which("tc", path=hosts.path()) is None:
        return "no tc: apt-get install iproute2"
    for link in (LINKS[name] for name in names):
        if link.delay_ms and not _TUN.exists():
            return f"this kernel has no TUN devices, of which the link {link.name} is made"
        with_rate = ["unshare", "--net", "tc", "qdisc", "add", "dev", "lo", "root", *link.qdisc()]
        done = hosts.output_of(*with_rate)
        if done.returncode:
            return f"this kernel has no {link.qdisc()[0]} for the link {link.name}: {done.stderr.strip()}"
    return ""


class LinkGroup(Group):
    """A peer with one rank on each host."""

    def __init__(self, peer: Peer, workload: Workload, *, network: hosts.Hosts) -> None:
        self._network = network  # first: what is overridden below needs it
        super().__init__(peer, workload, ranks=len(HOSTS), data_ranks=len(HOSTS), folder=network.folder)

    def turn(self, op: str, *, steps: int = 0, timeout_s: float = 300) -> list[dict[str, Any]]:
        """As for any group; answers have the bytes that each host sent, too."""
        before = self._sent_bytes()
        answers = super().turn(op, steps=steps, timeout_s=timeout_s)
        sent = [after - was for after, was in zip(self._sent_bytes(), before, strict=True)]
        return [{**answer, "sent_bytes": number} for answer, number in zip(answers, sent, strict=False)]

    def _sent_bytes(self) -> list[int]:
        """Return what each host has sent, as the link counts it: with the headers of every packet."""
        shown = [self._network.run(host, "tc", "-s", "-j", "qdisc", "show", "dev", _INTERFACE) for host in HOSTS]
        return [next(int(each["bytes"]) for each in json.loads(done.stdout) if each.get("root")) for done in shown]

    def _family(self) -> list[psutil.Process]:
        own = {SOCKET_VARIABLE: self._environment[SOCKET_VARIABLE]}
        pids = {pid for host in HOSTS for pid in self._network.processes(host, having=own)}
        return list({each.pid: each for each in [*super()._family(), *map(psutil.Process, pids)]}.values())

    def _commands(self) -> list[list[str]]:
        commands = super()._commands()
        if self.peer.launcher == "torchrun":
            (words,) = commands
            at = words.index("torch.distributed.run") + 1
            place = ["--nnodes", str(len(HOSTS)), "--master-addr", HOSTS[0]]
            words[words.index("--nproc-per-node") + 1] = "1"
            commands = [[*words[:at], *place, "--node-rank", str(rank), *words[at:]] for rank in range(len(HOSTS))]
        if self.peer.launcher == "horovodrun":
            (words,) = commands
            at = words.index("-np")
            commands = [[*words[:at], "-H", ",".join(f"{host}:1" for host in HOSTS), *words[at:]]]
        return [
            self._network.command(host, words, cwd=self._folder)
            for host, words in zip(HOSTS, commands, strict=False)
        ]  # fmt: skip

    def _make_environment(self, data_ranks: int) -> dict[str, str]:
        made = super()._make_environment(data_ranks)
        own = {"PATH": os.pathsep.join([made["PATH"], hosts.path()]), "HOME": self._network.environment["HOME"]}
        return {name: text for name, text in made.items() if not name.startswith("SSH_")} | own


def measure(
    link: Link, workload: Workload, names: Sequence[str], plan: steps.Plan, *, say: Callable[[str], None]
) -> dict[str, Any]:
    """Return what results/link-NAME.json holds."""
    # A dense step over 100 Mb/s takes 7 s: one to warm up and three that count are enough.
    plan = replace(plan, ranks=len(HOSTS), warm_up=1, least_steps=3)
    peers = [peer for peer in peers_of(workload) if peer.name in names]
    folder = Path(tempfile.mkdtemp(prefix="hvlink-", dir="/tmp"))
    try:
        with hosts.Hosts(*HOSTS, folder=folder) as network:
            for host in HOSTS:
                network.run(host, "tc", "qdisc", "add", "dev", _INTERFACE, "root", *link.qdisc())
            if link.delay_ms:
                network.delay(HOSTS[-1], link.delay_ms / 1000)
            start = partial(_start, network)
            result = steps.measure(workload, peers, plan, say=say, start=start)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {**result, **_as_rows(link, result), **facts.collect()}


def _start(network: hosts.Hosts, workload: Workload, peer: Peer, plan: steps.Plan) -> Group:
    return LinkGroup(peer, workload, network=network)


def bound_s(link: Link, peer: Peer, compute_s: float) -> float:
    """Return what no step in which this peer exchanges its gradients can be faster than."""
    # With error feedback, no number of bytes is needed for one gradient.
    element_bytes = {"none": 4, "fp16": 2}.get(peer.environment.get("BENCH_COMPRESSION", "none"), 0)
    return max(compute_s, link.seconds(element_bytes * PARAMETERS))


def _as_rows(link: Link, result: dict[str, Any]) -> dict[str, Any]:
    """Return the table, and the ratios that have targets."""
    found = {name: entry for name, entry in result["peers"].items() if entry["status"] == "ok"}
    if "alone" not in found:
        raise GroupError(f"without the peer 'alone' nothing is known of T_comp: {result['peers'].get('alone')}")
    step_s = {name: entry["step_ms"] / 1000 for name, entry in found.items()}
    rows, bounds, overlaps = [], {}, {}
    for peer in (each for each in (*PEERS, *KERAS_PEERS[1:]) if each.name in found):
        entry = found[peer.name]
        against_ddp = ratio(result, "ddp", peer.name)
        if peer.cycle == 1 and peer.name != "alone":
            bounds[peer.name] = step_s[peer.name] / bound_s(link, peer, step_s["alone"])
        if (reduction := _REDUCTIONS.get(peer.name)) in found:
            overlaps[peer.name] = step_s[peer.name] / max(step_s["alone"], step_s[reduction])
        rows.append([
            peer.title, entry["step_ms"], round(entry["sent_bytes"] / 1e6, 2),
            *(f"{each[peer.name]:.2f}" if peer.name in each else "" for each in (bounds, overlaps)),
            entry["samples_per_s"], f"{against_ddp.median:.2f}" if against_ddp else "",
        ])  # fmt: skip
    delay = f" and {link.delay_ms:g} ms each way" if link.delay_ms else ""
    return {
        "kind": "rows",
        "title": f"Two hosts, {link.bits_per_s / 1e6:,.0f} Mb/s{delay} between them: {result['title']}",
        "columns": [*_COLUMNS],
        "rows": rows,
        "bounds": bounds,
        "overlaps": overlaps,
    }
