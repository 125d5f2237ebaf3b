"""What `hvdtrain run` says of a rank that was killed, by what ranks wrote and what the OOM killer counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hvdtrain.distributed.watchdog import shared_facts
from hvdtrain.launch import out_of_memory, ssh
from hvdtrain.launch.exit_cause import Cause
from hvdtrain.launch.ssh import SshRoute

ROUTE = SshRoute(("far.invalid",), ("ssh",))
KILLED = Cause("rank 1 on host far.invalid", 137, 1)
DMESG = "`ssh far.invalid dmesg` or `ssh far.invalid journalctl -k` shows if it did"


@pytest.mark.parametrize(
    ("cause", "kills", "note"),
    [
        (Cause("rank 1 on host h", 137, 1), 3, "so the kernel ended rank 1 on host h; it held weights 5 GB"),
        (Cause("rank 0 on host h", 137, 0), 3, "so the kernel ended rank 0 on host h; it had not begun to train"),
        (Cause("rank 2 on host h", 137, 2), 3, "so the kernel ended rank 2 on host h; it did not say what it held"),
        (Cause("rank 1 on host h", 137, 1), 2, None),  # somebody has killed it
        (Cause("rank 1 on host h", 1, 1), 3, None),
    ],
    ids=["trained", "began", "silent", "killed", "raised"],
)
def test_a_rank_that_the_oom_killer_ended_is_said_to_lack_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: Cause, kills: int, note: str | None
) -> None:
    monkeypatch.setattr(out_of_memory.host_memory, "oom_kills", lambda: kills)
    monkeypatch.setattr(out_of_memory.host_memory, "limit", lambda: 8_000_000_000)
    shared_facts.SharedFacts(tmp_path, 1).post("memory", {"text": "weights 5 GB"})
    shared_facts.SharedFacts(tmp_path, 2).counter("progress")(12)
    found = out_of_memory.note(tmp_path, cause, host="", kills_before=2, route=None)
    if note is None:
        assert found == ""
    else:
        assert found.startswith("memory ran out on this host, which is limited to 8 GB, ")
        assert note in found


@pytest.mark.parametrize(
    ("code", "said", "note"),
    [
        (
            137,
            {"text": "weights 5 GB", "oom_kills_since": 1},
            "memory ran out on host far.invalid, so the kernel ended rank 1 on host far.invalid; it held weights 5 GB",
        ),
        # ssh itself ends so, if the rank's shell was killed with it.
        (
            255,
            {"text": "weights 5 GB", "oom_kills_since": 1},
            "memory ran out on host far.invalid, so the kernel ended rank 1 on host far.invalid; it held weights 5 GB",
        ),
        (137, {"text": "weights 5 GB", "oom_kills_since": 0}, ""),  # somebody has killed it
        (
            137,
            {},
            (
                "memory ran out on host far.invalid, probably, and the kernel ended rank 1 on host far.invalid: "
                f"{DMESG}. Every rank holds about the same: rank 0 held weights 4 GB"
            ),
        ),
        (255, {}, ""),  # the connection broke, as far as it is known
        (1, {"text": "weights 5 GB", "oom_kills_since": 1}, ""),
    ],
    ids=["asked", "asked-255", "killed", "silent", "silent-255", "raised"],
)
def test_of_a_rank_on_another_host_it_is_said_what_that_host_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, said: dict[str, Any], note: str
) -> None:
    monkeypatch.setattr(ssh, "memory_of", lambda *args, **options: said)
    monkeypatch.setattr(out_of_memory.host_memory, "oom_kills", lambda: 3)  # another process, of this host
    shared_facts.SharedFacts(tmp_path, 0).post("memory", {"text": "weights 4 GB"})
    cause = Cause("rank 1 on host far.invalid", code, 1)
    assert out_of_memory.note(tmp_path, cause, host="far.invalid", kills_before=2, route=ROUTE) == note


def test_on_a_shared_disk_the_rank_itself_has_said_what_it_held(tmp_path: Path) -> None:
    for rank in (0, 1):
        shared_facts.SharedFacts(tmp_path, rank).post("memory", {"text": f"weights {rank} GB"})
    found = out_of_memory.note(tmp_path, KILLED, host="far.invalid", kills_before=0, route=None)
    assert found.endswith(f": {DMESG}; it held weights 1 GB")
