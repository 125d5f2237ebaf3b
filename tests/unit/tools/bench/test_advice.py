from __future__ import annotations

from dataclasses import replace

import pytest

from hvdtrain.tools.bench import advice
from hvdtrain.tools.bench.advice import StepFacts

WELL = StepFacts(
    ranks=2, local_ranks=2, cores=2, threads=1, data_plane="mpi", mpi_built=True, gradient_bytes=80_000_000,
    alpha_s=1e-4, beta_s_per_byte=2e-10, communication=0.05, data=0.01, data_s=1e-3, noise=0.02,
)  # fmt: skip
BUSY = replace(WELL, communication=0.3)

# Per rule: facts on which it speaks, what it then says, and facts on which it must be silent.
CASES = {
    "not-reduced": (replace(WELL, reduced=False), "2 ranks each train alone", [replace(WELL, ranks=1, reduced=False)]),
    "gloo-on-one-host": (
        replace(WELL, data_plane="gloo", mpi_built=False),
        "`hvdtrain build`",
        [
            WELL,
            replace(WELL, data_plane="gloo", hosts=2),
            replace(WELL, data_plane="gloo", ranks=1),
            replace(WELL, data_plane="gloo", device="cuda:0"),
        ],
    ),
    "oversubscribed": (
        replace(WELL, local_ranks=4),
        "4 ranks share 2 cores",
        [WELL, replace(WELL, local_ranks=4, device="cuda:0")],
    ),
    "too-many-threads": (
        replace(WELL, threads=2),
        "run with OMP_NUM_THREADS=1",
        [WELL, replace(WELL, threads=2, cores=4), replace(WELL, threads=0), replace(WELL, local_ranks=4)],
    ),
    "one-rank-lags": (
        replace(WELL, slowest=1, lag=0.2),
        "Rank 1 takes 20% of a step longer",
        [replace(WELL, lag=0.05)],
    ),
    "waits-for-data": (
        replace(WELL, data=0.4, data_s=0.1),
        "DataLoader(num_workers=...)",
        [WELL, replace(WELL, data=0.4, data_s=1e-4)],
    ),
    "communication-exposed": (BUSY, "exposed for 30% of a step", [WELL]),
    "latency-dominates": (
        replace(BUSY, gradient_bytes=1000),
        "latency dominates",
        [BUSY, replace(WELL, gradient_bytes=1000), replace(BUSY, gradient_bytes=1000, alpha_s=0.0)],
    ),
    "slow-link": (
        replace(BUSY, hosts=2, link_bytes_per_s=25e9 / 8),
        "25 Gb/s",
        [
            replace(BUSY, link_bytes_per_s=25e9 / 8),
            replace(BUSY, hosts=2, link_bytes_per_s=400e9 / 8),
            replace(BUSY, hosts=2),
            replace(BUSY, hosts=2, link_bytes_per_s=25e9 / 8, wire="bf16"),
            replace(WELL, hosts=2, link_bytes_per_s=25e9 / 8),
        ],
    ),
    "noisy": (replace(WELL, noise=0.4), "spreads over 40% of the median", [WELL]),
}


def test_every_rule_has_a_case() -> None:
    assert set(advice.RULES) == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_rule_speaks_where_it_applies(name: str) -> None:
    facts, said, _ = CASES[name]
    assert said in advice.advise(facts)[name]


@pytest.mark.parametrize("name", CASES)
def test_rule_is_silent_where_it_does_not_apply(name: str) -> None:
    for facts in CASES[name][2]:
        assert name not in advice.advise(facts), facts


def test_a_run_without_faults_gets_no_advice() -> None:
    assert advice.advise(WELL) == {}


def test_gloo_by_choice_is_told_from_gloo_for_want_of_mpi() -> None:
    assert "unset HOROVOD_CPU_OPERATIONS" in advice.advise(replace(WELL, data_plane="gloo"))["gloo-on-one-host"]


def test_tensorflow_is_told_its_own_names_of_threads() -> None:
    said = advice.advise(replace(WELL, threads=2, framework="keras/tensorflow"))["too-many-threads"]
    assert "TF_NUM_INTRAOP_THREADS=1 TF_NUM_INTEROP_THREADS=1" in said


def test_keras_is_told_of_its_own_loaders() -> None:
    slow = replace(WELL, data=0.4, data_s=0.1, framework="keras/jax")
    assert "PyDataset" in advice.advise(slow)["waits-for-data"]
