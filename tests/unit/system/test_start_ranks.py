"""The environment that ranks get from the process that starts them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import hvdtrain
from hvdtrain.system.start_ranks import rank_environment

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
