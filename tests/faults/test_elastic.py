"""An elastic job loses at most the steps since its last commit when a host's rank dies, and takes new hosts in.

Hosts are names that Horovod takes for this machine, so that no ssh is needed. Whatever happens in a job is brought
about by its own steps, and nothing here looks at the time but for limits.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdtrain.launch import prepare
from hvdtrain.system import process_tree, start_ranks

HERE = Path(__file__).parent
HOSTS = ("localhost", "127.0.0.1", "127.0.1", "127.1")  # all of them are this machine
LIMIT_S = 150
BACKEND = os.environ.get("KERAS_BACKEND", "tensorflow")


class Job:
    """The facts that the ranks of a job wrote, in the order of each host's own facts."""

    def __init__(self, folder: Path, output: str) -> None:
        self.output = output
        self.facts: list[dict[str, Any]] = []
        for log in sorted(folder.glob("log-*")):
            self.facts += [json.loads(line) for line in log.read_text().splitlines()]

    def of(self, fact: str, **what: Any) -> list[dict[str, Any]]:
        """Return the facts of a kind, with these values."""
        return [each for each in self.facts if each["fact"] == fact and what.items() <= each.items()]

    def one(self, fact: str, **what: Any) -> dict[str, Any]:
        """Return the only one."""
        found = self.of(fact, **what)
        assert len(found) == 1, f"{len(found)} of {fact} {what}\n{self.output[-6000:]}\n{self.facts}"
        return found[0]

    def together(self, fact: str, size: int = 2, **what: Any) -> dict[str, Any]:
        """Return the fact of rank 0 of so many, which hold the same bits."""
        first, *others = [self.one(fact, rank=rank, size=size, **what) for rank in range(size)]
        assert {each["digest"] for each in others} == {first["digest"]}
        assert {each["step"] for each in others} == {first["step"]}
        return first


def environment(backend: str) -> dict[str, str]:
    return start_ranks.rank_environment({
        "KERAS_BACKEND": backend, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3",
    })  # fmt: skip


def run(
    folder: Path,
    script: str,
    scenario: str,
    *more: str,
    backend: str = BACKEND,
    slots: int = 1,
    fails: bool = False,
    **options: str,
) -> Job:
    size = int(scenario.partition("-of-")[2] or 2)
    hosts = (
        HOSTS[:size]
        if scenario.startswith(("kill", "error", "leave"))
        else HOSTS[: 2 if scenario == "grow-to-3" else 1]
    )
    (folder / "hosts").write_text("".join(f"{host}:{slots}\n" for host in hosts))
    discovery = folder / "discover"
    discovery.write_text(f"#!/bin/sh\ncat {folder}/hosts\n")
    discovery.chmod(0o755)
    found = ["--host-discovery-script", str(discovery)]
    sizes = ["-np", str(len(hosts) * slots), "--min-np", "1", "--max-np", str(len(HOSTS) * slots)]
    given = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    launcher = [*start_ranks.horovodrun(Path(sys.executable)), *sizes, *given, *found, *prepare.elastic_flags(found)]
    command = [*launcher, sys.executable, str(HERE / script), str(folder), scenario, *more]
    # A file: a pipe would keep us waiting for whoever still holds it.
    with (folder / "output").open("w+") as output:
        process = subprocess.Popen(
            command, env=environment(backend), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            status = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            status = None
            process_tree.end(None, below=process.pid)
            process.wait()
    job = Job(folder, (folder / "output").read_text())
    assert (status is not None and status != 0) if fails else status == 0, (
        f"status {status} (None: no end within {LIMIT_S} s)\n{job.output[-6000:]}\n{job.facts}"
    )
    return job


def alone(folder: Path, script: str, scenario: str, *more: str, backend: str = BACKEND) -> dict[str, Any]:
    """Return how one process ends that does the same in two parts."""
    command = [sys.executable, str(HERE / script), str(folder), scenario, *more]
    done = subprocess.run(
        command, env=environment(backend) | {"HVDTRAIN_SOLO": "1"}, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return Job(folder, "").one("end", host="alone")


@pytest.mark.timeout(200)
@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.long), 1])
def test_torch_goes_on_from_its_last_commit_when_a_host_dies(victim: int, tmp_path: Path) -> None:
    job = run(tmp_path, "elastic_torch.py", f"kill-{victim}")
    assert {each["is_twin"] for each in job.facts if "is_twin" in each} == {True}
    assert len(job.of("killed")) == 1
    assert job.together("begin")["step"] == 0
    left = job.one("begin", size=1)
    assert left["rank"] == 0
    assert left["step"] == 6, "the last commit: the step under way and the one before it are lost"
    assert left["processed"] == 6 * 2 * 2
    end = job.one("end")
    assert end["counts"] == [2.0] * 48, "each sample is learned from once in each of two epochs"
    assert end["taken"] == list(range(1, 6 + 12 + 24 + 1))


