"""A job over MPI of hosts with several networks, and a stranger on one that was not chosen for it."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("horovod.torch", exc_type=ImportError)
sys.path.insert(0, str(Path(__file__).parent))
import attacked

from benchmarks import hosts
from hvdtrain.horovod_build import installed

pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.skipif(bool(hosts.missing()), reason=hosts.missing() or "-"),
    pytest.mark.skipif("mpi" not in installed.record().get("data_planes", ""), reason="Horovod was built without MPI"),
]
OWN = 7777  # a port that the ranks' own program listens at, as TensorBoard does
TRAIN = f"""
import os, socket, sys, time
from pathlib import Path
import horovod.torch as hvd, torch
own = socket.create_server(("", {OWN}))
hvd.init()
hvd.allreduce(torch.ones(1))
Path(sys.argv[1], f"began-{{hvd.rank()}}").touch()
# Ranks that wait for one another take connections.
while not hvd.allreduce(torch.tensor(float(Path(sys.argv[1], "go").exists())), op=hvd.Sum):
    time.sleep(0.02)
total = hvd.allreduce(torch.full((100_000,), 10.0 ** hvd.rank()), op=hvd.Sum).unique().tolist()
sys.stdout.write(f"rank {{hvd.rank()}} of {{hvd.size()}}: {{total}}\\n")
"""
# Connects to each port and waits for the end of the connection: "refused", "closed", or "open".
KNOCK = r"""
import json, socket, sys
found = {}
for host, port in json.loads(sys.argv[1]):
    try:
        with socket.create_connection((host, port), 3) as connection:
            connection.settimeout(3)
            found[f"{host}:{port}"] = "answered" if connection.recv(1) else "closed"
    except ConnectionRefusedError:
        found[f"{host}:{port}"] = "refused"
    except ConnectionResetError:
        found[f"{host}:{port}"] = "closed"
    except TimeoutError:
        found[f"{host}:{port}"] = "open"
print(json.dumps(found))
"""
LAUNCHERS = {
    "horovodrun": ["horovodrun", "--mpi", "--network-interfaces"],
    "run": ["hvdtrain", "run", "--mpi", "--network-interfaces"],
    "mpirun": ["hvdtrain", "run", "--launcher", "mpirun", "--mca", "btl_tcp_if_include"],
}
JOB = ("-np", "2", "-H", "hosta:1,hostb:1")


@pytest.fixture(scope="module")
def networks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[hosts.Hosts]:
    folder = tmp_path_factory.mktemp("hosts")
    with hosts.Hosts("hosta", "hostb", "hostc", folder=folder, networks=3) as found:
        yield found


class Run(attacked.Command):
    """A job that hosta starts on itself and hostb."""

    limit_s = 90.0

    def __init__(self, networks: hosts.Hosts, folder: Path, *launcher: str) -> None:
        python = Path(sys.executable).parent
        program = ["train.py"] if launcher[0] == "hvdtrain" else [sys.executable, "train.py"]
        self.networks, self.before = networks, {host: listening(networks, host) for host in ("hosta", "hostb")}
        process = networks.start(
            "hosta", str(python / launcher[0]), *launcher[1:], *JOB, *program, str(folder), cwd=folder,
            log=folder / "output", OMP_NUM_THREADS="1",
        )  # fmt: skip
        super().__init__(folder, process)

    def stop(self) -> None:
        """Let it end if it has not: the next job's ranks want the same port."""
        (self.folder / "go").touch()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        self.kill()

    def ports(self) -> dict[str, set[int]]:
        """Return the ports of the job at which anything listens, but for the program's own, on each of its hosts."""
        return {
            host: {port for port in listening(self.networks, host) - before if port != OWN}
            for host, before in self.before.items()
        }

    def knock(self, network: int) -> dict[str, str]:
        """Return what became of connections from hostc, on a network, to the ports of the job."""
        there = [
            (f"10.{77 + network}.0.{i + 1}", port) for i, ports in enumerate(self.ports().values()) for port in ports
        ]
        return knock(self.networks, there)


@pytest.fixture
def start(networks: hosts.Hosts, request: pytest.FixtureRequest) -> Iterator[Callable[..., Run]]:
    folder = networks.folder / re.sub(r"\W", "-", request.node.name)
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    runs: list[Run] = []

    def begin(*launcher: str) -> Run:
        runs.append(Run(networks, folder, *launcher))
        runs[-1].wait_for("began-0", "began-1")
        return runs[-1]

    yield begin
    for run in runs:
        run.stop()


