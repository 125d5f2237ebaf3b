"""What ranks get of the environment that they are started from, and how all that was started ends."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

import hvdtrain
from hvdtrain.system import process_tree
from hvdtrain.system.start_ranks import end_family, rank_environment

HOME = str(Path(hvdtrain.__file__).resolve().parents[1])


@pytest.mark.parametrize(
    "mark", ["HOROVOD_RANK", "HOROVOD_CROSS_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEPID"]
)
def test_another_launchs_marks_are_left_out_and_the_users_settings_kept(
    monkeypatch: pytest.MonkeyPatch, mark: str
) -> None:
    for name in (mark, "HOROVOD_CYCLE_TIME", "OMPI_MCA_btl", "SLURM_JOB_ID"):
        monkeypatch.setenv(name, "7")
    found = rank_environment({})
    assert mark not in found
    assert (found["HOROVOD_CYCLE_TIME"], found["OMPI_MCA_btl"], found["SLURM_JOB_ID"]) == ("7", "7", "7")
    assert "HOROVOD_CYCLE_TIME" not in rank_environment({}, without=("HOROVOD_",))


def test_ranks_import_this_hvdtrain_before_what_the_user_has_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/mine")
    assert rank_environment({})["PYTHONPATH"] == os.pathsep.join([HOME, "/mine"])
    monkeypatch.delenv("PYTHONPATH")
    assert rank_environment({})["PYTHONPATH"] == HOME


def test_what_is_chosen_wins_over_the_user_and_the_user_over_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "OMPI_MCA_rmaps_base_oversubscribe"
    monkeypatch.delenv(name, raising=False)
    assert rank_environment({})[name] == "1"
    monkeypatch.setenv(name, "0")
    assert rank_environment({})[name] == "0"
    assert rank_environment({name: "2"})[name] == "2"


def test_what_a_launcher_starts_while_it_is_ended_is_ended_too(tmp_path: Path) -> None:
    loop = "while :; do sleep 60 & sleep 0.002; done"
    environment = {**os.environ, process_tree.RUN_DIR: str(tmp_path)}
    process = subprocess.Popen(["/bin/sh", "-c", loop], env=environment, start_new_session=True)
    try:
        until = time.monotonic() + 30
        while len(process_tree.members(str(tmp_path))) < 5:
            assert time.monotonic() < until
        end_family(process)
        while process_tree.members(str(tmp_path)) and time.monotonic() < until:  # the killed ones take a moment
            time.sleep(0.1)
        assert process_tree.members(str(tmp_path)) == {}
    finally:
        process_tree.end(str(tmp_path))
