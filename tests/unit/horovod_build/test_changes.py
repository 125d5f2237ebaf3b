from __future__ import annotations

import hashlib
import re
import shutil
from pathlib import Path

import pytest

from hvdtrain.horovod_build import changes
from hvdtrain.horovod_build.changes import Patch
from hvdtrain.horovod_build.errors import BuildError
from hvdtrain.system import open_mpi

PATCHES = changes.read_patches()


def source_of(root: Path, patches: list[Patch]) -> Path:
    """Lay out a tree that the patches fit: what they look for at its lines, and lines that no patch knows."""
    files: dict[str, list[str | None]] = {}
    for hunk in (hunk for patch in reversed(patches) for hunk in reversed(patch.hunks)):
        lines = files.setdefault(hunk.path, [None] * 3000)
        there = lines[hunk.first : hunk.first + len(hunk.new)]
        assert all(line in (None, new) for line, new in zip(there, hunk.new, strict=True)), "no patch changes it later"
        lines[hunk.first : hunk.first + len(hunk.new)] = hunk.old
    for path, lines in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text("\n".join("untouched" if line is None else line for line in lines) + "\n")
    return root


def contents(root: Path) -> dict[str, str]:
    return {path.relative_to(root).as_posix(): path.read_text() for path in root.rglob("*") if path.is_file()}


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    """A copy of all that changes Horovod's source."""
    for name in ("patches", "added", "replaced"):
        shutil.copytree(changes.ROOT / name, tmp_path / "ours" / name)
    return tmp_path / "ours"


def test_every_patch_is_applied_and_no_other_line_is_touched(tmp_path: Path) -> None:
    source = source_of(tmp_path, PATCHES)
    before = contents(source)
    for patch in PATCHES:
        changes.apply(source, [patch])
        for hunk in patch.hunks:
            lines = (source / hunk.path).read_text().split("\n")
            assert tuple(lines[hunk.first : hunk.first + len(hunk.new)]) == hunk.new
    after = contents(source)
    assert before.keys() == after.keys()
    for path, text in after.items():
        assert text.count("untouched\n") == before[path].count("untouched\n")


@pytest.mark.parametrize("number", range(len(PATCHES)), ids=[patch.name for patch in PATCHES])
def test_one_other_line_around_a_patch_is_refused_by_its_name(tmp_path: Path, number: int) -> None:
    patch = PATCHES[number]
    source = source_of(tmp_path, [patch])
    hunk = patch.hunks[-1]
    # The last hunk's place in the file as it is before the patch.
    line = hunk.first - sum(len(each.new) - len(each.old) for each in patch.hunks[:-1] if each.path == hunk.path)
    path = source / hunk.path
    lines = path.read_text().split("\n")
    assert lines[line] == hunk.old[0] == hunk.new[0], "a line of context"
    lines[line] += " "
    path.write_text("\n".join(lines))
    with pytest.raises(BuildError) as info:
        changes.apply(source, [patch])
    for said in (f"Patch {patch.name} does not apply to {hunk.path}, hunk {hunk.header!r}", repr(hunk.old[0] + " ")):
        assert said in str(info.value)


def test_lines_that_moved_are_refused(tmp_path: Path) -> None:
    source = source_of(tmp_path, PATCHES)
    path = source / "setup.py"
    path.write_text("one more\n" + path.read_text())
    with pytest.raises(BuildError, match=r"06-build-settings does not apply to setup\.py"):
        changes.apply(source, PATCHES)


def test_a_missing_file_is_refused_by_its_name(tmp_path: Path) -> None:
    source = source_of(tmp_path, PATCHES)
    (source / "setup.py").unlink()
    with pytest.raises(BuildError, match=r"does not apply to setup\.py.*is None, expected"):
        changes.apply(source, PATCHES)


