"""The ranks that keep copies of what other ranks hold alone, for when a host of an elastic job is lost."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence


def this_host() -> tuple[str, str]:
    """Return the machine's name, and the name by which an elastic job's driver knows it, or a part of it."""
    return socket.gethostname(), os.environ.get("HOROVOD_HOSTNAME", "")


def hosts_of(names: Sequence[tuple[str, str]]) -> list[str]:
    """Return each rank's host, from what `this_host` returns on all ranks.

    Ray's processes are a host each to the driver: their machines count, if there are several.
    """
    several = len({machine for machine, _ in names}) > 1
    return [machine if several or not name else name for machine, name in names]


def choose(hosts: Sequence[str]) -> list[int]:
    """Return, for each rank, the rank that keeps its copy: on another host, with as few copies a rank as possible.

    A host whose ranks are lost together then takes no copy of its own parts with it. On one host each rank is its own
    keeper: an elastic job drops the whole host if one of its ranks dies.

    Args:
        hosts: each rank's host.
    """
    size = len(hosts)
    by_host = sorted(range(size), key=lambda rank: (hosts.index(hosts[rank]), rank))
    most = max(map(hosts.count, hosts))
    if most == size:
        return list(range(size))
    keepers = [0] * size
    if 2 * most <= size:  # further on than any host is long
        for place, rank in enumerate(by_host):
            keepers[rank] = by_host[(place + most) % size]
        return keepers
    largest = max(hosts, key=hosts.count)
    inside, outside = ([rank for rank in by_host if (hosts[rank] == largest) == wanted] for wanted in (True, False))
    for mine, others in ((inside, outside), (outside, inside)):
        for place, rank in enumerate(mine):
            keepers[rank] = others[place % len(others)]
    return keepers
