"""Networks that lead to no other host: bridges such as Docker's, which every host has with the same address.

Open MPI takes them for a way to the other hosts, and ranks then wait for each other for ever. Each rank leaves its own
host's out before MPI starts, whatever has launched it; horovodrun tries by itself which interfaces lead elsewhere.
"""

from __future__ import annotations

import importlib
import ipaddress
import socket
from collections.abc import Iterable
from pathlib import Path

_CHOICE = "OMPI_MCA_btl_tcp_if_"  # followed by "include" or "exclude"
_NEVER = ("127.0.0.1/8", "sppp")  # what Open MPI leaves out by itself


def settings(given: Iterable[str]) -> dict[str, str]:
    """Return what keeps Open MPI off this host's bridges.

    Args:
        given: names of variables that are set: where interfaces were chosen, that stands.
    """
    if any(name.startswith(_CHOICE) for name in given):
        return {}
    bridges, others = _networks()
    # A container's own network has its host's bridge for a gateway, and is no bridge itself.
    left_out = sorted(str(each) for each in bridges - others)
    return {f"{_CHOICE}exclude": ",".join([*_NEVER, *left_out])} if left_out else {}


def _networks() -> tuple[set[ipaddress.IPv4Network], set[ipaddress.IPv4Network]]:
    """Return this host's networks: those of bridges, and those of other interfaces."""
    psutil = importlib.import_module("psutil")
    bridges: set[ipaddress.IPv4Network] = set()
    others: set[ipaddress.IPv4Network] = set()
    for name, addresses in psutil.net_if_addrs().items():
        found = bridges if Path("/sys/class/net", name, "bridge").exists() else others
        for address in addresses:
            if address.family == socket.AF_INET:
                found.add(ipaddress.IPv4Network(f"{address.address}/{address.netmask}", strict=False))
    return bridges, others
