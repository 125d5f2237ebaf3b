from __future__ import annotations

import os
import re
import tempfile
import threading
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.horovod_build import cache, changes, native
from hvdtrain.horovod_build.errors import BuildError
from hvdtrain.horovod_build.find import Cuda, Found, Framework, Mpi, Nccl

FOUND = Found(
    frameworks=(Framework("torch", "2.13.0+cu130", "13.0"), Framework("tensorflow", "2.21.0")),
    compiler="g++ 12.2.0",
    mpi=Mpi("4.1.4", Path("/usr/bin/mpirun")),
    cuda=Cuda("13.0", Path("/usr/local/cuda")),
    nccl=Nccl("2.28.3", Path("/n/include"), Path("/n/lib/libnccl.so.2"), True),
    gpus=("9.0",),
)


def key(found: Found = FOUND, **settings: str) -> str:
    return cache.key_of(cache.key_parts(found, {**native.settings(found), **settings}))


def test_the_same_build_has_the_same_key() -> None:
    assert key() == key()


@pytest.mark.parametrize(
    "other",
    [
        replace(FOUND, frameworks=(Framework("torch", "2.12.0+cu130", "13.0"), FOUND.frameworks[1])),
        replace(FOUND, frameworks=(FOUND.frameworks[0], Framework("tensorflow", "2.21.1"))),
        replace(FOUND, frameworks=FOUND.frameworks[:1]),
        replace(FOUND, compiler="g++ 13.1.0"),
        replace(FOUND, mpi=None),
        replace(FOUND, mpi=Mpi("4.1.6", Path("/usr/bin/mpirun"))),
        replace(FOUND, cuda=Cuda("13.1", Path("/usr/local/cuda"))),
        replace(FOUND, nccl=None),
        replace(FOUND, nccl=replace(FOUND.nccl, version="2.29.0")),
        replace(FOUND, gpus=("8.0",)),
    ],
)
def test_whatever_changes_the_wheel_changes_the_key(other: Found) -> None:
    assert key(other) != key()


def test_flags_python_and_patches_change_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {key(), key(CXXFLAGS="-g"), key(HOROVOD_BUILD_ARCH_FLAGS="-mavx2")}
    monkeypatch.setattr(cache.sysconfig, "get_config_var", lambda name: ".cpython-399-other.so")
    keys.add(key())
    monkeypatch.setattr(changes, "fingerprint", lambda: "other")
    keys.add(key())
    assert len(keys) == 5


def test_the_number_of_jobs_is_not_in_the_key() -> None:
    assert not any("MAKEFLAGS" in part for part in cache.key_parts(FOUND, native.settings(FOUND)))


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("horovod/__init__.py", "")
    return path


def test_a_stored_wheel_comes_back_with_what_it_was_built_from(tmp_path: Path, wheel: Path) -> None:
    folder = tmp_path / "wheels"
    folder.mkdir()
    assert cache.load(folder, "k") is None
    cache.store(folder, "k", wheel, parts={"horovod": "0.28.1"}, seconds=61.2)
    entry = cache.load(folder, "k")
    assert entry is not None
    assert (entry.wheel.read_bytes(), entry.seconds) == (wheel.read_bytes(), 61.2)
    assert sorted(p.name for p in folder.iterdir()) == ["k"]


@pytest.mark.parametrize("damage", ["wheel", "record", "no record"])
def test_a_damaged_entry_is_built_again_and_replaced(tmp_path: Path, wheel: Path, damage: str) -> None:
    folder = tmp_path / "wheels"
    folder.mkdir()
    entry = cache.store(folder, "k", wheel, parts={}, seconds=1)
    record = entry.wheel.parent / "build.json"
    if damage == "wheel":
        entry.wheel.write_bytes(b"cut")
    elif damage == "record":
        record.write_text("{")
    else:
        record.unlink()
    assert cache.load(folder, "k") is None
    cache.store(folder, "k", wheel, parts={}, seconds=1)
    assert cache.load(folder, "k") is not None


def test_an_entry_is_removed_only_once_another_has_its_place(
    tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "wheels"
    folder.mkdir()
    cache.store(folder, "k", wheel, parts={}, seconds=1)
    remove = tempfile.TemporaryDirectory.cleanup

    def remove_and_stop(folder: Any) -> None:
        remove(folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(tempfile.TemporaryDirectory, "cleanup", remove_and_stop)
    with pytest.raises(KeyboardInterrupt):
        cache.store(folder, "k", wheel, parts={}, seconds=2)
    entry = cache.load(folder, "k")
    assert entry is not None
    assert entry.seconds == 2


def test_a_second_build_of_the_same_wheel_waits_for_the_first(tmp_path: Path) -> None:
    order: list[str] = []
    inside = threading.Event()

    def second() -> None:
        inside.wait(10)
        with cache.locked(tmp_path, "k"):
            order.append("second")

    thread = threading.Thread(target=second)
    thread.start()
    with cache.locked(tmp_path, "k"):
        inside.set()
        thread.join(0.2)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]


def test_the_cache_is_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVDTRAIN_CACHE", str(tmp_path / "mine"))
    assert cache.cache_folder() == (tmp_path / "mine", "")
    monkeypatch.delenv("HVDTRAIN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.cache_folder() == (tmp_path / "xdg" / "hvdtrain", "")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.cache_folder() == (tmp_path / ".cache" / "hvdtrain", "")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> set[Path]:
    """Folders that cannot be written: root, who runs tests in containers, may write anywhere."""
    folders: set[Path] = set()
    access = os.access
    monkeypatch.setattr(cache.os, "access", lambda path, mode: Path(path) not in folders and access(path, mode))
    return folders


def test_where_the_home_cannot_be_written_the_cache_is_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: set[Path]
) -> None:
    home, environment = tmp_path / "home", tmp_path / "environment"
    home.mkdir()
    environment.mkdir()
    monkeypatch.delenv("HVDTRAIN_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(cache.sys, "prefix", str(environment))
    refused.add(home)
    folder, line = cache.cache_folder()
    assert folder == environment / ".cache" / "hvdtrain"
    assert line == f"{home}/.cache/hvdtrain cannot be written: the cache is in {folder}"

    refused.add(environment)
    with pytest.raises(BuildError, match="Set HVDTRAIN_CACHE to a folder that you can write to"):
        cache.cache_folder()


def test_a_folder_of_roots_below_a_cache_of_ones_own_is_seen_before_the_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: set[Path]
) -> None:
    monkeypatch.setenv("HVDTRAIN_CACHE", str(tmp_path))
    (tmp_path / "wheels").mkdir()
    refused.add(tmp_path / "wheels")
    with pytest.raises(BuildError, match=re.escape(f"cannot be written: {tmp_path}.")):
        cache.cache_folder()


def test_a_user_without_a_name_and_a_home_has_a_cache_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HVDTRAIN_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    monkeypatch.setattr(cache.sys, "prefix", str(tmp_path))
    folder, line = cache.cache_folder()
    assert folder == tmp_path / ".cache" / "hvdtrain"
    assert line.startswith("~/.cache/hvdtrain cannot be written")
