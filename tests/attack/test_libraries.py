"""Libraries load from where they were installed: nobody else gets code into a wheel, its cache or its libraries."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.horovod_build import cache, installed, library_paths, owners, packages
from hvdtrain.horovod_build.errors import BuildError

LIBRARY = "horovod/torch/mpi_lib_v2.so"

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


def wheel_of(folder: Path, *flags: str) -> Path:
    """A wheel with one library in it, linked with `flags`."""
    library = folder / "library.so"
    command = ["cc", "-shared", "-x", "c", "-", "-o", library, *flags]
    subprocess.run(command, input="int here(void) { return 1; }", text=True, check=True)
    wheel = folder / "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("horovod/__init__.py", "")
        archive.write(library, LIBRARY)
    return wheel


@pytest.fixture
def gone() -> Iterator[Path]:
    """A folder of a build's in /tmp, which has been removed."""
    with tempfile.TemporaryDirectory(prefix="hvdtrain-build-", dir="/tmp") as folder:
        pass
    yield Path(folder)
    shutil.rmtree(folder, ignore_errors=True)


def test_a_wheel_that_looks_for_libraries_where_another_user_can_put_them_is_neither_kept_nor_installed(
    stranger: Any, gone: Path, tmp_path: Path
) -> None:
    wheel = wheel_of(tmp_path, f"-Wl,-rpath,{gone}")
    stranger.run("import pathlib, sys; p = pathlib.Path(sys.argv[1]); p.mkdir(); (p / 'libmpi.so.40').touch()", gone)
    assert (gone / "libmpi.so.40").exists(), "the attack works"
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with pytest.raises(BuildError) as caught:
        cache.store(wheels, "key", wheel, parts={}, seconds=1)
    for said in (str(gone), LIBRARY, wheel.name, "LDFLAGS"):
        assert said in str(caught.value)
    assert list(wheels.iterdir()) == []


