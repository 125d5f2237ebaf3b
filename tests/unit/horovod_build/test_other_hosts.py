from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from hvdtrain.horovod_build import build, installed, other_hosts
from hvdtrain.horovod_build.find import Cuda, Found, Framework, Mpi, Nccl

FOUND = Found((Framework("torch", "2.13.0+cpu"),), "g++ 12", Mpi("4.1.4", Path("/usr/bin/mpirun")), None, None, ())


@pytest.fixture
def horovod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an installed Horovod."""
    (folder := tmp_path / "horovod").mkdir()
    monkeypatch.setattr(installed, "package_folder", {"horovod": folder}.get)
    return folder


def test_the_newest_version_of_a_symbol_is_what_libraries_need() -> None:
    libraries = [
        b"\0GLIBC_2.9\0GLIBC_2.34\0GLIBC_PRIVATE\0",
        b"GLIBC_2.4\0GLIBCXX_3.4.9\0GLIBCXX_3.4.30\0GLIBCXX_3.4\0",
    ]
    assert other_hosts.needed_versions(libraries) == {"GLIBC": (2, 34), "GLIBCXX": (3, 4, 30)}
    assert other_hosts.needed_versions([b"no ELF"]) == {}


def test_requirements_name_whatever_must_match(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_hosts, "cpu_extensions", lambda: ("avx", "fma"))
    with zipfile.ZipFile(wheel := tmp_path / "horovod.whl", "w") as archive:
        archive.writestr("horovod/torch/mpi_lib_v2.so", b"\0GLIBC_2.34\0GLIBCXX_3.4.30\0")
        archive.writestr("horovod/README", b"GLIBC_9.9")
    gpu = Found(
        (Framework("torch", "2.13.0+cu130", "13.0"),), "g++ 12", Mpi("5.0.7", Path("/usr/bin/mpirun")),
        Cuda("13.0", Path("/cuda")), Nccl("2.28.3", Path("/include"), Path("/lib"), from_pip=True), (),
    )  # fmt: skip
    said = "\n".join(other_hosts.requirements(wheel, gpu, architectures="80,90"))
    for part in ("Python 3.", "torch 2.13.0+cu130, exactly", "glibc 2.34 or newer", "GLIBCXX_3.4.30", "avx, fma",
                 "Open MPI 5", "GPUs of 80,90", "NCCL 2"):  # fmt: skip
        assert part in said
    assert "GPU" not in "".join(other_hosts.requirements(wheel, FOUND))


def test_a_wheel_says_for_which_cpu_it_was_built_and_a_host_without_it_is_named(
    horovod: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(other_hosts, "cpu_extensions", lambda: ("f16c", "avx", "fma"))
    (horovod / "metadata.json").write_text(f'{{"hvdtrain": {build.record(FOUND, "k")}}}')
    assert other_hosts.lacks() == ""
    monkeypatch.setattr(other_hosts, "cpu_extensions", lambda: ("avx",))
    assert "built for CPUs with f16c, fma, which" in other_hosts.lacks()


@pytest.mark.parametrize(
    "text", ["", '{"pytorch": "2.13.0"}', '{"hvdtrain": {"key": "k"}}', '{"hvdtrain": {"cpu": ""}}']
)
def test_a_horovod_that_records_no_cpu_lacks_nothing(horovod: Path, text: str) -> None:
    (horovod / "metadata.json").write_text(text)
    assert other_hosts.lacks() == ""


def test_a_host_with_an_older_glibc_is_named(horovod: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_hosts.platform, "libc_ver", lambda: ("glibc", "2.31"))
    assert other_hosts.lacks_libc() == ""
    (horovod / "torch").mkdir()
    library = horovod / "torch" / "mpi_lib_v2.so"
    library.write_bytes(b"\0GLIBC_2.9\0")
    assert other_hosts.lacks_libc() == ""
    library.write_bytes(b"\0GLIBC_2.34\0")
    assert other_hosts.lacks_libc() == "The installed Horovod needs glibc 2.34, and this host has 2.31."


def test_a_folder_that_others_can_change_is_named_in_the_closing_lines(tmp_path: Path) -> None:
    lines = other_hosts.closing_lines(tmp_path / "horovod.whl", ["a CPU"], is_proven=True)
    assert "Take care" not in "\n".join(lines)
    tmp_path.chmod(0o777)
    lines = other_hosts.closing_lines(tmp_path / "horovod.whl", ["a CPU"], is_proven=False)
    assert lines[-1] == f"Take care: every user can write to {tmp_path}, and every host runs what is in this wheel"
    assert "not proven" in lines[0]


def test_the_record_of_the_cpu_survives_json() -> None:
    assert json.loads(build.record(FOUND, "k"))["cpu"].split() == list(other_hosts.cpu_extensions())
