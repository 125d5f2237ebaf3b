"""Facts that the ranks of a host share in files."""

from __future__ import annotations

import os
import subprocess
import threading
import time

from hvdtrain.distributed.watchdog import shared_facts
from hvdtrain.system import process_tree


def test_ranks_read_each_others_facts_and_one_alone_is_first(tmp_path):
    zero, one = shared_facts.SharedFacts(tmp_path, rank=0), shared_facts.SharedFacts(tmp_path, rank=1)
    zero.post("pid", 12)
    one.post("error", {"rank": 1, "text": "x"})
    assert one.all("pid") == {0: 12}
    assert zero.all("error") == {1: {"rank": 1, "text": "x"}}
    assert [one.claim("first"), zero.claim("first"), one.claim("first")] == [True, False, False]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["claimed-first", "error-1.json", "pid-0"]


def test_what_an_earlier_job_left_says_nothing(tmp_path):
    for name in ("error-1.json", "claimed-first"):
        (tmp_path / name).write_text("{}")
        os.utime(tmp_path / name, (1, 1))
    here = shared_facts.SharedFacts(tmp_path, rank=0)
    assert here.all("error") == {}
    assert here.claim("first")


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path):
    gone = shared_facts.SharedFacts(tmp_path / "gone", rank=0)
    gone.post("pid", 1)
    assert gone.all("pid") == {}
    assert gone.claim("first")


def test_the_file_of_a_counter_is_closed_with_it(tmp_path):
    facts = shared_facts.SharedFacts(tmp_path, rank=0)
    count = facts.counter("progress")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):  # as after each reset of an elastic job
        count = facts.counter("progress")
    count(7)
    assert len(os.listdir("/proc/self/fd")) == before
    assert facts.all("progress") == {0: {"step": 7}}


def test_a_folder_that_the_last_rank_removes_while_another_one_reads_it_says_nothing(tmp_path):
    read, ended = shared_facts.SharedFacts(tmp_path / "job", rank=0), threading.Event()

    def come_and_go():
        while not ended.is_set():
            (tmp_path / "job").mkdir()
            (tmp_path / "job").rmdir()

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        assert all(read.all("pid") == {} for _ in range(20_000))
    finally:
        ended.set()
        thread.join()


def test_ranks_of_one_job_share_a_private_folder_and_the_last_one_removes_it(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_facts.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setenv(process_tree.RUN_DIR, str(tmp_path / "another-hosts"))  # `hvdtrain run` runs there
    for name in shared_facts._JOB_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert shared_facts.open_facts(0).directory == shared_facts._NOWHERE
    monkeypatch.setenv("PMIX_NAMESPACE", "17")
    zero, one = shared_facts.open_facts(0), shared_facts.open_facts(1)
    assert zero.directory == one.directory
    assert zero.directory.parent.stat().st_mode & 0o777 == 0o700
    for rank in (zero, one):
        rank.post("pid", os.getpid())
    zero.leave()
    assert one.directory.exists()
    one.leave()
    assert not one.directory.exists()
    zero.directory.parent.chmod(0o777)  # anybody may write there: not ours alone
    assert shared_facts.open_facts(0).directory == shared_facts._NOWHERE


def test_what_a_killed_rank_wrote_about_its_memory_outlives_the_other_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_facts.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.delenv(process_tree.RUN_DIR, raising=False)
    monkeypatch.setenv("PMIX_NAMESPACE", "18")
    killed = subprocess.Popen(["true"])
    killed.wait()
    zero, one = shared_facts.open_facts(0), shared_facts.open_facts(1)
    zero.post("pid", os.getpid())
    one.post("pid", killed.pid)
    one.post("memory", {"text": "weights 5 GB"})
    zero.leave()
    assert shared_facts.read(one.directory, "memory")[1]["text"] == "weights 5 GB"


def test_the_state_of_a_process_is_reported():
    process = subprocess.Popen(["sleep", "100"])
    try:
        assert shared_facts.process_state(process.pid) == ""
        process.send_signal(19)
        until = time.monotonic() + 30
        while not shared_facts.process_state(process.pid) and time.monotonic() < until:
            time.sleep(0.01)
        assert "stopped" in shared_facts.process_state(process.pid)
    finally:
        process.kill()
        process.wait()
    assert "gone" in shared_facts.process_state(process.pid)
