"""Which addresses are this host's."""

from __future__ import annotations

import importlib
import socket
from collections.abc import Iterable, Iterator

LOOPBACK = "127.0.0.1"


def is_here(hosts: Iterable[str]) -> bool:
    """Return whether all `hosts` are this one."""
    own = {address for _, address in _addresses()}
    try:
        return all(socket.gethostbyname(host) in own for host in hosts)
    except OSError:
        return False


def interface(address: str = LOOPBACK) -> str:
    """Return the name of the network interface that has an IP address; "" if none has."""
    found = next((name for name, each in _addresses() if each == address), "")
    return found or ("lo" if address == LOOPBACK else "")


def _addresses() -> Iterator[tuple[str, str]]:
    psutil = importlib.import_module("psutil")
    for name, addresses in psutil.net_if_addrs().items():
        yield from ((str(name), each.address) for each in addresses)