@pytest.mark.timeout(200)
def test_ranks_that_do_not_talk_to_the_dead_one_hear_of_it_too(tmp_path: Path) -> None:
    job = run(tmp_path, "elastic_torch.py", "kill-3", slots=2, gloo_timeout_seconds=str(LIMIT_S))
    assert len(job.of("killed")) == 1
    left = job.of("begin", size=2)
    assert {each["is_twin"] for each in job.facts if "is_twin" in each} == {True}
    assert sorted(each["rank"] for each in left) == [0, 1]
    assert [each["step"] for each in left] == [6, 6], "the last commit, one epoch of four ranks"
    end = job.together("end")
    assert end["counts"] == [2.0] * 48
    assert end["taken"] == list(range(1, 6 + 12 + 1))


@pytest.mark.timeout(200)
@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.long)])
def test_shards_of_a_dead_rank_are_divided_among_two_others(victim: int, tmp_path: Path) -> None:
    job = run(tmp_path, "elastic_torch.py", f"kill-{victim}-of-3")
    assert len(job.of("killed")) == 1
    assert job.together("begin", size=3)["step"] == 0
    assert job.together("begin")["step"] == 6, "the last commit"
    assert job.together("end")["step"] == 6 + 6 + 12 - 3
    assert {each["is_twin"] for each in job.facts if "is_twin" in each} == {True}, "the bits of a state without shards"


@pytest.mark.long
@pytest.mark.timeout(200)
def test_an_error_of_horovods_without_a_death_costs_the_steps_since_the_commit(tmp_path: Path) -> None:
    job = run(tmp_path, "elastic_torch.py", "error")
    begun = [[each["step"] for each in job.of("begin", size=2, rank=rank)] for rank in (0, 1)]
    assert begun == [[0, 6], [0, 6]], "the last commit"
    assert job.together("end")["counts"] == [2.0] * 48
    assert {each["is_twin"] for each in job.facts if "is_twin" in each} == {True}


@pytest.mark.long
@pytest.mark.timeout(200)
def test_a_host_that_is_no_longer_named_leaves_its_shard(tmp_path: Path) -> None:
    job = run(tmp_path, "elastic_torch.py", "leave-of-3")
    assert job.together("begin")["step"] == 7, "nothing is lost"
    job.together("end")
    assert {each["is_twin"] for each in job.facts if "is_twin" in each} == {True}


@pytest.mark.long
@pytest.mark.timeout(200)
def test_a_third_rank_gets_its_shard_from_two_others(tmp_path: Path) -> None:
    job = run(tmp_path, "elastic_torch.py", "grow-to-3")
    assert job.together("begin", size=3)["step"] == 7, "nothing is lost"
    job.together("end", size=3)
    assert {each["is_twin"] for each in job.facts if "is_twin" in each} == {True}


