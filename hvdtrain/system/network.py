"""Find the addresses of this host, and its networks that lead to no other host.

Those are bridges such as Docker's, which every host has with the same address. Open MPI takes them for a way to the
other hosts, and ranks then wait for each other for ever. Each rank leaves its own host's out before MPI starts,
whatever has launched it; horovodrun tries by itself which interfaces lead elsewhere.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

from hvdtrain.system import open_mpi

LOOPBACK = "127.0.0.1"
_CHOICE = "OMPI_MCA_btl_tcp_if_"  # followed by "include" or "exclude"
_INTERFACES = Path("/sys/class/net")
_ROUTES = Path("/proc/net/route")
_TOLD = ("--parsable", "--level", "9", "--param", "btl", "tcp")


def is_here(hosts: Iterable[str]) -> bool:
    """Return whether all `hosts` are this one."""
    own = {address for _, address, _ in _addresses()}
    try:
        return all(socket.gethostbyname(host) in own for host in hosts)
    except OSError:
        return False


def interface(address: str = LOOPBACK) -> str:
    """Return the name of the network interface that has an IP address; "" if none has."""
    return next((name for name, each, _ in _addresses() if each == address), "lo" if address == LOOPBACK else "")


def _addresses() -> Iterator[tuple[str, str, str]]:
    """Yield interface, address, and the netmask of an IPv4 address, else ""."""
    import psutil  # not at every program's start

    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            yield name, each.address, (each.netmask or "") if each.family == socket.AF_INET else ""


def without_bridges(given: Iterable[str]) -> dict[str, str]:
    """Return variables that keep Open MPI off this host's bridges; none where `given` ones or its files choose."""
    if any(name.startswith(_CHOICE) for name in given):
        return {}
    bridges, others = _networks()
    # A container's own network has its host's bridge for a gateway, and is no bridge itself.
    left_out = sorted(str(each) for each in bridges - others)
    if not left_out or _is_chosen_in_files():
        return {}
    return {f"{_CHOICE}exclude": ",".join(["127.0.0.1/8", "sppp", *left_out])}  # the first two are its default


def _networks() -> tuple[set[ipaddress.IPv4Network], set[ipaddress.IPv4Network]]:
    """Return this host's networks: first of bridges that lead to no other host, then of other interfaces."""
    found: tuple[set[ipaddress.IPv4Network], set[ipaddress.IPv4Network]] = (set(), set())
    for name, address, netmask in _addresses():
        if netmask:
            found[not _leads_nowhere(name)].add(ipaddress.IPv4Network(f"{address}/{netmask}", strict=False))
    return found


def _leads_nowhere(name: str) -> bool:
    """Return whether an interface is a bridge of virtual ports alone; a host of virtual machines has its NIC in one."""
    folder = _INTERFACES / name
    if not (folder / "bridge").exists() or _is_default_route(name):
        return False
    ports = [_INTERFACES / port.name for port in (folder / "brif").glob("*")]
    return not any((port / "device").exists() or any(port.glob("lower_*")) for port in ports)


def _is_default_route(name: str) -> bool:
    try:
        return any(line.split()[:2] == [name, "00000000"] for line in _ROUTES.read_text().splitlines())
    except OSError:
        return False


def _is_chosen_in_files() -> bool:
    """Return whether one of Open MPI's parameter files chooses interfaces: beside it, ours would be an error."""
    sources = re.findall(r"btl_tcp_if_(?:include|exclude):source:(.*)", open_mpi.said_by("ompi_info", *_TOLD))
    return any(not source.startswith("default") for source in sources)
