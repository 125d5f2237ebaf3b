"""horovodrun's cache of facts about its hosts, for an hour."""

from __future__ import annotations

import json
import os
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
from horovod.runner.util import cache


def made(folder: Path, *, job: str = "job", minutes: float = 60) -> cache.Cache:
    return cache.Cache(str(folder / ".horovod"), minutes, job)


def test_results_are_there_for_the_next_start(tmp_path: Path) -> None:
    calls = []

    @cache.use_cache()
    def interfaces(hosts: list[str], **options: Any) -> set[str]:
        calls.append(hosts)
        return {"eth0", "eth1"}

    for _ in range(2):
        assert interfaces(["a", "b"], fn_cache=made(tmp_path)) == {"eth0", "eth1"}
    assert interfaces(["a", "c"], fn_cache=made(tmp_path)) == {"eth0", "eth1"}
    assert interfaces(["a", "b"], fn_cache=None) == {"eth0", "eth1"}
    assert calls == [["a", "b"], ["a", "c"], ["a", "b"]]


def test_results_of_another_job_and_old_ones_do_not_count(tmp_path: Path) -> None:
    made(tmp_path).put("key", True)
    assert made(tmp_path).get("key") is True
    assert made(tmp_path, job="other").get("key") is None
    time.sleep(0.01)
    assert made(tmp_path, minutes=0).get("key") is None


def test_files_are_this_users_alone(tmp_path: Path) -> None:
    made(tmp_path).put("key", True)
    folder = tmp_path / ".horovod"
    assert [path.name for path in folder.iterdir()] == ["hosts.json"]
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "hosts.json").stat().st_mode & 0o777 == 0o600


def test_no_pickle_is_read(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "exploded"),)

    (tmp_path / ".horovod").mkdir()
    for name in ("cache.bin", "hosts.json"):
        (tmp_path / ".horovod" / name).write_bytes(pickle.dumps(Bomb()))
    assert made(tmp_path).get("key") is None
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"parameters_hash": "job", "results": [1]}', "[" * 100_000])
def test_a_damaged_file_is_as_good_as_none(text: str, tmp_path: Path) -> None:
    (tmp_path / ".horovod").mkdir()
    (tmp_path / ".horovod" / "hosts.json").write_text(text)
    there = made(tmp_path)
    assert there.get("key") is None
    there.put("key", True)
    assert made(tmp_path).get("key") is True


def test_a_file_that_others_may_write_is_not_believed(tmp_path: Path) -> None:
    made(tmp_path).put("key", True)
    (tmp_path / ".horovod" / "hosts.json").chmod(0o666)
    assert made(tmp_path).get("key") is None


def test_a_home_where_nothing_can_be_made_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for home in (tmp_path / "file", tmp_path / "missing", Path("/proc")):
        there = made(home)
        there.put("key", {"eth0"})
        assert there.get("key") == {"eth0"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_home_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    os.chown(tmp_path, 60_417, 60_417)
    there = made(tmp_path)
    there.put("key", True)
    assert there.get("key") is True
    assert list(tmp_path.iterdir()) == []


def test_what_is_kept_is_json(tmp_path: Path) -> None:
    made(tmp_path).put("key", {"eth1", "eth0"})
    kept = json.loads((tmp_path / ".horovod" / "hosts.json").read_text())
    assert kept["results"]["'key'"][1] == {"set": ["eth0", "eth1"]}
