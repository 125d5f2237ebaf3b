from __future__ import annotations

import hashlib
import re
import subprocess
import tarfile
from pathlib import Path

import pytest

from hvdtrain.horovod_build import packages
from hvdtrain.horovod_build.errors import BuildError


@pytest.fixture
def fake_sdist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small archive that passes for Horovod's, hash included."""
    root = tmp_path / f"horovod-{packages.VERSION}"
    root.mkdir()
    (root / "setup.py").write_text("print('hello')\n")
    path = tmp_path / packages.FILE_NAME
    with tarfile.open(path, "w:gz") as archive:
        archive.add(root, arcname=root.name)
    monkeypatch.setattr(packages, "SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    return path


def pip_that(monkeypatch: pytest.MonkeyPatch, *, code: int = 0, stderr: str = "", bring: Path | None = None) -> list:
    calls: list[list[str]] = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        calls.append([str(c) for c in command])
        if bring is not None and "download" in command:
            folder = Path(command[command.index("--dest") + 1])
            (folder / packages.FILE_NAME).write_bytes(bring.read_bytes())
        return subprocess.CompletedProcess(command, code, "", stderr)

    monkeypatch.setattr(packages.subprocess, "run", run)
    monkeypatch.setattr(packages, "pip_command", lambda cache: ["pip"])
    return calls


def test_another_file_is_refused_with_both_hashes(tmp_path: Path) -> None:
    path = tmp_path / "other.tar.gz"
    path.write_bytes(b"not Horovod")
    with pytest.raises(BuildError) as info:
        packages.check(path)
    assert hashlib.sha256(b"not Horovod").hexdigest() in str(info.value)
    assert packages.SHA256 in str(info.value)


def test_unpack_checks_the_hash_first(tmp_path: Path, fake_sdist: Path) -> None:
    assert (packages.unpack(fake_sdist, tmp_path / "out") / "setup.py").read_text() == "print('hello')\n"
    fake_sdist.write_bytes(b"changed")
    with pytest.raises(BuildError, match="sha256"):
        packages.unpack(fake_sdist, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_a_fetched_sdist_is_kept_and_not_fetched_again(
    tmp_path: Path, fake_sdist: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = pip_that(monkeypatch, bring=fake_sdist)
    first = packages.fetch(tmp_path / "cache", tools=tmp_path)
    assert "--require-hashes" in calls[0]
    assert packages.fetch(tmp_path / "cache", tools=tmp_path) == first
    assert len(calls) == 1


def test_a_download_with_another_hash_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip_that(monkeypatch, code=1, stderr="ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.")
    with pytest.raises(BuildError, match=r"sha256 is not that of Horovod 0\.28\.1's source"):
        packages.fetch(tmp_path, tools=tmp_path)


def test_an_impossible_download_says_so_and_offers_sdist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip_that(monkeypatch, code=1, stderr="ERROR: No matching distribution found for horovod==0.28.1")
    with pytest.raises(BuildError, match=r"No matching distribution.*--sdist"):
        packages.fetch(tmp_path, tools=tmp_path)
    assert list((tmp_path / "sdists").iterdir()) == []


def test_a_download_that_saves_nothing_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip_that(monkeypatch)
    with pytest.raises(BuildError, match=r"could not fetch Horovod 0\.28\.1's source: it saved no file.*--sdist"):
        packages.fetch(tmp_path, tools=tmp_path)


def test_build_tools_that_cannot_be_fetched_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip_that(monkeypatch, code=1, stderr="ERROR: no network")
    with pytest.raises(BuildError, match=r"setuptools==79.0.1 cmake==3.31.10 packaging==\S+: ERROR: no network"):
        packages.fetch_tools(tmp_path)


def test_build_tools_are_taken_by_hash_as_wheels_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = pip_that(monkeypatch, code=1, stderr="ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS.")
    with pytest.raises(BuildError, match="whose sha256 is not that of the build tools setuptools"):
        packages.fetch_tools(tmp_path)
    (command,) = calls
    assert "--require-hashes" in command
    assert command[command.index("--only-binary") + 1] == ":all:"
    assert not set(packages.BUILD_TOOLS) & set(command), "named on the command line, pip would take them without a hash"
    for tool, line in zip(packages.BUILD_TOOLS, packages.tool_requirements().splitlines(), strict=True):
        assert re.fullmatch(rf"{tool}( --hash=sha256:[0-9a-f]{{64}})+", line)


def test_tools_with_other_hashes_are_kept_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = packages.tools_folder(tmp_path)
    monkeypatch.setitem(packages._TOOL_HASHES, "packaging", ("0" * 64,))
    assert packages.tools_folder(tmp_path) != before
