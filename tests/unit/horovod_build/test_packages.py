"""A file or folder that one process makes and others may make at the same time."""

from __future__ import annotations

import pytest

from hvdtrain.horovod_build.packages import filled


def test_a_folder_that_another_process_made_first_is_kept(tmp_path):
    with filled(tmp_path / "made") as target:
        target.mkdir()
        (target / "mine").touch()
        (tmp_path / "made").mkdir()
        (tmp_path / "made" / "theirs").touch()
    assert [each.name for each in (tmp_path / "made").iterdir()] == ["theirs"]


def test_a_file_does_not_pass_for_a_folder_of_its_name(tmp_path):
    (tmp_path / "made").mkdir()
    with pytest.raises(IsADirectoryError), filled(tmp_path / "made") as target:
        target.touch()
