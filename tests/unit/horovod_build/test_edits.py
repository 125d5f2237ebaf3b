from __future__ import annotations

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from hvdtrain.horovod_build import edits
from hvdtrain.horovod_build.errors import EditMismatchError


def fake_source(root: Path) -> Path:
    """Lay out a tree that holds exactly what the edits look for."""
    for edit in edits.EDITS:
        path = root / edit.path
        path.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text() if path.exists() else ""
        path.write_text(text + f"\n<before>\n{edit.old * edit.count}\n<after>\n")
    return root


def test_every_edit_is_applied_and_nothing_else_is_touched(tmp_path: Path) -> None:
    source = fake_source(tmp_path)
    edits.apply(source)
    for edit in edits.EDITS:
        text = (source / edit.path).read_text()
        assert edit.new in text
        if edit.old not in edit.new:
            assert edit.old not in text
        assert text.count("<before>") == text.count("<after>") == sum(e.path == edit.path for e in edits.EDITS)


def test_an_edit_that_no_longer_matches_names_file_and_text(tmp_path: Path) -> None:
    source = fake_source(tmp_path)
    path = source / "CMakeLists.txt"
    path.write_text(path.read_text().replace("set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 20)"))
    with pytest.raises(EditMismatchError, match=r"CMakeLists.txt.*CMAKE_CXX_STANDARD 14.*0 times") as info:
        edits.apply(source)
    assert "the frameworks' headers ask for C++17 or 20" in str(info.value)


def test_an_edit_that_matches_more_often_than_expected_is_refused(tmp_path: Path) -> None:
    source = fake_source(tmp_path)
    path = source / "CMakeLists.txt"
    path.write_text(path.read_text() + "set(CMAKE_CXX_STANDARD 14)\n")
    with pytest.raises(EditMismatchError, match="2 times, expected 1"):
        edits.apply(source)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    source = fake_source(tmp_path)
    (source / "setup.py").unlink()
    with pytest.raises(EditMismatchError, match=r"setup\.py is missing"):
        edits.apply(source)


def test_other_edits_have_another_fingerprint() -> None:
    changed = (replace(edits.EDITS[0], new="set(CMAKE_CXX_STANDARD 20)"), *edits.EDITS[1:])
    assert edits.fingerprint() == edits.fingerprint(edits.EDITS)
    assert edits.fingerprint(changed) != edits.fingerprint()


def test_every_edit_says_why() -> None:
    assert all(len(edit.why) > 15 for edit in edits.EDITS)


def test_files_of_ours_are_added_where_horovod_has_none(tmp_path: Path) -> None:
    edits.add(tmp_path)
    proof = "horovod/runner/common/util/proof.py"
    assert (tmp_path / proof).read_text() == (edits.ADDED / proof).read_text()
    taken = tmp_path / "taken" / proof
    taken.parent.mkdir(parents=True)
    taken.touch()
    with pytest.raises(EditMismatchError, match=proof):
        edits.add(tmp_path / "taken")


def test_another_file_of_ours_is_another_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = edits.fingerprint()
    shutil.copytree(edits.ADDED, tmp_path / "added")
    with (tmp_path / "added" / "horovod/runner/common/util/proof.py").open("a") as file:
        file.write("# more\n")
    monkeypatch.setattr(edits, "ADDED", tmp_path / "added")
    assert edits.fingerprint() != before


def test_files_of_ours_take_the_place_of_those_that_they_were_made_from_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in edits._REPLACED_SHA256:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("theirs\n")
    with pytest.raises(EditMismatchError, match="not the file that ours takes the place of"):
        edits.replace(tmp_path)
    theirs = hashlib.sha256(b"theirs\n").hexdigest()
    monkeypatch.setattr(edits, "_REPLACED_SHA256", dict.fromkeys(edits._REPLACED_SHA256, theirs))
    edits.replace(tmp_path)
    for path in edits._REPLACED_SHA256:
        assert (tmp_path / path).read_text() == (edits.REPLACED / path).read_text()


def test_a_replaced_file_has_no_edits() -> None:
    assert not {edit.path for edit in edits.EDITS} & set(edits._REPLACED_SHA256)
