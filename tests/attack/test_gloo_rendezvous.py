"""A rank's own requests to the rendezvous, which C++ makes: proven, and believed only if the answer is."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from gloo_ranks import KEY, environment, rendezvous

pytest.importorskip("horovod.torch", exc_type=ImportError)

RANK = "import horovod.torch as hvd; hvd.init(); print('ranks:', hvd.size())"


def rank(port: int, key: str | None = KEY) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", RANK],
        env=environment(port, key),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_every_request_of_a_rank_is_proven() -> None:
    with rendezvous(key=bytes.fromhex(KEY)) as (port, seen):
        done = rank(port)
    assert done.returncode == 0, done.stderr
    assert "ranks: 1" in done.stdout
    assert seen.requests >= 6
    assert seen.unproven == []


@pytest.mark.parametrize("key", [None, bytes(32)], ids=["no key", "another key"])
def test_an_answer_that_is_not_the_jobs_is_not_believed(key: bytes | None) -> None:
    with rendezvous(key=key) as (port, _):
        done = rank(port)
    assert done.returncode != 0
    assert f"the answer of the rendezvous at 127.0.0.1:{port} was not made with this job's key" in done.stderr


@pytest.mark.parametrize(
    ("key", "reason"),
    [(KEY, "its HVDTRAIN_JOB_KEY is not this job's"), (None, "it has no HVDTRAIN_JOB_KEY")],
    ids=["another key", "no key"],
)
def test_a_rank_that_is_refused_ends_at_its_first_request(key: str | None, reason: str) -> None:
    with rendezvous(status=403) as (port, seen):
        done = rank(port, key)
    assert done.returncode != 0
    assert f"refused this process (403): {reason}" in done.stderr
    assert seen.requests == 1


def test_a_rank_without_a_key_asks_as_it_always_did() -> None:
    with rendezvous() as (port, seen):
        done = rank(port, key=None)
    assert done.returncode == 0, done.stderr
    assert len(seen.unproven) == seen.requests


def test_a_key_that_is_none_is_named() -> None:
    done = rank(1, key="secret")
    assert done.returncode != 0
    assert "HVDTRAIN_JOB_KEY must be 64 hex digits" in done.stderr
    assert "secret" not in done.stderr


@pytest.mark.slow
def test_a_rank_does_not_wait_for_ever_for_an_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        variables = environment(port) | {"HOROVOD_LOG_LEVEL": "debug"}
        with subprocess.Popen(
            [sys.executable, "-c", RANK], env=variables, stdout=subprocess.PIPE, text=True
        ) as process:
            # The first of three tries is enough to see.
            said = next((line for line in process.stdout or () if "Exception" in line), "")
            process.kill()
    assert f"No answer from 127.0.0.1:{port} within 30 s" in said