def test_a_patch_that_was_cut_short_is_refused(ours: Path) -> None:
    path = ours / "patches/01-cxx-standard.patch"
    path.write_text(path.read_text().rsplit("\n", 2)[0] + "\n")
    with pytest.raises(BuildError, match=r"01-cxx-standard\.patch.*cut short"):
        changes.read_patches(ours)


def test_a_patch_may_be_what_git_diff_prints(ours: Path) -> None:
    for path in (ours / "patches").iterdir():
        text = re.sub(
            r"^--- a/(.*)$", r"diff --git a/\1 b/\1\nindex 1..2 100644\n--- a/\1", path.read_text(), flags=re.M
        )
        path.write_text(text)
    assert changes.read_patches(ours) == PATCHES


def test_every_patch_has_a_number_of_its_own_and_a_reason() -> None:
    assert [int(patch.name.partition("-")[0]) for patch in PATCHES] == list(range(1, len(PATCHES) + 1))
    for patch in PATCHES:
        subject, empty, *why = patch.reason.splitlines()
        assert len(subject) <= 100
        assert empty == ""
        assert why


def test_commits_of_others_are_named() -> None:
    reasons = {patch.name: patch.reason for patch in PATCHES}
    assert "ff4ca09d" in reasons["02-gcc-13"]
    assert "20aad0c4" in reasons["03-gcc-14"]


def test_the_launcher_asks_open_mpi_what_hvdtrain_run_asks() -> None:
    (patch,) = (patch for patch in PATCHES if patch.name == "22-open-mpi-5")
    added = "\n".join(line for hunk in patch.hunks for line in hunk.new)
    for said in (f"execute({open_mpi.ASK_VERSIONS!r}, env)", f"re.search({open_mpi.MIXES_LINES!r}, said[0]"):
        assert said in added
    assert f"basic_args += ' {' '.join(open_mpi.MARK_PIECES)}'" in added


def test_what_is_changed_is_in_the_fingerprint_and_its_reason_is_not(ours: Path) -> None:
    before = changes.fingerprint()
    assert changes.fingerprint(ours) == before
    patch = ours / "patches/02-gcc-13.patch"
    text = patch.read_text()
    patch.write_text("In other words.\n" + text)
    assert changes.fingerprint(ours) == before
    seen = {before}
    patch.write_text(text.replace("+#include <stdexcept>", "+#include <exception>"))
    seen.add(changes.fingerprint(ours))
    for path in ("added/horovod/runner/common/util/proof.py", "replaced/horovod/runner/util/cache.py"):
        with (ours / path).open("a") as file:
            file.write("# more\n")
        seen.add(changes.fingerprint(ours))
    assert len(seen) == 4


def test_files_of_ours_are_put_where_horovod_has_none_or_the_one_that_they_replace(ours: Path, tmp_path: Path) -> None:
    shutil.rmtree(ours / "patches")
    replaced = ours / "replaced/originals.sha256"
    paths = [line.split()[1] for line in replaced.read_text().splitlines()]
    for target in (tmp_path / folder / path for folder in ("source", "other") for path in paths):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text("theirs\n")
    with pytest.raises(BuildError, match="not the file that ours takes the place of"):
        changes.change(tmp_path / "other", ours)
    theirs = hashlib.sha256(b"theirs\n").hexdigest()
    replaced.write_text("".join(f"{theirs}  {path}\n" for path in paths))
    changes.change(tmp_path / "source", ours)
    added = "horovod/runner/common/util/proof.py"
    for folder, path in [("added", added), *(("replaced", path) for path in paths)]:
        assert (tmp_path / "source" / path).read_text() == (ours / folder / path).read_text()
    with pytest.raises(BuildError, match="is where ours is to go"):
        changes.change(tmp_path / "source", ours)


def test_a_replaced_file_has_no_patch() -> None:
    replaced = (changes.ROOT / "replaced/originals.sha256").read_text().split()[1::2]
    assert len(replaced) == 4
    assert not {hunk.path for patch in PATCHES for hunk in patch.hunks} & set(replaced)