@pytest.mark.timeout(200)
def test_torch_takes_a_new_host_in_with_the_same_bits(tmp_path: Path) -> None:
    job = run(tmp_path, "elastic_torch.py", "grow")
    assert {each["is_twin"] for each in job.facts if "is_twin" in each} == {True}
    assert job.one("begin", size=1)["step"] == 0
    begin = job.together("begin")
    assert (begin["step"], begin["processed"]) == (7, 7 * 2), "nothing is lost"
    end = job.together("end")
    assert end["counts"] == [2.0] * 48
    assert end["taken"] == list(range(1, 7 + 9 + 12 + 1))


@pytest.mark.timeout(200)
def test_a_new_host_whose_rank_ends_at_once_costs_nothing(tmp_path: Path) -> None:
    job = run(tmp_path, "elastic_torch.py", "stillborn")
    assert len(job.of("born")) == 1
    assert [(each["size"], each["step"]) for each in job.of("begin")] == [(1, 0), (1, 7)]
    assert job.one("end")["counts"] == [2.0] * 48


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("backend", "victim"), [("tensorflow", 0), pytest.param("torch", 1, marks=pytest.mark.long)])
def test_keras_goes_on_from_its_last_commit_when_a_host_dies(backend: str, victim: int, tmp_path: Path) -> None:
    job = run(tmp_path, "elastic_keras.py", f"kill-{victim}", backend=backend)
    assert len(job.of("killed")) == 1
    assert job.together("begin")["step"] == 0
    left = job.one("begin", size=1)
    assert (left["step"], left["updates"]) == (6, 6), "the last commit"
    end = job.one("end")
    assert (end["step"], end["updates"]) == (20, 20), "two epochs of ten steps"
    assert end["taken"] == list(range(1, 21))


@pytest.mark.long  # shards of a dead rank are proven on torch, and those of a Keras model with the Trainer
@pytest.mark.timeout(400)
@pytest.mark.parametrize("backend", ["torch", "tensorflow", "jax"])
@pytest.mark.parametrize("scenario", ["kill-0-of-3", "grow-to-3"])
def test_keras_in_shards_ends_as_without_them_when_ranks_change(backend: str, scenario: str, tmp_path: Path) -> None:
    ends = []
    for shards in ([], ["shards"]):
        (folder := tmp_path / str(len(shards))).mkdir()
        job = run(folder, "elastic_keras.py", scenario, *shards, backend=backend)
        size, step = (3, 8) if scenario == "grow-to-3" else (2, 6)
        begin = job.together("begin", size=size)
        assert (begin["step"], begin["updates"]) == (step, step), "the last commit"
        ends.append(job.together("end", size=size))
    assert ends[1]["taken"] == ends[0]["taken"] == list(range(1, 21))
    if backend == "torch":
        assert ends[1]["digest"] == ends[0]["digest"], "weights and moments"
    for ours, right in zip(ends[1]["weights"], ends[0]["weights"], strict=True):
        np.testing.assert_allclose(ours, right, atol=1e-6)


@pytest.mark.long
@pytest.mark.timeout(200)
def test_keras_takes_a_new_host_in_with_the_same_bits(tmp_path: Path) -> None:
    job = run(tmp_path, "elastic_keras.py", "grow")
    begin = job.together("begin")
    assert (begin["step"], begin["updates"]) == (8, 8), "nothing is lost"
    end = job.together("end")
    assert (end["step"], end["updates"]) == (20, 20)


