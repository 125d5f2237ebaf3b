from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.launch import job_environment
from hvdtrain.launch.arguments import LaunchSpec

HERE = Path("/dev/shm/x")


@pytest.fixture(autouse=True)
def preloaded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "tmp_path" not in request.fixturenames:
        monkeypatch.setattr(job_environment, "_preload", lambda before: "library")


def test_under_mpirun_ranks_talk_through_shared_memory_alone() -> None:
    chosen = job_environment.on_loopback(HERE, LaunchSpec("mpirun"), {})
    assert "tcp" in chosen["OMPI_MCA_btl"]
    assert chosen["OMPI_MCA_btl"].startswith("^")
    assert chosen["OMPI_MCA_orte_tmpdir_base"] == str(HERE)
    assert "OMPI_MCA_btl" not in job_environment.on_loopback(HERE, LaunchSpec("horovodrun"), {})


def test_the_users_settings_stay() -> None:
    assert "OMPI_MCA_btl" not in job_environment.on_loopback(HERE, LaunchSpec("mpirun"), {"OMPI_MCA_btl": "self,tcp"})
    assert "OMPI_MCA_btl" not in job_environment.on_loopback(
        HERE, LaunchSpec("mpirun", options=["--mca", "btl", "self,tcp"]), {}
    )
    assert "OMPI_MCA_btl" not in job_environment.on_loopback(HERE, LaunchSpec("mpirun"), {"HVDTRAIN_LOOPBACK": "0"})


def test_mpirun_is_not_started_where_it_cannot_be_kept_to_loopback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("hvdtrain.horovod_build.installed.package_folder", lambda name: tmp_path)
    with pytest.raises(UsageError, match=r"libhvdtrain_listen\.so is missing.*HVDTRAIN_LOOPBACK=0") as caught:
        job_environment.on_loopback(HERE, LaunchSpec("mpirun"), {})
    assert "\n" not in str(caught.value)
    assert "LD_PRELOAD" not in job_environment.on_loopback(HERE, LaunchSpec("mpirun"), {"HVDTRAIN_LOOPBACK": "0"})


def test_horovodrun_is_not_started_either(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("hvdtrain.horovod_build.installed.package_folder", lambda name: tmp_path)
    monkeypatch.setattr("hvdtrain.horovod_build.installed.record", lambda: {"data_planes": "gloo,mpi"})
    with pytest.raises(UsageError, match="HVDTRAIN_LOOPBACK=0"):
        job_environment.on_loopback(HERE, LaunchSpec("horovodrun"), {})
    for passed in (["--gloo"], ["--network-interfaces", "eth0"]):
        job_environment.on_loopback(HERE, LaunchSpec("horovodrun", options=passed), {})


def test_a_library_that_does_not_load_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "runner").mkdir()
    (tmp_path / "runner" / "libhvdtrain_listen.so").write_bytes(b"no library")
    monkeypatch.setattr("hvdtrain.horovod_build.installed.package_folder", lambda name: tmp_path)
    with pytest.raises(UsageError, match=r"cannot be preloaded.*HVDTRAIN_LOOPBACK=0"):
        job_environment.on_loopback(HERE, LaunchSpec("mpirun"), {})


def test_mpirun_takes_the_environment_along_but_for_what_is_a_hosts_own() -> None:
    own = ("HOSTNAME", "SSH_CLIENT", "SLURM_NODEID", "PWD", "_", "CUDA_VISIBLE_DEVICES", "TMPDIR", "BASH_FUNC_x%%")
    environment = dict.fromkeys([*own, "HVDTRAIN_STALL_S", "OMP_NUM_THREADS", "PYTHONPATH", "MINE", "TERMINAL"], "1")
    exported = job_environment.exports(LaunchSpec("mpirun", options=["-x", "MINE=2", "--bind-to", "none"]), environment)
    assert exported[::2] == ["-x"] * 5
    assert exported[1::2] == ["HVDTRAIN_RUN_DIR", "HVDTRAIN_STALL_S", "OMP_NUM_THREADS", "PYTHONPATH", "TERMINAL"]
    assert (
        job_environment.exports(LaunchSpec("mpirun", options=["--mca", "mca_base_env_list", "MINE"]), environment) == []
    )


def test_a_rank_that_lost_its_peer_leaves_mpirun_time_to_hear_who_was_killed(tmp_path: Path) -> None:
    spec = LaunchSpec("horovodrun", hosts={"198.51.100.1": 2})
    assert int(job_environment.environment(tmp_path, spec, name="x")["OMPI_MCA_opal_abort_delay"]) >= 1