def listening(networks: hosts.Hosts, host: str) -> set[int]:
    """Return the TCP ports, of IPv4 and IPv6, at which a host listens, wherever."""
    lines = networks.run(host, "cat", "/proc/net/tcp", "/proc/net/tcp6").stdout.splitlines()
    fields = [line.split() for line in lines]
    return {int(each[1].rpartition(":")[2], 16) for each in fields if each[3] == "0A"}


def knock(networks: hosts.Hosts, there: list[tuple[str, int]]) -> dict[str, str]:
    """Return what became of connections from hostc to some ports."""
    done = networks.run("hostc", sys.executable, "-I", "-S", "-c", KNOCK, json.dumps(there))
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_over_mpi_no_port_is_open_on_a_network_that_was_not_chosen(
    launcher: str, networks: hosts.Hosts, start: Callable[..., Run]
) -> None:
    run = start(*LAUNCHERS[launcher], "eth1")
    for network in (0, 2):
        found = run.knock(network)
        assert len(found) >= 4, "mpirun, its daemon and two ranks listen"
        assert set(found.values()) == {"refused"}
    assert knock(networks, [("10.77.0.2", OWN)]) == {f"10.77.0.2:{OWN}": "open"}, (
        "what the script listens at is left alone"
    )
    output = run.end()
    assert output.count(f"of 2: {attacked.total(2)}") == 2
    assert "hvdtrain: " not in output


def test_over_mpi_on_several_networks_who_comes_by_another_one_is_sent_away(
    networks: hosts.Hosts, start: Callable[..., Run]
) -> None:
    run = start(*LAUNCHERS["horovodrun"], "eth0,eth1")
    found = run.knock(2)
    assert len(found) >= 4
    assert set(found.values()) <= {"refused", "closed"}
    assert run.end().count(f"of 2: {attacked.total(2)}") == 2


def test_over_mpi_who_sends_to_the_chosen_address_by_another_network_is_sent_away(
    networks: hosts.Hosts, start: Callable[..., Run]
) -> None:
    routes = [("10.78.0.1", "10.77.0.1"), ("10.78.0.2", "10.77.0.2")]
    run = start(*LAUNCHERS["horovodrun"], "eth1")
    for address, gateway in routes:
        networks.run("hostc", "ip", "route", "add", f"{address}/32", "via", gateway)
    try:
        found = run.knock(1)
    finally:
        for address, _ in routes:
            networks.run("hostc", "ip", "route", "del", f"{address}/32")
    assert sorted(found.values()).count("closed") == 4, found
    assert set(found.values()) == {"refused", "closed"}
    assert run.end().count(f"of 2: {attacked.total(2)}") == 2


@pytest.mark.parametrize("launcher", ["horovodrun", "mpirun"])
def test_over_mpi_other_users_of_a_jobs_hosts_get_no_connection(
    launcher: str, networks: hosts.Hosts, start: Callable[..., Run]
) -> None:
    run = start(*LAUNCHERS[launcher], "eth1")
    for i, (host, ports) in enumerate(run.ports().items()):
        there = [(address, port) for address in ("127.0.0.1", f"10.78.0.{i + 1}") for port in sorted(ports)]
        done = networks.run(host, *attacked.AS_STRANGER, KNOCK, json.dumps(there), cwd=Path("/"))
        found = list(json.loads(done.stdout).values())
        assert set(found) == {"refused", "closed"}, done.stdout
        assert found.count("closed") >= 2, "at loopback for ranks, and at the job's interface for the other host"
    output = run.end()
    assert output.count(f"of 2: {attacked.total(2)}") == 2
    assert f"refused a connection to Open MPI by user {attacked.UID} of this host" in output


def test_over_mpi_hosts_without_an_address_of_ipv6_are_held_as_others_are(
    networks: hosts.Hosts, start: Callable[..., Run]
) -> None:
    for host in ("hosta", "hostb"):  # as most containers are
        networks.run(host, "sysctl", "-q", "-w", "net.ipv6.conf.all.disable_ipv6=1")
    try:
        run = start(*LAUNCHERS["horovodrun"], "eth1")
        assert set(run.knock(0).values()) == {"refused"}
        assert run.end().count(f"of 2: {attacked.total(2)}") == 2
    finally:
        for host in ("hosta", "hostb"):
            networks.run(host, "sysctl", "-q", "-w", "net.ipv6.conf.all.disable_ipv6=0")
