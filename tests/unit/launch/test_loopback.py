from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.launch import loopback
from hvdtrain.launch.arguments import LaunchSpec

HERE = Path("/dev/shm/x")


@pytest.fixture(autouse=True)
def preloaded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "tmp_path" not in request.fixturenames:
        monkeypatch.setattr(loopback, "_preload", lambda before: "library")


@pytest.mark.parametrize(
    ("hosts", "flags"),
    [("localhost:2", ["--network-interfaces", "lo"]), ("localhost:1\\n192.0.2.77:1", [])],
)
def test_an_elastic_job_of_one_host_is_told_its_interface(hosts: str, flags: list[str]) -> None:
    script = f"printf '{hosts}\\n'"
    assert loopback.elastic_flags(["--host-discovery-script", script]) == flags


def test_the_users_own_interface_stays() -> None:
    passed = ["--host-discovery-script", "echo localhost:2", "--network-interfaces", "eth0"]
    assert loopback.elastic_flags(passed) == []
    assert loopback.elastic_flags(["-H", "localhost:2"]) == []


def test_a_discovery_script_that_fails_is_named() -> None:
    with pytest.raises(UsageError, match=r"echo no; exit 3 failed with status 3"):
        loopback.discovered_hosts("echo no; exit 3")


def test_under_mpirun_ranks_talk_through_shared_memory_alone() -> None:
    chosen = loopback.settings(HERE, LaunchSpec("mpirun"), {})
    assert "tcp" in chosen["OMPI_MCA_btl"]
    assert chosen["OMPI_MCA_btl"].startswith("^")
    assert chosen["OMPI_MCA_orte_tmpdir_base"] == str(HERE)
    assert "OMPI_MCA_btl" not in loopback.settings(HERE, LaunchSpec("horovodrun"), {})


def test_the_users_settings_stay() -> None:
    assert "OMPI_MCA_btl" not in loopback.settings(HERE, LaunchSpec("mpirun"), {"OMPI_MCA_btl": "self,tcp"})
    assert "OMPI_MCA_btl" not in loopback.settings(HERE, LaunchSpec("mpirun", options=["--mca", "btl", "self,tcp"]), {})
    assert "OMPI_MCA_btl" not in loopback.settings(HERE, LaunchSpec("mpirun"), {"HVDTRAIN_LOOPBACK": "0"})


def test_mpirun_is_not_started_where_it_cannot_be_kept_to_loopback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("hvdtrain.horovod_build.installed.package_folder", lambda name: tmp_path)
    with pytest.raises(UsageError, match=r"libhvdtrain_listen\.so is missing.*HVDTRAIN_LOOPBACK=0") as caught:
        loopback.settings(HERE, LaunchSpec("mpirun"), {})
    assert "\n" not in str(caught.value)
    assert "LD_PRELOAD" not in loopback.settings(HERE, LaunchSpec("mpirun"), {"HVDTRAIN_LOOPBACK": "0"})


def test_horovodrun_is_not_started_either(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("hvdtrain.horovod_build.installed.package_folder", lambda name: tmp_path)
    monkeypatch.setattr("hvdtrain.horovod_build.installed.record", lambda: {"data_planes": "gloo,mpi"})
    with pytest.raises(UsageError, match="HVDTRAIN_LOOPBACK=0"):
        loopback.settings(HERE, LaunchSpec("horovodrun"), {})
    for passed in (["--gloo"], ["--network-interfaces", "eth0"]):
        loopback.settings(HERE, LaunchSpec("horovodrun", options=passed), {})


def test_a_library_that_does_not_load_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "runner").mkdir()
    (tmp_path / "runner" / "libhvdtrain_listen.so").write_bytes(b"no library")
    monkeypatch.setattr("hvdtrain.horovod_build.installed.package_folder", lambda name: tmp_path)
    with pytest.raises(UsageError, match=r"cannot be preloaded.*HVDTRAIN_LOOPBACK=0"):
        loopback.settings(HERE, LaunchSpec("mpirun"), {})
