from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.horovod_build import build, installed
from hvdtrain.horovod_build.find import Found


@pytest.mark.parametrize(
    ("built", "there", "fits"),
    [
        ("2.13.0+cpu", "2.13.0+cpu", True),
        ("2.13.0+cu130", "2.13.0", True),
        ("2.13.0", "2.13.0", True),
        ("2.12.0+cu130", "2.13.0", False),
        ("2.13.0+cpu", "2.13.0+cu130", False),
        ("2.13.0", "2.13.0+cpu", False),
    ],
)
def test_horovod_serves_only_the_version_that_it_was_built_for(
    monkeypatch: pytest.MonkeyPatch, built: str, there: str, *, fits: bool
) -> None:
    monkeypatch.setattr(installed, "built_for", lambda: {"torch": built})
    monkeypatch.setattr(installed, "framework_version", lambda framework: there)
    sentence = installed.mismatch("torch")
    assert (sentence is None) is fits
    if sentence:
        assert there in sentence


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file in which an installed Horovod says what it is."""
    monkeypatch.setattr(installed, "package_folder", {"horovod": tmp_path}.get)
    return tmp_path / "metadata.json"


def test_what_hvdtrain_build_says_of_horovod_is_read_from_horovods_metadata(said: Path) -> None:
    assert installed.record() == installed.built_for() == {}
    said.write_text('{\n"pytorch": "2.13.0",\n"dummy": "none",\n}')  # Horovod may write the last comma
    assert (installed.record(), installed.built_for()) == ({}, {"torch": "2.13.0"})
    said.write_text('{\n"pytorch": "2.13.0",\n"hvdtrain": {"key": "k"}\n}')
    assert installed.record() == {"key": "k"}


def test_what_was_proven_here_stands_in_the_metadata(said: Path) -> None:
    installed.mark_as_proven()
    assert not said.exists(), "no Horovod of ours"
    said.write_text('{\n"pytorch": "2.13.0",\n"hvdtrain": {"key": "k"}\n}')
    installed.mark_as_proven()
    assert installed.record() == {"key": "k", "proven": True}
    assert installed.built_for() == {"torch": "2.13.0"}
    assert [path.name for path in said.parent.iterdir()] == ["metadata.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"hvdtrain": 1}'])
def test_damaged_metadata_says_nothing(said: Path, text: str) -> None:
    said.write_text(text)
    assert installed.record() == installed.built_for() == {}
    assert not installed.has_other_changes()


def test_a_horovod_that_another_hvdtrain_built_has_other_changes(said: Path) -> None:
    said.write_text('{"pytorch": "2.13.0"}')
    assert not installed.has_other_changes(), "nobody knows what its builder changed"
    said.write_text('{"hvdtrain": {"key": "k"}}')
    assert installed.has_other_changes()
    said.write_text('{"hvdtrain": {"edits": "others"}}')
    assert installed.has_other_changes()
    said.write_text(f'{{"hvdtrain": {build.record(Found((), "c++", None, None, None, (), ()), "k")}}}')
    assert not installed.has_other_changes()


@pytest.mark.parametrize(
    ("there", "command"),
    [
        ({"torch": "2.13.0"}, "hvdtrain build"),
        ({"tensorflow": "2.21.0"}, "hvdtrain build"),
        ({}, f"{installed.command_for_tested('torch')} && hvdtrain build"),
    ],
)
def test_with_jax_alone_a_framework_is_installed_before_horovod_is_built(
    monkeypatch: pytest.MonkeyPatch, there: dict[str, str], command: str
) -> None:
    monkeypatch.setattr(installed, "framework_version", there.get)
    assert installed.how_to_build() == command
