"""Ranks on Ray and Spark meet at servers that know their job's key alone; Ray and Spark need not be there for this."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("horovod.runner.common.util.proven_server", reason="no Horovod of this hvdtrain's is installed")
from horovod.runner.common.util import proof
from horovod.runner.http import http_client

from hvdtrain.integrations.ray import job
from hvdtrain.integrations.spark import task


def meets(environment: dict[str, str], other: bytes) -> None:
    """Check that the server of a rank's environment knows its key, and no other."""
    address = environment["HOROVOD_GLOO_RENDEZVOUS_ADDR"]
    port, key = int(environment["HOROVOD_GLOO_RENDEZVOUS_PORT"]), bytes.fromhex(environment[proof.VARIABLE])
    http_client.put_data_into_kvstore(address, port, "global", "0", "here", key)
    assert http_client.read_data_from_kvstore(address, port, "global", "0", key) == "here"
    with pytest.raises(RuntimeError):
        http_client.read_data_from_kvstore(address, port, "global", "0", other)


def test_ranks_on_ray_have_a_key_of_their_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(proof.VARIABLE, raising=False)
    cluster = SimpleNamespace(node=lambda: "node", address=lambda: "127.0.0.1")
    worker = SimpleNamespace(facts={"node": "node", "interface": "lo", "gpus": []})
    keys = []
    for _ in range(2):
        with job._rendezvous(cluster, [worker, worker]) as (first, second):
            assert first[proof.VARIABLE] == second[proof.VARIABLE]
            meets(first, bytes(32))
            keys.append(first[proof.VARIABLE])
    assert len(set(keys)) == 2


def test_ranks_on_spark_meet_with_the_key_of_their_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(proof.VARIABLE, raising=False)
    places = [task.Place("here", "127.0.0.1", [])] * 2
    context = SimpleNamespace(allGather=lambda said: [said])
    key = proof.new_key()
    with task._rendezvous(0, places, context, bytes.fromhex(key)) as found:
        assert proof.VARIABLE not in found  # it is in the plan's environment
        meets({**found, proof.VARIABLE: key}, bytes(32))
