"""Which of a host's networks are left out; tests/engines/test_hosts.py has real bridges."""

from __future__ import annotations

import ipaddress

import pytest

from hvdtrain import bridges


def networks(*texts: str) -> set[ipaddress.IPv4Network]:
    return {ipaddress.IPv4Network(text) for text in texts}


@pytest.fixture
def docker(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = networks("172.18.0.0/16", "172.17.0.0/16", "10.9.0.0/24"), networks("127.0.0.0/8", "10.9.0.0/24")
    monkeypatch.setattr(bridges, "_networks", lambda: mine)


@pytest.mark.usefixtures("docker")
def test_bridges_are_left_out_but_for_those_whose_network_this_host_is_in() -> None:
    assert bridges.settings([]) == {"OMPI_MCA_btl_tcp_if_exclude": "127.0.0.1/8,sppp,172.17.0.0/16,172.18.0.0/16"}


@pytest.mark.usefixtures("docker")
@pytest.mark.parametrize("choice", ["include", "exclude"])
def test_a_choice_of_interfaces_stands(choice: str) -> None:
    assert bridges.settings(["PATH", f"OMPI_MCA_btl_tcp_if_{choice}"]) == {}


def test_a_host_without_bridges_leaves_everything_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridges, "_networks", lambda: (set(), networks("10.9.0.0/24")))
    assert bridges.settings([]) == {}


def test_loopback_is_no_bridge() -> None:
    found, others = bridges._networks()
    assert networks("127.0.0.0/8") <= others
    assert not networks("127.0.0.0/8") & found
