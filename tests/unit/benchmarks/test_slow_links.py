"""Links between two hosts: what tc is told, when they cannot be made, and what their figures mean."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import hosts, slow_links, steps, targets
from benchmarks.__main__ import main
from benchmarks.slow_links import LINKS, PEERS, Link
from benchmarks.torch_tasks import MLP

BY_NAME = {peer.name: peer for peer in PEERS}


def test_without_root_the_links_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts.shutil, "which", lambda name, path: f"/usr/sbin/{name}")
    monkeypatch.setattr(hosts.os, "geteuid", lambda: 1000)
    assert main(["--link", "1gbit", "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err == (
        "benchmarks: --link makes two hosts of this one, which is not possible here: network namespaces need root\n"
    )


def test_without_tc_the_links_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_links.hosts, "missing", lambda: "")
    monkeypatch.setattr(slow_links.shutil, "which", lambda name, path: None)
    assert slow_links.why_not(["1gbit"]) == "no tc: apt-get install iproute2"


def test_a_link_is_a_rate_in_tc_and_a_delay_needs_tun_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [LINKS[name].qdisc()[:3] for name in ("100mbit", "50ms")] == [
        ["tbf", "rate", "100000000bit"], ["tbf", "rate", "1000000000bit"],
    ]  # fmt: skip
    monkeypatch.setattr(slow_links.hosts, "missing", lambda: "")
    monkeypatch.setattr(slow_links.shutil, "which", lambda name, path: "tc")
    monkeypatch.setattr(slow_links, "_TUN", Path("/no/such/device"))
    assert slow_links.why_not(["50ms"]) == "this kernel has no TUN devices, of which the link 50ms is made"


def test_no_step_is_faster_than_the_link_or_the_computing() -> None:
    assert sum(each.numel() for each in MLP().parameters()) == slow_links.PARAMETERS
    link = Link("any", 1e9)
    assert slow_links.bound_s(link, BY_NAME["mpi"], 0.1) == pytest.approx(0.641, abs=0.001)
    assert slow_links.bound_s(link, BY_NAME["mpi-fp16"], 0.1) == pytest.approx(0.321, abs=0.001)
    assert slow_links.bound_s(link, BY_NAME["mpi-fp16"], 0.5) == 0.5


def test_a_step_is_also_compared_with_the_reduction_alone_over_the_same_plane() -> None:
    times = {"alone": 100.0, "mpi": 810.0, "mpi-exchange": 720.0, "delayed": 756.0, "gloo-exchange": 90.0,
             "delayed-gloo": 105.0, "ddp": 900.0}  # fmt: skip
    peers = {
        name: {"status": "ok", "step_ms": ms, "block_ms": [ms], "sent_bytes": 8e7, "samples_per_s": 1.0}
        for name, ms in times.items()
    }
    table = slow_links._as_rows(LINKS["1gbit"], {"peers": peers, "title": "MLP"})
    assert table["overlaps"] == pytest.approx({"mpi": 1.125, "delayed": 1.05, "delayed-gloo": 1.05})
    assert {len(row) for row in table["rows"]} == {len(table["columns"])}
    found = {each.text: each.met for each in targets.check({"link-1gbit": {"peers": peers, **table}})}
    assert found["two hosts, 1gbit: delayed / max(T_comp, T_sync), step time"] is True


def test_steps_of_a_strategy_count_by_their_mean_and_in_whole_cycles() -> None:
    peer = replace(BY_NAME["local-sgd"], cycle=4)
    entry: dict[str, list[float]] = {}
    warm_up = steps._warm_up(peer, steps.Plan(warm_up=1))
    assert warm_up == 4
    answers = [{"step_s": [9.0] * warm_up + [1.0, 1.0, 1.0, 5.0], "cpu_s": 8.0, "sent_bytes": 16}]
    steps._note(peer, entry, answers, warm_up)
    assert entry == {"block_s": [2.0], "block_mean_s": [2.0], "cpu_s": [1.0], "sent_bytes_a_turn": [2.0]}


def test_a_strategy_must_gain_what_the_target_says() -> None:
    peers = {
        "ddp": {"block_ms": [2000.0] * 3},
        "diloco": {"block_ms": [99.0] * 3},
        "local-sgd": {"block_ms": [101.0] * 3},
    }
    found = {each.text: each.met for each in targets.check({"link-100mbit": {"peers": peers, "bounds": {"mpi": 1.11}}})}
    met = {
        name: next(met for text, met in found.items() if f"100mbit: {name} /" in text)
        for name in (*peers, "mpi")
        if name != "ddp"
    }
    assert met == {"diloco": True, "local-sgd": False, "mpi": False}
