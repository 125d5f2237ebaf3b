from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvdtrain.horovod_build import build as steps
from hvdtrain.horovod_build import cache, find, gpu_proof, gpu_record, native, packages, probe
from hvdtrain.horovod_build.build import BuildOptions, build
from hvdtrain.horovod_build.changes import change
from hvdtrain.horovod_build.errors import BuildError, CompileError
from hvdtrain.horovod_build.find import Cuda, Found, Framework, Mpi, Nccl
from hvdtrain.horovod_build.gpu_proof import Proof
from hvdtrain.horovod_build.installed import Plane

FOUND = Found(
    (Framework("torch", "2.13.0+cpu"), Framework("tensorflow", "2.21.0")),
    "g++ 12",
    Mpi("4.1.4", Path("/usr/bin/mpirun")),
    None,
    None,
    (),
    ("a note",),
)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine where everything works at once; it records what was done."""
    done = SimpleNamespace(
        proven=0, compiled=0, installed=[], proved=[], broken=(), record={}, cache=tmp_path / "cache"
    )

    def compile_(source: Path, **_: object) -> Path:
        done.compiled += 1
        wheel = source / f"horovod-{done.compiled}.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("horovod/__init__.py", f"# {done.compiled}")
        return wheel

    def unpack(path: Path, folder: Path) -> Path:
        folder.joinpath("source").mkdir()
        return folder / "source"

    def allreduce(framework: str, plane: Plane, *, ranks: int, timeout_s: float, step: bool) -> probe.Probe:
        assert step == (plane != "nccl")
        done.proved.append((framework, plane, ranks))
        error = "no answer within 90 s" if (framework, plane) in done.broken else ""
        return probe.Probe(framework, plane, ranks, error, 1.0, None if error else 0.5)

    monkeypatch.setenv("HVDTRAIN_CACHE", str(done.cache))
    monkeypatch.setattr(steps, "find_all", lambda **_: FOUND)
    monkeypatch.setattr(packages, "fetch_tools", lambda home: tmp_path / "tools")
    monkeypatch.setattr(packages, "fetch", lambda home, tools: tmp_path / "sdist")
    monkeypatch.setattr(packages, "unpack", unpack)
    monkeypatch.setattr(steps.changes, "change", lambda tree: None)
    monkeypatch.setattr(native, "run", lambda tree, *, log, **rest: (log.touch(), compile_(tree))[1])
    monkeypatch.setattr(packages, "install", lambda wheel, cache: done.installed.append(wheel))
    monkeypatch.setattr(packages, "remove", lambda cache: done.installed.append(None))
    monkeypatch.setattr(steps.installed, "mark_as_proven", lambda: setattr(done, "proven", done.proven + 1))
    monkeypatch.setattr(steps.installed, "record", lambda: done.record)
    monkeypatch.setattr(probe, "allreduce", allreduce)
    return done


def test_each_framework_is_proved_over_each_data_plane(machine: SimpleNamespace) -> None:
    build(BuildOptions())
    frameworks, planes = ("torch", "tensorflow"), ("gloo", "mpi")
    assert sorted(machine.proved) == sorted((f, p, 2) for f in frameworks for p in planes)


def test_a_second_build_takes_the_wheel_from_the_cache(machine: SimpleNamespace) -> None:
    first, second = build(BuildOptions()), build(BuildOptions())
    assert first == second
    assert machine.compiled == 1
    assert len(machine.installed) == 2
    assert list((machine.cache / "logs").iterdir()) == []


def test_rebuild_compiles_again_and_replaces_the_wheel(machine: SimpleNamespace) -> None:
    build(BuildOptions())
    wheel = build(BuildOptions(rebuild=True))
    assert machine.compiled == 2
    assert wheel is not None
    assert wheel.name == "horovod-2.whl"


def test_the_wheel_that_is_installed_already_is_proved_but_not_installed_again(machine: SimpleNamespace) -> None:
    wheel = build(BuildOptions())
    assert wheel is not None
    machine.record = {"key": wheel.parent.name}
    machine.proved.clear()
    build(BuildOptions())
    assert len(machine.installed) == 1
    assert len(machine.proved) == 4


def test_a_dry_run_prints_the_plan_and_changes_nothing(
    machine: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert build(BuildOptions(dry_run=True)) is None
    shown = capsys.readouterr().out
    for said in (
        "torch 2.13.0+cpu",
        "Open MPI 4.1.4",
        "data planes: gloo, mpi",
        "would compile",
        "a note",
        "C++17",
        "patch 02-gcc-13: Include",
    ):
        assert said in shown
    assert (machine.compiled, machine.installed, machine.proved) == (0, [], [])
    assert not machine.cache.exists()


def test_a_patch_that_does_not_apply_stops_the_build(machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps.changes, "change", change)
    with pytest.raises(BuildError, match=r"Patch 01-cxx-standard does not apply to CMakeLists\.txt"):
        build(BuildOptions())
    assert (machine.compiled, machine.installed, machine.proved) == (0, [], [])


def test_a_failed_proof_is_an_error_that_names_framework_and_plane_after_all_were_tried(
    machine: SimpleNamespace,
) -> None:
    machine.broken = (("torch", "mpi"),)
    with pytest.raises(BuildError, match="torch over mpi: no answer within 90 s"):
        build(BuildOptions())
    assert len(machine.proved) == 4


UNSEEN = replace(FOUND, frameworks=(Framework("torch", "9.1.0"), FOUND.frameworks[1]))


def test_a_version_that_no_test_has_seen_is_proven_with_one_line_that_says_so(
    machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build(BuildOptions())
    assert "No test of hvdtrain" not in capsys.readouterr().out
    monkeypatch.setattr(steps, "find_all", lambda **_: UNSEEN)
    build(BuildOptions())
    assert capsys.readouterr().out.count("No test of hvdtrain has seen torch 9.1.0: it was proven here") == 1
    assert machine.proven == 2
    build(BuildOptions(install=False))
    assert "No test of hvdtrain has seen torch 9.1.0, and nothing was proven here" in capsys.readouterr().out


def test_an_untested_version_whose_proof_fails_is_taken_back_and_refused(
    machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    worked = build(BuildOptions())
    assert worked is not None
    machine.record = {"key": worked.parent.name}
    monkeypatch.setattr(steps, "find_all", lambda **_: UNSEEN)
    machine.broken = (("torch", "gloo"),)
    with pytest.raises(BuildError) as info:
        build(BuildOptions())
    last = "No test of hvdtrain has seen torch 9.1.0. The last version that works: pip install 'torch>="
    for said in ("torch over gloo: no answer", "What was installed before is installed again.", last):
        assert said in str(info.value)
    assert machine.installed[-1] == worked
    machine.record = {}
    with pytest.raises(BuildError, match="It was uninstalled again"):
        build(BuildOptions())
    assert machine.installed[-1] is None
    assert machine.proven == 1


def test_force_keeps_an_untested_version_whose_proof_failed(
    machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "find_all", lambda **_: UNSEEN)
    machine.broken = (("torch", "gloo"),)
    with pytest.raises(BuildError, match="torch over gloo") as info:
        build(BuildOptions(force=True))
    assert "No test of hvdtrain has seen" not in str(info.value)
    assert len(machine.installed) == 1
    assert machine.proven == 0


def test_an_untested_version_that_does_not_compile_is_refused_with_the_last_that_works(
    machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise CompileError("Horovod did not compile")

    monkeypatch.setattr(native, "run", fail)
    with pytest.raises(CompileError):
        build(BuildOptions())
    monkeypatch.setattr(steps, "find_all", lambda **_: UNSEEN)
    with pytest.raises(BuildError, match=r"did not compile\n.*torch 9\.1\.0.*pip install 'torch>="):
        build(BuildOptions())
    assert machine.installed == []


def test_a_copy_of_the_wheel_goes_where_it_was_asked_for(machine: SimpleNamespace, tmp_path: Path) -> None:
    build(BuildOptions(out=tmp_path / "out", install=False))
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["horovod-1.whl"]
    assert (machine.installed, machine.proved) == ([], [])


def test_the_wheel_for_other_hosts_comes_with_the_command_and_what_they_need(
    machine: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    build(BuildOptions(out=Path("out")))
    shown = capsys.readouterr().out
    wheel = tmp_path / "out" / "horovod-1.whl"
    assert f"pip install --no-deps --force-reinstall {wheel} && hvdtrain doctor\n" in shown
    for said in ("torch 2.13.0+cpu and tensorflow 2.21.0, exactly", "Open MPI 4", "proven on this host"):
        assert said in shown
    assert len(machine.installed) == 1


def test_a_wheel_whose_proof_failed_is_not_handed_out(machine: SimpleNamespace, tmp_path: Path) -> None:
    machine.broken = (("torch", "mpi"),)
    with pytest.raises(BuildError, match="torch over mpi"):
        build(BuildOptions(out=tmp_path / "out"))
    assert list((tmp_path / "out").iterdir()) == []


def test_a_folder_that_cannot_be_made_ends_the_build_before_the_compile(
    machine: SimpleNamespace, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file/out"):
        build(BuildOptions(out=tmp_path / "file" / "out"))
    assert machine.compiled == 0


def test_without_a_framework_nothing_is_made(
    machine: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "find_all", find.find_all)
    monkeypatch.setattr(find, "package_folder", lambda name: None)
    with pytest.raises(BuildError, match=r"Neither torch nor tensorflow is installed.*pip install 'torch"):
        build(BuildOptions(out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_dry_run_names_the_folder_and_does_not_make_it(
    machine: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build(BuildOptions(out=tmp_path / "out", dry_run=True))
    assert f"would be put into {tmp_path / 'out'}" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_another_wheel_of_the_same_name_is_replaced_with_a_line_that_says_so(
    machine: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):  # the second finds its own wheel
        build(BuildOptions(out=tmp_path, install=False))
    assert "replaces another wheel" not in capsys.readouterr().out
    (tmp_path / "horovod-1.whl").write_bytes(b"for another torch")
    built = build(BuildOptions(out=tmp_path, install=False))
    assert "replaces another wheel" in capsys.readouterr().out
    assert built is not None
    assert (tmp_path / "horovod-1.whl").read_bytes() == built.read_bytes()


def test_the_wheel_carries_its_data_planes_and_versions() -> None:
    record = json.loads(steps.record(FOUND, "k"))
    assert (record["key"], record["data_planes"], record["mpi"]) == ("k", "gloo,mpi", "4.1.4")


def test_an_unfinished_entry_is_never_seen(machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache.shutil, "copy", full_disk)
    with pytest.raises(OSError, match="No space left on device"):
        build(BuildOptions())
    assert [p.name for p in (machine.cache / "wheels").iterdir() if p.is_dir()] == []


WITH_NCCL = replace(
    FOUND,
    frameworks=(Framework("torch", "2.13.0+cu130", "13.0"),),
    cuda=Cuda("13.0", Path("/cuda")),
    nccl=Nccl("2.28.3", Path("/include"), Path("/lib"), from_pip=True),
    gpus=("9.0",) * 4,  # of all, whatever this process sees
)


@pytest.fixture
def gpu_host(
    machine: SimpleNamespace, nvidia_smi: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> SimpleNamespace:
    """A host with four GPUs, whose proofs are kept in `machine.kept`; `machine.failures` says what differs."""
    machine.kept, machine.failures = [], ()
    nvidia_smi(4, "580.65.06\n")
    monkeypatch.setattr(steps, "find_all", lambda **_: WITH_NCCL)
    monkeypatch.setattr(gpu_proof, "prove", lambda *, ranks: Proof("cuda", ranks, machine.failures, 60.0))
    monkeypatch.setattr(gpu_record, "keep", machine.kept.append)
    return machine


@pytest.mark.parametrize(("visible", "ranks"), [(None, 4), ("0,2,3", 3)])
def test_as_many_ranks_as_gpus_are_visible_prove_training(
    gpu_host: SimpleNamespace, visible: str | None, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    build(BuildOptions())
    assert gpu_host.kept == [Proof("cuda", ranks, (), 60.0)]
    assert ("torch", "nccl", 2) in gpu_host.proved


def test_at_most_eight_ranks_prove_training(gpu_host: SimpleNamespace, nvidia_smi: Callable[..., None]) -> None:
    nvidia_smi(16)
    build(BuildOptions())
    assert [each.ranks for each in gpu_host.kept] == [8]


def test_one_visible_gpu_has_one_rank_and_proves_no_training(
    gpu_host: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    build(BuildOptions())
    assert ("torch", "nccl", 1) in gpu_host.proved
    assert gpu_host.kept == []
    assert "training on GPUs: not proven, one GPU is visible" in capsys.readouterr().out


def test_where_only_the_host_that_runs_ahead_fails_the_build_stays_and_what_differed_is_said(
    gpu_host: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu_host.failures = ("asynchronous, fp16: 0.bias of rank 1 differs",)
    build(BuildOptions())
    shown = capsys.readouterr().out
    assert "asynchronous, fp16: 0.bias of rank 1 differs" in shown
    assert "So the host waits for its GPUs" in shown
    assert [each.failures for each in gpu_host.kept] == [gpu_host.failures]


def test_ranks_that_train_wrong_while_the_host_waits_are_an_error(gpu_host: SimpleNamespace) -> None:
    gpu_host.failures = ("blocking, plain: 0.bias of rank 1 differs", "asynchronous, plain: too")
    with pytest.raises(BuildError, match=r"training on this host's GPUs is wrong:\nblocking, plain: 0\.bias.*\n`hvd"):
        build(BuildOptions())
    assert len(gpu_host.kept) == 1


def test_a_build_without_nccl_proves_nothing_on_gpus(
    gpu_host: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "find_all", lambda **_: FOUND)
    build(BuildOptions())
    assert gpu_host.kept == []
