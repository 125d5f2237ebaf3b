"""Wrong options are refused in one line, before anything runs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from benchmarks import asked, catalog, gpu, report, steps, sweep
from benchmarks.__main__ import _with_best_settings, main
from benchmarks.workloads import WORKLOADS


def test_without_horovod_its_peers_alone_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog.importlib.util, "find_spec", lambda name: None)
    assert main(["--workload", "lenet", "--peer", "hvdtrain,trainer", "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err == (
        "benchmarks: nothing can run: hvdtrain not installed: horovod (`hvdtrain build` makes it); "
        "trainer not installed: horovod (`hvdtrain build` makes it)\n"
    )


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--workload", "lenet,resnet"], "no workload is called 'resnet'. There are: lenet, mlp, convnet"),
        (["--peer", "deepspeed"], "no peer is called 'deepspeed'. There are: single, alone, "),
        (["--section", "speed"], "no section is called 'speed'. There are: sweep, steps, startup"),
        (["--rounds", "0"], "--rounds must be > 0 and finite. Received: 0"),
        (["--launches", "-2"], "--launches must be > 0 and finite. Received: -2"),
        (["--seconds", "-1"], "--seconds must be > 0 and finite. Received: -1.0"),
        (["--seconds", "nan"], "--seconds must be > 0 and finite. Received: nan"),
        (["--seconds", "inf"], "--seconds must be > 0 and finite. Received: inf"),
        (["--np", "4096"], "4096 ranks are more than the"),
        (["--horovod-python", "/nowhere/python"], "no horovodrun beside it. Received: /nowhere/python"),
        (["--show"], "no results in"),
        (["--show", "--quick", "--workload", "mlp"], "--show has no use for --workload, --quick: leave it out"),
        (["--gpu", "--peer", "trainer"], "--gpu has no use for --peer: leave it out"),
        (["--gpu", "--quick", "--section", "steps"], "--gpu has no use for --section, --quick: leave it out"),
        (["--gpu", "--workload", "mlp"], "no GPU workload is called 'mlp'. There are: gpu-resnet50, gpu-transformer"),
        (["--link", "2gbit"], "no link is called '2gbit'. There are: 10gbit, 1gbit, 100mbit, 50ms"),
        (["--link", "1gbit", "--peer", "trainer"], "no peer is called 'trainer'. There are: alone, ddp, ddp-fp16"),
        (["--link", "1gbit", "--section", "steps"], "--link has no use for --section: leave it out"),
        (
            ["--link", "1gbit", "--workload", "mlp"],
            "no workload is called 'mlp'. There are: link-mlp, link-keras-tensor",
        ),
        (["--section", "scaling", "--workload", "mlp"], "section scaling has workloads lenet, convnet. Received: "),
        (["--section", "growth", "--peer", "ddp"], "section growth has a peer of its own. Received: --peer ddp"),
    ],
)
def test_bad_input_is_one_line_and_exit_status_1(
    arguments: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--out", str(tmp_path)]) == 1
    printed = capsys.readouterr().err
    assert line in printed
    assert printed.startswith("benchmarks: ")
    assert printed.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_without_a_gpu_the_gpu_set_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BENCH_GPU_TRIAL", raising=False)
    monkeypatch.setattr(gpu, "hardware", lambda: {"gpus": []})
    assert main(["--gpu", "--out", str(tmp_path)]) == 1
    assert "no GPU is here" in capsys.readouterr().err


def test_the_gpu_set_measures_the_workloads_that_were_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []
    monkeypatch.setattr(gpu, "hardware", lambda: {"gpus": ["a GPU"]})
    monkeypatch.setattr(gpu, "measure", lambda workload, *_, **__: measured.append(workload.name) or {"kind": "rows"})
    monkeypatch.setattr(report, "load", lambda folder: ({}, []))
    main(["--gpu", "--workload", "*resnet*", "--out", str(tmp_path)])
    assert measured == ["gpu-resnet50"]


def test_a_quick_run_takes_what_was_named_and_its_own_choice_of_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_for = []
    monkeypatch.setattr(asked, "keep_to_cores", lambda ranks: None)
    monkeypatch.setattr(steps, "measure", lambda *measured, **__: asked_for.append(measured) or {"kind": "rows"})
    monkeypatch.setattr(report, "load", lambda folder: ({}, []))
    main(["--quick", "--workload", "mlp", "--rounds", "3", "--out", str(tmp_path)])
    [(workload, peers, plan)] = asked_for
    assert (workload.name, [peer.name for peer in peers]) == ("mlp", ["ddp", "trainer"])
    assert (plan.rounds, plan.launches, plan.seconds) == (3, 1, 0.3)


def test_a_peer_that_is_not_installed_says_what_is_missing() -> None:
    peer = catalog.Peer("x", "X", "x", "torchrun", needs=("json", "no_such_package"))
    assert peer.missing() == "not installed: no_such_package"


def test_hvdtrain_peers_get_what_a_user_gets_and_the_others_one_thread() -> None:
    for workload in WORKLOADS.values():
        for peer in catalog.peers_of(workload):
            ours = peer.name in ("hvdtrain", "trainer", "torch-trainer")
            assert peer.environment.get("OMP_NUM_THREADS") == (None if ours else "1"), peer.name
            if ours:
                assert (peer.launcher, peer.options, peer.environment) == ("horovodrun", (), {})


def test_the_hand_tuned_peer_may_have_every_declared_setting() -> None:
    tuned = next(peer for peer in catalog.TORCH if peer.name == "horovod-tuned")
    candidates = catalog.sweep_of(tuned)
    assert len({each.name for each in candidates}) == len(candidates) == 9
    assert all(each.environment["OMPI_MCA_mpi_yield_when_idle"] == "1" for each in candidates)


def test_results_are_shown_without_measuring(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {
        "kind": "rows", "title": "Start", "columns": ["peer", "seconds"], "rows": [["DDP", 2.5]],
        "commit": "abc", "measured_at": "now", "ratios": {"trainer": {"median": 1.1, "low": 1.0, "high": 1.3}},
    }  # fmt: skip
    (tmp_path / "startup.json").write_text(json.dumps(row))
    assert main(["--show", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "2.50" in printed
    assert "1.100 [1.000-1.300]" in printed
    assert "met" in printed
    assert "1.100 [1.000-1.300]" in (tmp_path / "tables.txt").read_text()
    assert "1 unsure" in printed
    assert "by it 1 met, 0 not." in printed
    row["ratios"]["trainer"]["median"] = 1.3  # type: ignore[index]
    (tmp_path / "startup.json").write_text(json.dumps(row))
    assert main(["--show", "--out", str(tmp_path)]) == 0
    assert main(["--show", "--check", "--out", str(tmp_path)]) == 1
    assert "unsure, NOT MET" in capsys.readouterr().out
    row["ratios"]["trainer"] = {"median": 1.3, "low": 1.25, "high": 1.4}  # type: ignore[index]
    (tmp_path / "startup.json").write_text(json.dumps(row))
    assert main(["--show", "--check", "--out", str(tmp_path)]) == 1
    assert "unsure" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"colour": "red"}',
        '{"kind": "steps", "title": "x"}',
        '{"kind": "rows", "title": "x", "columns": ["a"], "rows": 3, "commit": "c", "measured_at": "now"}',
        b"\xff\xfe\x00",
    ],
)
def test_a_file_that_holds_no_result_is_named_and_the_others_are_shown(
    content: str | bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {
        "kind": "rows",
        "title": "Start",
        "columns": ["peer"],
        "rows": [["DDP"]],
        "commit": "c",
        "measured_at": "now",
    }
    (tmp_path / "mine.json").write_text(json.dumps(row))
    other = tmp_path / "lenet.json"
    other.write_bytes(content.encode() if isinstance(content, str) else content)
    assert main(["--show", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert "Start" in printed.out
    assert printed.err.startswith(f"benchmarks: {other} holds no result (")
    assert printed.err.count("\n") == 1
    assert main(["--show", "--check", "--out", str(tmp_path)]) == 1


def test_a_sweep_that_cannot_be_read_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sweep-lenet.json").write_text("{")
    [tuned] = _with_best_settings(WORKLOADS["lenet"], [sweep.TUNED], tmp_path)
    assert tuned.title.endswith("(no sweep made)")
    assert "sweep-lenet.json holds no result (JSONDecodeError" in capsys.readouterr().out
    assert sweep.best({"rows": [["a setting of old", 1.0]]}).title.endswith("(no sweep made)")


def test_a_callers_own_settings_do_not_reach_the_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.groups import clean_environment

    for name in ("OMP_NUM_THREADS", "HOROVOD_CYCLE_TIME", "OMPI_MCA_btl", "WORLD_SIZE", "KERAS_BACKEND"):
        monkeypatch.setenv(name, "7")
    found = clean_environment()
    assert not {"OMP_NUM_THREADS", "HOROVOD_CYCLE_TIME", "OMPI_MCA_btl", "WORLD_SIZE", "KERAS_BACKEND"} & set(found)
    assert found["PATH"] == os.environ["PATH"]


def test_the_hand_tuned_peer_takes_the_fastest_setting_of_a_sweep_and_says_where_none_was_made() -> None:
    slow, fast = catalog.sweep_of(sweep.TUNED)[:2]
    tuned = sweep.best({"rows": [[fast.name, 1.0], [slow.name, 2.0]]})
    assert (tuned.name, tuned.title, tuned.environment) == ("horovod-tuned", sweep.TUNED.title, fast.environment)
    assert sweep.best(None).title.endswith("(no sweep made)")
