from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.horovod_build.shared import start_checks
from hvdtrain.launch import job_folder
from hvdtrain.system import process_tree


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A /dev/shm of this test's own."""
    folder = tmp_path / "shm"
    folder.mkdir(mode=0o1777)
    monkeypatch.setattr(start_checks, "SHARED_MEMORY", str(folder))
    monkeypatch.setattr(start_checks, "free_bytes", lambda: 2**30)
    return folder


def left_behind(shared: Path, name: str, *, age_s: float = 7200.0) -> Path:
    folder = shared / f"hvdtrain-run-{name}"
    folder.mkdir(mode=0o700)
    (folder / "progress-0.json").touch()
    os.utime(folder, (time.time() - age_s,) * 2)
    return folder


def test_it_is_in_shared_memory_and_this_users_alone(shared: Path) -> None:
    path, said = job_folder.make(2)
    assert path.parent == shared
    assert path.stat().st_mode & 0o777 == 0o700
    assert said == ""
    job_folder.remove(path)
    assert list(shared.iterdir()) == []


def test_where_shared_memory_has_too_little_room_it_is_elsewhere_and_a_line_says_so(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_checks, "free_bytes", lambda: 2**22)
    monkeypatch.setattr(job_folder.tempfile, "tempdir", str(tmp_path))
    path, said = job_folder.make(4)
    assert path.parent == tmp_path
    for part in (f"4 MiB of {shared} are free, and 4 ranks may take 17 MiB", str(path), "docker run --shm-size=1g"):
        assert part in said
    over_gloo, said = job_folder.make(0)
    assert (over_gloo.parent, said) == (shared, "")
    monkeypatch.setattr(job_folder.tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(UsageError, match=f"no folder for the job can be made in {tmp_path}/none.*set TMPDIR"):
        job_folder.make(4)
    for each in (path, over_gloo):
        job_folder.remove(each)


def test_what_killed_jobs_have_left_is_removed_at_the_next_start(shared: Path) -> None:
    old = left_behind(shared, "old")
    path, _ = job_folder.make(2)
    assert not old.exists()
    job_folder.remove(path)


def test_what_may_be_in_use_or_is_anothers_is_left_alone(shared: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "mine"
    elsewhere.mkdir()
    (elsewhere / "precious").touch()
    (shared / "hvdtrain-run-link").symlink_to(elsewhere)
    young, other, held = (left_behind(shared, name) for name in ("young", "other", "held"))
    os.utime(young)
    (shared / "another").mkdir()
    used = left_behind(shared, "used")
    environment = {**os.environ, process_tree.RUN_DIR: str(used)}
    with subprocess.Popen(["sleep", "60"], env=environment) as rank:
        lock = os.open(held, os.O_RDONLY)
        job_folder.fcntl.flock(lock, job_folder.fcntl.LOCK_SH)
        if os.geteuid() == 0:
            os.chown(other, 60_417, 60_417)
        path, _ = job_folder.make(2)
        rank.kill()
    os.close(lock)
    assert (elsewhere / "precious").exists()
    assert young.exists()
    assert held.exists()
    assert used.exists()
    assert other.exists() == (os.geteuid() == 0)
    assert (shared / "another").exists()
    job_folder.remove(path)


def test_an_error_leaves_no_folder(shared: Path) -> None:
    def check() -> None:
        with job_folder.removed_at_the_end():
            job_folder.make(2)
            raise UsageError("a check failed")

    with pytest.raises(UsageError):
        check()
    assert list(shared.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_before_the_job_starts_leaves_no_folder(number: int, tmp_path: Path) -> None:
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # nohup make test ignores it
        "from hvdtrain.launch import job_folder\n"
        "from hvdtrain.horovod_build.shared import start_checks\n"
        "start_checks.SHARED_MEMORY = sys.argv[1]\n"
        "with job_folder.removed_at_the_end():\n"
        "    print(job_folder.make(0)[0], flush=True)\n"
        "    for _ in range(600):\n"  # a signal that comes just before one long sleep would wait for its end
        "        time.sleep(0.1)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        path = Path(process.stdout.readline().strip())
        assert path.parent == tmp_path
        process.send_signal(number)
        status = process.wait(20)
    assert not path.exists()
    assert status in (128 + number, -number)
