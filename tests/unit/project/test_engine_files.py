"""Files that users of Slurm and Kubernetes copy agree with the image, with `hvdtrain run`, and with each other."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from hvdtrain.launch import arguments, config_file
from hvdtrain.training import preemption

ROOT = Path(__file__).resolve().parents[3]
FILES = ROOT / "docs" / "pages" / "engines" / "files"
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
SSHD = (ROOT / "docker" / "hvdtrain-sshd").read_text(encoding="utf-8")
(USER_ID,) = set(re.findall(r"--uid (\d+)", DOCKERFILE))
(HOME,) = set(re.findall(r"^WORKDIR (/home/\S+)", DOCKERFILE, re.MULTILINE))


def load(name: str) -> dict[str, Any]:
    """Return a manifest's last document, with the volume claim that goes before it checked."""
    claim, job = yaml.safe_load_all((FILES / name).read_text(encoding="utf-8"))
    assert claim["kind"] == "PersistentVolumeClaim"
    return job


def pods(name: str) -> list[dict[str, Any]]:
    """Return the specifications of a manifest's pods."""
    spec = load(name)["spec"]
    replicas = spec.get("mpiReplicaSpecs", {"": spec})
    return [each["template"]["spec"] for each in replicas.values()]


MPI = load("mpijob.yaml")["spec"]
LAUNCHER, WORKER = (MPI["mpiReplicaSpecs"][name] for name in ("Launcher", "Worker"))


@pytest.mark.parametrize("name", ["mpijob.yaml", "job.yaml"])
def test_pods_run_as_the_images_user_and_mount_volumes_that_are_there(name: str) -> None:
    claim, job = yaml.safe_load_all((FILES / name).read_text(encoding="utf-8"))
    for pod in pods(name):
        assert pod["securityContext"]["runAsUser"] == int(USER_ID)
        (container,) = pod["containers"]
        assert container["image"] == "hvdtrain:cpu"
        volumes = {each["name"]: each for each in pod["volumes"]}
        assert {each["name"] for each in container["volumeMounts"]} == set(volumes)
        if "work" in volumes:
            assert volumes["work"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert job["metadata"]["name"] == "train"


def test_the_mpijob_starts_as_many_ranks_as_its_workers_have_slots() -> None:
    (container,) = LAUNCHER["template"]["spec"]["containers"]
    parts = arguments.split(container["args"])
    assert container["command"] == ["hvdtrain", "run"]
    assert parts.program == ["/script/train.py"]
    assert arguments.value(parts.ours, "--launcher") == "mpirun"
    assert arguments.value(parts.ours, "-np") == str(WORKER["replicas"] * MPI["slotsPerWorker"])
    assert arguments.value(parts.passed, "--hostfile") == "/etc/mpi/hostfile"  # where the operator mounts it


def test_the_launchers_ssh_and_the_workers_sshd_mean_the_same_port_and_keys() -> None:
    (launcher,) = LAUNCHER["template"]["spec"]["containers"]
    (worker,) = WORKER["template"]["spec"]["containers"]
    (default,) = re.findall(r"HVDTRAIN_SSH_PORT:-(\d+)", SSHD)
    assert worker["command"] == ["hvdtrain-sshd"]
    assert "COPY docker/hvdtrain-sshd /usr/local/bin/" in DOCKERFILE
    (port,) = worker["ports"]
    assert port["containerPort"] == int(default)
    assert worker["readinessProbe"]["tcpSocket"]["port"] == port["name"]
    assert MPI["launcherCreationPolicy"] == "WaitForWorkersReady"
    ssh = launcher["args"][launcher["args"].index("plm_rsh_args") + 1].split()
    assert ssh[:2] == ["-p", default]
    assert {"StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null"} <= set(ssh)  # each worker makes its own key
    assert MPI["sshAuthMountPath"] == f"{HOME}/.ssh"


def test_ranks_are_told_what_the_launcher_is_told() -> None:
    (container,) = LAUNCHER["template"]["spec"]["containers"]
    words = container["args"]
    exported = {words[i + 1] for i, word in enumerate(words) if word == "-x"}
    assert {each["name"] for each in container["env"]} <= exported
    workdir = words[words.index("--wdir") + 1]
    (worker,) = WORKER["template"]["spec"]["containers"]
    assert workdir in {mount["mountPath"] for mount in worker["volumeMounts"]}


def test_a_pod_that_stops_on_request_has_time_for_it_and_is_no_failure() -> None:
    grace = float(config_file.DEFAULTS.grace or "")
    spec = load("job.yaml")["spec"]
    (pod,) = pods("job.yaml")
    assert pod["terminationGracePeriodSeconds"] > grace
    assert pods("mpijob.yaml")[0]["terminationGracePeriodSeconds"] > grace
    codes, condition = spec["podFailurePolicy"]["rules"]
    assert codes["action"] == condition["action"] == "Ignore"
    assert codes["onExitCodes"]["values"] == [preemption.EXIT_CODE]
    assert codes["onExitCodes"]["containerName"] == pod["containers"][0]["name"]
    assert pod["restartPolicy"] == "Never"  # the policy needs it
    parts = arguments.split(pod["containers"][0]["args"])
    assert (parts.ours, parts.program) == (["-np", "4"], ["/script/train.py"])


def test_the_batch_script_is_bash_and_knows_the_status_of_a_stopped_job() -> None:
    script = FILES / "train.sbatch"
    assert subprocess.run(["bash", "-n", str(script)], capture_output=True).stderr == b""
    text = script.read_text(encoding="utf-8")
    assert f'"$status" -eq {preemption.EXIT_CODE}' in text
    directives = re.findall(r"^#SBATCH (\S+)$", text, re.MULTILINE)
    assert "--requeue" in directives
    assert any(re.fullmatch(r"--signal=B:USR1@\d+", each) for each in directives)
    assert text.index("#SBATCH --requeue") < text.index("\nif ")  # sbatch reads no further than the first command
