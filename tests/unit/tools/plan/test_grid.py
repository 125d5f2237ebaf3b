"""The forecast of stages and shards, by numbers computed by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from in_process import assert_refused, document, plan

from hvdtrain.telemetry.memory import Parts
from hvdtrain.tools.plan.grid import GridPlan
from hvdtrain.tools.plan.memory import MemoryPlan
from hvdtrain.tools.plan.model import Algorithm, Cluster, Step

MS = 1e-3
# 4 samples a second, 1 GB of gradients; a ring at 1 GB/s, or 10 GB/s in a host, that loses no time otherwise.
STEP = Step(compute_s=1.0, gradient_bytes=1e9, samples=4, backward_share=0.6)
PARTS = Parts(weights=1e9, gradients=1e9, optimizer=2e9, activations=8e9)
HOSTS_OF_ONE = Cluster(
    link_bytes_per_s=1e9, link_efficiency=1.0, intra_bytes_per_s=1e10, algorithm=Algorithm.ring, bucket_bytes=1e9,
    latency_s=0.0, intra_latency_s=0.0, overhead_s=0.0,
)  # fmt: skip


def cluster(**others: Any) -> Cluster:
    return Cluster(**{**vars(HOSTS_OF_ONE), **others})


def grid(
    ranks: int, *, on: Cluster = HOSTS_OF_ONE, parts: Parts = PARTS, limit: float | None = None, **division: Any
) -> GridPlan:
    memory = MemoryPlan(parts=parts, ranks=ranks, batch_size=STEP.samples, limit=limit)
    return GridPlan(step=STEP, cluster=on, memory=memory, **division)


@pytest.mark.parametrize(("stages", "micro_batches", "bubble"), [(4, 12, 3 / 15), (2, 8, 1 / 9), (2, 2, 1 / 3)])
def test_stages_wait_for_their_share_of_a_step(stages: int, micro_batches: int, bubble: float) -> None:
    found = grid(8, stages=stages, micro_batches=micro_batches)
    times = found.divided().times
    assert found.bubble == pytest.approx(bubble)
    assert times["bubble"] / (times["T_comp"] + times["bubble"]) == pytest.approx(bubble)


def test_a_step_of_stages_is_the_sum_of_its_parts() -> None:
    found = grid(8, stages=4, micro_batches=12, boundary_bytes=1e6)
    times = found.divided().times
    assert times["bubble"] == pytest.approx(0.25)  # 3 micro-batches of 1/12 s
    # A micro-batch of 16/12 samples takes 1.33 ms; 12 + 3 times, to the next stage and back.
    assert times["messages of stages"] == pytest.approx(15 * 2 * 16 / 12 * MS)
    # 2 replicas allreduce a quarter of 1 GB in one bucket, which is ready when backward ends.
    assert times["exposed allreduce"] == pytest.approx(0.25)
    assert times["exchanges of shards"] == times["waiting"] == 0
    assert found.divided().step_s == pytest.approx(1 + 0.25 + 0.04 + 0.25)
    assert found.plain().step_s == pytest.approx(1 + 2 * 7 / 8)


def test_replicas_reduce_beside_the_last_micro_batchs_backward() -> None:
    found = grid(8, on=cluster(bucket_bytes=62.5e6), stages=4, micro_batches=12)
    # 4 buckets in 0.25 s; the first is ready after a quarter of 0.6/12 s.
    assert found.divided().times["exposed allreduce"] == pytest.approx(0.25 - 0.05 * 3 / 4)


@pytest.mark.parametrize(
    ("stages", "shards", "per_host", "message_s"),
    [
        (2, 1, 1, 1 * MS + 2 * MS + 3 * MS),  # 1 MB over the link, a hop, and the start
        (2, 2, 4, 0.1 * MS + 4 * MS + 3 * MS),  # within a host
        (4, 2, 4, 4 * MS + 2 * MS + 3 * MS),  # 2 MB over a link that two shards use at once
        (2, 8, 4, 4 * MS + 2 * MS + 3 * MS),  # 1 MB over a link that all ranks of a host use
    ],
)
def test_the_slowest_message_between_stages_sets_the_pace(
    stages: int, shards: int, per_host: int, message_s: float
) -> None:
    on = cluster(ranks_per_host=per_host, latency_s=2 * MS, intra_latency_s=4 * MS, overhead_s=3 * MS)
    found = grid(16, on=on, stages=stages, shards=shards, micro_batches=8, boundary_bytes=1e6)
    assert found.divided().times["messages of stages"] == pytest.approx((8 + stages - 1) * 2 * message_s)


def test_an_inner_stage_sends_to_both_neighbours() -> None:
    two, four = (grid(4, stages=stages, micro_batches=4, boundary_bytes=1e6) for stages in (2, 4))
    assert two.divided().sent == {"stages": 8e6, "shards": 0, "replicas": 2 * 1 / 2 * 0.5e9}
    assert four.divided().sent == {"stages": 2 * 16e6, "shards": 0, "replicas": 0}
    assert four.plain().sent == {"replicas": 2 * 3 / 4 * 1e9}


def test_shards_gather_weights_twice_and_scatter_gradients_once() -> None:
    found = grid(8, on=cluster(ranks_per_host=4, overhead_s=1 * MS), shards=4).divided()
    assert found.sent["shards"] == 3 / 4 * 3e9
    assert found.times["exchanges of shards"] == pytest.approx(3 * (0.075 + 1 * MS))
    # The four parts of 0.25 GB share the link, after backward.
    assert found.sent["replicas"] == 0.25e9
    assert found.times["exposed allreduce"] == pytest.approx(1 + 1 * MS)
    assert found.times["bubble"] == found.times["messages of stages"] == 0


def test_shards_of_stages_exchange_for_each_micro_batch() -> None:
    found = grid(4, on=cluster(ranks_per_host=4, bucket_bytes=0.25e9, overhead_s=1 * MS), stages=2, shards=2,
                 micro_batches=4).divided()  # fmt: skip
    assert found.sent["shards"] == 4 * 1 / 2 * 1.5e9
    # Each of three exchanges of 0.5 GB in two pieces.
    assert found.times["exchanges of shards"] == pytest.approx(4 * 3 * (1 / 2 * 0.05 + 2 * MS))


@pytest.mark.parametrize(
    ("division", "parts"),
    [
        ({"stages": 4, "micro_batches": 16}, (0.25e9, 0.25e9, 0.5e9, 8e9 * 4 / 16)),
        ({"stages": 4, "micro_batches": 16, "schedule": "gpipe"}, (0.25e9, 0.25e9, 0.5e9, 8e9)),
        ({"stages": 4, "micro_batches": 2, "schedule": "gpipe"}, (0.25e9, 0.25e9, 0.5e9, 8e9)),
        ({"stages": 2, "shards": 4, "micro_batches": 4}, (0.125e9, 0.125e9, 0.25e9, 4e9)),
        ({"shards": 4}, (0.25e9, 0.25e9, 0.5e9, 8e9)),
    ],
)
def test_a_rank_holds_its_part_and_the_micro_batches_in_flight(
    division: dict[str, Any], parts: tuple[float, ...]
) -> None:
    found = grid(8, **division)
    held = found.divided().memory
    assert (held.weights, held.gradients, held.optimizer, held.activations) == parts
    assert held.buckets == (min(128 * 2**20, held.gradients) if found.replicas > 1 else 0)


@pytest.mark.parametrize(
    ("division", "message"),
    [
        ({"stages": 3, "micro_batches": 3}, r"a replica of Grid\(stages=3\) takes 3 ranks: give --ranks 6 or 9"),
        ({"stages": 3, "shards": 4, "micro_batches": 3}, "takes 12 ranks: give --ranks 12. Received: 8"),
        ({"stages": 4, "micro_batches": 3}, "must be from 4, for --schedule 1f1b, to 16, .* Received: 3"),
        ({"stages": 4, "micro_batches": 17, "schedule": "gpipe"}, "must be from 1, for --schedule gpipe, to 16"),
        ({"stages": 2, "micro_batches": 2, "boundary_bytes": float("nan")}, "what a sample passes between stages"),
    ],
)
def test_what_cannot_be_is_refused_with_the_numbers_that_work(division: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grid(8, **division)


def test_replicas_divided_between_hosts_are_refused() -> None:
    with pytest.raises(ValueError, match="give --ranks-per-host 3, or a multiple or divisor of it"):
        grid(6, on=cluster(ranks_per_host=4), shards=3)
    assert grid(6, on=cluster(ranks_per_host=8), shards=3).replicas == 2  # one host


def test_it_says_whether_and_why_a_grid_pays() -> None:
    slow = {"stages": 4, "micro_batches": 4, "boundary_bytes": 1e9}
    fast = {"stages": 4, "micro_batches": 12, "boundary_bytes": 1e6}
    both = "a step takes 1.54 s, without the Grid 2.75 s"
    assert grid(8, **fast).verdict() == (
        True, f"Grid(stages=4) pays: {both}. A rank holds 3.8 GB instead of 12 GB: --limit says whether it has to.",
    )  # fmt: skip
    assert grid(8, limit=13e9, **fast).verdict() == (
        True, f"Grid(stages=4) pays: {both}. The whole model fits: 12 GB of 13 GB.",
    )  # fmt: skip
    pays, why = grid(8, limit=11e9, **slow).verdict()
    assert not pays
    assert why.startswith("Grid(stages=4) does not pay: a step takes 58")
    assert why.endswith("The whole model needs 12 GB of 11 GB. It fits with Trainer(micro_batch=2), not counted here.")
    assert grid(8, limit=3e9, **fast).verdict() == (
        False, "Grid(stages=4) does not fit: a rank needs 3.8 GB of 3 GB. Give more stages or shards.",
    )  # fmt: skip


def test_a_grid_pays_where_nothing_else_fits_even_if_it_is_slower() -> None:
    # With all of the Trainer's options, each rank still has the weights, 1 GB, and half of them once more in bf16.
    pays, why = grid(8, limit=1e9, parts=replace(PARTS, activations=0.8e9), stages=8, micro_batches=32,
                     boundary_bytes=1e9).verdict()  # fmt: skip
    assert pays
    assert why.startswith("Grid(stages=8) pays: a rank needs 700 MB of 1 GB, and for the whole model 4.8 GB, with the ")
    assert (
        "with the Trainer's options at least 1.47 GB. If that fitted, a step takes 79.2 s, without the Grid 2.75 s."
        in why
    )


def test_unknown_activations_are_said_to_be_unknown() -> None:
    unknown = replace(PARTS, activations=None)
    pays, why = grid(8, limit=5e9, parts=unknown, stages=4, micro_batches=12, boundary_bytes=1e6).verdict()
    assert pays
    assert why.endswith("The whole model fits: 4 GB of 5 GB before any activations.")


STAGES = [
    "--step", "2s", "--batch-size", "8", "--parameters", "1.3B", "--activations", "8GB", "--ranks", "16",
    "--link", "10Gb/s", "--stages", "4", "--boundary", "8MB",
]  # fmt: skip


def test_the_command_shows_both_and_the_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(monkeypatch, *STAGES, "--limit", "40GB") == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "on 16 ranks data parallelism Grid(stages=4)" in words
    assert "bubble 0 s 375 ms" in words
    assert "sent to stages 0 B 512 MB" in words
    assert "sent to replicas 9.75 GB 1.95 GB" in words
    assert "optimizer state 10.4 GB 2.6 GB" in words
    assert "A pipeline's batch is 32 samples in 16 micro-batches, 1f1b" in words
    assert "wait for each other 16% of their time" in words
    assert words.endswith("The whole model fits: 28.9 GB of 40 GB.")
    assert "Grid(stages=4) pays: a step takes" in words


def test_json_has_both(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = document(monkeypatch, capsys, *STAGES, "--schedule", "gpipe", "--micro-batches", "6", "--shards", "2",
                     "--moments", "1")  # fmt: skip
    assert (found["stages"], found["shards"], found["micro_batches"], found["schedule"]) == (4, 2, 6, "gpipe")
    assert (found["ranks"], found["replicas"], found["limit"]) == (16, 2, None)
    assert found["bubble"] == pytest.approx(3 / 9)
    assert found["grid"]["memory"]["optimizer"] == 5.2e9 / 8
    assert found["data_parallel"]["memory"]["optimizer"] == 5.2e9
    for name in ("data_parallel", "grid"):
        assert found[name]["step_s"] == pytest.approx(sum(found[name]["times"].values()))
    assert found["pays"] is (found["grid"]["step_s"] < found["data_parallel"]["step_s"])
    assert "--limit says whether it has to" in found["why"]


def test_gradients_are_the_weights_unless_they_are_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = document(monkeypatch, capsys, *STAGES, "--gradients", "2.6GB")["data_parallel"]
    assert (given["memory"]["weights"], given["memory"]["gradients"]) == (5.2e9, 2.6e9)
    shards = ["--step", "2s", "--batch-size", "8", "--gradients", "1GB", "--ranks", "4", "--shards", "4"]
    found = document(monkeypatch, capsys, *shards, "--link", "1GB/s")["grid"]["memory"]
    assert (found["weights"], found["gradients"], found["optimizer"], found["activations"]) == (2.5e8, 2.5e8, 5e8, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (STAGES[:-2], "--boundary missing: give what one sample passes from a stage to the next"),
        ([*STAGES, "--ranks", "18"], "a replica of Grid(stages=4) takes 4 ranks: give --ranks 16 or 20. Received: 18"),
        ([*STAGES, "--micro-batches", "3"], "--micro-batches must be from 4, for --schedule 1f1b, to 32"),
        ([*STAGES, "--schedule", "1f1"], "--schedule must be 1f1b or gpipe. Received: 1f1"),
        ([*STAGES, "--memory"], "--memory is of whole models: leave it out"),
        ([*STAGES[:8], "--link", "1GB/s", "--shards", "2"], "--ranks missing: give it, or a --measured file"),
        ([*STAGES[:10], "--shards", "2"], "--link missing: give the speed between hosts, or a --ranks that"),
        (["--step", "1s", "--boundary", "1MB"], "--boundary is for --stages, which is missing"),
        (
            ["--step", "1s", "--shards", "2", "--micro-batches", "4"],
            "--micro-batches is for --stages, which is missing",
        ),
        (["--limit", "1GB", "--step", "1s"], "--limit is for --memory, --stages or --shards, which is missing"),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert_refused(monkeypatch, capsys, arguments, message)
