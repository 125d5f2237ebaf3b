from __future__ import annotations

import socket

from hvdtrain.system import network


def test_this_host_is_known_by_its_names() -> None:
    assert network.is_here(["localhost", "127.0.0.1", socket.gethostname()])
    assert network.is_here([])
    assert not network.is_here(["localhost", "192.0.2.77"])
    assert not network.is_here(["no-such-host.invalid"])