@pytest.mark.long
@pytest.mark.timeout(200)
@pytest.mark.parametrize("scenario", ["kill-1", "grow"])
def test_a_loop_with_a_tape_keeps_its_graph_when_ranks_change(scenario: str, tmp_path: Path) -> None:
    job = run(tmp_path, "elastic_tape.py", scenario, backend="tensorflow")
    if scenario == "grow":
        begin, end = job.together("begin"), job.together("end")
        assert (begin["step"], begin["updates"]) == (8, 8), "nothing is lost"
    else:
        begin, end = job.one("begin", size=1), job.one("end")
        assert (begin["step"], begin["updates"]) == (6, 6), "the last commit"
    assert (end["step"], end["updates"]) == (20, 20)
    assert end["taken"] == list(range(1, 21))


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("framework", "scenario"),
    [("torch", "kill-0"), ("torch", "grow"), pytest.param("keras", "kill-1", marks=pytest.mark.long)],
)
def test_the_trainer_goes_on_as_one_process_with_the_same_global_batches(
    framework: str, scenario: str, tmp_path: Path
) -> None:
    job = run(tmp_path, "elastic_trainer.py", scenario, framework)
    if scenario == "grow":
        assert job.together("begin")["step"] == 7, "nothing is lost"
        end = job.together("end")
    else:
        assert job.together("begin")["step"] == 0
        assert job.one("begin", size=1)["step"] == 6, "the last checkpoint within the epoch, from memory"
        end = job.one("end")
    rounds = sorted(job.of("logs"), key=lambda each: each["step"])  # rank 0 may have been on either host
    assert [each["step"] for each in rounds] == [0, 7 if scenario == "grow" else 6]
    assert len({each["id"] for each in rounds}) == 1, "one run, though its rank 0 may be another one now"
    assert [each["own"] for each in job.of("holds")] == [True, True], "the folder is held by each round's rank 0"
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept[-1] == "epoch-000003"
    assert ".lock" not in kept
    straight = alone(tmp_path, "elastic_trainer.py", scenario, framework)
    assert end["step"] == straight["step"]
    for name, values in straight["history"].items():
        np.testing.assert_allclose(end["history"][name], values, atol=1e-4, err_msg=name)
    for name, values in straight["weights"].items():
        np.testing.assert_allclose(end["weights"][name], values, atol=1e-4, err_msg=name)


@pytest.mark.long
@pytest.mark.timeout(200)
def test_ranks_that_step_alone_go_on_from_where_they_were_equal_last(tmp_path: Path) -> None:
    job = run(tmp_path, "elastic_trainer.py", "kill-1", "torch", "local")
    assert job.together("begin")["step"] == 0
    # A checkpoint is due after steps 3 and 6, and written and committed after 4 and 6, where ranks are equal.
    assert job.one("begin", size=1)["step"] == 6
    assert job.one("end")["size"] == 1


@pytest.mark.long
@pytest.mark.timeout(200)
@pytest.mark.parametrize("scenario", ["kill-1", "grow"])
def test_steps_that_may_close_early_go_on_with_more_ranks_and_with_one(scenario: str, tmp_path: Path) -> None:
    job = run(tmp_path, "elastic_trainer.py", scenario, "torch", "cutoff")
    end = job.together("end") if scenario == "grow" else job.one("end")
    straight = alone(tmp_path, "elastic_trainer.py", scenario, "torch", "cutoff")
    assert end["step"] == straight["step"]
    for name, weights in straight["weights"].items():
        np.testing.assert_allclose(end["weights"][name], weights, atol=1e-4, err_msg=name)


@pytest.mark.long
@pytest.mark.timeout(200)
def test_seconds_end_an_elastic_run_on_all_ranks_after_the_same_step_and_count_earlier_rounds(tmp_path: Path) -> None:
    job = run(tmp_path, "elastic_trainer.py", "grow", "torch", "20")
    begin, end = job.together("begin"), job.together("end")
    assert begin["step"] == 7
    assert {each["spent_s"] for each in job.of("begin", size=2)} == {begin["spent_s"]}
    assert begin["spent_s"] >= 6 * 0.05  # of the round before
    assert end["step"] > 7
    assert 20 <= end["seconds"] < 25


@functools.cache
def whole_state(folder: Path, framework: str = "torch", backend: str = BACKEND) -> dict[str, Any]:
    """Return how a job of three without shards ends, from which a rank was killed; it does not matter which."""
    (folder := folder / f"whole-{framework}-{backend}").mkdir()
    return run(folder, "elastic_trainer.py", "kill-2-of-3", framework, backend=backend).together("end")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return whole_state(tmp_path_factory.getbasetemp())