def test_a_wheel_in_the_cache_is_looked_into_again(gone: Path, tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    entry = cache.store(wheels, "key", wheel_of(tmp_path), parts={}, seconds=1)
    assert cache.load(wheels, "key") is not None
    # As an older hvdtrain would have left it: whole, by its record.
    shutil.copy(wheel_of(tmp_path, f"-Wl,-rpath,{gone}"), entry.wheel)
    record = entry.wheel.with_name("build.json")
    record.write_text(json.dumps(json.loads(record.read_text()) | {"sha256": packages.sha256_of(entry.wheel)}))
    assert cache.load(wheels, "key") is None


@pytest.mark.parametrize(
    ("entry", "refused"),
    [
        ("$ORIGIN", ""),
        ("${ORIGIN}/../../nvidia/nccl/lib", ""),
        ("$ORIGIN/../../../..", ""),
        ("/usr/lib:$ORIGIN/../../../../../lib", ""),
        ("/no/such/folder/of/the/system", ""),
        ("$ORIGIN/../../../../../..", "outside its environment"),
        ("$ORIGIN/../../nvidia/$LIB", "outside its environment"),
        ("$ORIGINAL", "another folder for each program"),
        ("lib", "another folder for each program"),
        ("/usr/lib:", "another folder for each program"),
        ("/usr/lib/$PLATFORM", "another folder for each program"),
        (f"{sys.prefix}/lib", "the environment in which it was built"),
        ("/tmp", "not the system's alone"),
        ("/dev/shm/x", "not the system's alone"),
        ("/usr/../tmp/x", "not the system's alone"),
    ],
)
@pytest.mark.parametrize("tag", ["--enable-new-dtags", "--disable-new-dtags"])
def test_a_wheel_names_its_own_environment_and_the_systems_folders_alone(
    entry: str, refused: str, tag: str, tmp_path: Path
) -> None:
    wheel = wheel_of(tmp_path, f"-Wl,-rpath,{entry}", f"-Wl,{tag}")
    expected = pytest.raises(BuildError, match=refused) if refused else contextlib.nullcontext()
    with expected:
        library_paths.check(wheel)


def test_a_path_of_a_builders_library_is_refused_as_well(tmp_path: Path) -> None:
    other = tmp_path / "libother.so"
    subprocess.run(["cc", "-shared", "-x", "c", "/dev/null", "-o", other], check=True)
    with pytest.raises(BuildError, match="a path where a name should stand"):
        library_paths.check(wheel_of(tmp_path, "-x", "none", "-Wl,--no-as-needed", str(other)))
    with pytest.raises(BuildError, match="loaded into every program"):
        library_paths.check(wheel_of(tmp_path, "-Wl,--audit,/tmp/audit.so"))


def test_what_is_read_of_a_library_is_what_readelf_reads() -> None:
    folder = installed.package_folder("horovod")
    libraries = sorted(folder.rglob("*.so")) if folder else []
    if not libraries or shutil.which("readelf") is None:
        pytest.skip("no Horovod, or no readelf")
    for library in libraries:
        text = subprocess.run(["readelf", "-d", "-W", library], capture_output=True, text=True, check=True).stdout
        expected = [
            (line.split("(")[1].split(")")[0], line.rpartition("[")[2].rstrip("]"))
            for line in text.splitlines()
            if any(f"({tag})" in line for tag in ("NEEDED", "RUNPATH", "RPATH"))
        ]
        assert library_paths.dynamic(library.read_bytes()) == expected
        for number in (64, 200):
            with pytest.raises(ValueError, match="ELF"):
                library_paths.dynamic(library.read_bytes()[:number])


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with a cache in it."""
    monkeypatch.delenv("HVDTRAIN_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with owners.alone():
        (tmp_path / ".cache" / "hvdtrain" / "wheels" / "key").mkdir(parents=True)
        (tmp_path / ".cache" / "hvdtrain" / "wheels" / "key" / "horovod.whl").touch()
    return tmp_path


@pytest.mark.parametrize(
    "place", ["", ".cache", ".cache/hvdtrain", ".cache/hvdtrain/wheels", ".cache/hvdtrain/wheels/key/horovod.whl"]
)
def test_a_cache_that_others_can_write_to_is_refused(home: Path, place: str) -> None:
    folder = home / ".cache" / "hvdtrain"
    assert cache.cache_folder() == (folder, "")
    (home / place).chmod(0o777)
    mend = f"chmod -R go-w {folder}" if "wheels" in place else f"chmod go-w {home / place}"
    with pytest.raises(BuildError, match=f"every user can write to {home / place}") as caught:
        cache.cache_folder()
    assert str(caught.value).endswith(mend)
    subprocess.run(mend, shell=True, check=True)
    assert cache.cache_folder() == (folder, "")


def test_a_cache_that_another_user_made_first_is_refused(
    stranger: Any, monkeypatch: pytest.MonkeyPatch, gone: Path
) -> None:
    monkeypatch.setenv("HVDTRAIN_CACHE", str(gone))  # in /tmp, where anybody can be first
    stranger.run("import os, sys; os.makedirs(sys.argv[1] + '/wheels', 0o755)", gone)
    with pytest.raises(BuildError, match=f"{gone} belongs to user .*: set HVDTRAIN_CACHE to a folder of your own"):
        cache.cache_folder()
    shutil.rmtree(gone)
    with owners.alone():
        gone.mkdir()
    assert cache.cache_folder() == (gone, ""), "in /tmp nobody can replace what is another's"


def test_what_is_built_under_an_open_umask_is_this_users_alone(tmp_path: Path) -> None:
    before = owners.os.umask(0)
    try:
        with owners.alone():
            (tmp_path / "made").touch()
        (tmp_path / "open").touch()
    finally:
        owners.os.umask(before)
    assert owners.who_can_change(tmp_path / "made") == ""
    assert owners.who_can_change(tmp_path / "open") == f"every user can write to {tmp_path / 'open'}"


def test_a_group_of_this_user_alone_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o775)
    monkeypatch.setattr(owners, "_shared_group", lambda number: "")
    assert owners.who_can_change(tmp_path) == ""
    monkeypatch.setattr(owners, "_shared_group", lambda number: "users")
    assert "group users can write to" in owners.who_can_change(tmp_path)
