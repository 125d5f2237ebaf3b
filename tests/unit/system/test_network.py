"""This host's addresses, and the networks that are left out; tests/engines/test_hosts.py has real bridges."""

from __future__ import annotations

import ipaddress
import shutil
import socket
from pathlib import Path

import pytest

from hvdtrain.system import network

TOLD = network._TOLD


def networks(*texts: str) -> set[ipaddress.IPv4Network]:
    return {ipaddress.IPv4Network(text) for text in texts}


@pytest.fixture(autouse=True)
def nothing_in_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_TOLD", ("true",))


@pytest.fixture
def docker(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = networks("172.18.0.0/16", "172.17.0.0/16", "10.9.0.0/24"), networks("127.0.0.0/8", "10.9.0.0/24")
    monkeypatch.setattr(network, "_networks", lambda: mine)


@pytest.mark.usefixtures("docker")
def test_bridges_are_left_out_but_for_those_whose_network_this_host_is_in() -> None:
    assert network.without_bridges([]) == {
        "OMPI_MCA_btl_tcp_if_exclude": "127.0.0.1/8,sppp,172.17.0.0/16,172.18.0.0/16"
    }


@pytest.mark.usefixtures("docker")
@pytest.mark.parametrize("choice", ["include", "exclude"])
def test_a_choice_of_interfaces_stands(choice: str) -> None:
    assert network.without_bridges(["PATH", f"OMPI_MCA_btl_tcp_if_{choice}"]) == {}


def test_a_host_without_bridges_leaves_everything_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_networks", lambda: (set(), networks("10.9.0.0/24")))
    assert network.without_bridges([]) == {}


def test_loopback_is_no_bridge() -> None:
    found, others = network._networks()
    assert networks("127.0.0.0/8") <= others
    assert not networks("127.0.0.0/8") & found


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder as /sys/class/net, with a NIC, a container's end of a cable, and a bridge of each."""
    for name in ("eth0/device", "veth1", "docker0/bridge", "docker0/brif/veth1", "br0/bridge", "br0/brif/eth0"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("br1/bridge", "br1/brif/bond0", "bond0/lower_eth0"):  # on two cables, or tagged
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "routes").write_text("Iface\tDestination\tGateway\n")
    monkeypatch.setattr(network, "_INTERFACES", tmp_path)
    monkeypatch.setattr(network, "_ROUTES", tmp_path / "routes")
    return tmp_path


def test_a_bridge_that_the_hosts_own_cable_is_in_leads_elsewhere(machine: Path) -> None:
    found = {name for name in ("eth0", "veth1", "docker0", "br0", "br1", "none") if network._leads_nowhere(name)}
    assert found == {"docker0"}


def test_a_bridge_with_the_default_route_leads_elsewhere(machine: Path) -> None:
    (machine / "routes").write_text("Iface\tDestination\tGateway\ndocker0\t00000000\t0100000A\nbr0\t0000000A\t0\n")
    assert not network._leads_nowhere("docker0")


@pytest.mark.usefixtures("docker")
@pytest.mark.skipif(shutil.which("ompi_info") is None, reason="no ompi_info")
def test_a_choice_in_open_mpis_files_stands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(network, "_TOLD", TOLD)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert network.without_bridges([])
    (tmp_path / ".openmpi").mkdir()
    (tmp_path / ".openmpi" / "mca-params.conf").write_text("btl_tcp_if_include = eth0\n")
    assert network.without_bridges([]) == {}


def test_without_ompi_info_nothing_is_chosen_in_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_TOLD", ("hvdtrain-no-such-program",))
    assert not network._is_chosen_in_files()


def test_this_host_is_known_by_its_names() -> None:
    assert network.is_here(["localhost", "127.0.0.1", socket.gethostname()])
    assert network.is_here([])
    assert not network.is_here(["localhost", "192.0.2.77"])
    assert not network.is_here(["no-such-host.invalid"])