@pytest.mark.timeout(400)
@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_sharded_job_whose_rank_dies_ends_with_the_bits_of_one_without_shards(
    victim: int, whole: dict[str, Any], tmp_path: Path
) -> None:
    job = run(tmp_path, "elastic_trainer.py", f"kill-{victim}-of-3", "torch", "optimizer")
    assert len(job.of("killed")) == 1
    assert job.together("begin")["step"] == 6, "the last commit"
    end = job.together("end")
    assert (end["step"], end["digest"]) == (whole["step"], whole["digest"]), "weights and moments"


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("backend", ["torch", "tensorflow", "jax"])
def test_a_sharded_keras_job_whose_rank_dies_ends_as_one_without_shards(backend: str, tmp_path: Path) -> None:
    right = whole_state(tmp_path, "keras", backend)
    (folder := tmp_path / "shards").mkdir()
    job = run(folder, "elastic_trainer.py", "kill-0-of-3", "keras", "optimizer", backend=backend)
    assert len(job.of("killed")) == 1
    assert job.together("begin")["step"] == 6, "the last commit"
    end = job.together("end")
    assert end["step"] == right["step"]
    if backend == "torch":
        assert end["digest"] == right["digest"], "weights and moments"
    for name, weights in right["weights"].items():
        np.testing.assert_allclose(end["weights"][name], weights, atol=1e-6, err_msg=name)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_job_with_sharded_gradients_continues_with_the_weights_of_one_without(
    whole: dict[str, Any], tmp_path: Path
) -> None:
    job = run(tmp_path, "elastic_trainer.py", "kill-1-of-3", "torch", "gradients")
    assert job.together("begin")["step"] == 6, "the last commit"
    end = job.together("end")
    assert end["step"] == whole["step"]
    for name, weights in whole["weights"].items():  # three ranks add up in another order
        np.testing.assert_allclose(end["weights"][name], weights, atol=1e-6, err_msg=name)


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("framework", "shard"),
    [
        ("torch", "optimizer"), ("keras", "optimizer"), pytest.param("torch", "gradients", marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_a_new_rank_of_a_trainer_gets_its_shard_and_nothing_is_lost(framework: str, shard: str, tmp_path: Path) -> None:
    job = run(tmp_path, "elastic_trainer.py", "grow-to-3", framework, shard)
    begin = job.together("begin", size=3)
    before = job.together("step", step=begin["step"])
    assert begin["digest"] == before["digest"], "weights and moments"
    job.together("end", size=3)


@pytest.mark.timeout(200)
def test_a_shard_that_is_lost_with_its_copy_is_an_error_on_every_rank_that_is_left(tmp_path: Path) -> None:
    job = run(tmp_path, "elastic_trainer.py", "kill-1+2-of-4", "torch", "optimizer,unsaved", fails=True)
    assert len(job.of("killed")) == 2
    said = (
        r"LostShardError: A part of the optimizer's state is lost: rank 1 \(host [\d.a-z]+\) and the keeper of its copy"
    )
    assert len(re.findall(said, job.output)) == 2
    assert not job.of("end")


@pytest.mark.long
@pytest.mark.timeout(200)
def test_a_run_whose_shard_is_lost_resumes_from_its_newest_checkpoint(whole: dict[str, Any], tmp_path: Path) -> None:
    job = run(tmp_path, "elastic_trainer.py", "kill-1+2-of-3", "torch", "optimizer")
    assert len(job.of("killed")) == 2
    assert "the last commit cannot be restored, and the run resumes from the checkpoint" in job.output
    assert job.one("begin", size=1)["step"] == 6
    assert job.one("end")["size"] == 1


@pytest.mark.long
@pytest.mark.timeout(200)
def test_errors_of_a_dead_ranks_gradients_are_in_the_last_commit(tmp_path: Path) -> None:
    job = run(tmp_path, "elastic_trainer.py", "kill-1-of-3", "torch", "topk:0.1")
    before, after = job.together("errors", size=3, step=6), job.together("errors", step=6)
    np.testing.assert_allclose(after["mean"], before["mean"], rtol=1e-6, atol=1e-9)
    assert np.abs(before["mean"]).max() > 0
    job.together("end")
